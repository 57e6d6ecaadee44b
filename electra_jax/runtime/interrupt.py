"""Stop signals (SIGTERM, SIGUSR1, Ctrl-C), polled after each step and in evaluations."""

import os
import signal
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

# Exit code of a run stopped before its end, as of a process ended by SIGTERM. SLURM and
# Kubernetes restart such a job; only 0 means done.
STOPPED = 128 + signal.SIGTERM


class StopSignals:
  """A context that records stop signals instead of obeying them; a second Ctrl-C interrupts.

  SLURM can send SIGUSR1 before a time limit. With several processes, signals may reach only some,
  at different steps. `jax.distributed` then handles SIGTERM, and all agree on the call of
  `requested` that is the first to return it: they make the same calls.

  Args:
    announce: called by the handler with a message.
  """

  def __init__(self, announce: Callable[[str], None] = lambda text: None):
    self._announce = announce
    self._name: str | None = None
    self._alone = jax.process_count() == 1
    self._calls, self._agreed = 0, False
    self._old: dict = {}

  def __enter__(self):
    self._old[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
    self._old[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._note)
    if self._alone:
      self._old[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
    return self

  def __exit__(self, *unused):
    for number, handler in self._old.items():
      signal.signal(number, handler)

  def _note(self, number, _frame) -> None:
    self._name = signal.Signals(number).name
    again = "; Ctrl-C again: at once, without saving" if number == signal.SIGINT else ""
    self._announce(f"{self._name}: stopping after this step{again}")
    if not self._alone:
      os.kill(os.getpid(), signal.SIGTERM)

  def _interrupt(self, number, frame) -> None:
    self._note(number, frame)
    signal.signal(signal.SIGINT, signal.default_int_handler)

  def requested(self) -> str | None:
    """Returns the signal to stop for, or None; once there is one, it stays."""
    if self._alone:
      return self._name
    if not self._agreed:  # the point is agreed upon in calls: one that is passed does not return
      self._calls += 1
      self._agreed = multihost_utils.reached_preemption_sync_point(self._calls)
    return "SIGTERM" if self._agreed else None
