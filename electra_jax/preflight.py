"""Compiles the real training step for accelerators that are not here, and says what it costs there.

  python -m electra_jax.preflight --config=configs/large.py --topology=v5e:16x16[,v4:2x2x4,...]
  python -m electra_jax.preflight --config=configs/large.py --topology=here

A slice of TPUs needs no TPU, only its compiler (the extra `tpu`). What the compiler knows is exact:
memory, and bytes that are added up over the chips. Times are bounds: products at the peak of the
data sheet, memory and links at their full rate. With `here` the devices are those of this machine.
"""

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from electra_jax import config as configs
from electra_jax import flops, train, translate
from electra_jax.batch import Batch
from electra_jax.flops import chips
from electra_jax.flops.__main__ import spec_of

HERE = "here"
_SIZE = re.compile(r"([\d.]+)([KMG])\b")
_ALL_REDUCE = re.compile(r"= (.*?) all-reduce(?:-start)?\(")
_SHAPE = re.compile(r"(f32|bf16|f16|s32|u32|f64|s8|u8|pred)\[([\d,]*)\]")
_BYTES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1}


@dataclasses.dataclass(frozen=True)
class Flight:
  """What a step needs and takes on one kind of device; bytes and FLOPs are of one device.

  Fields:
    devices, chips: how many there are.
    accumulation: microbatches that a device splits its share of the batch into.
    fits: whether the step has room; where it has not, only `memory` is known and what at least is
      `used`.
    memory: of the device.
    used: of it, by the step.
    parameters, optimizer, temporaries: what that is, mostly; temporaries hold the activations.
    reduced: added up over the devices in a step.
    flops: of matrix products in a step.
    secs: of a step at least.
    mfu: of the peak at most.
  """

  topology: str
  devices: int
  chips: int
  accumulation: int
  fits: bool
  memory: float
  used: float
  parameters: float = 0.0
  optimizer: float = 0.0
  temporaries: float = 0.0
  reduced: float = 0.0
  flops: float = 0.0
  secs: float = 0.0
  mfu: float = 0.0


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a step is compiled for; rates are of one device.

  Fields:
    chips: how many chips the devices are.
    memory, memory_rate: bytes and bytes/s; infinite where they are not known.
    peak: FLOP/s.
    reduce_secs: bytes -> seconds in which the devices add up as many, at least.
    unknown: what is not known of it, in words.
  """

  devices: tuple
  chips: int
  memory: float
  memory_rate: float
  peak: float
  reduce_secs: Callable[[float], float]
  unknown: str = ""


def tpu_slice(topology: str) -> Place:
  """Returns a slice of TPUs as its compiler sees it.

  Raises:
    ValueError: there is no such slice, or no compiler for it.
  """
  from jax.experimental import topologies

  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # this is no TPU machine: nobody would answer
  chip, axes = chips.parse(topology)
  count = math.prod(axes)
  small = {"chips_per_host_bounds": (1, 1, 1)} if count == 1 else {}
  try:
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **small)
  except (ImportError, RuntimeError) as error:
    reason = str(error).strip().splitlines()[0]
    hint = "" if "INVALID_ARGUMENT" in reason else "; its compiler is the extra electra_jax[tpu]"
    raise ValueError(f"topology {topology}: {reason}{hint}") from None
  cores = len(found.devices) / count  # the compiler sees the two cores of a v4 chip one by one
  return Place(
    tuple(found.devices),
    count,
    chip.memory / cores,
    chip.memory_rate / cores,
    flops.PEAK_FLOPS[chip.kind] / cores,
    functools.partial(chips.all_reduce_secs, chip, axes),
  )


def here() -> Place:
  """Returns this machine's devices; what they do not tell of themselves is unknown."""
  devices = jax.devices()
  peak, source = flops.peak_flops(devices[0])
  limit = (devices[0].memory_stats() or {}).get("bytes_limit", math.inf)
  unknown = ["memory"] if limit == math.inf else []
  unknown += ["the speed of memory", *(["that of the links"] if len(devices) > 1 else [])]
  return Place(
    tuple(devices),
    len(devices),
    limit,
    math.inf,
    peak,
    lambda size: 0.0,
    f"{', '.join(unknown)}; times are of the products alone, peak: {source}",
  )


