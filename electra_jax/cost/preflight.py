"""The cost of a training step and an evaluation, from the compiler; see electra_jax.preflight."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Column, Table

from electra_jax.config import specs, validate
from electra_jax.core import flops, objectives
from electra_jax.core.batch import Batch
from electra_jax.core.params import split_axis
from electra_jax.cost import targets, traffic
from electra_jax.cost.targets import HERE, Target
from electra_jax.monitor.display import doing
from electra_jax.pretrain.run import TrainFns, eval_batch_size, make_train_fns, spec_without_data
from electra_jax.runtime import jax_flags
from electra_jax.runtime.workdir import check_new

_SIZE = re.compile(r"([\d.]+)([KMG])\b")
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(")
_CHAIN = re.compile(r'chain_id="(\d+)"')


@dataclasses.dataclass(frozen=True)
class StepCost:
  """The memory, communication and time of a step; bytes and FLOPs are per device.

  If the step does not fit, only `memory` and a lower bound of `used` are known. The bytes of the
  three collectives are of their unsharded arrays per step. None means unknown.
  """

  topology: str
  devices: int
  chips: int
  accumulation: int  # microbatches of a device's share of the batch
  fits: bool | None
  memory: float | None  # bytes of the device
  used: float  # bytes, mostly parameters, optimizer state and temporaries
  parameters: float = 0.0
  optimizer: float = 0.0
  optimizer_sharded: float = 0.0  # bytes with optimizer.sharded
  temporaries: float = 0.0  # bytes, including activations
  all_reduce_bytes: float = 0.0
  reduce_scatter_bytes: float = 0.0
  all_gather_bytes: float = 0.0
  sent_bytes: float = 0.0  # for these collectives, in a ring of all devices
  flops: float = 0.0  # of matrix products
  product_secs: float = 0.0  # least time of the products
  memory_secs: float | None = None  # least time of the memory traffic
  link_secs: float | None = None  # least time of the collectives
  secs: float = 0.0  # lower bound: max(product_secs, memory_secs) + link_secs
  kernels: int | None = None  # per step; this and the next two only for GPUs
  traffic_bytes: float | None = None  # read and written by the kernels
  estimated_secs: float | None = None  # not a bound: `traffic.estimate_secs` + link_secs
  mfu: float = 0.0  # upper bound
  evaluation_used: float | None = None  # as `used`, in evaluations; None: not compiled
  evaluation_fits: bool | None = None


def check(config: ConfigDict, devices: tuple) -> None:
  """Raises ValueError if devices cannot train a configuration, apart from memory."""
  validate.check_fields(config)
  validate.check_devices(config, len(devices))
  validate.check_attention(config.model, devices[0].platform)


def compile_step(config: ConfigDict, devices: tuple):
  """Returns the training step compiled for devices, and the shapes of the state."""
  check(config, devices)
  fns, batch = _make_fns(config, devices), _batch(config, len(devices), config.train.batch_size)
  return fns.train_step.lower(fns.sharding.step_shapes(), batch).compile(), fns.shapes


def compile_evaluation(config: ConfigDict, devices: tuple) -> jax.stages.Compiled:
  """Returns the evaluation compiled for devices, with a full batch of held-out documents."""
  fns = _make_fns(config, devices)
  size = eval_batch_size(config, len(devices), config.eval.max_examples)
  return fns.eval_step.lower(fns.shapes.params, _batch(config, len(devices), size)).compile()


def _make_fns(config: ConfigDict, devices: tuple) -> TrainFns:
  spec, c = spec_without_data(config), config.train
  optimizer = specs.make_optimizer_config(config)
  return make_train_fns(spec, optimizer, c.steps, config.seed, c.accumulation, devices)


def _batch(config: ConfigDict, devices: int, batch_size: int) -> Batch:
  """Returns the shapes of a batch."""
  rows = jax.ShapeDtypeStruct((devices, batch_size // devices), jnp.int32)
  ids = jax.ShapeDtypeStruct((*rows.shape, config.data.seq_length), jnp.int32)
  padding_mask = jax.ShapeDtypeStruct(ids.shape, jnp.bool_)
  return Batch(ids, ids, padding_mask, rows, ids if config.data.examples == "packed" else None)


def used_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the compiler's estimate of a program's bytes on each device."""
  m = compiled.memory_analysis()
  outside = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
  return outside + m.temp_size_in_bytes + m.generated_code_size_in_bytes


