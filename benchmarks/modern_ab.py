"""Modern blocks compared with the paper's, part by part, at equal FLOPs: an experiment.

  electra-jax experiment benchmarks/modern_ab.py:DATA --out=DIR --at-once=2
      --rows=benchmarks/results/modern_ab_rows.jsonl [--only=ARM,...]

DATA has text.txt to pretrain on, chunk/train.txt and chunk/test.txt of CoNLL-2000 and pairs.jsonl
(of BLiMP).

Questions: do modern blocks learn more from the same FLOPs (including the generator's) than the
paper's blocks, and which parts of them; does Muon learn more than AdamW, `gdes` than shared
embeddings, a narrow deep generator than a wide shallow one, packed rows than two-segment examples?
The table has the difference from `modern` with its standard error; a part is credited if it helps
by more than two standard errors.

`modern`, `paper` and `muon` are trained once at each of four learning rates, of which the one with
the lowest masked-LM loss on the training text in the last tenth of the steps is chosen. Every arm
is trained with three seeds at the rate of the arm that it changes, scores 6,700 of the minimal
pairs with its discriminator and with its generator, and is fine-tuned on chunking, as are random
weights of the modern and the paper's shape. `packed` is evaluated on packed rows, so only its pairs
and chunking are comparable.
"""

from pathlib import Path

from electra_jax.experiments.definition import Arm, Experiment, Pairs, Task

# Changes to configs/quickstart.py in every run and the build.
RECIPE = {
  "generator.width_multiplier": 5 / 16,
  "generator.depth_multiplier": 1.0,
  "data.vocab_size": 8192,
  "data.holdout_frac": 0.01,
  "data.vocab_train_mb": 20.0,
  "model.max_positions": 128,
  "train.batch_size": 16,
  "eval.every_steps": 0,
  "eval.max_examples": 2048,
  "log.trackers": "",
  "optimizer.name": "adamw",
  "optimizer.learning_rate": 1.2e-3,  # the ratio to the generator's is kept
  "optimizer.generator_learning_rate": 2e-3,
  "model.global_every": 1,
  "model.local_rope_theta": 10_000.0,
}
# The paper's blocks, where configs/quickstart.py has ModernBERT's.
PAPER_BLOCKS = {
  "model.ffn_size": 512,
  "model.block": "post_norm",
  "model.norm": "layer_norm",
  "model.layer_norm_eps": 1e-12,
  "model.feed_forward": "gelu",
  "model.positions": "learned",
  "model.biases": True,
  "model.token_types": True,
  "model.first_norm": True,
  "model.head_norm": False,
  "model.init_stddev": 0.1,
}
# The fourth rate of each was added because the third was the best of three.
MODERN_RATES, PAPER_RATES = (8e-4, 1.6e-3, 3.2e-3, 6.4e-3), (3.5e-4, 7e-4, 1.4e-3, 2.8e-3)
CHANGES = {  # of `modern`, at its rate
  "post-norm": {"model.block": "post_norm", "model.first_norm": True},
  "learned positions": {"model.positions": "learned"},
  "no gate": {"model.feed_forward": "gelu", "model.ffn_size": 576},
  "biases": {"model.biases": True, "model.norm": "layer_norm"},
  "windows of 16": {
    "model.global_every": 3, "model.window": 16, "model.local_rope_theta": 1000.0
  },
  "gdes": {"generator.tie": "gdes"},
  "wide shallow generator": {
    "generator.width_multiplier": 0.5, "generator.depth_multiplier": 0.25
  },
}  # fmt: skip


def get_experiment(arg: str = "data") -> Experiment:
  """Returns the experiment; `arg` is the folder of the data."""
  data = Path(arg)
  segments, packed = data / "shards" / "segments", data / "shards" / "packed"
  own = {"data.dir": packed, "data.examples": "packed", "data.vocab": segments / "vocab.txt"}
  return Experiment(
    arms={
      "modern": Arm("quickstart", rates=MODERN_RATES),
      "paper": Arm("quickstart", PAPER_BLOCKS, PAPER_RATES),
      "muon": Arm("quickstart", {"optimizer.name": "muon"}, MODERN_RATES),
      **{k: Arm("quickstart", fields, rate_of="modern") for k, fields in CHANGES.items()},
      "packed": Arm("quickstart", {k: str(v) for k, v in own.items()}, rate_of="modern"),
      "fresh weights": Arm(untrained="modern"),
      "fresh weights, paper": Arm(untrained="paper"),
    },
    budgets=(2e13,),
    control="modern",
    fields=RECIPE | {"data.dir": str(segments), "data.sources": f"text:{data / 'text.txt'}"},
    choose="train/mlm_loss",
    heldout=("mlm_loss", "rtd_auc", "unigram_auc"),
    pairs=Pairs(str(data / "pairs.jsonl"), 6_700, lambda config: ("rtd", "mlm")),
    tasks={
      "chunk_f1": Task(
        "finetune/tagging:chunk",
        {
          "data.train": data / "chunk" / "train.txt",
          "data.dev": data / "chunk" / "test.txt",
          "train.epochs": 2.0,
          "data.max_length": 64,
          "data.buckets": 2,
          "optimizer.learning_rate": 5e-4,
          "model.head": "linear",
        },
      )
    },
  )
