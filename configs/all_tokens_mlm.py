"""All-Tokens MLM: predicts every token of a filled-in text, with a copy gate (Section 3.4).

Command:  python -m electra_jax.train --config=configs/all_tokens_mlm.py:small --workdir=DIR
          --config.data.dir=SHARDS
Hardware: as the size after the colon. A step takes 1.37 times ELECTRA's, because the vocabulary
          layer covers all tokens.
Expected: GLUE dev average 84.3 at base size, where ELECTRA has 85.0 (paper, Table 5).
"""

from ml_collections import ConfigDict

from electra_jax.config import load_size


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the size (`load_size`)."""
  c = load_size(arg)
  c.objective.name = "all_tokens_mlm"
  c.objective.discriminator_weight = 1.0  # of the main network's token loss
  return c
