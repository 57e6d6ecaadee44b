"""Adversarial ELECTRA: the generator learns to fool the discriminator (Section 3.2).

Command:  python -m electra_jax.train --config=configs/adversarial.py:small --workdir=DIR
          --config.data.dir=SHARDS
Hardware: as the size after the colon.
Expected: between BERT and ELECTRA; the generator's masked-LM accuracy stays behind, 58 %
          against 65 % (paper, Section 3.2 and Appendix F).
"""

from ml_collections import ConfigDict

from electra_jax.config import load_size


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the size (`load_size`)."""
  c = load_size(arg)
  c.objective.name = "adversarial"
  c.objective.temperature_schedule = ""  # the loss uses the probabilities of the samples
  c.objective.mlm_weight = 0.0  # reported only: the generator learns by REINFORCE
  return c
