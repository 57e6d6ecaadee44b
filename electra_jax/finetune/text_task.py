"""Defines the task kind of text classification and regression, for GLUE and custom tasks."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from electra_jax.core.task_network import HeadSpec
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune import glue_files, task_data, tasks
from electra_jax.finetune.batches import Feature, subset
from electra_jax.finetune.files import TaskError, write_rows
from electra_jax.finetune.glue_files import Example
from electra_jax.finetune.labels import TextTask
from electra_jax.finetune.metrics import METRICS
from electra_jax.finetune.task_data import (
  EvalSplit,
  Part,
  Predictor,
  Seen,
  TaskData,
  TaskInfo,
  TaskKind,
)


def doubled(examples: Sequence[Example]) -> list[Example]:
  """Returns the examples, then all with swapped texts: the original's `double_unordered`.

  Raises:
    TaskError: an example has no second text.
  """
  if any(example.pair is None for example in examples):
    raise TaskError("examples with one text cannot be doubled: doubling swaps the texts of pairs")
  return [*examples, *(e._replace(text=e.pair, pair=e.text) for e in examples)]


def features(
  task: TextTask, examples: Sequence[Example], tokenizer: Tokenizer, *, max_length: int
) -> list[Feature]:
  """Returns [CLS] text [SEP] or [CLS] text [SEP] pair [SEP] per example.

  Texts are truncated at the end, the longer text of a pair first, as in the original. The target
  "label" is an int32 class, or a number in the unit of the head; hidden labels have no target.

  Raises:
    TaskError: max_length is below 5, which leaves no token of a text.
  """
  if max_length < 5:
    raise TaskError(f"max_length must be at least 5, got {max_length}")
  cls, sep = tokenizer.vocab.cls, tokenizer.vocab.sep
  firsts = tokenizer.encode_batch([example.text for example in examples])
  paired = task.pair is not None
  seconds = tokenizer.encode_batch([e.pair for e in examples]) if paired else [[]] * len(examples)
  found = []
  for example, first, second in zip(examples, firsts, seconds, strict=True):
    a, b = _cut(len(first), len(second), max_length - (3 if paired else 2))
    ids = [cls, *first[:a], sep, *((*second[:b], sep) if paired else ())]
    target = {}
    if example.label is not None:
      label = (example.label - task.offset) / task.scale
      target["label"] = np.asarray(label, task.label_type.dtype)
    found.append(Feature(np.array(ids, np.int32), a + 2, target))
  return found


def _cut(first: int, second: int, room: int) -> tuple[int, int]:
  """Returns the truncated lengths of a pair; the longer text loses tokens, in a tie the second.

  >>> _cut(9, 3, 8), _cut(9, 9, 7), _cut(2, 9, 7)
  ((5, 3), (4, 3), (2, 5))
  """
  if first + second <= room:
    return first, second
  half = room // 2
  if second <= half:
    return room - second, second
  first = min(first, room - half)
  return first, room - first


def read_outputs(
  task: TextTask, examples: Sequence[Example], outputs: dict[str, np.ndarray]
) -> np.ndarray:
  """Returns the head's logits [n, C] or scores [n] for the task's label type, float64.

  Raises:
    TaskError: the numbers of outputs and examples differ.
  """
  values = np.asarray(outputs[task.label_type.output], np.float64)
  if len(values) != len(examples):
    raise TaskError(f"{task.title}: {len(values)} outputs for {len(examples)} examples")
  return values


def example_scores(
  task: TextTask, examples: Sequence[Example], outputs: dict[str, np.ndarray]
) -> np.ndarray:
  """Returns [n, 2] float64, the label and the prediction of each example.

  Raises:
    TaskError: as `read_outputs`, or an example has no label.
  """
  predictions = task.label_type.predictions(task, read_outputs(task, examples, outputs))
  hidden = [example.place for example in examples if example.label is None]
  if hidden:
    raise TaskError(
      f"{task.title}: {len(hidden)} of {len(examples)} examples have no label, e.g. row {hidden[0]}"
    )
  labels = np.array([example.label for example in examples], np.float64)
  return np.stack([labels, predictions], 1)


def compute_metrics(task: TextTask, scores: np.ndarray) -> dict[str, float]:
  """Returns {metric: percent} of example scores [n, 2], the main metric first.

  Raises:
    TaskError: there are no examples.
  """
  if not len(scores):
    raise TaskError(f"{task.title}: no examples to evaluate")
  classes = len(task.labels or ())
  return {name: 100 * float(METRICS[name].compute(scores, classes)) for name in task.metrics}


def majority(task: TextTask, scores: np.ndarray) -> dict[str, float]:
  """Returns the metrics of `example_scores` for the best constant prediction."""
  labels = scores[:, 0]
  constant = np.full_like(labels, task.label_type.constant(labels))
  return compute_metrics(task, np.stack([labels, constant], 1))


def collapsed(task: TextTask, scores: np.ndarray) -> bool:
  """Returns whether training failed: in scores [n, 2], predictions are constant, labels are not."""
  labels, predictions = scores.T
  return np.ptp(labels) > 0 and task.label_type.collapsed(labels, predictions)


def write_submission(
  path: str | Path, task: TextTask, examples: Sequence[Example], outputs: dict[str, np.ndarray]
) -> None:
  """Writes predictions in GLUE's format: a row of index, tab, label for each example, in order.

  Class names of a custom task are quoted as by `files.write_rows`; GLUE's never need it.
  """
  predictions = task.label_type.predictions(task, read_outputs(task, examples, outputs))
  written = task.label_type.written(task, predictions)
  rows = [(str(e.place), value) for e, value in zip(examples, written, strict=True)]
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  write_rows(path, [("index", "prediction"), *rows])


def _configured_task(config: ConfigDict, name: str) -> TextTask:
  own = config.own
  if own.text is None:
    return tasks.TASKS[name]
  metrics = tuple(m.strip() for m in own.metrics.split(",") if m.strip())
  return tasks.own(
    name, text=own.text, pair=own.pair, label=own.label, kind=own.kind, metrics=metrics
  )


def _parts(config: ConfigDict, task: TextTask) -> dict[str, Part]:
  """Returns the rows of each split, from config.data.dir or from the split's file."""
  d, is_divided = config.data, task_data.dev_shares(config) is not None
  if config.own.text is None and (is_divided or d.train is not None):
    raise ValueError(
      f"config.data.train, own.split and own.folds need own.text: {task.title}'s files are in"
      " config.data.dir"
    )
  if d.train is not None:
    return task_data.find_parts(config)
  if d.dir is None:
    raise ValueError(
      "config.data.dir is not set: set the folder of the task's files, or tfds:glue; for a custom"
      " task, data.train"
    )
  if not is_divided:
    return {split: Part(d.dir) for split in task.splits}
  whole = glue_files.find_whole(task, d.dir)
  return {"test": Part(d.dir), **task_data.find_parts(config, str(whole))}


