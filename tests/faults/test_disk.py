"""Disks that are full, read-only, or damaged."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
import zlib

import harness
import pytest
from harness import STEPS, flip, largest

pytestmark = pytest.mark.faults


def fill(folder) -> None:
  """Leaves no byte free."""
  with (folder / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
    while file.write(b"\0" * (1 << 16)):
      pass


def fill_when(folder, condition) -> None:
  """Fills a disk, from a thread, as soon as the condition holds."""

  def work():
    while not condition():
      pass
    fill(folder)

  threading.Thread(target=work, daemon=True).start()


@pytest.mark.parametrize(
  "while_saving",
  [
    pytest.param(False, id="before a save", marks=pytest.mark.nightly),
    pytest.param(True, id="during a save"),
  ],
)
def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(data, alone, disk, while_saving):
  workdir = disk / "run"
  run = harness.Run(data, workdir, STEPS, log__trackers="", log__every_steps=6)
  run.when(lambda: harness.newest(workdir) >= 5)
  left = harness.checkpoints(workdir)
  if while_saving:
    saving = harness.saves(workdir)
    fill_when(disk, saving)
  else:
    fill(disk)
  error = run.error()
  assert "space" in error and str(disk) in error, error
  # Again on a full disk, since the failed save gave back what it had written: what cannot be
  # claimed or written to is named too.
  fill(disk)
  error = harness.Run(data, workdir, STEPS, log="again").error()
  assert "No space left on device: " in error and str(workdir) in error, error
  harness.check_readable(workdir)
  kept = harness.checkpoints(workdir)
  assert kept and kept[-1] >= left[-1]  # saves may have ended before the disk was full
  (disk / "filler").unlink()
  harness.Run(data, workdir, STEPS, log__trackers="", log__every_steps=6).finish()
  assert harness.saved(workdir, STEPS) == harness.saved(alone, STEPS)


def test_a_failed_background_save_is_an_error_at_the_next_save(data, alone, disk):
  fields = {"checkpoint__every_steps": 15, "eval__every_steps": 0, "log__every_steps": 22}
  workdir = disk / "run"
  (disk / "most").write_bytes(b"\0" * (36 << 20))  # so that the rest is full at once
  saving = harness.saves(workdir)
  head = harness.program(harness.PACED)
  run = harness.Run(data, workdir, STEPS, head=head, log__trackers="", **fields)
  fill_when(disk, saving)
  run.when((disk / "filler").exists)
  time.sleep(1.5)
  (disk / "filler").unlink()  # before the next save, and any line
  (disk / "most").unlink()
  error = run.error()
  assert "could not write a checkpoint" in error and "no earlier checkpoint" in error, error
  assert harness.last_line(workdir) == 22 and not harness.checkpoints(workdir)
  harness.Run(data, workdir, STEPS, log__trackers="", **fields).finish()
  assert harness.saved(workdir, STEPS) == harness.saved(alone, STEPS)


def test_a_run_continues_over_a_full_disk_with_on_error_continue(data, alone, disk):
  workdir = disk / "run"
  run = harness.Run(data, workdir, STEPS, checkpoint__on_error="continue").until(6)
  fill(disk)
  run.when(lambda: "training continues" in run.output and "cannot write to" in run.output)
  (disk / "filler").unlink()
  run.finish()
  harness.check_readable(workdir)
  assert harness.saved(workdir, STEPS) == harness.saved(alone, STEPS)
  ours, theirs = harness.lines(workdir), harness.lines(alone)
  assert all(line in theirs for line in ours)  # some are missing, none is half there


@pytest.mark.parametrize(
  ("on_error", "room_again"),
  [
    pytest.param("stop", False, id="stop, full"),
    pytest.param("stop", True, id="stop, with room again", marks=pytest.mark.nightly),
    pytest.param("continue", False, id="continue, full", marks=pytest.mark.nightly),
    pytest.param("continue", True, id="continue, with room again", marks=pytest.mark.nightly),
  ],
)
def test_two_processes_over_a_disk_that_fills_up_in_a_save_end_with_a_line(
  data, two_alone, disk, on_error, room_again
):
  """Where one cannot finish a save that the other waits for, neither hangs.

  With room again they may go on, if no folder is missing that one waits for.
  """
  workdir = disk / "run"
  fields = {"checkpoint__on_error": on_error, "log__trackers": ""}
  head = harness.program(harness.PACED if room_again else "")
  runs = harness.pair(data, workdir, STEPS, head=head, **fields)
  runs[0].when(lambda: harness.newest(workdir) >= 5)
  left, saving = harness.checkpoints(workdir), harness.saves(workdir)
  if room_again:  # the rest is full at once, before the save has ended
    (disk / "most").write_bytes(b"\0" * (shutil.disk_usage(disk).free - (4 << 20)))
  fill_when(disk, saving)
  if room_again:  # at the next save, 1.5 s later
    runs[0].when((disk / "filler").exists)
    time.sleep(1)
    (disk / "filler").unlink()
    (disk / "most").unlink()
  if room_again and on_error == "continue" and not runs[0].wait(60):
    assert not runs[1].wait(60)
  else:
    assert "space" in runs[0].error()
    assert runs[1].wait(60) in (1, 134, -signal.SIGABRT)
    assert set(harness.checkpoints(workdir)) >= set(left[-1:])
  harness.check_readable(workdir)
  (disk / "filler").unlink(missing_ok=True)
  harness.finish(harness.pair(data, workdir, STEPS, **fields))
  assert harness.saved(workdir, STEPS) == harness.saved(two_alone, STEPS)


def test_two_processes_go_on_over_a_full_disk(data, disk):
  workdir = disk / "run"
  fields = {"checkpoint__on_error": "continue", "checkpoint__every_steps": 15}
  runs = harness.pair(data, workdir, STEPS, head=harness.program(harness.PACED), **fields)
  runs[0].until(5)  # no save is under way
  fill(disk)
  runs[0].when(lambda: "training continues" in runs[0].output)
  (disk / "filler").unlink()
  harness.finish(runs)
  harness.check_readable(workdir)
  assert harness.newest(workdir) == STEPS


def test_a_run_stopped_over_a_full_disk_does_not_report_a_save(data, disk):
  workdir = disk / "run"
  run = harness.Run(data, workdir, 10_000, checkpoint__on_error="continue")
  run.when(lambda: harness.newest(workdir) >= 5)
  fill(disk)
  run.when(lambda: "training continues" in run.output)
  fill(disk)  # what a save that failed halfway gave back
  left = harness.newest(workdir)
  run.send(signal.SIGTERM)
  error = run.error()
  assert "space" in error and f"the checkpoint of step {left} is intact" in error, error
  harness.check_readable(workdir)


def test_a_workdir_that_becomes_read_only_is_a_clear_line(data, disk):
  workdir = disk / "run"
  harness.Run(data, workdir, 6, log__trackers="").finish()
  before = {p: p.read_bytes() for p in sorted(workdir.rglob("*")) if p.is_file()}
  subprocess.run(["mount", "-o", "remount,ro", disk], check=True, timeout=300)
  error = harness.Run(data, workdir, 6).error()
  assert "Read-only file system" in error and str(disk) in error, error
  assert {p: p.read_bytes() for p in sorted(workdir.rglob("*")) if p.is_file()} == before


def test_a_log_that_cannot_be_written_is_a_clear_line(data, alone, workdir):
  harness.Run(data, workdir, 6).finish()
  history = workdir / "metrics.jsonl"
  history.rename(workdir / "kept")
  history.mkdir()
  error = harness.Run(data, workdir, STEPS, allow_config_change="train.steps").error()
  assert str(history) in error and "directory" in error, error
  assert harness.newest(workdir) == 6
  harness.check_readable(workdir)


def test_where_all_checkpoints_are_damaged_a_fallback_starts_anew(data, alone, tmp_path):
  workdir = shutil.copytree(alone, tmp_path / "run")
  for step in harness.checkpoints(workdir):
    flip(largest(workdir / "checkpoints" / str(step)))
  output = harness.Run(data, workdir, STEPS, checkpoint__fallback="true").finish()
  assert output.count("is damaged") == 2 and "resuming" not in output
  assert harness.outcome(workdir, STEPS) == harness.outcome(alone, STEPS)


def test_every_flipped_bit_of_a_checkpoint_is_found_or_harmless(data, alone, tmp_path):
  """In one process, file by file: what is restored is what was saved, or is refused."""
  import jax
  import numpy as np

  from electra_jax.core.params import named
  from electra_jax.runtime.checkpoint import Checkpoints, DamagedError

  folder, device = alone / "checkpoints" / str(STEPS), jax.devices()[0]
  expected = {name: facts["crc32"] for name, facts in harness.saved(alone, STEPS).items()}
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      np.shape(x), np.asarray(x).dtype, sharding=jax.sharding.SingleDeviceSharding(device)
    ),
    harness.tree(alone, STEPS),
  )

  def is_refused(workdir) -> bool:
    checkpoints = Checkpoints(workdir, keep=2, keep_every_steps=0)
    try:
      restored = named(checkpoints.restore(STEPS, shapes)[0])
    except DamagedError:
      return True
    finally:
      checkpoints.close()
    sums = {k: zlib.crc32(np.ascontiguousarray(x)) for k, x in restored.items()}
    assert sums == expected, workdir
    return False

  files = [p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file()]
  found = []
  for i, name in enumerate([None, *files]):  # and one that is whole
    copy = shutil.copytree(folder, tmp_path / str(i) / "checkpoints" / str(STEPS))
    if name:
      flip(copy / name) if (copy / name).stat().st_size else (copy / name).write_bytes(b"x")
    if is_refused(tmp_path / str(i)):
      found.append(str(name))
  assert "None" not in found and len(found) < len(files), found
  assert str(largest(folder).relative_to(folder)) in found and "meta/metadata" in found


SHARD = "train-00000-of-00001.bin"


def swap(folder) -> None:
  """Puts another shard of the same size in a shard's place: the same records in another order."""
  content = (folder / SHARD).read_bytes()
  half = len(content) // 2
  (folder / SHARD).write_bytes(content[half:] + content[:half])


@pytest.mark.parametrize(
  ("damage", "always"),
  [
    (lambda folder: flip(folder / SHARD), False),
    (lambda folder: os.truncate(folder / SHARD, 5000), True),
    (swap, False),
    (lambda folder: shutil.copy(next(folder.glob("heldout*")), folder / SHARD), True),
  ],
  ids=["bit-flipped", "shortened", "another's of its size", "another's"],
)
def test_a_damaged_shard_is_found(data, tmp_path, workdir, damage, always):
  copy = shutil.copytree(data, tmp_path / "data")
  damage(copy / "data")
  error = harness.Run(copy, workdir, 2, "--verify").error()
  assert f"{copy / 'data' / SHARD} " in error, error
  if always:
    assert f"{copy / 'data' / SHARD} has " in harness.Run(copy, workdir, 2).error()
