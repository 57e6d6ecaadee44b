"""METRO (Bajaj et al. 2022): detection, and correction of the replaced tokens, in one pass.

Command:  python -m electra_jax.train --config=configs/metro.py:small --workdir=DIR
          --config.data.dir=SHARDS
Hardware: as the size after the colon.
Expected: docs/evidence.md has four layers of 128. The paper's networks are deeper than ELECTRA's
          and trained on more text: do not compare their scores with ELECTRA's.
"""

from ml_collections import ConfigDict

from electra_jax.config import load_size


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the size (`load_size`)."""
  c = load_size(arg)
  c.objective.name = "metro"
  return c
