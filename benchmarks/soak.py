"""Long runs and large inputs: do memory, open files or threads grow?

  python benchmarks/soak.py PART [--scale=1] [--rows=benchmarks/results/soak_parts.jsonl]

Each part generates its input in --folder, runs a program on it, and appends a row: seconds, exit
code, peak memory, and memory, open files and threads at the begin (second tenth of the time) and
the end (last tenth). Memory is the resident memory of the program's processes without mapped
files. A part at two scales shows what grows with the input; `train` at one scale shows what grows
with time.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import machine
import psutil

sys.path.insert(0, str(machine.ROOT / "tests" / "faults"))

import harness  # noqa: E402

EVERY_SECS = 1.0
RUN = {"generator.width_multiplier": 1.0, "eval.every_steps": 0, "checkpoint.every_steps": 1000}


class Work(NamedTuple):
  """The program of a part."""

  input: str  # its size, for the row
  command: list[str]
  secs: float | None = None  # SIGTERM then; None: waits for its end


def words(count: int, seed: int = 0) -> list[str]:
  """Returns made-up words of three to nine letters."""
  rng = random.Random(seed)
  return ["".join(rng.choices("abcdefgh", k=rng.randint(3, 9))) for _ in range(count)]


def text(size: int, vocabulary: int = 5000) -> Iterator[str]:
  """Yields sentences of made-up words, about `size` bytes in all."""
  known, rng = words(vocabulary), random.Random(1)
  lines = itertools.repeat(None, max(1, size // 90))
  yield from (" ".join(rng.choices(known, k=13)) + ". " for _ in lines)


def base(folder: Path) -> Path:
  """Returns a folder with the text, shards and a tiny trained run of all parts."""
  if not (folder / "base" / "run" / "metrics.jsonl").exists():
    shutil.rmtree(folder / "base", ignore_errors=True)
    (folder / "base").mkdir(parents=True)
    harness.build(folder / "base")
    arguments = "electra_jax.train", folder / "base", 5, f"--workdir={folder}/base/run"
    subprocess.run(harness.command(*arguments), cwd=machine.ROOT, check=True)
  return folder / "base"


def build(folder: Path, source: str, **fields) -> list[str]:
  """Returns the command of a build; by default the vocabulary is the base's."""
  vocab = folder.parent / "base" / "data" / "vocab.txt"
  fields = {"data__vocab": vocab, "data__workers": 2, "data__dir": folder / "data"} | fields
  command = harness.command("electra_jax.data.build", folder, 1, **fields)
  return [*(x for x in command if "data.sources" not in x), f"--config.data.sources={source}"]


def train(folder: Path, scale: float) -> Work:
  """Training for 20 minutes x scale: a line each step, evaluations, saves, TensorBoard."""
  fields = {"eval.every_steps": 500, "checkpoint.every_steps": 500, "checkpoint.keep": 3}
  workdir = f"--workdir={folder}/run"
  command = harness.command("electra_jax.train", base(folder.parent), 10**7, workdir, **fields)
  return Work(f"{20 * scale:g} minutes", command, 1200 * scale)


def files(folder: Path, scale: float) -> Work:
  """A build from 200,000 x scale small files."""
  lines, count = list(text(100_000)), int(200_000 * scale)
  for i in range(count):
    if i % 1000 == 0:
      (folder / f"{i // 1000:04}").mkdir()
    (folder / f"{i // 1000:04}" / f"{i}.txt").write_text(lines[i % len(lines)] * 3)
  return Work(f"{count:,} files", build(folder, f"text:{folder}/*/*.txt"))


