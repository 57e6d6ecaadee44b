"""Causal language modelling with the main network, to start an encoder from.

Command:  python -m electra_jax.train --config=configs/clm.py:small --workdir=CAUSAL
          --config.data.dir=SHARDS
          then any objective, such as bert.py:small, with --config.init_from=CAUSAL
Hardware: as the size after the colon.
Expected: arXiv:2507.00994 finds causal before masked language modelling better than either alone at
          equal compute.
"""

from ml_collections import ConfigDict

from electra_jax.config import load


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the size (`load_size`)."""
  c = load("bert.py", arg)
  c.objective.name = "clm"
  return c
