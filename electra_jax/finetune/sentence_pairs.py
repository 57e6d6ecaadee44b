"""Defines the task kind of text embeddings, trained on pairs of texts."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from electra_jax.core.batch import TOKENS_PER_DOCUMENT
from electra_jax.core.task_network import HeadSpec
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune import files, metrics, task_data
from electra_jax.finetune.batches import Feature, subset
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.labels import number
from electra_jax.finetune.task_data import EvalSplit, Predictor, Seen, TaskData, TaskInfo, TaskKind

NUMBERS = ("", "unnamed: 0", "id", "idx", "index")  # columns that are not texts, as pandas' index
_WANTED = {
  "train": "an anchor, its positive and optional negatives",
  "dev": "two texts and an optional score",
}


class Pairs(NamedTuple):
  """The rows of a file."""

  texts: list[str]  # the distinct texts
  rows: list[list[int]]  # the indices of each row's texts: two, in training also negatives
  gold: list[float] | None  # the scores of the rows, if any
  notes: list[str]  # the number of rows, and the skipped ones


def read(
  path: str,
  role: str,
  named: str | None = None,
  most: int | None = None,
  holds: Callable[[str], bool] = lambda text: True,
) -> Pairs:
  """Reads a file in one of `files.FORMS`; a row without a first and second text is bad.

  Args:
    role: "train" for an anchor, a positive and negatives, which may be empty; "dev" for two texts
      to compare and optionally a third column with their score.
    named: comma-separated columns; None for all columns of the file but NUMBERS, in order.
    most: maximum number of rows.
    holds: whether to read a row with this first text.

  Raises:
    TaskError: the file cannot be read or lacks a column, or more than 1 % of its rows are bad.
  """
  lines = files.read_rows(path)
  where, found = next(lines)
  columns = [name.strip() for name in named.split(",")] if named else _text_columns(found)
  files.check_columns(where, found, columns)
  if len(columns) < 2 or (columns[3:] if role == "dev" else {"score", "label"} & set(columns)):
    raise TaskError(
      f"{where} has the columns {', '.join(found)}: name {_WANTED[role]} with"
      f" config.pairs.{role}_columns"
    )
  scored = role == "dev" and len(columns) == 3
  rows, gold, bad, count = [], [], [], 0
  for where, row in lines:
    cells, fault = _cells(row, columns[:2] if scored else columns)
    if not holds(cells[0] if cells else ""):
      continue
    count += 1
    if scored and not fault and (score := number(str(row.get(columns[2])))) is None:
      fault = f"column {columns[2]!r}, the score, is not a number"
    if fault:
      bad.append(f"{where}: {fault}")
    else:
      rows.append(cells)
      gold += [score] if scored else []
  if len(bad) > files.MAX_BAD_FRAC * count:
    share = f"{len(bad)} of {count} rows are bad, above {files.MAX_BAD_FRAC:.0%}"
    raise TaskError(f"{bad[0]} ({share}): correct or delete them")
  if not rows:
    raise TaskError(f"{path}: the file has no rows for the {role} split")
  kept, numbers = subset(rows, most), {}
  indexed = [[numbers.setdefault(text, len(numbers)) for text in row] for row in kept]
  amount = f"{len(kept):,} of {len(rows):,}" if len(kept) < len(rows) else f"{len(rows):,}"
  notes = [f"{amount} rows of {', '.join(columns)}"]
  notes += [f"{len(bad)} rows left out: {'; '.join(bad[:3])}"] if bad else []
  return Pairs([*numbers], indexed, gold if scored else None, notes)


def _text_columns(found: Sequence[str]) -> list[str]:
  return [name for name in found if name.lower() not in NUMBERS]


def _cells(row: dict | str, names: Sequence[str]) -> tuple[list[str], str | None]:
  """Returns the texts of a row, without empty negatives, and its fault, or None."""
  if isinstance(row, str):
    return [], row
  cells = ["" if row.get(name) is None else row[name] for name in names]
  for place, (name, cell) in enumerate(zip(names, cells, strict=True)):
    if not isinstance(cell, str):
      return [], f"{name!r} is not a text"
    if place < 2 and not cell.strip():
      return [], f"{name!r} is empty"
  return [files.clean(cell) for cell in cells if cell.strip()], None


def _encode(info: TaskInfo, texts: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
  """Returns [CLS] text [SEP] of each text, truncated at the end."""
  cls, sep = tokenizer.vocab.cls, tokenizer.vocab.sep
  most = info.max_length - 2
  return [np.array([cls, *x[:most], sep], np.int32) for x in tokenizer.encode_batch(texts)]


def _rows(info: TaskInfo, texts: Sequence[str], tokenizer: Tokenizer) -> tuple:
  return [Feature(ids, len(ids), {}) for ids in _encode(info, texts, tokenizer)], None


def _train_rows(info: TaskInfo, pairs: Pairs, tokenizer: Tokenizer) -> list[Feature]:
  """Returns a row of each anchor and its other texts, each a separate document."""
  encoded, made = _encode(info, pairs.texts, tokenizer), []
  least = TOKENS_PER_DOCUMENT * info.head.arguments["texts"]
  for row in pairs.rows:
    lengths = [len(encoded[i]) for i in row]
    missing = (0, max(0, least - sum(lengths)))
    ids = np.concatenate([encoded[i] for i in row])
    ids = np.pad(ids, missing, constant_values=tokenizer.vocab.pad)
    documents, texts = (
      np.pad(np.repeat(np.array(x, np.int32) + 1, lengths), missing) for x in (range(len(row)), row)
    )
    made.append(Feature(ids, len(ids), {"document_ids": documents, "text": texts}))
  return made


def _prepare(config: ConfigDict, name: str, tokenizer: Tokenizer, max_length: int) -> TaskData:
  if config.train.accumulation > 1:
    raise ValueError(
      f"config.train.accumulation must be 1 for pairs, got {config.train.accumulation}: to save"
      " memory set model.remat=True or a smaller train.batch_size"
    )
  p, d = config.pairs, config.data
  parts = task_data.find_parts(config)
  file, holds = parts.pop("train")
  train = read(file, "train", p.train_columns, d.train_examples, holds)
  splits = {
    split: read(part.file, "dev", p.dev_columns, holds=part.holds) for split, part in parts.items()
  }
  arguments = {"pooling": p.pooling, "temperature": p.temperature}
  head = HeadSpec("embedding", {**arguments, "texts": max(map(len, train.rows))})
  info = TaskInfo("pairs", name, head, max_length)
  notes = [f"{k}: {note}" for k, x in {"train": train, **splits}.items() for note in x.notes]
  evaluated = {
    split: EvalSplit(
      pairs,
      _rows(info, pairs.texts, tokenizer)[0],
      None,
      True,
      task_data.digest((pairs.texts, pairs.rows, pairs.gold)),
      f"{split}.tsv",
    )
    for split, pairs in splits.items()
  }
  return TaskData(info, name, 1.0, _train_rows(info, train, tokenizer), evaluated, notes, train)


def _seen(info: TaskInfo, examples: Pairs | Sequence[str], tokenizer: Tokenizer) -> list[Seen]:
  if not isinstance(examples, Pairs):
    return [Seen((text,)) for text in examples]
  scores = [""] * len(examples.rows) if examples.gold is None else map(str, examples.gold)
  texts = ([examples.texts[i] for i in row] for row in examples.rows)
  return [Seen(x, score) for x, score in zip(texts, scores, strict=True)]


def _cosines(pairs: Pairs, vectors: np.ndarray) -> np.ndarray:
  """Returns the cosine of the two texts of each row, [n] float64."""
  first, second = vectors[np.array(pairs.rows).T].astype(np.float64)
  return (first * second).sum(-1)


def example_scores(info: TaskInfo, pairs: Pairs, vectors: np.ndarray) -> np.ndarray:
  """Returns [n, 2] of score and cosine or, without scores, the queries' RETRIEVAL metrics [q, 3].

  Each distinct first text is a query for its second texts among the second texts of all rows.
  """
  if pairs.gold is not None:
    return np.stack([pairs.gold, _cosines(pairs, vectors)], 1)
  relevant = {}
  for query, answer in pairs.rows:
    relevant.setdefault(query, []).append(answer)
  answers = sorted({answer for _, answer in pairs.rows})
  of_answers = vectors[answers]
  return np.array(
    [
      metrics.retrieval(of_answers @ vectors[query], np.isin(answers, own))
      for query, own in relevant.items()
    ]
  )


def compute_metrics(scores: np.ndarray) -> dict[str, float]:
  """Returns {metric: percent} of example scores, the main metric first."""
  if scores.shape[1] == 2:
    names = ("spearman", "pearson")
    return {name: 100 * float(metrics.METRICS[name].compute(scores, 0)) for name in names}
  return dict(zip(metrics.RETRIEVAL, (100 * scores.mean(0)).tolist(), strict=True))


def _collapsed(info: TaskInfo, scores: np.ndarray) -> bool:
  """Returns whether all cosines are equal, or no query finds its answer in the top ten."""
  return bool(scores[:, 1].std() < 1e-4 if scores.shape[1] == 2 else not scores[:, 0].any())


def _write(info: TaskInfo, path: Path, pairs: Pairs, vectors: np.ndarray) -> None:
  """Writes a TSV of the cosine of each row's two texts."""
  cosines = (f"{cosine:.6f}" for cosine in _cosines(pairs, vectors))
  files.write_rows(path, [("index", "prediction"), *((str(i), x) for i, x in enumerate(cosines))])


