"""BERT with dynamic masking and without next-sentence prediction: the paper's baseline.

Command:  python -m electra_jax.train --config=configs/bert.py:small --workdir=DIR
          --config.data.dir=SHARDS
Hardware: as the size after the colon.
Expected: GLUE dev average 82.2 at base size (paper, Table 5).
"""

from ml_collections import ConfigDict

from electra_jax.config import load_size


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the size (`load_size`)."""
  c = load_size(arg)
  c.objective.name = "bert"
  c.objective.temperature_schedule = ""  # one network, one optimizer, no samples
  c.generator.kind, c.generator.tie = "transformer", "embeddings"  # none is used or tied
  c.optimizer.separate_optimizers = False
  c.optimizer.generator_learning_rate = None
  return c
