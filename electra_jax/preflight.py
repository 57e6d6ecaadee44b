"""Estimates the cost of a training step by compiling it for accelerators, present or not.

  python -m electra_jax.preflight --config=configs/large.py --topology=v5e:16x16[,v4:2x2x4,...]
  python -m electra_jax.preflight --config=configs/large.py --topology=here

A TPU slice needs only the TPU compiler (the extra `tpu`). Memory and communicated bytes come from
the compiler and are exact. Times are lower bounds: products at the data sheet's peak, memory and
links at their full rate. `here` means the devices of this machine.
"""

import dataclasses
import json
import math
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from electra_jax.config import cli, specs, validate
from electra_jax.core import flops
from electra_jax.core.batch import Batch
from electra_jax.core.flops import chips
from electra_jax.core.networks import PretrainSpec
from electra_jax.core.params import split_axis
from electra_jax.interop import sources
from electra_jax.pretrain.run import make_train_fns

HERE = "here"
_SIZE = re.compile(r"([\d.]+)([KMG])\b")
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_SHAPE = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")  # f32[2,3]; pred is one byte


@dataclasses.dataclass(frozen=True)
class StepCost:
  """The memory, communication and time of a step; bytes and FLOPs are per device.

  If the step does not fit, only `memory` and a lower bound of `used` are known. The sizes of the
  three collectives are the unsharded bytes of the arrays handled per step. None means unknown.
  """

  topology: str
  devices: int
  chips: int
  accumulation: int  # microbatches of a device's share of the batch
  fits: bool | None
  memory: float | None  # bytes of the device
  used: float  # bytes of it, mostly parameters, optimizer state and temporaries
  parameters: float = 0.0
  optimizer: float = 0.0
  optimizer_sharded: float = 0.0  # bytes of the optimizer with optimizer.sharded
  temporaries: float = 0.0  # bytes, with the activations
  all_reduce_bytes: float = 0.0
  reduce_scatter_bytes: float = 0.0
  all_gather_bytes: float = 0.0
  sent_bytes: float = 0.0  # by the device for these collectives, in a ring
  flops: float = 0.0  # of matrix products
  product_secs: float = 0.0  # least time of the products
  memory_secs: float | None = None  # least time of the memory traffic
  link_secs: float | None = None  # least time of `sent_bytes`
  secs: float = 0.0  # lower bound: max(product_secs, memory_secs) + link_secs
  mfu: float = 0.0  # upper bound


@dataclasses.dataclass(frozen=True)
class Target:
  """The devices to compile a step for; sizes and rates are per device, infinite if unknown."""

  devices: tuple
  chips: int
  memory: float  # bytes
  memory_rate: float  # bytes/s
  link_rate: float  # bytes/s
  peak: float  # FLOP/s
  unknown: str = ""  # description of the unknown values


def tpu_slice(topology: str) -> Target:
  """Returns a TPU slice as seen by its compiler.

  Raises:
    ValueError: there is no such slice, or no compiler for it.
  """
  from jax.experimental import topologies

  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server: this is no TPU machine
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nor is there a TPU to lock
  chip, axes = chips.parse(topology)
  count = math.prod(axes)
  # Training uses the two cores of a chip as one device; by default the compiler sees two in a v4.
  options = {"chip_config_name": "megacore"} if chip.cores == 2 else {}
  if count == 1:
    options["chips_per_host_bounds"] = (1, 1, 1)
  try:
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
  except (ImportError, RuntimeError) as error:
    reason = str(error).strip().splitlines()[0]
    hint = "" if "INVALID_ARGUMENT" in reason else "; the TPU compiler comes with electra_jax[tpu]"
    raise ValueError(f"topology {topology}: {reason}{hint}") from None
  return Target(
    tuple(found.devices),
    count,
    chip.memory,
    chip.memory_rate,
    chips.link_rate(chip, axes),
    flops.PEAK_FLOPS[chip.kind],
  )


