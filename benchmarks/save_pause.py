"""The pause of the training thread at a checkpoint save, and its parts.

  python benchmarks/save_pause.py --name=before [--json=FILE]

The state is ELECTRA-Base's, weights and both moments of Adam, trained on one short sequence. Each
round has some steps alone, a save with steps until it is on disk, and each part of a save alone.
Prints the median times of
  save       `Checkpoints.save` blocks the thread, with nothing else running
  next step  the first step after the save, beyond a step alone: it cannot overwrite arrays that are
             being written, and takes new memory
  lost       steps from the call of `save` until it is on disk, beyond these steps alone: the
             background work shares cores and memory with them
  on disk    from the call of `save` until it is on disk
  step       a step alone
and of the parts: to_global, host (copying the arrays to the host), crc and finite (two passes over
the arrays, on all cores), orbax (its manager blocks for the same state).
"""

import os
import statistics
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import machine
import numpy as np
import orbax.checkpoint as ocp
from peers import secs
from train_step import Ours, synthetic_batch

from electra_jax.config import files
from electra_jax.runtime import parallel
from electra_jax.runtime.checkpoint import Checkpoints


def parts_of_a_save(state, sharding, manager, number: int) -> dict[str, float]:
  """Returns the seconds of each part of a save, alone."""
  found, arrays = {}, []
  found["to_global"] = secs(lambda: sharding.to_global(state))
  found["host"] = secs(
    lambda: arrays.extend(np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(state))
  )
  with ThreadPoolExecutor() as pool:
    found["crc"] = secs(lambda: list(pool.map(zlib.crc32, arrays)))
    found["finite"] = secs(
      lambda: list(pool.map(lambda x: np.isfinite(x.min()) and np.isfinite(x.max()), arrays))
    )
  items = ocp.args.Composite(state=ocp.args.PyTreeSave(state))
  found["orbax"] = secs(lambda: manager.save(number, args=items))
  manager.wait_until_finished()
  return found


def cost_of_a_save(ours: Ours, checkpoints: Checkpoints, number: int) -> dict[str, float]:
  """Returns the seconds that a save blocks, and of the steps during it."""
  os.sync()  # what the round before it wrote
  alone = [secs(lambda: ours.run(1)) for _ in range(5)]
  step, written = statistics.median(alone), checkpoints.folder / str(number)
  start = time.perf_counter()
  save = secs(lambda: checkpoints.save(number, ours.state, {}))
  after = [secs(lambda: ours.run(1))]
  while not written.exists():
    after.append(secs(lambda: ours.run(1)))
  on_disk = time.perf_counter() - start
  checkpoints.wait()
  return {
    "save": save,
    "next step": after[0] - step,
    "lost": on_disk - len(after) * step,
    "on disk": on_disk,
    "step": step,
  }


def main(name: str, config: str = "configs/base.py", length: int = 64, rounds: int = 5) -> dict:
  parallel.keep_freed_memory()
  ours = Ours(files.load_named(config), synthetic_batch(1, length))
  sharding = parallel.StateSharding(jax.eval_shape(lambda: ours.state), False)
  found = []
  with tempfile.TemporaryDirectory(dir=".") as folder:
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with (
      Checkpoints(folder, keep=1, keep_every_steps=0, to_global=sharding.to_global) as checkpoints,
      ocp.CheckpointManager(Path(folder).absolute() / "by itself", options=options) as manager,
    ):
      for i in range(rounds + 1):
        pause = cost_of_a_save(ours, checkpoints, i)
        found.append(pause | parts_of_a_save(ours.state, sharding, manager, i))
  found = found[1:]  # the first one compiles and opens things
  megabytes = sum(x.nbytes for x in jax.tree.leaves(ours.state)) / 1e6
  results = {
    "megabytes": round(megabytes, 1),
    "median_secs": {part: statistics.median(x[part] for x in found) for part in found[0]},
    "rounds_secs": found,
  }
  return {name: results}


if __name__ == "__main__":
  machine.start(main)
