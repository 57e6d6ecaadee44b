"""Text tasks: examples to rows, what the network says to metrics and to GLUE's submissions."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from electra_jax.data.finetune_batches import Feature
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.glue_files import Example
from electra_jax.finetune.tasks import METRICS, TextTask


def doubled(examples: Sequence[Example]) -> list[Example]:
  """Returns the examples and then each with its texts in the other order.

  As in the original for MRPC and STS-B (`double_unordered`), of the training split only.
  """
  if any(example.pair is None for example in examples):
    raise TaskError("examples of one text cannot be doubled: there is no pair to swap")
  return [*examples, *(e._replace(text=e.pair, pair=e.text) for e in examples)]


def features(
  task: TextTask, examples: Sequence[Example], tokenizer, *, max_length: int = 128
) -> tuple[list[Feature], int]:
  """Returns [CLS] text [SEP], or [CLS] text [SEP] pair [SEP], of each; and how many are cut.

  What is too long loses tokens at the end, a pair's longer text first, as in the original. The
  target "label" is an int32 class, or a float32 label divided by the scale; none where hidden.

  Raises:
    TaskError: max_length has no room for a token of each text.
  """
  if max_length < 5:
    raise TaskError(f"a pair needs 5 tokens or more with [CLS] and [SEP], got {max_length}")
  cls, sep = tokenizer.vocab.cls, tokenizer.vocab.sep
  firsts = tokenizer.encode_batch([example.text for example in examples])
  paired = task.pair is not None
  seconds = tokenizer.encode_batch([e.pair for e in examples]) if paired else [[]] * len(examples)
  dtype = np.float32 if task.kind == "regression" else np.int32
  found, cut = [], 0
  for example, first, second in zip(examples, firsts, seconds, strict=True):
    a, b = _cut(len(first), len(second), max_length - (3 if paired else 2))
    cut += a + b < len(first) + len(second)
    ids = [cls, *first[:a], sep, *((*second[:b], sep) if paired else ())]
    hidden = example.label is None
    target = {} if hidden else {"label": np.asarray(example.label / task.scale, dtype)}
    found.append(Feature(np.array(ids, np.int32), a + 2, target))
  return found, cut


def _cut(first: int, second: int, room: int) -> tuple[int, int]:
  """Returns the lengths of a pair that fit: tokens go from the longer one, the second where alike.

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


def units(
  task: TextTask, examples: Sequence[Example], outputs: dict[str, np.ndarray]
) -> np.ndarray:
  """Returns [n, 2] float64, the label and the prediction of each example.

  Args:
    outputs: "logits" [n, C], of which the largest is the class; "score" [n] of a regression, which
      is multiplied by the task's scale.

  Raises:
    TaskError: outputs are not one an example or not finite, or an example has no label.
  """
  predictions = _predictions(task, examples, outputs)
  hidden = [example.place for example in examples if example.label is None]
  if hidden:
    raise TaskError(
      f"{task.title}: {len(hidden)} of {len(examples)} examples have no label to "
      f"measure by, row {hidden[0]} among them"
    )
  labels = np.array([example.label for example in examples], np.float64)
  return np.stack([labels, predictions], 1)


def _predictions(
  task: TextTask, examples: Sequence[Example], outputs: dict[str, np.ndarray]
) -> np.ndarray:
  name = "score" if task.kind == "regression" else "logits"
  values = np.asarray(outputs[name], np.float64)
  if len(values) != len(examples):
    raise TaskError(f"{task.title}: {len(values)} outputs for {len(examples)} examples")
  finite = np.isfinite(values.reshape(len(values), -1)).all(1) if len(values) else np.ones(0, bool)
  if not finite.all():
    row = examples[int(np.argmin(finite))].place
    raise TaskError(
      f"{task.title}: {(~finite).sum()} of {len(finite)} outputs are not finite, "
      f"that of row {row} among them"
    )
  return values * task.scale if name == "score" else values.argmax(1).astype(np.float64)


def measure(task: TextTask) -> Callable[[np.ndarray], dict[str, float]]:
  """Returns units [n, 2] -> {metric: percent}, the main metric first."""

  def of(rows: np.ndarray) -> dict[str, float]:
    if not len(rows):
      raise TaskError(f"{task.title}: there is no example to measure")
    return {name: 100 * float(METRICS[name](rows, len(task.labels or ()))) for name in task.metrics}

  return of


def collapsed(units: np.ndarray, kind: str) -> bool:
  """Returns whether units [n, 2] show a training that failed: the same prediction everywhere.

  That is one class throughout where labels are of several, or numbers whose standard deviation is
  below 1 % of that of the labels.

  >>> collapsed(np.array([[0, 1], [1, 1]]), "classification")
  True
  """
  labels, predictions = units.T
  if np.ptp(labels) == 0:
    return False
  if kind == "regression":
    return bool(predictions.std() < 0.01 * labels.std())
  return bool(np.ptp(predictions) == 0)


def write_submission(
  path: str | Path, task: TextTask, examples: Sequence[Example], outputs: dict[str, np.ndarray]
) -> None:
  """Writes predictions in GLUE's format: index, tab, label, a row an example, in their order.

  A score is cut to the limits of its task and has three decimals.

  Args:
    path: the file; `task.submission` has the name that GLUE wants for each split.
    examples, outputs: as for `units`, with or without labels.
  """
  predictions = _predictions(task, examples, outputs)
  if task.kind == "regression":
    low, high = task.limits or (-np.inf, np.inf)
    written = [f"{value:.3f}" for value in np.clip(predictions, low, high) + 0.0]
  else:
    written = [task.labels[int(index)] for index in predictions]
  rows = [f"{e.place}\t{value}\n" for e, value in zip(examples, written, strict=True)]
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  Path(path).write_text("index\tprediction\n" + "".join(rows), encoding="utf-8", newline="\n")
