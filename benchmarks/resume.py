"""Does a killed and resumed run equal an uninterrupted one on this accelerator, bit for bit?

  python benchmarks/resume.py --out DIR [--set FIELD=VALUE ...] [--json OUT]

Trains once to the end, and once until `kill -9` after the second checkpoint and then to the end,
and compares the last checkpoints and the metrics. All starts share compiled programs. GPUs may sum
in a different order each time; if bits differ, prints the difference and repeats with XLA's
deterministic operations. Exits with 1 if bits still differ. Needs no TensorFlow.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import machine
import numpy as np

sys.path.insert(0, str(machine.ROOT / "tests" / "faults"))

import harness  # noqa: E402

SAVES = 8  # of a run
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def start(folder: Path, workdir: Path, steps: int, fields: dict, flags: str) -> subprocess.Popen:
  """Starts or resumes a run."""
  every = steps // SAVES
  fields = {
    "checkpoint.every_steps": every,
    "eval.every_steps": 2 * every,
    "log.trackers": "",
    **fields,
  }
  command = harness.command("electra_jax.train", folder, steps, f"--workdir={workdir}", **fields)
  environment = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(folder.absolute() / "compiled"),
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
  }
  with workdir.with_suffix(".log").open("a", encoding="utf-8") as log:
    return subprocess.Popen(command, cwd=machine.ROOT, stdout=log, stderr=log, env=environment)


def finish(process: subprocess.Popen, workdir: Path) -> None:
  """Waits for a run's end; raises SystemExit if it failed."""
  if code := process.wait():
    lines = workdir.with_suffix(".log").read_text("utf-8").strip().splitlines()
    raise SystemExit(f"error: training ended with {code}: {(lines or ['no output'])[-1]}")


def kill_late(process: subprocess.Popen, workdir: Path, saved: int) -> int:
  """Kills a run after a checkpoint; returns the last step that it logged."""
  while not (harness.newest(workdir) >= saved and harness.last_line(workdir) > saved):
    if process.poll() is not None:
      finish(process, workdir)
      raise SystemExit("error: the run was over before it could be killed: raise --steps")
    time.sleep(0.005)
  process.send_signal(signal.SIGKILL)
  process.wait()
  return harness.last_line(workdir)


def compare(folder: Path, steps: int, fields: dict, flags: str) -> dict:
  """Returns whether the two runs end in the same bits, and how far apart they are."""
  name = "deterministic" if flags else "default"
  whole, killed = folder / f"{name}-whole", folder / f"{name}-killed"
  if whole.exists() or killed.exists():
    raise SystemExit(f"error: {whole} or {killed} is there already: remove both")
  finish(start(folder, whole, steps, fields, flags), whole)
  at = kill_late(start(folder, killed, steps, fields, flags), killed, 2 * (steps // SAVES))
  left = harness.newest(killed)
  finish(start(folder, killed, steps, fields, flags), killed)
  found = {"steps": steps, "killed_after": at, "went_on_from": left}
  same = harness.outcome(whole, steps) == harness.outcome(killed, steps)
  found["same_bits"] = same
  if not same:
    expected, got = (harness.arrays(run, steps) for run in (whole, killed))
    squares = [
      (np.square(np.float64(got[k]) - np.float64(x)).sum(), np.square(np.float64(x)).sum())
      for k, x in expected.items()
    ]
    apart, size = np.sum(squares, axis=0)
    found["relative_difference_of_the_state"] = float(np.sqrt(apart / size))
  return found


def main(out: Path, set: list[str] = (), steps: int = 400) -> dict:
  """
  --out  an empty folder
  """
  if steps < 5 * SAVES:
    raise SystemExit(f"error: --steps is at least {5 * SAVES}")
  fields = dict(pair.split("=", 1) for pair in set)
  out.mkdir(parents=True, exist_ok=True)
  harness.build(out)
  found, could_not = {"default": compare(out, steps, fields, "")}, []
  if not found["default"]["same_bits"]:
    try:
      found["deterministic"] = compare(out, steps, fields, DETERMINISTIC)
    except SystemExit as error:
      could_not.append(f"with {DETERMINISTIC}: {str(error).removeprefix('error: ')}")
  same = list(found.values())[-1]["same_bits"]
  return {
    "device": jax.devices()[0].device_kind,
    "runs": found,
    "wrong": [] if same else ["a killed run does not end with the bits of one left alone"],
    "could_not": could_not,
  }


if __name__ == "__main__":
  machine.start(main)
