"""An hour of training in one process: does memory grow, or speed fall?

  python benchmarks/soak.py [--minutes=60] [--warm_up=5] [--json benchmarks/results/soak.json]

Trains a tiny network on generated text, with a log line every second, and an evaluation and a
checkpoint every 20 seconds, so that a leak in any of them repeats a hundred times. Records the
memory (RSS), open files, threads and checkpoints of the process every ten seconds. malloc and
protobuf move the memory at times, so the test takes an hour, and also computes slopes of later
minutes. Then a second process starts the same training, and the two take turns of 20 s, because the
speed of machines drifts by more than a program slows down. At the end the process gets SIGTERM.
Exits with 0 if, after the warm-up, memory grows by less than 1 MB per minute, open files do not
grow, exactly the checkpoints to keep are left, the speed of the last five minutes is within 5 % of
the first five and of the new process, and the process ends within 30 s.
"""

import math
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import machine
import numpy as np
import psutil

sys.path.insert(0, str(machine.ROOT / "tests" / "faults"))

import harness  # noqa: E402

SAVE_EVERY, KEEP, KEEP_EVERY = 1000, 3, 20_000
STEPS = 10_000_000  # more than the time allows
TURNS, TURN_SECS = 8, 20
FIELDS = {  # in addition to the fields of the faults' network
  "optimizer.learning_rate": 1e-3,
  "optimizer.warmup_steps": 1000,
  "train.batch_size": 32,
  "eval.every_steps": 1000,
  "eval.batch_size": 32,
  "eval.max_examples": 320,
  "checkpoint.every_steps": SAVE_EVERY,
  "checkpoint.keep": KEEP,
  "checkpoint.keep_every_steps": KEEP_EVERY,
  "log.every_steps": 50,
}


def look(run: harness.Run, workdir: Path, started: float) -> dict:
  """Returns the memory, open files, threads and checkpoints of the process."""
  process, steps = psutil.Process(run.process.pid), harness.checkpoints(workdir)
  memory = process.memory_info()
  return {
    "secs": round(time.monotonic() - started, 2),
    "step": harness.last_line(workdir),
    "rss_mb": memory.rss / 2**20,
    "anonymous_mb": (memory.rss - memory.shared) / 2**20,
    "threads": process.num_threads(),
    "open_files": process.num_fds(),
    "checkpoints": len(steps),
    "kept_for_ever": sum(step % KEEP_EVERY == 0 for step in steps),
  }


