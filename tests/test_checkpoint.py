"""Checkpoints: whole or not at all, on any devices, damage found by name."""

import errno
import glob
import os
import resource
import shutil
import threading
import types
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ROOT, python
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from electra_jax.core import step
from electra_jax.runtime import bucket, checkpoint, checksums, workdir
from electra_jax.runtime.checkpoint import (
  CheckpointError,
  Checkpoints,
  DamagedError,
  named,
  restore_from,
  steps_on_disk,
)


def replicated(devices: int) -> NamedSharding:
  return NamedSharding(Mesh(np.array(jax.devices()[:devices]), "data"), PartitionSpec())


def make_state(devices: int = 1, seed: int = 0, width: int = 64) -> step.TrainState:
  rng = np.random.default_rng(seed)
  params = {"embeddings": {"word": rng.normal(size=(500, width))}, "head": rng.normal(size=width)}
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
  return jax.device_put(step.init_state(params, tx), replicated(devices))


def shapes_of(state, devices: int = 1):
  where = replicated(devices)
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state)


def open_run(folder, **kwargs) -> Checkpoints:
  return Checkpoints(folder, **{"keep": 2, "keep_every_steps": 0, **kwargs})


def save_again(run: Checkpoints) -> None:
  run.save(3, make_state(), {})


def save_all(folder, steps, **kwargs) -> step.TrainState:
  """Saves a state for each step, which is its seed, and returns the last."""
  run = open_run(folder, **kwargs)
  for number in steps:
    state = make_state(seed=number)
    run.save(number, state, {"config": {"seed": 1}})
  run.close()
  return state


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_state_comes_back_bit_for_bit_on_any_number_of_devices(tmp_path):
  state = make_state(devices=1, seed=3)
  run = open_run(tmp_path)
  run.save(1, state, {})
  run.close()
  for previous, devices in ((1, 8), (2, 2)):
    run = open_run(tmp_path)
    restored, _ = run.restore(previous, shapes_of(state, devices))
    assert_same(restored, state)
    assert all(len(x.sharding.device_set) == devices for x in jax.tree.leaves(restored))
    run.save(previous + 1, restored, {})
    run.close()


def test_the_newest_and_the_multiples_are_kept(tmp_path):
  save_all(tmp_path, range(1, 8), keep=2, keep_every_steps=3)
  assert sorted(os.listdir(tmp_path / "checkpoints"), key=int) == ["3", "6", "7"]


def test_what_is_saved_beside_the_state_comes_back_with_the_checksums_of_the_arrays(tmp_path):
  state = save_all(tmp_path, [5])
  _, meta = open_run(tmp_path).restore(5, shapes_of(make_state()))
  assert meta["step"] == 5 and meta["config"] == {"seed": 1}
  assert set(meta["arrays"]) == set(named(make_state()))
  crc32 = zlib.crc32(np.asarray(state.params["embeddings"]["word"]).tobytes())
  expected = {"shape": [500, 64], "dtype": "float32", "crc32": crc32}
  assert meta["arrays"]["params/embeddings/word"] == expected


def train_on(state):
  """Gives the arrays of a state, that may be being written, away and overwrites them."""
  update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  for _ in range(5):
    state = update(state)
  jax.block_until_ready(state)


def test_training_may_go_on_while_a_save_is_written(tmp_path):
  state, run = make_state(width=4096), open_run(tmp_path)
  expected, shapes = jax.device_get(state), shapes_of(state)
  run.save(1, state, {})
  train_on(state)
  run.close()
  assert_same(open_run(tmp_path).restore(1, shapes)[0], expected)


def test_checksums_are_computed_while_training_goes_on(tmp_path, monkeypatch):
  is_overwritten = threading.Event()

  def crc32(data) -> int:
    assert is_overwritten.wait(60), "who called save waits for the checksums"
    return zlib.crc32(data)

  state, run = make_state(), open_run(tmp_path)
  expected, shapes, meta = jax.device_get(state), shapes_of(state), {"window": {"sum": 1}}
  monkeypatch.setattr(checksums, "zlib", types.SimpleNamespace(crc32=crc32))
  run.save(1, state, meta)
  meta["window"]["sum"] += 1
  train_on(state)
  while not glob.glob(f"{tmp_path}/checkpoints/1.*/state*/_METADATA"):
    pass  # the arrays are written
  assert steps_on_disk(tmp_path / "checkpoints") == []
  is_overwritten.set()
  run.close()
  restored, meta = open_run(tmp_path).restore(1, shapes)
  assert_same(restored, expected)
  assert meta["window"] == {"sum": 1}


