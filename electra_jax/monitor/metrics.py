"""Metrics of a run: sums over the steps of a window, and their means.

Each term has a total and a count. `_scores` terms are histograms [2, bins] of two classes' scores,
reported as the area under the ROC curve (`_auc`); `_loss` terms are in nats.
"""

import collections
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from electra_jax.monitor import quantities
from electra_jax.runtime.parallel import Packed

HISTORY_FILE = "metrics.jsonl"  # in the run's folder
# Reported for the last step of a window; other scalars are averaged over the window.
LAST = ("learning_rate", "param_norm")
# Timings: the only numbers that differ between identical runs.
TIMING = (
  "sequences_per_sec tokens_per_sec mfu eta_secs elapsed_secs "
  "fastest_host_step_ms slowest_host_step_ms slowest_host"
).split()


class NotFiniteError(ArithmeticError):
  """A number is NaN or infinite; `step` is the training step, or None in evaluation."""

  step: int | None = None


def auc(scores: np.ndarray) -> float | None:
  """Returns the area under the ROC curve of a histogram of scores; ties count half.

  Args:
    scores: [2, bins], counts of negatives (row 0) and positives (row 1), by ascending score.

  >>> auc(np.array([[3, 1], [1, 3]]))  # of 16 pairs, 9 are in order, 6 tied
  0.75
  """
  negatives, positives = np.asarray(scores, np.float64)
  if not negatives.sum() or not positives.sum():
    return None
  below = np.cumsum(negatives) - negatives
  return float((positives * (below + negatives / 2)).sum() / positives.sum() / negatives.sum())


def means(terms: Mapping[str, tuple]) -> dict[str, float | None]:
  """Returns total / count of each term, None for a count of 0; histograms as `_auc`."""
  values = {}
  for name, (total, count) in terms.items():
    if np.ndim(total) == 0:
      values[name] = float(total) / float(count) if count else None
    elif (quantity := quantities.of(name)).kind == "scores":
      values[quantity.other("auc")] = auc(total)
  return values


class Window:
  """Sums the metrics of the steps between two log lines, in float64 and in step order.

  Reading a metric blocks on the device, so the last `ahead` steps stay unread to keep it busy.
  Checkpoints save the sums (`state_dict`), so an interruption does not change any line.
  """

  def __init__(self, saved: dict | None = None, *, ahead: int = 2):
    self._ahead = ahead
    self._unread = collections.deque()
    self._sum = np.array(saved["sum"]) if saved else np.zeros(0)
    self.steps = saved["steps"] if saved else 0

  def add(self, step: int, metrics: Packed) -> None:
    """Adds the on-device metrics of a step (numbered from 1)."""
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
    if self._sum.size != self._numbers.size:  # the first step, or a new objective
      self._sum, self.steps = np.zeros_like(self._numbers), 0
    self._sum += self._numbers
    self.steps += 1

  def drain(self) -> None:
    """Waits for all steps so far; raises NotFiniteError."""
    while self._unread:
      self._read()

  def values(self) -> dict[str, float | None]:
    """Returns the values of the non-empty window so far."""
    self.drain()
    sums, last = self._newest.unpack(self._sum), self._newest.unpack(self._numbers)
    terms = means(sums.pop("terms"))
    scalars = {k: float(last[k]) if k in LAST else float(v) / self.steps for k, v in sums.items()}
    return losses_first({**terms, **scalars})

  def close(self) -> dict[str, float | None]:
    """Returns the values of the non-empty window and starts the next."""
    values = self.values()
    self._sum, self.steps = np.zeros(0), 0
    return values

  def state_dict(self) -> dict:
    """Returns the sums for JSON, which preserves floats exactly."""
    self.drain()
    return {"sum": self._sum.tolist(), "steps": self.steps}


def check_finite(where: str, packed: Packed, numbers: np.ndarray) -> None:
  """Raises NotFiniteError, with `where`, if metrics are NaN or infinite."""
  if np.isfinite(numbers).all():
    return
  bad = {}
  for path, value in jax.tree.leaves_with_path(packed.unpack(numbers)):
    if not np.isfinite(value).all():
      name = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)][-1]
      bad.setdefault(name, np.asarray(value).flat[0])
  raise NotFiniteError(f"{where}: {', '.join(f'{name} = {x}' for name, x in bad.items())}")


def evaluate(
  eval_step, params, batches, step: int, stops: Callable[[], object] = lambda: None
) -> dict[str, float | None] | None:
  """Returns the metrics of `eval_step(params, batch)` over all batches.

  Returns None if `stops`, called before each batch, returns a true value. Raises NotFiniteError
  with `step`, the number of steps trained.
  """
  sums = 0.0
  for batch in batches:
    if stops():
      return None
    packed = eval_step(params, batch)
    numbers = packed.read()
    check_finite(f"evaluation after step {step}", packed, numbers)
    sums = sums + numbers
  return losses_first(means(packed.unpack(sums)))


def losses_first(values: dict) -> dict:
  """Sorts metrics for display."""
  return dict(sorted(values.items(), key=lambda item: quantities.of(item[0]).kind != "loss"))


def lines(path: Path) -> Iterator[dict]:
  """Yields the undamaged lines of a run's metrics.jsonl, if there is one."""
  if path.exists():
    with path.open("rb") as file:
      yield from (line for line in map(parse_line, file) if line is not None)


def read_history(path: Path) -> list[dict]:
  """Returns the undamaged lines of a run's metrics.jsonl."""
  return list(lines(path))


def parse_line(text: bytes) -> dict | None:
  """Returns {"step", "split", name: number or None...}, or None for a damaged line."""
  try:
    line = json.loads(text)
    step, split = line["step"], line["split"]
    numbers = [step, *(x for k, x in line.items() if k != "split" and x is not None)]
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
    return None
  good = isinstance(step, int) and isinstance(split, str)
  in_64_bits = (isinstance(x, float) or (isinstance(x, int) and abs(x) < 2**63) for x in numbers)
  return line if good and all(in_64_bits) else None