def _prepare(config: ConfigDict, name: str, tokenizer: Tokenizer, max_length: int) -> TaskData:
  d, task = config.data, _configured_task(config, name)
  parts = _parts(config, task)
  file, holds = parts["train"]
  task = glue_files.complete(task, file, data_dir=d.tfds_dir, holds=holds)
  notes: list[str] = []

  def read(split: str, most: int | None = None) -> list[Example]:
    file, holds = parts[split]
    every, bad, unlabelled = glue_files.read(task, file, split, data_dir=d.tfds_dir, holds=holds)
    examples = subset(every, most)
    labels = [e.label for e in examples if e.label is not None]
    summary = task.label_type.summary(task, labels) if labels else ", no labels"
    count = (
      f"{len(examples):,} of {len(every):,}" if len(examples) < len(every) else f"{len(every):,}"
    )
    notes.append(f"{split}: {count} examples{summary}")
    if bad:
      notes.append(f"{split}: {len(bad)} rows left out: {'; '.join(bad[:3])}")
    if unlabelled:
      what = "hidden labels" if split in task.submission else "rows without a label left out"
      notes.append(f"{split}: {unlabelled} {what} (-1)")
    return examples

  def rows(examples: list[Example]) -> list[Feature]:
    return features(task, examples, tokenizer, max_length=max_length)

  def eval_split(split: str) -> EvalSplit:
    examples = read(split)
    return EvalSplit(
      examples,
      [row._replace(target={}) for row in rows(examples)],
      None,
      all(example.label is not None for example in examples),
      task_data.digest((e.text, e.pair, e.label) for e in examples),
      task.submission.get(split, f"{split}.tsv"),
    )

  train = read("train", config.data.train_examples)
  train_rows = rows(doubled(train) if task.doubled else train)
  splits = {split: eval_split(split) for split in task.dev_splits}
  for split in filter(parts.__contains__, task.submission):
    try:
      splits[split] = eval_split(split)
    except glue_files.MissingSplit:
      notes.append(f"{split}: not predicted, no file {split}.*")
  arguments = {**task.label_type.head_arguments(task), "layers": config.model.head}
  head = HeadSpec(task.label_type.head, arguments)
  info = TaskInfo("text", name, head, max_length, text=task)
  return TaskData(info, task.title, task.epochs, train_rows, splits, notes, train)


def _rows(info: TaskInfo, examples: list[Example], tokenizer: Tokenizer) -> tuple:
  return features(info.text, examples, tokenizer, max_length=info.max_length), None


