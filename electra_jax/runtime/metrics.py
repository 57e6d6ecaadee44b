"""Metrics of a run: sums over the steps of a window, and their means.

Nothing here knows an objective: the terms that a step reports are added up and divided, whatever
they are called. By their names, terms ending in `_scores` are histograms
[2, bins] of a score for two classes and are shown as the area under the ROC curve (`_auc`), and
terms ending in `_loss` are in nats.
"""

import collections
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from electra_jax.runtime.parallel import Packed

# Shown as they are at the last step of a window; every other number of a step is averaged over it.
LAST = ("learning_rate", "param_norm")
# How fast it went: the numbers of a line that differ between two runs of the same thing.
TIMING = (
  "sequences_per_sec",
  "tokens_per_sec",
  "mfu",
  "eta_secs",
  "elapsed_secs",
  "fastest_host_step_ms",
  "slowest_host_step_ms",
  "slowest_host",
)


class NotFiniteError(ArithmeticError):
  """A number is NaN or infinite.

  Fields:
    step: of training in which it came up; None where that was an evaluation.
  """

  step: int | None = None


def auc(scores: np.ndarray) -> float | None:
  """Returns the area under the ROC curve of a histogram of scores; ties count half.

  Args:
    scores: [2, bins], how many negatives (row 0) and positives (row 1) fall into each bin, bins in
      the order of the score.

  >>> auc(np.array([[3, 1], [1, 3]]))  # of 16 pairs, 9 are in order and 6 tie
  0.75
  """
  negatives, positives = np.asarray(scores, np.float64)
  if not negatives.sum() or not positives.sum():
    return None
  below = np.cumsum(negatives) - negatives
  return float((positives * (below + negatives / 2)).sum() / positives.sum() / negatives.sum())


def means(terms: Mapping[str, tuple]) -> dict[str, float | None]:
  """Returns total / count of each term, None where nothing was counted; histograms as `_auc`."""
  values = {}
  for name, (total, count) in terms.items():
    if np.ndim(total) == 0:
      values[name] = float(total) / float(count) if count else None
    elif name.endswith("_scores"):
      values[name.removesuffix("_scores") + "_auc"] = auc(total)
  return values


class Window:
  """Adds up what the steps report between two lines, in float64 and in the order of the steps.

  Reading a number from the device waits for it, so the last `ahead` steps stay unread: the device
  has the next step queued while the host reads an old one. Each is checked when it is read.

  The sums are part of a checkpoint (`state_dict`), so that a line is the same bit for bit whether
  or not the run was interrupted inside its window.
  """

  def __init__(self, saved: dict | None = None, *, ahead: int = 2):
    self._ahead = ahead
    self._unread = collections.deque()
    self._sum = np.array(saved["sum"]) if saved else np.zeros(0)
    self.steps = saved["steps"] if saved else 0

  def add(self, step: int, metrics: Packed) -> None:
    """Takes the metrics of a step (numbered from 1), still on the device."""
    self._unread.append((step, metrics))
    while len(self._unread) > self._ahead:
      self._read()

  def _read(self) -> None:
    step, self._newest = self._unread.popleft()
    self._numbers = self._newest.read()
    try:
      check_finite(f"step {step}", self._newest, self._numbers)
    except NotFiniteError as error:
      error.step = step
      raise
    if self._sum.size != self._numbers.size:  # the first step, or the first of another objective
      self._sum, self.steps = np.zeros_like(self._numbers), 0
    self._sum += self._numbers
    self.steps += 1

  def drain(self) -> None:
    """Waits for every step so far, and checks it."""
    while self._unread:
      self._read()

  def close(self) -> dict[str, float | None]:
    """Returns the values of the window, which has had a step, and starts the next one."""
    self.drain()
    sums, last = self._newest.unpack(self._sum), self._newest.unpack(self._numbers)
    terms = means(sums.pop("terms"))
    scalars = {k: float(last[k]) if k in LAST else float(v) / self.steps for k, v in sums.items()}
    self._sum, self.steps = np.zeros(0), 0
    return losses_first({**terms, **scalars})

  def state_dict(self) -> dict:
    """Returns the sums so far as JSON; floats survive it exactly."""
    self.drain()
    return {"sum": self._sum.tolist(), "steps": self.steps}


def check_finite(where: str, packed: Packed, numbers: np.ndarray) -> None:
  """Stops with the place and the names if some of the numbers of `packed` are NaN or infinite."""
  if np.isfinite(numbers).all():
    return
  bad = {}
  for path, value in jax.tree.leaves_with_path(packed.unpack(numbers)):
    if not np.isfinite(value).all():
      name = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)][-1]
      bad.setdefault(name, np.asarray(value).flat[0])
  listed = ", ".join(f"{name} = {value}" for name, value in bad.items())
  raise NotFiniteError(f"{where}: {listed}")


def evaluate(eval_step, params, batches, step: int) -> dict[str, float | None]:
  """Returns the values of `eval_step(params, batch)`, its terms summed over the batches.

  Raises:
    NotFiniteError: naming `step`, the number of steps that the parameters have seen.
  """
  sums = 0.0
  for batch in batches:
    packed = eval_step(params, batch)
    numbers = packed.read()
    check_finite(f"evaluation after step {step}", packed, numbers)
    sums = sums + numbers
  return losses_first(means(packed.unpack(sums)))


def losses_first(values: dict) -> dict:
  """Returns the values in the order in which they are shown."""
  return dict(sorted(values.items(), key=lambda item: not item[0].endswith("loss")))


def read_history(path: Path) -> list[dict]:
  """Returns the lines of metrics.jsonl; a last line that was cut off is left out."""
  lines = []
  for text in path.read_text().splitlines() if path.exists() else ():
    try:
      lines.append(json.loads(text))
    except json.JSONDecodeError:
      break
  return lines
