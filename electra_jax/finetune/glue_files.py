"""Reads the files of GLUE and of custom text tasks.

GLUE's files are tab-separated, without quoting. The first line names the columns, except in CoLA's
training and dev splits. Files of a custom task (`tasks.own`) and files to predict are in any of
`files.FORMS`; their TSV may have CSV quotes (`files.split_rows`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from electra_jax.data import tfds
from electra_jax.finetune import files
from electra_jax.finetune.files import MAX_BAD_FRAC, Rows, TaskError
from electra_jax.finetune.labels import HIDDEN, TextTask, kind_hint
from electra_jax.finetune.tasks import TASKS

# Extensions of splits in a folder, without .txt, whose lines have no label.
ENDS = [f + end for f in files.FORMS if f != ".txt" for end in ("", *files.COMPRESSED)]
# Releases of GLUE have either name for the split and the folder of the diagnostic set.
_DIAGNOSTIC = ("diagnostic", "ax")
DEV = ("dev", "validation", "val")  # names of the evaluation split
EMPTY = ("", "nan", "NaN", "<NA>")  # labels that are missing, as pandas writes them


class MissingSplit(TaskError):
  """A split has no file."""


class Example(NamedTuple):
  """One text or pair."""

  text: str
  pair: str | None  # None if the task has one text
  label: int | float | None  # class index or number; None if hidden
  place: int  # row in its split, from 0: the index in a submission


class SplitExamples(NamedTuple):
  """The examples of a split, and its skipped rows."""

  examples: list[Example]
  bad: list[str]  # "file:line: reason"
  unlabelled: int  # rows with one of HIDDEN as label


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
  ends = [*ENDS, ".txt"] if split in task.submission else ENDS
  names = {stem + end for stem in stems for end in ends}
  for folder in folders:
    found = _tables(path for path in folder.iterdir() if _plain(path) in names)
    if len(found) > 1:
      raise TaskError(f"{task.title}: keep {found[0]} or {found[1].name} for the split {split!r}")
    if found:
      return found[0]
  raise MissingSplit(
    f"{task.title}: {folders[0]} has no file for the split {split!r} (found: {_listed(folders[0])})"
    f": add {split}.csv, .tsv, .json, .jsonl or .parquet"
  )


def _tables(paths: Iterable[Path]) -> list[Path]:
  """Returns the sorted paths, without .json files if there are others: they may hold anything."""
  found = sorted(paths)
  return [path for path in found if files.form_of(path) != ".json"] or found


def _plain(path: Path) -> str:
  """Returns the lower-cased name of a file, without the Hub's count of one part."""
  return path.name.lower().replace("-00000-of-00001", "")


def find_whole(task: TextTask, source: str | Path) -> Path:
  """Returns the file to divide into a training and a dev split: train.* or the only file.

  Raises:
    TaskError: it is missing, or there is also a dev file.
  """
  folder = _folders(task, source)[0]
  paths = _tables(path for path in folder.iterdir() if path.name.lower().endswith(tuple(ENDS)))
  stems = [_plain(path).partition(".")[0] for path in paths]
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

  Rows with a wrong number of columns, an empty text or an unknown label are skipped, and rows whose
  label -1 is not a class. In splits without labels empty texts are kept, -1 is a hidden label, and
  other bad rows raise: a submission needs every row.

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
  examples, bad, unknown, count, unlabelled = [], [], {}, 0, 0
  for place, row in enumerate(_cells(task, _rows(task, source, split, data_dir), split)):
    if not holds(row.text or ""):
      continue
    count += 1
    fault, label = row.fault, None
    if fault is None and row.label:
      label = task.label_type.parse(task, row.label)
      if label is None and row.label in HIDDEN:
        unlabelled += 1
        if not hidden:
          continue
      elif label is None:
        fault = f"the label is {row.label!r}, not {task.label_type.expected(task)}"
        unknown.setdefault(row.label, row.where)
    if fault is not None:
      bad.append(f"{row.where}: {fault}")
    else:
      examples.append(Example(row.text, row.pair, label, place))
  if unknown and task.labels and task.name not in TASKS:
    named = ", ".join(f"{label!r} ({where})" for label, where in list(unknown.items())[:5])
    raise TaskError(
      f"{task.title}: {len(unknown)} labels are not in the training split: {named}; "
      f"it has {', '.join(task.labels):.200}{kind_hint([*task.labels, *unknown])}"
    )
  if bad and hidden:
    raise TaskError(f"{bad[0]} ({len(bad)} of {count} rows; prediction needs all rows to be valid)")
  if len(bad) > MAX_BAD_FRAC * count:
    raise TaskError(f"{bad[0]} ({len(bad)} of {count} rows are bad, above {MAX_BAD_FRAC:.0%})")
  if not examples:
    why = f"only rows without a label ({HIDDEN[0]})" if unlabelled else "no rows"
    raise TaskError(f"{task.title}: the split {split!r} in {source} has {why}")
  if hidden and all(example.label == -1 for example in examples):  # of a regression
    examples = [example._replace(label=None) for example in examples]
  return SplitExamples(examples, bad, unlabelled)


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


def complete(
  task: TextTask,
  source: str | Path,
  *,
  data_dir: str | None = None,
  holds: Callable[[str], bool] = lambda text: True,
) -> TextTask:
  """Returns the task with the labels, or the scale and the offset, of its training file.

  The scale and the offset of a regression are the standard deviation and the mean of the labels of
  the rows that are trained on (`holds`). A complete task, such as GLUE's, is returned unchanged.

  Raises:
    TaskError: as `read`, or there are fewer than two labels.
  """
  if task.is_complete:
    return task
  labels, trained, fault = [], [], None
  for row in _cells(task, _rows(task, source, "train", data_dir), "train"):
    if row.label:
      labels.append(row.label)
      trained += [row.label] if holds(row.text or "") else []
    else:
      fault = fault or f"{row.where}: {row.fault} (no row has a label)"
  if fault and not labels:
    raise TaskError(fault)
  found = task.label_type.complete(labels, trained, f"{task.title}: {source}")
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
    text, pair, label = (
      files.clean(cell) if isinstance(cell, str) else cell
      for cell in (row.get(wanted[0]), row.get(wanted[1]), files.scalar_text(row.get(wanted[2])))
    )
    fault = None
    if not isinstance(label, str | None):
      fault = f"{task.label!r} is {label!r:.40}, not a text or a number"
    label = label.strip() if isinstance(label, str) and label.strip() not in EMPTY else None
    if not (fault or label or hidden):
      fault = f"{task.label!r} is empty"
    elif (text, label) == (task.text, task.label):
      fault, label = "the header again", None
    for column, cell in ((task.pair, pair), (task.text, text)):
      if column is not None and not (isinstance(cell, str) and (hidden or cell.strip())):
        state = "empty" if isinstance(cell, str) else "missing" if cell is None else "not a text"
        fault = f"{column!r} is {state}"
    text, pair = (cell if isinstance(cell, str) else None for cell in (text, pair))
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


def _tfds_label(task: TextTask, value: np.ndarray, classes: Sequence[str] | None) -> str:
  """Returns a label as in GLUE's files."""
  if classes is None or value < 0:  # -1 is hidden
    return files.scalar_text(value.item())
  # Classes with other names in TFDS (such as "acceptable") are 0 and 1 in the files.
  name = classes[value]
  return name if not task.labels or name in task.labels else str(value)