def _seen(info: TaskInfo, examples: list[Example], tokenizer: Tokenizer) -> list[Seen]:
  task = info.text
  named = {} if task.labels is None else dict(enumerate(task.labels))
  return [
    Seen((e.text,) if e.pair is None else (e.text, e.pair), str(named.get(e.label, e.label)))
    for e in examples
  ]


def _kept(info: TaskInfo, lengths: Sequence[int]) -> Sequence[int]:
  first, second = (*lengths, 0)[:2]
  return _cut(first, second, info.max_length - 1 - len(lengths))[: len(lengths)]


def _errors(
  info: TaskInfo, train: Sequence[Feature], scores: np.ndarray
) -> dict[str, float] | None:
  """Returns the RMSE of the predictions, and of the mean of the training labels, if any."""
  if (unit := info.text.label_type.unit(info.text)) is None:
    return None
  mean = unit[0] * float(np.mean([row.target["label"] for row in train])) + unit[1]
  labels, predictions = scores.T
  pairs = {"rmse": predictions, "rmse_of_mean": mean}
  return {name: float(np.sqrt(np.mean((labels - x) ** 2))) for name, x in pairs.items()}


def _main_metric(info: TaskInfo) -> task_data.Metrics:
  main = dataclasses.replace(info.text, metrics=info.text.metrics[:1])
  return functools.partial(compute_metrics, main)


def _answer(predictor: Predictor, items: Sequence) -> list[dict]:
  task = predictor.info.text
  paired = task.pair is not None
  for item in items:
    if isinstance(item, str) == paired or (paired and len(item) != 2):
      raise ValueError(
        f"{task.title} expects {'pairs of texts' if paired else 'texts'}, got {item!r:.80}"
      )
  pairs = [tuple(item) if paired else (item, None) for item in items]
  examples = [Example(a, b, None, i) for i, (a, b) in enumerate(pairs)]
  outputs = read_outputs(task, examples, predictor.predict(examples))
  return task.label_type.answers(task, outputs)


def _predict_file(predictor: Predictor, file: Path, out: Path, columns: Sequence[str]) -> int:
  """Reads a file with the task's text columns, or with one text a line.

  It writes JSON lines if `out` ends in .jsonl, else a TSV with CSV quotes where needed: index, the
  copied columns, prediction and, for classes, probability.
  """
  if out.suffix not in (".tsv", ".jsonl"):
    raise ValueError(f"{out}: the name of a file of predictions must end in .tsv or .jsonl")
  if taken := {"index", "prediction", "probability"} & set(columns):
    raise ValueError(f"{taken.pop()!r} is a column of the predictions: rename it in {file}")
  examples, copied = glue_files.read_texts(predictor.info.text, file, columns)
  answers = _answer(predictor, [e.text if e.pair is None else (e.text, e.pair) for e in examples])
  names = ["index", *copied[0], "prediction", *list(answers[0])[1:]]
  rows = [
    (index, *cells.values(), *answer.values())
    for index, (cells, answer) in enumerate(zip(copied, answers, strict=True))
  ]
  if out.suffix == ".tsv":
    digits = predictor.info.text.digits
    write_rows(
      out, [names, *((_cell(*x, digits) for x in zip(names, row, strict=True)) for row in rows)]
    )
  else:
    # A lone surrogate is valid in JSON but not in UTF-8: escape it as in JSON.
    with open(out, "w", encoding="utf-8", errors="backslashreplace", newline="") as written:
      for row in rows:
        line = json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False)
        written.write(line + "\n")
  return len(rows)


def _cell(name: str, value: object, digits: int) -> str:
  """Returns the cell of a value in a TSV; values other than texts are JSON."""
  if name in ("prediction", "probability") and isinstance(value, float):
    return f"{value:.{digits}g}"
  return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


KIND = TaskKind(
  known_names=lambda config: tuple(tasks.TASKS) if config.own.text is None else None,
  prepare=_prepare,
  rows=_rows,
  decode=lambda info, examples, windows, outputs: outputs,
  scores=lambda info, *predicted: example_scores(info.text, *predicted),
  write=lambda info, path, *predicted: write_submission(path, info.text, *predicted),
  metrics=lambda info: functools.partial(compute_metrics, info.text),
  main_metric=_main_metric,
  collapsed=lambda info, scores: collapsed(info.text, scores),
  answer=_answer,
  predict_file=_predict_file,
  file_ending=".tsv",
  level="text",
  class_names=lambda info: tuple(info.text.labels or (info.text.label_type.output,)),
  fields=("own", "data.dir", "data.tfds_dir", "model.head", *task_data.SPLIT_FIELDS),
  seen=_seen,
  kept=_kept,
  unit=lambda info: info.text.label_type.unit(info.text),
  errors=_errors,
  majority=lambda info, scores: majority(info.text, scores),
)
