"""The peak memory of a training step: from the preflight, and measured on the device.

  python benchmarks/peak_memory.py --config=configs/small.py [--set FIELD=VALUE ...] [--json OUT]

here        the compiler's number for this device, from `preflight --topology=here`
described   the number for this kind of GPU's data sheet, from preflight without a GPU
real        the device's peak after three steps of the compiled program

Compilation tunes kernels on the device, which takes memory, too. If it takes more than the steps,
`real` is that peak, and `tuning_was_more` is set.
"""

import jax
import machine
import numpy as np
from train_step import change, synthetic_batch

from electra_jax.config import specs
from electra_jax.cost import gpus, preflight
from electra_jax.pretrain.run import Horizon, make_train_fns, spec_without_data
from electra_jax.runtime import parallel


def described(config: str, fields: list[str], devices: tuple[jax.Device, ...]) -> float:
  """Returns the bytes of a step from preflight, for GPUs of this kind.

  Raises:
    ValueError: preflight failed.
  """
  kind = devices[0].device_kind
  named = [name for name, gpu in gpus.GPUS.items() if gpu.kind.lower() in kind.lower()]
  if not named:
    raise ValueError(f"preflight has no data sheet of {kind}")
  return machine.preflight(config, f"{named[0]}x{len(devices)}", fields)[0]["used"]


def in_use(device: jax.Device) -> int | None:
  """Returns the peak bytes in use, None if the device does not report them."""
  return (device.memory_stats() or {}).get("peak_bytes_in_use")


def main(config: str, set: list[str] = ()) -> dict:
  devices, could_not = tuple(jax.devices()), []
  changed = change(config, set)
  changed.model.attention = "xla"  # as preflight computes it for a GPU that is elsewhere
  compiled, _ = preflight.compile_step(changed, devices)
  found = {"here": preflight.used_bytes(compiled)}
  tuning = in_use(devices[0])
  spec = spec_without_data(changed)
  optimizer, c = specs.make_optimizer_config(changed), changed.train
  # The compiled programs; their last argument is where the run ends.
  fns = make_train_fns(spec, optimizer, c.steps, changed.seed, c.accumulation, devices)
  end = parallel.replicate(Horizon(np.int32(c.steps), np.int32(optimizer.decay_steps)))
  state = fns.init_state(parallel.replicate(fns.init_params()))
  batch = parallel.shard(synthetic_batch(c.batch_size, changed.data.seq_length))
  for _ in range(3):
    leaves, _ = compiled(state, batch, end)
    state = jax.tree.unflatten(jax.tree.structure(state), leaves)
  jax.block_until_ready(state)
  if (real := in_use(devices[0])) is None:
    could_not.append(f"real: a {devices[0].platform} does not say what is in use")
  else:
    found |= {"real": real, "tuning_was_more": real == tuning}
  try:
    found["described"] = described(config, set, devices)
  except ValueError as error:
    could_not.append(f"described: {error}")
  sizes = f"{config}, {c.batch_size} x {changed.data.seq_length}"
  sizes += f", {spec.discriminator.compute.dtype}"
  return {"device": devices[0].device_kind, "sizes": sizes, **found, "could_not": could_not}


if __name__ == "__main__":
  machine.start(main)
