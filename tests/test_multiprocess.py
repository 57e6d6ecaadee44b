"""Two real processes, and one, train the same thing."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import PACKAGE_PATH, make_tiny_config
from test_checkpoint import open_run
from test_train import STEPS, assert_close, command, programs_of

from electra_jax.monitor import metrics
from electra_jax.runtime import parallel

ROOT = Path(__file__).resolve().parent.parent


def start(config, workdir, *args) -> subprocess.Popen:
  return subprocess.Popen(
    command(config, workdir, *args),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": PACKAGE_PATH, "JAX_NUM_CPU_DEVICES": "1"},
  )


def finish(*processes: subprocess.Popen) -> list[str]:
  """Waits for all, and returns what each printed."""
  outputs = [process.communicate(timeout=300) for process in processes]
  for process, (_, err) in zip(processes, outputs, strict=True):
    assert process.returncode == 0, err[-3000:]
  return [out for out, _ in outputs]


def refused(processes: list[subprocess.Popen]) -> list[str]:
  """Waits for processes that end with an error of one line each, and returns the lines."""
  errors = [process.communicate(timeout=300)[1].strip() for process in processes]
  assert [process.returncode for process in processes] == [1, 1]
  assert all("\n" not in line for line in errors), errors
  return errors


def free_port() -> int:
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return s.getsockname()[1]


def pair(config, workdir, *second) -> list[subprocess.Popen]:
  """Starts two processes of one device each; `second` are more arguments for process 1."""
  joined = (f"--coordinator=localhost:{free_port()}", "--num_processes=2")
  more = ((), second)
  return [start(config, workdir, *joined, f"--process_id={i}", *more[i]) for i in range(2)]


@pytest.mark.long
def test_two_processes_train_and_save_what_one_does(straight, tiny_shards, tmp_path):
  config = make_tiny_config(tiny_shards)
  first, second = finish(*pair(config, tmp_path / "two"))
  assert "2 x cpu, 2 process(es)" in first and f"train step {STEPS}/{STEPS}" in first
  assert "step" not in second  # one tells for all
  assert_close(straight, tmp_path / "two")  # which had eight devices
  last = metrics.read_history(tmp_path / "two" / "metrics.jsonl")[-2]
  assert 0 < last["fastest_host_step_ms"] <= last["slowest_host_step_ms"]

  # What the two saved together, one process reads, on the eight devices of this one.
  shapes = parallel.StateSharding(programs_of(config).shapes, sharded=False).shapes()
  one, two = (open_run(path).restore(4, shapes)[0] for path in (straight, tmp_path / "two"))
  assert int(two.step) == 4
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-5), one, two)


@pytest.mark.slow
def test_what_one_process_refuses_ends_the_others_with_its_reason(tiny_shards, tmp_path):
  (tmp_path / "notes.txt").write_text("not a run")
  errors = refused(pair(make_tiny_config(tiny_shards), tmp_path))
  assert errors[0].startswith(f"error: {tmp_path} holds notes.txt but no config.json"), errors[0]
  assert errors[1].startswith("error: process 0 failed: ValueError("), errors[1]


@pytest.mark.long
def test_a_process_whose_others_do_not_join_ends_with_an_error(tiny_shards, tmp_path):
  config = make_tiny_config(tiny_shards)
  config.hosts.timeout_secs = 4
  joined = (f"--coordinator=localhost:{free_port()}", "--num_processes=2", "--process_id=0")
  process = start(config, tmp_path, *joined)
  errors = process.communicate(timeout=120)[1]
  assert process.returncode == -signal.SIGABRT
  assert "not all processes of this run joined within 4 s (config.hosts.timeout_secs)" in errors


@pytest.mark.slow
def test_a_sigterm_before_training_ends_a_process_that_joined_no_other():
  code = (
    "import os, signal, time; from electra_jax.runtime import processes;"
    f" processes.initialize('localhost:{free_port()}', 1, 0);"
    " os.kill(os.getpid(), signal.SIGTERM); time.sleep(5); os._exit(0)"
  )
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=300)
  assert done.returncode == -signal.SIGTERM, done.stderr[-1000:]


@pytest.mark.slow
def test_processes_that_differ_all_stop_and_name_the_odd_one(tiny_shards, tmp_path):
  errors = refused(pair(make_tiny_config(tiny_shards), tmp_path, "--config.seed=9"))
  for i, line in enumerate(errors):
    start = "error: configuration: process 1 of 2 differs from the others; process "
    assert line.startswith(f"{start}{i} has SHA-256 "), line
