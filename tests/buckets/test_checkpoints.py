"""Checkpoints that orbax writes to gs://: only those that it has committed count."""

import pytest
from etils import epath
from test_checkpoint import assert_same, make_state, open_run, shapes_of

from electra_jax.runtime import checkpoint
from electra_jax.runtime.bucket import COMMITTED
from electra_jax.runtime.checkpoint import steps_on_disk
from electra_jax.runtime.workdir import BUCKET_FILE

pytestmark = pytest.mark.buckets


@pytest.fixture
def run_folder(stores, tmp_path):
  """A run's local folder, whose checkpoints are in a bucket of its own."""
  (tmp_path / BUCKET_FILE).write_text(f"gs://corpus/{tmp_path.name}")
  return tmp_path


def test_a_step_without_its_commit_file_is_not_one(run_folder):
  states, shapes = {s: make_state(seed=s) for s in range(1, 6)}, shapes_of(make_state())
  with open_run(run_folder, keep_every_steps=2) as run:
    for step, state in states.items():
      run.save(step, state, {"number": step})
      run.wait()
    assert steps_on_disk(run.folder) == [2, 4, 5]
    assert run.folder == checkpoint.folder_of(run_folder) and str(run.folder).startswith("gs://")
  assert sorted(p.name for p in run_folder.iterdir()) == [BUCKET_FILE]
  # As a process leaves it that dies in a save.
  (run.folder / "5" / COMMITTED).unlink()
  assert steps_on_disk(run.folder) == [2, 4]
  with open_run(run_folder, keep_every_steps=2) as run:
    assert run.latest_step() == 4
    restored, meta = run.restore(4, shapes)
    assert_same(restored, states[4])
    assert meta["number"] == 4
    run.save(5, restored, {"number": 6})
  assert_same(checkpoint.restore_from(run_folder, shapes)[0], states[4])
  left = {path.name for path in run.folder.glob("*") if not path.name.startswith("_")}
  assert left == {"2", "4", "5"}


def test_a_damaged_step_is_moved_aside(run_folder):
  state = make_state()
  with open_run(run_folder) as run:
    for step in (1, 2):
      run.save(step, state, {})
      run.wait()
    next(epath.Path(run.folder / "2" / "state" / "d").iterdir()).write_bytes(b"damaged")
    with pytest.raises(checkpoint.DamagedError, match="gs://corpus/.*/2 is damaged"):
      run.restore(2, shapes_of(state))
    place = run.set_aside(2)
    run.reopen()
    assert run.latest_step() == 1 and (place / "meta" / "metadata").exists()
    assert str(place) == f"gs://corpus/{run_folder.name}/damaged/2"
