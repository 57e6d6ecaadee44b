"""What a measurement was made on, and how it is kept."""

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

PACKAGES = (
  "jax",
  "jax-cuda13-plugin",
  "libtpu",
  "numpy",
  "tensorflow-cpu",
  "tensorflow",
  "tokenizers",
  "torch",
  "transformers",
)


def describe() -> dict:
  """Returns processor, cores, memory, load, system and versions; nothing that names the machine."""
  versions = {}
  for name in PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return {
    "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
    "cores": len(os.sched_getaffinity(0)),
    "memory_gb": round(int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 1e6, 1),
    "load_average_1_min": round(os.getloadavg()[0], 2),
    "system": f"{platform.system()} {platform.machine()}",
    "python": platform.python_version(),
    **versions,
  }


def devices() -> str:
  """Returns how many devices of which kind JAX uses; a CPU by the name of its processor."""
  import jax

  kind = jax.devices()[0].device_kind
  if kind == "cpu":
    found = describe()
    kind = f"cpu, {found['cores']} cores of {found['processor']}"
  return f"{jax.device_count()} x {kind}"


def _field(path: str, name: str) -> str | None:
  """Returns the first value of `name` in one of Linux's tables."""
  try:
    with open(path) as file:
      lines = (line.partition(":") for line in file)
      return next((value.strip() for key, _, value in lines if key.strip() == name), None)
  except OSError:
    return None


def save(path: str | None, results: dict, hide: tuple | list = ()) -> None:
  """Writes results, the machine and the command as JSON, if there is a path.

  Arguments in `hide` that hold a path are shown as their last part only.
  """
  if not path:
    return
  command = " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
  for hidden in (str(arg) for arg in hide if arg and "/" in str(arg)):
    command = command.replace(hidden, hidden.rpartition("/")[2])
  content = {"command": command, "machine": describe(), **results}
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  Path(path).write_text(json.dumps(content, indent=1) + "\n")


def write_between(file: Path, mark: str, text: str) -> None:
  """Puts lines of text between `<!-- mark -->` and `<!-- end -->` of a file."""
  start, end = f"<!-- {mark} -->", "<!-- end -->"
  before, found, rest = file.read_text().partition(start)
  _, ends, after = rest.partition(end)
  if not found or not ends:
    raise SystemExit(f"error: {file.name} has no {start} ... {end}")
  file.write_text(f"{before}{start}\n{text}{end}{after}")
