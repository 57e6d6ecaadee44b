"""What watches a run: where its time goes, which steps are traced, which process is slow."""

import errno
import fcntl
import functools
import io
import os
import re
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from rich.console import Console

from electra_jax.monitor import (
  baselines,
  curves,
  display,
  goodput,
  journal,
  log,
  metrics,
  stragglers,
  thinned,
  tracing,
  trackers,
)
from electra_jax.pretrain import train
from electra_jax.runtime import interrupt, processes, signals, workdir


def test_every_moment_counts_for_one_thing(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(goodput.time, "monotonic", lambda: clock[0])

  def wait(secs):
    clock[0] += secs

  time = goodput.Goodput()
  wait(1)
  with time.doing("steps"):
    wait(5)
    with time.doing("data"):
      wait(2)
    wait(1)
  with pytest.raises(KeyError), time.doing("save"):
    wait(1)
    raise KeyError  # it still ends there
  assert time.secs() == {"rest": 1, "steps": 6, "data": 2, "save": 1}
  assert time.summary() == "10 s: steps 60 %, data 20 %, save 10 %, rest 10 %"


@pytest.mark.parametrize("text", ["x", "5:3", "0:2", "1:2:3", "-1", "3:"])
def test_steps_to_trace_that_mean_nothing_are_refused(text):
  with pytest.raises(ValueError, match="config.profile.steps must be FIRST:LAST"):
    tracing.parse_steps(text)


@pytest.mark.parametrize(
  ("asked", "planned", "count", "traces"),
  [
    (3, range(0), 2, [(3, 4)]),
    (2, range(5, 8), 2, [(2, 3), (5, 7)]),
    (6, range(5, 8), 3, [(5, 8)]),
    (9, range(5, 8), 3, [(5, 7), (9, 9)]),
  ],
)
def test_a_signal_traces_the_next_steps_beside_those_of_the_configuration(
  tmp_path, monkeypatch, asked, planned, count, traces
):
  done, told, before = [], [], signal.getsignal(signal.SIGUSR2)
  monkeypatch.setattr(tracing.jax.profiler, "start_trace", lambda folder: done.append("start"))
  monkeypatch.setattr(tracing.jax.profiler, "stop_trace", lambda: done.append("stop"))
  with tracing.Tracer(tmp_path, planned, signal_steps=count) as tracer:
    for step in range(1, 10):
      if step == asked:
        signal.raise_signal(signal.SIGUSR2)
      tracer.begin(step)
      done.append(step)
      if tracer.ends(step) or step == 9:
        told.append(tracer.finish())
  expected = []
  for step in range(1, 10):
    expected += [*["start"] * (step in dict(traces)), step]
    expected += ["stop"] * (step in dict(traces).values())
  assert done == expected
  spans = [f"trace of steps {a} to {b}: xprof --logdir={tmp_path}" for a, b in traces]
  assert [text for text in told if text] == spans
  assert signal.getsignal(signal.SIGUSR2) is before  # its handler goes with the run


def test_a_trace_that_reaches_beyond_the_last_step_ends_with_it(
  tiny_config, tmp_path, monkeypatch, capsys
):
  for name in ("start_trace", "stop_trace"):
    monkeypatch.setattr(tracing.jax.profiler, name, lambda *unused: None)
  tiny_config.train.steps, tiny_config.profile.steps = 2, "2:9"
  assert train.train(tiny_config, tmp_path).step == 2
  assert "trace of steps 2 to 2: xprof" in capsys.readouterr().out


def test_a_tracker_is_not_a_folder_of_its_name(tmp_path, monkeypatch):
  (tmp_path / "wandb").mkdir()  # as wandb itself leaves one
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "wandb", raising=False)
  trackers.check_installed(["tensorboard"])
  with pytest.raises(ValueError, match="log.trackers=wandb needs the package wandb"):
    trackers.check_installed(["wandb"])


