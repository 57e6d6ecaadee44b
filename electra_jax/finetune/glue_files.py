"""Reads the files of text tasks: GLUE's and custom ones.

GLUE's files are tab-separated, without quoting. The first line names the columns, except in CoLA's
training and dev splits. A custom task (`tasks.own`) and a file to predict may be quoted as CSV is
(`files.split_rows`), or JSON lines. All may be .gz, .xz or .zst.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from electra_jax.data import compressed, tfds
from electra_jax.finetune.files import MAX_BAD_FRAC, TaskError, read_lines, split_rows
from electra_jax.finetune.labels import TextTask
from electra_jax.finetune.tasks import TASKS

TABLES, LINES = ([form + end for end in ("", *compressed.NEW)] for form in (".tsv", ".jsonl"))
# Releases of GLUE use either name for the split and the folder of its diagnostic set.
_DIAGNOSTIC = ("diagnostic", "ax")


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

  text: str | None
  pair: str | None
  label: str | None
  copied: tuple = ()  # the columns to copy to a prediction


_FIELDS = ("text", "pair", "label")


# The place of a row, and its cells or the reason it cannot be used.
_Row = tuple[str, _Cells | str]


def find_split(task: TextTask, source: str | Path, split: str) -> Path:
  """Returns the file of a split; `source` is the task's folder or its parent.

  Raises:
    TaskError: there is no such split, or not exactly one file of it.
  """
  if split not in task.splits:
    raise TaskError(f"{task.title} has no split {split!r}; it has {', '.join(task.splits)}")
  root = Path(source)
  if not root.is_dir():
    raise TaskError(f"{task.title}: {source} is not a folder")
  other = _DIAGNOSTIC if split == "diagnostic" else ()
  inside = sorted(path for path in root.iterdir() if path.is_dir())
  folders = [path for path in inside if path.name.lower() in (*task.folders, *other)] or [root]
  names = {name + suffix for name in other or (split,) for suffix in TABLES + LINES}
  for folder in folders:
    found = sorted(path for path in folder.iterdir() if path.name.lower() in names)
    if len(found) > 1:
      raise TaskError(f"{task.title}: {found[0]} and {found[1].name} are both the split {split!r}")
    if found:
      return found[0]
  has = ", ".join(sorted(path.name for path in folders[0].iterdir())) or "nothing"
  raise MissingSplit(
    f"{task.title}: {folders[0]} has no file for the split {split!r} (found: {has:.200})"
  )


def read(
  task: TextTask, source: str | Path, split: str, *, data_dir: str | None = None
) -> SplitExamples:
  """Returns the examples of a split, in the order of its rows.

  A row with a wrong number of columns, an empty text or an unknown label is left out. In splits
  without labels empty texts are kept and a bad row is an error: a submission needs every row.

  Args:
    source: as for `find_split`, or "tfds:NAME" for tensorflow_datasets ("tfds:glue" for GLUE).
    data_dir: the folder of tensorflow_datasets; None for its default.

  Raises:
    TaskError: a file is missing, unreadable, not UTF-8 or lacks a column; more than 1 % of its rows
      are left out; a label of a custom task does not occur in the training split.
  """
  if not task.is_complete:
    raise TaskError(f"task {task.name!r}: its labels are not known yet: call glue_files.complete")
  hidden = split in task.submission
  examples, bad, unknown, count = [], [], {}, 0
  for place, (where, row) in enumerate(_rows(task, source, split, data_dir)):
    count += 1
    why = row if isinstance(row, str) else _fault(task, row, hidden)
    if why is None and row.label:
      why = task.label_type.fault(task, row.label)
      if why is not None:
        unknown.setdefault(row.label, where)
    if why is not None:
      bad.append(f"{where}: {why}")
      continue
    label = task.label_type.parse(task, row.label) if row.label else None
    examples.append(Example(row.text, row.pair, label, place))
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

  A TSV (.tsv, also compressed) has a header; any other file is JSON lines. Labels are ignored.

  Raises:
    TaskError: the file cannot be read, lacks a column, or has an invalid row.
  """
  headed = dataclasses.replace(task, unheaded=(), submission={"file": ""})
  examples, cells = [], []
  for place, (where, row) in enumerate(_file_rows(headed, path, "file", copied)):
    why = row if isinstance(row, str) else _fault(headed, row, True)
    if why is not None:
      raise TaskError(f"{where}: {why}")
    examples.append(Example(row.text, row.pair, None, place))
    cells.append(dict(zip(copied, row.copied, strict=True)))
  if not examples:
    raise TaskError(f"{path}: the file has no rows")
  return examples, cells


def complete(task: TextTask, source: str | Path, *, data_dir: str | None = None) -> TextTask:
  """Returns the task with the labels or the scale of its training split.

  Labels are sorted, as numbers if all are numbers; the scale of a regression is the largest
  absolute label. A complete task, such as GLUE's, is returned unchanged.

  Raises:
    TaskError: as `read`; or there are fewer than two classes.
  """
  if task.is_complete:
    return task
  rows = [row for _, row in _rows(task, source, "train", data_dir)]
  labels = {row.label for row in rows if not isinstance(row, str) and row.label}
  found = task.label_type.complete(labels, f"{task.title}: {source}")
  return dataclasses.replace(task, **found)


