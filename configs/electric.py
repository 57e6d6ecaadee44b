"""Electric: an energy for every token, against two-tower noise (Clark et al. 2020b).

Command:  python -m electra_jax.train --config=configs/electric.py:small --workdir=DIR
          --config.data.dir=SHARDS
Hardware: as the size after the colon; the paper's base took 16 TPUv2 three days.
Expected: GLUE dev average 84.1 at base size, where ELECTRA has 85.1 (Electric, Section 4).
          python -m electra_jax.score gives pseudo-log-likelihoods.
"""

from ml_collections import ConfigDict

from electra_jax.config import load_size


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the size (`load_size`)."""
  c = load_size(arg)
  c.objective.name = "electric"
  c.objective.temperature_schedule = ""  # the loss uses the probabilities of the samples
  c.generator.kind = "two_tower"
  c.generator.depth_multiplier = 1.0
  c.generator.width_multiplier = 1 / 4  # each tower: 192 at base size
  if arg in (None, "base"):
    c.optimizer.learning_rate = 5e-4  # (Electric, Table 3)
    c.train.steps = 700_000
  return c
