"""The time of a training step on one core by kind of operation, for ours and PyTorch.

  python benchmarks/profile_step.py [--peer] [--config=configs/small.py] [--batch=32] [--length=128]
                                    [--set FIELD=VALUE...] [--steps=3] [--json=OUT]

Steps and sizes are those of benchmarks/train_step.py. On one core operations run one by one, so
their times add up to the step's; `rest` is the time outside operations. Times come from JAX's
profiler (the instruction of each event, whose source and shape give its kind) and PyTorch's (an
operator without the operators that it calls). Page faults are of the whole step. --peer needs torch
and transformers.
"""

import collections
import os
import re
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX and PyTorch count the cores

import jax  # noqa: E402
import machine  # noqa: E402
import train_step  # noqa: E402
from peers import secs as step_secs  # noqa: E402

from electra_jax.runtime import parallel  # noqa: E402

PRODUCTS = "products: vocabulary", "products: attention", "products: layers"
VOCABULARY, ATTENTION, ACTIVATION = "vocabulary", "attention's softmax and dropout", "activation"
NORM, DROPOUT, OPTIMIZER, OTHER = "norms", "dropout elsewhere", "optimizer", "copies and others"
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = \(?(\w+)\[([\d,]*)\]")


def instructions(program: str) -> dict[str, tuple[tuple[int, ...], str]]:
  """Returns {name: (shape of the result, source)} of an optimized program's instructions.

  The source of a weight's gradient is its transposition, so it gets the word "dot_general", too.
  """
  found = {}
  for line in program.splitlines():
    if match := INSTRUCTION.match(line):
      source = re.search(r'op_name="([^"]*)"', line)
      shape = tuple(int(n) for n in match[3].split(",") if n)
      product = " dot_general" * (" dot(" in line)
      found[match[1]] = shape, (source[1] if source else "") + product
  return found


def kind_of(shape: tuple[int, ...], source: str, vocabulary: int, length: int) -> str:
  """Returns the kind of an instruction of our step."""
  is_product = "dot_general" in source
  if "while/body" not in source:  # the loop over microbatches
    return OPTIMIZER
  if vocabulary in shape or "MlmHead" in source:
    return PRODUCTS[0] if is_product else VOCABULARY
  if shape[-2:] == (length, length) or ("bhlm" in source and is_product):
    return PRODUCTS[1] if is_product else ATTENTION
  if is_product:
    return PRODUCTS[2]
  for word, kind in (("norm", NORM), ("rsqrt", NORM), ("erf", ACTIVATION), ("hash", DROPOUT)):
    if word in source:
      return kind
  return OTHER


def ours(step: train_step.Ours, batch, steps: int) -> dict[str, float]:
  """Returns the seconds per step of each kind of operation of our step."""
  (placed,) = parallel.prefetch([batch])
  known = instructions(step.step.lower(step.state, placed).compile().as_text())
  found: collections.Counter[str] = collections.Counter()
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      step.run(steps)
    (path,) = Path(folder).rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
      for line in plane.lines:
        for event in line.events:
          name = dict(event.stats).get("hlo_op")
          if name in known and not event.name.startswith("end:"):
            V, L = step.spec.discriminator.vocab_size, batch.ids.shape[1]
            found[kind_of(*known[name], V, L)] += event.duration_ns / 1e9 / steps
  return dict(found)


# Operators of PyTorch by the start of their names.
OPERATORS = {
  "aten::_softmax": ATTENTION,
  "aten::_scaled_dot_product": ATTENTION,
  "aten::native_dropout": DROPOUT,
  "aten::bernoulli": DROPOUT,
  "aten::gelu": ACTIVATION,
  "aten::native_layer_norm": NORM,
  "aten::_log_softmax": VOCABULARY,
  "aten::nll_loss": VOCABULARY,
  "aten::_foreach": OPTIMIZER,
  "aten::_fused_adam": OPTIMIZER,
}


def kind_of_operator(name: str, shapes: list[list[int]], vocabulary: int, length: int) -> str:
  """Returns the kind of an operator of PyTorch with inputs of these shapes."""
  sizes = {n for shape in shapes if isinstance(shape, list) for n in shape if isinstance(n, int)}
  if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
    return PRODUCTS[0 if vocabulary in sizes else 1 if "bmm" in name else 2]
  for start, kind in OPERATORS.items():
    if name.startswith(start):
      return ATTENTION if kind == DROPOUT and length in shapes[0][-1:] else kind
  return VOCABULARY if vocabulary in sizes else OTHER


def peers(peer: train_step.Peer, length: int, steps: int) -> dict[str, float]:
  """Returns the seconds per step of each kind of operation of the peer's step."""
  from torch import profiler

  with profiler.profile(activities=[profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
    peer.run(steps)
  found: collections.Counter[str] = collections.Counter()
  for row in profile.key_averages(group_by_input_shape=True):
    kind = kind_of_operator(row.key, row.input_shapes, train_step.VOCAB.size, length)
    found[kind] += row.self_cpu_time_total / 1e6 / steps
  return dict(found)


def timed(run: Callable, steps: int) -> dict[str, float]:
  """Returns seconds and page faults per step, without a profiler."""
  faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  secs = step_secs(lambda: run(steps))
  faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
  return {"secs_per_step": secs / steps, "page_faults": faults / steps}


def main(
  config: str = "configs/small.py",
  set: list[str] = (),
  batch: int = 32,
  length: int = 128,
  steps: int = 3,
  peer: bool = False,
) -> dict:
  configured = train_step.configure(config, batch, length, set)
  parallel.keep_freed_memory()
  rows = train_step.synthetic_batch(batch, length)
  step = train_step.Ours(configured, rows)
  results = {step.name: timed(step.run, steps) | {"kinds": ours(step, rows, steps)}}
  if peer:
    other = train_step.Peer(configured.optimizer.to_dict(), rows, step.spec, 1)
    kinds = peers(other, length, steps)
    results[other.name] = timed(other.run, steps) | {"kinds": kinds}
  for found in results.values():
    found["kinds"]["rest"] = found["secs_per_step"] - sum(found["kinds"].values())
  return {"sizes": f"{config}, batch {batch} x {length}, one core", "results": results}


if __name__ == "__main__":
  machine.start(main)
