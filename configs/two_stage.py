"""Two stages: a masked language model, then a discriminator of the same size (Section 3.2).

Command:  python -m electra_jax.train --config=configs/two_stage.py:stage1,small --workdir=ONE
          --config.data.dir=SHARDS
          python -m electra_jax.train --config=configs/two_stage.py:stage2,small --workdir=TWO
          --config.data.dir=SHARDS --config.init_from=ONE --config.generator.init_from=ONE
Hardware: as the size; each stage takes half of its steps.
Expected: worse than joint training (paper, Figure 3). Without --config.init_from the discriminator
          may predict the majority class for ever.

The second stage samples from the first stage's network, which stays frozen, and initialises its
discriminator with a copy.
"""

from ml_collections import ConfigDict

from electra_jax.config import load_size


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is stage1 or stage2, then optionally a comma and the size."""
  stage, _, size = (arg or "stage1").partition(",")
  if stage not in ("stage1", "stage2"):
    raise ValueError(f"configs/two_stage.py takes :stage1 or :stage2, got {stage!r}")
  c = load_size(size)
  c.train.steps = c.train.steps // 2
  c.objective.temperature_schedule = ""  # one trained network a stage, one optimizer
  c.optimizer.separate_optimizers = False
  c.optimizer.generator_learning_rate = None
  if stage == "stage1":
    c.objective.name = "bert"
    c.generator.tie = "embeddings"  # nothing is tied
  else:
    c.generator.kind = "frozen"
    c.generator.tie = "none"
  return c
