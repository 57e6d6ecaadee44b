"""Text tasks and the two types of label they have: a class, or a number.

Whatever depends on the type of label is a field of its entry in LABEL_TYPES; the rest of the
package asks `task.label_type`.
"""

import collections
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from electra_jax.finetune.files import TaskError


@dataclasses.dataclass(frozen=True)
class TextTask:
  """A task on a text or a pair of texts.

  Fields:
    name: its key.
    title: its name as papers print it.
    text, pair, label: columns, by the names in the header; no pair where there is one text.
    labels: the classes as files write them, in the order of their indices; None for regression;
      empty for a task of one's own until `glue_files.complete` finds them in the training split.
    metrics: keys of METRICS, the main one first.
    folders: names of the folder with its files, whatever their case.
    scale: training targets of a regression are labels divided by it; None until it is found.
    limits: smallest and largest label of a regression, where they are known.
    epochs: passes over the training split in the paper.
    doubled: whether training also sees every pair in the other order.
    average: whether the paper's average over GLUE includes it (Table 1: all but WNLI).
    dev_splits: splits with labels to measure on, the paper's first.
    submission: {split without labels: name of its file in a submission to GLUE}.
    unheaded: columns of the splits that have labels where these have no header row.
    tfds_columns: {column: its name in tensorflow_datasets}, where that differs.
  """

  name: str
  title: str
  text: str
  label: str
  pair: str | None = None
  labels: tuple[str, ...] | None = ("0", "1")
  metrics: tuple[str, ...] = ("accuracy",)
  folders: tuple[str, ...] = ()
  scale: float | None = 1.0
  limits: tuple[float, float] | None = None
  epochs: int = 3
  doubled: bool = False
  average: bool = True
  dev_splits: tuple[str, ...] = ("dev",)
  submission: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unheaded: tuple[str, ...] = ()
  tfds_columns: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def label_type(self) -> "LabelType":
    """The entry of LABEL_TYPES; files name it by `labels` alone."""
    return LABEL_TYPES["regression" if self.labels is None else "classification"]

  @property
  def is_complete(self) -> bool:
    """Whether the labels and the scale are known."""
    return self.labels != () and self.scale is not None

  @property
  def splits(self) -> tuple[str, ...]:
    """All splits: of training, with labels to measure on, without labels."""
    return ("train", *self.dev_splits, *self.submission)


class LabelType(NamedTuple):
  """The type of a text task's labels; `task` below is a TextTask.

  Fields:
    head: the kind of head, a key of `task_network.HEAD_KINDS`.
    output: the prediction of that head which is read.
    dtype: of the training target.
    metrics: keys of METRICS that a task may name.
    default_metrics: those of a task that names none.
    incomplete: fields of a TextTask whose labels or scale are not known yet.
    complete: (labels as files write them, where) -> the fields that replace `incomplete`. Raises
      TaskError, its message beginning with `where`.
    head_arguments: (task) -> arguments of the head that follow from its labels.
    fault: (task, text) -> why this is no label of the task, or None.
    parse: (task, text) -> the label: the index of the class, or the number.
    predictions: (task, outputs [n, C] or [n] float64) -> [n] float64, in the form of `parse`.
    answers: (task, outputs) -> a dict for each, as `model.Model` returns them.
    written: (task, predictions [n]) -> text of each in a submission.
    collapsed: (labels [n], predictions [n]) -> whether training failed: the predictions hardly
      differ although the labels do.
    summary: (task, labels) -> how often each label occurs, or how numbers are spread.
  """

  head: str
  output: str
  dtype: type
  metrics: tuple[str, ...]
  default_metrics: tuple[str, ...]
  incomplete: dict
  complete: Callable[[set[str], str], dict]
  head_arguments: Callable[[TextTask], dict]
  fault: Callable[[TextTask, str], str | None]
  parse: Callable[[TextTask, str], int | float]
  predictions: Callable[[TextTask, np.ndarray], np.ndarray]
  answers: Callable[[TextTask, np.ndarray], list[dict]]
  written: Callable[[TextTask, np.ndarray], list[str]]
  collapsed: Callable[[np.ndarray, np.ndarray], bool]
  summary: Callable[[TextTask, Sequence], str]


def _number(text: str) -> float | None:
  try:
    value = float(text)
  except ValueError:
    return None
  return value if math.isfinite(value) else None


# Classes.


def _complete_classes(labels: set[str], where: str) -> dict:
  """Sorts the classes, as numbers where all are."""
  if len(labels) < 2:
    has = ", ".join(map(repr, labels)) or "none"
    raise TaskError(f"{where}: the training split has 1 label or none: {has}")
  numbers = all(_number(label) is not None for label in labels)
  order = (lambda label: (float(label), label)) if numbers else str
  return {"labels": tuple(sorted(labels, key=order))}


def _class_fault(task: TextTask, text: str) -> str | None:
  if not task.labels or text in task.labels:
    return None
  return f"the label is {text!r}, not one of {', '.join(task.labels)}"


