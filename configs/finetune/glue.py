"""GLUE: python -m electra_jax.finetune --config=configs/finetune/glue.py:mrpc ...

Tasks follow the colon, separated by commas (cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli), or
`all`. --config.data.dir is the folder that contains GLUE's folders (MRPC/train.tsv, ...), or
tfds:glue. Predictions of the test splits present are written in GLUE's submission format.

Expected: dev medians of ELECTRA-Small (1M steps) average 79.9, of Base 85.1 (paper, Table 1).
"""

from ml_collections import ConfigDict

from electra_jax.config import load

ALL = "cola,sst2,mrpc,stsb,qqp,mnli,qnli,rte"  # of the paper's average


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the tasks."""
  c = load("finetune/base.py")
  c.task = ALL if arg in (None, "", "all") else arg
  return c
