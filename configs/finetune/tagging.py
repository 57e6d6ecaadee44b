"""Tagging with any labels, e.g. CoNLL's chunks or entities; words and tags in columns.

Command:  python -m electra_jax.finetune --config=configs/finetune/tagging.py:chunk
          --config.init=RUN_OR_EXPORT --config.data.train=train.txt --config.data.dev=test.txt
          --workdir=DIR
Expected: CoNLL-2000 F1 96.5 for the released Small, 97.1 for Base (the original's README).

In JSON and parquet a row is a sentence; the columns are lists of words and tags. Entities are in
IOB1, BIO, BIOES, BILOU or BMEWO. The task's name may follow a colon (default: tagging).
"""

from ml_collections import ConfigDict

from electra_jax.config import load


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the task's name in the results."""
  c = load("finetune/base.py")
  c.kind = "tagging"
  c.task = arg or "tagging"
  c.data.max_length = 256
  c.train.epochs = 3.0
  return c
