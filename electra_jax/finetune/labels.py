"""Defines text tasks and their two label types, classes and numbers.

All behaviour that depends on the label type is in its entry in LABEL_TYPES (`task.label_type`).
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from electra_jax.finetune.files import TaskError
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
  scale: float | None = 1.0  # divides the labels of a regression; None until complete
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

  `complete` takes the labels in the files and a place (file or task) for error messages.
  `predictions` maps outputs [n, C] or [n] float64 to [n] float64, in the units of `parse`.
  """

  head: str  # a key of `task_network.HEAD_KINDS`
  output: str  # name of the head's prediction to read
  dtype: type  # of the training target
  default_metrics: tuple[str, ...]  # keys of metrics.METRICS
  incomplete: dict  # fields of a TextTask with unknown labels or scale
  complete: Callable[[set[str], str], dict]  # -> the fields that replace `incomplete`
  head_arguments: Callable[[TextTask], dict]  # the head's arguments that depend on the labels
  expected: Callable[[TextTask], str]  # description of a label, for error messages
  # -> the class index or the number; None if the text is not a label
  parse: Callable[[TextTask, str], int | float | None]
  predictions: Callable[[TextTask, np.ndarray], np.ndarray]
  # factor from the head's output to the label, as regressions are trained scaled; None for classes
  unit: Callable[[TextTask], float | None]
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


def _complete_classes(labels: set[str], where: str) -> dict:
  if len(labels) < 2:
    has = ", ".join(map(repr, labels)) or "none"
    raise TaskError(f"{where}: the training split has fewer than 2 labels: {has}")
  if any(number(label) is None for label in labels):
    return {"labels": tuple(sorted(labels))}
  ordered = sorted(labels, key=lambda label: (float(label), label))
  for one, other in itertools.pairwise(ordered):
    if float(one) == float(other) and other.startswith(f"{one}."):
      raise TaskError(
        f"{where}: the labels {one!r} and {other!r} are the same number: use one spelling"
      )
  return {"labels": tuple(ordered)}


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


def _complete_scale(labels: set[str], where: str) -> dict:
  numbers = [abs(value) for value in map(number, labels) if value is not None]
  scale = max(numbers, default=0.0)
  if not scale:
    raise TaskError(f"{where}: the training split has no number other than 0 as a label")
  return {"scale": scale}


def _parse_number(task: TextTask, text: str) -> float | None:
  value, (low, high) = number(text), task.limits or (-math.inf, math.inf)
  return value if value is not None and low <= value <= high else None


def _written_numbers(task: TextTask, predictions: np.ndarray) -> list[str]:
  low, high = task.limits or (-np.inf, np.inf)
  form = ".3f" if task.limits else ".6g"  # numbers without limits may be small
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
    parse=lambda task, text: task.labels.index(text) if text in task.labels else None,
    predictions=lambda task, logits: logits.argmax(1).astype(np.float64),
    unit=lambda task: None,
    answers=_class_answers,
    written=lambda task, predictions: [task.labels[int(index)] for index in predictions],
    collapsed=lambda labels, predictions: bool(np.ptp(predictions) == 0),
    constant=lambda labels: float(np.bincount(labels.astype(np.int64)).argmax()),
    summary=lambda task, labels: f": {shares([task.labels[label] for label in labels])}",
  ),
  "regression": LabelType(
    head="regression",
    output="score",
    dtype=np.float32,
    default_metrics=("spearman", "pearson"),
    incomplete={"labels": None, "scale": None},
    complete=_complete_scale,
    head_arguments=lambda task: {},
    expected=lambda task: (
      "a number from {:g} to {:g}".format(*task.limits) if task.limits else "a number"
    ),
    parse=_parse_number,
    predictions=lambda task, scores: scores * task.scale,
    unit=lambda task: task.scale,
    answers=lambda task, scores: [{"score": float(score) * task.scale} for score in scores],
    written=_written_numbers,
    # The predictions' standard deviation is below 1 % of the labels'.
    collapsed=lambda labels, predictions: bool(predictions.std() < 0.01 * labels.std()),
    constant=lambda labels: float(labels.mean()),
    summary=lambda task, labels: f", labels {np.mean(labels):.2f} ± {np.std(labels):.2f}",
  ),
}
