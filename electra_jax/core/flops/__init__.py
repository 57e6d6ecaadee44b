"""Matrix-product FLOPs of a step, and what a device could do at most.

Only products of matrices count, as they are really done: positions gathered before the vocabulary
layer, look-ups free. A multiply and an add are two operations; training is three times the forward
pass. The share of the peak that a run reaches (MFU) is this number over time and peak.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp

from electra_jax.core.model import TransformerConfig
from electra_jax.core.networks import PretrainSpec
from electra_jax.core.objectives import OBJECTIVES

# Dense bfloat16 peak of one device as JAX counts devices, FLOP/s, from the vendors' data sheets.
PEAK_FLOPS = {
  "NVIDIA A100": 312e12,
  "NVIDIA H100": 989e12,
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


def generator_flops(spec: PretrainSpec, length: int) -> dict[str, int]:
  """Returns the FLOPs of one sequence through the generator in a training step, by part.

  Trained parts count three times, forward and backward; a frozen generator and a second pass for
  sampling without dropout once.
  """
  if not OBJECTIVES[spec.objective].kinds or spec.generator_kind in ("uniform", "unigram"):
    return {}
  cfg, K = spec.generator, spec.masking.num_masked(length, True)
  encoder, head = encoder_flops(cfg, length), mlm_head_flops(cfg, K)
  if spec.generator_kind == "frozen":
    return {"generator, forward": encoder + head}
  if spec.generator_kind == "two_tower":
    # The head reads both towers' states: everywhere for the loss, at the masked to sample.
    wide = dataclasses.replace(cfg, hidden_size=2 * cfg.hidden_size)
    encoder = 2 * encoder
    parts = {"generator": 3 * (encoder + mlm_head_flops(wide, length))}
    parts["generator's samples"] = mlm_head_flops(wide, K)
    head = mlm_head_flops(wide, K)
  else:
    parts = {"generator": 3 * (encoder + head)}
  if not spec.sampling_dropout:
    parts["second pass to sample"] = encoder + head
  return parts


def main_flops(spec: PretrainSpec, length: int) -> dict[str, int]:
  """Returns the FLOPs of one sequence through the network that is kept, in a training step."""
  cfg, definition = spec.discriminator, OBJECTIVES[spec.objective]
  parts = {"discriminator": 3 * encoder_flops(cfg, length)}
  for name in definition.heads:
    if name == "mlm_head":
      positions = length if definition.predicts_all else spec.masking.num_masked(length, True)
      parts[name] = 3 * mlm_head_flops(cfg, positions)
    elif name == "rtd_head":
      parts[name] = 3 * rtd_head_flops(cfg, length)
    else:
      parts[name] = 3 * 2 * length * cfg.hidden_size
  return parts


def step_flops(spec: PretrainSpec, batch_size: int, length: int) -> int:
  """Returns the matrix FLOPs of one training step on the global batch.

  What is computed a second time to save memory (`remat`, the vocabulary in slices) counts once.

  >>> from electra_jax.core import masking
  >>> from electra_jax.core.model import TransformerConfig, generator_size
  >>> d = TransformerConfig(30522, 128, 256, 12, 4, 1024, 512)
  >>> m = masking.Masking(0.15, 0.85, 1.0, 103, (0, 101, 102, 103))
  >>> step_flops(PretrainSpec(generator_size(d, 1 / 4, 1.0), d, m), 1, 128) / 1e9  # ELECTRA-Small
  8.984...
  """
  parts = generator_flops(spec, length) | main_flops(spec, length)
  return batch_size * sum(parts.values())


def peak_flops(device: jax.Device) -> tuple[float, str]:
  """Returns the peak of one device in FLOP/s, and where the number is from.

  Accelerators by their data sheet; where there is none, the best of a few large products: of
  bfloat16 on an accelerator, of float32 on a CPU, shared by the devices that it is divided into.
  """
  for kind in sorted(PEAK_FLOPS, key=len, reverse=True):
    if kind.lower() in device.device_kind.lower():
      return PEAK_FLOPS[kind], "data sheet, bfloat16"
  if device.platform != "cpu":
    return measure_matmul_peak(8192, dtype="bfloat16"), "measured, bfloat16"
  fakes = sum(d.process_index == device.process_index for d in jax.devices())
  return measure_matmul_peak() / fakes, "measured, float32"


def measure_matmul_peak(size: int = 2048, repeats: int = 5, dtype: str = "float32") -> float:
  """Returns the FLOP/s of the fastest of `repeats` products of size x size matrices."""
  product = jax.jit(jnp.matmul)
  a = jnp.ones((size, size), dtype)
  product(a, a).block_until_ready()
  best = float("inf")
  for _ in range(repeats):
    start = time.perf_counter()
    product(a, a).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return 2 * size**3 / best
