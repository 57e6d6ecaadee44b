"""How fast text becomes shards, against the bare tokenizer, and how much memory that takes.

  python benchmarks/build.py [SOURCE ...] [--vocab vocab.txt] [--json benchmarks/results/build.json]
  python benchmarks/build.py SOURCE ... --runner beam|ray [--json FILE]

A SOURCE is an entry of config.data.sources; by default 'python-docs'. Its documentation is
harvested beforehand, and the vocabulary trained, if none is given: both are timed on their own.
Then the whole program is run as a user would run it, start and checksums included, and in turn the
`tokenizers` library encodes the same lines on all cores, without making anything of them. MB per
CPU second say how much of the speed is left on a machine that does other things, too.

With --runner (electra_jax[beam] or [ray] must be installed) the text is cut into PARTS files, which
the engine and a local build turn into shards in turn. Of two texts or more,
`of_local_without_start` is the share of the local speed in what the last has more than the first.
With RAY_ADDRESS, Ray is a cluster that is up already (`ray start --head`), as it is where Ray is
used; its processes are not in the build's memory then.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
from rich.console import Console
from rich.table import Table

from electra_jax.data import python_docs, sources, tokenizer, vocabulary

FLOOR = 4.0  # MB/s of raw text on two cores
PARTS, RUNNER_FLOOR = 8, 0.8  # of the local build's speed
CORES = len(os.sched_getaffinity(0))
OPTIONS = {  # of engines, to run on this machine
  "beam": [
    "--", "--runner=DirectRunner", "--direct_running_mode=multi_processing",
    f"--direct_num_workers={CORES}",
  ],
  "ray": [],
}  # fmt: skip
POLL_SECS = 0.05


def run_build(
  source: str, vocab: str, seq_length: int, folder: str, parts: int = 0, arguments: tuple = ()
) -> tuple[float, float, float]:
  """Builds in a process of its own; returns seconds, CPU seconds and peak MB, children included."""
  fields = {"dir": folder, "sources": source, "vocab": vocab, "seq_length": seq_length}
  fields["parts"] = parts
  flags = [f"--config.data.{name}={value}" for name, value in fields.items()]
  command = [sys.executable, "-m", "electra_jax.data.build", "--config=configs/base.py", *flags]
  start, cpu, peak = time.perf_counter(), children_cpu_secs(), 0.0
  command += ["--overwrite", *arguments]
  process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  while process.poll() is None:
    peak = max(peak, resident_mb(process.pid))
    time.sleep(POLL_SECS)
  if process.returncode:
    raise SystemExit(f"the build ended with {process.returncode}")
  return time.perf_counter() - start, children_cpu_secs() - cpu, peak


def children_cpu_secs() -> float:
  """Returns the CPU seconds of all processes that were started here and have ended."""
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


def resident_mb(root: int) -> float:
  """Returns the resident memory of a process and all below it; shared pages count in each."""
  total, waiting = 0, [root]
  while waiting:
    pid = waiting.pop()
    try:
      total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
      for task in Path(f"/proc/{pid}/task").iterdir():
        waiting += map(int, (task / "children").read_text().split())
    except OSError:  # it has just ended
      continue
  return total * os.sysconf("SC_PAGE_SIZE") / 1e6


def run_bare_tokenizer(source: str, vocab: str) -> tuple[float, float]:
  """Encodes every line with the library, all cores, a megabyte at a time; seconds, CPU seconds."""
  engine = tokenizer.load(vocab)._engine
  secs, cpu_secs, size = 0.0, 0.0, 0
  lines: list[str] = []

  def encode() -> None:
    nonlocal secs, cpu_secs
    start, cpu = time.perf_counter(), time.process_time()
    engine.encode_batch_fast(lines, add_special_tokens=False)
    secs += time.perf_counter() - start
    cpu_secs += time.process_time() - cpu

  (parsed,) = sources.parse(source)
  for piece in sources.documents(parsed, sources.SourceStats(parsed)):
    lines += piece.text.split("\n")
    size += piece.size
    if size > 1e6:
      encode()
      lines.clear()
      size = 0
  encode()
  return secs, cpu_secs


def text_bytes(source: str) -> int:
  """Returns the size of the text of a source."""
  (parsed,) = sources.parse(source)
  tally = sources.SourceStats(parsed)
  return sum(piece.size for piece in sources.documents(parsed, tally))


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
    (parsed,) = sources.parse(source)
    pieces = sources.documents(parsed, sources.SourceStats(parsed))
    lines = (line for piece in pieces for line in piece.text.split("\n"))
    start = time.perf_counter()
    vocab = str(folder / "vocab.txt")
    vocabulary.train("wordpiece", lines, size=30_522, path=Path(vocab))
    extra["vocabulary_secs"] = round(time.perf_counter() - start, 1)
  return source, vocab, extra


def compare_runner(args: argparse.Namespace, name: str) -> dict:
  """Builds a text in PARTS files by an engine and locally, in turn; returns a row of results."""
  with tempfile.TemporaryDirectory() as folder:
    source, vocab, _ = prepare(name, args.vocab, Path(folder))
    (parsed,) = sources.parse(source)
    names = [f"{folder}/part{i}.txt" for i in range(PARTS)]
    total, size = text_bytes(source), 0
    files = [open(path, "w", encoding="utf-8") for path in names]
    for piece in sources.documents(parsed, sources.SourceStats(parsed)):
      files[size * PARTS // total].write(piece.text + "\n\n")
      size += piece.size
    for file in files:
      file.close()
    runs: dict[str, list] = {"local": [], args.runner: []}
    for _ in range(args.rounds):
      for runner, found in runs.items():
        engine = (f"--runner={runner}", *OPTIONS.get(runner, ()))
        text = f"text:{folder}/part*.txt"
        found.append(run_build(text, vocab, args.seq_length, f"{folder}/shards", PARTS, engine))
  row = {"text_mb": round(size / 1e6, 1)}
  for runner, found in runs.items():
    row[f"{runner}_mb_per_sec"] = round(size / 1e6 / statistics.median(x[0] for x in found), 2)
    row[f"{runner}_rounds_secs"] = [round(x[0], 2) for x in found]
    row[f"{runner}_peak_resident_mb"] = round(max(x[2] for x in found))
  ratio = row[f"{args.runner}_mb_per_sec"] / row["local_mb_per_sec"]
  return row | {"of_local": round(ratio, 2), "floor": RUNNER_FLOOR}


def without_start(rows: list[dict], runner: str) -> dict[str, float]:
  """Returns an engine's share of the local speed between the first text and the last."""
  if len(rows) < 2:
    return {}
  local, engine = (
    statistics.median(rows[-1][f"{name}_rounds_secs"])
    - statistics.median(rows[0][f"{name}_rounds_secs"])
    for name in ("local", runner)
  )
  return {"of_local_without_start": round(local / engine, 2)}


