"""Coordination of a run's processes: start-up, collective errors, lost peers."""

import collections
import contextlib
import hashlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import numpy as np
from jax._src import distributed  # the number of processes, without starting the devices
from jax.experimental import multihost_utils

T = TypeVar("T")


class PeerError(ValueError):
  """Another process of the run failed."""


def only_raised(error: Exception, kind: type[Exception]) -> bool:
  """Returns whether every failed process raised `kind`; equal on all after `run_on_all`."""
  return getattr(error, "kinds", {type(error).__name__}) == {kind.__name__}


# Matches errors of collectives or the coordination service when another process is unreachable.
_LOST = re.compile("gloo|nccl|coordination|heartbeat|connection|socket|unavailable|deadline", re.I)


def initialize(
  coordinator: str = "", num_processes: int = 0, process_id: int = -1, timeout_secs: int = 300
) -> None:
  """Joins the run's other processes; call it before using a device.

  Without a coordinator, JAX detects a cluster (TPU pod, SLURM, MPI), else the run has one process.
  If a process is missing after `timeout_secs`, or later silent for up to 100 s, JAX's runtime
  aborts the others (exit code 134). Raises ValueError if the first three arguments disagree.
  """
  given = bool(coordinator), num_processes > 0, process_id >= 0
  if any(given) and not all(given):
    raise ValueError("set all of coordinator, num_processes and process_id, or none")
  if coordinator and not re.search(r":\d+$", coordinator):
    raise ValueError(f"coordinator {coordinator} must be HOST:PORT")
  if coordinator and process_id >= num_processes:
    raise ValueError(f"process_id must be between 0 and {num_processes - 1}, got {process_id}")

  def explain():
    print(
      f"error: not all processes of this run joined within {timeout_secs} s"
      f" (config.hosts.timeout_secs); coordinator: {coordinator or 'set by the cluster'}",
      file=sys.stderr,
      flush=True,
    )

  timer = threading.Timer(max(0.5, timeout_secs - 0.5), explain)  # before the abort
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(
      coordinator_address=coordinator or None,
      num_processes=num_processes or None,
      process_id=process_id if coordinator else None,
      initialization_timeout=timeout_secs,
      heartbeat_timeout_seconds=min(100, timeout_secs),
    )
  except ValueError as error:
    if any(given) or "coordinator_address" not in str(error):
      raise
  finally:
    timer.cancel()
  if distributed.global_state.num_processes == 1:
    # JAX's handler only records the signal, so a SIGTERM before the training loop would be lost.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


@contextlib.contextmanager
def abort_if_peer_lost() -> Iterator[None]:
  """Exits this process if the code inside fails because another process is gone.

  Exits at once, with code 134 like JAX's aborts, because clean-up would wait for the lost process.
  On accelerators collectives hang, and JAX's runtime ends the process when heartbeats stop.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if jax.process_count() == 1 or not _LOST.search(str(error)):
      raise
    reason = str(error).strip().splitlines()[0]
    print(f"error: lost another process of this run: {reason:.200}", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGABRT)


@abort_if_peer_lost()
def _gather(mine: np.ndarray) -> np.ndarray:
  return multihost_utils.process_allgather(mine)


def texts_of_all(mine: str, most: int) -> list[str]:
  """Returns the texts of all processes, each cut to `most` bytes; all call it together."""
  padded = np.frombuffer(mine.encode(errors="backslashreplace")[:most].ljust(most, b"\0"), np.uint8)
  return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in _gather(padded)]


def run_on_all(action: Callable[[], T]) -> T:
  """Returns action(), or raises on every process if it raised on one, so that none waits.

  The action must not wait for another process without a time limit. Processes on which it succeeded
  raise a PeerError that names the first failure.
  """
  if jax.process_count() == 1:
    return action()
  result, failure = None, None
  try:
    result = action()
  except Exception as error:
    failure = error
  # Not repr, which leaves out the path of an OSError.
  reason = f"{type(failure).__name__}({str(failure)!r})" if failure else ""
  errors = {i: text for i, text in enumerate(texts_of_all(reason, 1000)) if text}
  if not errors:
    return result
  first = min(errors)
  error = failure or PeerError(f"process {first} failed: {errors[first]}")
  error.kinds = {text.partition("(")[0] for text in errors.values()}
  raise error


def broadcast_from_0(value: T) -> T:
  """Returns process 0's value, a bool or a list of numbers; all processes call it together."""
  return value if jax.process_count() == 1 else _gather(np.array(value))[0].tolist()


def assert_same(values: dict[str, str]) -> None:
  """Raises ValueError on every process if the values, by name, of one differ from the others.

  The message names the odd process, or the second of two.
  """
  if jax.process_count() == 1:
    return
  mine = " ".join(hashlib.sha256(value.encode()).hexdigest() for value in values.values())
  of_all = [text.split() for text in texts_of_all(mine, len(mine))]
  for (name, value), hashes in zip(values.items(), zip(*of_all, strict=True), strict=True):
    usual = collections.Counter(hashes).most_common(1)[0][0]
    odd = [str(process) for process, digest in enumerate(hashes) if digest != usual]
    if odd:
      raise ValueError(
        f"{name}: process {', '.join(odd)} of {len(hashes)} differs from the others;"
        f" process {jax.process_index()} has {value}"
      )
