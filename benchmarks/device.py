"""This machine's accelerator and the rates that it reaches.

  python benchmarks/device.py [--smoke] [--json OUT]

Multiplies random bfloat16 matrices, because zeros take less power and run faster; counts the bytes
read and written by copies. Medians of ten, after two to warm up. --smoke uses small arrays.
"""

import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import machine
import peers

from electra_jax.core import flops


def median_secs(function: Callable, *args) -> float:
  """Returns the seconds of a call until its work is done."""
  secs = [peers.secs(lambda: jax.block_until_ready(function(*args))) for _ in range(12)]
  return statistics.median(secs[2:])


def main(smoke: bool = False) -> dict:
  device, size = jax.devices()[0], 256 if smoke else 8192
  a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
  # 2 GiB each for reading and writing, far more than a cache holds.
  long = jnp.zeros(2**16 if smoke else 2**29, jnp.float32)
  peak, source = flops.peak_flops(device)
  stats = device.memory_stats() or {}
  return {
    "device": f"{jax.device_count()} x {device.device_kind}",
    "platform": device.platform,
    "platform_version": " ".join(device.client.platform_version.split()),
    "memory_bytes": stats.get("bytes_limit"),
    "product_flops_per_sec": 2 * size**3 / median_secs(jax.jit(jnp.matmul), a, b),
    "copy_bytes_per_sec": 2 * long.nbytes / median_secs(jax.jit(lambda x: x + 1), long),
    "matmul_peak_flops": peak,
    "matmul_peak_source": source,
    "could_not": [] if stats else [f"a {device.platform} does not say how much memory it has"],
  }


if __name__ == "__main__":
  machine.start(main)