def main() -> None:
  """Measures, prints a table, writes JSON."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("sources", nargs="*", default=["python-docs"])
  parser.add_argument("--vocab", help="a vocabulary file")
  parser.add_argument("--seq_length", type=int, default=128)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--json", help="file for the results")
  parser.add_argument("--runner", choices=OPTIONS)
  args = parser.parse_args()
  if args.runner:
    rows = [compare_runner(args, name) for name in args.sources]
    results = {"rows": rows, "running_cluster": "RAY_ADDRESS" in os.environ}
    results |= without_start(rows, args.runner)
    print(json.dumps(results, indent=1))
    machine.save(args.json, results, hide=[*args.sources, args.vocab])
    return
  table = Table(title=f"text to examples of {args.seq_length} tokens")
  for column in ("text", "build MB/s", "bare MB/s", "build MB/CPU s", "bare MB/CPU s", "peak MB"):
    table.add_column(column, justify="right")
  rows = []
  for name in args.sources:
    with tempfile.TemporaryDirectory() as folder:
      source, vocab, extra = prepare(name, args.vocab, Path(folder))
      size = text_bytes(source) / 1e6
      builds, bare = [], []
      for _ in range(args.rounds):
        builds.append(run_build(source, vocab, args.seq_length, f"{folder}/shards"))
        bare.append(run_bare_tokenizer(source, vocab))
    label = name if name == "python-docs" else f"{size:.0f} MB of English text"
    row = {"text": label, "text_mb": round(size, 1)}
    row["peak_resident_mb"] = round(max(peak for _, _, peak in builds))
    for what, runs in (("build", builds), ("bare_tokenizer", bare)):
      row[f"{what}_mb_per_sec"] = round(size / statistics.median(run[0] for run in runs), 2)
      row[f"{what}_mb_per_cpu_sec"] = round(size / statistics.median(run[1] for run in runs), 2)
      row[f"{what}_rounds_secs"] = [round(run[0], 2) for run in runs]
    columns = ("build_mb_per_sec", "bare_tokenizer_mb_per_sec")
    columns += ("build_mb_per_cpu_sec", "bare_tokenizer_mb_per_cpu_sec", "peak_resident_mb")
    table.add_row(label, *(str(row[column]) for column in columns))
    rows.append(row | extra)
  Console().print(table)
  print(f"floor: {FLOOR} MB/s on two cores")
  results = {"seq_length": args.seq_length, "floor_mb_per_sec": FLOOR, "rows": rows}
  machine.save(args.json, results, hide=[*args.sources, args.vocab])


if __name__ == "__main__":
  main()