def local_target() -> Target:
  """Returns this machine's devices, with the memory and peak that they report."""
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
    math.inf,
    peak,
    f"{', '.join(unknown)}; times count matrix products only, peak: {source}",
  )


def _spec(config: ConfigDict) -> PretrainSpec:
  return specs.spec_without_data(config, sources.frozen_generator(config))


def compile_step(config: ConfigDict, devices: tuple):
  """Returns the training step compiled for devices, and the state's shapes."""
  validate.check_fields(config)
  D, c, spec = len(devices), config.train, _spec(config)
  validate.check_devices(config, D)
  validate.check_attention(config.model, devices[0].platform)
  programs = make_train_fns(
    spec, specs.make_optimizer_config(config), c.steps, config.seed, c.accumulation, devices
  )
  rows, length = (D, c.batch_size // D), config.data.seq_length
  ids = jax.ShapeDtypeStruct((*rows, length), jnp.int32)
  padding_mask = jax.ShapeDtypeStruct((*rows, length), jnp.bool_)
  documents = ids if config.data.examples == "packed" else None
  batch = Batch(ids, ids, padding_mask, jax.ShapeDtypeStruct(rows, jnp.int32), documents)
  return programs.train_step.lower(
    programs.sharding.step_shapes(), batch
  ).compile(), programs.shapes


def collective_bytes(text: str, devices: int) -> dict[str, int]:
  """Returns the unsharded bytes that each kind of collective handles in a compiled program.

  Every collective spans all devices. A reduce-scatter returns one device's part; an asynchronous
  "-start" returns both the part and the whole. A collective that the compiler splits into several
  operations appears in each, with the same chain_id.

  >>> collective_bytes("  %x = (f32[2,3]{1,0}, bf16[4]{0}) all-reduce(%a, %b), channel_id=1", 2)
  {'all-reduce': 32, 'reduce-scatter': 0, 'all-gather': 0}
  >>> collective_bytes("  %x = f32[2,3]{1,0} reduce-scatter(%a), dimensions={0}", 8)
  {'all-reduce': 0, 'reduce-scatter': 192, 'all-gather': 0}
  >>> collective_bytes("  %x = (f32[2]{0}, f32[8]{0}) all-gather-start(%a), dimensions={0}", 4)
  {'all-reduce': 0, 'reduce-scatter': 0, 'all-gather': 32}
  """
  totals, chains = dict.fromkeys(COLLECTIVES, 0), set()
  for line in text.splitlines():
    if not (found := _COLLECTIVE.search(line)):
      continue
    result, kind, starts = found.groups()
    if chain := _CHAIN.search(line):
      if (kind, chain[1]) in chains:
        continue
      chains.add((kind, chain[1]))
    size = 0
    for bits, shape in _SHAPE.findall(result):
      size += int(bits or 8) * math.prod(int(n) for n in shape.split(",") if n) // 8
    if kind != "all-reduce" and starts:
      size = size * devices // (devices + 1)
    elif kind == "reduce-scatter":
      size *= devices
    totals[kind] += size
  return totals


def ring_bytes(collectives: dict[str, int], devices: int) -> float:
  """Returns the bytes that each of n devices sends in a ring: (n - 1) / n, doubled for all-reduce.

  >>> ring_bytes({"all-reduce": 800, "reduce-scatter": 0, "all-gather": 80}, 8)
  1470.0
  """
  times = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}
  return sum(times[k] * size for k, size in collectives.items()) * (devices - 1) / devices


