"""A text task of your own: CSV, TSV, JSON lines or parquet; also as .gz, .xz, .zst or .bz2.

Command:  python -m electra_jax.finetune --config=configs/finetune/own.py:reviews
          --config.init=RUN_OR_EXPORT --config.data.train=reviews.csv --config.own.split=0.1
          --config.own.text=body --config.own.label=stars --workdir=DIR

Instead of own.split there may be data.dev, or data.dir: a folder with train.csv and dev.csv (or
validation, val), and test.csv if there is something to predict. The labels come from the training
file. A name for the results follows the colon. A row in electra_jax/finetune/tasks.py does the same
for good.
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
