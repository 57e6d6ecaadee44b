"""Matrix-product FLOPs of a step, and what a device could do at most.

Only products of matrices count, as they are really done: positions gathered before the vocabulary
layer, look-ups free. A multiply and an add are two operations; training is three times the forward
pass. The share of the peak that a run reaches (MFU) is this number over time and peak.
"""

import time

import jax
import jax.numpy as jnp

from electra_jax import masking
from electra_jax.model import TransformerConfig
from electra_jax.objectives import Spec

# Dense bfloat16 peak of one device as JAX counts devices, FLOP/s, from the vendors' data sheets.
PEAK_FLOPS = {
  "NVIDIA A100": 312e12,
  "NVIDIA H100": 989e12,
  "NVIDIA H200": 989e12,
  "NVIDIA B200": 2250e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5p": 459e12,
  "TPU v5": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
}


def encoder_flops(cfg: TransformerConfig, length: int) -> int:
  """Returns the forward FLOPs of one sequence of `length` tokens through one encoder."""
  L, D, F = length, cfg.hidden_size, cfg.ffn_size
  block = 2 * L * (3 * D * D + D * D + 2 * D * F) + 2 * 2 * L * L * D
  project = 2 * L * cfg.embedding_size * D if cfg.embedding_size != D else 0
  return cfg.num_layers * block + project


def mlm_head_flops(cfg: TransformerConfig, positions: int) -> int:
  """Returns the forward FLOPs of the vocabulary layer on `positions` gathered positions."""
  return (
    2 * positions * (cfg.hidden_size * cfg.embedding_size + cfg.embedding_size * cfg.vocab_size)
  )


def rtd_head_flops(cfg: TransformerConfig, length: int) -> int:
  """Returns the forward FLOPs of the discriminator's head on one sequence."""
  return 2 * length * (cfg.hidden_size * cfg.hidden_size + cfg.hidden_size)


def step_flops(spec: Spec, batch_size: int, length: int) -> int:
  """Returns the matrix FLOPs of one joint training step on the global batch.

  >>> from electra_jax.model import TransformerConfig, generator_size
  >>> d = TransformerConfig(30522, 128, 256, 12, 4, 1024, 512)
  >>> m = masking.Masking(0.15, 0.85, 1.0, 103, (0, 101, 102, 103))
  >>> step_flops(Spec(generator_size(d, 1 / 4, 1.0), d, m), 1, 128) / 1e9  # ELECTRA-Small
  8.984...
  """
  K = masking.num_slots(spec.masking.mask_prob, length)
  forward = (
    encoder_flops(spec.generator, length)
    + mlm_head_flops(spec.generator, K)
    + encoder_flops(spec.discriminator, length)
    + rtd_head_flops(spec.discriminator, length)
  )
  return 3 * batch_size * forward


def peak_flops(device: jax.Device) -> tuple[float, str]:
  """Returns the peak of one device in FLOP/s, and where the number is from.

  Accelerators by their data sheet; where there is none (a CPU), the best of a few large float32
  products, shared by the devices that the processor is divided into.
  """
  for kind in sorted(PEAK_FLOPS, key=len, reverse=True):
    if kind.lower() in device.device_kind.lower():
      return PEAK_FLOPS[kind], "data sheet, bfloat16"
  fakes = sum(d.process_index == device.process_index for d in jax.devices())
  return measure_matmul_peak() / fakes, "measured, float32"


def measure_matmul_peak(size: int = 2048, repeats: int = 5) -> float:
  """Returns the FLOP/s of the fastest of `repeats` float32 products of size x size matrices."""
  product = jax.jit(jnp.matmul)
  a = jnp.ones((size, size))
  product(a, a).block_until_ready()
  best = float("inf")
  for _ in range(repeats):
    start = time.perf_counter()
    product(a, a).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return 2 * size**3 / best