def refused_size(message: str) -> float:
  """Returns the bytes needed, from the compiler's out-of-memory message.

  >>> refused_size("required for HLO temporaries (20.50G) exceeds available HBM (15.75G).") / 2**30
  20.5
  """
  found = _SIZE.search(message)  # the first size is needed, the second available
  return float(found[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[found[2]] if found else math.inf


def estimate_step(config: ConfigDict, name: str, target: Target) -> StepCost:
  """Compiles a step of a configuration for a target and returns its cost."""
  D = len(target.devices)
  known = {
    "topology": name,
    "devices": D,
    "chips": target.chips,
    "accumulation": config.train.accumulation,
    "memory": _known(target.memory),
  }
  try:
    compiled, shapes = compile_step(config, target.devices)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return StepCost(**known, fits=False, used=refused_size(str(error)))
  m = compiled.memory_analysis()
  moved = m.argument_size_in_bytes + m.output_size_in_bytes
  used = moved - m.alias_size_in_bytes + m.temp_size_in_bytes + m.generated_code_size_in_bytes
  work = flops.step_flops(_spec(config), config.train.batch_size, config.data.seq_length) / D
  collectives = collective_bytes(compiled.as_text(), D)
  sent_bytes = ring_bytes(collectives, D)
  # State is read once and written once, and so are temporaries.
  memory_secs = (moved + 2 * m.temp_size_in_bytes) / target.memory_rate
  # Communication overlaps with nothing: it needs the whole gradient, and the optimizer its sum.
  secs = max(work / target.peak, memory_secs) + sent_bytes / target.link_rate
  return StepCost(
    **known,
    fits=None if target.memory == math.inf else used <= target.memory,
    used=used,
    parameters=_size(shapes.params),
    optimizer=_size(shapes.opt_state, D if config.optimizer.sharded else 1),
    optimizer_sharded=_size(shapes.opt_state, D),
    temporaries=m.temp_size_in_bytes,
    all_reduce_bytes=collectives["all-reduce"],
    reduce_scatter_bytes=collectives["reduce-scatter"],
    all_gather_bytes=collectives["all-gather"],
    sent_bytes=sent_bytes,
    flops=work,
    product_secs=work / target.peak,
    memory_secs=memory_secs if _known(target.memory_rate) else None,
    link_secs=sent_bytes / target.link_rate if _known(target.link_rate) or not sent_bytes else None,
    secs=secs,
    mfu=work / target.peak / secs,
  )


def _known(x: float) -> float | None:
  return None if x == math.inf else x


def _size(tree, devices: int = 1) -> float:
  """Returns the bytes of a tree of arrays on each of the devices that they are sharded over."""
  parts = (
    x.size * x.dtype.itemsize / (1 if split_axis(x.shape, devices) is None else devices)
    for x in jax.tree.leaves(tree)
  )
  return sum(parts)


def more_microbatches(config: ConfigDict, devices: int) -> int | None:
  """Returns the next larger number of microbatches that divides a device's sequences."""
  sequences, now = config.train.batch_size // devices, config.train.accumulation
  return next((n for n in range(now + 1, sequences + 1) if sequences % n == 0), None)


def fit(config: ConfigDict, name: str, target: Target) -> list[StepCost]:
  """Returns the cost of the configuration and, until one fits, of more microbatches."""
  costs = [estimate_step(config, name, target)]
  while costs[-1].fits is False and (more := more_microbatches(config, len(target.devices))):
    config = config.copy_and_resolve_references()
    config.train.accumulation = more
    costs.append(estimate_step(config, name, target))
  return costs


def table(config: ConfigDict, costs: list[StepCost]) -> Table:
  """Returns a table with a column for each cost."""
  c = config.train
  found = Table(
    title=f"{config.objective.name}, {c.batch_size:,} x {config.data.seq_length} tokens,"
    f" {c.steps:,} steps",
    caption="bytes: by the compiler; times: lower bounds; MFU and sequences/s: upper bounds",
  )
  found.add_column("per device" if any(f.devices > 1 for f in costs) else "")
  for f in costs:
    found.add_column(f.topology, justify="right", no_wrap=True)
  for title, cell, always in ROWS:
    found.add_row(title, *("" if f.fits is False and not always else cell(f, c) for f in costs))
  return found


def _gib(size: float | None) -> str:
  if size is None:
    return "?"
  return f"{size / 2**30:.2f}" if size >= 2**30 else f"{size / 2**30:.2g}"


def _ms(secs: float | None) -> str:
  return "?" if secs is None else f"{1000 * secs:.3g}"


def _hours(f: StepCost, steps: int) -> float:
  return f.secs * steps / 3600


_FITS = {True: "fits", False: "does not fit", None: "unknown"}
# Rows of the table: title, cell of (cost, config.train), whether to show it if a step does not fit.
ROWS = (
  ("microbatches", lambda f, c: f"{f.accumulation}", True),
  ("device memory, GiB", lambda f, c: _gib(f.memory), True),
  ("memory used, GiB", lambda f, c: _gib(f.used), True),
  ("fits", lambda f, c: _FITS[f.fits], True),
  ("  parameters", lambda f, c: _gib(f.parameters), False),
  ("  optimizer", lambda f, c: _gib(f.optimizer), False),
  ("  optimizer, if sharded (ZeRO-1)", lambda f, c: _gib(f.optimizer_sharded), False),
  ("  activations, gradients", lambda f, c: _gib(f.temporaries), False),
  ("all-reduce, GiB per step", lambda f, c: _gib(f.all_reduce_bytes), False),
  ("reduce-scatter, GiB per step", lambda f, c: _gib(f.reduce_scatter_bytes), False),
  ("all-gather, GiB per step", lambda f, c: _gib(f.all_gather_bytes), False),
  ("communication, ms per step", lambda f, c: _ms(f.link_secs), False),
  ("TFLOP per step", lambda f, c: f"{f.flops / 1e12:.3g}", False),
  ("compute at peak, ms per step", lambda f, c: _ms(f.product_secs), False),
  ("memory traffic, ms per step", lambda f, c: _ms(f.memory_secs), False),
  ("step, ms", lambda f, c: _ms(f.secs), False),
  ("sequences/s, all devices", lambda f, c: f"{c.batch_size / f.secs:,.0f}", False),
  ("MFU, %", lambda f, c: f"{100 * f.mfu:.0f}", False),
  ("whole run, hours", lambda f, c: f"{_hours(f, c.steps):,.3g}", False),
  ("chip-hours", lambda f, c: f"{_hours(f, c.steps) * f.chips:,.4g}", False),
)


def verdict(costs: list[StepCost]) -> str:
  """Returns a line on whether a step fits, and with how many microbatches, from `fit`'s costs."""
  *tried, last = costs
  refused = ", ".join(str(f.accumulation) for f in (tried if last.fits else costs))
  if last.fits is None:
    return f"{last.topology}: unknown whether it fits; it needs {_gib(last.used)} GiB per device"
  if not last.fits:
    return (
      f"{last.topology}: does not fit with {refused} microbatches; try model.remat=True,"
      " optimizer.sharded=True or more devices"
    )
  fewest = f"; does not fit with {refused}" if tried else ""
  return f"{last.topology}: fits, microbatches: {last.accumulation}{fewest}"


def for_tpu(config: ConfigDict) -> ConfigDict:
  """Returns the configuration with `auto` fields set for a TPU."""
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
  config, found = args.config, []
  if args.topology == [HERE]:
    target = local_target()
    found.append(fit(config, HERE, target))
    console.print(f"unknown: {target.unknown}")
  else:
    jax.config.update("jax_platforms", "cpu")  # the devices are described, not here
    config = for_tpu(config)
    for topology in args.topology:
      found.append(fit(config, topology, tpu_slice(topology)))
  costs = [f for several in found for f in several]
  console.print(table(config, costs))
  for several in found:
    console.print(verdict(several))
  if args.json:
    lines = [json.dumps(dataclasses.asdict(f)) for f in costs]
    Path(args.json).write_text("".join(f"{line}\n" for line in lines))
  return 0


def define_flags() -> None:
  """Defines the command line."""
  cli.define_config_flag()
  flags.DEFINE_list("topology", None, "TPU slices, e.g. v5e:16x16,v4:2x2x4; or here")
  flags.DEFINE_string("json", None, "output file for the same numbers, one JSON line per column")


if __name__ == "__main__":
  define_flags()
  cli.run(main)
