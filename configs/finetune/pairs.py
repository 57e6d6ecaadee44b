"""Text embeddings from pairs that belong together: a question and its answer, two paraphrases.

Command:  python -m electra_jax.finetune --config=configs/finetune/pairs.py
          --config.init=RUN_OR_EXPORT --config.data.train=train.csv --config.data.dev=dev.csv
          --workdir=DIR

Files are CSV, TSV, JSON lines or parquet, also as .gz, .xz, .zst or .bz2. A training row is an
anchor, its positive and optional hard negatives; the other rows of the batch are negatives too. The
dev file has two texts and their score (metric: Spearman), or queries and answers (metrics of
retrieving the answer among all of the file). The task's name may follow a colon (default: pairs).
"""

from ml_collections import ConfigDict

from electra_jax.config import load


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration; `arg` is the task's name in the results."""
  c = load("finetune/base.py")
  c.kind = "pairs"
  c.task = arg or "pairs"
  c.train.batch_size = 128
  return c
