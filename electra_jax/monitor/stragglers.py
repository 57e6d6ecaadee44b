"""Detection of slow processes.

Step times are equal on all processes, because each waits in the gradient all-reduce. The time that
each process needs is estimated from a local matmul and its wait for data.
"""

import functools
import socket
import statistics
import timeit
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from electra_jax.monitor.log import Log
from electra_jax.runtime import processes

TRIES = 3


@functools.cache
def _work():
  # Long enough to reveal a shared core: the scheduler does not interrupt short work.
  on_cpu = jax.default_backend() == "cpu"
  size, dtype = (512, jnp.float32) if on_cpu else (4096, jnp.bfloat16)
  work = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: y @ x, x))
  return work, [jax.device_put(jnp.eye(size, dtype=dtype), d) for d in jax.local_devices()]


def probe_secs() -> float:
  """Returns the time of a small computation on this process's slowest device."""
  work, places = _work()
  times = timeit.repeat(
    lambda: jax.block_until_ready([work(x) for x in places]), number=1, repeat=TRIES
  )
  return statistics.median(times)


def own_secs(step_secs: float, data_secs: np.ndarray, probes: np.ndarray) -> np.ndarray:
  """Returns the estimated step time of each process without waiting for others, [processes].

  Args:
    step_secs: the common step time, including data.
    data_secs: [processes], waiting for data.
    probes: [processes], from `probe_secs`.
  """
  computing = max(step_secs - data_secs.max(), 0.0)
  return data_secs + computing * probes / probes.max()


class StragglerDetector:
  """Compares the processes of a run; all call it together.

  Warns if a process's step time / the others' median exceeds `slow_ratio` on two lines in a row.
  """

  def __init__(self, slow_ratio: float, batch_size: int, step: int):
    self._slow_ratio, self._batch_size = slow_ratio, batch_size
    self._start, self._step, self._data_secs = step, step, 0.0
    self._names = processes.texts_of_all(socket.gethostname(), 64)
    self._suspect, self._lines = None, 0
    probe_secs()  # compiles

  def after(
    self, step: int, sequences_per_sec: float | None, data_secs: float, log: Log
  ) -> Mapping[str, float]:
    """Returns numbers for a log line, and warns if a process becomes slow.

    `sequences_per_sec` is since the previous line, None without steps; `data_secs` is this
    process's total wait for data.
    """
    first = self._step == self._start  # its first batch opens the data
    steps, waited = step - self._step, data_secs - self._data_secs
    self._step, self._data_secs = step, data_secs
    mine = [waited / steps, probe_secs()]
    data, probes = multihost_utils.process_allgather(np.array(mine)).T
    if not sequences_per_sec or first:
      return {}
    own = own_secs(self._batch_size / sequences_per_sec, data, probes)
    values, warnings = self.check(own, data)
    log.warn(warnings)
    return values

  def check(self, own: np.ndarray, data_secs: np.ndarray) -> tuple[Mapping[str, float], list[str]]:
    """Returns numbers and warnings from the step times and data waits [processes]."""
    slowest = int(own.argmax())
    others = float(np.median(np.delete(own, slowest)))
    values = {
      "fastest_host_step_ms": 1000 * float(own.min()),
      "slowest_host_step_ms": 1000 * float(own.max()),
      "slowest_host": slowest,
    }
    suspect = slowest if own[slowest] > self._slow_ratio * others else None
    self._lines = self._lines + 1 if suspect == self._suspect else 1
    self._suspect = suspect
    # One line may be noise; later lines would repeat the warning.
    if suspect is None or self._lines != 2:
      return values, []
    return values, [
      f"process {slowest} ({self._names[slowest]}) is slow: it needs {1000 * own[slowest]:,.0f} ms"
      f" for a step, {1000 * data_secs[slowest]:,.0f} ms of it waiting for data; the others need"
      f" {1000 * others:,.0f} ms"
    ]
