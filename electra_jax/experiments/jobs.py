"""Runs the package's programs in parallel, each once, for comparisons that take hours.

All outputs are in one folder: logs, `commands.jsonl`, shards, runs, results. Started again with the
same arguments, a script continues: it skips finished jobs, and runs whose row of results is in the
file of rows (`Rows`), even without a folder.
"""

import collections
import contextlib
import json
import os
import queue
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NoReturn

from electra_jax.config import registry
from electra_jax.config.fields import load_config
from electra_jax.config.files import resolve
from electra_jax.cost import tables
from electra_jax.evaluate import pairs
from electra_jax.monitor.metrics import read_history
from electra_jax.runtime.foreign import parse_json
from electra_jax.runtime.workdir import flock, open_lock, replacing

_RUNNING = collections.defaultdict(threading.Lock)  # by folder and job
_PROGRAMS: set[subprocess.Popen] = set()


def json_lines(path: Path) -> list[dict]:
  """Returns the JSON objects of a file, without truncated lines."""
  found = []
  for line in path.read_bytes().splitlines() if path.exists() else ():
    with contextlib.suppress(ValueError):
      found.append(parse_json(line, path, dict))
  return found


def append(path: Path, row: dict) -> None:
  """Adds a JSON object to a file, on a new line even after a truncated one."""
  with path.open("a+", encoding="utf-8") as file:
    file.seek(0)
    cut_off = file.read()[-1:] not in ("", "\n")
    file.write("\n" * cut_off + json.dumps(row) + "\n")


class Rows:
  """The rows of results in a file, one for each run."""

  def __init__(self, path: Path):
    self._path, self._lock = path, threading.Lock()

  def read(self) -> list[dict]:
    """Returns the rows."""
    return json_lines(self._path)

  def find(self, key: dict) -> dict | None:
    """Returns the row with the values of `key`."""
    return next((row for row in self.read() if key.items() <= row.items()), None)

  def once(self, key: dict, measure: Callable[[], dict]) -> dict:
    """Returns the row with the values of `key`; if there is none, measures and adds it."""
    if row := self.find(key):
      return row
    row = key | measure()
    with self._lock, open_lock(self._path.with_suffix(".lock")) as lock:
      flock(lock, wait=True)
      if other := self.find(key):  # added by another process
        return other
      append(self._path, row)
    return row


def has_ended(out: Path, job: str, arguments: list[str]) -> bool:
  """Returns whether a program has run to its end with these arguments."""
  lines = json_lines(out / "commands.jsonl")
  return any(x["job"] == job and x["arguments"] == arguments and x["ended"] for x in lines)


def run(out: Path, job: str, module: str, arguments: list[str], ended: Callable[[], bool]) -> None:
  """Runs a program of the package, unless it has already succeeded with the same arguments.

  If another thread or process is running the job, this one waits for it. The program's output goes
  to out/logs, its arguments and seconds to out/commands.jsonl. Fine-tuning runs share a compilation
  cache.

  Args:
    ended: returns whether the work is complete, because an interrupted program also exits with 0.

  Raises:
    SystemExit: it failed or was interrupted; the message ends with its last output.
  """
  lock = out / "locks" / f"{job.replace('/', '-')}.lock"
  lock.parent.mkdir(parents=True, exist_ok=True)
  with _RUNNING[out, job], open_lock(lock) as file:
    flock(file, wait=True)
    if not (has_ended(out, job, arguments) and ended()):
      _run(out, job, module, arguments, ended)


def _run(out: Path, job: str, module: str, arguments: list[str], ended: Callable[[], bool]) -> None:
  imports = [f"--import={name}" for name in registry.origins()]
  command = [sys.executable, "-m", module, *imports, *arguments]
  log = out / "logs" / f"{job.replace('/', '-')}.log"
  log.parent.mkdir(parents=True, exist_ok=True)
  print(f"{job}: {shlex.join(['python', *command[1:]])}", flush=True)
  environment = os.environ | (
    {"JAX_COMPILATION_CACHE_DIR": str((out / "compiled").absolute())}
    if job.startswith("finetune/")
    else {}
  )
  start, code, complete = time.perf_counter(), None, False
  try:
    both = {"stderr": subprocess.STDOUT, "env": environment}
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, **both) as program:
      _PROGRAMS.add(program)
      code = program.wait()
      _PROGRAMS.discard(program)
    complete = code == 0 and ended()
  finally:
    line = {"job": job, "arguments": arguments, "secs": time.perf_counter() - start}
    append(out / "commands.jsonl", line | {"returncode": code, "ended": complete})
  if not complete:
    why = f"ended with {code}" if code else "was interrupted"
    output = log.read_text("utf-8", "replace")[-4000:]
    raise SystemExit(f"{output}\n{job} {why}; its output is in {log}")
  print(f"{job}: {line['secs']:.0f} s", flush=True)


def stop(number: int, _frame: object) -> NoReturn:
  """Handles a signal: the programs that are running save and end, and so does this one."""
  for program in list(_PROGRAMS):
    program.terminate()
  raise SystemExit(128 + number)


@contextlib.contextmanager
def workers(at_once: int) -> Iterator[ThreadPoolExecutor]:
  """Returns threads that run programs, each on a part of the cores.

  Small networks do not use a second core well: two runs on a core each reached 30,300 tokens/s
  together, one on both cores 23,300. If a job fails, the queued ones are dropped.
  """
  cores = sorted(os.sched_getaffinity(0))
  shares = queue.SimpleQueue()
  for place in range(at_once):
    shares.put(cores[place % len(cores) :: at_once])
  # On Linux, programs inherit the CPU affinity of the thread that starts them.
  with ThreadPoolExecutor(
    at_once, initializer=lambda: os.sched_setaffinity(0, shares.get())
  ) as pool:
    try:
      yield pool
    except BaseException:
      pool.shutdown(cancel_futures=True)
      raise