def test_a_process_is_named_when_it_is_slow_twice_and_once_only():
  found = stragglers.StragglerDetector(1.3, batch_size=8, step=0)
  found._names = ["a", "b", "c"]
  even, slow = np.array([1.0, 1.1, 1.0]), np.array([1.0, 1.0, 1.5])
  warned = [found.check(own, np.zeros(3))[1] for own in (even, slow, slow, slow, even, slow, slow)]
  assert [len(x) for x in warned] == [0, 0, 1, 0, 0, 0, 1]
  assert warned[2] == [
    "process 2 (c) is slow: it needs 1,500 ms for a step, 0 ms of it waiting for data; the others"
    " need 1,000 ms"
  ]
  other = np.array([1.5, 1.0, 1.0])  # two processes, each slow on one line, are chance
  assert [found.check(own, np.zeros(3))[1] for own in (even, slow, other, slow)] == [[]] * 4
  values, _ = found.check(slow, np.zeros(3))
  expected = {"fastest_host_step_ms": 1000.0, "slowest_host_step_ms": 1500.0, "slowest_host": 2}
  assert values == expected and set(values) <= set(metrics.TIMING)


def test_waiting_for_data_counts_as_it_is_and_the_rest_by_the_devices():
  own = stragglers.own_secs(1.0, np.array([0.2, 0.6]), np.array([2.0, 1.0]))
  np.testing.assert_allclose(own, [0.2 + 0.4, 0.6 + 0.2])


def test_a_line_that_is_cut_off_is_removed_and_is_an_error_or_a_warning(tmp_path):
  out, path = io.StringIO(), tmp_path / "metrics.jsonl"
  shown = display.Display(Console(file=out, width=200), display.Activity)
  old = resource.getrlimit(resource.RLIMIT_FSIZE)
  for must_write in (True, False):
    lines = log.Log(tmp_path, shown, start_step=0, resumed=False, must_write=must_write)
    lines.write(1, "train", {"x": 1.0})
    whole = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, old[1]))  # no file grows beyond it
    try:
      if must_write:
        with pytest.raises(OSError, match="No space left on device: .*metrics.jsonl"):
          lines.write(2, "train", {"x": 2.0})
      else:
        lines.write(2, "train", {"x": 2.0})
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert path.read_bytes() == whole
    lines.write(3, "train", {"x": 3.0})
    assert [line["step"] for line in metrics.read_history(path)] == [1, 3]
    lines.close()
  assert f"warning: step 2: cannot write to {path}: No space left" in out.getvalue()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_workdir_without_locks_is_claimed_and_one_that_fails_is_not(
  tmp_path, monkeypatch, number
):
  def flock(*unused):
    raise OSError(number, "said by the file system")

  monkeypatch.setattr(fcntl, "flock", flock)  # as of a mounted bucket, which is not here
  if number == errno.EIO:
    with pytest.raises(OSError, match="said by the file system"), workdir.claim(tmp_path):
      pass
    return
  with workdir.claim(tmp_path):
    workdir.check_claim(tmp_path)
    (tmp_path / ".lock").write_text("process 7 on another\n")
    with pytest.raises(ValueError, match="has been taken over by process 7 on another"):
      workdir.check_claim(tmp_path)


def test_a_pod_and_its_replacement_are_two_although_their_names_are_one(tmp_path, monkeypatch):
  monkeypatch.setattr(workdir, "flock", lambda file: None)  # a bucket's does not reach other hosts
  monkeypatch.setattr(workdir.os, "getpid", lambda: 1)
  monkeypatch.setattr(workdir.socket, "gethostname", lambda: "train-0-0")
  program = (
    "import os, pathlib, socket, sys\n"
    "os.getpid, socket.gethostname = lambda: 1, lambda: 'train-0-0'\n"
    "from electra_jax.runtime import workdir\n"
    "folder = pathlib.Path(sys.argv[1])\n"
    "workdir.flock = lambda file: None\n"
    "with workdir.claim(folder): print(workdir.own_temporary(folder))\n"
  )
  with workdir.claim(tmp_path):
    command = [sys.executable, "-c", program, str(tmp_path)]
    other = subprocess.run(
      command, capture_output=True, text=True, check=True, timeout=300
    ).stdout.strip()
    assert other != str(workdir.own_temporary(tmp_path))
    with pytest.raises(ValueError, match="has been taken over by process 1 on train-0-0"):
      workdir.check_claim(tmp_path)


