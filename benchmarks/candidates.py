"""What a second of an H200 buys with each shape of the speedrun's network, counted without a GPU.

  make test-gpu-compile       # once: it installs the compiler
  PYTHONPATH=.venv/cuda-compiler python benchmarks/candidates.py [--rows FILE]

Compiles steps of configs/speedrun.py:electra for an H200 with few layers, and counts kernels and
bytes; more layers, other vocabularies and other batches follow from the differences, which
are linear. The seconds are the preflight's estimate (docs/preflight.md has its errors).
Rows are kept as they come; what is there is not compiled again. Attention is cuDNN's: JAX asks its
library for a version, the compiler needs none, so the version of the description is given.
"""

import argparse
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

from jax._src.cudnn import fused_attention_stablehlo  # noqa: E402

from electra_jax.config import files, validate  # noqa: E402
from electra_jax.core import flops  # noqa: E402
from electra_jax.cost import (
  preflight,  # noqa: E402
  targets,  # noqa: E402
  traffic,  # noqa: E402
)
from electra_jax.experiments import jobs
from electra_jax.pretrain.run import spec_without_data  # noqa: E402

ROWS = Path(__file__).parent / "results" / "speedrun_candidates.jsonl"
CONFIG, TOPOLOGY, SECS, LENGTH = "configs/speedrun.py:electra", "h200x1", 480, 128
NAMES = ("layers", "width", "entries", "batch")
COSTS = ("kernels", "traffic_bytes", "flops", "secs")
USUAL = (16_384, 512)  # entries, sequences
# layers, width, entries, sequences: the pairs that tell what a layer, an entry, a sequence costs.
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


def configured(layers: int, width: int, entries: int, batch: int):
  """Returns the speedrun's configuration with another shape."""
  config = files.load_named(CONFIG)
  config.update_from_flattened_dict(
    {
      "model.num_layers": layers,
      "model.hidden_size": width,
      "model.embedding_size": width,
      "model.num_heads": width // 64,
      "model.ffn_size": width * 3 // 2,
      "model.attention": "cudnn",
      "data.vocab_size": entries,
      "train.batch_size": batch,
    }
  )
  return config


def count(layers: int, width: int, entries: int, batch: int) -> dict:
  """Compiles a step and returns its kernels, bytes, memory, FLOPs and estimated seconds."""
  target = targets.find(TOPOLOGY)
  config = configured(layers, width, entries, batch)
  config = preflight.for_accelerator(config, "gpu")
  compiled, shapes = preflight.compile_step(config, target.devices)
  found = traffic.kernels(compiled.as_text())
  spec = spec_without_data(config)
  return {
    "kernels": traffic.launches(found),
    "traffic_bytes": traffic.moved_bytes(found),
    "used_bytes": preflight.used_bytes(compiled),
    "flops": flops.step_flops(spec, batch, config.data.seq_length),
    "secs": traffic.estimate_secs(found, target.memory_rate, target.peak),
  }


def estimate(rows: list[dict], layers: int, width: int, entries: int, batch: int) -> dict:
  """Returns what a step of a shape costs: as counted, or four layers and what a layer adds."""
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


def main() -> None:
  """Counts what is missing and prints the table."""
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--rows", type=Path, default=ROWS)
  args = p.parse_args()
  fused_attention_stablehlo.check_cudnn_version = lambda: 91000
  validate.check_attention = lambda *_: None  # this machine's
  rows = jobs.Rows(args.rows)
  for shape in COUNTED:
    rows.once(dict(zip(NAMES, shape, strict=True)), lambda shape=shape: count(*shape))
  print("\n".join(table(rows.read())))


if __name__ == "__main__":
  main()
