"""Records and helpers of the kinds of task that `prepare` lists."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from ml_collections import ConfigDict

from electra_jax.core.task_network import HeadSpec
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune.batches import Feature
from electra_jax.finetune.labels import TextTask


@dataclasses.dataclass(frozen=True)
class TaskInfo:
  """The task metadata saved with a fine-tuned network; `dataclasses.asdict` of it is JSON.

  `options` are fields of config.qa or config.tagging for making and decoding rows, and for
  questions "impossible": whether some training questions have no answer.
  """

  kind: str  # a key of `prepare.TASK_KINDS`
  name: str
  head: HeadSpec
  max_length: int  # maximum tokens of a row
  labels: tuple[str, ...] = ()  # of tagging, in the order of the logits
  text: TextTask | None = None
  options: dict = dataclasses.field(default_factory=dict)

  @classmethod
  def from_json(cls, content: dict) -> "TaskInfo":
    """Returns the info of a `dataclasses.asdict`."""
    head, text = HeadSpec(**content["head"]), content.get("text")
    if text is not None:
      text = TextTask(**{k: tuple(v) if isinstance(v, list) else v for k, v in text.items()})
    return cls(**content | {"head": head, "labels": tuple(content["labels"]), "text": text})


class EvalSplit(NamedTuple):
  """A split to predict."""

  examples: Any  # as its kind of task reads them
  features: list[Feature]  # with targets only if the head's predictions read them
  windows: list | None  # for `TaskKind.decode`
  labelled: bool  # whether all examples have labels
  examples_hash: str  # SHA-256 of the inputs and labels, which must be equal in comparisons
  file: str  # file name of the predictions


class TaskData(NamedTuple):
  """A task's data, ready for training."""

  info: TaskInfo
  title: str  # for display
  epochs: float  # default of the task
  train: list[Feature]
  splits: dict[str, EvalSplit]  # to evaluate and predict; the first selects the best seed
  notes: list[str]  # lines to print, counts and warnings
  examples: Any  # of `train`, as its kind of task reads them


class Seen(NamedTuple):
  """What the network sees of an example."""

  texts: Sequence[str]  # encoded one by one, each cut at its end if need be
  label: str = ""
  tags: Sequence[str] = ()  # of each text


class Predictor(Protocol):
  """The interface of a fine-tuned network for the kinds of task; see `model.Model`."""

  info: TaskInfo

  def predict(self, examples: Any) -> Any:
    """Returns the predictions for examples, as from `TaskKind.decode`."""


# Example scores [n, m], a row per example -> {metric: percent}, the main metric first.
Metrics = Callable[[np.ndarray], dict[str, float]]