def _answer(predictor: Predictor, items: Sequence) -> np.ndarray:
  for item in items:
    if not isinstance(item, str):
      raise ValueError(f"{predictor.info.name} embeds single texts, got {item!r:.80}")
  return predictor.predict(items)


def _predict_file(predictor: Predictor, file: Path, out: Path, columns: Sequence[str]) -> int:
  """Writes the embeddings [n, D] of a column of a file, by default the first."""
  if out.suffix != ".npy":
    raise ValueError(f"{out}: the name of a file of embeddings must end in .npy")
  rows = files.read_rows(file)
  where, found = next(rows)
  names = list(columns) or _text_columns(found)[:1]
  if len(found) > len(names) == 1 and not columns:
    warnings.warn(f"embedding the column {names[0]!r}: --columns chooses another", stacklevel=1)
  if len(names) > 1:
    raise ValueError(f"--columns must be one column to embed, got {','.join(columns)}")
  files.check_columns(where, found, names)
  texts = []
  for where, row in rows:
    cells, fault = _cells(row, names)
    if fault:
      raise TaskError(f"{where}: {fault}")
    texts += cells
  if not texts:
    raise TaskError(f"{file}: the file has no rows")
  np.save(out, predictor.predict(texts))
  return len(texts)


KIND = TaskKind(
  prepare=_prepare,
  rows=_rows,
  seen=_seen,
  kept=lambda info, lengths: [min(n, info.max_length - 2) for n in lengths],
  decode=lambda info, examples, windows, outputs: outputs["embedding"],
  scores=example_scores,
  write=_write,
  metrics=lambda info: compute_metrics,
  collapsed=_collapsed,
  answer=_answer,
  predict_file=_predict_file,
  file_ending=".npy",
  fields=("pairs", *task_data.SPLIT_FIELDS),
  pooling=lambda info: info.head.arguments["pooling"],
)
