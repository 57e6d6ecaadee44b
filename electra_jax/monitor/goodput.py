"""A run's wall time by activity, and the speed of its steps."""

import collections
import contextlib
import math
import time
from collections.abc import Iterable, Iterator

from electra_jax.runtime.terminal import duration, share

ORDER = ("steps", "compile", "data", "save", "restore", "evaluation", "start", "rest")


class Goodput:
  """Splits wall time since construction among activities; each moment counts once.

  On accelerators the host runs ahead of the device, so data waits may overlap with steps.
  """

  def __init__(self):
    self._secs: dict[str, float] = collections.defaultdict(float)
    self._doing, self._since = "rest", time.monotonic()

  def _switch(self, activity: str) -> str:
    now, before = time.monotonic(), self._doing
    self._secs[before] += now - self._since
    self._doing, self._since = activity, now
    return before

  @contextlib.contextmanager
  def doing(self, activity: str) -> Iterator[None]:
    """Counts the time of the block for `activity`, not for an enclosing activity."""
    before = self._switch(activity)
    try:
      yield
    finally:
      self._switch(before)

  def now(self) -> tuple[str, float]:
    """Returns the current activity and its seconds so far."""
    return self._doing, time.monotonic() - self._since

  def secs(self) -> dict[str, float]:
    """Returns the seconds of each activity so far."""
    self._switch(self._doing)
    return dict(self._secs)

  def summary(self) -> str:
    """Formats the shares of the activities.

    >>> Goodput().summary()
    '< 0.1 s: rest 100 %'
    """
    secs = self.secs()
    total = sum(secs.values())
    shares = (f"{name} {share(secs[name], total)}" for name in ordered(secs))
    return f"{duration(total)}: {', '.join(shares)}"


def ordered(activities: Iterable[str]) -> list[str]:
  """Sorts activities as in ORDER, unknown ones last."""
  return sorted(activities, key=lambda k: ORDER.index(k) if k in ORDER else len(ORDER))


class Speed:
  """Speed between two log lines, over the seconds that `goodput` counts as "steps" or "data".

  Args:
    flops_per_step: matmul FLOPs over all devices.
    peak: FLOP/s of all devices.
  """

  def __init__(
    self, goodput: Goodput, batch_size: int, seq_length: int, flops_per_step: float, peak: float
  ):
    self._goodput, self._batch_size, self._seq_length = goodput, batch_size, seq_length
    self._flops, self._peak, self._started = flops_per_step, peak, time.monotonic()
    self._first = 0, 0.0  # the last step before the interval, and its seconds

  def restart(self, step: int) -> None:
    """Starts a new interval after `step`."""
    secs = self._goodput.secs()
    self._first = step, secs.get("steps", 0.0) + secs.get("data", 0.0)

  def read(self, step: int, steps_left: int) -> dict[str, float | None]:
    """Returns the speed of the interval, and starts a new one."""
    first, secs_before = self._first
    self.restart(step)
    steps, secs = step - first, self._first[1] - secs_before
    rate = steps / secs if steps and secs else math.nan
    values = {
      "sequences_per_sec": rate * self._batch_size,
      "tokens_per_sec": rate * self._batch_size * self._seq_length,
      "mfu": rate * self._flops / self._peak,
      "eta_secs": steps_left / rate,
      "elapsed_secs": time.monotonic() - self._started,
    }
    return {k: v if math.isfinite(v) else None for k, v in values.items()}
