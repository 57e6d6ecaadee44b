"""Runs scripts, describes the machine, and saves results."""

import argparse
import importlib.metadata
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import typing
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

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
  """Returns processor, cores, memory, load, system and versions, without the machine's name."""
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
  """Returns the number and kind of JAX's devices, with the processor's name for a CPU."""
  import jax

  kind = jax.devices()[0].device_kind
  if kind == "cpu":
    found = describe()
    kind = f"cpu, {found['cores']} cores of {found['processor']}"
  return f"{jax.device_count()} x {kind}"


def _field(path: str, name: str) -> str | None:
  """Returns the first value of `name` in one of Linux's tables."""
  try:
    with open(path, encoding="utf-8") as file:
      lines = (line.partition(":") for line in file)
      return next((value.strip() for key, _, value in lines if key.strip() == name), None)
  except OSError:
    return None


def start(main: Callable) -> None:
  """Runs a script whose options are main's parameters, with help lines in main's docstring.

  Parameters before a "/" are positional, a bool is a switch, a list takes several values. Prints
  main's result and, with --json=FILE, saves it; exits with 1 if it has something "wrong". A result
  that is a number is the exit code.
  """
  p = argparse.ArgumentParser(
    description=main.__globals__["__doc__"], formatter_class=argparse.RawTextHelpFormatter
  )
  hints, parameters = typing.get_type_hints(main), inspect.signature(main).parameters.values()
  texts = dict(re.findall(r"^ *-*(\w+)  +(.*)$", main.__doc__ or "", re.MULTILINE))
  for x in parameters:
    _add(p, x, hints[x.name], texts.get(x.name, ""))
  if hints["return"] is dict:
    p.add_argument("--json", help="file for the results")
  given = vars(p.parse_args())
  path = given.pop("json", None)
  first = [given.pop(x.name) for x in parameters if x.kind is x.POSITIONAL_ONLY]
  results = main(*first, **given)
  if isinstance(results, dict):
    print(json.dumps(results, indent=1))
    save(path, results)
    sys.exit(bool(results.get("wrong")))
  sys.exit(results)


def _add(p: argparse.ArgumentParser, x: inspect.Parameter, kind, text: str) -> None:
  """Adds a parameter of a script's main, of some type and with a text of help, to its options."""
  if kind is bool:
    p.add_argument(f"--{x.name}", action="store_true", help=text)
    return
  options = {"help": text}
  if x.default is not x.empty:
    options |= {"default": x.default}
    options["help"] += f" ({x.default})" if x.default not in (None, ()) else ""
  if type(None) in typing.get_args(kind):
    kind = typing.get_args(kind)[0]
  if typing.get_origin(kind) is list:
    options["nargs"], kind = "*", typing.get_args(kind)[0]
  if typing.get_origin(kind) is typing.Literal:
    options["choices"], kind = typing.get_args(kind), str
  if x.kind is x.POSITIONAL_ONLY:
    p.add_argument(x.name, type=kind, **options)
  else:
    p.add_argument(f"--{x.name}", type=kind, required=x.default is x.empty, **options)


def save(path: str | None, results: dict) -> None:
  """Writes results, the machine and the command as JSON, if there is a path."""
  if not path:
    return
  command = " ".join(["python", os.path.relpath(sys.argv[0]), *map(_shown, sys.argv[1:])])
  content = {"command": command, "machine": describe(), **results}
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  Path(path).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _shown(argument: str) -> str:
  """Returns an argument without the folders of a file outside the project.

  >>> _shown("--vocab=/data/bert/vocab.txt"), _shown("--config=configs/base.py")
  ('--vocab=vocab.txt', '--config=configs/base.py')
  """
  name, equals, value = argument.rpartition("=")
  ours = value.startswith(("configs/", "benchmarks/"))
  return f"{name}{equals}{value if ours else value.rpartition('/')[2]}"


def preflight(config: str, topology: str, fields: list[str] = ()) -> list[dict]:
  """Returns the costs from `electra-jax preflight`, run in a separate process.

  Args:
    fields: FIELD=VALUE, of the configuration.

  Raises:
    ValueError: preflight failed; the message is its last line.
  """
  with tempfile.TemporaryDirectory() as folder:
    lines = Path(folder) / "costs.jsonl"
    command = [sys.executable, "-m", "electra_jax.preflight", f"--config={config}"]
    command += [f"--topology={topology}", f"--json={lines}"]
    command += [f"--config.{field}" for field in fields]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    if done.returncode:
      printed = done.stderr.strip().splitlines() or ["preflight failed"]
      raise ValueError(([x for x in printed if x.startswith("error: ")] or printed)[-1])
    return [json.loads(line) for line in lines.read_text("utf-8").splitlines()]


def write_between(file: Path, mark: str, text: str) -> None:
  """Puts lines of text between `<!-- mark -->` and `<!-- end -->` of a file."""
  start, end = f"<!-- {mark} -->", "<!-- end -->"
  before, found, rest = file.read_text("utf-8").partition(start)
  _, ends, after = rest.partition(end)
  if not found or not ends:
    raise SystemExit(f"error: {file.name} has no {start} ... {end}")
  file.write_text(f"{before}{start}\n{text}{end}{after}", "utf-8")
