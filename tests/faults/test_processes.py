"""Several processes of one run, of which one is stopped, killed or slow."""

import contextlib
import os
import re
import shutil
import signal
import threading
import time

import harness
import numpy as np
import pytest
from harness import STEPS, flip, largest

from electra_jax.monitor import metrics

pytestmark = pytest.mark.faults
PACED = harness.program(harness.PACED)


@pytest.mark.parametrize(
  "both",
  [pytest.param(True, id="both", marks=pytest.mark.nightly), pytest.param(False, id="one of two")],
)
def test_after_a_signal_two_processes_save_the_same_step(data, two_alone, workdir, both):
  runs = harness.pair(data, workdir, STEPS, head=PACED)
  runs[0].until(7)
  for run in runs if both else runs[1:]:
    run.send(signal.SIGTERM)
  started = time.monotonic()
  assert [run.wait(30) for run in runs] == [harness.STOPPED] * 2
  assert time.monotonic() - started < 30
  stopped = harness.newest(workdir)
  assert 7 <= stopped == harness.last_line(workdir) < STEPS
  harness.check_readable(workdir)
  first, second = harness.finish(harness.pair(data, workdir, STEPS))
  assert f"resuming from step {stopped}" in first and "step" not in second
  assert harness.outcome(workdir, STEPS) == harness.outcome(two_alone, STEPS)


# Runs the program with a pause of three seconds after a save has begun: JAX passes a signal on
# within one.
SAVING = """
import time
from electra_jax.runtime.checkpoint import Checkpoints

save = Checkpoints.save

def saved(*args):
  save(*args)
  time.sleep(3)

Checkpoints.save = saved
"""


def test_a_signal_in_a_save_stops_two_processes(data, workdir):
  runs = harness.pair(data, workdir, STEPS, head=harness.program(SAVING))
  runs[0].when(harness.saves(workdir))
  for run in runs:
    run.send(signal.SIGTERM)
  assert [run.wait(60) for run in runs] == [harness.STOPPED] * 2
  assert harness.newest(workdir) < STEPS


# Runs the program with evaluations of ten seconds.
SLOW_EVALUATION = harness.PACED.replace("train_step", "eval_step").replace("0.3", "0.6")


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_signal_in_an_evaluation_ends_the_run_which_then_repeats_it(
  data, tmp_path, workdir, count
):
  alone = tmp_path / "alone"
  fields = {"eval__batch_size": 2, "eval__every_steps": 10}
  harness.finish(harness.pair(data, alone, 20, count, **fields))
  runs = harness.pair(data, workdir, 20, count, head=harness.program(SLOW_EVALUATION), **fields)
  runs[0].until(10)
  runs[-1].send(signal.SIGTERM)
  assert [run.wait(30) for run in runs] == [harness.STOPPED] * count
  assert harness.newest(workdir) == 10
  assert harness.lines(workdir)[-1]["split"] == "train"
  harness.finish(harness.pair(data, workdir, 20, count, **fields))
  assert harness.outcome(workdir, 20) == harness.outcome(alone, 20)


@pytest.mark.parametrize(
  ("killed", "starting"), [(0, False), pytest.param(1, False, marks=pytest.mark.nightly), (1, True)]
)
def test_where_one_of_two_dies_the_other_ends_with_a_message(
  data, two_alone, workdir, killed, starting
):
  if starting:  # again, from a checkpoint
    shutil.copytree(two_alone, workdir)
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
  runs = harness.pair(data, workdir, STEPS, hosts__timeout_secs=20)
  # What has been described is restored next.
  runs[0].when(
    lambda: "changed from base" in runs[0].output if starting else runs[0].has_reached(7)
  )
  runs[killed].kill()
  started = time.monotonic()
  other = runs[1 - killed]
  assert other.wait(60) in (134, -signal.SIGABRT)
  assert time.monotonic() - started < 10
  # Ours, or that of JAX's runtime where its thread was faster.
  assert re.search("error: lost another process of this run|another task died", other.output)
  harness.check_readable(workdir)
  first, _ = harness.finish(harness.pair(data, workdir, STEPS))
  assert "resuming from step" in first
  assert harness.outcome(workdir, STEPS) == harness.outcome(two_alone, STEPS)


def params(workdir, step: int) -> dict[str, np.ndarray]:
  found = harness.arrays(workdir, step)
  return {name: x for name, x in found.items() if name.startswith("params/")}


# The default rate is reached after ten thousand steps; this one moves weights by 1e-3 a step.
EXACT = {
  **harness.ELECTRA,
  "model__dropout": 0,
  "model__attention_dropout": 0,
  "optimizer__name": "adamw",
  "optimizer__learning_rate": 1e-3,
  "optimizer__eps": 1e-3,
}


