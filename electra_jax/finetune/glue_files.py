"""Reads the files of text tasks: GLUE's and custom ones.

GLUE's files are tab-separated, without quoting. The first line names the columns, except in CoLA's
training and dev splits. The files of a custom task (`tasks.own`) and those to predict have any of
`files.FORMS`; their TSV may be quoted as CSV is (`files.split_rows`).
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

# Ends of the names of splits in a folder. A line of .txt has no label.
ENDS = [f + end for f in files.FORMS if f != ".txt" for end in ("", *files.COMPRESSED)]
# Releases of GLUE use either name for the split and the folder of its diagnostic set.
_DIAGNOSTIC = ("diagnostic", "ax")
DEV = ("dev", "validation", "val")  # names of the split to measure on


class MissingSplit(TaskError):
  """There is no file of a split."""


class Example(NamedTuple):
  """One text or pair."""

  text: str
  pair: str | None  # None if the task has one text
  label: int | float | None  # index of the class, or the number; None if hidden
  place: int  # row of its split from 0, the index in a submission


class SplitExamples(NamedTuple):
  """The examples of a split, and "file:line: reason" of each row left out."""

  examples: list[Example]
  bad: list[str]


class _Cells(NamedTuple):
  """The relevant cells of a row, as in the file; None if missing."""

  where: str
  fault: str | None  # the reason the row cannot be used
  text: str | None = None
  pair: str | None = None
  label: str | None = None
  copied: dict[str, Any] = {}  # the columns to copy to a prediction


def find_split(task: TextTask, source: str | Path, split: str) -> Path:
  """Returns the file of a split; `source` is that file, the task's folder or its parent.

  Raises:
    TaskError: the source lacks the split, or several files hold it.
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
      raise TaskError(f"{task.title}: {found[0]} and {found[1].name} are both the split {split!r}")
    if found:
      return found[0]
  raise MissingSplit(
    f"{task.title}: {folders[0]} has no file for the split {split!r} (found: {_listed(folders[0])})"
    f"; read are {split}.csv, .tsv, .jsonl and .parquet"
  )


def find_whole(task: TextTask, source: str | Path) -> Path:
  """Returns the file that is divided into a training and a dev split: train.* or the only one.

  Raises:
    TaskError: a dev file exists besides, or the file is missing.
  """
  folder = _folders(task, source)[0]
  paths = [path for path in sorted(folder.iterdir()) if path.name.lower().endswith(tuple(ENDS))]
  stems = [path.name.lower().partition(".")[0] for path in paths]
  whole = [path for path, stem in zip(paths, stems, strict=True) if stem == "train"] or paths
  if len(whole) != 1 or set(stems) & set(DEV):
    raise TaskError(
      f"{task.title}: {folder} has to hold one file for config.own.split or own.folds to divide,"
      f" and no dev file (found: {_listed(folder)})"
    )
  return whole[0]


def _folders(task: TextTask, source: str | Path, other: Sequence[str] = ()) -> list[Path]:
  """Returns the folders of a task's files, `source` if it has none of the task's or `other`."""
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

  A row with a wrong number of columns, an empty text or an unknown label is left out. In splits
  without labels empty texts are kept and a bad row is an error: a submission needs every row.

  Args:
    source: as for `find_split`, or "tfds:NAME" for tensorflow_datasets ("tfds:glue" for GLUE).
    data_dir: the folder of tensorflow_datasets; None for its default.
    holds: whether a row with this (first) text is in the split.

  Raises:
    TaskError: a file is missing, unreadable, not UTF-8 or lacks a column; more than 1 % of its rows
      are left out; a label of a custom task does not occur in the training split.
  """
  if not task.is_complete:
    raise TaskError(f"task {task.name!r}: its labels are not known yet: call glue_files.complete")
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
      f"{task.title}: {len(unknown)} labels never occur in the training split: {named}; "
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
  """Returns the rows of a file to predict, and for each {column: cell} of the columns `copied`.

  The file has any of `files.FORMS`; labels are ignored.

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

  Labels are sorted, as numbers if all are numbers; the scale of a regression is the largest
  absolute label. A complete task, such as GLUE's, is returned unchanged.

  Raises:
    TaskError: as `read`; or there are fewer than two classes.
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
    TaskError: a column of the task, or one to copy, is missing or there twice.
  """
  where, columns = next(rows)
  hidden, wanted = split in task.submission, [task.text, task.pair, task.label]
  if hidden and (task.name in TASKS or task.label not in columns):
    wanted[2] = None  # GLUE hides them; a custom test split may have them
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
  """Yields the rows of a TFDS dataset; a GLUE task's rows by their index."""
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
  """Returns a label as JSON has it; in tables with a gap, 1.0 is 1, and the gap, NaN, is ""."""
  if value != value:
    return ""
  return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _tfds_label(task: TextTask, value: np.ndarray, classes: Sequence[str] | None) -> str:
  """Returns a label as in GLUE's files, or "" if TFDS hides it."""
  if classes is None:
    return _label_text(value.item())
  if value < 0:
    return ""
  # Some classes with names in TFDS (such as "acceptable") are 0 and 1 in the files.
  name = classes[value]
  return name if not task.labels or name in task.labels else str(value)