def test_a_step_of_an_earlier_run_counts_without_a_file_of_its_commit(tmp_path):
  expected, shapes = save_all(tmp_path, [1, 2]), shapes_of(make_state())
  for number in "12":
    (tmp_path / "checkpoints" / number / bucket.COMMITTED).unlink()
  assert steps_on_disk(tmp_path / "checkpoints") == [1, 2]
  with open_run(tmp_path) as run:
    assert run.latest_step() == 2
    assert_same(run.restore(2, shapes)[0], expected)


@pytest.mark.parametrize("told_by", [Checkpoints.wait, Checkpoints.close, save_again])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, told_by):
  run = open_run(tmp_path)
  run.save(1, make_state(), {})
  bad = make_state().replace(params={"x": jnp.array([1.0, jnp.nan]), "y": jnp.array([jnp.inf])})
  message = r"^nothing was saved: params/x and 1 more arrays are not finite$"
  with pytest.raises(CheckpointError, match=message) as told:
    run.save(2, bad, {})
    told_by(run)
  assert not isinstance(told.value, checkpoint.WriteError)  # which a run may go on over
  assert os.listdir(tmp_path / "checkpoints") == ["1"]
  run.reopen()
  run.save(2, make_state(), {})
  run.close()
  assert steps_on_disk(tmp_path / "checkpoints") == [1, 2]


def test_nothing_is_copied_for_a_step_that_is_saved(tmp_path):
  taken = []
  run = open_run(tmp_path, to_global=lambda tree: (taken.append(tree), tree)[1])
  for _ in range(2):
    run.save(1, make_state(), {})
    assert len(taken) == 1
  run.close()


def largest(folder: Path) -> str:
  return max(glob.glob(f"{folder}/state/**/d/*", recursive=True), key=os.path.getsize)


