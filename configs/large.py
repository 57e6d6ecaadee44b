"""ELECTRA-Large as in the paper (Clark et al. 2020, Table 6): 335 M parameters, 400 K steps.

Command:  python -m electra_jax.train --config=configs/large.py --workdir=DIR
          --config.data.dir=SHARDS
Hardware: a TPU pod or several GPU nodes. 1,750,000 steps give the paper's ELECTRA-1.75M.
Expected: GLUE dev average 89.0 after fine-tuning, on XLNet's 33 B tokens (paper, Table 2).
"""

from ml_collections import ConfigDict

from electra_jax.config import load


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is not used."""
  c = load("base.py", arg)
  c.model.hidden_size = 1024
  c.model.num_layers = 24
  c.model.num_heads = 16
  c.model.ffn_size = 4096
  c.model.embedding_size = 1024
  c.generator.width_multiplier = 1 / 4
  c.objective.mask_prob = 0.25
  c.train.batch_size = 2048
  c.train.steps = 400_000
  return c
