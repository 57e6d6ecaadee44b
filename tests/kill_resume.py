"""Stops and kills a run again and again, and compares what comes out with a run left alone.

  python tests/kill_resume.py [--seed=0] [--steps=24] [--kills=3] [--folder=DIR]

Real processes of the real program, on a little generated text. One run is left alone. The other is
told to stop by SIGUSR1, as SLURM does before a time limit, killed by SIGKILL at random steps, and
once more while a checkpoint is being written; each time the same command starts it again. In the
end every array of the last checkpoint and every line of the history have to be the same, bit for
bit. Exits with 0 if they are.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
EVERY = 5  # steps between checkpoints
STOPPED = 143  # exit code of a run that is to be started again
FIELDS = {
  "model.hidden_size": 64,
  "model.num_layers": 2,
  "model.num_heads": 2,
  "model.ffn_size": 128,
  "model.embedding_size": 32,
  "model.max_positions": 32,
  "generator.width_multiplier": 0.5,
  "data.seq_length": 32,
  "data.vocab_size": 200,
  "data.holdout_frac": 0.1,
  "optimizer.learning_rate": 1e-2,
  "optimizer.warmup_steps": 5,
  "train.batch_size": 16,
  "eval.every_steps": 6,
  "eval.batch_size": 16,
  "eval.max_examples": 32,
  "checkpoint.every_steps": EVERY,
  "checkpoint.keep": 2,
  "log.every_steps": 1,
}


def write_text(path: Path) -> None:
  """Writes a few hundred documents of made-up words."""
  rng = random.Random(0)
  words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 5))) for _ in range(80)]
  documents = (
    "\n".join(" ".join(rng.choices(words, k=14)) + "." for _ in range(8)) for _ in range(400)
  )
  path.write_text("\n\n".join(documents))


def command(module: str, folder: Path, steps: int, *args: str) -> list[str]:
  """Returns the command line of a program with this script's configuration."""
  fields = {**FIELDS, "train.steps": steps, "data.dir": folder / "data"}
  fields["data.sources"] = f"text:{folder}/text.txt"
  changes = [f"--config.{name}={value}" for name, value in fields.items()]
  return [sys.executable, "-m", module, "--config=configs/base.py", *args, *changes]


def start(folder: Path, name: str, steps: int) -> subprocess.Popen:
  """Starts training in its own session, so that nothing of it survives a kill."""
  log = (folder / f"{name}.log").open("a")
  arguments = command("electra_jax.train", folder, steps, f"--workdir={folder / name}")
  return subprocess.Popen(arguments, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def last_line(workdir: Path) -> int:
  """Returns the step of the newest whole training line, 0 where there is none."""
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
  return {inode(path) for path in (workdir / "checkpoints").glob("*.orbax-checkpoint-tmp")}


def kill_when(
  process: subprocess.Popen, condition, number=signal.SIGKILL, timeout_secs: float = 300
) -> int:
  """Sends a signal to a run, and all it started, as soon as the condition holds.

  Returns:
    What the run ended with.
  """
  deadline = time.monotonic() + timeout_secs
  while not condition():
    if process.poll() is not None or time.monotonic() > deadline:
      raise RuntimeError("the run was over before it could be killed: see its log")
    time.sleep(0.001)
  os.killpg(process.pid, number)
  return process.wait()


def moment(workdir: Path, after: int | None):
  """Returns when to kill the run that is started next: after a step, or (None) during a save.

  What an earlier run left does not count: a run that goes on replaces metrics.jsonl.
  """
  history, left = inode(workdir / "metrics.jsonl"), unfinished(workdir)
  if after is None:
    return lambda: bool(unfinished(workdir) - left - {None})
  return lambda: inode(workdir / "metrics.jsonl") != history and last_line(workdir) >= after


def newest(workdir: Path) -> int:
  """Returns the step of the newest complete checkpoint, 0 where there is none."""
  folder = workdir / "checkpoints"
  return max((int(p.name) for p in folder.glob("*") if p.name.isdigit()), default=0)


def outcome(workdir: Path, steps: int) -> tuple[dict, list[dict]]:
  """Returns the arrays of the last checkpoint (by checksum), and the history without timing."""
  from electra_jax import metrics

  meta = json.loads((workdir / "checkpoints" / str(steps) / "meta" / "metadata").read_text())
  history = metrics.read_history(workdir / "metrics.jsonl")
  lines = [{k: v for k, v in line.items() if k not in metrics.TIMING} for line in history]
  return meta["arrays"], lines


def run_to_end(folder: Path, name: str, steps: int) -> None:
  """Runs until it is finished; a failure shows the end of its log."""
  if start(folder, name, steps).wait():
    print((folder / f"{name}.log").read_text()[-3000:], file=sys.stderr)
    raise SystemExit(f"the run {name} failed")


def compare(folder: Path, steps: int, kills: int, seed: int) -> bool:
  """Runs both and prints a table; returns whether they are the same."""
  write_text(folder / "text.txt")
  build = command("electra_jax.data.build", folder, steps)
  subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
  run_to_end(folder, "alone", steps)

  table = Table(title=f"{steps} steps, a checkpoint every {EVERY}")
  for title in ("signal", "when", "last step written", "resumes from"):
    table.add_column(title)
  killed, rng = folder / "killed", random.Random(seed)
  moments = sorted(rng.sample(range(1, steps - 1), kills))
  code = kill_when(start(folder, "killed", steps), moment(killed, 1), signal.SIGUSR1)
  if code != STOPPED or not newest(killed):
    raise SystemExit(f"told to stop, the run ended with {code} and saved step {newest(killed)}")
  table.add_row("SIGUSR1", "after step 1", str(last_line(killed)), str(newest(killed)))
  for after in [*moments, None]:
    text = "while a checkpoint is written" if after is None else f"after step {after}"
    condition = moment(killed, after)
    kill_when(start(folder, "killed", steps), condition)
    table.add_row("SIGKILL", text, str(last_line(killed)), str(newest(killed)))
  run_to_end(folder, "killed", steps)

  (arrays, lines), (killed_arrays, killed_lines) = (
    outcome(folder / name, steps) for name in ("alone", "killed")
  )
  same_arrays = sum(arrays[name] == killed_arrays.get(name) for name in arrays)
  same_lines = sum(a == b for a, b in zip(lines, killed_lines, strict=False))
  console = Console()
  console.print(table)
  console.print(f"equal bit for bit: {same_arrays} of {len(arrays)} arrays of step {steps},")
  console.print(f"{same_lines} of {len(lines)} lines of metrics.jsonl")
  return arrays == killed_arrays and lines == killed_lines


def main() -> int:
  """Runs from the command line."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--seed", type=int, default=None, help="of the moments; random if not given")
  parser.add_argument("--steps", type=int, default=24)
  parser.add_argument("--kills", type=int, default=3, help="at random steps; one more is added")
  parser.add_argument("--folder", type=Path, default=None, help="kept, for a look at the logs")
  args = parser.parse_args()
  seed = random.randrange(1000) if args.seed is None else args.seed
  print(f"seed {seed}")
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  with tempfile.TemporaryDirectory() as temporary:
    folder = args.folder or Path(temporary)
    folder.mkdir(parents=True, exist_ok=True)
    # Both runs may use what one of them compiled, as a run that is started again does.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    same = compare(folder.resolve(), args.steps, args.kills, seed)
  print("the same" if same else "NOT the same")
  return 0 if same else 1


if __name__ == "__main__":
  sys.path.insert(0, str(ROOT))
  sys.exit(main())
