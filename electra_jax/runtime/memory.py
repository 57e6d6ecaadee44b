"""Compares the memory that a compiled program needs with the memory there is."""

import contextlib
from pathlib import Path

import jax

MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")  # versions 2 and 1


def check(name: str, compiled: jax.stages.Compiled, remedy: str) -> None:
  """Refuses a program whose temporaries and results exceed the free memory of its devices.

  A CPU does not refuse an allocation: the kernel kills the process later, without a message.

  Args:
    name: of the program, for the message.
    compiled: its arguments are in memory already.
    remedy: what to raise or lower, for the message.

  Raises:
    ValueError: with both numbers.
  """
  stats, free = compiled.memory_analysis(), available()
  if stats is None or free is None:
    return
  needed = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
  if jax.default_backend() == "cpu":
    needed *= jax.local_device_count()
  if needed > free:
    raise ValueError(
      f"{name} needs {needed / 1e9:,.2f} GB of memory, {free / 1e9:,.2f} GB are free: raise"
      f" {remedy}"
    )


def available() -> int | None:
  """Returns the free bytes of a device, on a CPU of this machine or container; None if unknown."""
  if jax.default_backend() != "cpu":
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    return limit and limit - stats["bytes_in_use"]
  try:
    lines = MEMINFO.read_text().splitlines()
    free = 1024 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable:"))
  except (OSError, StopIteration):
    return None
  for group in CGROUPS:
    for limit, used in (
      ("memory.max", "memory.current"),
      ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
      with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        free = min(free, int((group / limit).read_text()) - int((group / used).read_text()))
  return free
