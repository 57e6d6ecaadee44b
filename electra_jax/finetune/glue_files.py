"""Reads the files of GLUE and of custom text tasks.

GLUE's files are tab-separated, without quoting. The first line names the columns, except in CoLA's
training and dev splits. Files of a custom task (`tasks.own`) and files to predict are in any of
`files.FORMS`; their TSV may have CSV quotes (`files.split_rows`).
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from electra_jax.data import tfds
from electra_jax.finetune import files
from electra_jax.finetune.files import MAX_BAD_FRAC, Rows, TaskError
from electra_jax.finetune.labels import TextTask
from electra_jax.finetune.tasks import TASKS

# Extensions of splits in a folder, without .txt, whose lines have no label.
ENDS = [f + end for f in files.FORMS if f != ".txt" for end in ("", *files.COMPRESSED)]
# Releases of GLUE have either name for the split and the folder of the diagnostic set.
_DIAGNOSTIC = ("diagnostic", "ax")
DEV = ("dev", "validation", "val")  # names of the evaluation split


class MissingSplit(TaskError):
  """A split has no file."""


class Example(NamedTuple):
  """One text or pair."""

  text: str
  pair: str | None  # None if the task has one text
  label: int | float | None  # class index or number; None if hidden
  place: int  # row in its split, from 0: the index in a submission


class SplitExamples(NamedTuple):
  """The examples of a split, and "file:line: reason" for each skipped row."""

  examples: list[Example]
  bad: list[str]


class _Cells(NamedTuple):
  """The relevant cells of a row as in the file, or None."""

  where: str
  fault: str | None  # why the row is invalid
  text: str | None = None
  pair: str | None = None
  label: str | None = None
  copied: dict[str, Any] = {}  # columns to copy to a prediction


def find_split(task: TextTask, source: str | Path, split: str) -> Path:
  """Returns the file of a split; `source` is the file, the task's folder or its parent.

  Raises:
    TaskError: the split has no file or several files.
  """
  if split not in task.splits:
    raise TaskError(f"{task.title} has no split {split!r}; it has {', '.join(task.splits)}")
  if Path(source).is_file():
    return Path(source)
  other = _DIAGNOSTIC if split == "diagnostic" else ()
  folders = _folders(task, source, other)
  stems = other or [split.replace("dev", name) for name in DEV]
  names = {stem + end for stem in stems for end in ENDS}
  for folder in folders:
    found = sorted(path for path in folder.iterdir() if path.name.lower() in names)
    if len(found) > 1:
      raise TaskError(f"{task.title}: keep {found[0]} or {found[1].name} for the split {split!r}")
    if found:
      return found[0]
  raise MissingSplit(
    f"{task.title}: {folders[0]} has no file for the split {split!r} (found: {_listed(folders[0])})"
    f": add {split}.csv, .tsv, .jsonl or .parquet"
  )


def find_whole(task: TextTask, source: str | Path) -> Path:
  """Returns the file to divide into a training and a dev split: train.* or the only file.

  Raises:
    TaskError: it is missing, or there is also a dev file.
  """
  folder = _folders(task, source)[0]
  paths = [path for path in sorted(folder.iterdir()) if path.name.lower().endswith(tuple(ENDS))]
  stems = [path.name.lower().partition(".")[0] for path in paths]
  whole = [path for path, stem in zip(paths, stems, strict=True) if stem == "train"] or paths
  if len(whole) != 1 or set(stems) & set(DEV):
    raise TaskError(
      f"{task.title}: config.own.split and own.folds need a folder with one training file and no"
      f" dev file, {folder} has {_listed(folder)}"
    )
  return whole[0]


def _folders(task: TextTask, source: str | Path, other: Sequence[str] = ()) -> list[Path]:
  """Returns the folders of a task's files, or `source` if it lacks the task's and `other`."""
  root = Path(source)
  if not root.is_dir():
    raise TaskError(f"{task.title}: {source} is not a folder or a file")
  inside = sorted(path for path in root.iterdir() if path.is_dir())
  return [path for path in inside if path.name.lower() in (*task.folders, *other)] or [root]


def _listed(folder: Path) -> str:
  return f"{', '.join(sorted(path.name for path in folder.iterdir())) or 'nothing':.200}"


def read(
  task: TextTask,
  source: str | Path,
  split: str,
  *,
  data_dir: str | None = None,
  holds: Callable[[str], bool] = lambda text: True,
) -> SplitExamples:
  """Returns the examples of a split, in the order of its rows.

  Rows with a wrong number of columns, an empty text or an unknown label are skipped. In splits
  without labels empty texts are kept and other bad rows raise: a submission needs every row.

  Args:
    source: as in `find_split`, or "tfds:NAME" for tensorflow_datasets ("tfds:glue" for GLUE).
    data_dir: the folder of tensorflow_datasets; None for its default.
    holds: whether a row with this (first) text is in the split.

  Raises:
    TaskError: a file is missing, unreadable, not UTF-8 or lacks a column; more than 1 % of its rows
      are skipped; a label of a custom task does not occur in the training split.
  """
  if not task.is_complete:
    raise TaskError(f"task {task.name!r} has no labels: call glue_files.complete first")
  hidden = split in task.submission
  examples, bad, unknown, place = [], [], {}, -1
  for place, row in enumerate(_cells(task, _rows(task, source, split, data_dir), split)):
    fault, label = row.fault, None
    if fault is None and row.label:
      label = task.label_type.parse(task, row.label)
      if label is None:
        fault = f"the label is {row.label!r}, not {task.label_type.expected(task)}"
        unknown.setdefault(row.label, row.where)
    if fault is not None:
      bad.append(f"{row.where}: {fault}")
    elif holds(row.text):
      examples.append(Example(row.text, row.pair, label, place))
  count = place + 1
  if unknown and task.labels and task.name not in TASKS:
    named = ", ".join(f"{label!r} ({where})" for label, where in list(unknown.items())[:5])
    raise TaskError(
      f"{task.title}: {len(unknown)} labels are not in the training split: {named}; "
      f"it has {', '.join(task.labels):.200}"
    )
  if bad and hidden:
    raise TaskError(f"{bad[0]} ({len(bad)} of {count} rows; prediction needs all rows to be valid)")
  if len(bad) > MAX_BAD_FRAC * count:
    raise TaskError(f"{bad[0]} ({len(bad)} of {count} rows are bad, above {MAX_BAD_FRAC:.0%})")
  if not examples:
    raise TaskError(f"{task.title}: the split {split!r} in {source} has no rows")
  return SplitExamples(examples, bad)


def read_texts(
  task: TextTask, path: Path, copied: Sequence[str] = ()
) -> tuple[list[Example], list[dict]]:
  """Returns the rows of a file to predict, and {column: cell} of the columns `copied` for each.

  The file is in any of `files.FORMS`; labels are ignored.

  Raises:
    TaskError: the file cannot be read, lacks a column, or has an invalid row.
  """
  task = dataclasses.replace(task, submission={"file": ""})
  rows = list(_cells(task, files.read_rows(path, text=task.text), "file", copied))
  for row in rows:
    if row.fault:
      raise TaskError(f"{row.where}: {row.fault}")
  if not rows:
    raise TaskError(f"{path}: the file has no rows")
  examples = [Example(row.text, row.pair, None, place) for place, row in enumerate(rows)]
  return examples, [row.copied for row in rows]


def complete(task: TextTask, source: str | Path, *, data_dir: str | None = None) -> TextTask:
  """Returns the task with the labels or the scale of its training split.

  Labels are sorted, as numbers if all are; the scale of a regression is the largest absolute label.
  A complete task, such as GLUE's, is returned unchanged.

  Raises:
    TaskError: as `read`, or there are fewer than two classes.
  """
  if task.is_complete:
    return task
  rows = _cells(task, _rows(task, source, "train", data_dir), "train")
  labels = {row.label for row in rows if row.label}
  found = task.label_type.complete(labels, f"{task.title}: {source}")
  return dataclasses.replace(task, **found)


def _rows(task: TextTask, source: str | Path, split: str, data_dir: str | None) -> Rows:
  if str(source).startswith("tfds:"):
    return _tfds_rows(task, str(source), split, data_dir)
  path = find_split(task, source, split)
  unheaded = () if split in task.submission else task.unheaded
  of_glue = task.name in TASKS and split in TASKS[task.name].splits
  return files.read_rows(path, unheaded=unheaded, quoting=not of_glue)


def _cells(task: TextTask, rows: Rows, split: str, copied: Sequence[str] = ()) -> Iterator[_Cells]:
  """Yields the cells of each row.

  Raises:
    TaskError: a column of the task or to copy is missing or duplicated.
  """
  where, columns = next(rows)
  hidden, wanted = split in task.submission, [task.text, task.pair, task.label]
  if hidden and (task.name in TASKS or task.label not in columns):
    wanted[2] = None  # GLUE hides labels; a custom test split may have them
  files.check_columns(where, columns, (*filter(None, wanted), *copied))
  for where, row in rows:
    if isinstance(row, str):
      yield _Cells(where, row)
      continue
    text, pair, label = map(row.get, wanted)
    if isinstance(label, bool | int | float):
      label = _label_text(label)
    text, pair, label = (cell if isinstance(cell, str) else None for cell in (text, pair, label))
    label = label and label.strip()
    fault = None if label or hidden else f"{task.label!r} is empty"
    for column, cell in ((task.pair, pair), (task.text, text)):
      if column is not None and (cell is None or not (hidden or cell.strip())):
        fault = f"{column!r} is {'missing' if cell is None else 'empty'}"
    if any(files.LONE_SURROGATE.search(cell) for cell in (text, pair, label) if cell):
      fault, label = "not UTF-8", None
    yield _Cells(where, fault, text, pair, label, {column: row.get(column) for column in copied})


def _tfds_rows(task: TextTask, source: str, split: str, data_dir: str | None) -> Rows:
  """Yields the rows of a TFDS dataset; a GLUE task's rows are sorted by index."""
  name = source.removeprefix("tfds:")
  name = f"glue/{task.name}" if name == "glue" else name
  tfds_split = split.replace("dev", "validation")
  if split == "diagnostic":
    name, tfds_split = "glue/ax", "test"
  try:
    dataset, info = tfds.open_split(name, tfds_split, data_dir)
  except tfds.TfdsError as error:
    kind = MissingSplit if split in task.submission else TaskError
    raise kind(f"{task.title}: tfds:{name}, {tfds_split}: {error}") from None
  tfds_column = {c: task.tfds_columns.get(c, c) for c in (task.text, task.pair, task.label)}
  own_column = {theirs: own for own, theirs in tfds_column.items()}
  columns = [own_column.get(column, column) for column in dataset.element_spec]
  yield f"{task.title}: tfds:{name}", columns
  classes = getattr(dict(info.features.items()).get(tfds_column[task.label]), "names", None)
  values = list(dataset.as_numpy_iterator())
  if task.name in TASKS and "idx" in dataset.element_spec:  # shards are shuffled
    values.sort(key=lambda value: int(value["idx"]))
  for place, value in enumerate(values):
    row = {own: value.get(theirs) for theirs, own in own_column.items()}
    row = {k: x.decode("utf-8", "replace") if isinstance(x, bytes) else x for k, x in row.items()}
    if isinstance(row[task.label], np.generic):
      row[task.label] = _tfds_label(task, row[task.label], classes)
    yield f"tfds:{name}:{tfds_split}:{place}", row


def _label_text(value: bool | int | float) -> str:
  """Returns a label as in JSON; in tables with missing values, 1.0 is 1 and NaN is ""."""
  if value != value:
    return ""
  return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _tfds_label(task: TextTask, value: np.ndarray, classes: Sequence[str] | None) -> str:
  """Returns a label as in GLUE's files, or "" if TFDS hides it."""
  if classes is None:
    return _label_text(value.item())
  if value < 0:
    return ""
  # Classes with other names in TFDS (such as "acceptable") are 0 and 1 in the files.
  name = classes[value]
  return name if not task.labels or name in task.labels else str(value)
