"""Tasks spread over processes, results in order, a bounded number of tasks under way."""

import collections
import concurrent.futures
import contextlib
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool


class WorkerError(ValueError):
  """A worker process died."""


@contextlib.contextmanager
def start(workers: int, prepare: Callable | None = None, *args) -> Iterator[ProcessPoolExecutor]:
  """Starts fresh processes, each of which calls prepare(*args) first.

  They end with this process, also where it is killed. Fresh ones (not forked) because this
  process may run threads of TensorFlow, which a fork would break.
  """
  context = multiprocessing.get_context("spawn")
  pool = ProcessPoolExecutor(
    workers, mp_context=context, initializer=_start_worker, initargs=(prepare, args)
  )
  try:
    yield pool
  finally:
    pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(prepare: Callable | None, args: tuple) -> None:
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to deal with
  threading.Thread(target=_end_with_parent, daemon=True).start()
  # Each process is one of many: the library's own threads would only get in the way.
  os.environ["TOKENIZERS_PARALLELISM"] = "false"
  gc.disable()  # the work leaves no cycles, and looking for some takes a seventh of the time
  if prepare:
    prepare(*args)


def _end_with_parent() -> None:
  """Ends this process when the one that started it is gone: killed, it could not say so."""
  multiprocessing.parent_process().join()
  os._exit(1)


def in_order(pool: ProcessPoolExecutor, function: Callable, items: Iterable, most: int) -> Iterator:
  """Yields function(item) for each item, in order, at most `most` of them under way.

  Raises:
    WorkerError: a process died, most likely for want of memory.
  """
  waiting: collections.deque[concurrent.futures.Future] = collections.deque()
  try:
    for item in items:
      waiting.append(pool.submit(function, item))
      if len(waiting) > most:
        yield waiting.popleft().result()
    while waiting:
      yield waiting.popleft().result()
  except BrokenProcessPool:
    raise WorkerError("a worker process died; is there enough memory for data.workers?") from None