def _fault(task: TextTask, row: _Cells, hidden: bool) -> str | None:
  """Returns an error message if a text or the label of a row is missing or empty, or None."""
  for column, text in ((task.text, row.text), (task.pair, row.pair)):
    if column is not None and (text is None or not (hidden or text.strip())):
      return f"{column!r} is {'missing' if text is None else 'empty'}"
  return None if row.label or hidden else f"{task.label!r} is empty"


def _rows(task: TextTask, source: str | Path, split: str, data_dir: str | None) -> Iterator[_Row]:
  if str(source).startswith("tfds:"):
    return _tfds_rows(task, str(source), split, data_dir)
  return _file_rows(task, find_split(task, source, split), split)


def _file_rows(
  task: TextTask, path: Path, split: str, copied: Sequence[str] = ()
) -> Iterator[_Row]:
  is_tsv = path.name.lower().endswith(tuple(TABLES))
  return (_tsv_rows if is_tsv else _json_rows)(task, path, split, copied)


def _wanted(
  task: TextTask, split: str, columns: Sequence[str], where: str, copied: Sequence[str] = ()
) -> dict[str, str]:
  """Returns {field of _Cells: column}; raises TaskError if one, or one to copy, is not there."""
  wanted = {"text": task.text, "pair": task.pair, "label": task.label}
  if split in task.submission and (task.name in TASKS or task.label not in columns):
    del wanted["label"]  # GLUE hides them; a custom test split may have them
  wanted = {field: column for field, column in wanted.items() if column is not None}
  for column in (*wanted.values(), *copied):
    if columns.count(column) != 1:
      count = "two columns" if column in columns else "no column"
      raise TaskError(f"{where} has {count} {column!r} (columns: {', '.join(columns):.200})")
  return wanted


def _lines(path: Path) -> list[str]:
  lines = read_lines(path)
  if not any(lines):
    raise TaskError(f"{path}: the file is empty")
  return lines


def _tsv_rows(task: TextTask, path: Path, split: str, copied: Sequence[str]) -> Iterator[_Row]:
  lines = _lines(path)
  headed = not task.unheaded or split in task.submission
  while "\t" in lines[0] and not lines[-1]:  # with a single column, an empty line is a text
    lines.pop()
  of_glue = task.name in TASKS and split in TASKS[task.name].splits
  rows = split_rows(lines, quoting=not of_glue)
  columns = next(rows)[1] if headed else list(task.unheaded)
  wanted = _wanted(task, split, columns, f"{path}:1" if headed else str(path), copied)
  places = [columns.index(wanted[f]) if f in wanted else None for f in _FIELDS]
  others = [columns.index(column) for column in copied]
  for number, cells in rows:
    if len(cells) != len(columns):
      yield f"{path}:{number}", f"{len(cells)} columns instead of {len(columns)}"
      continue
    text, pair, label = (None if place is None else cells[place] for place in places)
    copies = tuple(cells[place] for place in others)
    yield f"{path}:{number}", _Cells(text, pair, label and label.strip(), copies)


def _json_rows(task: TextTask, path: Path, split: str, copied: Sequence[str]) -> Iterator[_Row]:
  wanted, lines = None, _lines(path)
  while not lines[-1]:
    lines.pop()
  for number, line in enumerate(lines, 1):
    where = f"{path}:{number}"
    try:
      value = json.loads(line)
    except (ValueError, RecursionError):
      value = None
    if not isinstance(value, dict):
      yield where, "not a JSON object"
      continue
    wanted = wanted or _wanted(task, split, list(value), where, copied)
    text, pair, label = (value.get(wanted[f]) if f in wanted else None for f in _FIELDS)
    if isinstance(label, bool | int | float):
      label = _label_text(label)
    text, pair, label = (cell if isinstance(cell, str) else None for cell in (text, pair, label))
    # A lone surrogate is valid JSON but not valid text.
    whole = all(not any("\ud800" <= c <= "\udfff" for c in x) for x in (text, pair, label) if x)
    cells = _Cells(text, pair, label and label.strip(), tuple(map(value.get, copied)))
    yield where, cells if whole else "not UTF-8"


def _tfds_rows(task: TextTask, source: str, split: str, data_dir: str | None) -> Iterator[_Row]:
  """Yields the rows of a TFDS dataset; those of a GLUE task by their index."""
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
  wanted = _wanted(task, split, columns, f"{task.title}: tfds:{name}")
  classes = getattr(dict(info.features.items()).get(tfds_column[task.label]), "names", None)
  values = list(dataset.as_numpy_iterator())
  if task.name in TASKS and "idx" in dataset.element_spec:  # shards are shuffled
    values.sort(key=lambda value: int(value["idx"]))
  for place, value in enumerate(values):
    cells = {field: value[tfds_column[column]] for field, column in wanted.items()}
    texts = {f: c.decode("utf-8", "replace") for f, c in cells.items() if isinstance(c, bytes)}
    if "label" in cells and "label" not in texts:
      texts["label"] = _tfds_label(task, cells["label"], classes)
    yield f"tfds:{name}:{tfds_split}:{place}", _Cells(*map(texts.get, _FIELDS))


def _label_text(value: bool | int | float) -> str:
  """Returns a label as JSON has it; of tables with a gap, 1.0 is 1, and the gap, NaN, is ""."""
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
