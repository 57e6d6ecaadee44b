"""Speed and memory of an engine that builds shards, compared with a local build.

  python benchmarks/build.py SOURCE ... --runner beam|ray --vocab vocab.txt [--json FILE]

A SOURCE is an entry of config.data.sources, whose text is split into eight files. The engine
(install electra_jax[beam] or [ray]) and a local build take turns to build shards from them, as a
user would, start-up and checksums included. With two or more texts, `of_local_without_start` is the
share of the local speed on what the last text has more than the first. With RAY_ADDRESS, Ray is a
running cluster (`ray start --head`), whose processes do not count as memory of the build.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import machine
import psutil

from electra_jax.data import sources

PARTS = 8
OPTIONS = {  # of engines, to run on this machine
  "local": [],
  "beam": [
    "--", "--runner=DirectRunner", "--direct_running_mode=multi_processing",
    f"--direct_num_workers={len(os.sched_getaffinity(0))}",
  ],
  "ray": [],
}  # fmt: skip
POLL_SECS = 0.05


def run_build(fields: dict, runner: str) -> tuple[float, float]:
  """Builds in a separate process; returns seconds and peak MB, children included."""
  flags = [f"--config.data.{name}={value}" for name, value in fields.items()]
  command = [sys.executable, "-m", "electra_jax.data.build", "--config=configs/base.py", *flags]
  command += ["--overwrite", f"--runner={runner}", *OPTIONS[runner]]
  start, peak = time.perf_counter(), 0.0
  process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  while process.poll() is None:
    peak = max(peak, resident_mb(process.pid))
    time.sleep(POLL_SECS)
  if process.returncode:
    raise SystemExit(f"the build ended with {process.returncode}")
  return time.perf_counter() - start, peak


def resident_mb(pid: int) -> float:
  """Returns the resident memory of a process and its descendants, with shared pages in each."""
  total = 0.0
  with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
      with contextlib.suppress(psutil.NoSuchProcess):
        total += process.memory_info().rss / 1e6
  return total


def cut(source: str, folder: Path) -> int:
  """Writes the text of a source to PARTS files; returns its bytes."""
  (parsed,) = sources.parse(source)
  total = sum(piece.size for piece in sources.documents(parsed, sources.SourceStats(parsed)))
  files = [open(folder / f"part{i}.txt", "w", encoding="utf-8") for i in range(PARTS)]
  size = 0
  for piece in sources.documents(parsed, sources.SourceStats(parsed)):
    files[size * PARTS // total].write(piece.text + "\n\n")
    size += piece.size
  for file in files:
    file.close()
  return total


def measure(source: str, vocab: str, seq_length: int, rounds: int, runner: str) -> dict:
  """Builds a text with an engine and locally; returns a row of results."""
  runs: dict[str, list] = {"local": [], runner: []}
  with tempfile.TemporaryDirectory() as folder:
    size = cut(source, Path(folder)) / 1e6
    fields = {"dir": f"{folder}/shards", "sources": f"text:{folder}/part*.txt", "vocab": vocab}
    fields |= {"seq_length": seq_length, "parts": PARTS}
    for _ in range(rounds):
      for engine, found in runs.items():
        found.append(run_build(fields, engine))
  row = {"text_mb": round(size, 1)}
  for engine, found in runs.items():
    secs, peaks = zip(*found, strict=True)
    row[f"{engine}_mb_per_sec"] = round(size / statistics.median(secs), 2)
    row[f"{engine}_rounds_secs"] = [round(x, 2) for x in secs]
    row[f"{engine}_peak_resident_mb"] = round(max(peaks))
  return row | {"of_local": round(row[f"{runner}_mb_per_sec"] / row["local_mb_per_sec"], 2)}


def main(
  texts: list[str],
  /,
  runner: Literal["beam", "ray"],
  vocab: str,
  seq_length: int = 128,
  rounds: int = 3,
) -> dict:
  rows = [measure(text, vocab, seq_length, rounds, runner) for text in texts]
  results = {"rows": rows, "running_cluster": "RAY_ADDRESS" in os.environ}
  if len(rows) > 1:
    local, engine = (
      statistics.median(rows[-1][f"{name}_rounds_secs"])
      - statistics.median(rows[0][f"{name}_rounds_secs"])
      for name in ("local", runner)
    )
    results["of_local_without_start"] = round(local / engine, 2)
  return results


if __name__ == "__main__":
  machine.start(main)
