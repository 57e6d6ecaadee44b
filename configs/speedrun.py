"""Ten minutes on one GPU: speedrun.py:electra, or a BERT in the same time, speedrun.py:bert.

Command:  make speedrun   (benchmarks/speedrun.py: shards, training, exports, tasks, one row)
     or:  python -m electra_jax.train --config=configs/speedrun.py:electra --workdir=DIR
          --config.data.dir=SHARDS
Hardware: one H100 or H200; set train.minutes for others.
Expected: docs/speedrun.md.

Both have the same network, batch and optimizer. electra is electra_mlm (detection and masked LM),
the best objective in docs/evidence.md. Its generator has the main network's width and a quarter of
its depth, so that both can be exported. Without dropout, attention runs in cuDNN. Width, depth,
vocabulary and batch: LOG.md, "What a second of an H200 teaches".
"""

from ml_collections import ConfigDict

from electra_jax.config import load

OBJECTIVES = {"electra": "electra_mlm", "bert": "bert"}


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration of the arm `arg`, by default electra."""
  if (arg or "electra") not in OBJECTIVES:
    raise ValueError(f"configs/speedrun.py takes {' or '.join(OBJECTIVES)}, got {arg!r}")
  c = load("modern.py", "17m")  # ModernBERT's blocks and gdes
  c.model.hidden_size = c.model.embedding_size = 512
  c.model.num_layers = 8
  c.model.num_heads = 8
  c.model.ffn_size = 768  # gated, 1.5 x width (ModernBERT, Ettin)
  c.model.max_positions = 512
  c.model.global_every = 1  # a window would see nearly all of 128 tokens
  c.model.dropout = 0.0
  c.objective.name = OBJECTIVES[arg or "electra"]
  c.objective.mask_prob = 0.25
  c.objective.mask_prob_schedule = ""
  if c.objective.name == "bert":
    c.generator = load("base.py").generator  # not used
  else:
    c.generator.depth_multiplier = 1 / 4
    c.objective.discriminator_weight = 5.0
  c.data.vocab_size = 16_384
  c.data.seq_length = 128
  c.data.examples = "segments"
  c.data.vocab_train_mb = 50.0
  c.optimizer.name = "muon"
  c.optimizer.learning_rate = 1.6e-3  # 1.6e-2 in 300 steps, 8e-3 in 900 (LOG.md)
  c.optimizer.warmup_steps = 300
  c.optimizer.decay_steps = 0
  c.optimizer.decay_frac = 0.3
  c.optimizer.weight_decay = 0.1
  c.train.batch_size = 512
  c.train.steps = 100_000  # more than the minutes allow
  c.train.minutes = 8.0
  c.eval.every_steps = 2000
  c.eval.batch_size = 512
  c.checkpoint.every_steps = 2000
  c.checkpoint.keep = 1
  c.health.after_step = 2000
  c.log.trackers = ""
  return c
