"""What a long run is started again, watched and judged with."""

import os
import shutil
import signal

import harness
import pytest
from harness import STEPS

pytestmark = pytest.mark.faults


def test_what_was_compiled_is_kept_and_the_last_lines_say_where_time_went(
  data, alone, workdir, monkeypatch
):
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")  # of all tests; the default is what is tested
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  harness.Run(data, workdir, 7).finish()
  compiled = sorted((workdir / "compiled").glob("*-cache"))
  assert compiled
  output = harness.Run(data, workdir, STEPS, allow_config_change="train.steps").finish()
  assert "resuming from step 7" in output
  # The steps' number is data of the step's program, so the longer run compiles nothing.
  assert sorted((workdir / "compiled").glob("*-cache")) == compiled
  # As it is where a run was killed, or the disk was full, while JAX wrote it: compiled once more.
  step, whole = max(compiled, key=os.path.getsize), harness.saved(workdir, STEPS)
  os.truncate(step, step.stat().st_size // 2)
  shutil.rmtree(workdir / "checkpoints" / str(STEPS))  # so that there are steps left
  again = harness.Run(data, workdir, STEPS).finish()
  assert "Error reading persistent compilation cache entry" in again
  assert harness.saved(workdir, STEPS) == whole
  assert sorted((workdir / "compiled").glob("*-cache")) == compiled
  (line,) = (x for x in output.splitlines() if " time: " in x)
  for what in ("steps", "compile", "data", "save", "restore", "evaluation"):
    assert f" {what} " in f"{line} ", line
  assert "resuming from step 40" in again


def test_a_trace_is_taken_on_a_signal_and_changes_nothing(data, alone, workdir):
  run = harness.Run(data, workdir, STEPS, profile__signal_steps=2).until(5)
  os.kill(run.process.pid, signal.SIGUSR2)
  (line,) = (x for x in run.finish().splitlines() if "trace of steps " in x)
  (trace,) = workdir.glob("profile/plugins/profile/*/*.xplane.pb")
  assert b"train" in trace.read_bytes() and str(workdir / "profile") in line
  assert harness.outcome(workdir, STEPS) == harness.outcome(alone, STEPS)
