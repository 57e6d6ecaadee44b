"""Replace MLM: predicts masked tokens from a text filled in by a generator (Section 3.4).

Command:  python -m electra_jax.train --config=configs/replace_mlm.py:small --workdir=DIR
          --config.data.dir=SHARDS
Hardware: as the size after the colon.
Expected: GLUE dev average 82.4 at base size, where BERT has 82.2 (paper, Table 5).
"""

from ml_collections import ConfigDict

from electra_jax.config import load_size


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the size (`load_size`)."""
  c = load_size(arg)
  c.objective.name = "replace_mlm"
  c.objective.discriminator_weight = 1.0  # of the main network's masked-LM loss
  return c
