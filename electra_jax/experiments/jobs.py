"""Runs the package's programs side by side, each once, for comparisons that take hours.

What a script makes is in one folder: logs, `commands.jsonl`, shards, runs, results. Started again
with the same arguments, a script goes on where it was: a job that ended well is not run again, and
a run whose row of results is in the file of rows (`Rows`) needs no folder.
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

from electra_jax.config import registry
from electra_jax.config.fields import load_config
from electra_jax.config.files import resolve
from electra_jax.cost import tables
from electra_jax.evaluate import pairs
from electra_jax.monitor.metrics import read_history
from electra_jax.runtime.workdir import flock, replacing

_RUNNING = collections.defaultdict(threading.Lock)  # by folder and job


def json_lines(path: Path) -> list[dict]:
  """Returns the JSON objects of a file, without a line that was cut off."""
  found = []
  for line in path.read_text().splitlines() if path.exists() else ():
    with contextlib.suppress(ValueError):
      found.append(json.loads(line))
  return found


def append(path: Path, row: dict) -> None:
  """Adds a JSON object to a file, on a new line also after one that was cut off."""
  with path.open("a+") as file:
    file.seek(0)
    cut_off = file.read()[-1:] not in ("", "\n")
    file.write("\n" * cut_off + json.dumps(row) + "\n")


class Rows:
  """The rows of results, one a run, kept in a file as they come."""

  def __init__(self, path: Path):
    self._path, self._lock = path, threading.Lock()

  def read(self) -> list[dict]:
    """Returns the rows."""
    return json_lines(self._path)

  def find(self, key: dict) -> dict | None:
    """Returns the row that has the values of `key`."""
    return next((row for row in self.read() if key.items() <= row.items()), None)

  def once(self, key: dict, measure: Callable[[], dict]) -> dict:
    """Returns the row that has the values of `key`; if there is none, measures and adds it."""
    if row := self.find(key):
      return row
    row = key | measure()
    with self._lock, self._path.with_suffix(".lock").open("w") as lock:
      flock(lock, wait=True)
      if other := self.find(key):  # another process has measured it meanwhile
        return other
      append(self._path, row)
    return row


def has_ended(out: Path, job: str, arguments: list[str]) -> bool:
  """Returns whether a program has run to its end with these arguments."""
  lines = json_lines(out / "commands.jsonl")
  return any(x["job"] == job and x["arguments"] == arguments and x["ended"] for x in lines)


def run(out: Path, job: str, module: str, arguments: list[str], ended: Callable[[], bool]) -> None:
  """Runs a program of the package, unless it has already ended well with the same arguments.

  If another thread or process is running the job, it waits for it to end: several runs may start
  from the same one.
  Its output goes to out/logs, its arguments and seconds to out/commands.jsonl. Fine-tunings share
  what they compile, because all starts have the same shapes.

  Args:
    ended: whether the work is complete; a program that is interrupted exits with 0, too.

  Raises:
    SystemExit: it failed or was interrupted; the message ends with its last output.
  """
  lock = out / "locks" / f"{job.replace('/', '-')}.lock"
  lock.parent.mkdir(parents=True, exist_ok=True)
  with _RUNNING[out, job], lock.open("w") as file:
    flock(file, wait=True)
    if not (has_ended(out, job, arguments) and ended()):
      _run(out, job, module, arguments, ended)


def _run(out: Path, job: str, module: str, arguments: list[str], ended: Callable[[], bool]) -> None:
  imports = [f"--import={name}" for name in registry.origins()]
  command = [sys.executable, "-m", module, *imports, *arguments]
  log = out / "logs" / f"{job.replace('/', '-')}.log"
  log.parent.mkdir(parents=True, exist_ok=True)
  print(f"{job}: {shlex.join(command)}", flush=True)
  environment = os.environ | (
    {"JAX_COMPILATION_CACHE_DIR": str((out / "compiled").absolute())}
    if job.startswith("finetune/")
    else {}
  )
  start, code, complete = time.perf_counter(), None, False
  try:
    with log.open("w") as file:
      code = subprocess.run(
        command, stdout=file, stderr=subprocess.STDOUT, env=environment
      ).returncode
    complete = code == 0 and ended()
  finally:
    line = {"job": job, "arguments": arguments, "secs": time.perf_counter() - start}
    append(out / "commands.jsonl", line | {"returncode": code, "ended": complete})
  if not complete:
    why = f"ended with {code}" if code else "was interrupted"
    raise SystemExit(f"{log.read_text()[-4000:]}\n{job} {why}; all of its output: {log}")
  print(f"{job}: {line['secs']:.0f} s", flush=True)


@contextlib.contextmanager
def workers(at_once: int) -> Iterator[ThreadPoolExecutor]:
  """Gives threads that run programs, each on its own share of the cores.

  Networks this small leave most of a second core idle: two trainings on a core each took 30,300
  tokens/s together, one on both cores 23,300. If one fails, what is still in the queue is dropped.
  """
  cores = sorted(os.sched_getaffinity(0))
  shares = queue.SimpleQueue()
  for place in range(at_once):
    shares.put(cores[place % len(cores) :: at_once])
  # Linux keeps affinity for a thread, and the programs that it starts inherit it.
  with ThreadPoolExecutor(
    at_once, initializer=lambda: os.sched_setaffinity(0, shares.get())
  ) as pool:
    try:
      yield pool
    except BaseException:
      pool.shutdown(cancel_futures=True)
      raise


def finish(jobs: list[Future]) -> list:
  """Waits for all jobs and returns their results; raises as soon as one fails."""
  done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
  for job in done:
    job.result()
  return [job.result() for job in jobs]


def assignments(overrides: dict) -> list[str]:
  """Returns fields of a configuration as a command line sets them."""
  return [f"--config.{name}={value}" for name, value in overrides.items()]


def file_of(config: str) -> str:
  """Returns a configuration as `--config` takes it: "bert:small" is configs/bert.py:small."""
  name, colon, arg = config.partition(":")
  return config if name.endswith(".py") else f"{resolve(f'{name}.py')}{colon}{arg}"


def build(out: Path, folder: Path, config: str, fields: dict) -> None:
  """Builds shards in a folder, with the fields that a build reads."""
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
  """Returns the fields of a run with its learning rates and the steps that its FLOPs pay for.

  FLOPs are matrix products as they are done, the generator's included. A generator with its own
  learning rate keeps its ratio to the discriminator's.

  Args:
    config: a configuration file, with its argument after a colon if it has one.
    fields: what the run changes in it.
    rate: `optimizer.learning_rate`.
    budget: FLOPs.
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
  """Returns the evaluations of a run, first to last."""
  return [x for x in read_history(folder / "metrics.jsonl") if x["split"] == "heldout"]


