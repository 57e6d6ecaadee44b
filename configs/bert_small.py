"""BERT-Small: masked language modelling at ELECTRA-Small's size and cost (paper, Table 1).

Command:  python -m electra_jax.train --config=configs/bert_small.py --workdir=DIR
          --config.data.dir=SHARDS
Hardware: one accelerator. The paper: four days on a V100.
Expected: GLUE dev average 75.1, where ELECTRA-Small has 79.9 (paper, Table 1).

Its steps cost as many FLOPs as ELECTRA-Small's, by the paper's accounting:
python -m electra_jax.flops --config=configs/bert_small.py --match=configs/small.py
"""

from ml_collections import ConfigDict

from electra_jax.config import load


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is not used."""
  c = load("small.py", arg)
  c.objective.name = "bert"
  c.train.steps = 1_322_250  # the FLOPs of small.py (the paper has 1.45 M, 10 % more)
  return c
