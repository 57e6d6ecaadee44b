"""Runs launch/slurm.sbatch, as it is, on a SLURM of its own on this machine.

  python tests/slurm_resume.py [--steps=40] [--folder=DIR]

Needs Debian's slurm-wlm and munge, and root. A node of two made-up GPUs gets two jobs that say what
a task takes of it, then two of two processes each. One is left alone; the other is told to stop as
SLURM does before a time limit, has to save, to queue itself again and to resume, and is then
requeued from outside, as for preemption. In the end every array of the last checkpoint and every
line of the history have to be the same, bit for bit. launch/build.sbatch builds shards by an array
of jobs, which have to be those of one local build. Exits with 0 if all of this holds.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent / "faults"))

import harness  # noqa: E402
from harness import ROOT, last_line, newest, outcome  # noqa: E402

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def configuration(folder: Path) -> str:
  """Returns slurm.conf for this machine alone."""
  host = socket.gethostname()
  lines = {
    "ClusterName": "one",
    "SlurmctldHost": f"{host}(127.0.0.1)",
    "SlurmctldPort": harness.free_port(),
    "SlurmdPort": harness.free_port(),
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "AuthType": "auth/munge",
    # A requeued job may start when the credentials of its last start have expired: 2 minutes.
    "AuthInfo": f"socket={folder}/munge.socket,cred_expire=5",
    "StateSaveLocation": folder / "state",
    "SlurmdSpoolDir": folder / "spool",
    "SlurmctldPidFile": folder / "slurmctld.pid",
    "SlurmdPidFile": folder / "slurmd.pid",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "SelectType": "select/cons_tres",
    "JobRequeue": 1,
    "ReturnToService": 2,
    "SlurmdParameters": "config_overrides",
    "GresTypes": "gpu",
    "MpiDefault": "none",
    "NodeName": f"{host} NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:2 State=UNKNOWN",
    "PartitionName": f"all Nodes={host} Default=YES MaxTime=INFINITE State=UP",
  }
  return "".join(f"{name}={value}\n" for name, value in lines.items())


def wait_for(what: str, condition: Callable[[], bool], timeout_secs: float = 300) -> None:
  """Waits until the condition holds.

  Raises:
    SystemExit: it does not in time.
  """
  deadline = time.monotonic() + timeout_secs
  while not condition():
    if time.monotonic() > deadline:
      raise SystemExit(f"{what}: not within {timeout_secs:.0f} s")
    time.sleep(0.05)


def ask(*command: str) -> str:
  """Returns what one of SLURM's programs says, "" where it fails."""
  return subprocess.run(command, capture_output=True, text=True, timeout=300).stdout.strip()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
  """Runs a cluster of this machine; SLURM_CONF leads to it meanwhile."""
  for name in ("state", "spool"):
    (folder / name).mkdir(parents=True)
  (folder / "slurm.conf").write_text(configuration(folder))
  # SLURM counts only what is a device.
  gpus = (f"Name=gpu File=/dev/{device} Flags=nvidia_gpu_env\n" for device in ("null", "zero"))
  (folder / "gres.conf").write_text("".join(gpus))
  (folder / "key").write_bytes(os.urandom(1024))
  (folder / "key").chmod(0o400)
  folder.chmod(0o755)
  os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
  munge = ["munged", "--foreground", "--force", f"--key-file={folder}/key"]
  munge += [f"--{x}={folder}/munge.{x}" for x in ("socket",)]
  munge += [f"--{x}-file={folder}/munge.{x}" for x in ("pid", "log", "seed")]
  with contextlib.ExitStack() as stack:

    def start(name: str, command: list[str]) -> None:
      log = stack.enter_context((folder / f"{name}.log").open("w"))
      process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
      stack.callback(process.wait)
      stack.callback(process.terminate)

    start("munged", munge)
    wait_for("munged", (folder / "munge.socket").exists, 20)
    start("slurmctld", ["slurmctld", "-D"])
    start("slurmd", ["slurmd", "-D"])
    wait_for("an idle node", lambda: ask("sinfo", "-h", "-o", "%T") == "idle", 60)
    stack.callback(ask, "scancel", "--user=root")
    yield