def _class_answers(task: TextTask, logits: np.ndarray) -> list[dict]:
  probs = np.exp(logits - logits.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  return [
    {"label": task.labels[i], "probability": float(row[i])}
    for i, row in zip(probs.argmax(-1), probs, strict=True)
  ]


def _class_summary(task: TextTask, labels: Sequence) -> str:
  counts = collections.Counter(labels).most_common(5)
  shares = (f"{task.labels[int(label)]} {100 * n / len(labels):.1f} %" for label, n in counts)
  return f": {', '.join(shares)}"


# Numbers.


def _complete_scale(labels: set[str], where: str) -> dict:
  """Finds the largest absolute label."""
  numbers = [abs(value) for value in map(_number, labels) if value is not None]
  scale = max(numbers, default=0.0)
  if not scale:
    raise TaskError(f"{where}: no label of the training split is a number above 0")
  return {"scale": scale}


def _number_fault(task: TextTask, text: str) -> str | None:
  value, (low, high) = _number(text), task.limits or (-math.inf, math.inf)
  if value is not None and low <= value <= high:
    return None
  between = f" from {low:g} to {high:g}" if task.limits else ""
  return f"the label is {text!r}, not a number{between}"


def _written_numbers(task: TextTask, predictions: np.ndarray) -> list[str]:
  """Clips to the limits of the task; three decimals."""
  low, high = task.limits or (-np.inf, np.inf)
  return [f"{value:.3f}" for value in np.clip(predictions, low, high) + 0.0]


LABEL_TYPES = {
  "classification": LabelType(
    head="classification",
    output="logits",
    dtype=np.int32,
    metrics=("accuracy", "f1", "mcc"),
    default_metrics=("accuracy",),
    incomplete={"labels": (), "scale": 1.0},
    complete=_complete_classes,
    head_arguments=lambda task: {"outputs": len(task.labels)},
    fault=_class_fault,
    parse=lambda task, text: task.labels.index(text),
    predictions=lambda task, logits: logits.argmax(1).astype(np.float64),
    answers=_class_answers,
    written=lambda task, predictions: [task.labels[int(index)] for index in predictions],
    collapsed=lambda labels, predictions: bool(np.ptp(predictions) == 0),
    summary=_class_summary,
  ),
  "regression": LabelType(
    head="regression",
    output="score",
    dtype=np.float32,
    metrics=("spearman", "pearson"),
    default_metrics=("spearman", "pearson"),
    incomplete={"labels": None, "scale": None},
    complete=_complete_scale,
    head_arguments=lambda task: {},
    fault=_number_fault,
    parse=lambda task, text: float(text),
    predictions=lambda task, scores: scores * task.scale,
    answers=lambda task, scores: [{"score": float(score) * task.scale} for score in scores],
    written=_written_numbers,
    # Below 1 % of the standard deviation of the labels.
    collapsed=lambda labels, predictions: bool(predictions.std() < 0.01 * labels.std()),
    summary=lambda task, labels: f", labels {np.mean(labels):.2f} ± {np.std(labels):.2f}",
  ),
}


# Metrics.


def _agreement(rows: np.ndarray, classes: int) -> dict[str, np.ndarray]:
  """Returns the arguments of scikit-learn's metrics for (label, prediction) rows [n, 2].

  They are the distinct rows with counts as weights: thousands of resamplings stay cheap.
  """
  codes = (rows[:, 0] * classes + rows[:, 1]).astype(np.int64)
  counts = np.bincount(codes, minlength=classes**2)
  found = np.flatnonzero(counts)
  weights = counts[found]
  return {"y_true": found // classes, "y_pred": found % classes, "sample_weight": weights}


def _sklearn(name: str, rows: np.ndarray, classes: int, **options) -> float:
  from sklearn import metrics

  return getattr(metrics, name)(**_agreement(rows, classes), **options)


def _f1(rows: np.ndarray, classes: int) -> float:
  """Of class 1 where there are two, the mean over the classes where there are more."""
  average = "binary" if classes == 2 else "macro"
  return _sklearn("f1_score", rows, classes, average=average, zero_division=0.0)


def _correlation(name: str, rows: np.ndarray) -> float:
  from scipy import stats

  if (np.ptp(rows, axis=0) == 0).any():
    return 0.0
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of predictions that are nearly alike
    value = getattr(stats, name)(rows[:, 0], rows[:, 1]).statistic
  return value if math.isfinite(value) else 0.0


# (rows [n, 2] of label and prediction, number of classes or 0) -> from -1 to 1. Where labels or
# predictions are all alike, MCC and the correlations are 0.
METRICS = {
  "accuracy": lambda rows, classes: _sklearn("accuracy_score", rows, classes),
  "f1": _f1,
  "mcc": lambda rows, classes: _sklearn("matthews_corrcoef", rows, classes),
  "spearman": lambda rows, classes: _correlation("spearmanr", rows),
  "pearson": lambda rows, classes: _correlation("pearsonr", rows),
}
