"""Masking, sampling and corruption of tokens (Clark et al. 2020, Section 3.1, Appendix A).

Each sequence has its own random key, so results do not depend on devices or hosts.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from electra_jax.core.batch import Batch
from electra_jax.core.schedules import Schedule
from electra_jax.core.word_parts import ALONE, CONTINUES


@dataclasses.dataclass(frozen=True)
class Masking:
  """Masking and sampling rates, and the ids of special tokens."""

  mask_prob: Schedule  # fraction of tokens to predict, a `Schedule` or a number
  mask_token_prob: float  # fraction of these replaced by [MASK]
  temperature: Schedule  # divides the generator's logits in sampling, a `Schedule` or a number
  mask_id: int
  special_ids: tuple[int, ...]  # ids never masked: [PAD], [CLS], [SEP], [MASK]
  disallow_correct: bool = False  # never sample the original token
  # fraction of the samples drawn by token frequency, a `Schedule` or a number
  unigram_share: Schedule = Schedule(0.0)
  keep_mask_share: float = 0.0  # fraction of the samples to leave out: these tokens stay [MASK]
  # [V] bytes, of `core.word_parts` for each token: all tokens of a word are masked or
  # none; b"": each token by itself
  word_parts: bytes = dataclasses.field(default=b"", repr=False)

  def __post_init__(self):
    for name, fits, wanted in (
      ("mask_prob", lambda rate: 0 < rate < 1, "between 0 and 1"),
      ("temperature", lambda temperature: temperature > 0, "above 0"),
      ("unigram_share", lambda share: 0 <= share <= 1, "from 0 to 1"),
    ):
      schedule = Schedule.of(getattr(self, name))
      object.__setattr__(self, name, schedule)
      for place, value in enumerate(schedule.values):
        if not fits(value):
          field = f"{name}_schedule" if place else name
          raise ValueError(f"objective.{field} must be {wanted}, got {value}")
    for name in ("mask_token_prob", "keep_mask_share"):
      if not 0 <= (rate := getattr(self, name)) <= 1:
        raise ValueError(f"objective.{name} must be from 0 to 1, got {rate}")

  def num_masked(self, length: int, training: bool) -> int:
    """Returns K for the highest mask rate of training, or for the mask rate of evaluation."""
    return num_masked(self.mask_prob.highest(training), length)


class MaskedPositions(NamedTuple):
  """K masked positions per sequence."""

  positions: jax.Array  # [B, K] int32, distinct per sequence, not sorted
  labels: jax.Array  # [B, K] int32, original tokens
  weights: jax.Array  # [B, K] float32, 1 on masked positions, 0 on unused ones


def num_masked(mask_prob: float, length: int) -> int:
  """Returns K = floor((p + 0.005) L) clipped to [1, L], as in the original.

  >>> num_masked(0.15, 128), num_masked(0.15, 512), num_masked(0.999, 512)
  (19, 79, 512)
  """
  return min(max(1, int((mask_prob + 0.005) * length)), length)


def maskable(batch: Batch, masking: Masking) -> jax.Array:
  """Returns [B, L] bool: True on tokens that are neither padding nor special."""
  return batch.padding_mask & ~jnp.isin(batch.ids, jnp.array(masking.special_ids, jnp.int32))


def choose(
  batch: Batch, masking: Masking, keys: jax.Array, step: jax.Array | None = None
) -> MaskedPositions:
  """Draws round(mask_prob x tokens) positions per sequence, uniformly, without replacement.

  Special tokens are counted but never drawn. The number is clipped to [1, K]. With
  `masking.word_parts`, draws words; the last one is left out if it would exceed the number, unless
  it is the only one.

  Differs from the original, which draws with replacement and averages the ids of collisions.

  Args:
    keys: [B] typed keys.
    step: [] int32 training step, which sets the rate; None in evaluation.
  """
  L = batch.ids.shape[1]
  K = masking.num_masked(L, step is not None)
  candidate = maskable(batch, masking)
  draw = jax.vmap(lambda key: jax.random.uniform(key, (L,)))(keys)
  if masking.word_parts:
    draw = jnp.take_along_axis(draw, word_starts(batch.ids, candidate, masking.word_parts), axis=1)
  # Of equal draws the first comes first, so the tokens of a word stand in a row.
  more = min(K + bool(masking.word_parts), L)  # tells whether the last word ends
  score, positions = jax.lax.top_k(jnp.where(candidate, draw, -1.0), more)
  # Rounds half to even, as tf.round.
  wanted = jnp.clip(jnp.round(masking.mask_prob.at(step) * batch.padding_mask.sum(-1)), 1, K)
  weights = (jnp.arange(more) < wanted[:, None]) & (score >= 0)
  if masking.word_parts:
    after = jnp.pad(score, ((0, 0), (0, 1)), constant_values=-1.0)
    following = jnp.take_along_axis(after, wanted[:, None].astype(jnp.int32), axis=1)
    whole = weights & (score > following)
    weights = jnp.where(whole.any(-1, keepdims=True), whole, weights)
  positions, weights = positions[:, :K], weights[:, :K]
  labels = jnp.take_along_axis(batch.ids, positions, axis=1)
  return MaskedPositions(positions, labels, weights.astype(jnp.float32))


def word_starts(ids: jax.Array, candidate: jax.Array, word_parts: bytes) -> jax.Array:
  """Returns the position of the first token of each token's word, [B, L] int32, for ids [B, L].

  A token that is not a `candidate` [B, L] stands alone, whatever its part.
  """
  part = jnp.where(candidate, jnp.array(np.frombuffer(word_parts, np.uint8))[ids], ALONE)
  before = jnp.pad(part, ((0, 0), (1, 0)), constant_values=ALONE)[:, :-1]
  part = (part == CONTINUES) & (before != ALONE)
  at = jnp.arange(ids.shape[1], dtype=jnp.int32)
  return jax.lax.cummax(jnp.where(part, 0, at), axis=1)


# (rows [B, L], distinct positions [B, K], values [B, K]) -> rows with the values at the positions.
_put = jax.vmap(lambda row, at, value: row.at[at].set(value, unique_indices=True))


def write(ids: jax.Array, masked: MaskedPositions, values: jax.Array) -> jax.Array:
  """Returns ids [B, L] with values [B, K] at the positions of weight 1."""
  values = jnp.where(masked.weights > 0, values, masked.labels)
  return _put(ids, masked.positions, values)


def mask(ids: jax.Array, masked: MaskedPositions, masking: Masking, keys: jax.Array) -> jax.Array:
  """Replaces a random `mask_token_prob` of the masked positions by [MASK].

  As in the original, 85 % become [MASK], 15 % stay, none is random; the loss covers all.
  """
  K = masked.positions.shape[1]
  draw = jax.vmap(lambda key: jax.random.uniform(key, (K,)))(keys)
  shown = jnp.where(draw < masking.mask_token_prob, masking.mask_id, masked.labels)
  return write(ids, masked, shown)


def gather(states: jax.Array, masked: MaskedPositions) -> jax.Array:
  """Returns states [B, K, D] at the masked positions of states [B, L, D]."""
  return jnp.take_along_axis(states, masked.positions[..., None], axis=1)


def disallow(logits: jax.Array, tokens: jax.Array) -> jax.Array:
  """Sets the logits [B, K, V] of `tokens` ([B, K] or scalar) to -1e30: they are never sampled."""
  return jnp.where(jnp.arange(logits.shape[-1]) == tokens[..., None], -1e30, logits)


def is_masked(masked: MaskedPositions, length: int) -> jax.Array:
  """Returns [B, L] bool: True on masked positions of weight 1."""
  nowhere = jnp.zeros((len(masked.positions), length), bool)
  return _put(nowhere, masked.positions, masked.weights > 0)


_BLOCK = 256  # about sqrt(V), so that the search is short at both levels


def exp_sums(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the maxima [..., 1] of logits [..., V] and sums of exp(logits - maximum), by block.

  The sums are [..., n], over n blocks of the vocabulary. The loss and the sampler share both,
  because XLA computes equal expressions once.
  """
  V, best = logits.shape[-1], logits.max(-1, keepdims=True)
  size = min(_BLOCK, V)
  blocks = -(-V // size)
  behind = [(0, 0)] * (logits.ndim - 1) + [(0, blocks * size - V)]
  padded = jnp.pad(logits - best, behind, constant_values=-jnp.inf)
  sums = jnp.exp(padded).reshape(*logits.shape[:-1], blocks, size).sum(-1)
  # Without the barrier XLA fuses the sum over blocks and reads the logits once more.
  return best, jax.lax.optimization_barrier(sums)


def sample(logits: jax.Array, temperature, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Samples one token per position from softmax(logits / temperature), without gradient.

  It inverts the CDF over blocks of the vocabulary, then within a block, with one random number per
  position; the Gumbel trick needs V, with two logarithms each.

  Args:
    logits: [B, K, V] float32.
    keys: [B] typed keys.

  Returns:
    tokens [B, K] int32, and their -log p [B, K] float32: an unbiased estimate of the entropy.
  """
  K, V = logits.shape[1:]
  z = jax.lax.stop_gradient(logits) / temperature
  best, sums = exp_sums(z)
  cdf = jnp.cumsum(sums, axis=-1)
  # In the open interval (0, 1); the minimum is there because float32 rounds (2^24 - 0.5) / 2^24
  # to 1.
  bits = jax.vmap(lambda key: jax.random.bits(key, (K,), jnp.uint32))(keys)
  u = jnp.minimum(((bits >> 8).astype(jnp.float32) + 0.5) * 2.0**-24, 1 - 2.0**-24)
  target = u * cdf[..., -1]
  block = jnp.minimum((cdf <= target[..., None]).sum(-1), sums.shape[-1] - 1)
  before = jnp.take_along_axis(cdf - sums, block[..., None], axis=-1)[..., 0]
  tokens = block[..., None] * _BLOCK + jnp.arange(_BLOCK)
  near = jnp.take_along_axis(z, jnp.minimum(tokens, V - 1), axis=-1) - best
  inside = jnp.where(tokens < V, jnp.exp(near), 0.0)
  inner = jnp.cumsum(inside, axis=-1)
  # The two levels round differently: clip to the last token of the block with any mass.
  target = jnp.clip(target - before, 0.0, inner[..., -1] * (1 - 2.0**-23))
  offset = jnp.minimum((inner <= target[..., None]).sum(-1), _BLOCK - 1)
  drawn = jnp.minimum(block * _BLOCK + offset, V - 1).astype(jnp.int32)
  picked = jnp.take_along_axis(near, offset[..., None], axis=-1)[..., 0]
  return drawn, jnp.log(cdf[..., -1]) - picked


def sample_unigrams(
  frequencies: Sequence[float], positions: int, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Samples tokens by their frequency.

  Args:
    frequencies: V counts.
    keys: [B] typed keys.

  Returns:
    tokens [B, positions] int32, and log p [V] float32 of all tokens.
  """
  p = np.array(frequencies, np.float64) / np.sum(frequencies)
  cdf = jnp.array(np.cumsum(p), jnp.float32)
  u = jax.vmap(lambda key: jax.random.uniform(key, (positions,)))(keys)
  last = int(np.flatnonzero(p)[-1])  # rounding may select a later token
  tokens = jnp.minimum(jnp.searchsorted(cdf, u, side="right"), last).astype(jnp.int32)
  return tokens, jnp.array(np.log(np.maximum(p, 1e-30)), jnp.float32)


def corrupt(
  ids: jax.Array, masked: MaskedPositions, sampled: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the corrupted ids [B, L] int32 and is_replaced [B, L] bool.

  A sample equal to the original counts as original (Section 3.1).
  """
  corrupted = write(ids, masked, sampled)
  return corrupted, corrupted != ids
