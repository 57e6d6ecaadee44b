"""Profiler traces of selected steps, for xprof."""

import re
import signal
from pathlib import Path

import jax


def parse_steps(text: str) -> range:
  """Returns the steps of "FIRST:LAST", inclusive; "" gives none.

  Raises:
    ValueError: the text has another form.

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
  """A context that traces `steps` (from 1) and, on SIGUSR2, the next `signal_steps` steps.

  Files: FOLDER/plugins/profile/TIME/HOST.xplane.pb.
  """

  def __init__(self, folder: Path, steps: range, signal_steps: int):
    self.folder = folder
    self._steps, self._signal_steps = steps, signal_steps
    self._asked = self._running = False
    self._old = None

  def __enter__(self):
    self._old = signal.signal(signal.SIGUSR2, self._ask)
    return self

  def __exit__(self, *unused):
    self.finish()
    signal.signal(signal.SIGUSR2, self._old)

  def _ask(self, *unused) -> None:
    self._asked = True

  def begin(self, step: int) -> None:
    """Starts a trace if it begins at this step. Call it before the step."""
    if self._asked:
      self._asked, self._steps = False, range(step, step + self._signal_steps)
    if step in self._steps and not self._running:
      jax.profiler.start_trace(self.folder)
      self._running = True

  def ends(self, step: int) -> bool:
    """True if a trace ends with this step; then wait for the step and call `finish`."""
    return self._running and step + 1 not in self._steps

  def finish(self) -> str | None:
    """Ends and writes a trace; returns a message with its folder."""
    if not self._running:
      return None
    jax.profiler.stop_trace()
    self._running = False
    return f"trace of steps {self._steps[0]} to {self._steps[-1]}: xprof --logdir={self.folder}"