def collective_bytes(text: str, devices: int) -> dict[str, int]:
  """Returns the unsharded bytes of each kind of collective in a compiled program.

  Every collective spans all devices. A reduce-scatter returns one device's part. An asynchronous
  "-start" returns a part and the whole or, in newer versions on GPUs, (operands), results. The
  operations into which the compiler splits a collective share a chain_id.
  """
  totals, chains = dict.fromkeys(COLLECTIVES, 0), set()
  for line in text.splitlines():
    found, chain = _COLLECTIVE.search(line), _CHAIN.search(line)
    if not found or (chain and (found[2], chain[1]) in chains):
      continue
    result, kind, starts = found.groups()
    if chain:
      chains.add((kind, chain[1]))
    nested = result.startswith("((")
    arrays = traffic.arrays_of(result.partition("), ")[2] if nested else result)
    size = sum(size for _, size in arrays)
    if kind != "all-reduce" and starts and not nested:
      size = size * devices // (devices + 1)
    elif kind == "reduce-scatter":
      size *= devices
    totals[kind] += size
  return totals


def ring_bytes(collectives: dict[str, int], devices: int) -> float:
  """Returns the bytes that each of n devices sends in a ring: (n - 1) / n, twice for all-reduce."""
  return (sum(collectives.values()) + collectives["all-reduce"]) * (devices - 1) / devices


def least_link_secs(
  collectives: dict[str, int], links: tuple[tuple[int, float], ...]
) -> float | None:
  """Returns the least time of collectives: simultaneous rings on all levels, of which the slowest.

  The GPUs of a host form one ring, and hosts, as one member each, another. Returns None if data is
  sent over links of unknown rate.
  """
  sent = [(ring_bytes(collectives, members), rate) for members, rate in links]
  if any(size and rate == math.inf for size, rate in sent):
    return None
  return max(size / rate for size, rate in sent)


