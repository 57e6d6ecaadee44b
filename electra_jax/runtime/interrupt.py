"""Stop signals (SIGTERM, SIGUSR1, Ctrl-C), polled after each step and in evaluations."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from electra_jax.runtime.signals import Terminated, handled, restored, wait_patiently


class StopSignals:
  """A context that records stop signals instead of obeying them; a second Ctrl-C interrupts.

  With several processes, signals may reach only some, at different steps. `jax.distributed` then
  handles SIGTERM, and all agree on the first call of `requested` that returns it. The handler calls
  `announce` with a message.
  """

  def __init__(self, announce: Callable[[str], None] = lambda text: None):
    self._announce = announce
    self._name: str | None = None
    self._alone, self._at_once = jax.process_count() == 1, False
    self._calls, self._agreed = 0, False

  def __enter__(self):
    self._old = handled(signal.SIGINT, self._interrupt) | handled(signal.SIGUSR1, self._note)
    if self._alone:
      self._old |= handled(signal.SIGTERM, self._note)
    wait_patiently(1)
    return self

  def __exit__(self, *unused):
    wait_patiently(-1)
    restored(self._old)

  @contextlib.contextmanager
  def at_once(self) -> Iterator[None]:
    """Lets a signal interrupt the block, which takes minutes and leaves nothing to save.

    Several processes finish it, because they stop together. Raises KeyboardInterrupt.
    """
    if not self._alone:
      yield
      return
    self._at_once = True
    wait_patiently(-1)
    try:
      self._interrupt_now()
      yield
    finally:
      wait_patiently(1)
      self._at_once = False

  def _interrupt_now(self) -> None:
    if self._at_once and self._name:
      raise KeyboardInterrupt if self._name == "SIGINT" else Terminated(self._name)

  def _note(self, number, _frame) -> None:
    self._name = signal.Signals(number).name
    self._interrupt_now()
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
