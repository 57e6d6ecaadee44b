"""ELECTRA 15%: the discriminator learns from the masked positions only (Section 3.4).

Command:  python -m electra_jax.train --config=configs/electra_15.py:small --workdir=DIR
          --config.data.dir=SHARDS
Hardware: as the size after the colon.
Expected: GLUE dev average 82.4 at base size, where ELECTRA has 85.0 (paper, Table 5).
"""

from ml_collections import ConfigDict

from electra_jax.config import load_size


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the size (`load_size`)."""
  c = load_size(arg)
  c.objective.name = "electra_15"
  return c
