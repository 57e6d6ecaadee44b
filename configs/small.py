"""ELECTRA-Small as in the paper (Clark et al. 2020, Table 6): 14 M parameters, 1 M steps.

Command:  python -m electra_jax.train --config=configs/small.py --workdir=DIR
          --config.data.dir=SHARDS
Hardware: one accelerator. The paper: four days on a V100.
Expected: GLUE dev average 79.9 after fine-tuning on Wikipedia and books (paper, Table 1).
"""

from ml_collections import ConfigDict

from electra_jax.config import load


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is not used."""
  c = load("base.py", arg)
  c.model.hidden_size = 256
  c.model.num_heads = 4
  c.model.ffn_size = 1024
  c.model.embedding_size = 128
  c.generator.width_multiplier = 1 / 4
  c.data.seq_length = 128
  c.optimizer.learning_rate = 5e-4
  c.train.batch_size = 128
  c.train.steps = 1_000_000
  return c