def finish(jobs: list[Future]) -> list:
  """Returns the results of all jobs; raises as soon as one fails."""
  done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
  for job in done:
    job.result()
  return [job.result() for job in jobs]


def assignments(overrides: dict) -> list[str]:
  """Returns fields of a configuration as command-line options."""
  return [f"--config.{name}={value}" for name, value in overrides.items()]


def file_of(config: str) -> str:
  """Returns a configuration in the form of `--config`: configs/bert.py:small for "bert:small"."""
  name, colon, arg = config.partition(":")
  return config if name.endswith(".py") else f"{resolve(f'{name}.py')}{colon}{arg}"


def build(out: Path, folder: Path, config: str, fields: dict) -> None:
  """Builds shards in a folder with those of the fields that a build reads."""
  wanted = {k: v for k, v in fields.items() if k.startswith(("data.", "model."))}
  arguments = [
    f"--config={file_of(config)}",
    *assignments({"data.dir": folder, **wanted} | {"data.dir": folder}),
  ]
  ended = (folder / "manifest.json").is_file
  run(out, f"build/{folder.name}", "electra_jax.data.build", arguments, ended)


def at_rate(
  config: str, fields: dict, rate: float, budget: float, steps: int | None = None
) -> dict:
  """Returns the fields of a run with its learning rates and the number of steps of its budget.

  A generator_learning_rate keeps its ratio to the learning rate.

  Args:
    config: a configuration file and optionally a colon and its argument.
    fields: the fields that the run changes.
    rate: `optimizer.learning_rate`.
    budget: FLOPs of executed matmuls, including the generator's.
    steps: instead of a budget.
  """
  loaded = load_config(config)
  loaded.update_from_flattened_dict(fields)
  fields = fields | {"optimizer.learning_rate": rate}
  optimizer = loaded.optimizer
  if optimizer.separate_optimizers:
    ratio = optimizer.generator_learning_rate / optimizer.learning_rate
    fields["optimizer.generator_learning_rate"] = rate * ratio
  if steps is None:
    _, products = tables.step_costs(loaded)
    steps = max(10, round(budget / sum(products.values())))
  warmup = min(optimizer.warmup_steps, steps // 10)
  return fields | {"train.steps": steps, "optimizer.warmup_steps": warmup}


def heldout(folder: Path) -> list[dict]:
  """Returns the evaluations of a run in order."""
  return [x for x in read_history(folder / "metrics.jsonl") if x["split"] == "heldout"]


def train(out: Path, name: str, config: str, fields: dict, *, timed: bool = False) -> Path:
  """Trains a run; returns its workdir.

  Args:
    timed: whether train.minutes ends it.
  """
  folder = out / "runs" / name
  arguments = [f"--config={file_of(config)}", f"--workdir={folder}", *assignments(fields)]

  def ended() -> bool:
    lines = heldout(folder)
    return bool(lines) and (timed or lines[-1]["step"] == fields["train.steps"])

  run(out, f"train/{name}", "electra_jax.train", arguments, ended)
  return folder


def write_pairs(out: Path, source: Path, count: int) -> None:
  """Writes `count` minimal pairs of a file to out/pairs.jsonl."""
  few = pairs.read(source, count)
  lines = (json.dumps({pairs.GOOD: p.good, pairs.BAD: p.bad, "UID": p.paradigm}) for p in few)
  with replacing(out / "pairs.jsonl") as temporary:
    temporary.write_text("\n".join(lines) + "\n", "utf-8")


def seconds(out: Path, job: str) -> float:
  """Returns the seconds of a job, summed over its starts."""
  return sum(x["secs"] for x in json_lines(out / "commands.jsonl") if x["job"] == job)


def finetune(out: Path, name: str, config: str, fields: dict) -> list[dict]:
  """Fine-tunes; returns a row of results for each task, split and seed."""
  place = out / "finetune" / name
  arguments = [f"--config={file_of(config)}", f"--workdir={place}", *assignments(fields)]
  results = place / "results.jsonl"
  run(out, f"finetune/{name}", "electra_jax.finetune", arguments, results.is_file)
  return json_lines(results)


def main_metric(row: dict) -> float:
  """Returns the main metric of a row of fine-tuning results, in percent."""
  return next(iter(row["metrics"].values()))


def compared(values: list[float], reference: list[float], digits: int = 3) -> str:
  """Returns mean ± standard deviation, and the difference ± standard error from a reference's mean.

  Statistics that need two or more values are left out.

  >>> compared([4.0, 6.0, 5.0], [1.0, 3.0], digits=2)
  '5.00 ± 1.00 (+3.00 ± 1.15)'
  """
  cell = f"{statistics.fmean(values):.{digits}f}"
  if len(values) > 1:
    cell += f" ± {statistics.stdev(values):.{digits}f}"
  if len(values) > 1 and len(reference) > 1:
    gain = statistics.fmean(values) - statistics.fmean(reference)
    variances = (statistics.variance(x) / len(x) for x in (values, reference))
    cell += f" ({gain:+.{digits}f} ± {sum(variances) ** 0.5:.{digits}f})"
  return cell