@pytest.mark.parametrize(
  "counts",
  [(1, 2, 1), *(pytest.param(x, marks=pytest.mark.nightly) for x in ((1, 2, 4, 1), (4,)))],
  ids=str,
)
def test_one_two_and_four_processes_train_the_same_parameters(data, tmp_path, counts):
  """To 1e-6 after 20 steps, also when their number changes on the way.

  test_multiprocess has two from the start.

  Adam's eps is 1e-3 here: with 1e-6 a gradient that is nothing but rounding, as of the key's bias,
  moves its weight by up to the learning rate.
  """
  one_run, several = tmp_path / "one", tmp_path / "several"
  harness.finish(harness.pair(data, one_run, 20, 1, **EXACT))
  for i, count in enumerate(counts, 1):
    kept = {**EXACT, "checkpoint__keep": 9}
    runs = harness.pair(data, several, 20, count, head=PACED, **kept)
    if i < len(counts):
      runs[0].until(5 * i - 2)
      runs[-1].send(signal.SIGTERM)
      assert {run.wait(60) for run in runs} == {harness.STOPPED}
    else:
      assert ("resuming from step" in harness.finish(runs)[0]) == (i > 1)
  one, found = params(one_run, 20), params(several, 20)
  print(f"{max(np.abs(found[key] - one[key]).max() for key in one):.1e} apart")
  for key, value in found.items():
    np.testing.assert_allclose(value, one[key], rtol=0, atol=1e-6, err_msg=key)
  for ours, theirs in zip(harness.lines(several), harness.lines(one_run), strict=True):
    # Which tokens were drawn is the same in every step: their shares are equal to the last bit.
    for key in ("step", "split", "replaced"):
      assert ours[key] == theirs[key], key
  early = params(several, harness.checkpoints(several)[0])
  # Every array has moved, by much more than they differ.
  assert min(np.abs(one[key] - early[key]).max() for key in one) > 1e-5


def test_two_processes_go_back_together_from_nan(data, tmp_path):
  fields = {"health__on_nan": "rollback", **EXACT}
  for count in (1, 2):
    workdir = tmp_path / str(count)
    harness.finish(harness.pair(data, workdir, 20, count, head=harness.poison(12), **fields))
    assert harness.meta(workdir, 20)["skipped"] == [12]
    harness.check_readable(workdir)
  one, two = (params(tmp_path / str(count), 20) for count in (1, 2))
  for name, value in two.items():  # as far apart as without the fault, see above
    np.testing.assert_allclose(value, one[name], rtol=0, atol=1e-6, err_msg=name)


@contextlib.contextmanager
def slowed(run: harness.Run):
  """Lets a process work a fifth of the time, as one whose core others want too."""
  over = threading.Event()

  def work():
    while not over.is_set():
      run.send(signal.SIGSTOP)
      time.sleep(0.08)
      run.send(signal.SIGCONT)
      over.wait(0.02)

  thread = threading.Thread(target=work)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()


def test_the_process_that_holds_the_others_up_is_named(data, workdir):
  runs = harness.pair(data, workdir, 10_000, log__every_steps=4, log__trackers="")
  runs[0].until(4)
  slow = re.compile(r"warning: process 1 \(.+\) is slow: it needs \d")
  assert not slow.search(runs[0].output)
  with slowed(runs[1]):
    runs[0].when(lambda: bool(slow.search(runs[0].output)), 120)
  for run in runs:
    run.kill()
  history = metrics.read_history(workdir / "metrics.jsonl")
  line = [x for x in history if x["split"] == "train"][-1]  # an evaluation may follow it
  assert {"slowest_host", "fastest_host_step_ms", "slowest_host_step_ms"} <= set(line)


@pytest.mark.parametrize("sharded", [False, True], ids=["flipped", "sharded, truncated"])
def test_a_damaged_checkpoint_is_set_aside_by_two_processes_too(data, two_alone, tmp_path, sharded):
  workdir, whole, fields = tmp_path / "run", two_alone, {"optimizer__sharded": sharded}
  if sharded:
    whole = tmp_path / "whole"
    harness.finish(harness.pair(data, whole, STEPS, **fields))
  shutil.copytree(whole, workdir)
  newest = workdir / "checkpoints" / str(STEPS)
  before = workdir / "checkpoints" / str(harness.checkpoints(workdir)[-2])
  if sharded:  # what only process 1 reads
    os.truncate(largest(newest / "state" / "ocdbt.process_1"), 1000)
  else:
    flip(largest(newest)), flip(largest(before))  # two in a row
  for run in harness.pair(data, workdir, STEPS, **fields):
    error = run.error()
    assert f"checkpoints/{STEPS} is damaged" in error
  runs = harness.pair(data, workdir, STEPS, checkpoint__fallback="true", **fields)
  first, _ = harness.finish(runs)
  for path in [newest] if sharded else [newest, before]:
    assert f"moved to {workdir / 'damaged' / path.name}" in first
  assert harness.outcome(workdir, STEPS) == harness.outcome(whole, STEPS)


