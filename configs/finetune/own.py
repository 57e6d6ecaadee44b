"""A text task of your own: TSV or CSV with a header, or JSON lines; also as .gz, .xz or .zst.

Command:  python -m electra_jax.finetune --config=configs/finetune/own.py:reviews
          --config.init=RUN_OR_EXPORT --config.data.dir=FOLDER --config.own.text=body
          --config.own.label=stars --workdir=DIR

FOLDER holds train.tsv (or .csv, .jsonl) and dev.tsv, and test.tsv if there is something to predict.
The labels come from the training split. A name for the results follows the colon. A row in
electra_jax/finetune/tasks.py does the same for good.
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
