"""Matmul FLOPs of a training step, and the peak FLOP/s of a device.

Only executed matmuls count: positions are gathered before the vocabulary layer and lookups are
free. A multiply-add is two FLOPs; training costs three forward passes. MFU = FLOPs / time / peak.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp

from electra_jax.core import attention
from electra_jax.core.heads import HEADS, mlm_head_flops
from electra_jax.core.layers import FEED_FORWARDS
from electra_jax.core.networks import PretrainSpec
from electra_jax.core.objectives import OBJECTIVES, generator_of
from electra_jax.core.positions import POSITIONS
from electra_jax.core.transformer_config import TransformerConfig

# Dense bfloat16 peak of one JAX device in FLOP/s, from the vendors' data sheets.
PEAK_FLOPS = {
  "NVIDIA A100": 312e12,
  "NVIDIA H100": 989e12,
  "NVIDIA H100 NVL": 835e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H200": 989e12,
  "NVIDIA GH200": 989e12,
  "NVIDIA L4": 121e12,
  "NVIDIA L40": 181e12,
  "NVIDIA L40S": 362e12,
  "NVIDIA B200": 2250e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5p": 459e12,
  "TPU v5": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
}


def encoder_flops(cfg: TransformerConfig, length: int, decoded: int | None = None) -> int:
  """Returns an encoder's forward FLOPs for one sequence of `length` tokens.

  Args:
    decoded: the positions that the enhanced mask decoder predicts (`encoder._decode`); None: it is
      not used.
  """
  N, L, D = cfg.num_layers, length, cfg.hidden_size
  project = 2 * L * cfg.embedding_size * D if cfg.embedding_size != D else 0
  if decoded is not None:
    last = 2 * L * 3 * D * D + 2 * _layer_flops(cfg, decoded, L)
    return (N - 1) * _layer_flops(cfg, L, L) + last + project
  windows = 2 * 2 * (attention.encoder_scores(cfg, L) - N * L * L) * D
  return N * _layer_flops(cfg, L, L) + windows + project


def _layer_flops(cfg: TransformerConfig, queries: int, length: int) -> int:
  """Returns a layer's forward FLOPs for `queries` tokens that attend to `length`."""
  K, L, D, F = queries, length, cfg.hidden_size, cfg.ffn_size
  gated = FEED_FORWARDS[cfg.feed_forward].gated
  block = 2 * K * (3 * D * D + D * D + (3 if gated else 2) * D * F)
  # Each query and each key times the rows of a table; the table's projections are per batch.
  return block + 2 * 2 * K * L * D + 2 * (K + L) * POSITIONS[cfg.positions].products(cfg, L) * D


def generator_flops(spec: PretrainSpec, length: int) -> dict[str, int]:
  """Returns the generator's FLOPs for one sequence in a training step, by part.

  Trained parts count three forward passes, a frozen generator and a second sampling pass one.
  """
  generator = generator_of(spec)
  if generator is None or not generator.encoders:
    return {}
  cfg, K, towers = spec.generator, spec.masking.num_masked(length, True), len(generator.encoders)
  # The input of the vocabulary layer is the concatenated states of all encoders.
  wide = dataclasses.replace(cfg, hidden_size=towers * cfg.hidden_size)
  decoded = K if generator.decodes else None
  encoders, at_masked = towers * encoder_flops(cfg, length, decoded), mlm_head_flops(wide, K)
  if not generator.trained:
    return {"generator, forward": encoders + at_masked}
  parts = {"generator": 3 * (encoders + at_masked)}
  if generator.predicts_all:
    parts["generator"] = 3 * (encoders + mlm_head_flops(wide, length))
    parts["generator's samples"] = at_masked
  if not spec.sampling_dropout:
    parts["second pass to sample"] = encoders + at_masked
  return parts


def main_flops(spec: PretrainSpec, length: int) -> dict[str, int]:
  """Returns the discriminator's FLOPs for one sequence in a training step, by part."""
  cfg, definition = spec.discriminator, OBJECTIVES[spec.objective]
  parts = {"discriminator": 3 * encoder_flops(cfg, length)}
  if definition.second_pass:
    parts["second pass"] = parts["discriminator"]
  for name in definition.heads:
    at_masked = HEADS[name].predicts_words and not definition.predicts_all
    positions = spec.masking.num_masked(length, True) if at_masked else length
    parts[name] = 3 * HEADS[name].flops(cfg, positions)
  return parts


def step_flops(spec: PretrainSpec, batch_size: int, length: int) -> int:
  """Returns the matmul FLOPs of one training step on the global batch.

  Recomputation to save memory (`remat`, the chunked vocabulary) is not counted.

  >>> from electra_jax.core import masking
  >>> from electra_jax.core.networks import generator_size
  >>> d = TransformerConfig(30522, 128, 256, 12, 4, 1024, 512)
  >>> m = masking.Masking(0.15, 0.85, 1.0, 103, (0, 101, 102, 103))
  >>> step_flops(PretrainSpec(generator_size(d, 1 / 4, 1.0), d, m), 1, 128) / 1e9  # ELECTRA-Small
  8.984...
  """
  parts = generator_flops(spec, length) | main_flops(spec, length)
  return batch_size * sum(parts.values())


def peak_flops(device: jax.Device) -> tuple[float, str]:
  """Returns a device's peak FLOP/s and the source of the number.

  Devices without a data sheet are measured by matmuls, in bfloat16 on an accelerator and float32 on
  a CPU, whose peak is divided by its number of JAX devices.
  """
  for kind in sorted(PEAK_FLOPS, key=len, reverse=True):
    if kind.lower() in device.device_kind.lower():
      return PEAK_FLOPS[kind], "data sheet, bfloat16"
  if device.platform != "cpu":
    return measure_matmul_peak(8192, dtype="bfloat16"), "measured, bfloat16"
  fakes = sum(d.process_index == device.process_index for d in jax.devices())
  return measure_matmul_peak() / fakes, "measured, float32"


def measure_matmul_peak(size: int = 1024, dtype: str = "float32") -> float:
  """Returns the FLOP/s of the fastest of five size x size matmuls."""
  product = jax.jit(jnp.matmul)
  a = jnp.ones((size, size), dtype)
  product(a, a).block_until_ready()
  best = float("inf")
  for _ in range(5):
    start = time.perf_counter()
    product(a, a).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return 2 * size**3 / best
