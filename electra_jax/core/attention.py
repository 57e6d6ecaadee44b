"""Attention to all tokens or to a window, and rotary positions. Letters as in `encoder`."""

import jax
import jax.numpy as jnp

from electra_jax.core.layers import dropout
from electra_jax.core.transformer_config import TransformerConfig

Table = tuple[jax.Array, jax.Array]  # cosines and sines [L, d / 2] float32


def rope_table(length: int, width: int, theta: float) -> Table:
  """Returns cos and sin of the angles i theta^(-2 j / width) (Su et al. 2021, Section 3.2.2)."""
  rates = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
  angles = jnp.arange(length, dtype=jnp.float32)[:, None] * rates
  return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, table: Table) -> jax.Array:
  """Turns x [B, L, H, d] by its positions; number j pairs with j + d / 2, as in ModernBERT."""
  cos, sin = (t[:, None, :] for t in table)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
  return turned.astype(x.dtype)


def attend(
  cfg: TransformerConfig,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  padding_mask: jax.Array,
  seeds: jax.Array | None,
  local: bool = False,
) -> jax.Array:
  """Scaled dot-product attention; padding is never attended to.

  Args:
    q, k, v: [B, L, H, D / H], as is the result.
    padding_mask: [B, L] bool, True on tokens; padding is at the end.
    seeds: [B, 2] uint32 for dropout on the probabilities, or None.
    local: whether tokens see those at most cfg.window // 2 away only.

  Raises:
    ValueError: attention is cuDNN and dropout is on; JAX's cuDNN attention has none.
  """
  if local and local_scores(cfg, q.shape[1]) < q.shape[1] ** 2:
    return _attend_in_blocks(cfg, q, k, v, padding_mask, seeds)
  if cfg.compute.attention == "cudnn" and not local:  # which has no window on both sides
    if seeds is not None and cfg.attention_dropout:
      raise ValueError(
        f"cudnn attention has no dropout: set model.attention_dropout to 0 (it is "
        f"{cfg.attention_dropout}) or model.attention to xla"
      )
    # Lengths, because cuDNN turns a mask into a dense bias, which is slow. A length of 0 gives
    # 0 / 0 = NaN, whose gradient would reach the weights.
    lengths = jnp.maximum(padding_mask.sum(-1, dtype=jnp.int32), 1)
    return jax.nn.dot_product_attention(
      q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths, implementation="cudnn"
    )
  scores = jnp.einsum("blhd,bmhd->bhlm", q, k, preferred_element_type=jnp.float32)
  scores = scores * (q.shape[-1] ** -0.5)
  scores = jnp.where(_visible(cfg, padding_mask, local), scores, -1e9)
  probs = dropout(jax.nn.softmax(scores), cfg.attention_dropout, seeds).astype(v.dtype)
  return jnp.einsum("bhlm,bmhd->blhd", probs, v)


def _within(cfg: TransformerConfig, distance: jax.Array, local: bool) -> jax.Array:
  """Returns whether a query may see a key that stands `distance` tokens to its right."""
  seen = jnp.ones(distance.shape, bool)
  if cfg.direction != "both":
    seen = distance <= 0 if cfg.direction == "ltr" else distance >= 0
  return seen & (jnp.abs(distance) <= cfg.window // 2) if local else seen


def _visible(cfg: TransformerConfig, padding_mask: jax.Array, local: bool) -> jax.Array:
  """Returns the attention mask: [B, 1, 1 or L, L] bool, True where a query may attend."""
  padding_mask = padding_mask[:, None, None, :]
  if cfg.direction == "both" and not local:
    return padding_mask
  at = jnp.arange(padding_mask.shape[-1])
  return padding_mask & _within(cfg, at - at[:, None], local)


def local_scores(cfg: TransformerConfig, length: int) -> int:
  """Returns how many scores a head of a local layer computes for `length` tokens."""
  size = cfg.window // 2
  return min(length * length, -(-length // size) * size * 3 * size)


def _attend_in_blocks(
  cfg: TransformerConfig, q: jax.Array, k: jax.Array, v: jax.Array, padding_mask: jax.Array, seeds
) -> jax.Array:
  """Local attention: a block of window // 2 queries sees its own keys and both neighbours'.

  So L queries have 3 (window // 2) scores each, not L, on every kind of device.
  """
  B, L, H, d = q.shape
  size = cfg.window // 2
  count = -(-L // size)
  missing = count * size - L

  def padded(x: jax.Array, left: int, right: int) -> jax.Array:
    x = jnp.pad(x, ((0, 0), (left, right + missing), *((0, 0),) * (x.ndim - 2)))
    return x.reshape(B, -1, size, *x.shape[2:])

  def neighbours(x: jax.Array) -> jax.Array:
    x = padded(x, size, size)
    return jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], axis=2)

  q, k, v = padded(q, 0, 0), neighbours(k), neighbours(v)
  distance = jnp.arange(-size, 2 * size) - jnp.arange(size)[:, None]
  seen = _within(cfg, distance, True) & neighbours(padding_mask)[:, :, None, None, :]
  scores = jnp.einsum("bnqhd,bnkhd->bnhqk", q, k, preferred_element_type=jnp.float32)
  scores = jnp.where(seen, scores * d**-0.5, -1e9)
  probs = dropout(jax.nn.softmax(scores), cfg.attention_dropout, seeds).astype(v.dtype)
  y = jnp.einsum("bnhqk,bnkhd->bnqhd", probs, v)
  return y.reshape(B, count * size, H, d)[:, :L]
