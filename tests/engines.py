"""Builds the same shards by parts on every engine, and where a worker is killed.

  python tests/engines.py [--folder=DIR]

Installs Apache Beam and Ray into folders of their own inside the environment, Beam with the older
versions of requirements-beam.lock that it needs. Builds the documentation of the installed packages
in eight files: in one local build, by parts in another order, on Beam (processes of this machine,
and its portable runner) and on Ray, and again on each with a worker killed in the middle. Exits
with 0 if all bytes are the same.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import packages

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from electra_jax.data import python_docs  # noqa: E402

PARTS, TIMEOUT_SECS = 6, 300
MODULES = 1500  # whose documentation is built: each worker writes for a second
BEAM = [
  "--runner=beam", "--", "--runner=DirectRunner", "--direct_running_mode=multi_processing",
  "--direct_num_workers=2",
]  # fmt: skip
PORTABLE = [
  "--runner=beam", "--", "--runner=PortableRunner", "--job_endpoint=embed",
  "--environment_type=LOOPBACK",
]  # fmt: skip
# What to run, where its engine is installed, and what its workers' command lines contain.
ENGINES = {
  "local": ([], None, "spawn_main"),
  "beam, processes": (BEAM, "beam", "sdk_worker_main"),
  "beam, portable": (PORTABLE, "beam", None),  # its workers are threads
  "ray": (["--runner=ray"], "ray", "ray::"),
}


def locked(name: str) -> dict[str, str]:
  """Returns {package: its line} of a lock file."""
  return {line.partition("==")[0]: line for line in packages.locked(name)}


def install(name: str) -> Path:
  """Installs an engine into a folder of the environment, with what differs from the lock."""
  if name == "ray":
    return packages.install(name, *packages.constraint(), "ray==2.60.0")
  usual = locked("requirements.lock")
  other = [x for k, x in locked("requirements-beam.lock").items() if usual.get(k) != x]
  return packages.install(name, "--no-deps", *(line.partition(" ;")[0] for line in other))


def write_text(folder: Path) -> None:
  """Writes the documentation of the installed packages in eight files of different sizes."""
  documents = list(itertools.islice(python_docs.harvest(os.cpu_count()), MODULES))
  bounds = [round(len(documents) * (i / 8) ** 1.3) for i in range(9)]
  for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
    (folder / f"{i}.txt").write_text("\n\n".join(documents[start:end]) + "\n", "utf-8")


def start(text: Path, folder: Path, engine: str, *options: str) -> subprocess.Popen:
  """Starts a build."""
  arguments, place, _ = ENGINES[engine]
  fields = {"sources": f"text:{text}/*.txt", "dir": folder, "parts": PARTS, "dedup": "exact"}
  command = [sys.executable, "-m", "electra_jax.data.build", "--config=configs/quickstart.py"]
  command += [f"--config.data.{name}={value}" for name, value in fields.items()]
  path = os.pathsep.join(str(p) for p in (install(place) if place else None, ROOT) if p)
  log = folder.with_suffix(".log").open("a")
  return subprocess.Popen(
    [*command, *options, *arguments],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": path},
    stdout=log,
    stderr=log,
    start_new_session=True,
  )


def wait(process: subprocess.Popen, folder: Path, right: tuple[int, ...] = (0,)) -> None:
  """Waits for a build to end well.

  Raises:
    SystemExit: it does not; the message is the end of its output.
  """
  code = process.wait(TIMEOUT_SECS)
  if code not in right:
    raise SystemExit(f"{folder.with_suffix('.log').read_text()[-3000:]}\n{folder} ended: {code}")


def kill_a_worker(process: subprocess.Popen, folder: Path, name: str) -> bool:
  """Kills one of a build's workers while it writes a part; False if the build was faster."""
  while process.poll() is None:
    if any((folder / ".building").glob(".part-*/train-*")):
      for pid in sorted(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
        try:
          line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
          mine = os.getsid(pid) == process.pid or line.startswith("ray::")
        except OSError:
          continue
        shell = line.startswith(("sh\0", "/bin/sh\0"))  # that started a worker
        if mine and pid != process.pid and name in line and not shell:
          os.kill(pid, signal.SIGKILL)
          return True
    time.sleep(0.01)
  return False


def shards(folder: Path) -> dict[str, bytes]:
  """Returns the files of a build, without the versions: Beam's lock has another NumPy."""
  found = (p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
  files = {path.name: path.read_bytes() for path in found}
  manifest = json.loads(files.get("manifest.json", "{}"))
  manifest.pop("versions", None)
  return files | {"manifest.json": json.dumps(manifest).encode()}


def check(folder: Path) -> bool:
  """Runs all builds; returns whether their bytes are the same."""
  text = folder / "text"
  text.mkdir()
  write_text(text)
  first = folder / "first"
  wait(start(text, first, "local"), first)
  wanted, same = shards(first), True

  def report(what: str, where: Path, began: float) -> None:
    nonlocal same
    equal = shards(where) == wanted and len(wanted) > PARTS
    same = same and equal
    secs = time.monotonic() - began
    print(f"{what}: {'the same bytes' if equal else 'NOT THE SAME'}, {secs:.0f} s", flush=True)

  began, where = time.monotonic(), folder / "parts"
  for _ in range(2):  # the text is read, then the parts are written
    for part in (5, 0, 3, 1, 4, 2):
      wait(start(text, where, "local", f"--part={part}/{PARTS}"), where)
  report("by parts in another order", where, began)
  for i, (engine, (_, _, worker)) in enumerate(ENGINES.items()):
    if engine != "local":
      began, where = time.monotonic(), folder / f"whole{i}"
      wait(start(text, where, engine), where)
      report(engine, where, began)
    if worker:
      began, where = time.monotonic(), folder / f"killed{i}"
      process = start(text, where, engine)
      if not kill_a_worker(process, where, worker):
        raise SystemExit(f"{engine}: no worker to kill was found in time")
      try:
        process.wait(30)
      except subprocess.TimeoutExpired:  # an engine may wait for its worker for ever
        os.killpg(process.pid, signal.SIGKILL)
      code = process.wait()
      if code:
        wait(start(text, where, engine), where)
      report(f"{engine}, a worker killed, then {'again' if code else 'by itself'}", where, began)
  return same


def main() -> int:
  """Runs from the command line."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--folder", type=Path, help="kept, for a look at the logs")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as temporary:
    folder = (args.folder or Path(temporary)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return 0 if check(folder) else 1


if __name__ == "__main__":
  sys.exit(main())
