"""Defines GLUE's nine tasks and custom tasks.

TASKS has the columns of GLUE's files, the metrics (Clark et al. 2020, Section 3.1: MCC for CoLA,
Spearman correlation for STS-B, accuracy for others) and the epochs (Appendix B: 10 for RTE and
STS-B, 3 for others).
"""

from electra_jax.finetune.files import TaskError
from electra_jax.finetune.labels import LABEL_TYPES, TextTask
from electra_jax.finetune.metrics import METRICS

_ENTAILMENT = ("entailment", "not_entailment")


def _glue(
  name: str, title: str, text: str, pair: str | None = None, label: str = "label", **fields
) -> TextTask:
  """Returns a task whose folder and submission file are named after its title."""
  defaults = {
    "folders": tuple(dict.fromkeys((title.lower(), name))),
    "submission": {"test": f"{title}.tsv"},
    "average": True,
    "tfds_columns": {} if label == "label" else {label: "label"},
  }
  return TextTask(name, title, text, label, pair, **defaults | fields)


_GLUE = (
  _glue(
    "cola",
    "CoLA",
    "sentence",
    metrics=("mcc", "accuracy"),
    unheaded=("source", "label", "original", "sentence"),
  ),
  _glue("sst2", "SST-2", "sentence", folders=("sst-2", "sst2", "sst")),
  _glue(
    "mrpc",
    "MRPC",
    "#1 String",
    "#2 String",
    "Quality",
    metrics=("accuracy", "f1"),
    doubled=True,
    tfds_columns={"#1 String": "sentence1", "#2 String": "sentence2", "Quality": "label"},
  ),
  _glue(
    "stsb",
    "STS-B",
    "sentence1",
    "sentence2",
    "score",
    labels=None,
    metrics=("spearman", "pearson"),
    folders=("sts-b", "stsb", "sts"),
    scale=5.0,  # As in the original.
    limits=(0.0, 5.0),
    epochs=10,
    doubled=True,
  ),
  _glue("qqp", "QQP", "question1", "question2", "is_duplicate", metrics=("accuracy", "f1")),
  _glue(
    "mnli",
    "MNLI",
    "sentence1",
    "sentence2",
    "gold_label",
    labels=("contradiction", "entailment", "neutral"),
    dev_splits=("dev_matched", "dev_mismatched"),
    submission={
      "test_matched": "MNLI-m.tsv",
      "test_mismatched": "MNLI-mm.tsv",
      "diagnostic": "AX.tsv",
    },
    tfds_columns={"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"},
  ),
  _glue("qnli", "QNLI", "question", "sentence", labels=_ENTAILMENT),
  _glue("rte", "RTE", "sentence1", "sentence2", labels=_ENTAILMENT, epochs=10),
  _glue("wnli", "WNLI", "sentence1", "sentence2", average=False),
)
TASKS = {task.name: task for task in _GLUE}


def own(
  name: str,
  *,
  text: str,
  label: str,
  pair: str | None = None,
  kind: str = "classification",
  metrics: tuple[str, ...] = (),
) -> TextTask:
  """Returns a custom task without its labels or scale, which `glue_files.complete` sets.

  Args:
    name: its key and the name of its folder.
    text, label, pair: columns of its files.
    kind: a key of LABEL_TYPES; numeric labels do not imply regression.
    metrics: the main one first; () for the defaults of the kind.

  Raises:
    TaskError: the name is a GLUE task's, or the kind, a metric or a column is invalid.

  >>> own("reviews", text="body", label="stars", metrics=("accuracy", "f1")).labels
  ()
  """
  if name in TASKS:
    raise TaskError(f"task {name!r} is a GLUE task: choose another name")
  if kind not in LABEL_TYPES:
    raise TaskError(f"task {name!r}: own.kind must be {' or '.join(LABEL_TYPES)}, got {kind!r}")
  allowed = [name for name, metric in METRICS.items() if kind in metric.label_types]
  if wrong := [metric for metric in metrics if metric not in allowed]:
    has = ", ".join(allowed)
    raise TaskError(f"task {name!r}: {wrong[0]!r} is not a metric of a {kind}; available: {has}")
  columns = [column for column in (text, pair, label) if column is not None]
  if len(set(columns)) < len(columns):
    raise TaskError(f"task {name!r}: text, pair and label must be different columns, got {columns}")
  return TextTask(
    name,
    name,
    text=text,
    pair=pair,
    label=label,
    label_kind=kind,
    metrics=tuple(metrics) or LABEL_TYPES[kind].default_metrics,
    folders=(name.lower(),),
    submission={"test": f"{name}.tsv"},
    **LABEL_TYPES[kind].incomplete,
  )
