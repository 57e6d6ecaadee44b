"""Compares the memory that a compiled program needs with the free memory."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

MEMINFO, OWN_GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")  # versions 2 and 1
LIMITS = (
  ("memory.max", "memory.current", "inactive_file"),
  ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def check(name: str, compiled: jax.stages.Compiled, remedy: str) -> None:
  """Raises ValueError if a program, with its arguments in memory, needs more than the free memory.

  On a CPU, allocation succeeds and the kernel later kills the process without a message. The error
  names the program and the remedy: what to raise or lower.
  """
  if stats := compiled.memory_analysis():
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    refuse(name, stats.temp_size_in_bytes + results, f"raise {remedy}")


def refuse(name: str, needed: int, remedy: str) -> None:
  """Raises ValueError, with both numbers, if a device has less than `needed` bytes free."""
  free = available()
  if jax.default_backend() == "cpu":
    needed *= jax.local_device_count()
  if free is not None and needed > free:
    raise ValueError(
      f"{name} needs {needed / 1e9:,.2f} GB of memory, but {free / 1e9:,.2f} GB are free: {remedy}"
    )


def available() -> int | None:
  """Returns the free bytes of a device; of the machine or container for a CPU; None: unknown."""
  if jax.default_backend() != "cpu":
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    return limit and limit - stats["bytes_in_use"]
  try:
    lines = MEMINFO.read_text("utf-8").splitlines()
    free = 1024 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable:"))
  except (OSError, StopIteration):
    return None
  for group in _groups():
    for limit, used, reclaimable in LIMITS:
      with contextlib.suppress(OSError, ValueError):  # no file, or "max"
        most = int((group / limit).read_text("utf-8")) - int((group / used).read_text("utf-8"))
        with contextlib.suppress(OSError, KeyError):
          fields = dict(x.split() for x in (group / "memory.stat").read_text("utf-8").splitlines())
          most += int(fields[reclaimable])  # page cache
        free = min(free, most)
  return free


def _groups() -> Iterator[Path]:
  """Yields the folders of this process's control groups and their parents."""
  own = ""
  with contextlib.suppress(OSError):
    own = OWN_GROUPS.read_text("utf-8")
  for root in CGROUPS:
    yield root
    for line in own.splitlines():  # "0::/system.slice/slurmd", "5:memory:/slurm/job_7"
      parts = Path(line.split(":", 2)[-1]).parts[1:]
      yield from (root.joinpath(*parts[:n]) for n in range(1, len(parts) + 1))