def flip_a_bit(folder: Path) -> None:
  with open(largest(folder), "r+b") as file:
    file.seek(os.path.getsize(file.name) // 2)
    byte = file.read(1)[0]
    file.seek(-1, os.SEEK_CUR)
    file.write(bytes([byte ^ 1]))


DAMAGES = {
  "flipped bit": flip_a_bit,
  "truncated": lambda folder: os.truncate(largest(folder), 100),
  "no data": lambda folder: os.remove(largest(folder)),
  "no tree": lambda folder: os.remove(folder / "state" / "_METADATA"),
  "no state": lambda folder: shutil.rmtree(folder / "state"),
  "no meta": lambda folder: shutil.rmtree(folder / "meta"),
  "cut meta": lambda folder: os.truncate(folder / "meta" / "metadata", 10),
  "empty": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_newest_checkpoint_is_named_and_never_passed_over(tmp_path, damage):
  state = save_all(tmp_path, [1, 2])
  damage(tmp_path / "checkpoints" / "2")
  run = open_run(tmp_path)
  assert run.latest_step() == 2
  with pytest.raises(CheckpointError) as error:
    run.restore(2, shapes_of(state))
  message = str(error.value)
  assert f"{tmp_path}/checkpoints/2 is damaged" in message
  assert message.endswith("delete that folder to resume from step 1") and "\n" not in message
  shutil.rmtree(tmp_path / "checkpoints" / "2")
  run = open_run(tmp_path)
  assert_same(run.restore(run.latest_step(), shapes_of(state))[0], make_state(seed=1))


@pytest.mark.parametrize(
  ("was", "is_now"),
  [("s/head", "s/heae"), ('"shape"', '"shapd"'), ("[500", "[501"), ('"seed": 1', '"seed": 3')],
  ids=["a name", "a key", "a shape", "the configuration"],
)
def test_a_flipped_bit_beside_the_arrays_is_damage(tmp_path, was, is_now):
  state = save_all(tmp_path, [1])
  path = tmp_path / "checkpoints" / "1" / "meta" / "metadata"
  text = path.read_text()
  assert was in text
  path.write_text(text.replace(was, is_now, 1))
  with pytest.raises(DamagedError, match="1 is damaged .*does not match its checksum"):
    open_run(tmp_path).restore(1, shapes_of(state))


def test_what_cannot_be_read_now_is_no_damage(tmp_path):
  state, old = save_all(tmp_path, [1]), resource.getrlimit(resource.RLIMIT_NOFILE)
  run = open_run(tmp_path)
  resource.setrlimit(resource.RLIMIT_NOFILE, (0, old[1]))  # no file can be opened any more
  try:
    with pytest.raises(CheckpointError, match=r"cannot be read now: Too many open files") as found:
      run.restore(1, shapes_of(state))
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, old)
  assert not isinstance(found.value, DamagedError)
  assert_same(run.restore(1, shapes_of(state))[0], state)


@pytest.mark.parametrize("which", ["d", "ocdbt.process_0/d"])
def test_an_error_of_the_file_system_is_no_damage(tmp_path, which):
  state = save_all(tmp_path, [1])
  for path in (tmp_path / "checkpoints" / "1" / "state" / which).iterdir():
    path.unlink()
    path.symlink_to(path)  # ELOOP, which tensorstore reports like EIO
  with pytest.raises(CheckpointError, match="cannot be read now: Too many levels") as found:
    open_run(tmp_path).restore(1, shapes_of(state))
  assert not isinstance(found.value, DamagedError)


@pytest.mark.parametrize(
  "error",
  [
    OSError(errno.EIO, "Input/output error"),
    MemoryError(),
    RuntimeError("can't start new thread"),
    ValueError("UNKNOWN: Failed to open: Input/output error [os_error_code='5']"),
  ],
  ids=repr,
)
def test_only_wrong_content_is_damage(tmp_path, error):
  with pytest.raises(CheckpointError, match="cannot be read now: ") as found:
    with checkpoint._reading(tmp_path, 1):
      raise Exception("Encountered error while reading array") from error
  assert not isinstance(found.value, DamagedError)


def test_a_folder_whose_name_is_not_utf8_is_refused_before_anything_is_written(tmp_path):
  folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xe9t\xe9"))
  with pytest.raises(ValueError, match="is not UTF-8: set PYTHONUTF8=1 if") as found:
    open_run(folder)
  assert "\n" not in str(found.value) and not list(tmp_path.iterdir())
  with pytest.raises(ValueError, match="is not UTF-8"), workdir.new_folder(folder):
    pass


def test_another_dtype_is_no_damage(tmp_path):
  state = save_all(tmp_path, [1])
  wider = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float16), shapes_of(state))
  with pytest.raises(
    CheckpointError, match="does not fit the model: .* has another dtype,"
  ) as found:
    open_run(tmp_path).restore(1, wider)
  assert not isinstance(found.value, DamagedError)
  assert "step has another dtype, int32, in the model float16" in str(found.value)


def test_what_was_set_aside_before_stays(tmp_path):
  for seed in (1, 2):
    run = open_run(tmp_path)
    run.save(5, make_state(seed=seed), {})
    run.close()
    place = run.set_aside(5)
    assert place == tmp_path / "damaged" / ("5" if seed == 1 else "5.1") and place.is_dir()
  assert (tmp_path / "damaged" / "5").is_dir()


def test_a_checkpoint_on_another_disk_is_set_aside_too(tmp_path, monkeypatch):
  def rename(*unused):
    raise OSError(errno.EXDEV, "Invalid cross-device link")

  save_all(tmp_path, [5])
  run = open_run(tmp_path)
  run.close()
  files = sorted(path.name for path in (run.folder / "5").rglob("*"))
  monkeypatch.setattr(os, "rename", rename)  # as where the folder is a link to that disk
  place = run.set_aside(5)
  assert sorted(path.name for path in place.rglob("*")) == files
  assert not (run.folder / "5").exists()


@pytest.mark.parametrize("left", ["2.orbax-checkpoint-tmp", "deleting/0"])
def test_what_a_killed_run_left_is_cleared_away(tmp_path, left):
  save_all(tmp_path, [1])
  folder = tmp_path / "checkpoints"
  shutil.copytree(folder / "1", folder / left)
  run = open_run(tmp_path)
  assert run.latest_step() == 1
  run.save(2, make_state(), {})
  run.close()
  assert sorted(os.listdir(folder)) == ["1", "2"]


