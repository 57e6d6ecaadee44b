"""Profiler traces of selected steps, for xprof."""

import re
import signal
from pathlib import Path

import jax

from electra_jax.runtime.signals import handled, restored


def parse_steps(text: str) -> range:
  """Parses "FIRST:LAST", inclusive; raises ValueError.

  >>> parse_steps("100:102"), parse_steps("7"), parse_steps("")
  (range(100, 103), range(7, 8), range(0, 0))
  """
  if not text:
    return range(0)
  match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
  first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
  if not 0 < first <= last:
    raise ValueError(f"config.profile.steps must be FIRST:LAST, e.g. 100:105, got {text!r}")
  return range(first, last + 1)


class Tracer:
  """A context that traces `steps` (from 1) and, after SIGUSR2, the next `signal_steps` steps.

  Writes FOLDER/plugins/profile/TIME/HOST.xplane.pb.
  """

  def __init__(self, folder: Path, steps: range, signal_steps: int):
    self.folder = folder
    self._steps, self._more, self._signal_steps = steps, range(0), signal_steps
    self._asked = False
    self._traced: tuple[int, int] | None = None  # first and last step of the running trace so far

  def __enter__(self):
    self._old = handled(signal.SIGUSR2, self._ask)
    return self

  def __exit__(self, *unused):
    self.finish()
    restored(self._old)

  def _ask(self, *unused) -> None:
    self._asked = True

  def begin(self, step: int) -> None:
    """Starts a trace if one begins at this step; call it before the step."""
    if self._asked:
      self._asked, self._more = False, range(step, step + self._signal_steps)
    if self._traced:
      self._traced = (self._traced[0], step)
    elif self._wants(step):
      jax.profiler.start_trace(self.folder)
      self._traced = (step, step)

  def _wants(self, step: int) -> bool:
    return step in self._steps or step in self._more

  def ends(self, step: int) -> bool:
    """Returns whether a trace ends with this step; then wait for the step and call `finish`."""
    return bool(self._traced) and not self._wants(step + 1)

  def finish(self) -> str | None:
    """Ends and writes a trace; returns a message with its folder."""
    if not self._traced:
      return None
    jax.profiler.stop_trace()
    (first, last), self._traced = self._traced, None
    return f"trace of steps {first} to {last}: xprof --logdir={self.folder}"
