"""NaN, training that goes wrong, clocks that jump, two runs in one place."""

import os
import signal
import time

import harness
import pytest
from harness import STEPS

from electra_jax.monitor import metrics

pytestmark = pytest.mark.faults


def test_a_batch_that_was_left_out_for_nan_stays_out_after_a_kill(data, tmp_path, workdir):
  fields = {"head": harness.poison(12), "health__on_nan": "rollback"}
  output = harness.Run(data, workdir, STEPS, **fields).finish()
  assert "rolling back to skip batch 12" in output
  assert harness.meta(workdir, STEPS)["skipped"] == [12]
  again = tmp_path / "again"
  harness.Run(data, again, STEPS, **fields).when(lambda: harness.newest(again) >= 15).kill()
  output = harness.Run(data, again, STEPS, **fields).finish()
  assert "resuming from step" in output and "rolling back" not in output
  assert harness.outcome(again, STEPS) == harness.outcome(workdir, STEPS)


@pytest.mark.parametrize(
  ("fields", "told"),
  [
    ({"objective__discriminator_weight": 0, "health__auc_margin": 0.2}, "discriminator does not"),
    ({"objective__temperature": 0.01}, "the generator samples the same few tokens"),
  ],
  ids=["discriminator is not trained", "generator draws its first choice"],
)
def test_a_collapse_is_warned_of(data, tmp_path, fields, told):
  when = {"health__window": 5, "health__after_step": 5, **harness.ELECTRA}
  assert told in harness.Run(data, tmp_path / "run", STEPS, **when, **fields).finish()


# Runs the program under a clock that jumps forth and back, by up to a day, every second.
JUMPING = """
import time
real, jumps = time.time, [0, 86400, -7200, 3600, -86400]
time.time = lambda: real() + jumps[int(time.monotonic()) % len(jumps)]
"""


def test_jumps_of_the_clock_corrupt_nothing(data, alone, workdir):
  def start() -> harness.Run:
    return harness.Run(data, workdir, STEPS, head=harness.program(JUMPING))

  def check_time_out(run: harness.Run) -> None:
    # orbax waits by the same clock, and takes a jump inside of a save for a time-out.
    assert "could not write a checkpoint" in run.error() and "timed out" in run.output
    harness.check_readable(workdir)

  while not harness.checkpoints(workdir):
    run = start()
    while run.process.is_alive() and not run.has_reached(12):
      time.sleep(0.001)
    if run.process.is_alive():
      run.kill()
    else:
      check_time_out(run)
  oldest = workdir / "checkpoints" / str(harness.checkpoints(workdir)[0])
  for path in (oldest, *oldest.rglob("*")):  # it seems to be the newest, and from the future
    os.utime(path, (time.time() + 1e8, time.time() + 1e8))
  newest = harness.newest(workdir)
  for _ in range(20):  # each gets further
    run = start()
    if run.wait() == 0:
      break
    check_time_out(run)
  assert f"resuming from step {newest}" in run.output or newest < harness.newest(workdir)
  assert harness.outcome(workdir, STEPS) == harness.outcome(alone, STEPS)
  history = metrics.read_history(workdir / "metrics.jsonl")
  assert all(0 <= line.get("elapsed_secs", 0) < 1000 for line in history)


def test_a_second_run_on_a_workdir_is_refused_and_disturbs_nothing(data, alone, workdir):
  first = harness.Run(data, workdir, STEPS).until(3)
  first.send(signal.SIGSTOP)
  error = harness.Run(data, workdir, STEPS).error()
  first.send(signal.SIGCONT)
  assert error.startswith(f"error: {workdir} is in use by process {first.process.pid} on ")
  first.finish()
  assert harness.outcome(workdir, STEPS) == harness.outcome(alone, STEPS)


def test_a_run_whose_workdir_another_host_has_claimed_stops(data, alone, workdir):
  """Where locks do not reach, as on a mounted bucket, the newer claim is seen at the next save."""
  run = harness.Run(data, workdir, STEPS, head=harness.program(harness.PACED)).until(6)
  (workdir / ".lock").write_text("process 1 on another-host\n")
  error = run.error()
  assert error == f"error: {workdir} has been taken over by process 1 on another-host"
  assert harness.checkpoints(workdir) == [5]
  harness.Run(data, workdir, STEPS).finish()
  assert harness.outcome(workdir, STEPS) == harness.outcome(alone, STEPS)