def test_what_a_failed_save_still_writes_is_deleted_too(tmp_path, monkeypatch):
  run = open_run(tmp_path)
  unfinished, delete, late = run.folder / "2.orbax-checkpoint-tmp", shutil.rmtree, ["b", "a"]
  (unfinished / "c").mkdir(parents=True)

  def delete_while_a_thread_writes(path, **options):
    delete(path, **options)
    if late:
      (path / late.pop()).mkdir(parents=True)

  monkeypatch.setattr(workdir.shutil, "rmtree", delete_while_a_thread_writes)
  with pytest.raises(CheckpointError, match="could not write a checkpoint"):
    run._guarded(lambda: os.stat(tmp_path / "nothing"))
  assert not unfinished.exists()


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
import jax
from test_checkpoint import CheckpointError, make_state, open_run
run = open_run({folder!r})
run.save(1, make_state(), {{}})
run.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True  # a module would be cut short
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
  run.save(2, make_state(seed=2), {{}})
  run.wait()
except CheckpointError as error:
  print(error)
"""


def test_a_save_that_cannot_be_written_leaves_the_one_before_it(tmp_path):
  # A limit on the size of files fails the writes as a full disk does, without being root.
  program = FULL_DISK.format(tests=str(ROOT / "tests"), folder=str(tmp_path))
  done = python("-c", program)
  assert done.stdout == (
    f"could not write a checkpoint to {tmp_path}/checkpoints (File too large);"
    " the checkpoint of step 1 is intact\n"
  )
  assert os.listdir(tmp_path / "checkpoints") == ["1"]
  assert_same(open_run(tmp_path).restore(1, shapes_of(make_state()))[0], make_state())


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path):
  run = open_run(tmp_path)
  run.save(1, make_state(), {})
  run.wait()
  # Four times the free space, as one number that is repeated: it takes no memory.
  huge = np.broadcast_to(np.float32(0), (shutil.disk_usage(tmp_path).free,))
  with pytest.raises(
    CheckpointError, match=r"MB needed, .* free; the checkpoint of step 1 is intact"
  ):
    run.save(2, {"x": huge}, {})
  run.close()
  assert os.listdir(tmp_path / "checkpoints") == ["1"]


def test_another_runs_parameters_are_taken_without_its_optimizer_if_they_are_whole(tmp_path):
  state = save_all(tmp_path, [1, 2])
  found, step = restore_from(tmp_path, {"params": shapes_of(state.params, 8)})
  params = found["params"]
  assert step == 2
  assert_same(params, state.params)
  assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(params))
  flip_a_bit(tmp_path / "checkpoints" / "2")
  with pytest.raises(DamagedError, match="2 is damaged"):
    restore_from(tmp_path, {"params": shapes_of(state.params)})


def test_parameters_that_do_not_fit_are_listed_by_name(tmp_path):
  save_all(tmp_path, [1])
  other = shapes_of(make_state(width=32)).params
  other["new"] = other.pop("head")
  with pytest.raises(CheckpointError) as error:
    restore_from(tmp_path, {"params": other})
  for part in (
    "params/new is missing",
    "params/head is not in the model",
    "params/embeddings/word is (500, 64), in the model (500, 32)",
  ):
    assert part in str(error.value)
  with pytest.raises(CheckpointError, match="checkpoints has no checkpoint"):
    restore_from(tmp_path / "nowhere", {"params": other})


def test_a_state_of_another_model_is_refused_by_name(tmp_path):
  save_all(tmp_path, [1])
  with pytest.raises(CheckpointError, match=r"does not fit the model: .*params/head is \(64,\)"):
    open_run(tmp_path).restore(1, shapes_of(make_state(width=32)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_kind_of_number_that_is_not_finite_is_saved_or_restored(tmp_path, monkeypatch, bad):
  state = save_all(tmp_path, [1])
  broken = state.replace(params={**state.params, "head": state.params["head"].at[3].set(bad)})
  run = open_run(tmp_path)
  run.save(2, broken, {})
  with pytest.raises(CheckpointError, match="nothing was saved: params/head is not finite"):
    run.wait()
  run = open_run(tmp_path)
  monkeypatch.setattr(checkpoint, "_refuse_not_finite", lambda bad: None)  # as one that had a bug
  run.save(2, broken, {})
  run.wait()
  with pytest.raises(DamagedError, match="2 is damaged .params/head is not finite"):
    run.restore(2, shapes_of(state))
  run.close()


def test_a_checkpoint_under_the_number_of_another_step_is_damage(tmp_path):
  state = save_all(tmp_path, [1, 2])
  (tmp_path / "checkpoints" / "2").rename(tmp_path / "checkpoints" / "7")
  with pytest.raises(DamagedError, match="7 is damaged .the metadata says step 2"):
    open_run(tmp_path).restore(7, shapes_of(state))
