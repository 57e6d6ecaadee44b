"""Runs tasks on a pool of processes, with ordered results and a bounded number of pending tasks."""

import collections
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool


def cores() -> int:
  """Returns the number of cores available to this process."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class WorkerError(ValueError):
  """A worker process died, most likely from lack of memory."""


class _Process(multiprocessing.context.SpawnProcess):
  """A spawned process that does not import the main file, which so needs no __main__ guard."""

  @staticmethod
  def _Popen(process):  # noqa: N802 (of the standard library)
    main = vars(sys.modules["__main__"])
    kept = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    try:
      return multiprocessing.context.SpawnProcess._Popen(process)
    finally:
      main.update(kept)


class _Context(multiprocessing.context.SpawnContext):
  Process = _Process


@contextlib.contextmanager
def start(workers: int) -> Iterator[ProcessPoolExecutor]:
  """Starts processes that exit when this one does, even if it is killed.

  They are spawned because a fork would break the TensorFlow threads of this process.
  """
  pool = ProcessPoolExecutor(workers, mp_context=_Context(), initializer=_start_worker)
  try:
    yield pool
  finally:
    pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
  threading.Thread(target=_end_with_parent, daemon=True).start()
  os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes use all cores already
  gc.disable()  # as in `runners.PartWork`


def _end_with_parent() -> None:
  """Exits this process when its parent is gone."""
  multiprocessing.parent_process().join()
  os._exit(1)


def mapped(workers: int, function: Callable, items: Iterable, each: int) -> Iterator:
  """Yields function(item) in order, from `workers` processes, or from this process if 1."""
  if workers == 1:
    yield from map(function, items)
    return
  with start(workers) as pool:
    yield from in_order(pool, function, items, each * workers)


def in_order(pool: Executor, function: Callable, items: Iterable, most: int) -> Iterator:
  """Yields function(item) in order, with about `most` items pending."""
  waiting: collections.deque[Future] = collections.deque()
  try:
    for item in items:
      waiting.append(pool.submit(function, item))
      if len(waiting) > most:
        yield waiting.popleft().result()
    while waiting:
      yield waiting.popleft().result()
  except BrokenProcessPool:
    # Before Python 3.11.5 the pool's shutdown joins a thread that blocks while it writes a work
    # item to the pipe, because no worker is left to read it. Closing the pipe unblocks the thread.
    if sys.version_info < (3, 11, 5):
      pool._call_queue._reader.close()
    raise WorkerError("a worker process died, probably out of memory: lower data.workers") from None
