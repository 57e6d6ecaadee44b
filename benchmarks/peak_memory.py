"""The peak of a training step's memory: by the preflight, and on the device.

  python benchmarks/peak_memory.py --config=configs/small.py [--set FIELD=VALUE ...] [--json OUT]

here        the compiler's number for this machine's device, as `preflight --topology=here` gives it
described   the same from the data sheet of such a GPU, as preflight gives it without one
real        the most that the device had in use, after three steps of the program that was compiled

Compiling tunes kernels on the device, which takes memory too; where that was more than the steps
took, `real` is that, and `tuning_was_more` says so.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import machine
import numpy as np
from train_step import change, synthetic_batch

from electra_jax.config import files, specs
from electra_jax.cost import gpus, preflight
from electra_jax.pretrain.run import Horizon, make_train_fns, spec_without_data
from electra_jax.runtime import parallel

ROOT = Path(__file__).resolve().parent.parent


def described(config: str, fields: list[str], devices: tuple[jax.Device, ...]) -> float:
  """Returns the bytes that preflight says a step needs on such GPUs.

  Raises:
    ValueError: preflight cannot say.
  """
  kind = devices[0].device_kind
  named = [name for name, gpu in gpus.GPUS.items() if gpu.kind.lower() in kind.lower()]
  if not named:
    raise ValueError(f"preflight has no data sheet of {kind}")
  with tempfile.TemporaryDirectory() as folder:
    lines = Path(folder) / "costs.jsonl"
    command = [sys.executable, "-m", "electra_jax.preflight", f"--config={config}"]
    command += [f"--topology={named[0]}x{len(devices)}", f"--json={lines}"]
    command += [f"--config.{pair}" for pair in fields]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    if done.returncode:
      raise ValueError((done.stderr.strip().splitlines() or ["preflight failed"])[-1])
    return json.loads(lines.read_text().splitlines()[0])["used"]


def in_use(device: jax.Device) -> int | None:
  """Returns the most bytes that were in use; None where the device does not say."""
  return (device.memory_stats() or {}).get("peak_bytes_in_use")


def main() -> None:
  """Compiles, runs, prints, writes JSON."""
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--config", required=True)
  p.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="of the configuration")
  p.add_argument("--json", help="write the result here")
  args = p.parse_args()
  devices, could_not = tuple(jax.devices()), []
  config = change(files.load_named(args.config), args.set)
  config.model.attention = "xla"  # as preflight computes it for a GPU that is elsewhere
  compiled, _ = preflight.compile_step(config, devices)
  found = {"here": preflight.used_bytes(compiled)}
  tuning = in_use(devices[0])
  spec = spec_without_data(config)
  optimizer, c = specs.make_optimizer_config(config), config.train
  # Those that were compiled, whose last argument is where the run ends.
  fns = make_train_fns(spec, optimizer, c.steps, config.seed, c.accumulation, devices)
  end = parallel.replicate(Horizon(np.int32(c.steps), np.int32(optimizer.decay_steps)))
  state = fns.init_state(parallel.replicate(fns.init_params()))
  batch = parallel.shard(synthetic_batch(config.train.batch_size, config.data.seq_length))
  for _ in range(3):
    leaves, _ = compiled(state, batch, end)
    state = jax.tree.unflatten(jax.tree.structure(state), leaves)
  jax.block_until_ready(state)
  if (real := in_use(devices[0])) is None:
    could_not.append(f"real: a {devices[0].platform} does not say what is in use")
  else:
    found |= {"real": real, "tuning_was_more": real == tuning}
  try:
    found["described"] = described(args.config, args.set, devices)
  except ValueError as error:
    could_not.append(f"described: {error}")
  sizes = f"{args.config}, {config.train.batch_size} x {config.data.seq_length}"
  sizes += f", {spec.discriminator.compute.dtype}"
  result = {"device": devices[0].device_kind, "sizes": sizes, **found}
  print(json.dumps(result | {"could_not": could_not}, indent=1))
  machine.save(args.json, result | {"could_not": could_not})


if __name__ == "__main__":
  main()
