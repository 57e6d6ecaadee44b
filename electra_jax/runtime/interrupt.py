"""SIGTERM, SIGUSR1 and Ctrl-C, turned into a question that a loop asks after each step."""

import os
import signal

import jax
from jax.experimental import multihost_utils

# Exit code of a run that was stopped before its last step, as of a process that SIGTERM ended: what
# keeps jobs running (SLURM, Kubernetes) starts it again, and takes only 0 for done.
STOPPED = 128 + signal.SIGTERM


class StopSignals:
  """While it is entered, a signal to stop is noted instead of obeyed; a second Ctrl-C interrupts.

  SIGUSR1 is what SLURM can send before a time limit. With several processes a signal may reach only
  one of them, or each at another step. There `jax.distributed` takes SIGTERM and the processes
  agree on the step after which all stop.
  """

  def __init__(self):
    self._name: str | None = None
    self._alone = jax.process_count() == 1
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
    if not self._alone:
      os.kill(os.getpid(), signal.SIGTERM)

  def _interrupt(self, number, frame) -> None:
    self._note(number, frame)
    signal.signal(signal.SIGINT, signal.default_int_handler)

  def requested(self, step: int) -> str | None:
    """Returns the name of the signal to stop for after this step, None to go on."""
    if self._alone:
      return self._name
    return "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else None
