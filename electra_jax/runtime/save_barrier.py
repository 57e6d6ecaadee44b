"""A barrier for the background threads of a save; all processes leave it if one fails."""

import itertools
import sys
import threading
import time
from collections.abc import Callable

import jax
from jax._src import distributed  # the key-value store of the run's processes has no public name

POLL_SECS = 1  # between checks for a failure of another process
_OPENED = itertools.count()  # equal on all processes, which open their checkpoints together


class SaveError(RuntimeError):
  """Another process of the same save failed."""


def started(action: Callable[[], object]) -> tuple[threading.Thread, list[Exception]]:
  """Starts an action in a daemon thread; returns the thread and a list for its error."""
  failures = []

  def call() -> None:
    try:
      action()
    except Exception as error:
      failures.append(error)

  thread = threading.Thread(target=call, daemon=True)
  thread.start()
  return thread, failures


class SaveBarrier:
  """A `barrier_sync_fn` for orbax in which no process waits for one whose save has failed.

  orbax's barrier waits for twenty minutes; a shorter time-out would also end slow saves. A process
  whose save failed calls this barrier while it handles the error. It then publishes the reason, one
  line from `describe`, and continues at once, and the others raise `SaveError`.
  """

  def __init__(self, describe: Callable[[BaseException], str]):
    self._describe = describe
    self._folder = f"electra_jax/checkpoints/{next(_OPENED)}"
    self._save = self._calls = 0

  def begin(self) -> None:
    """Starts the next save; all processes call it while no save is running."""
    self._save, self._calls = self._save + 1, 0
    if jax.process_index() == 0 and jax.process_count() > 1:
      self._store.key_value_delete(f"{self._folder}/{self._save - 2}/")  # all have left this save

  def failure(self) -> str:
    """Returns "process N: reason" for a failure in the current save, else ""."""
    if jax.process_count() == 1:
      return ""
    failed = self._store.key_value_dir_get(f"{self._folder}/{self._save}/failed/")
    return min((reason for _, reason in failed), default="")

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits for all processes. Raises SaveError or TimeoutError if one does not arrive."""
    if jax.process_count() == 1:
      return
    prefix, process = f"{self._folder}/{self._save}", jax.process_index()
    if error := sys.exception():
      if not isinstance(error, SaveError):
        reason = f"process {process}: {self._describe(error)}"
        self._store.key_value_set(f"{prefix}/failed/{process}", reason, allow_overwrite=True)
      return
    deadline = time.monotonic() + timeout_ms / 1000
    arrived, self._calls = f"{prefix}/{self._calls}", self._calls + 1
    self._store.key_value_set(f"{arrived}/{process}", key)
    for other in range(jax.process_count()):
      while not self._has_arrived(f"{arrived}/{other}"):
        if reason := self.failure():
          raise SaveError(reason)
        if time.monotonic() > deadline:
          raise TimeoutError(f"process {other} did not arrive at {key}")

  def wait(self, action: Callable[[], None], grace_secs: float) -> None:
    """Calls an action that waits for the save, and gives up if another process has failed.

    The action may wait twenty minutes for a folder that orbax creates on process 0. Raises the
    action's error, or SaveError if it does not return within `grace_secs` of the failure.
    """
    (thread, failures), reason = started(action), ""
    while thread.is_alive() and not reason:
      thread.join(POLL_SECS)
      reason = self.failure()
    thread.join(grace_secs)
    if thread.is_alive():
      raise SaveError(reason)
    if failures:
      raise failures[0]

  def _has_arrived(self, name: str) -> bool:
    try:
      self._store.blocking_key_value_get(name, POLL_SECS * 1000)
    except jax.errors.JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise
      return False
    return True

  @property
  def _store(self):
    return distributed.global_state.client
