"""How fast text becomes shards, against the bare tokenizer, and how much memory that takes.

  python benchmarks/build.py [SOURCE ...] [--vocab vocab.txt] [--json benchmarks/results/build.json]
  python benchmarks/build.py SOURCE ... --runner beam|ray [--json FILE]

A SOURCE is an entry of config.data.sources; by default 'python-docs'. Its documentation is
harvested beforehand, and the vocabulary trained, if none is given: both are timed on their own.
Then the whole program is run as a user would run it, start and checksums included, and in turn the
`tokenizers` library encodes the same lines on all cores, without making anything of them. MB per
CPU second say how much of the speed is left on a machine that does other things, too. The floor of
a build is 4 MB/s of raw text on two cores.

With --runner (electra_jax[beam] or [ray] must be installed) the text is cut into eight files, which
the engine and a local build turn into shards in turn. Of two texts or more,
`of_local_without_start` is the share of the local speed in what the last has more than the first.
With RAY_ADDRESS, Ray is a cluster that is up already (`ray start --head`), as it is where Ray is
used; its processes are not in the build's memory then.
"""

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import machine
import peers
import psutil

from electra_jax.data import python_docs, sources, tokenizer, vocabulary

PARTS = 8
CORES = len(os.sched_getaffinity(0))
OPTIONS = {  # of engines, to run on this machine
  "local": [],
  "beam": [
    "--", "--runner=DirectRunner", "--direct_running_mode=multi_processing",
    f"--direct_num_workers={CORES}",
  ],
  "ray": [],
}  # fmt: skip
POLL_SECS = 0.05


class Cost(NamedTuple):
  """What a contestant took; memory with that of its children."""

  secs: float
  cpu_secs: float
  peak_mb: float = 0.0


def run_build(
  source: str, vocab: str, seq_length: int, folder: str, parts: int = 0, arguments: list = ()
) -> Cost:
  """Builds in a process of its own."""
  fields = {"dir": folder, "sources": source, "vocab": vocab, "seq_length": seq_length}
  flags = [f"--config.data.{k}={v}" for k, v in {**fields, "parts": parts}.items()]
  command = [sys.executable, "-m", "electra_jax.data.build", "--config=configs/base.py", *flags]
  start, cpu, peak = time.perf_counter(), children_cpu_secs(), 0.0
  command += ["--overwrite", *arguments]
  process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  while process.poll() is None:
    peak = max(peak, resident_mb(process.pid))
    time.sleep(POLL_SECS)
  if process.returncode:
    raise SystemExit(f"the build ended with {process.returncode}")
  return Cost(time.perf_counter() - start, children_cpu_secs() - cpu, peak)


def children_cpu_secs() -> float:
  """Returns the CPU seconds of all processes that were started here and have ended."""
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


def resident_mb(pid: int) -> float:
  """Returns the resident memory of a process and all below it; shared pages count in each."""
  total = 0.0
  with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
      with contextlib.suppress(psutil.NoSuchProcess):
        total += process.memory_info().rss / 1e6
  return total


def documents(source: str) -> Iterator[sources.TextChunk]:
  """Yields the documents of a source."""
  (parsed,) = sources.parse(source)
  return sources.documents(parsed, sources.SourceStats(parsed))


def run_bare_tokenizer(source: str, vocab: str) -> Cost:
  """Encodes every line with the library, all cores, a megabyte at a time."""
  engine, secs, cpu_secs = tokenizer.load(vocab)._engine, 0.0, 0.0

  def encode(lines: list[str]) -> None:
    nonlocal secs, cpu_secs
    cpu = time.process_time()
    secs += peers.secs(lambda: engine.encode_batch_fast(lines, add_special_tokens=False))
    cpu_secs += time.process_time() - cpu

  lines, size = [], 0
  for piece in documents(source):
    lines += piece.text.split("\n")
    size += piece.size
    if size > 1e6:
      encode(lines)
      lines, size = [], 0
  encode(lines)
  return Cost(secs, cpu_secs)


