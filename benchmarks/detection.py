"""Why detection learns later than masked LM: an experiment at equal FLOPs.

  electra-jax experiment benchmarks/detection.py:DATA --out=DIR --at-once=2
      --rows=benchmarks/results/detection_rows.jsonl [--only=ARM,...]

DATA has text.txt to pretrain on.

In earlier trials a discriminator stayed at chance for thousands of steps, while a masked LM left
the unigram entropy within hundreds. The arms test explanations (LOG.md, "Why detection learns
late"):

- the detection loss dominates Adam or the clipping, or has too little weight: `weight 50`, `weight
  1`, both with AdamW and without clipping, `one optimizer`, `slow` and `fast discriminator`.
- the embeddings get conflicting gradients: `gdes` and `own embeddings` would be ahead.
- the generator is too strong to detect (`generator 1/8` ahead), too weak to learn from (`generator
  1/2`), or moves (`frozen generator`, a masked LM of the main network's size).
- the gradient has no first-order term in the product of token and context: the discriminator stays
  at chance on fixed noise (`unigram`), also with more tokens per step, and learns at once if it
  starts from a masked LM (`unigram from bert`) or has a head that multiplies them (`slots,
  product`, compared with `slots in text`).
- the optimizer: `AdamW` and `unigram, AdamW`, at their rates, would stay at chance.
- depth or width: `deep`, `wide`.

Each arm has three seeds, or one if it takes more FLOPs; most rows so far are of the first seed. The
measure is the AUC against the generator and against fixed noise on held-out documents.
"""

from pathlib import Path

from electra_jax.experiments.definition import Arm, Experiment

CONFIG = Path(__file__).with_name("evidence_config.py")
SLOTS = Path(__file__).with_name("detection_config.py")
RATE, ADAMW_RATE = 3.2e-3, 1.2e-3
START = {"after": "bert", "times": 2.0}  # the first run costs as much as the arm's steps
WEIGHT_50, WEIGHT_1 = ({"objective.discriminator_weight": x} for x in (50.0, 1.0))
UNIGRAM, ADAMW = {"generator.kind": "unigram"}, {"optimizer.name": "adamw"}
AT_RATES = ADAMW | {
  "optimizer.learning_rate": ADAMW_RATE, "optimizer.generator_learning_rate": 2e-3
}  # fmt: skip
FROZEN = {
  "generator.kind": "frozen", "generator.tie": "none", "generator.width_multiplier": 1.0,
  "objective.discriminator_weight": 5.0,
}  # fmt: skip
DEEP = {
  "model.num_layers": 8, "model.unroll": 8, "model.hidden_size": 96, "model.num_heads": 3,
  "model.ffn_size": 256,
}  # fmt: skip
WIDE = {
  "model.num_layers": 2, "model.unroll": 2, "model.hidden_size": 192, "model.num_heads": 6,
  "model.ffn_size": 512,
}  # fmt: skip


def arm(config: str, fields: dict | None = None, rate: float = RATE, **more) -> Arm:
  """Returns a contestant with one rate; `config` is an argument of evidence_config.py."""
  return Arm(f"{more.pop('file', CONFIG)}:{config}", fields or {}, (rate,), **more)


def tuned(fields: dict | None = None, rate: float = RATE, **more) -> Arm:
  """Returns a contestant of ELECTRA's objective with the quickstart's recipe."""
  return arm("electra-tuned", fields, rate, **more)


ARMS = {
  "bert": arm("bert"),
  "tuned": tuned(),
  "weight 50": tuned(WEIGHT_50),
  "weight 1": tuned(WEIGHT_1),
  "one optimizer": arm("electra", {"objective.discriminator_weight": 5.0}),
  # The rate of the discriminator; the generator's is unchanged.
  "slow discriminator": tuned({"optimizer.learning_rate": 1.6e-3}, RATE / 2),
  "fast discriminator": tuned({"optimizer.learning_rate": 6.4e-3}, RATE * 2),
  "gdes": tuned({"generator.tie": "gdes"}),
  "own embeddings": tuned({"generator.tie": "none"}),
  "generator 1/8": tuned({"generator.width_multiplier": 1 / 8}),
  "generator 1/2": tuned({"generator.width_multiplier": 1 / 2}),
  "AdamW": tuned(AT_RATES, ADAMW_RATE),
  "AdamW, weight 50": tuned(AT_RATES | WEIGHT_50, ADAMW_RATE),
  "AdamW, weight 1": tuned(AT_RATES | WEIGHT_1, ADAMW_RATE),
  "AdamW, weight 50, no clipping": tuned(
    AT_RATES | WEIGHT_50 | {"optimizer.clip_norm": 1e9}, ADAMW_RATE
  ),
  "no curriculum": tuned({"objective.temperature_schedule": ""}),
  "words too": arm("electra_mlm-tuned"),
  "from bert": tuned(**START),
  "frozen generator": arm("electra", FROZEN, **START, start_fields=("generator.init_from",)),
  "unigram": arm("electra", UNIGRAM),
  "unigram, AdamW": arm("electra", UNIGRAM | ADAMW, ADAMW_RATE),
  "unigram from bert": arm("electra", UNIGRAM, **START),
  "unigram, 4 x the tokens": arm("electra", UNIGRAM | {"train.batch_size": 64}, times=4.0, seeds=1),
  "unigram, 16 x the tokens": arm(
    "electra", UNIGRAM | {"train.batch_size": 256}, times=16.0, seeds=1
  ),
  "slots in text": arm("in_text", file=SLOTS),
  "slots, product": arm("product", file=SLOTS),
  "deep": tuned(DEEP),
  "wide": tuned(WIDE),
}


def get_experiment(arg: str = "data") -> Experiment:
  """Returns the experiment; `arg` is the folder of the data."""
  data = Path(arg)
  return Experiment(
    arms=ARMS,
    budgets=(1e13,),
    control="tuned",
    fields={"data.dir": str(data / "shards"), "data.sources": f"text:{data / 'text.txt'}"},
    heldout=("mlm_loss", "rtd_auc", "unigram_auc"),
  )
