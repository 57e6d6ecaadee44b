"""A text task of your own: CSV, TSV, JSON, JSON lines or parquet; also as .gz, .xz, .zst or .bz2.

Command:  python -m electra_jax.finetune --config=configs/finetune/own.py:reviews
          --config.init=RUN_OR_EXPORT --config.data.train=reviews.csv --config.own.split=0.1
          --config.own.text=body --config.own.label=stars --workdir=DIR

Instead of own.split, set data.dev, or set data.dir to a folder with train.csv, dev.csv (or
validation, val) and optionally test.csv to predict. The labels are read from the training file. The
task's name follows the colon. A row in electra_jax/finetune/tasks.py defines a task for good.
"""

from ml_collections import ConfigDict

from electra_jax.config import load


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the task's name in the results."""
  c = load("finetune/base.py")
  c.task = arg or "own"
  c.own.text = "text"
  c.own.label = "label"
  return c
