"""What this machine's accelerator is, and the rates that it reaches.

  python benchmarks/device.py [--smoke] [--json OUT]

Products are of random bfloat16 matrices, because zeros take less power and run faster; the copy
counts the bytes read and those written. Medians of ten, after two that do not count.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import machine

from electra_jax.core import flops


def median_secs(function: Callable, *args) -> float:
  """Returns the seconds of a call, all work done."""
  secs = []
  for _ in range(12):
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    secs.append(time.perf_counter() - start)
  return statistics.median(secs[2:])


def main() -> None:
  """Measures, prints, writes JSON."""
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--smoke", action="store_true", help="small arrays")
  p.add_argument("--json", help="write the result here")
  args = p.parse_args()
  device, size = jax.devices()[0], 256 if args.smoke else 8192
  a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
  # 2 GiB each for reading and writing, far more than a cache holds.
  long = jnp.zeros(2**16 if args.smoke else 2**29, jnp.float32)
  peak, source = flops.peak_flops(device)
  stats = device.memory_stats() or {}
  result = {
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
  for name, value in result.items():
    print(f"{name}: {value}")
  machine.save(args.json, result)


if __name__ == "__main__":
  main()