def compile_step(config: ConfigDict, devices: tuple):
  """Returns the training step of a configuration, compiled for devices, and the state's shapes."""
  D, c = len(devices), config.train
  if c.batch_size % (D * c.accumulation):
    raise ValueError(
      f"batch size {c.batch_size} is not divisible by {D} devices x {c.accumulation} microbatches"
    )
  programs = train.make_programs(
    spec_of(config),
    translate.make_optimizer_config(config),
    c.steps,
    config.seed,
    c.accumulation,
    devices,
  )
  rows, length = (D, c.batch_size // D), config.data.seq_length
  ids = jax.ShapeDtypeStruct((*rows, length), jnp.int32)
  mask = jax.ShapeDtypeStruct((*rows, length), jnp.bool_)
  batch = Batch(ids, ids, mask, jax.ShapeDtypeStruct(rows, jnp.int32))
  return programs.train_step.lower(programs.shapes, batch).compile(), programs.shapes


def reduced_bytes(text: str) -> int:
  """Returns the bytes that one device adds up with the others in a compiled program.

  >>> reduced_bytes("  %x = (f32[2,3]{1,0}, bf16[4]{0}) all-reduce(%a, %b), channel_id=1")
  32
  """
  total = 0
  for line in text.splitlines():
    found = _ALL_REDUCE.search(line)
    for kind, shape in _SHAPE.findall(found[1]) if found else ():
      size = _BYTES[kind]
      for n in filter(None, shape.split(",")):
        size *= int(n)
      total += size
  return total


def refused_size(message: str) -> float:
  """Returns the bytes that the compiler says are needed where they are too many.

  >>> refused_size("required for HLO temporaries (20.50G) exceeds available HBM (15.75G).") / 2**30
  20.5
  """
  found = _SIZE.search(message)  # the first is what is needed, the second what there is
  return float(found[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[found[2]] if found else math.inf


def fly(config: ConfigDict, name: str, place: Place) -> Flight:
  """Returns what a step of a configuration needs at a place."""
  known = {
    "topology": name,
    "devices": len(place.devices),
    "chips": place.chips,
    "accumulation": config.train.accumulation,
    "memory": place.memory,
  }
  try:
    compiled, shapes = compile_step(config, place.devices)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return Flight(**known, fits=False, used=refused_size(str(error)))
  m = compiled.memory_analysis()
  moved = m.argument_size_in_bytes + m.output_size_in_bytes
  used = moved - m.alias_size_in_bytes + m.temp_size_in_bytes + m.generated_code_size_in_bytes
  work = flops.step_flops(spec_of(config), config.train.batch_size, config.data.seq_length)
  work /= len(place.devices)
  reduced = reduced_bytes(compiled.as_text())
  # State is read and written once; what is temporary is written and read once.
  secs = max(work / place.peak, (moved + 2 * m.temp_size_in_bytes) / place.memory_rate)
  secs += place.reduce_secs(reduced)
  return Flight(
    **known,
    fits=used <= place.memory,
    used=used,
    parameters=_size(shapes.params),
    optimizer=_size(shapes.opt_state),
    temporaries=m.temp_size_in_bytes,
    reduced=reduced,
    flops=work,
    secs=secs,
    mfu=work / place.peak / secs,
  )


def _size(tree) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def fit(config: ConfigDict, name: str, place: Place) -> list[Flight]:
  """Returns the configuration's flight and, where it does not fit, those of more microbatches."""
  flights = [fly(config, name, place)]
  while not flights[-1].fits:
    more = 2 * config.train.accumulation
    if config.train.batch_size % (len(place.devices) * more):
      break
    config = config.copy_and_resolve_references()
    config.train.accumulation = more
    flights.append(fly(config, name, place))
  return flights


def table(config: ConfigDict, flights: list[Flight]) -> Table:
  """Returns flights as a table, a column each."""
  c = config.train
  found = Table(
    title=f"{config.objective.name}, {c.batch_size:,} x {config.data.seq_length} tokens,"
    f" {c.steps:,} steps",
    caption="bytes are the compiler's; times are bounds from below, MFU and sequences/s from above",
  )
  found.add_column("of one device" if any(f.devices > 1 for f in flights) else "")
  for f in flights:
    found.add_column(f.topology, justify="right", no_wrap=True)
  hours = [f.secs * c.steps / 3600 for f in flights]
  rows = {
    "microbatches": [f"{f.accumulation}" for f in flights],
    "memory, GiB": ["?" if f.memory == math.inf else _gib(f.memory) for f in flights],
    "used": [_gib(f.used) + ("" if f.fits else ", too much") for f in flights],
    "  parameters": [_gib(f.parameters) for f in flights],
    "  optimizer": [_gib(f.optimizer) for f in flights],
    "  activations, gradients": [_gib(f.temporaries) for f in flights],
    "added up over devices, GiB a step": [_gib(f.reduced) for f in flights],
    "TFLOP a step": [f"{f.flops / 1e12:.3g}" for f in flights],
    "ms a step": [f"{1000 * f.secs:.3g}" for f in flights],
    "sequences/s, all devices": [
      f"{c.batch_size / f.secs:,.0f}" if f.secs else "" for f in flights
    ],
    "MFU, %": [f"{100 * f.mfu:.0f}" for f in flights],
    "hours": [f"{h:,.3g}" for h in hours],
    "chip-hours": [f"{h * f.chips:,.4g}" for h, f in zip(hours, flights, strict=True)],
  }
  for place, (title, cells) in enumerate(rows.items()):
    known = (cell if f.fits or place < 3 else "" for cell, f in zip(cells, flights, strict=True))
    found.add_row(title, *known)
  return found


def _gib(size: float) -> str:
  return f"{size / 2**30:.2f}"


def for_tpu(config: ConfigDict) -> ConfigDict:
  """Returns the configuration with what `auto` means on a TPU."""
  config = config.copy_and_resolve_references()
  for name, choice in (("dtype", "bfloat16"), ("attention", "xla")):
    if config.model[name] == "auto":
      config.model[name] = choice
  return config


def main(argv: list[str]) -> int:
  """Runs from the command line."""
  del argv
  args = flags.FLAGS
  if args.config is None or not args.topology:
    raise flags.Error("--config=FILE and --topology=v5e:16x16 are needed")
  console = Console(highlight=False, soft_wrap=True)
  config, flights = args.config, []
  if args.topology == [HERE]:
    place = here()
    flights += fit(config, HERE, place)
    console.print(f"not known: {place.unknown}")
  else:
    jax.config.update("jax_platforms", "cpu")  # the devices are described, not here
    config = for_tpu(config)
    for topology in args.topology:
      flights += fit(config, topology, tpu_slice(topology))
  console.print(table(config, flights))
  if args.json:
    lines = [json.dumps(dataclasses.asdict(f)) for f in flights]
    Path(args.json).write_text("".join(f"{line}\n" for line in lines))
  return 0


def define_flags() -> None:
  """Defines the command line."""
  configs.define_config_flag()
  flags.DEFINE_list("topology", None, "slices, as v5e:16x16,v4:2x2x4; or here")
  flags.DEFINE_string("json", None, "file for the same numbers, a line a flight")


if __name__ == "__main__":
  define_flags()
  configs.run(main)
