"""ELECTRA as in the paper, at any size: joint training (Section 3).

Command:  python -m electra_jax.train --config=configs/electra.py:small --workdir=DIR
          --config.data.dir=SHARDS
Hardware: as the size after the colon.
Expected: GLUE dev average 85.1 at base size, 79.9 at small size (paper, Table 1).
"""

from ml_collections import ConfigDict

from electra_jax.config import load_size


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the size (`load_size`)."""
  c = load_size(arg)
  c.objective.name = "electra"
  return c
