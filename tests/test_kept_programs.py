"""What one start compiled, another reads: from a moved folder, for a run of other steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import speedrun  # noqa: E402

TRAIN = """
import collections, sys
import jax
from conftest import make_tiny_config
from electra_jax.pretrain import train

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **facts: events.update([event]))
shards, steps, out = sys.argv[1:]
config = make_tiny_config(shards)
config.train.steps = int(steps)
config.optimizer.schedule, config.optimizer.decay_frac = "wsd", 0.5
train.train(config, out)
print(*(events[f"/jax/compilation_cache/cache_{kind}"] for kind in ("hits", "misses")))
"""


@pytest.mark.long
def test_a_second_start_with_the_folder_taken_along_compiles_nothing(tiny_shards, tmp_path):
  def hits_and_misses(cache: Path, steps: int) -> tuple[int, int]:
    environment = os.environ | {
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "JAX_NUM_CPU_DEVICES": "1",
      **speedrun.KEPT,
    }
    command = [sys.executable, "-c", TRAIN, tiny_shards, str(steps), tmp_path / f"{steps}"]
    done = subprocess.run(
      command,
      env=environment,
      cwd=Path(__file__).parent,
      capture_output=True,
      text=True,
      timeout=300,
    )
    assert done.returncode == 0, done.stderr
    hits, misses = map(int, done.stdout.splitlines()[-1].split())
    return hits, misses

  first, taken = tmp_path / "here" / "compiled", tmp_path / "elsewhere" / "kept"
  assert hits_and_misses(first, 12)[1] >= 2  # the step and the evaluation
  taken.parent.mkdir()
  first.rename(taken)
  hits, misses = hits_and_misses(taken, 6)
  assert hits >= 2 and misses == 0


def test_programs_that_another_jax_or_device_left_are_named(tmp_path):
  folder = tmp_path / "compiled"
  first = speedrun.check_cache(folder, "1 x cpu")
  assert first == "compiled: 0 programs are compiled" == speedrun.check_cache(folder, "1 x cpu")
  said = speedrun.check_cache(folder, "1 x NVIDIA H200")
  assert "on 1 x cpu'" in said and "1 x NVIDIA H200' everything compiles anew" in said
  (folder / "made_for.txt").write_bytes(b"\xff\x00\n{")  # cut off, or of an earlier version
  assert "everything compiles anew" in speedrun.check_cache(folder, "1 x cpu")
