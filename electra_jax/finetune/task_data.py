"""The records that the kinds of task fill in, and what they have in common.

A kind of task (text, tagging, question answering) is a module with a `TaskKind`; `prepare.py` lists
them. All of them put a task's data into `TaskData`.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from ml_collections import ConfigDict

from electra_jax.core.task_network import HeadSpec
from electra_jax.data.finetune_batches import Feature
from electra_jax.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TaskInfo:
  """What is kept with a fine-tuned network; `dataclasses.asdict` of it is JSON.

  Fields:
    kind: a key of `prepare.TASK_KINDS`.
    name: of the task.
    head: the spec of the head.
    max_length: tokens of a row at most.
    labels: of tagging, in the order of the logits.
    text: the fields of a TextTask; None for other kinds.
    options: how rows are made and decoded, by fields of config.qa or config.tagging; of questions
      also "impossible", whether some of the training questions have no answer.
  """

  kind: str
  name: str
  head: HeadSpec
  max_length: int
  labels: tuple[str, ...] = ()
  text: dict | None = None
  options: dict = dataclasses.field(default_factory=dict)

  @classmethod
  def from_json(cls, content: dict) -> "TaskInfo":
    """Returns the info that `dataclasses.asdict` gave."""
    head = HeadSpec(**content["head"])
    return cls(**content | {"head": head, "labels": tuple(content["labels"])})


class EvalSplit(NamedTuple):
  """A split that is predicted.

  Fields:
    examples: SHA-256 of the inputs and labels; only results on equal examples are compared.
    example_scores: outputs of `loop.make_predictor` -> [n, m] float64, a row of numbers an example,
      of which the task's metrics are a function; None where labels are hidden.
    write: (folder, outputs); writes predictions in the file format of the task.
  """

  features: list[Feature]
  examples: str
  example_scores: Callable[[dict], np.ndarray] | None
  write: Callable[[Path, dict], None]


class TaskData(NamedTuple):
  """A task's data, ready to train on.

  Fields:
    title: for people.
    epochs: of the paper.
    train: rows to train on.
    splits: those to measure and to predict; the first one chooses the best seed.
    collapsed: example scores [n, m] -> whether training failed: the predictions are all alike.
    notes: counts and warnings, a line each.
  """

  info: TaskInfo
  title: str
  epochs: float
  train: list[Feature]
  splits: dict[str, EvalSplit]
  collapsed: Callable[[np.ndarray], bool]
  notes: list[str]


class Predictor(Protocol):
  """A fine-tuned network, as the kinds of task use it; `model.Model` is one."""

  info: TaskInfo
  tokenizer: Tokenizer

  def outputs(self, features: list[Feature]) -> dict:
    """Returns the head's predictions of each row; see `loop.make_predictor`."""


Metrics = Callable[[np.ndarray], dict[str, float]]


class TaskKind(NamedTuple):
  """A kind of task.

  Fields:
    known_names: (config) -> the names of the tasks it has; None where any one name is allowed.
    prepare: (config, name, tokenizer, max_length) -> TaskData. Raises ValueError where a file is
      missing or not in order.
    metrics: (info) -> a function from example scores [n, m] to {metric: percent}, the main one
      first.
    main_metric: (info) -> the same with the main metric alone, which is cheaper to resample.
    answer: (predictor, items) -> a dict for each item; see `model.Model`.
    predict_file: (predictor, file, out) -> how many rows were predicted and written to `out`.
    file_ending: of `out`, where the user names none.
    class_names: (info) -> names of the head's classes, where it has classes.
  """

  known_names: Callable[[ConfigDict], tuple[str, ...] | None]
  prepare: Callable[[ConfigDict, str, Tokenizer, int], TaskData]
  metrics: Callable[[TaskInfo], Metrics]
  main_metric: Callable[[TaskInfo], Metrics]
  answer: Callable[[Predictor, Sequence], list[dict]]
  predict_file: Callable[[Predictor, Path, Path], int]
  file_ending: str
  class_names: Callable[[TaskInfo], tuple[str, ...]]


def digest(examples: Iterable) -> str:
  """Returns the SHA-256 of examples."""
  return hashlib.sha256("\0".join(map(repr, examples)).encode()).hexdigest()


def training_subset(config: ConfigDict, examples: Sequence) -> list:
  """Returns `data.train_examples` of the examples, spread evenly: their order may matter."""
  most = config.data.train_examples
  if most is None or most >= len(examples):
    return list(examples)
  if most < 1:
    raise ValueError(f"config.data.train_examples is at least 1, got {most}")
  return [examples[i * len(examples) // most] for i in range(most)]


def split_files(config: ConfigDict) -> dict[str, str]:
  """Returns {split: file} of a task that is given as files."""
  files = {"train": config.data.train, "dev": config.data.dev, "test": config.data.test}
  for split in ("train", "dev"):
    if files[split] is None:
      raise ValueError(f"config.data.{split} is not set: the file of that split")
  return {split: file for split, file in files.items() if file is not None}
