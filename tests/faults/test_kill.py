"""Killed at any moment, a run goes on bit for bit, and no checkpoint is ever half a one."""

import os
import random
import shutil
import signal
import subprocess
import time

import harness
import pytest
from harness import STEPS

pytestmark = pytest.mark.faults
SEED = int(os.environ.get("FAULTS_SEED", random.randrange(1000)))


def test_a_build_killed_at_any_moment_is_done_again_to_the_same_bytes(data, tmp_path):
  rng = random.Random(SEED)
  harness.write_text(tmp_path / "text.txt")
  arguments = harness.command("electra_jax.data.build", tmp_path, 1)
  for _ in range(4):
    process = subprocess.Popen(
      arguments, cwd=harness.ROOT, stdout=subprocess.DEVNULL, start_new_session=True
    )
    # Its start is most of it, so wait until it writes; then within a second of work.
    deadline = time.monotonic() + 60
    while not (tmp_path / "data" / ".building").exists() and time.monotonic() < deadline:
      time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.5))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if (tmp_path / "data" / "manifest.json").exists():  # it had been faster
      shutil.rmtree(tmp_path / "data")
  subprocess.run(arguments, cwd=harness.ROOT, check=True, stdout=subprocess.DEVNULL, timeout=300)
  names = sorted(p.name for p in (data / "data").iterdir() if p.is_file())
  for name in names:
    if not name.startswith(".") and name != "manifest.json":  # it names the text's path
      assert (tmp_path / "data" / name).read_bytes() == (data / "data" / name).read_bytes(), name


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_kills_at_any_moment_end_in_the_same_bits(data, tmp_path, monkeypatch, each):
  """Six kills, or a dozen."""
  rng, workdir, alone = random.Random(SEED), tmp_path / "run", tmp_path / "alone"
  harness.Run(data, alone, STEPS, **harness.ELECTRA).finish()
  print(f"FAULTS_SEED={SEED}")

  def kill(what: str, run: harness.Run, condition, later: float = 0.0) -> None:
    run.when(lambda: condition(run))
    time.sleep(later)
    run.kill()
    harness.check_readable(workdir)
    print(f"{what}: last line {harness.last_line(workdir)}, newest {harness.newest(workdir)}")

  def start() -> harness.Run:
    return harness.Run(data, workdir, STEPS, **harness.ELECTRA)

  def restores(run: harness.Run) -> bool:
    return "changed from base" in run.output

  # With nothing compiled yet, so that these fall into the start and the first compilation.
  with monkeypatch.context() as patch:
    patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    kill("at the start", start(), lambda _: True, rng.uniform(0.5, 5))
    for _ in range(each):
      kill("compiling", start(), restores, rng.uniform(0, 3))
  for after in sorted(rng.sample(range(1, 11), 2 * each - 1)):
    kill(f"after step {after}", start(), lambda run, n=after: run.has_reached(n))
  for _ in range(each):
    saving = harness.saves(workdir)
    kill("saving", start(), lambda _, saving=saving: saving(), rng.uniform(0, 0.02))
  for _ in range(each):
    kill("restoring", start(), restores, rng.uniform(0, 0.2))
  for after in sorted(rng.sample(range(12, 30), each)):
    step = max(after, harness.newest(workdir) + 1)
    kill(f"after step {step}", start(), lambda run, n=step: run.has_reached(n))
  output = start().finish()
  assert "resuming from step" in output
  assert harness.outcome(workdir, STEPS) == harness.outcome(alone, STEPS)


# Runs the program until it has deleted arrays of a checkpoint that is no longer kept.
DIES_DELETING = """
import os, signal
unlink = os.unlink

def die(path, *args, dir_fd=None, **kwargs):
  folder = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
  unlink(path, *args, dir_fd=dir_fd, **kwargs)
  folder = os.path.dirname(os.path.join(folder, path))
  if "/checkpoints/" in folder and folder.endswith("/d") and "orbax-checkpoint-tmp" not in folder:
    os.kill(os.getpid(), signal.SIGKILL)

os.unlink = die
"""


def test_a_checkpoint_that_is_half_deleted_does_not_count_as_one(data, alone, workdir):
  run = harness.Run(data, workdir, STEPS, head=harness.program(DIES_DELETING))
  assert run.wait(120) == -signal.SIGKILL
  harness.check_readable(workdir)
  left = harness.newest(workdir)
  assert f"resuming from step {left}" in harness.Run(data, workdir, STEPS).finish()
  assert harness.outcome(workdir, STEPS) == harness.outcome(alone, STEPS)
  assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["40", "44"]


@pytest.mark.parametrize(
  "number",
  # Beside this one, a job of SLURM gets it.
  [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.nightly)],
  ids=lambda n: n.name,
)
def test_a_stopped_run_saves_and_resumes_to_the_same_bits(data, alone, workdir, number):
  run = harness.Run(data, workdir, STEPS).until(7)
  run.send(number)
  assert run.wait(30) == harness.STOPPED
  stopped = harness.newest(workdir)
  assert stopped == harness.last_line(workdir) and f"stopping after step {stopped}" in run.output
  assert f"resuming from step {stopped}" in harness.Run(data, workdir, STEPS).finish()
  assert harness.outcome(workdir, STEPS) == harness.outcome(alone, STEPS)


# Runs the program with a last save that takes two seconds more.
SLOW_SAVE = """
import time
from electra_jax.runtime.checkpoint import Checkpoints
wait = Checkpoints.wait
Checkpoints.wait = lambda self: (time.sleep(2), wait(self))[1]
"""


def test_a_second_signal_does_not_end_the_last_save(data, alone, workdir):
  run = harness.Run(data, workdir, STEPS, head=harness.program(SLOW_SAVE)).until(7)
  run.send(signal.SIGTERM)
  run.when(lambda: "stopping after step" in run.output)
  time.sleep(1)  # the steps are over, the save is not
  run.send(signal.SIGTERM)
  run.send(signal.SIGUSR1)
  assert run.wait(30) == harness.STOPPED
  assert harness.newest(workdir) == harness.last_line(workdir)
  harness.Run(data, workdir, STEPS).finish()
  assert harness.outcome(workdir, STEPS) == harness.outcome(alone, STEPS)