def refused_size(message: str) -> float:
  """Parses the bytes needed from the compiler's out-of-memory message.

  >>> refused_size("required for HLO temporaries (20.50G) exceeds available HBM (15.75G).") / 2**30
  20.5
  """
  found = _SIZE.search(message)  # the first size is needed, the second is available
  return float(found[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[found[2]] if found else math.inf


def estimate_step(config: ConfigDict, name: str, target: Target) -> StepCost:
  """Compiles a step for a target and returns its cost, with fits=False if it is too large.

  Raises:
    ValueError: XLA's GPU compiler is incomplete.
    jax.errors.JaxRuntimeError: the step does not compile for another reason.
  """
  D, t = len(target.devices), config.train
  known, memory = (name, D, target.chips, t.accumulation), _known(target.memory)
  found = _unless_refused(compile_step, config, target, name)
  if isinstance(found, float):
    return StepCost(*known, fits=False, memory=memory, used=found)
  compiled, shapes = found
  used, m, text = used_bytes(compiled), compiled.memory_analysis(), compiled.as_text()
  moved = m.argument_size_in_bytes + m.output_size_in_bytes
  work = flops.step_flops(spec_without_data(config), t.batch_size, config.data.seq_length) / D
  collectives = collective_bytes(text, D)
  link_secs = least_link_secs(collectives, target.links)
  # State and temporaries are read once and written once.
  memory_secs = (moved + 2 * m.temp_size_in_bytes) / target.memory_rate
  # Communication does not overlap: it needs the whole gradient, and the optimizer needs its sum.
  secs = max(work / target.peak, memory_secs) + (link_secs or 0)
  of_gpu = {}
  if target.devices[0].platform == "gpu":
    found = traffic.kernels(text)
    estimate = traffic.estimate_secs(found, target.memory_rate, target.peak) + (link_secs or 0)
    of_gpu = {
      "kernels": traffic.launches(found),
      "traffic_bytes": traffic.moved_bytes(found),
      "estimated_secs": estimate if _known(target.memory_rate) else None,
    }
  return StepCost(
    *known,
    **of_gpu,
    fits=_fits(used, target),
    memory=memory,
    used=used,
    parameters=_size(shapes.params),
    optimizer=_size(shapes.opt_state, D if config.optimizer.sharded else 1),
    optimizer_sharded=_size(shapes.opt_state, D),
    temporaries=m.temp_size_in_bytes,
    all_reduce_bytes=collectives["all-reduce"],
    reduce_scatter_bytes=collectives["reduce-scatter"],
    all_gather_bytes=collectives["all-gather"],
    sent_bytes=ring_bytes(collectives, D),
    flops=work,
    product_secs=work / target.peak,
    memory_secs=memory_secs if _known(target.memory_rate) else None,
    link_secs=link_secs,
    secs=secs,
    mfu=work / target.peak / secs,
  )


def with_evaluation(cost: StepCost, config: ConfigDict, target: Target) -> StepCost:
  """Adds the memory of evaluations, if any, during which the optimizer state stays in memory."""
  if not config.data.holdout_frac:
    return cost
  found = _unless_refused(compile_evaluation, config, target, cost.topology)
  used = cost.optimizer + (found if isinstance(found, float) else used_bytes(found))
  return dataclasses.replace(cost, evaluation_used=used, evaluation_fits=_fits(used, target))


def _unless_refused(compile_program: Callable, config: ConfigDict, target: Target, name: str):
  """Returns the compiled program, or the bytes that it needs if they exceed the memory."""
  try:
    return compile_program(config, target.devices)
  except jax.errors.JaxRuntimeError as error:
    if any(word in str(error) for word in ("ptxas", "libdevice not found")):
      raise ValueError(
        f"{name}: XLA found no ptxas or libdevice: pip install 'electra_jax[gpu-compile]'"
      ) from None
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return refused_size(str(error))


def _fits(used: float, target: Target) -> bool | None:
  return None if target.memory == math.inf else used <= target.memory


def _known(x: float) -> float | None:
  return None if x == math.inf else x


def _size(tree, devices: int = 1) -> float:
  """Returns the bytes per device of a tree of arrays that are sharded over devices."""
  return sum(
    x.size * x.dtype.itemsize / (1 if split_axis(x.shape, devices) is None else devices)
    for x in jax.tree.leaves(tree)
  )


def more_microbatches(config: ConfigDict, devices: int, least: float = 0) -> int | None:
  """Returns the next larger number of microbatches that divides a device's sequences.

  At least `least`, if possible. A microbatch has whole groups of contrasted sequences.
  """
  groups = "contrast_group" in objectives.OBJECTIVES[config.objective.name].own_fields
  group = config.objective.contrast_group if groups else 1
  sequences, now = config.train.batch_size // devices, config.train.accumulation
  larger = [n for n in range(now + 1, sequences + 1) if sequences % (n * group) == 0]
  return next((n for n in larger if n >= least), larger[-1] if larger else None)


def fit(config: ConfigDict, name: str, target: Target) -> list[StepCost]:
  """Returns the costs of a configuration with more and more microbatches, until it fits.

  n times as many microbatches need more than 1/n of the memory, because parameters stay; numbers of
  microbatches that this rules out are not compiled. A last cost that fits includes evaluations.
  """
  costs = [estimate_step(config, name, target)]
  while (last := costs[-1]).fits is False:
    least = last.accumulation * last.used / target.memory if last.used < math.inf else 0
    if not (more := more_microbatches(config, len(target.devices), least)):
      break
    config = config.copy_and_resolve_references()
    config.train.accumulation = more
    costs.append(estimate_step(config, name, target))
  return costs if last.fits is False else [*costs[:-1], with_evaluation(last, config, target)]


def table(config: ConfigDict, costs: list[StepCost]) -> Table:
  """Returns a table with a column for each cost."""
  c = config.train
  found = Table(
    "per device" if any(f.devices > 1 for f in costs) else "",
    *(Column(f.topology, justify="right", no_wrap=True) for f in costs),
    title=f"{config.objective.name}, {c.batch_size:,} x {config.data.seq_length} tokens,"
    f" {c.steps:,} steps",
    caption="bytes: from the compiler; times: lower bounds, except the estimate; MFU, sequences/s:"
    " upper bounds",
  )
  for title, cell, always in ROWS:
    found.add_row(title, *("" if f.fits is False and not always else cell(f, c) for f in costs))
  return found


def _gib(size: float | None, unknown: str = "?") -> str:
  if size is None or size == math.inf:
    return unknown
  return f"{size / 2**30:.2f}" if size >= 2**30 else f"{size / 2**30:.2g}"


def _in(unit: float, x: float | None) -> str:
  return "?" if x is None else f"{x / unit:.3g}"


def _hours(f: StepCost, c: ConfigDict) -> float:
  return min(f.secs * c.steps / 3600, (c.minutes or math.inf) / 60)


_FITS = {True: "fits", False: "does not fit", None: "unknown"}
# Rows of the table: title, cell(cost, config.train), whether to show it if a step does not fit.
ROWS = (
  ("microbatches", lambda f, c: f"{f.accumulation}", True),
  ("device memory, GiB", lambda f, c: _gib(f.memory), True),
  ("memory used, GiB", lambda f, c: _gib(f.used), True),
  ("fits", lambda f, c: _FITS[f.fits], True),
  ("  parameters", lambda f, c: _gib(f.parameters), False),
  ("  optimizer", lambda f, c: _gib(f.optimizer), False),
  ("  optimizer, if sharded (ZeRO-1)", lambda f, c: _gib(f.optimizer_sharded), False),
  ("  activations, gradients", lambda f, c: _gib(f.temporaries), False),
  ("memory used in evaluations, GiB", lambda f, c: _gib(f.evaluation_used, ""), False),
  ("all-reduce, GiB per step", lambda f, c: _gib(f.all_reduce_bytes), False),
  ("reduce-scatter, GiB per step", lambda f, c: _gib(f.reduce_scatter_bytes), False),
  ("all-gather, GiB per step", lambda f, c: _gib(f.all_gather_bytes), False),
  ("communication, ms per step", lambda f, c: _in(1e-3, f.link_secs), False),
  ("TFLOP per step", lambda f, c: f"{f.flops / 1e12:.3g}", False),
  ("compute at peak, ms per step", lambda f, c: _in(1e-3, f.product_secs), False),
  ("memory traffic, ms per step", lambda f, c: _in(1e-3, f.memory_secs), False),
  ("step, ms", lambda f, c: _in(1e-3, f.secs), False),
  ("  kernels (GPU)", lambda f, c: "?" if f.kernels is None else f"{f.kernels:,}", False),
  ("  bytes read and written by kernels, GB", lambda f, c: _in(1e9, f.traffic_bytes), False),
  ("  step estimated from kernels, ms", lambda f, c: _in(1e-3, f.estimated_secs), False),
  ("sequences/s, all devices", lambda f, c: f"{c.batch_size / f.secs:,.0f}", False),
  ("MFU, %", lambda f, c: f"{100 * f.mfu:.0f}", False),
  ("whole run, hours", lambda f, c: f"{_hours(f, c):,.3g}", False),
  ("chip-hours", lambda f, c: f"{_hours(f, c) * f.chips:,.4g}", False),
)


def verdict(costs: list[StepCost]) -> str:
  """Describes whether a step fits, and with how many microbatches, from the costs of `fit`."""
  *tried, last = costs
  too_few = ", ".join(str(f.accumulation) for f in (tried if last.fits else costs))
  if last.fits is None:
    return f"{last.topology}: needs {_gib(last.used)} GiB per device; the device memory is unknown"
  if not last.fits:
    return (
      f"{last.topology}: does not fit with {too_few} microbatches; try model.remat=True,"
      " optimizer.sharded=True or more devices"
    )
  fewest = f"; does not fit with {too_few}" if tried else ""
  if last.evaluation_fits is False:
    fewest += f"; evaluations do not fit ({_gib(last.evaluation_used)} GiB): lower eval.batch_size"
  return f"{last.topology}: fits, microbatches: {last.accumulation}{fewest}"


def for_accelerator(config: ConfigDict, platform: str) -> ConfigDict:
  """Returns the configuration with `auto` fields set for a TPU or GPU on another machine.

  Attention is XLA's, which compiles everywhere; cuDNN and splash attention need less memory.
  """
  config = config.copy_and_resolve_references()
  config.model.unroll = config.model.unroll or specs.default_unroll(platform)
  for name, choice in (("dtype", "bfloat16"), ("attention", "xla")):
    if config.model[name] == "auto":
      config.model[name] = choice
  return config


def run(config: ConfigDict, topologies: list[str], json_path: str | None, console: Console) -> None:
  """Prints the cost of a step on each topology, and writes a line of JSON for each."""
  jax_flags.check()
  if json_path:  # raises before minutes of compilation
    check_new(Path(json_path), replaces=True)
  found, prepare = [], lambda config, _: config
  if topologies != [HERE]:
    jax.config.update("jax_platforms", "cpu")  # the devices are only described
    prepare = for_accelerator
  described = [targets.find(topology) for topology in topologies]
  configs = [prepare(config, target.devices[0].platform) for target in described]
  for changed, target in zip(configs, described, strict=True):
    check(changed, target.devices)
  for topology, changed, target in zip(topologies, configs, described, strict=True):
    if target.note:
      console.print(target.note)
    with doing(f"compiling for {topology}"):
      found.append(fit(changed, topology, target))
  costs = [f for several in found for f in several]
  console.print(table(config, costs))
  for several in found:
    console.print(verdict(several))
  if json_path:
    known = ({k: _known(x) for k, x in dataclasses.asdict(f).items()} for f in costs)
    Path(json_path).write_text(
      "".join(json.dumps(f, allow_nan=False) + "\n" for f in known), "utf-8"
    )
