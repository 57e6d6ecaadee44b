"""Changes one line of the package at a time, and asks whether the tests notice.

  python tests/mutants.py [--part=0/4] [--out=FILE] [--secs=600] [TEXT]  # make mutants ARGS=...

The lines are in tests/mutants.txt. Runs the tests beside each line in a copy of the tree, writes a
line of JSON for each to FILE (default build/mutants.jsonl), and prints the share that a test has
killed and the survivors. Started again it continues: it repeats survivors, and keeps what was
killed until FILE is deleted. Exits with 1 below 95 %. TEXT takes those that match an expression.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutants.txt"
WANTED = 0.95
PRELOADED = """jax flax optax orbax.checkpoint ml_collections sklearn.metrics scipy.stats
  matplotlib.pyplot rich.console safetensors.numpy tokenizers""".split()
NOT_COPIED = {"runs", "build", "dist", "shared"}  # of the clone, beside hidden folders


class Mutant(NamedTuple):
  """A change of a line, and the tests that should fail with it."""

  file: str  # in electra_jax
  old: str
  new: str
  tests: tuple[str, ...]  # arguments of pytest


def read() -> list[Mutant]:
  """Returns the mutants of the table."""
  found, file, tests, old = [], "", (), ""
  for line in TABLE.read_text(encoding="utf-8").splitlines():
    if line.startswith("@ "):
      file, *names = line[2:].split()
      tests = tuple(name if "/" in name else _path(name) for name in names)
    elif line.startswith("- "):
      old = line[2:]
    elif line.startswith("+ "):
      found.append(Mutant(file, old, line[2:], tests))
  return found


def _path(name: str) -> str:
  """Returns the argument of pytest for the name of a file of tests, or NAME::TEST."""
  file, colons, test = name.partition("::")
  return f"tests/test_{file}.py{colons}{test}"


def _left_out(folder: str, names: list[str]) -> list[str]:
  if Path(folder) != ROOT:
    return ["__pycache__"]
  return [name for name in names if name in NOT_COPIED or name.startswith(".")]


def preload(copy: Path) -> None:
  """Imports what most tests import, once for all mutants, but nothing of the package."""
  runpy.run_path(str(copy / "tests" / "conftest.py"))  # JAX reads the environment
  for name in PRELOADED:
    importlib.import_module(name)


def run(copy: Path, tests: Sequence[str], secs: float, *options: str) -> tuple[int, str]:
  """Runs tests in a copy; returns the exit code (124 out of time) and the end of the output."""
  output = copy.parent / "output"
  with warnings.catch_warnings(action="ignore"):  # JAX has started no thread yet
    child = os.fork()
  if not child:
    os.setsid()
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
      os.dup2(handle, stream)
    os.chdir(copy)
    others = [x for x in os.environ.get("PYTHONPATH", "").split(":") if x and Path(x) != ROOT]
    os.environ |= {"PYTHONPATH": ":".join([str(copy), *others]), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path = [str(copy), *(x for x in sys.path if Path(x) not in (ROOT, ROOT / "tests"))]
    sys.dont_write_bytecode = True
    code = pytest.main(["-n", "0", "-p", "no:cacheprovider", *options, *tests])
    sys.stdout.flush()
    os._exit(code)
  end, code = time.monotonic() + secs, None
  while code is None and time.monotonic() < end:
    time.sleep(0.1)
    done, status = os.waitpid(child, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status) if done else None
  with contextlib.suppress(ProcessLookupError):  # also the programs that tests have started
    os.killpg(child, signal.SIGKILL)
  if code is None:
    os.waitpid(child, 0)
  return 124 if code is None else code, output.read_text(errors="replace")[-3000:]


def failed(output: str) -> str | None:
  """Returns the argument of pytest for the test that failed, None if the output names none."""
  names = re.findall(r"(?m)^(?:FAILED|ERROR) (tests/.*?|electra_jax/.*?)(?: - .*)?$", output)
  return names[-1] if names else None


def kills(copy: Path, mutant: Mutant, secs: float, sound: set[str]) -> str | None:
  """Returns the test that fails with a mutant and not without it, None if none does.

  Args:
    sound: tests that are known to pass without a mutant, to which it adds.

  Raises:
    SystemExit: a test does not exist, or fails by itself.
  """
  path = copy / "electra_jax" / mutant.file
  source = path.read_text(encoding="utf-8")
  path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
  try:
    code, output = run(copy, mutant.tests, secs, "-x")
  finally:
    path.write_text(source, encoding="utf-8")
  if not code:
    return None
  blamed = (failed(output),) if failed(output) else mutant.tests
  if todo := [test for test in blamed if test not in sound]:
    alone, told = run(copy, todo, 3600)
    if code in (4, 5) or alone:
      raise SystemExit(f"{told if alone else output}\n{mutant.file}: {mutant.old}: see above")
    sound.update(todo)
  return " ".join(blamed)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--part", default="0/1", metavar="I/N", help="every Nth mutant, from the Ith")
  parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.jsonl")
  parser.add_argument("--secs", type=float, default=600, help="limit for a mutant")
  parser.add_argument("text", nargs="?", default="")
  args = parser.parse_args()
  index, count = map(int, args.part.split("/"))
  mine = [x for x in read()[index::count] if re.search(args.text, f"{x.file} {x.old}")]
  args.out.parent.mkdir(parents=True, exist_ok=True)
  rows = [json.loads(x) for x in args.out.read_text().splitlines()] if args.out.exists() else []
  dead = {tuple(row["mutant"]) for row in rows if row["killed_by"]}
  sound = {row["killed_by"] for row in rows if row["killed_by"]}
  todo = [x for x in mine if x[:3] not in dead]
  with tempfile.TemporaryDirectory(prefix="electra_jax_mutants_") as folder:
    copy = Path(folder) / "tree"
    shutil.copytree(ROOT, copy, ignore=_left_out)
    preload(copy)
    for place, mutant in enumerate(todo, 1):
      started = time.monotonic()
      test = kills(copy, mutant, args.secs, sound)
      row = {"mutant": mutant[:3], "killed_by": test, "secs": round(time.monotonic() - started, 1)}
      with args.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
      dead |= {mutant[:3]} if test else set()
      state = "killed" if test else "SURVIVED"
      print(f"{place}/{len(todo)} {state}: {mutant.file}: {mutant.new.strip()}", flush=True)
  survivors = [x for x in mine if x[:3] not in dead]
  for x in survivors:
    print(f"\nelectra_jax/{x.file}, not noticed by {' '.join(x.tests)}\n- {x.old}\n+ {x.new}")
  share = 1 - len(survivors) / max(len(mine), 1)
  print(f"\n{len(mine) - len(survivors)} of {len(mine)} mutants killed: {100 * share:.1f} %")
  return int(share < WANTED)


if __name__ == "__main__":
  sys.exit(main())
