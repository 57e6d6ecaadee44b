"""Half an hour of training in one process: does anything grow, slow down or pile up?

  python benchmarks/soak.py [--minutes=30] [--warm-up=5] [--json benchmarks/results/soak.json]

A tiny network on a generated text, with a line every second or so, an evaluation and a checkpoint
every few, so that what leaks at a line, an evaluation or a save has hundreds of chances. From
outside: the memory (RSS), open files and threads of the process and the checkpoints on its disk,
every ten seconds. In the end it is told to stop by SIGTERM. Exits with 0 if, after the warm-up,
memory grows by less than 1 MB a minute, the open files are no more at the end than at first,
no more checkpoints lie there than are to be kept, and the steps of the last five minutes are within
5 % of those of the first five.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import numpy as np
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "faults"))

import harness  # noqa: E402

KEEP, KEEP_EVERY = 3, 20_000
FIELDS = {  # beside those of the faults' network
  "data.vocab_size": 2000,
  "optimizer.learning_rate": 1e-3,
  "optimizer.warmup_steps": 1000,
  "train.batch_size": 32,
  "train.steps": 10_000_000,
  "eval.every_steps": 1000,
  "eval.batch_size": 32,
  "eval.max_examples": 320,
  "checkpoint.every_steps": 1000,
  "checkpoint.keep": KEEP,
  "checkpoint.keep_every_steps": KEEP_EVERY,
  "log.every_steps": 200,
}


def look(process: subprocess.Popen, workdir: Path, started: float) -> dict:
  """Returns what the process holds now."""
  proc = Path(f"/proc/{process.pid}")
  status = (proc / "status").read_text()
  steps = [p.name for p in (workdir / "checkpoints").glob("*") if p.name.isdigit()]
  lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
  return {
    "secs": round(time.monotonic() - started, 2),
    "step": next((json.loads(x)["step"] for x in reversed(lines) if x.endswith("\n")), 0),
    "rss_mb": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024,
    "threads": int(re.search(r"Threads:\s+(\d+)", status)[1]),
    "open_files": len(os.listdir(proc / "fd")),
    "checkpoints": len(steps),
    "kept_for_ever": sum(int(step) % KEEP_EVERY == 0 for step in steps),
  }


def judge(seen: list[dict], warm_up: float, log: list[dict]) -> dict:
  """Returns the figures, of what was seen after the warm-up (minutes)."""
  seen = [x for x in seen if x["secs"] >= 60 * warm_up]
  minutes = np.array([x["secs"] for x in seen]) / 60
  slope = np.polyfit(minutes, [x["rss_mb"] for x in seen], 1)[0]

  def rate(first: float, last: float) -> float:
    """Steps a second between two minutes, lines, evaluations and saves included."""
    part = [x for x in seen if first <= x["secs"] / 60 <= last]
    return (part[-1]["step"] - part[0]["step"]) / (part[-1]["secs"] - part[0]["secs"])

  def speed(first: float, last: float) -> float:
    """The median of what the program says of its own speed, sequences/s."""
    secs = [x for x in log if "sequences_per_sec" in x]
    return float(
      np.median([x["sequences_per_sec"] for x in secs if first <= x["elapsed_secs"] / 60 <= last])
    )

  begin, end = minutes[0], minutes[-1]
  first, last = (begin, begin + 5), (end - 5, end)
  return {
    "minutes": round(float(end), 1),
    "steps": seen[-1]["step"],
    "rss_mb": [round(seen[0]["rss_mb"], 1), round(seen[-1]["rss_mb"], 1)],
    "rss_mb_a_minute": round(float(slope), 3),
    "open_files": [min(x["open_files"] for x in seen), max(x["open_files"] for x in seen)],
    "open_files_first_last": [seen[0]["open_files"], seen[-1]["open_files"]],
    "threads": [seen[0]["threads"], seen[-1]["threads"]],
    "most_checkpoints_but_those_for_ever": max(x["checkpoints"] - x["kept_for_ever"] for x in seen),
    "steps_per_sec": [round(rate(*first), 1), round(rate(*last), 1)],
    "sequences_per_sec": [round(speed(*first)), round(speed(*last))],
    "last_over_first": round(rate(*last) / rate(*first), 4),
  }


def holds(figures: dict) -> dict[str, bool]:
  """Returns the promises and whether they hold."""
  first, last = figures["open_files_first_last"]
  return {
    "memory grows by less than 1 MB a minute": figures["rss_mb_a_minute"] < 1,
    "open files are flat": last <= first + 2,  # a checkpoint may be under way
    "checkpoints are cleared": figures["most_checkpoints_but_those_for_ever"] <= KEEP + 1,
    "as fast at the end": abs(figures["last_over_first"] - 1) < 0.05,
  }


def soak(folder: Path, minutes: float) -> tuple[list[dict], list[dict], str]:
  """Trains for some minutes; returns what was seen, its lines, and what it said last."""
  harness.write_text(folder / "text.txt")
  fields = {
    **harness.FIELDS,
    **FIELDS,
    "data.dir": folder / "data",
    "data.sources": f"text:{folder}/text.txt",
  }
  changes = [f"--config.{name}={value}" for name, value in fields.items()]
  head = [sys.executable, "-m"]
  build = [*head, "electra_jax.data.build", "--config=configs/base.py", *changes]
  subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
  workdir, seen = folder / "run", []
  train = [*head, "electra_jax.train", "--config=configs/base.py", f"--workdir={workdir}", *changes]
  with (folder / "log").open("w") as log:
    process = subprocess.Popen(train, cwd=ROOT, stdout=log, stderr=log)
    while not (workdir / "metrics.jsonl").exists() or not (workdir / "checkpoints").exists():
      if process.poll() is not None:
        raise SystemExit((folder / "log").read_text()[-3000:])
      time.sleep(0.5)
    started = time.monotonic()
    while time.monotonic() < started + 60 * minutes:
      seen.append(look(process, workdir, started))
      time.sleep(10)
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
  said = (folder / "log").read_text()
  if code != harness.STOPPED:
    raise SystemExit(f"exit code {code}: {said[-3000:]}")
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return seen, lines, next(x for x in said.splitlines() if x.startswith("time:"))


def main() -> int:
  """Runs from the command line."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--minutes", type=float, default=30)
  parser.add_argument("--warm-up", type=float, default=5, help="minutes that are not judged")
  parser.add_argument("--json", default=None)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as temporary:
    seen, lines, time_line = soak(Path(temporary), args.minutes)
  figures = judge(seen, args.warm_up, lines)
  promises = holds(figures)
  console = Console(highlight=False, soft_wrap=True)
  for name, value in figures.items():
    console.print(f"{name}: {value}")
  console.print(time_line)
  for name, kept in promises.items():
    console.print(f"{'holds' if kept else 'DOES NOT HOLD'}: {name}")
  machine.save(args.json, {"time": time_line, **figures, "seen": seen})
  return 0 if all(promises.values()) else 1


if __name__ == "__main__":
  sys.exit(main())