def odd_code(data, workdir) -> dict:
  """Another version of the package, for the second process."""
  copy = workdir / "package"
  shutil.copytree(harness.ROOT / "electra_jax", copy / "electra_jax")
  shutil.copytree(harness.ROOT / "configs", copy / "configs")
  with (copy / "electra_jax" / "pretrain" / "loop.py").open("a") as file:
    file.write("# changed\n")
  first = """
import sys
sys.path.insert(0, sys.argv.pop(1))
for name in [x for x in sys.modules if x.partition(".")[0] == "electra_jax"]:  # of `preload`
  del sys.modules[name]
"""
  return {"head": harness.program(first, str(copy))}


def odd_data(data, workdir) -> dict:
  """The same text, built elsewhere: the manifest names its path."""
  (workdir / "elsewhere").mkdir()
  harness.build(workdir / "elsewhere")
  return {"data": workdir / "elsewhere"}


def odd_folder(data, workdir) -> dict:
  """A workdir of its own, as where a disk is not shared."""
  return {"workdir": workdir / "mine"}


def odd_checkpoints(data, workdir) -> dict:
  """A view of the workdir that lacks the newest checkpoint, as of a cache of a shared disk."""
  shutil.copytree(workdir / "run", workdir / "mine")
  shutil.rmtree(workdir / "mine" / "checkpoints" / str(STEPS))
  return {"workdir": workdir / "mine"}


def odd_weights(data, workdir) -> dict:
  """Weights that differ in their last bits, as of another network at the path of init_from."""
  first = """
import jax
from electra_jax.pretrain import run

make = run.make_train_fns

def programs(*args):
  made = make(*args)
  return made._replace(
    init_params=lambda: jax.tree.map(lambda x: x * (1 + 1e-6), made.init_params())
  )

run.make_train_fns = programs
"""
  return {"head": harness.program(first)}


@pytest.mark.parametrize(
  ("odd", "what", "of"),
  [
    (odd_code, "code", "SHA-256 "),
    (odd_data, "data", "manifest "),
    (odd_folder, "workdir", "a folder that is not shared"),
    (odd_checkpoints, "newest checkpoint", f"step {STEPS - STEPS % harness.EVERY}"),
    (odd_weights, "initial weights", "CRC-32 "),
  ],
  ids=["code", "data", "folder", "checkpoints", "weights"],
)
def test_a_process_that_has_something_else_is_named_by_all(
  data, two_alone, tmp_path, odd, what, of
):
  if odd is odd_checkpoints:
    shutil.copytree(two_alone, tmp_path / "run")
  runs = harness.pair(data, tmp_path / "run", STEPS, odd=odd(data, tmp_path))
  errors = [run.error() for run in runs]
  start = f"error: {what}: process 1 of 2 differs from the others; process "
  assert errors[0].startswith(f"{start}0 has ") and errors[1].startswith(f"{start}1 has {of}")


def test_two_processes_share_the_optimizers_state(data, two_alone, workdir):
  """ZeRO-1 over processes: each has a part, the checkpoint has it all, and one process reads it."""
  runs = harness.pair(data, workdir, STEPS, head=PACED, optimizer__sharded="true")
  runs[0].until(7)
  runs[1].send(signal.SIGTERM)
  assert [run.wait(60) for run in runs] == [harness.STOPPED] * 2
  harness.check_readable(workdir)
  harness.Run(data, workdir, STEPS).finish()
  ours, theirs = (harness.saved(folder, STEPS) for folder in (workdir, two_alone))
  assert {k: x["shape"] for k, x in ours.items()} == {k: x["shape"] for k, x in theirs.items()}
  # Until it was stopped. This rate makes a thousandth of the smallest differences ten steps later.
  for ours, theirs in zip(harness.lines(workdir)[:7], harness.lines(two_alone)[:7], strict=True):
    np.testing.assert_allclose(ours["mlm_loss"], theirs["mlm_loss"], 1e-5, err_msg=ours["step"])
