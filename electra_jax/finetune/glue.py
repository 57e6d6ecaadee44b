"""Makes features for text tasks; turns outputs into metrics and GLUE submissions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune.batches import Feature
from electra_jax.finetune.files import TaskError, write_rows
from electra_jax.finetune.glue_files import Example
from electra_jax.finetune.labels import METRICS, TextTask


def doubled(examples: Sequence[Example]) -> list[Example]:
  """Returns the examples, then each with its texts swapped: the original's `double_unordered`.

  Raises:
    TaskError: an example has no second text.
  """
  if any(example.pair is None for example in examples):
    raise TaskError("examples of one text cannot be doubled: there is no pair to swap")
  return [*examples, *(e._replace(text=e.pair, pair=e.text) for e in examples)]


def features(
  task: TextTask, examples: Sequence[Example], tokenizer: Tokenizer, *, max_length: int
) -> tuple[list[Feature], int]:
  """Returns [CLS] text [SEP] or [CLS] text [SEP] pair [SEP] per example, and the number truncated.

  Texts are truncated at the end; in a pair the longer one first, as in the original. The target
  "label" is an int32 class, or a float32 label divided by the scale; hidden labels have no target.

  Raises:
    TaskError: max_length is below 5, too short for a token of each text.
  """
  if max_length < 5:
    raise TaskError(f"max_length must be at least 5, got {max_length}")
  cls, sep = tokenizer.vocab.cls, tokenizer.vocab.sep
  firsts = tokenizer.encode_batch([example.text for example in examples])
  paired = task.pair is not None
  seconds = tokenizer.encode_batch([e.pair for e in examples]) if paired else [[]] * len(examples)
  found, cut = [], 0
  for example, first, second in zip(examples, firsts, seconds, strict=True):
    a, b = _cut(len(first), len(second), max_length - (3 if paired else 2))
    cut += a + b < len(first) + len(second)
    ids = [cls, *first[:a], sep, *((*second[:b], sep) if paired else ())]
    target = {}
    if example.label is not None:
      target["label"] = np.asarray(example.label / task.scale, task.label_type.dtype)
    found.append(Feature(np.array(ids, np.int32), a + 2, target))
  return found, cut


def _cut(first: int, second: int, room: int) -> tuple[int, int]:
  """Returns the truncated lengths of a pair: the longer text loses tokens, the second in a tie.

  >>> _cut(9, 3, 8), _cut(9, 9, 7), _cut(2, 9, 7)
  ((5, 3), (4, 3), (2, 5))
  """
  if first + second <= room:
    return first, second
  half = room // 2
  if second <= half:
    return room - second, second
  first = min(first, room - half)
  return first, room - first


def read_outputs(
  task: TextTask, examples: Sequence[Example], outputs: dict[str, np.ndarray]
) -> np.ndarray:
  """Returns the head's logits [n, C] or scores [n] for the task's label type, float64.

  Raises:
    TaskError: there is not one output per example.
  """
  values = np.asarray(outputs[task.label_type.output], np.float64)
  if len(values) != len(examples):
    raise TaskError(f"{task.title}: {len(values)} outputs for {len(examples)} examples")
  return values


def example_scores(
  task: TextTask, examples: Sequence[Example], outputs: dict[str, np.ndarray]
) -> np.ndarray:
  """Returns [n, 2] float64, the label and the prediction of each example.

  Raises:
    TaskError: as `read_outputs`; or an example has no label.
  """
  predictions = task.label_type.predictions(task, read_outputs(task, examples, outputs))
  hidden = [example.place for example in examples if example.label is None]
  if hidden:
    raise TaskError(
      f"{task.title}: {len(hidden)} of {len(examples)} examples have no label, e.g. row {hidden[0]}"
    )
  labels = np.array([example.label for example in examples], np.float64)
  return np.stack([labels, predictions], 1)


def compute_metrics(task: TextTask, scores: np.ndarray) -> dict[str, float]:
  """Returns {metric: percent} of example scores [n, 2], the main metric first.

  Raises:
    TaskError: there are no examples.
  """
  if not len(scores):
    raise TaskError(f"{task.title}: there are no examples to evaluate")
  classes = len(task.labels or ())
  return {name: 100 * float(METRICS[name].compute(scores, classes)) for name in task.metrics}


def majority(task: TextTask, scores: np.ndarray) -> dict[str, float]:
  """Returns the metrics of `example_scores` for the best constant prediction."""
  labels = scores[:, 0]
  constant = np.full_like(labels, task.label_type.constant(labels))
  return compute_metrics(task, np.stack([labels, constant], 1))


def collapsed(task: TextTask, scores: np.ndarray) -> bool:
  """Returns True if training failed: predictions in scores [n, 2] are constant, labels are not."""
  labels, predictions = scores.T
  return np.ptp(labels) > 0 and task.label_type.collapsed(labels, predictions)


def write_submission(
  path: str | Path, task: TextTask, examples: Sequence[Example], outputs: dict[str, np.ndarray]
) -> None:
  """Writes predictions in GLUE's format: one row of index, tab, label per example, in order.

  A class name of a custom task is quoted as by `files.write_rows`; GLUE's names never need it.
  """
  predictions = task.label_type.predictions(task, read_outputs(task, examples, outputs))
  written = task.label_type.written(task, predictions)
  rows = [(str(e.place), value) for e, value in zip(examples, written, strict=True)]
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  write_rows(path, [("index", "prediction"), *rows])