class TaskKind(NamedTuple):
  """The functions of a kind of task, with its types of examples, windows and predictions."""

  # (config, name, tokenizer, max_length); raises ValueError for a missing or invalid file
  prepare: Callable[[ConfigDict, str, Tokenizer, int], TaskData]
  # (info, examples, tokenizer) -> features, and windows if `decode` needs them
  rows: Callable[[TaskInfo, Any, Tokenizer], tuple[list[Feature], list | None]]
  seen: Callable[[TaskInfo, Any, Tokenizer], list[Seen]]
  kept: Callable[[TaskInfo, Sequence[int]], Sequence[int]]  # tokens of a `Seen`'s texts -> not cut
  # (info, examples, windows, outputs of `loop.make_predictor`) -> predictions
  decode: Callable[[TaskInfo, Any, list | None, dict], Any]
  scores: Callable[[TaskInfo, Any, Any], np.ndarray]  # (…, predictions) -> [n, m] float64
  write: Callable[[TaskInfo, Path, Any, Any], None]  # predictions in the task's file format
  metrics: Callable[[TaskInfo], Metrics]
  collapsed: Callable[[TaskInfo, np.ndarray], bool]  # example scores -> whether training failed
  # returns a dict or a vector per item, see `model.Model`
  answer: Callable[[Predictor, Sequence], list[dict] | np.ndarray]
  predict_file: Callable[[Predictor, Path, Path, Sequence[str]], int]  # see `Model.predict_file`
  file_ending: str  # default of `out`
  fields: tuple[str, ...]  # fields, or groups, of the configuration that not all kinds read
  # the input of its head, a key of `Layers.exports`; None: the layers cannot be chosen
  level: str | None = None
  main_metric: Callable[[TaskInfo], Metrics] | None = None  # alone, if cheaper to resample
  # a key of `embedding_head.POOLINGS` for text embeddings, else None
  pooling: Callable[[TaskInfo], str | None] = lambda info: None
  class_names: Callable[[TaskInfo], tuple[str, ...]] = lambda info: info.labels  # of the head
  # names of tasks; None allows any single name
  known_names: Callable[[ConfigDict], tuple[str, ...] | None] = lambda config: None
  # from the head's output to the label, see `LabelType`; None for labels without numbers
  unit: Callable[[TaskInfo], tuple[float, float] | None] = lambda info: None
  # (…, `TaskData.train`, example scores) -> errors in the unit of the labels, None without numbers
  errors: Callable[[TaskInfo, Sequence[Feature], np.ndarray], dict[str, float] | None] = (
    lambda info, train, scores: None
  )
  limit: str = "data.max_length"  # the field that sets `kept`
  # example scores -> the metrics of always predicting the most frequent class or the mean; None if
  # the kind of task has no such baseline
  majority: Callable[[TaskInfo, np.ndarray], dict[str, float] | None] = lambda info, scores: None


SPLIT_FIELDS = ("data.train", "data.dev", "data.test", "own.split", "own.folds", "own.fold")


class Part(NamedTuple):
  """The rows of a split: the rows of a file whose text `holds` accepts."""

  file: str  # for a text task also a folder or tfds:NAME
  holds: Callable[[str], bool] = lambda text: True


def digest(examples: Iterable) -> str:
  """Returns the SHA-256 of examples."""
  return hashlib.sha256("\0".join(map(repr, examples)).encode()).hexdigest()


def share(text: str) -> float:
  """Returns a hash of the text, uniform in [0, 1).

  >>> share("He left."), share(" He left.")
  (0.487..., 0.487...)
  """
  hashed = hashlib.sha256(text.strip().encode("utf-8", "replace"))
  return int.from_bytes(hashed.digest()[:4], "big") / 2**32


def dev_shares(config: ConfigDict) -> tuple[float, float] | None:
  """Returns the range of `share` of the dev split of own.split or own.fold; None: it is a file."""
  o = config.own
  if o.fold is not None:
    return o.fold / o.folds, (o.fold + 1) / o.folds
  return (0.0, o.split) if o.split else None


def find_parts(config: ConfigDict, whole: str | None = None) -> dict[str, Part]:
  """Returns the rows of each split; raises ValueError if data.train or data.dev is wrongly set.

  Args:
    whole: the file to divide; None for data.train.
  """
  d, shares = config.data, dev_shares(config)
  files = {"train": whole or d.train, "dev": d.dev, "test": d.test}
  if shares and d.dev is not None:
    raise ValueError(
      f"config.data.dev={d.dev} cannot be combined with own.split or own.folds, which take the dev"
      " split from data.train"
    )
  for split in ("train",) if shares else ("train", "dev"):
    if files[split] is None:
      hint = ", or config.own.split=0.1 to take it from data.train" if split == "dev" else ""
      raise ValueError(f"config.data.{split} is not set: set the split's file{hint}")
  parts = {split: Part(file) for split, file in files.items() if file is not None}
  if shares:
    low, high = shares
    parts["train"] = Part(files["train"], lambda text: not low <= share(text) < high)
    parts["dev"] = Part(files["train"], lambda text: low <= share(text) < high)
  return parts
