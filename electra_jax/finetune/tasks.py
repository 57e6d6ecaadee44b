"""Text classification and regression tasks: GLUE's nine, and one's own.

What a task is stands in one row of TASKS: where its text and labels are in GLUE's files, how it is
measured (Clark et al. 2020, Section 3.1: MCC for CoLA, Spearman correlation for STS-B, accuracy
otherwise), and how long it is trained (Appendix B: 10 epochs for RTE and STS-B, otherwise 3).
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping

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
    metrics: what is measured, the main one first.
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
  def kind(self) -> str:
    """'classification' or 'regression'."""
    return "regression" if self.labels is None else "classification"

  @property
  def splits(self) -> tuple[str, ...]:
    """All splits: of training, with labels to measure on, without labels."""
    return ("train", *self.dev_splits, *self.submission)


def _agreement(rows: np.ndarray, classes: int) -> dict[str, np.ndarray]:
  """Returns the arguments of scikit-learn's metrics for (label, prediction) rows [n, 2].

  They are the distinct rows with counts as weights: thousands of resamplings stay cheap.
  """
  codes = (rows[:, 0] * classes + rows[:, 1]).astype(np.int64)
  counts = np.bincount(codes, minlength=classes**2)
  found = np.flatnonzero(counts)
  return {
    "y_true": found // classes,
    "y_pred": found % classes,
    "sample_weight": counts[found],
  }


def _accuracy(rows: np.ndarray, classes: int) -> float:
  from sklearn import metrics

  return metrics.accuracy_score(**_agreement(rows, classes))


def _mcc(rows: np.ndarray, classes: int) -> float:
  from sklearn import metrics

  return metrics.matthews_corrcoef(**_agreement(rows, classes))


def _f1(rows: np.ndarray, classes: int) -> float:
  """Of class 1 where there are two, the mean over the classes where there are more."""
  from sklearn import metrics

  average = "binary" if classes == 2 else "macro"
  return metrics.f1_score(**_agreement(rows, classes), average=average, zero_division=0.0)


def _correlation(name: str, rows: np.ndarray) -> float:
  from scipy import stats

  if (np.ptp(rows, axis=0) == 0).any():
    return 0.0
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of predictions that are nearly alike
    value = getattr(stats, name)(rows[:, 0], rows[:, 1]).statistic
  return value if math.isfinite(value) else 0.0


# Of units [n, 2], labels and predictions, and the number of classes (0 of a regression). Where
# labels or predictions are all alike MCC and the correlations are 0.
METRICS = {
  "accuracy": _accuracy,
  "f1": _f1,
  "mcc": _mcc,
  "spearman": lambda rows, classes: _correlation("spearmanr", rows),
  "pearson": lambda rows, classes: _correlation("pearsonr", rows),
}
METRICS_OF = {"classification": ("accuracy", "f1", "mcc"), "regression": ("spearman", "pearson")}

_ENTAILMENT = ("entailment", "not_entailment")

TASKS = {
  task.name: task
  for task in (
    TextTask(
      "cola",
      "CoLA",
      text="sentence",
      label="label",
      metrics=("mcc", "accuracy"),
      folders=("cola",),
      submission={"test": "CoLA.tsv"},
      unheaded=("source", "label", "original", "sentence"),
    ),
    TextTask(
      "sst2",
      "SST-2",
      text="sentence",
      label="label",
      folders=("sst-2", "sst2", "sst"),
      submission={"test": "SST-2.tsv"},
    ),
    TextTask(
      "mrpc",
      "MRPC",
      text="#1 String",
      pair="#2 String",
      label="Quality",
      metrics=("accuracy", "f1"),
      folders=("mrpc",),
      doubled=True,
      submission={"test": "MRPC.tsv"},
      tfds_columns={"#1 String": "sentence1", "#2 String": "sentence2", "Quality": "label"},
    ),
    TextTask(
      "stsb",
      "STS-B",
      text="sentence1",
      pair="sentence2",
      label="score",
      labels=None,
      metrics=("spearman", "pearson"),
      folders=("sts-b", "stsb", "sts"),
      scale=5.0,  # As in the original.
      limits=(0.0, 5.0),
      epochs=10,
      doubled=True,
      submission={"test": "STS-B.tsv"},
      tfds_columns={"score": "label"},
    ),
    TextTask(
      "qqp",
      "QQP",
      text="question1",
      pair="question2",
      label="is_duplicate",
      metrics=("accuracy", "f1"),
      folders=("qqp",),
      submission={"test": "QQP.tsv"},
      tfds_columns={"is_duplicate": "label"},
    ),
    TextTask(
      "mnli",
      "MNLI",
      text="sentence1",
      pair="sentence2",
      label="gold_label",
      labels=("contradiction", "entailment", "neutral"),
      folders=("mnli",),
      dev_splits=("dev_matched", "dev_mismatched"),
      submission={
        "test_matched": "MNLI-m.tsv",
        "test_mismatched": "MNLI-mm.tsv",
        "diagnostic": "AX.tsv",
      },
      tfds_columns={"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"},
    ),
    TextTask(
      "qnli",
      "QNLI",
      text="question",
      pair="sentence",
      label="label",
      labels=_ENTAILMENT,
      folders=("qnli",),
      submission={"test": "QNLI.tsv"},
    ),
    TextTask(
      "rte",
      "RTE",
      text="sentence1",
      pair="sentence2",
      label="label",
      labels=_ENTAILMENT,
      folders=("rte",),
      epochs=10,
      submission={"test": "RTE.tsv"},
    ),
    TextTask(
      "wnli",
      "WNLI",
      text="sentence1",
      pair="sentence2",
      label="label",
      folders=("wnli",),
      average=False,
      submission={"test": "WNLI.tsv"},
    ),
  )
}


def own(
  name: str,
  *,
  text: str,
  label: str,
  pair: str | None = None,
  kind: str = "classification",
  metrics: tuple[str, ...] = (),
) -> TextTask:
  """Returns a task on one's own files; `glue_files.complete` then finds its labels or its scale.

  Args:
    name: its key, and the name of its folder where that stands beside others.
    text, label, pair: columns of a TSV with a header, or fields of JSON lines.
    kind: 'classification' unless said; labels that are numbers do not make it a regression.
    metrics: the main one first; accuracy, or Spearman and Pearson correlation, unless said.

  Raises:
    TaskError: the name is that of a GLUE task, the kind is none, a metric is not of this kind, or
      two columns are the same.

  >>> own("reviews", text="body", label="stars", metrics=("accuracy", "f1")).kind
  'classification'
  """
  if name in TASKS:
    raise TaskError(f"task {name!r}: this is the name of a GLUE task, take another")
  if kind not in METRICS_OF:
    raise TaskError(f"task {name!r}: its kind is classification or regression, got {kind!r}")
  wrong = [metric for metric in metrics if metric not in METRICS_OF[kind]]
  if wrong:
    has = ", ".join(METRICS_OF[kind])
    raise TaskError(f"task {name!r}: {wrong[0]!r} is no metric of a {kind}, there are {has}")
  columns = [column for column in (text, pair, label) if column is not None]
  if len(set(columns)) < len(columns):
    raise TaskError(f"task {name!r}: text, pair and label are different columns, got {columns}")
  regression = kind == "regression"
  return TextTask(
    name,
    name,
    text=text,
    pair=pair,
    label=label,
    labels=None if regression else (),
    metrics=tuple(metrics) or METRICS_OF[kind][: 2 if regression else 1],
    folders=(name.lower(),),
    scale=None if regression else 1.0,
    average=False,
    submission={"test": f"{name}.tsv"},
  )