def test_of_two_processes_the_slow_one_is_named_by_the_other():
  found = stragglers.StragglerDetector(1.3, batch_size=8, step=0)
  found._names = ["a", "b"]
  # 1.5 times the other, but only 1.2 times the median of both.
  warned = [found.check(np.array([1.5, 1.0]), np.zeros(2))[1] for _ in range(2)]
  assert [len(x) for x in warned] == [0, 1] and warned[1][0].startswith("process 0 (a) is slow")


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
  done, fsync, replace = [], os.fsync, os.replace

  def flush(handle):
    done.append(os.fstat(handle).st_size)
    fsync(handle)

  monkeypatch.setattr(os, "fsync", flush)
  monkeypatch.setattr(os, "replace", lambda *paths: (done.append("named"), replace(*paths)))
  with workdir.replacing(tmp_path / "metrics.jsonl") as temporary:
    temporary.write_text("{}")
  assert done == [2, "named"] and (tmp_path / "metrics.jsonl").read_text() == "{}"


def test_a_folder_of_checkpoints_without_a_whole_configuration_is_no_run(tmp_path):
  (tmp_path / "compiled").mkdir()
  assert workdir.read_config(tmp_path) is None
  (tmp_path / "checkpoints").mkdir()
  with pytest.raises(ValueError, match="holds checkpoints but no config.json"):
    workdir.read_config(tmp_path)
  (tmp_path / "config.json").write_text('{"seed"')
  with pytest.raises(ValueError, match="config.json is not JSON"):
    workdir.read_config(tmp_path)


def test_a_second_ctrl_c_interrupts_what_a_first_one_only_asks_to_end():
  before = signal.getsignal(signal.SIGINT)
  with interrupt.StopSignals() as stop:
    assert stop.requested() is None
    signal.raise_signal(signal.SIGINT)
    assert stop.requested() == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
  assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
  ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, signals.Terminated)]
)
def test_a_signal_ends_a_compilation_at_once_also_one_that_came_before(number, kind):
  with interrupt.StopSignals() as stop:
    with pytest.raises(kind), stop.at_once():
      signal.raise_signal(number)
    with pytest.raises(kind), stop.at_once():
      pytest.fail("it began")


