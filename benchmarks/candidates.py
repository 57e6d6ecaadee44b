"""Estimated throughput of shapes of the speedrun's network on an H200, without a GPU.

  make test-gpu-compile       # once: it installs the compiler
  PYTHONPATH=.venv/cuda-compiler python benchmarks/candidates.py [--rows FILE]

Compiles steps of configs/speedrun.py:electra for an H200 with few layers, and counts kernels and
bytes. Other numbers of layers, vocabularies and batches are extrapolated linearly. The seconds are
the preflight's estimate (errors: docs/preflight.md). Rows are kept, and not compiled again.
Attention is cuDNN's, whose version is patched in, because JAX asks its library but the compiler
does not need it.
"""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import machine  # noqa: E402
from jax._src.cudnn import fused_attention_stablehlo  # noqa: E402
from speedrun_rates import shaped  # noqa: E402

from electra_jax.config import files, validate  # noqa: E402
from electra_jax.cost import preflight, targets  # noqa: E402
from electra_jax.experiments import jobs  # noqa: E402

ROWS = Path(__file__).parent / "results" / "speedrun_candidates.jsonl"
CONFIG, TOPOLOGY, SECS, LENGTH = "configs/speedrun.py:electra", "h200x1", 480, 128
NAMES = ("layers", "width", "entries", "batch")
COSTS = ("kernels", "traffic_bytes", "flops", "secs")
USUAL = (16_384, 512)  # entries, sequences
# layers, width, entries, sequences: pairs that isolate the cost of a layer, an entry, a sequence.
COUNTED = (
  (8, 512, 16_384, 512), (4, 512, 16_384, 512), (8, 384, 16_384, 512), (4, 384, 16_384, 512),
  (8, 256, 16_384, 512), (4, 256, 16_384, 512), (4, 512, 8_192, 512), (4, 512, 30_522, 512),
  (4, 384, 30_522, 512), (4, 256, 30_522, 512), (4, 512, 16_384, 256), (4, 512, 16_384, 1024),
)  # fmt: skip

SHOWN = (
  (7, 256, *USUAL), (6, 384, *USUAL), (12, 384, *USUAL), (6, 512, *USUAL), (8, 512, *USUAL),
  (6, 512, 8_192, 512), (6, 512, 30_522, 512), (6, 384, 30_522, 512), (7, 256, 30_522, 512),
  (4, 512, 16_384, 256), (4, 512, *USUAL), (4, 512, 16_384, 1024),
)  # fmt: skip


def count(layers: int, width: int, entries: int, batch: int) -> dict:
  """Compiles a step and returns its kernels, bytes, memory, FLOPs and estimated seconds."""
  config = files.load_named(CONFIG)
  config.update_from_flattened_dict(
    shaped(width)
    | {
      "model.num_layers": layers,
      "model.attention": "cudnn",
      "data.vocab_size": entries,
      "train.batch_size": batch,
    }
  )
  config = preflight.for_accelerator(config, "gpu")
  cost = preflight.estimate_step(config, TOPOLOGY, targets.find(TOPOLOGY))
  return {
    "kernels": cost.kernels,
    "traffic_bytes": cost.traffic_bytes,
    "used_bytes": cost.used,
    "flops": cost.flops,
    "secs": cost.estimated_secs,
  }


def estimate(rows: list[dict], layers: int, width: int, entries: int, batch: int) -> dict:
  """Returns the cost of a step of a shape, extrapolated above four layers."""
  found = {tuple(row[name] for name in NAMES): row for row in rows}
  if row := found.get((layers, width, entries, batch)):
    return row
  few, many = found[4, width, *USUAL], found[8, width, *USUAL]
  start = found[4, width, entries, batch]
  return {x: start[x] + (many[x] - few[x]) / 4 * (layers - 4) for x in COSTS}


def table(rows: list[dict]) -> list[str]:
  """Returns the candidates as a table in markdown."""
  lines = [
    "| layers x width | entries | sequences | kernels | GB | TFLOP | ms | M tokens/s"
    f" | FLOPs in {SECS} s | tokens a parameter |",
    "|---" * 10 + "|",
  ]
  for layers, width, entries, batch in SHOWN:
    cost = estimate(rows, layers, width, entries, batch)
    rate = batch * LENGTH / cost["secs"]
    parameters = layers * (4 * width**2 + 3 * width * (width * 3 // 2))
    lines.append(
      f"| {layers} x {width} | {entries:,} | {batch:,} | {cost['kernels']:,.0f}"
      f" | {cost['traffic_bytes'] / 1e9:.0f} | {cost['flops'] / 1e12:.2f}"
      f" | {1000 * cost['secs']:.1f} | {rate / 1e6:.2f} | {cost['flops'] / cost['secs'] * SECS:.2e}"
      f" | {rate * SECS / parameters:.0f} |"
    )
  return lines


def main(rows: Path = ROWS) -> None:
  fused_attention_stablehlo.check_cudnn_version = lambda: 91000
  validate.check_attention = lambda *_: None  # it checks this machine
  found = jobs.Rows(rows)
  for shape in COUNTED:
    found.once(dict(zip(NAMES, shape, strict=True)), lambda shape=shape: count(*shape))
  print("\n".join(table(found.read())))


if __name__ == "__main__":
  machine.start(main)