def train(out: Path, name: str, config: str, fields: dict, *, timed: bool = False) -> Path:
  """Trains a run; returns its workdir.

  Args:
    timed: it ends by train.minutes.
  """
  folder = out / "runs" / name
  arguments = [f"--config={file_of(config)}", f"--workdir={folder}", *assignments(fields)]

  def ended() -> bool:
    lines = heldout(folder)
    return bool(lines) and (timed or lines[-1]["step"] == fields["train.steps"])

  run(out, f"train/{name}", "electra_jax.train", arguments, ended)
  return folder


def write_pairs(out: Path, source: Path, count: int) -> None:
  """Writes `count` of the minimal pairs of a file to out/pairs.jsonl."""
  few = pairs.read(source, count)
  lines = (json.dumps({pairs.GOOD: p.good, pairs.BAD: p.bad, "UID": p.paradigm}) for p in few)
  with replacing(out / "pairs.jsonl") as temporary:
    temporary.write_text("\n".join(lines) + "\n")


def seconds(out: Path, job: str) -> float:
  """Returns the seconds of all starts of a job."""
  return sum(x["secs"] for x in json_lines(out / "commands.jsonl") if x["job"] == job)


def finetune(out: Path, name: str, config: str, fields: dict) -> list[dict]:
  """Fine-tunes; returns a row of results for each task, split and seed."""
  place = out / "finetune" / name
  arguments = [f"--config={file_of(config)}", f"--workdir={place}", *assignments(fields)]
  results = place / "results.jsonl"
  run(out, f"finetune/{name}", "electra_jax.finetune", arguments, results.is_file)
  return json_lines(results)


def main_metric(row: dict) -> float:
  """Returns the main metric of a row of fine-tuning's results, in percent."""
  return next(iter(row["metrics"].values()))


def compared(values: list[float], reference: list[float], digits: int = 3) -> str:
  """Returns the mean and standard deviation of values, and the difference from a reference's mean.

  The difference has its standard error. A statistic that needs two values or more is left out.

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