def line(folder: Path, scale: float) -> Work:
  """A build from one line of 2 GB x scale."""
  piece, size = "".join(text(1 << 20)), int(2e9 * scale)
  with (folder / "line.txt").open("w") as file:
    for _ in range(size // len(piece)):
      file.write(piece)
  return Work(f"a line of {size / 1e6:,.0f} MB", build(folder, f"text:{folder}/line.txt"))


def entries(folder: Path, scale: float) -> Work:
  """Training a vocabulary of 250,000 x scale entries, the shards, and two steps with it."""
  count = int(250_000 * scale)
  pieces = text(int(60e6 * scale), vocabulary=int(400_000 * scale))
  (folder / "text.txt").write_text("\n\n".join(pieces))
  fields = {"data__vocab": "wordpiece", "data__vocab_size": count}
  built = build(folder, f"text:{folder}/text.txt", **fields)
  fields = {"data.vocab_size": count, **RUN}
  trained = harness.command("electra_jax.train", folder, 2, f"--workdir={folder}/run", **fields)
  both = " && ".join(subprocess.list2cmdline(command) for command in (built, trained))
  return Work(f"{count:,} entries", ["sh", "-c", both])


def length(folder: Path, scale: float) -> Work:
  """A build and five steps on sequences of 8,192 x scale tokens."""
  tokens = int(8192 * scale)
  (folder / "text.txt").write_text("".join(f"{x}\n" for x in text(4_000_000)))
  fields = {"data.seq_length": tokens, "model.max_positions": tokens}
  built = build(folder, f"text:{folder}/text.txt", **fields)
  fields |= {"train.batch_size": 2, "eval.batch_size": 1, "eval.max_examples": 2, **RUN}
  trained = harness.command("electra_jax.train", folder, 5, f"--workdir={folder}/run", **fields)
  both = " && ".join(subprocess.list2cmdline(command) for command in (built, trained))
  return Work(f"{tokens:,} tokens", ["sh", "-c", both])


def finetune(folder: Path, count: int, classes: int, **fields) -> list[str]:
  """Writes a task of some rows and returns the command of a short fine-tuning."""
  lines = text(90 * count)
  for name, rows in (("train", count), ("dev", 2000)):
    with (folder / f"{name}.csv").open("w") as file:
      file.write("text,label\n")
      file.writelines(f"{next(lines, 'again')},class {i % classes}\n" for i in range(rows))
  fields = {"init": base(folder.parent) / "run", "data.dir": folder, "data.max_length": 32} | fields
  fields |= {"seeds": 1, "keep": "none"}
  options = [f"--config.{name}={value}" for name, value in fields.items()]
  options.append(f"--workdir={folder}/tuned")
  return [
    sys.executable,
    "-m",
    "electra_jax.finetune",
    "--config=configs/finetune/own.py",
    *options,
  ]


def rows(folder: Path, scale: float) -> Work:
  """A fine-tuning with 1,000,000 x scale rows, some hundred steps of it."""
  count = int(1_000_000 * scale)
  epochs = {"train.epochs": 10_000 / count}
  return Work(f"{count:,} rows", finetune(folder, count, 2, **epochs))


def classes(folder: Path, scale: float) -> Work:
  """A fine-tuning with 10,000 x scale classes."""
  count = int(10_000 * scale)
  return Work(f"{count:,} classes", finetune(folder, 40_000, count, **{"train.epochs": 1}))


PARTS: dict[str, Callable[[Path, float], Work]] = {
  f.__name__: f for f in (train, files, line, entries, length, rows, classes)
}


def look(process: psutil.Process) -> dict[str, float]:
  """Returns the memory, open files and threads of a process and its children."""
  found = dict.fromkeys(("memory_mb", "open_files", "threads"), 0.0)
  for one in (process, *process.children(recursive=True)):
    with contextlib.suppress(psutil.Error):
      memory = one.memory_info()
      found["memory_mb"] += (memory.rss - memory.shared) / 1e6
      found["open_files"] += one.num_fds()
      found["threads"] += one.num_threads()
  return found


def run(work: Work, log: Path) -> dict:
  """Runs a program and returns its row."""
  with log.open("w", encoding="utf-8") as file:
    process = psutil.Popen(work.command, cwd=machine.ROOT, stdout=file, stderr=subprocess.STDOUT)
  began, seen, stopped = time.monotonic(), [], False
  while process.poll() is None:
    seen.append(look(process))
    time.sleep(EVERY_SECS)
    if work.secs and not stopped and time.monotonic() - began > work.secs:
      stopped = True
      process.terminate()
  tenth = max(1, len(seen) // 10)

  def medians(part: list[dict]) -> dict:
    return {name: round(statistics.median(x[name] for x in part), 1) for name in part[0]}

  return {
    "input": work.input,
    "secs": round(time.monotonic() - began, 1),
    "exit": process.returncode,
    "peak_mb": round(max(x["memory_mb"] for x in seen), 1),
    "begin": medians(seen[tenth : 2 * tenth] or seen),
    "end": medians(seen[-tenth - 1 : -1] or seen),
    "load": round(os.getloadavg()[2], 1),
  }


def main(
  part: Literal["train", "files", "line", "entries", "length", "rows", "classes"],
  /,
  scale: float = 1.0,
  folder: str = "/tmp/soak",
  rows: str = "",
) -> dict:
  """
  part   what to run
  scale  of the input, or of the 20 minutes
  rows   file to which to append the row
  """
  place = Path(folder) / f"{part}-{scale:g}"
  base(place.parent)
  shutil.rmtree(place, ignore_errors=True)
  place.mkdir(parents=True)
  log = place.with_name(f"{place.name}.log")
  row = {"part": part, **run(PARTS[part](place, scale), log)}
  shutil.rmtree(place)
  if rows:
    with Path(rows).open("a", encoding="utf-8") as file:
      file.write(json.dumps(row) + "\n")
  return row if row["exit"] in (0, harness.STOPPED) else row | {"wrong": log.read_text()[-2000:]}


if __name__ == "__main__":
  machine.start(main)
