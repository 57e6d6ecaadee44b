"""Question answering: SQuAD 1.1 and 2.0, and MRQA's JSON lines, recognised by the file's content.

JSON, CSV and parquet with the columns of `datasets`' SQuAD are read too.

Command:  python -m electra_jax.finetune --config=configs/finetune/squad.py
          --config.init=RUN_OR_EXPORT --config.data.train=train-v2.0.json
          --config.data.dev=dev-v2.0.json --workdir=DIR
Expected: SQuAD 1.1 and 2.0 dev exact match 75.8 and 70.1 for the released Small, 84.5 and 80.5 for
          Base (the original's README; Table 4), with the original's head, model.head=linear.

The task's name may follow a colon (default: squad).
"""

from ml_collections import ConfigDict

from electra_jax.config import load


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the task's name in the results."""
  c = load("finetune/base.py")
  c.kind = "qa"
  c.task = arg or "squad"
  c.data.max_length = 512
  c.train.epochs = 2.0
  return c
