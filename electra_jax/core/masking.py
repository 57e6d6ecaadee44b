"""Choose, mask, gather, sample, corrupt: what happens to the tokens between the two networks.

Clark et al. 2020, Section 3.1 and Appendix A. Every random choice is drawn from one key a sequence,
so it depends on the sequence's place in the global batch and not on devices or hosts.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from electra_jax.core.batch import Batch
from electra_jax.core.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Masking:
  """How tokens are masked and samples drawn, and the ids of the vocabulary's special tokens.

  Fields:
    mask_prob: fraction of the tokens to predict, a `Schedule` or a number.
    mask_token_prob: fraction of those shown as [MASK].
    temperature: divides the generator's logits for sampling, a `Schedule` or a number.
    special_ids: never masked: [PAD], [CLS], [SEP], [MASK].
    disallow_correct: never sample the original token.
  """

  mask_prob: Schedule
  mask_token_prob: float
  temperature: Schedule
  mask_id: int
  special_ids: tuple[int, ...]
  disallow_correct: bool = False

  def __post_init__(self):
    for name in ("mask_prob", "temperature"):
      object.__setattr__(self, name, Schedule.of(getattr(self, name)))
    for rate in self.mask_prob.values:
      if not 0 < rate < 1:
        raise ValueError(f"mask_prob is between 0 and 1, got {rate}")
    if not 0 <= self.mask_token_prob <= 1:
      raise ValueError(f"mask_token_prob is from 0 to 1, got {self.mask_token_prob}")
    for temperature in self.temperature.values:
      if not temperature > 0:
        raise ValueError(f"temperature is above 0, got {temperature}")

  def num_masked(self, length: int, training: bool) -> int:
    """Returns K: enough for the highest rate there is."""
    return num_masked(self.mask_prob.highest(training), length)


class MaskedPositions(NamedTuple):
  """The masked positions of a batch, K a sequence.

  Fields:
    positions: [B, K] int32, distinct within a sequence, not sorted.
    labels: [B, K] int32, the token at each position before masking.
    weights: [B, K] float32, 1 on positions that count, 0 on those left over.
  """

  positions: jax.Array
  labels: jax.Array
  weights: jax.Array


def num_masked(mask_prob: float, length: int) -> int:
  """Returns K, the masked positions of a sequence: the original's floor((p + 0.005) L), at least 1.

  >>> num_masked(0.15, 128), num_masked(0.15, 512), num_masked(0.25, 512)
  (19, 79, 130)
  """
  return max(1, int((mask_prob + 0.005) * length))


def maskable(batch: Batch, masking: Masking) -> jax.Array:
  """Returns which tokens are neither padding nor special: [B, L] bool."""
  return batch.padding_mask & ~jnp.isin(batch.ids, jnp.array(masking.special_ids, jnp.int32))


def choose(
  batch: Batch, masking: Masking, keys: jax.Array, step: jax.Array | None = None
) -> MaskedPositions:
  """Draws round(mask_prob x tokens) positions of each sequence, uniformly, without replacement.

  Special tokens count as tokens but are never drawn. At least one position is drawn, at most K.

  Differs from the original: it draws with replacement and, where two samples meet on one position,
  writes the average of their ids.

  Args:
    keys: [B] typed keys.
    step: [] int32 for the rate of that training step; None in evaluation.
  """
  L = batch.ids.shape[1]
  K = masking.num_masked(L, step is not None)
  candidate = maskable(batch, masking)
  draw = jax.vmap(lambda key: jax.random.uniform(key, (L,)))(keys)
  score, positions = jax.lax.top_k(jnp.where(candidate, draw, -1.0), K)
  # Rounds half to even, as tf.round does.
  wanted = jnp.clip(jnp.round(masking.mask_prob.at(step) * batch.padding_mask.sum(-1)), 1, K)
  weights = (jnp.arange(K) < wanted[:, None]) & (score >= 0)
  labels = jnp.take_along_axis(batch.ids, positions, axis=1)
  return MaskedPositions(positions, labels, weights.astype(jnp.float32))


def write(ids: jax.Array, masked: MaskedPositions, values: jax.Array) -> jax.Array:
  """Returns ids [B, L] with values [B, K] written at the masked positions that count."""
  values = jnp.where(masked.weights > 0, values, masked.labels)
  return jax.vmap(lambda row, at, value: row.at[at].set(value, unique_indices=True))(
    ids, masked.positions, values
  )


def mask(ids: jax.Array, masked: MaskedPositions, masking: Masking, keys: jax.Array) -> jax.Array:
  """Writes [MASK] at a random `mask_token_prob` of the masked positions, leaves the others alone.

  As in the original: 85 % [MASK], 15 % unchanged, none random; the loss covers them all.
  """
  K = masked.positions.shape[1]
  draw = jax.vmap(lambda key: jax.random.uniform(key, (K,)))(keys)
  shown = jnp.where(draw < masking.mask_token_prob, masking.mask_id, masked.labels)
  return write(ids, masked, shown)


def gather(states: jax.Array, masked: MaskedPositions) -> jax.Array:
  """Returns the states [B, K, D] at the masked positions, from states [B, L, D]."""
  return jnp.take_along_axis(states, masked.positions[..., None], axis=1)


_BLOCK = 256  # about the root of a vocabulary, so that both levels of the search are short


def disallow(logits: jax.Array, tokens: jax.Array) -> jax.Array:
  """Returns logits [B, K, V] that leave no chance to tokens, [B, K] or the same for all."""
  return jnp.where(jnp.arange(logits.shape[-1]) == tokens[..., None], -1e4, logits)


def is_masked(masked: MaskedPositions, length: int) -> jax.Array:
  """Returns which tokens are masked positions that count: [B, L] bool."""
  B = masked.positions.shape[0]
  return (
    write(
      jnp.zeros((B, length), jnp.int32),
      masked._replace(labels=0 * masked.positions),
      jnp.ones_like(masked.positions),
    )
    > 0
  )


def sample(logits: jax.Array, temperature, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Draws one token a position from softmax(logits / temperature), without a gradient.

  By inverting the cumulative distribution in two levels, first over blocks of the vocabulary and
  then inside the block: one random number a position and one pass over the logits, where the Gumbel
  trick draws V numbers and takes two logarithms of each.

  Args:
    logits: [B, K, V] float32.
    keys: [B] typed keys.

  Returns:
    The tokens, [B, K] int32, and -log of the probability that each had, [B, K] float32: an unbiased
    estimate of the distribution's entropy, for which no further pass is needed.
  """
  K, V = logits.shape[1:]
  z = jax.lax.stop_gradient(logits) / temperature
  z = z - z.max(-1, keepdims=True)
  blocks = -(-V // _BLOCK)
  padded = jnp.pad(z, ((0, 0), (0, 0), (0, blocks * _BLOCK - V)), constant_values=-jnp.inf)
  sums = jnp.exp(padded).reshape(*z.shape[:2], blocks, _BLOCK).sum(-1)
  cdf = jnp.cumsum(sums, axis=-1)
  # In (0, 1): 24 bits and a half, so neither end of the distribution is ever met exactly. Above 1/2
  # float32 has no room for the half, and the last number would be rounded to 1.
  bits = jax.vmap(lambda key: jax.random.bits(key, (K,), jnp.uint32))(keys)
  u = jnp.minimum(((bits >> 8).astype(jnp.float32) + 0.5) * 2.0**-24, 1 - 2.0**-24)
  target = u * cdf[..., -1]
  block = jnp.minimum((cdf <= target[..., None]).sum(-1), blocks - 1)
  before = jnp.take_along_axis(cdf - sums, block[..., None], axis=-1)[..., 0]
  tokens = block[..., None] * _BLOCK + jnp.arange(_BLOCK)
  near = jnp.take_along_axis(z, jnp.minimum(tokens, V - 1), axis=-1)
  inside = jnp.where(tokens < V, jnp.exp(near), 0.0)
  inner = jnp.cumsum(inside, axis=-1)
  # The two levels round differently; the last token with any mass in the block is the limit.
  target = jnp.clip(target - before, 0.0, inner[..., -1] * (1 - 2.0**-23))
  offset = jnp.minimum((inner <= target[..., None]).sum(-1), _BLOCK - 1)
  drawn = jnp.minimum(block * _BLOCK + offset, V - 1).astype(jnp.int32)
  picked = jnp.take_along_axis(near, offset[..., None], axis=-1)[..., 0]
  return drawn, jnp.log(cdf[..., -1]) - picked


def corrupt(
  ids: jax.Array, masked: MaskedPositions, sampled: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Writes the generator's samples into the text.

  Returns:
    The corrupted ids [B, L] int32 and is_replaced [B, L] bool: a sample that equals the original
    counts as original (Section 3.1).
  """
  corrupted = write(ids, masked, sampled)
  return corrupted, corrupted != ids
