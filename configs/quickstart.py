"""A small ELECTRA on the English that every Python installation carries, in minutes on two cores.

Command:  make quickstart
     or:  python -m electra_jax.data.build --config=configs/quickstart.py
          python -m electra_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
Hardware: two CPU cores, at most five minutes of training.
Expected: held-out discriminator AUC 0.82 (0.77 with other initial weights); masked-LM loss
          4.6 nats (4.4), the held-out unigram entropy being 6.07.

Short sequences, shallow networks and large initial weights: what a network learns last is to look
at the neighbours of a token, and it finds them sooner among few positions (LOG.md).
"""

from ml_collections import ConfigDict

from electra_jax.config import load


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is not used."""
  c = load("base.py", arg)
  c.model.hidden_size = 128
  c.model.num_layers = 2
  c.model.num_heads = 4
  c.model.ffn_size = 512
  c.model.embedding_size = 128
  c.model.max_positions = 16
  c.model.dropout = 0.0  # a few epochs at most: nothing to overfit
  c.model.attention_dropout = 0.0
  c.model.init_stddev = 0.1  # 0.02 at the paper's widths: about 0.5 to 1 / sqrt(width)
  c.model.unroll = 2
  c.generator.width_multiplier = 1 / 4
  c.objective.mask_prob = 0.25  # more to learn from in each step
  c.data.dir = "runs/quickstart/data"
  c.data.vocab_size = 2048
  c.data.seq_length = 16
  c.data.holdout_frac = 0.02
  c.optimizer.name = "adamw"  # a short run needs the bias correction
  c.optimizer.schedule = "joined"
  c.optimizer.b2 = 0.98
  c.optimizer.learning_rate = 7e-4
  c.optimizer.decay_power = 0.5  # stays high for longer: the networks find their feet late
  c.optimizer.warmup_steps = 100
  c.health.after_step = 2000
  c.train.batch_size = 64
  c.train.steps = 7000
  c.eval.every_steps = 1000
  c.eval.max_examples = 2048
  c.checkpoint.every_steps = 1000
  c.log.every_steps = 100
  return c
