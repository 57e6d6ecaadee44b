"""Real runs of the real program, to be stopped, killed, starved and damaged.

All train the same little thing on a little generated text; what one leaves is compared with what
one that was left alone leaves, bit for bit.
"""

import atexit
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 44  # of a run by default: dozens more than a test waits for, which may be slow to see them
EVERY = 5  # steps between checkpoints
STOPPED = 143  # exit code of a run that is to be started again
UNFINISHED = "*.orbax-checkpoint-tmp"
# The program around the step is what breaks here, so most runs have one network, which compiles in
# half the time; those that are about both networks add ELECTRA.
ELECTRA = {"objective__name": "electra"}
FIELDS = dict(
  word.split("=")
  for word in (
    "objective.name=bert model.hidden_size=64 model.num_layers=2 model.num_heads=2"
    " model.ffn_size=128 model.embedding_size=32 model.max_positions=32"
    " generator.width_multiplier=0.5 data.seq_length=32 data.vocab_size=200 data.holdout_frac=0.1"
    " optimizer.learning_rate=1e-2 optimizer.warmup_steps=5 train.batch_size=16 eval.every_steps=6"
    f" eval.batch_size=16 eval.max_examples=32 checkpoint.every_steps={EVERY} checkpoint.keep=2"
    " log.every_steps=1"
  ).split()
)

# Steps of 0.3 s at least: JAX looks for a SIGTERM once a second, and a test for a step at times.
PACED = """
import time
from electra_jax.pretrain import run

make = run.make_train_fns

def programs(*args):
  made = make(*args)

  def train_step(*args):
    time.sleep(0.3)
    return made.train_step(*args)

  train_step.lower = made.train_step.lower
  return made._replace(train_step=train_step)

run.make_train_fns = programs
"""

PROGRAM = """
import runpy
runpy.run_module("electra_jax.train", run_name="__main__", alter_sys=True)
"""

# Runs the program with a training step that breaks on one batch.
POISON = """
import sys
import jax, numpy as np
from electra_jax.data import pretrain_batches
from electra_jax.pretrain import run

broken = int(sys.argv.pop(1))
make, real, left_out = run.make_train_fns, pretrain_batches.train_batches, []

def batches(data, *, skipped=(), **kwargs):
  left_out[:] = skipped
  return real(data, skipped=skipped, **kwargs)

def programs(*args):
  made = make(*args)

  def train_step(state, batch, horizon):
    if pretrain_batches.batch_number(int(state.step), left_out) == broken:
      state = state.replace(params=jax.tree.map(lambda x: x * np.float32("nan"), state.params))
    return made.train_step(state, batch, horizon)

  train_step.lower = made.train_step.lower
  return made._replace(train_step=train_step)

run.make_train_fns, pretrain_batches.train_batches = programs, batches
"""


def program(code: str, *arguments: str) -> list[str]:
  """Returns a head of a `Run`: the program, after some lines of Python that take the arguments."""
  return [code + PROGRAM, *arguments]


def poison(number: int) -> list[str]:
  """Returns a head of a `Run` whose step breaks on the batch of that number, from 0."""
  return program(POISON, str(number))


def write_text(path: Path) -> None:
  """Writes a few hundred documents of made-up words."""
  rng = random.Random(0)
  words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 5))) for _ in range(80)]
  documents = (
    "\n".join(" ".join(rng.choices(words, k=14)) + "." for _ in range(8)) for _ in range(400)
  )
  path.write_text("\n\n".join(documents), "utf-8")


def command(module: str, folder: Path, steps: int, *args: str, **fields) -> list[str]:
  """Returns the command line of a program with this file's configuration.

  Args:
    folder: holds text.txt; data/ is or will be there.
    fields: of the configuration, with __ for the dot.
  """
  fields = {k.replace("__", "."): v for k, v in fields.items()}
  fields = {**FIELDS, "train.steps": steps, "data.dir": folder / "data", **fields}
  fields["data.sources"] = f"text:{folder}/text.txt"
  changes = [f"--config.{name}={value}" for name, value in fields.items()]
  return [sys.executable, "-m", module, "--config=configs/base.py", *args, *changes]


def build(folder: Path) -> None:
  """Writes the text and builds its shards."""
  write_text(folder / "text.txt")
  subprocess.run(
    command("electra_jax.data.build", folder, 1),
    cwd=ROOT,
    check=True,
    stdout=subprocess.DEVNULL,
    timeout=300,
  )


