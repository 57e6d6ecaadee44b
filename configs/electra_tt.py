"""ELECTRA-TT: ELECTRA with Electric's two-tower generator (Clark et al. 2020b, Section 4.2).

Command:  python -m electra_jax.train --config=configs/electra_tt.py:small --workdir=DIR
          --config.data.dir=SHARDS
Hardware: as the size after the colon.
Expected: word error rates 5.22 and 17.01 in rescoring LibriSpeech (Electric, Table 4).
"""

from ml_collections import ConfigDict

from electra_jax.config import load_size


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the size (`load_size`)."""
  c = load_size(arg)
  c.generator.kind = "two_tower"
  c.generator.depth_multiplier = 1.0
  c.generator.width_multiplier = 1 / 4
  return c