def judge(seen: list[dict], warm_up: float, in_turns: list[float], stop_secs: float) -> dict:
  """Returns the measurements after the warm-up (minutes), and what is "wrong"."""

  def between(first: float, last: float = math.inf) -> list[dict]:
    return [x for x in seen if first <= x["secs"] / 60 <= last]

  def slope(since: float) -> float:
    """Megabytes per minute after some minutes, by least squares."""
    part = between(since)
    line = np.polyfit([x["secs"] / 60 for x in part], [x["rss_mb"] for x in part], 1)
    return round(float(line[0]), 3)

  def rate(part: list[dict]) -> float:
    """Steps per second, including lines, evaluations and saves."""
    return (part[-1]["step"] - part[0]["step"]) / (part[-1]["secs"] - part[0]["secs"])

  def open_files(part: list[dict]) -> float:
    """The median; during a save there are more."""
    return float(np.median([x["open_files"] for x in part]))

  end = seen[-1]["secs"] / 60
  later = [since for since in (15, 30) if warm_up < since < end - 5]
  slopes = {since: slope(since) for since in (warm_up, *later)}
  judged = between(warm_up)
  begin = judged[0]["secs"] / 60
  parts = between(begin, begin + 5), between(end - 5, end)
  files, rates = list(map(open_files, parts)), list(map(rate, parts))
  newest = [x["checkpoints"] - x["kept_for_ever"] for x in judged]
  last = judged[-1]
  # The newest save may be under way.
  kept = [last["kept_for_ever"], (last["step"] - SAVE_EVERY) // KEEP_EVERY]
  slowed, old_over_young = rates[1] / rates[0], in_turns[0] / in_turns[1]
  promises = {
    "memory grows by less than 1 MB a minute": slopes[warm_up] < 1,
    "open files are flat": files[1] <= files[0],
    # One of the newest may be one for ever, and one more be there until the oldest is cleared.
    "checkpoints are kept": min(newest) >= KEEP - 1 and kept[0] >= kept[1],
    "checkpoints are cleared": max(newest) <= KEEP + 1,
    "as fast at the end as at first": abs(slowed - 1) < 0.05,
    "as fast as a process that has just begun": abs(old_over_young - 1) < 0.05,
    "told to stop, it has saved and ended within 30 s": stop_secs < 30,
  }
  return {
    "minutes": round(end, 1),
    "warm_up_minutes": warm_up,
    "steps": last["step"],
    "rss_mb": [round(x["rss_mb"], 1) for x in (judged[0], last)],
    "rss_mb_a_minute_since_minute": slopes,
    "open_files_first_last": files,
    "threads": [judged[0]["threads"], last["threads"]],
    "checkpoints_but_those_for_ever": [min(newest), max(newest)],
    "kept_for_ever": kept,
    "steps_per_sec_first_last_5_minutes": [round(x, 1) for x in rates],
    "last_over_first": round(slowed, 4),
    "steps_per_sec_old_young_in_turns": [round(x, 1) for x in in_turns],
    "old_over_young": round(old_over_young, 4),
    "secs_to_stop": round(stop_secs, 1),
    "wrong": [name for name, holds in promises.items() if not holds],
  }


def take_turns(runs: list[harness.Run], workdirs: list[Path]) -> list[float]:
  """Lets two processes take turns; returns the steps per second of each."""
  begun = [harness.last_line(workdir) for workdir in workdirs]
  for _ in range(TURNS):
    for run, other in (runs, reversed(runs)):
      other.send(signal.SIGSTOP)
      run.send(signal.SIGCONT)
      time.sleep(TURN_SECS)
  runs[0].send(signal.SIGCONT)
  ended = [harness.last_line(workdir) for workdir in workdirs]
  return [(b - a) / (TURNS * TURN_SECS) for a, b in zip(begun, ended, strict=True)]


def stop(run: harness.Run) -> tuple[float, str]:
  """Stops a process; returns the seconds that it took, and its times or its output.

  Returns 100 seconds if it did not stop properly.
  """
  run.send(signal.SIGTERM)
  started = time.monotonic()
  run.process.join(100)
  if run.process.is_alive():
    run.kill()
    return 100.0, run.output[-3000:]
  if (code := run.process.exitcode) != harness.STOPPED:
    return 100.0, f"exit code {code}: {run.output[-3000:]}"
  times = next(x for x in run.output.splitlines() if "time:" in x)
  return time.monotonic() - started, times


def soak(folder: Path, minutes: float) -> tuple[list[dict], list[float], float, str]:
  """Trains for some minutes; returns the measurements, both speeds, and the result of `stop`."""
  harness.build(folder)
  workdir, other, seen = folder / "run", folder / "young", []
  reached = harness.reaches(workdir, 1)
  old = harness.Run(folder, workdir, STEPS, **FIELDS).when(reached)
  started = time.monotonic()
  while time.monotonic() < started + 60 * minutes:
    seen.append(look(old, workdir, started))
    time.sleep(10)
  old.send(signal.SIGSTOP)
  shutil.copytree(workdir / "compiled", other / "compiled")
  reached = harness.reaches(other, 1000)
  young = harness.Run(folder, other, STEPS, **FIELDS).when(reached)
  speeds = take_turns([old, young], [workdir, other])
  young.kill()
  return seen, speeds, *stop(old)


def main(minutes: float = 60, warm_up: float = 5) -> dict:
  """
  --warm_up  minutes to ignore
  """
  if minutes < warm_up + 10:
    raise SystemExit(
      "error: --minutes is 10 more than --warm_up at least: five are compared with five"
    )
  with tempfile.TemporaryDirectory() as temporary:
    seen, speeds, stop_secs, time_line = soak(Path(temporary), minutes)
  return {"time": time_line, **judge(seen, warm_up, speeds, stop_secs), "seen": seen}


if __name__ == "__main__":
  machine.start(main)
