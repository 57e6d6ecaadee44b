"""Asks XLA's compiler for CUDA, through the preflight's command line; needs no GPU.

  python tests/gpu_compile.py

Installs the compiler that this JAX is for: the plugin, the assembler ptxas and libdevice, none of
CUDA's libraries. Exits with 0 if what it says of four layers of the paper's small model on one H200
and of base on eight is what has to come out.
"""

import importlib.metadata

import compilers
import packages
from compilers import GIB

FOLDER = "cuda-compiler"
V, P = 30522, 512  # words and positions
# Kernels of a step and the GB that they move on a device: 3 % above what this version of JAX has.
# Others fuse otherwise and have no ceiling.
COUNTED_WITH = "0.10.2"
CEILINGS = {"small": (731, 11.75), "base": (3376, 257.5), "speedrun": (816, 84.2)}
TINY = {
  "objective.name": "bert", "model.num_layers": 1, "model.hidden_size": 64, "model.num_heads": 1,
  "model.embedding_size": 64, "data.vocab_size": 1000, "model.dropout": 0.0,
  "model.attention_dropout": 0.0, "data.seq_length": 64,
}  # fmt: skip


def parameters(hidden: int, embedding: int, generator: int, layers: int = 12) -> int:
  """Returns the parameters of ELECTRA, by hand: heads of 64, feed-forward layers of four widths."""

  def encoder(h: int) -> int:
    block = 4 * (h * h + h) + 2 * 4 * h * h + 4 * h + h + 2 * 2 * h
    project = embedding * h + h if embedding != h else 0
    return layers * block + project

  embeddings = (V + P + 2) * embedding + 2 * embedding  # words, positions, types; LayerNorm
  rtd_head = hidden * hidden + hidden + hidden + 1
  mlm_head = generator * embedding + embedding + 2 * embedding + V
  return embeddings + encoder(hidden) + encoder(generator) + rtd_head + mlm_head


def check_traffic(name: str, cost: dict) -> str:
  """Kernels and bytes of a step have not come back."""
  kernels, gb = cost["kernels"], cost["traffic_bytes"] / 1e9
  counted = f"{kernels:,} kernels move {gb:.1f} GB"
  if importlib.metadata.version("jaxlib") != COUNTED_WITH:
    return f"{counted}, not compared (ceilings: JAX {COUNTED_WITH})"
  most = CEILINGS[name]
  assert kernels <= most[0] and gb <= most[1], f"{name}: {counted}, at most {most}"
  return counted


def check_small() -> str:
  """One GPU: the state, the share of the memory, nothing on the links."""
  # Four of its twelve layers, which compile in less than half of the time.
  output, (cost,) = compilers.preflight(FOLDER, "small", "h200x1", {"model.num_layers": 4})
  count = parameters(256, 128, 64, layers=4)
  assert cost["devices"] == cost["chips"] == 1 and cost["fits"], cost
  assert cost["parameters"] == 4 * count, (cost, count)
  assert 0 <= cost["optimizer"] - 8 * count < 100, cost
  # 1.26 GiB with JAX 0.10.
  assert 1 * GIB < cost["used"] < 1.5 * GIB, cost
  assert cost["used"] >= 12 * count + cost["temporaries"], cost
  assert cost["memory"] == 0.75 * 151_397_597_184, cost
  sent = [cost[name] for name in ("all_reduce_bytes", "sent_bytes", "link_secs")]
  assert sent == [0, 0, 0], cost
  # The data sheet's 989 TFLOP/s and 4.8 TB/s.
  assert cost["product_secs"] == cost["flops"] / 989e12, cost
  assert cost["secs"] == max(cost["product_secs"], cost["memory_secs"]), cost
  assert "h200x1: fits, microbatches: 1" in output, output
  counted = check_traffic("small", cost)
  return f"four layers of small fit one H200, in {cost['used'] / GIB:.2f} GiB; {counted}"


def check_base() -> str:
  """Eight GPUs of a host: every gradient is added up once."""
  # In a loop over layers, as that compiles in half of the time.
  _, (cost,) = compilers.preflight(FOLDER, "base", "h200x8", {"model.unroll": 1})
  count = parameters(768, 768, 256)
  assert cost["devices"] == cost["chips"] == 8 and cost["fits"], cost
  assert cost["parameters"] == 4 * count, (cost, count)
  # A float32 for each parameter, and numbers for the metrics.
  assert 0 <= cost["all_reduce_bytes"] - 4 * count < 8000, cost
  assert cost["sent_bytes"] == 2 * cost["all_reduce_bytes"] * 7 / 8, cost
  assert cost["link_secs"] == cost["sent_bytes"] / 450e9, cost
  # 17.2 GiB with JAX 0.12, 21.1 GiB with 0.10.
  assert 15 * GIB < cost["used"] < 23 * GIB, cost
  counted = check_traffic("base", cost)
  gib = f"{cost['used'] / GIB:.2f} GiB"
  return f"base fits eight H200, in {gib} each; the gradient is sent once; {counted}"


def check_speedrun() -> str:
  """Four of its eight layers, which compile in half of the time."""
  _, (cost,) = compilers.preflight(FOLDER, "speedrun", "h200x1", {"model.num_layers": 4})
  return f"four layers of the speedrun: {check_traffic('speedrun', cost)}"


def check_hosts() -> str:
  """Two hosts of L4, whose network is slower than their PCIe."""
  _, (cost,) = compilers.preflight(FOLDER, "base", "l4x16", TINY)
  assert cost["devices"] == 16 and cost["all_reduce_bytes"] > cost["parameters"], cost
  # Each host sends 2 * 1/2 of the gradient, at 100 Gb/s.
  assert abs(cost["link_secs"] / (cost["all_reduce_bytes"] / 12.5e9) - 1) < 1e-9, cost
  return "two hosts of eight L4 wait for their network"


def check_too_much() -> str:
  """A step too large for one GPU, which XLA compiles all the same."""
  # A very wide layer compiles faster than very many sequences.
  fields = TINY | {"model.ffn_size": 2**20, "train.batch_size": 96}
  output, costs = compilers.preflight(FOLDER, "base", "l4x1", fields)
  tried = [(cost["accumulation"], cost["fits"]) for cost in costs]
  assert tried[0] == (1, False) and tried[-1][1] and len(tried) > 1, costs
  assert costs[0]["used"] > costs[0]["memory"] > costs[-1]["used"], costs
  few = ", ".join(str(n) for n, _ in tried[:-1])
  assert f"fits, microbatches: {tried[-1][0]}; does not fit with {few}" in output, output
  return f"what is too much for an L4 fits in {tried[-1][0]} microbatches, not in {few}"


def main() -> None:
  version = importlib.metadata.version("jaxlib")
  plugin = (f"jax-cuda13-{part}=={version}" for part in ("plugin", "pjrt"))
  packages.install(FOLDER, *plugin, "nvidia-cuda-nvcc==13.*", "nvidia-nvvm==13.*")
  compilers.run(check_small, check_base, check_speedrun, check_hosts, check_too_much)


if __name__ == "__main__":
  main()
