"""Checksums of arrays and their metadata."""

import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from electra_jax.core.params import named


def on_host(state) -> dict[str, np.ndarray]:
  """Returns {name: array} on this host; the arrays outlive donation of the state.

  On CPU, replicated arrays are not copied: a step does not overwrite memory that NumPy views. GPU
  arrays go to pinned memory, as in orbax: 1.3 GB from an H100 take 25 ms instead of 1 s.
  """

  def start(x: jax.Array) -> jax.Array | np.ndarray:
    if not x.is_fully_replicated:  # its shards may be on other hosts
      return x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
    whole = x.addressable_data(0)
    if jax.default_backend() != "gpu":
      return whole
    pinned = jax.sharding.SingleDeviceSharding(whole.device, memory_kind="pinned_host")
    return jax.device_put(whole, pinned)

  started = {name: start(x) for name, x in named(state).items()}
  return {name: np.asarray(x) for name, x in started.items()}


def of_tree(tree) -> int:
  """Returns the CRC-32 of a tree of arrays; all processes call it together."""
  return digest(inspect(on_host(tree))[0])


def inspect(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, dict], list[str]]:
  """Returns {name: {shape, dtype, crc32}}, and the names of non-finite arrays."""

  def describe(x: np.ndarray) -> tuple[dict, bool]:
    finite = not x.size or bool(np.isfinite(x.min()) and np.isfinite(x.max()))
    crc = zlib.crc32(np.ascontiguousarray(x))
    return {"shape": list(x.shape), "dtype": str(x.dtype), "crc32": crc}, finite

  with ThreadPoolExecutor() as pool:  # both passes release the GIL
    results = dict(zip(arrays, pool.map(describe, arrays.values()), strict=True))
  bad = [name for name, (_, finite) in results.items() if not finite]
  return {name: known for name, (known, _) in results.items()}, bad


def digest(meta: Mapping[str, Any]) -> int:
  """Returns the CRC-32 of metadata, which survives a JSON round trip."""
  return zlib.crc32(json.dumps(meta, sort_keys=True).encode())