# Computes for minutes without running a handler, as a compiler does.
STUCK = """
import hashlib, signal, sys
from electra_jax.runtime import signals
signal.signal(signal.SIGTERM, lambda *unused: None)
signals.end_after_signals(0.1)
signals.wait_patiently(int(sys.argv[1]))
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


@pytest.mark.parametrize(("patience", "needed"), [(0, 1), (1, 3)])
def test_a_program_ends_after_signals_whose_handlers_cannot_run(patience, needed):
  command = [sys.executable, "-c", STUCK, str(patience)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as program:
    program.stdout.readline()
    for _ in range(needed - 1):
      program.send_signal(signal.SIGTERM)
      with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.3)
    program.send_signal(signal.SIGTERM)
    assert program.wait(10) == signals.STOPPED


def test_only_one_kind_of_error_on_all_processes_is_that_kind():
  alone, both = ValueError("x"), ValueError("x")
  assert processes.only_raised(alone, ValueError) and not processes.only_raised(alone, OSError)
  both.kinds = {"ValueError", "OSError"}  # as `run_on_all` says it where several failed
  assert not processes.only_raised(both, ValueError)
  both.kinds = {"ValueError"}
  assert processes.only_raised(both, ValueError)


@pytest.mark.parametrize("given", [("host:1", 2, -1), ("host:1", 0, 0), ("", 2, 1), ("", 0, 0)])
def test_incomplete_coordinates_of_a_process_are_an_error(given):
  with pytest.raises(ValueError, match="set all of coordinator, num_processes"):
    processes.initialize(*given)


@pytest.mark.parametrize(
  ("error", "told"),
  [
    (trackers.TrackerError("tracker: no route\nto host"), "tracker: no route to host"),
    (RuntimeError("a bug"), "Down: RuntimeError: a bug"),
    (SystemExit(3), "Down: SystemExit: 3"),
    (OSError(28, "No space left on device", "x"), "Down: OSError: [Errno 28] No space left"),
    (ValueError("run\udcff"), "Down: ValueError: run?"),
  ],
)
def test_a_tracker_that_raises_anything_is_left_out_and_the_run_goes_on(tmp_path, error, told):
  class Down:
    def __init__(self, fails_at=2):
      self.fails_at = fails_at
      if fails_at == 0:
        raise error

    def write(self, step, split, values):
      if step == self.fails_at:
        raise error
      seen.append((self.fails_at, step))

    def close(self, failed):
      raise error

  seen, out = [], io.StringIO()
  shown = display.Display(Console(file=out, width=200), display.Activity)
  others = [lambda: Down(0), Down, lambda: Down(99), Down]
  lines = log.Log(tmp_path, shown, start_step=0, resumed=False, others=others)
  for step in (1, 2, 3):
    lines.write(step, "train", {"x": 1.0})
  lines.close()
  assert seen == [(2, 1), (99, 1), (2, 1), (99, 2), (99, 3)]
  assert out.getvalue().count(f"warning: step 2: {told}") == 2
  assert f"warning: start: {told.replace('Down', 'a tracker')}" in out.getvalue()
  assert out.getvalue().count("not used again until the run is resumed\n") == 3
  assert len(metrics.read_history(tmp_path / "metrics.jsonl")) == 3
  # A report reads the warnings from the journal.
  assert sum(told in x["text"] for x in journal.read(tmp_path) if x["event"] == "warning") >= 2


def test_a_hook_of_the_caller_may_end_the_run(tmp_path):
  def hook(step, split, values):
    raise KeyError("enough")

  shown = display.Display(Console(file=io.StringIO()), display.Activity)
  lines = log.Log(tmp_path, shown, start_step=0, resumed=False, hooks=[hook])
  with pytest.raises(KeyError, match="enough"):
    lines.write(1, "train", {"x": 1.0})


@pytest.mark.parametrize("cause", ["a folder", "no matplotlib"])
def test_curves_that_cannot_be_drawn_are_left_out(tmp_path, monkeypatch, cause):
  out, path = io.StringIO(), tmp_path / "curves.png"
  shown = display.Display(Console(file=out, width=300), display.Activity)
  monkeypatch.setattr(curves, "REDRAW_SECS", 0)
  if cause == "a folder":
    path.mkdir()
  else:
    for name in [x for x in sys.modules if x.partition(".")[0] == "matplotlib"]:
      monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)

  def draw(lines):
    curves.draw(path, "run", lines, baselines.Baselines())

  make = functools.partial(curves.Redrawn, draw, thinned.Thinned())
  lines = log.Log(tmp_path, shown, start_step=0, resumed=False, others=[make])
  for step in (1, 2):
    lines.write(step, "heldout", {"x_loss": 1.0})
  lines.close()
  (warning,) = [x for x in out.getvalue().splitlines() if "warning" in x]
  kind = "IsADirectoryError" if cause == "a folder" else "ModuleNotFoundError"
  assert re.match(rf"warning: step 1: Redrawn: {kind}: .*; not used again", warning)
  assert len(metrics.read_history(tmp_path / "metrics.jsonl")) == 2


def test_a_folder_that_is_not_utf_8_is_refused_before_it_is_made(tmp_path):
  folder = tmp_path / os.fsdecode(b"run\xff")
  with pytest.raises(ValueError, match="need a path in UTF-8: rename it"), workdir.claim(folder):
    pass
  assert not folder.exists()
