"""NaN, training that goes wrong, clocks that jump, two runs in one place."""

import os
import signal
import time

import harness
import pytest
from harness import STEPS

pytestmark = pytest.mark.faults


def poisoned(data, workdir, number: int, every: bool = False, **fields) -> harness.Run:
  """Starts a run whose step breaks on the batch of that number, from 0."""
  return harness.Run(data, workdir, STEPS, head=harness.poison(number, every), **fields)


def test_nan_stops_the_run_and_names_step_and_term(data, alone, tmp_path):
  workdir = tmp_path / "run"
  error = poisoned(data, workdir, 12).error()
  assert error.startswith("error: step 13: ") and "loss = nan" in error, error
  assert harness.newest(workdir) == 10
  harness.check_readable(workdir)
  harness.Run(data, workdir, STEPS).finish()
  assert harness.outcome(workdir, STEPS) == harness.outcome(alone, STEPS)


def test_nan_is_met_by_going_back_and_leaving_the_batch_out(data, tmp_path):
  workdir = tmp_path / "run"
  output = poisoned(data, workdir, 12, health__on_nan="rollback").finish()
  assert "rolling back to skip batch 12" in output and "resuming from step 10" in output
  meta = harness.meta(workdir, STEPS)
  assert meta["skipped"] == [12] and meta["position"]["sequences"] == 16 * (STEPS + 1)
  # The same when it is killed after that: what was left out is part of the checkpoint.
  again = tmp_path / "again"
  run = poisoned(data, again, 12, health__on_nan="rollback")
  run.when(lambda: harness.newest(again) >= 15).kill()
  output = poisoned(data, again, 12, health__on_nan="rollback").finish()
  assert "resuming from step" in output and "rolling back" not in output
  assert harness.outcome(again, STEPS) == harness.outcome(workdir, STEPS)


def test_going_back_ends_after_as_many_times_as_allowed(data, tmp_path):
  workdir = tmp_path / "run"
  fields = {"health__on_nan": "rollback", "health__max_rollbacks": 2}
  run = poisoned(data, workdir, 12, every=True, **fields)
  error = run.error()
  assert run.output.count("rolling back") == 2 and error.startswith("error: step 13: "), run.output
  assert harness.newest(workdir) == 10


def test_a_diverging_run_is_warned_of_or_stopped_by_on_warning(data, tmp_path):
  # A rate that throws it off after some lines of peace.
  wild = {
    **harness.ELECTRA,
    "optimizer__learning_rate": 0.1,
    "optimizer__warmup_steps": 60,
    "optimizer__schedule": "joined",
    "log__every_steps": 2,
  }
  output = harness.Run(data, tmp_path / "warned", 60, **wild).finish()
  assert "warning: step " in output and "times the median" in output
  assert "optimizer.learning_rate" in output
  run = harness.Run(data, tmp_path / "stopped", 60, health__on_warning="stop", **wild)
  error = run.error()
  assert error.startswith("error: stopped by config.health.on_warning: step "), error
  assert harness.newest(tmp_path / "stopped") < 60
  harness.check_readable(tmp_path / "stopped")


@pytest.mark.parametrize(
  ("fields", "told"),
  [
    (
      {"objective__discriminator_weight": 0, "health__auc_margin": 0.2},
      "the discriminator does not learn",
    ),
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


def test_jumps_of_the_clock_corrupt_nothing(data, alone, tmp_path):
  workdir = tmp_path / "run"

  def start() -> harness.Run:
    return harness.Run(data, workdir, STEPS, head=harness.program(JUMPING))

  def check_time_out(run: harness.Run) -> None:
    # orbax waits by the same clock, and takes a jump inside of a save for a time-out.
    assert "could not write a checkpoint" in run.error() and "timed out" in run.output
    harness.check_readable(workdir)

  while not harness.checkpoints(workdir):
    reached, run = harness.reaches(workdir, 12), start()
    while run.process.is_alive() and not reached():
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
  assert all(0 <= line.get("elapsed_secs", 0) < 1000 for line in read(workdir))


def read(workdir) -> list[dict]:
  from electra_jax.monitor import metrics

  return metrics.read_history(workdir / "metrics.jsonl")


def test_a_second_run_on_a_workdir_is_refused_and_disturbs_nothing(data, alone, tmp_path):
  workdir = tmp_path / "run"
  reached = harness.reaches(workdir, 3)
  first = harness.Run(data, workdir, STEPS).when(reached)
  first.send(signal.SIGSTOP)
  error = harness.Run(data, workdir, STEPS).error()
  first.send(signal.SIGCONT)
  assert error.startswith(f"error: {workdir} is in use by process {first.process.pid} on ")
  first.finish()
  assert harness.outcome(workdir, STEPS) == harness.outcome(alone, STEPS)


def test_a_run_whose_workdir_another_host_has_claimed_stops(data, alone, tmp_path):
  """Where locks do not reach, as on a mounted bucket, the newer claim is seen at the next save."""
  workdir = tmp_path / "run"
  head, reached = harness.program(harness.PACED), harness.reaches(workdir, 6)
  run = harness.Run(data, workdir, STEPS, head=head).when(reached)
  (workdir / ".lock").write_text("process 1 on another-host\n")
  error = run.error()
  assert error == f"error: {workdir} has been taken over by process 1 on another-host"
  assert harness.checkpoints(workdir) == [5]
  harness.Run(data, workdir, STEPS).finish()
  assert harness.outcome(workdir, STEPS) == harness.outcome(alone, STEPS)