def prepare(source: str, vocab: str | None, folder: Path) -> tuple[str, str, dict]:
  """Harvests and trains where that is needed; returns source, vocabulary file and timings."""
  extra = {}
  if source == "python-docs":
    start = time.perf_counter()
    text = "\n\n".join(python_docs.harvest(CORES))
    extra["harvest_secs"] = round(time.perf_counter() - start, 1)
    (folder / "docs.txt").write_text(text, encoding="utf-8")
    source = f"text:{folder / 'docs.txt'}"
  if vocab is None:
    lines = (line for piece in documents(source) for line in piece.text.split("\n"))
    path = folder / "vocab.txt"
    secs = peers.secs(lambda: vocabulary.train("wordpiece", lines, size=30_522, path=path))
    vocab, extra["vocabulary_secs"] = str(path), round(secs, 1)
  return source, vocab, extra


def cut(source: str, total: int, folder: Path) -> str:
  """Writes a text in PARTS files; returns them as a source."""
  files = [open(folder / f"part{i}.txt", "w", encoding="utf-8") for i in range(PARTS)]
  size = 0
  for piece in documents(source):
    files[size * PARTS // total].write(piece.text + "\n\n")
    size += piece.size
  for file in files:
    file.close()
  return f"text:{folder}/part*.txt"


def measure(
  name: str, vocab: str | None, seq_length: int, rounds: int, runner: str | None, folder: Path
) -> dict:
  """Returns the row of a text."""
  source, vocab, extra = prepare(name, vocab, folder)
  size, shards = sum(piece.size for piece in documents(source)), str(folder / "shards")
  kinds: dict[str, Callable[[], Cost]] = {
    "build": lambda: run_build(source, vocab, seq_length, shards),
    "bare_tokenizer": lambda: run_bare_tokenizer(source, vocab),
  }
  if runner:
    parts = cut(source, size, folder)
    kinds = {
      engine: lambda args=(f"--runner={engine}", *OPTIONS[engine]): run_build(
        parts, vocab, seq_length, shards, PARTS, args
      )
      for engine in ("local", runner)
    }
  found = {kind: [] for kind in kinds}
  for _ in range(rounds):
    for kind, run in kinds.items():
      found[kind].append(run())
  mb = size / 1e6
  row = {"text": name if name == "python-docs" else f"{mb:.0f} MB of text", "text_mb": round(mb, 1)}
  for kind, costs in found.items():
    row[f"{kind}_mb_per_sec"] = round(mb / statistics.median(x.secs for x in costs), 2)
    row[f"{kind}_mb_per_cpu_sec"] = round(mb / statistics.median(x.cpu_secs for x in costs), 2)
    row[f"{kind}_peak_resident_mb"] = round(max(x.peak_mb for x in costs))
    row[f"{kind}_rounds_secs"] = [round(x.secs, 2) for x in costs]
  if runner:
    row["of_local"] = round(row[f"{runner}_mb_per_sec"] / row["local_mb_per_sec"], 2)
  return row | extra


def main(
  sources: list[str] = ("python-docs",),
  /,
  vocab: str | None = None,
  seq_length: int = 128,
  rounds: int = 3,
  runner: Literal["beam", "ray"] | None = None,
) -> dict:
  rows = []
  for name in sources:
    with tempfile.TemporaryDirectory() as folder:
      rows.append(measure(name, vocab, seq_length, rounds, runner, Path(folder)))
  results = {"seq_length": seq_length, "rows": rows}
  if runner:
    results["running_cluster"] = "RAY_ADDRESS" in os.environ
  if runner and len(rows) > 1:
    local, engine = (
      statistics.median(rows[-1][f"{kind}_rounds_secs"])
      - statistics.median(rows[0][f"{kind}_rounds_secs"])
      for kind in ("local", runner)
    )
    results["of_local_without_start"] = round(local / engine, 2)
  return results


if __name__ == "__main__":
  machine.start(main)