def submit(
  folder: Path, name: str, steps: int, *options: str, python: str | Path = sys.executable
) -> str:
  """Queues the launcher with this script's configuration; returns the number of the job."""
  training = harness.command("electra_jax.train", folder, steps, f"--workdir={folder / name}")
  options = ["--ntasks-per-node=2", "--cpus-per-task=1", f"--output={folder / name}.log", *options]
  script = [str(ROOT / "launch" / "slurm.sbatch"), *training[3:]]
  done = subprocess.run(
    ["sbatch", "--parsable", *options, *script],
    cwd=ROOT,
    env={**os.environ, "PYTHON": str(python), "JAX_NUM_CPU_DEVICES": "1"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  if done.returncode:
    raise SystemExit(f"sbatch: {done.stderr}")
  return done.stdout.strip()


def slowed(folder: Path) -> Path:
  """Writes a program that stands for Python and runs the training with a pause in every step.

  Else a run can end between a line that is seen and the signal that answers it.
  """
  path, code = folder / "slowed", shlex.quote(harness.PACED + harness.PROGRAM)
  path.write_text(
    f'#!/bin/sh\nshift 2  # -m electra_jax.train\nexec {sys.executable} -c {code} "$@"\n'
  )
  path.chmod(0o755)
  return path


def fields(job: str) -> dict[str, str]:
  """Returns what SLURM knows of a job."""
  words = ask("scontrol", "show", "job", job).split()
  return dict(word.split("=", 1) for word in words if "=" in word)


def states(job: str) -> set[str]:
  """Returns the states of a job, or of the tasks of an array."""
  words = ask("scontrol", "show", "job", job).split()
  return {word.partition("=")[2] for word in words if word.startswith("JobState=")}


def finish(job: str, log: Path) -> None:
  """Waits for a job to be completed; if it fails, shows the end of its log."""
  # A job of two processes takes 80 s alone on two cores, and over 300 s beside other tests.
  wait_for(f"the end of job {job}", lambda: states(job) and states(job) <= ENDED, 1200)
  if states(job) != {"COMPLETED"}:
    raise SystemExit(f"{log.read_text('utf-8')[-3000:]}\njob {job}: {', '.join(states(job))}")


def interrupt(job: str, workdir: Path, after: int, *command: str) -> int:
  """Sends a job back into the queue once it has done some steps; returns the step it had saved."""
  restarts, log = fields(job)["Restarts"], workdir.with_suffix(".log")
  wait_for(f"step {after} of job {job}", lambda: last_line(workdir) >= after)
  subprocess.run([*command, job], check=True, timeout=300)

  def queued_again() -> bool:
    found = fields(job)
    if found["JobState"] in ENDED:
      state = f"{found['JobState']}, and not in the queue again"
      raise SystemExit(f"{log.read_text()[-3000:]}\njob {job}: {state}")
    return found["Restarts"] != restarts

  wait_for(f"job {job} in the queue again", queued_again)
  return newest(workdir)


# Instead of training: what SLURM shows a task, and what JAX is told to take of it.
TASK = """#!/bin/sh
echo "task $SLURM_PROCID: GPUs $CUDA_VISIBLE_DEVICES, takes $JAX_LOCAL_DEVICE_IDS"
echo "task $SLURM_PROCID: cores $SLURM_CPUS_PER_TASK"
"""


def see_tasks(folder: Path) -> bool:
  """Returns whether tasks take the GPUs that are theirs: one each, or one task all of a node."""
  task = folder / "task"
  task.write_text(TASK)
  task.chmod(0o755)
  right = True
  of_node = ("--ntasks-per-node=1", "--gpus-per-task=2", "--cpus-per-task=2")
  for name, options, expected in (
    ("each", (), ("task 0: GPUs 0, takes 0", "task 1: GPUs 1, takes 0", "task 1: cores 1")),
    ("node", of_node, ("task 0: GPUs 0,1, takes 0,1", "task 0: cores 2")),
  ):
    log = folder / f"{name}.log"
    finish(submit(folder, name, 1, *options, python=task), log)
    right = right and set(expected) <= set(log.read_text().splitlines())
    print(log.read_text(), end="")
  return right


def build_by_array(folder: Path) -> bool:
  """Builds shards by launch/build.sbatch; returns whether they are those of one local build."""
  text = folder / "texts"
  text.mkdir()
  for i in range(3):
    harness.write_text(text / f"{i}.txt")
  files = []
  for name in ("array", "local"):
    command = harness.command("electra_jax.data.build", folder, 1)
    fields = {"sources": f"text:{text}/*.txt", "dir": folder / name, "parts": 3}
    command += [f"--config.data.{key}={value}" for key, value in fields.items()]
    if name == "local":
      subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=900)
    else:
      options = f"--cpus-per-task=1 --output={folder}/build-%a.log"
      environment = {**os.environ, "PYTHON": sys.executable, "OPTIONS": options}
      script = ["bash", str(ROOT / "launch" / "build.sbatch"), "3", *command[3:]]
      done = subprocess.run(
        script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
      )
      if done.returncode:
        raise SystemExit(f"build.sbatch: {done.stderr}")
      finish(done.stdout.strip(), folder / "build-0.log")
    found = sorted(p for p in (folder / name).iterdir() if p.is_file() and p.name[0] != ".")
    files.append({path.name: path.read_bytes() for path in found})
  print(f"built by an array of three jobs: {len(files[0])} files")
  return len(files[0]) > 3 and files[0] == files[1]


def compare(folder: Path, steps: int, console: Console) -> bool:
  """Runs both jobs; returns whether they came to the same."""
  harness.build(folder)
  with cluster(folder / "slurm"):
    seen = see_tasks(folder) and build_by_array(folder)
    finish(submit(folder, "alone", steps), folder / "alone.log")
    console.print(f"left alone: {steps} steps")
    job, moved = submit(folder, "moved", steps, python=slowed(folder)), folder / "moved"
    first = interrupt(job, moved, 3, "scancel", "--signal=USR1")
    console.print(f"SIGUSR1 to its processes: saved step {first}, in the queue again by itself")
    interrupt(job, moved, first + 3, "scontrol", "requeue")
    console.print("requeued from outside")
    finish(job, folder / "moved.log")
  log = (folder / "moved.log").read_text()
  resumed = [line for line in log.splitlines() if "resuming from step" in line]
  console.print("\n".join(resumed))
  (arrays, lines), (others, other_lines) = (outcome(folder / x, steps) for x in ("alone", "moved"))
  same_arrays = sum(arrays[name] == others.get(name) for name in arrays)
  same_lines = sum(a == b for a, b in zip(lines, other_lines, strict=False))
  console.print(f"equal bit for bit: {same_arrays} of {len(arrays)} arrays of step {steps},")
  console.print(f"{same_lines} of {len(lines)} lines of metrics.jsonl")
  same = (arrays, lines) == (others, other_lines)
  return seen and 0 < first < steps and len(resumed) == 2 and same


def main() -> int:
  """Runs from the command line."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=40)
  parser.add_argument("--folder", type=Path, default=None, help="kept, for a look at the logs")
  args = parser.parse_args()
  missing = [name for name in PROGRAMS if shutil.which(name) is None]
  if missing:
    raise SystemExit(f"{missing[0]} is missing: apt-get install slurm-wlm munge")
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  with tempfile.TemporaryDirectory() as temporary:
    folder = (args.folder or Path(temporary)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    same = compare(folder, args.steps, Console(highlight=False))
  print("the same" if same else "NOT the same, or not what was expected")
  return 0 if same else 1


if __name__ == "__main__":
  sys.path.insert(0, str(ROOT))
  sys.exit(main())
