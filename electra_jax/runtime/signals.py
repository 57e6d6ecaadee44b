"""Signal handlers, and the end of a program whose main thread cannot run them."""

import os
import signal
import threading
from collections.abc import Callable

# Exit code of a run that stopped early, as after SIGTERM. SLURM and Kubernetes restart jobs that
# exit with it; only 0 means done.
STOPPED = 128 + signal.SIGTERM
GOODBYE_SECS = 20  # for clean-up after an error or a signal
_ENDS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
_patient = 0  # number of `StopSignals` that wait for the end of a step


class Terminated(KeyboardInterrupt):
  """A signal other than Ctrl-C ended a run that had nothing to save."""


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


def wait_patiently(more: int) -> None:
  """Adds to the number of places where one or two signals only ask a run to stop."""
  global _patient
  _patient += more


def end_after_signals(secs: float = GOODBYE_SECS) -> None:
  """Lets a signal end the program after `secs` at most; a run that can save, the third signal.

  Python calls handlers in the main thread, and only once a compiler or a device has returned to it.
  """
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

  def work() -> None:
    count = 0
    while number := os.read(reader, 1)[0]:
      count += number in _ENDS
      if number in _ENDS and (count > 2 or not _patient):
        timer = threading.Timer(secs, os._exit, [128 + number])
        timer.daemon = True
        timer.start()

  threading.Thread(target=work, daemon=True).start()
