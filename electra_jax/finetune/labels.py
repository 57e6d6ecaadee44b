"""Defines text tasks and their two label types, classes and numbers.

All behaviour that depends on the label type is in its entry in LABEL_TYPES (`task.label_type`).
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from electra_jax.finetune.files import MAX_BAD_FRAC, TaskError
from electra_jax.finetune.metrics import METRICS, Metric  # noqa: F401 (here in version 0.1)


@dataclasses.dataclass(frozen=True)
class TextTask:
  """A task on a text or a pair of texts, given as columns of its files."""

  name: str
  title: str  # as printed in papers
  text: str
  label: str
  pair: str | None = None
  # The classes in order of their indices; None for regression, () until `glue_files.complete`
  labels: tuple[str, ...] | None = ("0", "1")
  # a key of LABEL_TYPES; None: "regression" if `labels` is None, else "classification"
  label_kind: str | None = None
  metrics: tuple[str, ...] = ("accuracy",)  # keys of metrics.METRICS, the main one first
  folders: tuple[str, ...] = ()  # possible names of its folder, lower-cased
  # Of a regression: training predicts (label - offset) / scale; the scale is None until complete
  scale: float | None = 1.0
  offset: float = 0.0
  limits: tuple[float, float] | None = None  # smallest and largest label of a regression
  epochs: int = 3  # in the paper
  doubled: bool = False  # train on every pair in both orders
  average: bool = False  # in the paper's GLUE average (Table 1: all but WNLI)
  dev_splits: tuple[str, ...] = ("dev",)  # labelled splits for evaluation, the paper's first
  # {split without labels: file name in a GLUE submission}
  submission: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unheaded: tuple[str, ...] = ()  # columns of the labelled splits if they have no header
  # {column: its name in tensorflow_datasets, if different}
  tfds_columns: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def label_type(self) -> "LabelType":
    """The entry of LABEL_TYPES."""
    derived = "regression" if self.labels is None else "classification"
    return LABEL_TYPES[self.label_kind or derived]

  @functools.cached_property
  def indices(self) -> dict[str | float, int]:
    """The class index by name and, unless two names are the same number, by number."""
    named = {label: index for index, label in enumerate(self.labels)}
    numbers = [number(label) for label in self.labels]
    count = collections.Counter(numbers)
    return named | {x: i for i, x in enumerate(numbers) if count[x] == 1 and x is not None}

  @property
  def digits(self) -> int:
    """The significant digits of a written number: six, and those that the offset takes."""
    return 6 + math.ceil(math.log10(max(1.0, abs(self.offset / self.scale))))

  @property
  def is_complete(self) -> bool:
    """Whether the labels and the scale are known."""
    return self.labels != () and self.scale is not None

  @property
  def splits(self) -> tuple[str, ...]:
    """All splits: the training split, those with labels, those without labels."""
    return ("train", *self.dev_splits, *self.submission)


class LabelType(NamedTuple):
  """The type of a text task's labels.

  `complete` takes the labels of the training file and of those rows that are trained on, and a
  place (file or task) for error messages.
  `predictions` maps outputs [n, C] or [n] float64 to [n] float64, in the units of `parse`.
  """

  head: str  # a key of `task_network.HEAD_KINDS`
  output: str  # name of the head's prediction to read
  dtype: type  # of the training target
  default_metrics: tuple[str, ...]  # keys of metrics.METRICS
  incomplete: dict  # fields of a TextTask with unknown labels or scale
  # -> the fields that replace `incomplete`
  complete: Callable[[Sequence[str], Sequence[str], str], dict]
  head_arguments: Callable[[TextTask], dict]  # the head's arguments that depend on the labels
  expected: Callable[[TextTask], str]  # description of a label, for error messages
  # -> the class index or the number; None if the text is not a label
  parse: Callable[[TextTask, str], int | float | None]
  predictions: Callable[[TextTask, np.ndarray], np.ndarray]
  # (scale, offset) from the head's output to the label of a regression; None for classes
  unit: Callable[[TextTask], tuple[float, float] | None]
  answers: Callable[[TextTask, np.ndarray], list[dict]]  # outputs -> results of `model.Model`
  written: Callable[[TextTask, np.ndarray], list[str]]  # predictions [n] -> texts in a submission
  collapsed: Callable[[np.ndarray, np.ndarray], bool]  # (labels [n], predictions [n])
  constant: Callable[[np.ndarray], float]  # labels [n] -> the best constant prediction
  summary: Callable[[TextTask, Sequence], str]  # frequencies or distribution of the labels


def number(text: str) -> float | None:
  try:
    value = float(text)
  except ValueError:
    return None
  return value if math.isfinite(value) else None


HIDDEN = ("-1", "-1.0")  # a label that is hidden or missing, by the convention of `datasets`
MANY = 20  # distinct numbers as labels, above which they are probably not classes


def _complete_classes(labels: Sequence[str], trained: Sequence[str], where: str) -> dict:
  """Sorts the labels, as numbers if all are; 1.0 is 1 if all numbers are integers, or 1 occurs.

  A rare -1 beside 0, 1, ... n is not a class.
  """
  counts = collections.Counter(labels)
  whole = {x: m[1] for x in counts if (m := re.fullmatch(r"(-?\d+)(?:\.0+)?", x))}
  are_whole = len(whole) == len(counts)
  names = {whole[x] if x in whole and (are_whole or whole[x] in counts) else x for x in counts}
  hidden = sum(counts[x] for x in HIDDEN)
  if hidden <= MAX_BAD_FRAC * len(labels) and names - {"-1"} == set(
    map(str, range(len(names) - 1))
  ):
    names -= {"-1"}
  if len(names) < 2:
    has = ", ".join(map(repr, names)) or "none"
    hint = " (-1 means that a label is hidden)" if hidden else ""
    raise TaskError(f"{where}: the training split has fewer than 2 labels: {has}{hint}")
  if any(number(label) is None for label in names):
    return {"labels": tuple(sorted(names))}
  return {"labels": tuple(sorted(names, key=lambda label: (float(label), label)))}


def _parse_class(task: TextTask, text: str) -> int | None:
  return task.indices.get(text, task.indices.get(number(text)))


def kind_hint(names: Iterable[str]) -> str:
  """Returns advice if classes seem to be amounts, else ""."""
  values = {number(name) for name in names}
  if None in values or (len(values) <= MANY and all(x.is_integer() for x in values)):
    return ""
  return "; if these numbers are amounts, set own.kind=regression"


def _class_answers(task: TextTask, logits: np.ndarray) -> list[dict]:
  probs = np.exp(logits - logits.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  return [
    {"label": task.labels[i], "probability": float(row[i])}
    for i, row in zip(probs.argmax(-1), probs, strict=True)
  ]


def shares(labels: Sequence[str]) -> str:
  """Returns the five most frequent labels and their percentages."""
  counts = collections.Counter(labels).most_common(5)
  return ", ".join(f"{label} {100 * n / len(labels):.1f} %" for label, n in counts)


def _standardize(labels: Sequence[str], trained: Sequence[str], where: str) -> dict:
  """Returns the standard deviation and the mean of the labels that are trained on."""
  numbers = [value for value in map(number, trained) if value is not None]
  if not numbers:
    example = f", e.g. {trained[0]!r:.40}" if trained else ""
    raise TaskError(
      f"{where}: the training split has no number as a label{example}: write numbers as 1234.5, or"
      " leave out own.kind=regression"
    )
  scale, offset = float(np.std(numbers)), float(np.mean(numbers))
  if scale <= 1e-9 * abs(offset):  # rounding of equal numbers
    raise TaskError(f"{where}: all labels of the training split are {offset:g}")
  return {"scale": scale, "offset": offset}


def _in_unit(task: TextTask, scores: np.ndarray) -> np.ndarray:
  """Returns predictions from the scores of a head."""
  return scores * task.scale + task.offset


def _describe_numbers(task: TextTask, labels: Sequence[float]) -> str:
  low, high, mean, error = np.min(labels), np.max(labels), np.mean(labels), np.std(labels)
  return f", labels {low:g} to {high:g}; mean {mean:g} has RMSE {error:.4g}"


def _parse_number(task: TextTask, text: str) -> float | None:
  value, (low, high) = number(text), task.limits or (-math.inf, math.inf)
  return value if value is not None and low <= value <= high else None


def _written_numbers(task: TextTask, predictions: np.ndarray) -> list[str]:
  low, high = task.limits or (-np.inf, np.inf)
  form = ".3f" if task.limits else f".{task.digits}g"  # numbers without limits may be small
  return [f"{value:{form}}" for value in np.clip(predictions, low, high) + 0.0]


LABEL_TYPES = {
  "classification": LabelType(
    head="classification",
    output="logits",
    dtype=np.int32,
    default_metrics=("accuracy",),
    incomplete={"labels": (), "scale": 1.0},
    complete=_complete_classes,
    head_arguments=lambda task: {"outputs": len(task.labels)},
    expected=lambda task: f"one of {', '.join(task.labels)}",
    parse=_parse_class,
    predictions=lambda task, logits: logits.argmax(1).astype(np.float64),
    unit=lambda task: None,
    answers=_class_answers,
    written=lambda task, predictions: [task.labels[int(index)] for index in predictions],
    collapsed=lambda labels, predictions: bool(np.ptp(predictions) == 0),
    constant=lambda labels: float(np.bincount(labels.astype(np.int64)).argmax()),
    summary=lambda task, labels: (
      f": {shares([task.labels[label] for label in labels])}{kind_hint(task.labels)}"
    ),
  ),
  "regression": LabelType(
    head="regression",
    output="score",
    dtype=np.float32,
    default_metrics=("spearman", "pearson"),
    incomplete={"labels": None, "scale": None},
    complete=_standardize,
    head_arguments=lambda task: {},
    expected=lambda task: (
      "a number from {:g} to {:g}".format(*task.limits) if task.limits else "a number"
    ),
    parse=_parse_number,
    predictions=_in_unit,
    unit=lambda task: (task.scale, task.offset),
    answers=lambda task, scores: [{"score": x} for x in _in_unit(task, scores).tolist()],
    written=_written_numbers,
    # The predictions' standard deviation is below 1 % of the labels'.
    collapsed=lambda labels, predictions: bool(predictions.std() < 0.01 * labels.std()),
    constant=lambda labels: float(labels.mean()),
    summary=_describe_numbers,
  ),
}
