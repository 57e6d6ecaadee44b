"""COCO-LM (Meng et al. 2021): detection, correction, and contrast of a sequence with its crop.

Command:  python -m electra_jax.train --config=configs/coco_lm.py:small --workdir=DIR
          --config.data.dir=SHARDS
Hardware: as the size after the colon, plus a second pass of the discriminator in each step.
Expected: docs/evidence.md has four layers of 128. The paper's Base is above ELECTRA's on MNLI in
          the same setting (Table 1).
"""

from ml_collections import ConfigDict

from electra_jax.config import load_size


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the size (`load_size`)."""
  c = load_size(arg)
  c.objective.name = "coco_lm"
  c.data.examples = "segments"  # one text a row
  return c
