"""Where the wall time of a run goes."""

import collections
import contextlib
import time
from collections.abc import Iterator

ORDER = ("steps", "compile", "data", "save", "restore", "evaluation", "rest")


class Goodput:
  """Splits the time since it was made among what was done; every moment counts for one thing.

  On accelerators the host is ahead of the device: waiting for data may hide behind steps under way.
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
    """Counts the time inside for an activity; what it is inside of does not count it."""
    before = self._switch(activity)
    try:
      yield
    finally:
      self._switch(before)

  def secs(self) -> dict[str, float]:
    """Returns the seconds of each activity so far."""
    self._switch(self._doing)
    return dict(self._secs)

  def summary(self) -> str:
    """Returns the shares as text.

    >>> Goodput().summary()
    '0.0 s: rest 100 %'
    """
    secs = self.secs()
    total = sum(secs.values())
    order = sorted(secs, key=lambda k: ORDER.index(k) if k in ORDER else len(ORDER))
    shares = (f"{name} {100 * secs[name] / total:.3g} %" for name in order)
    return f"{total:,.1f} s: {', '.join(shares)}"
