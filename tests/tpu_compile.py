"""Asks the TPU compiler itself, through the preflight's command line, for a tiny network.

  python tests/tpu_compile.py

Installs the compiler that this JAX is for. Exits with 0 if what it says of slices of one and of
four chips is what has to come out.
"""

import importlib.metadata
import sys
from pathlib import Path

import compilers
import packages
from compilers import GIB

sys.path.insert(0, str(Path(__file__).resolve().parent / "faults"))

import harness  # noqa: E402

FOLDER = "libtpu"
FIELDS = {
  **harness.FIELDS,
  "model.max_positions": 64,
  "data.seq_length": 64,
  "data.vocab_size": 1000,
  "train.batch_size": 24,
  "train.steps": 1000,
}
ROWS = (
  "microbatches", "device memory, GiB", "fits", "optimizer", "optimizer, if sharded (ZeRO-1)",
  "activations, gradients", "memory used in evaluations, GiB", "all-reduce, GiB per step",
  "communication, ms per step", "TFLOP per step", "step, ms", "sequences/s, all devices", "MFU, %",
  "whole run, hours", "chip-hours",
)  # fmt: skip


def preflight(topologies: str, **fields) -> tuple[str, list[dict]]:
  """Returns what the program prints for the tiny network, and its JSON."""
  return compilers.preflight(FOLDER, "base", topologies, {**FIELDS, **fields})


def check_slices() -> str:
  """Four chips of two kinds: memory, bytes on the links, every row of the table."""
  output, (v5e, v4) = preflight("v5e:2x2,v4:2x2x1")
  missing = [row for row in ROWS if row not in output]
  assert not missing, missing
  for cost in (v5e, v4):
    # Both cores of a v4 chip are one device.
    assert cost["devices"] == cost["chips"] == 4 and cost["fits"], cost
    # Adam's two moments and a counter; a float32 of each weight, and numbers for the metrics.
    assert 0 <= cost["optimizer"] - 2 * cost["parameters"] < 100, cost
    assert 0 <= cost["all_reduce_bytes"] - cost["parameters"] < 8000, cost
    assert cost["sent_bytes"] == 2 * cost["all_reduce_bytes"] * 3 / 4, cost
    assert not cost["all_gather_bytes"], cost
    assert cost["used"] > 3 * cost["parameters"], cost
    slower = max(cost["product_secs"], cost["memory_secs"])
    assert cost["secs"] == slower + cost["link_secs"], cost
  assert (v5e["memory"], v4["memory"]) == (16 * GIB, 32 * GIB), (v5e, v4)
  return "v5e:2x2 and v4:2x2x1 compile; every number is in the table"


def check_sharded() -> str:
  """The sharded optimizer: a device holds less of its state, and updates are gathered."""
  _, (cost,) = preflight("v5e:2x2", **{"optimizer.sharded": True})
  assert cost["optimizer"] == cost["optimizer_sharded"], cost
  assert cost["optimizer"] < 0.6 * cost["parameters"], cost
  # The compiler may turn a reduce-scatter into an all-reduce of which a part is used, and fill
  # arrays up to whole tiles.
  added = cost["all_reduce_bytes"] + cost["reduce_scatter_bytes"]
  assert 1 <= added / cost["parameters"] < 1.05, cost
  assert 0.9 < cost["all_gather_bytes"] / cost["parameters"] <= 1, cost
  return "with optimizer.sharded a chip holds a quarter, and gathers the update"


def check_refusal() -> str:
  """A batch too large for one chip: the compiler refuses, the fewest microbatches are found."""
  # A very wide layer compiles faster than very many sequences.
  fields = {"objective.name": "bert", "model.num_layers": 1, "model.ffn_size": 2**20}
  fields |= {"model.dropout": 0.0, "model.attention_dropout": 0.0, "train.batch_size": 144}
  output, costs = preflight("v5e:1x1", **fields)
  tried = [(cost["accumulation"], cost["fits"]) for cost in costs]
  # One number of bytes may rule out 2 already.
  assert tried in ([(1, False), (3, True)], [(1, False), (2, False), (3, True)]), costs
  assert costs[0]["used"] > 16 * GIB > costs[-1]["used"], costs
  assert "fits, microbatches: 3; does not fit with 1" in output, output
  return "what is too much for a chip fits in 3 microbatches, not in fewer"


def check_no_slice() -> str:
  """A slice that there is not: one line."""
  try:
    preflight("v5e:3x3")
  except SystemExit as error:
    assert "error: topology v5e:3x3: " in str(error), error
    return "v5e:3x3 is refused"
  raise AssertionError("v5e:3x3 was not refused")


def main() -> None:
  wanted = next(
    line.partition(";")[0].strip()
    for line in importlib.metadata.requires("jax")
    if line.startswith("libtpu")
  )
  packages.install(FOLDER, wanted)
  compilers.run(check_slices, check_sharded, check_refusal, check_no_slice)


if __name__ == "__main__":
  main()
