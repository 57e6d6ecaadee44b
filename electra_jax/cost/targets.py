"""Devices to compile a step for: of this machine, or described TPU slices and GPUs.

Compilers accept descriptions in place of devices: libtpu knows TPU slices, and XLA's CUDA compiler
reads a GPU's data sheet. Neither needs a driver or CUDA libraries.
"""

import dataclasses
import math
import os

import jax

from electra_jax.core import flops
from electra_jax.cost import chips, gpus

HERE = "here"
# JAX allocates this share of a GPU's memory ("GPU memory allocation" in its documentation).
SHARE_VARIABLES, SHARE = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"), 0.75


@dataclasses.dataclass(frozen=True)
class Target:
  """The devices to compile a step for; sizes and rates are per device, infinite if unknown."""

  devices: tuple
  chips: int
  memory: float  # bytes that a program can use
  memory_rate: float  # bytes/s
  links: tuple[tuple[int, float], ...]  # per level: number of members, bytes/s that each sends
  peak: float  # FLOP/s
  note: str = ""  # about these values


def find(topology: str) -> Target:
  """Returns the devices of a topology: "here", a TPU slice or GPUs.

  Raises ValueError if the topology is unknown or JAX has no compiler for it.
  """
  if topology == HERE:
    return local()
  sheet, axes = chips.parse(topology)
  memory, note = sheet.memory, ""
  if isinstance(sheet, gpus.Gpu):
    share = _memory_share()
    memory = share * sheet.memory
    note = f"{topology}: programs get {share:g} of {sheet.memory / 2**30:.1f} GiB"
    note += f" ({SHARE_VARIABLES[0]})"
    options = {"target_config": gpus.describe(sheet), "topology": "1x{}x{}".format(*axes)}
    devices = _described(topology, "cuda", options)
  else:
    # libtpu is only used as a compiler, without the metadata server of TPU VMs or a lock on a TPU.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options = {"topology_name": topology}
    if sheet.cores == 2:  # one device in training; by default the compiler splits a v4
      options["chip_config_name"] = "megacore"
    if math.prod(axes) == 1:
      options["chips_per_host_bounds"] = (1, 1, 1)
    devices = _described(topology, "tpu", options)
  peak = flops.PEAK_FLOPS[sheet.kind]
  return Target(devices, math.prod(axes), memory, sheet.memory_rate, sheet.links(axes), peak, note)


_EXTRAS = {
  "tpu": "pip install 'electra_jax[tpu]' for the TPU compiler",
  "cuda": "pip install 'electra_jax[gpu-compile]' for the GPU compiler",
}


def _described(topology: str, platform: str, options: dict) -> tuple:
  """Returns a topology's devices as described by their compiler."""
  from jax.experimental import topologies

  try:
    return tuple(topologies.get_topology_desc(platform=platform, **options).devices)
  except (ImportError, RuntimeError) as error:  # no such compiler, or an error in it
    reason = str(error).strip().splitlines()[0]
    known = "INVALID_ARGUMENT" in reason  # an error of the compiler, so it is installed
    hint = "" if known else f": {_EXTRAS[platform]}"
    raise ValueError(f"topology {topology}: {reason}{hint}") from None


def _memory_share() -> float:
  text = next((os.environ[name] for name in SHARE_VARIABLES if os.environ.get(name)), str(SHARE))
  try:
    share = float(text)
  except ValueError:
    share = math.nan
  if not 0 < share <= 1:
    raise ValueError(f"{SHARE_VARIABLES[0]} must be a number above 0 and up to 1, got {text!r}")
  return share


def local() -> Target:
  """Returns this machine's devices, with their reported memory and peak."""
  devices = jax.devices()
  peak, source = flops.peak_flops(devices[0])
  limit = (devices[0].memory_stats() or {}).get("bytes_limit", math.inf)
  unknown = ["memory size"] if limit == math.inf else []
  unknown += ["memory bandwidth", *(["link bandwidth"] if len(devices) > 1 else [])]
  return Target(
    tuple(devices),
    len(devices),
    limit,
    math.inf,
    ((len(devices), math.inf),),
    peak,
    f"unknown: {', '.join(unknown)}; times count only matrix products, peak: {source}",
  )
