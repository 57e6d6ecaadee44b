"""Claims of folders in buckets, s3:// and gs://: one process at a time writes there.

A claim is an object that only one process can create, URL/.claims/000001 and so on. The holder has
the highest number and rewrites its object periodically. A process that sees the object unchanged
for STALE_SECS, by its local clock, creates the next number; a holder that was only suspended finds
the new object and stops.
"""

import contextlib
import itertools
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from electra_jax.runtime import storage

FOLDER = ".claims"
STALE_SECS = 300
BEATS = 10  # writes of the holder in STALE_SECS
ENDED = "ended"


class ClaimError(ValueError):
  """Another process has claimed the folder; the message is one line that names it."""


@contextlib.contextmanager
def claim(url: str, stale_secs: float | None = None) -> Iterator[Callable[[], None]]:
  """Claims a folder of a bucket until the block ends; yields a function that checks the claim.

  If a claim has not ended, waits until it changes or is stale. The yielded function raises
  ClaimError if another process has taken over the folder.

  Args:
    stale_secs: seconds without a change after which a holder counts as dead, the same in all
      processes; None: STALE_SECS.

  Raises:
    ClaimError: a live process, which the message names, holds the folder.
    OSError: the bucket cannot be read or written; one line.
  """
  stale_secs = stale_secs or STALE_SECS
  holder = f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex[:8]})"
  earlier = _free(url, stale_secs)
  mine = f"{url}/{FOLDER}/{_number(earlier[-1].url) + 1 if earlier else 1:06}"

  is_lost = False  # whether the last access to the bucket failed

  @contextlib.contextmanager
  def noticing() -> Iterator[None]:
    nonlocal is_lost
    try:
      yield
      is_lost = False
    except OSError:
      is_lost = True
      raise

  def write(state: object, create: bool = False) -> None:
    with noticing():
      storage.put(mine, f"{holder}\n{state}".encode(), create)

  def check() -> None:
    with noticing():
      found = _found(url)
    if found and found[-1].url != mine:  # deleted by hand: the next beat recreates it
      raise ClaimError(f"{url} has been taken over by {_read(found[-1])[0]}")

  try:
    write("begun", create=True)
  except FileExistsError:
    raise _in_use(url) from None
  for old in earlier:
    storage.remove(old.url)
  over = threading.Event()

  def beat() -> None:
    for count in itertools.count():
      if over.wait(stale_secs / BEATS):
        return
      with contextlib.suppress(OSError):  # the next may succeed
        write(count)

  thread = threading.Thread(target=beat, daemon=True)
  thread.start()
  try:
    yield check
  finally:
    over.set()
    if not is_lost:  # otherwise the claim becomes stale
      thread.join()
      with contextlib.suppress(OSError):
        write(ENDED)


def _free(url: str, stale_secs: float) -> list[storage.Object]:
  """Returns the claims so far once the last has ended or is stale; raises if it is live."""
  found, since = _found(url), time.monotonic()
  while found and _read(found[-1])[1] != ENDED and time.monotonic() - since < stale_secs:
    time.sleep(stale_secs / BEATS / 5)
    now = _found(url)
    if now and now[-1] != found[-1] and _read(now[-1])[1] != ENDED:
      raise _in_use(url)
    found = now
  return found


def _found(url: str) -> list[storage.Object]:
  return sorted(storage.find(f"{url}/{FOLDER}/*"), key=lambda x: _number(x.url))


def _number(url: str) -> int:
  return int(url.rpartition("/")[2])


def _read(claimed: storage.Object) -> tuple[str, str]:
  """Returns the holder of a claim and its state."""
  holder, _, state = storage.read(claimed.url).decode(errors="replace").partition("\n")
  return holder, state


def _in_use(url: str) -> ClaimError:
  found = _found(url)
  return ClaimError(f"{url} is in use by {_read(found[-1])[0] if found else 'another process'}")
