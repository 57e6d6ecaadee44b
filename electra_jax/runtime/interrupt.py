"""Stop signals (SIGTERM, SIGUSR1, Ctrl-C), polled after each step and in evaluations."""

import os
import signal
import threading
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

# Exit code of a run that stopped early, as after SIGTERM. SLURM and Kubernetes restart jobs that
# exit with it; only 0 means done.
STOPPED = 128 + signal.SIGTERM


def handled(number: int, handler: Callable) -> dict:
  """Sets the handler of a signal and returns {signal: the previous handler}.

  Does nothing and returns {} outside the main thread, where Python cannot set handlers.
  """
  if threading.current_thread() is not threading.main_thread():
    return {}
  return {number: signal.signal(number, handler)}


def restored(handlers: dict) -> None:
  """Sets the handlers that `handled` returned."""
  for number, handler in handlers.items():
    signal.signal(number, handler)


class StopSignals:
  """A context that records stop signals instead of obeying them; a second Ctrl-C interrupts.

  With several processes, signals may reach only some, at different steps. `jax.distributed` then
  handles SIGTERM, and all agree on the first call of `requested` that returns it. The handler calls
  `announce` with a message.
  """

  def __init__(self, announce: Callable[[str], None] = lambda text: None):
    self._announce = announce
    self._name: str | None = None
    self._alone = jax.process_count() == 1
    self._calls, self._agreed = 0, False

  def __enter__(self):
    self._old = handled(signal.SIGINT, self._interrupt) | handled(signal.SIGUSR1, self._note)
    if self._alone:
      self._old |= handled(signal.SIGTERM, self._note)
    return self

  def __exit__(self, *unused):
    restored(self._old)

  def _note(self, number, _frame) -> None:
    self._name = signal.Signals(number).name
    again = "; Ctrl-C again to stop at once, without saving" if number == signal.SIGINT else ""
    self._announce(f"{self._name}: stopping after this step{again}")
    if not self._alone:
      os.kill(os.getpid(), signal.SIGTERM)

  def _interrupt(self, number, frame) -> None:
    self._note(number, frame)
    signal.signal(signal.SIGINT, signal.default_int_handler)

  def requested(self) -> str | None:
    """Returns the name of the first stop signal, or None."""
    if self._alone:
      return self._name
    if not self._agreed:  # each call counts towards the agreed point, so none may be skipped
      self._calls += 1
      self._agreed = multihost_utils.reached_preemption_sync_point(self._calls)
    return "SIGTERM" if self._agreed else None