# Half of a start is importing TensorFlow and JAX: a process that has done so forks into the runs.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.faults.preload"])


def become(code: str, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
  """Runs the code as `python -c` does, to the end of the process."""
  os.setsid()
  output = os.open(log, os.O_WRONLY | os.O_APPEND)
  for stream in (sys.stdout, sys.stderr):
    os.dup2(output, stream.fileno())
  os.chdir(ROOT)
  os.environ.clear()
  os.environ.update(environment)
  for name, kind in (("JAX_NUM_CPU_DEVICES", int), ("JAX_COMPILATION_CACHE_DIR", str)):
    jax.config.update(name.lower(), kind(value) if (value := environment.get(name)) else None)
  sys.argv, sys.path[:0] = ["-c", *arguments], [str(ROOT)]
  try:
    exec(code, {"__name__": "__main__"})
  finally:
    threading._shutdown()
    atexit._run_exitfuncs()  # which multiprocessing leaves out


class Run:
  """A run of the program in its own session, so that nothing of it survives a kill.

  Args:
    data: the folder with data/.
    workdir: the run's; its output goes to a file of that name beside it.
    head: Python to run instead of `python -m electra_jax.train`, and its first arguments.
    url: of the workdir; `workdir` is then the local folder of process 0.
  """

  def __init__(
    self,
    data: Path,
    workdir: Path,
    steps: int,
    *args: str,
    devices: int = 1,
    head: list[str] = (),
    log: str = "log",
    url: str = "",
    **fields,
  ):
    self.workdir, self.history = workdir, inode(workdir / "metrics.jsonl")
    place = workdir.parent  # not on a disk that is to be full
    self.log = (place.parent if place.is_mount() else place) / f"{workdir.name}.{log}"
    arguments = command(
      "electra_jax.train", data, steps, f"--workdir={url or workdir}", *args, **fields
    )
    code, *first = head or [PROGRAM]
    with self.log.open("a") as log:
      self.begin = log.tell()
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    self.process = SERVER.Process(
      target=become, args=(code, [*first, *arguments[3:]], self.log, environment), daemon=True
    )
    self.process.start()
    while os.getpgid(self.process.pid) != self.process.pid:  # until `become` has begun
      time.sleep(0.001)

  @property
  def output(self) -> str:
    """What this process has printed so far."""
    with self.log.open() as log:
      log.seek(self.begin)
      return log.read()

  def wait(self, timeout_secs: float = 300) -> int:
    """Waits for the end and returns the exit code; kills what does not end."""
    self.process.join(timeout_secs)
    if self.process.is_alive():
      self.send(signal.SIGKILL)
      raise AssertionError(f"still running after {timeout_secs} s: {self.output[-3000:]}")
    return self.process.exitcode

  def send(self, number: int) -> None:
    """Sends a signal to it and all it started."""
    os.killpg(self.process.pid, number)

  def when(self, condition: Callable[[], bool], timeout_secs: float = 300) -> "Run":
    """Waits until the condition holds, while it runs."""
    deadline = time.monotonic() + timeout_secs
    while not condition():
      assert self.process.is_alive(), f"it was over before: {self.output[-3000:]}"
      assert time.monotonic() < deadline, f"not within {timeout_secs} s: {self.output[-3000:]}"
      time.sleep(0.001)
    return self

  def has_reached(self, step: int) -> bool:
    """Returns whether it has written a step: a run that goes on replaces metrics.jsonl."""
    return inode(self.workdir / "metrics.jsonl") != self.history and last_line(self.workdir) >= step

  def until(self, step: int) -> "Run":
    """Waits until it has written a step."""
    return self.when(lambda: self.has_reached(step))

  def kill(self) -> None:
    """Ends it as a power cut does."""
    self.send(signal.SIGKILL)
    self.process.join()

  def finish(self) -> str:
    """Waits for its success and returns its output."""
    code = self.wait()
    assert code == 0, f"exit code {code}: {self.output[-3000:]}"
    return self.output

  def error(self) -> str:
    """Waits for its failure, of which it tells in one line, and returns that."""
    code, output = self.wait(), self.output
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 1 and len(lines) == 1 and "Traceback" not in output, f"{code}: {output[-3000:]}"
    return lines[0]


def free_port() -> int:
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return s.getsockname()[1]


def pair(
  data: Path, workdir: Path, steps: int, count: int = 2, odd: dict | None = None, **kwargs
) -> list[Run]:
  """Starts several processes of one run, by default of one device each.

  Args:
    odd: arguments of `Run` that the last process has otherwise.
  """
  joined = (f"--coordinator=localhost:{free_port()}", f"--num_processes={count}")

  def start(i: int) -> Run:
    own = {"data": data, "workdir": workdir, "log": f"log{i}", **kwargs}
    own |= odd or {} if i == count - 1 else {}
    return Run(own.pop("data"), own.pop("workdir"), steps, *joined, f"--process_id={i}", **own)

  return [start(i) for i in range(count)]


def finish(runs: Iterable[Run]) -> list[str]:
  """Waits for the success of all and returns their outputs."""
  return [run.finish() for run in runs]


def lines(workdir: Path) -> list[dict]:
  """Returns the whole lines of the history without what depends on the clock."""
  from electra_jax.monitor import metrics

  history = metrics.read_history(workdir / "metrics.jsonl")
  return [{k: v for k, v in line.items() if k not in metrics.TIMING} for line in history]


def last_line(workdir: Path) -> int:
  """Returns the step of the newest whole line, 0 where there is none."""
  path = workdir / "metrics.jsonl"
  text = path.read_text() if path.exists() else ""
  steps = [json.loads(x)["step"] for x in text.splitlines(keepends=True) if x.endswith("\n")]
  return max(steps, default=0)


def inode(path: Path) -> int | None:
  """Returns what tells a file or folder from an older one of the same name; None without one."""
  try:
    return path.stat().st_ino
  except FileNotFoundError:
    return None


def unfinished(workdir: Path) -> set[int | None]:
  """Returns the folders of checkpoints that are being written, or were when a run was killed."""
  return {inode(path) for path in (workdir / "checkpoints").glob(UNFINISHED)}


def saves(workdir: Path) -> Callable[[], bool]:
  """Returns whether the run that is started next is writing a checkpoint."""
  left = unfinished(workdir)
  return lambda: bool(unfinished(workdir) - left - {None})


def checkpoints(workdir: Path) -> list[int]:
  """Returns the steps of the complete checkpoints, in order."""
  return sorted(int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit())


def newest(workdir: Path) -> int:
  """Returns the step of the newest complete checkpoint, 0 where there is none."""
  return max(checkpoints(workdir), default=0)


def meta(workdir: Path, step: int) -> dict:
  """Returns what is saved beside the state."""
  return json.loads((workdir / "checkpoints" / str(step) / "meta" / "metadata").read_text())


def saved(workdir: Path, step: int) -> dict:
  """Returns {array: shape, type, checksum} of a checkpoint."""
  return meta(workdir, step)["arrays"]


def outcome(workdir: Path, step: int) -> tuple[dict, list[dict]]:
  """Returns the arrays of the last checkpoint (by checksum), and the history without timing."""
  return saved(workdir, step), lines(workdir)


def tree(workdir: Path, step: int) -> dict:
  """Returns a checkpoint as plain arrays, whatever devices it was written from."""
  import numpy as np
  import orbax.checkpoint as ocp

  path, reader = workdir / "checkpoints" / str(step) / "state", ocp.PyTreeCheckpointer()
  known = reader.metadata(path).item_metadata.tree
  plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), known)
  return reader.restore(path, restore_args=plain)


def arrays(workdir: Path, step: int) -> dict:
  """Returns {name: plain array} of a checkpoint."""
  from electra_jax.core.params import named

  return named(tree(workdir, step))


def check_readable(workdir: Path) -> None:
  """Reads every complete checkpoint and compares its arrays with their checksums."""
  import zlib

  import numpy as np

  for step in checkpoints(workdir):
    found = {k: zlib.crc32(np.ascontiguousarray(x)) for k, x in arrays(workdir, step).items()}
    assert found == {k: facts["crc32"] for k, facts in saved(workdir, step).items()}, step


def largest(folder: Path) -> Path:
  """Returns the largest file below a folder."""
  return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path: Path) -> None:
  """Flips a bit in the middle of a file."""
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)
