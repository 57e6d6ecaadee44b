"""ELECTRA whose main network also predicts the masked words: detection and masked LM in one pass.

Command:  python -m electra_jax.train --config=configs/electra_mlm.py:small --workdir=DIR
          --config.data.dir=SHARDS
Hardware: as the size after the colon.
Expected: docs/evidence.md has four layers of 128. Detection has 5 times the weight of masked LM;
          at the paper's 50 the masked LM would hardly count.
"""

from ml_collections import ConfigDict

from electra_jax.config import load_size


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the size (`load_size`)."""
  c = load_size(arg)
  c.objective.name = "electra_mlm"
  c.objective.discriminator_weight = 5.0
  return c
