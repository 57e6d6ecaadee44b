"""Attention to all tokens, to a document or to a window.

Letters as in `encoder`. A new implementation is a function and an entry in ATTENTION.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from electra_jax.core.batch import TOKENS_PER_DOCUMENT
from electra_jax.core.layers import dropout, einsum_float32
from electra_jax.core.transformer_config import TransformerConfig


class Inputs(NamedTuple):
  """The inputs of attention."""

  q: jax.Array  # [B, L or K, H, D / H], as the result
  k: jax.Array  # [B, L, H, D / H]
  v: jax.Array
  padding_mask: jax.Array  # [B, L] bool, True on tokens; padding is at the end
  document_ids: jax.Array | None  # [B, L] int32 as in `Batch`, or None
  seeds: jax.Array | None  # [B, 2] uint32 for dropout on the probabilities, or None
  bias: jax.Array | None = None  # [B, H, L or K, L], added to the products of queries and keys
  summands: int = 1  # of a score: their sum is divided by sqrt(summands x d)
  at: jax.Array | None = None  # [B, K] int32, the queries' positions; None: all L


def attend(cfg: TransformerConfig, inputs: Inputs, local: bool = False) -> jax.Array:
  """Scaled dot-product attention, never to padding or other documents.

  With `local`, tokens attend only to tokens at most cfg.window // 2 away.

  Raises:
    ValueError: cfg needs dropout or one direction, which cfg.compute.attention lacks.
  """
  kind = ATTENTION[cfg.compute.attention]
  if cfg.direction != "both" and not kind.one_direction:
    raise ValueError(f"{cfg.compute.attention} attention needs direction=both, got {cfg.direction}")
  if inputs.seeds is not None and cfg.attention_dropout and not kind.dropout:
    raise ValueError(
      f"{cfg.compute.attention} attention has no dropout: set model.attention_dropout to 0, got "
      f"{cfg.attention_dropout}, or model.attention to xla"
    )
  if inputs.bias is not None and not kind.bias:
    raise ValueError(
      f"{cfg.compute.attention} attention has no {cfg.positions} positions: set model.attention to"
      " xla"
    )
  if inputs.at is not None or (local and not kind.local):
    kind = ATTENTION["xla"]
  return kind.apply(cfg, inputs, local)


def _xla(cfg: TransformerConfig, inputs: Inputs, local: bool) -> jax.Array:
  """Attention by a mask: the reference."""
  q, k, v, padding_mask, document_ids, seeds, bias, summands, queries = inputs
  if local and local_scores(cfg, q.shape[1]) < q.shape[1] ** 2:
    return _attend_in_blocks(cfg, inputs)
  scores = einsum_float32("blhd,bmhd->bhlm", q, k)
  if bias is not None:
    scores = scores + bias
  scores = scores * ((summands * q.shape[-1]) ** -0.5)
  seen = padding_mask[:, None, None, :]  # [B, 1, 1 or L, L]
  if document_ids is not None:
    own = document_ids if queries is None else jnp.take_along_axis(document_ids, queries, axis=1)
    seen = seen & (own[:, None, :, None] == document_ids[:, None, None, :])
  if cfg.direction != "both" or local:
    at = jnp.arange(padding_mask.shape[-1])
    seen = seen & _within(cfg, at - at[:, None], local)
  scores = jnp.where(seen, scores, -1e9)
  probs = dropout(jax.nn.softmax(scores), cfg.attention_dropout, seeds).astype(v.dtype)
  return jnp.einsum("bhlm,bmhd->blhd", probs, v)


def _cudnn(cfg: TransformerConfig, inputs: Inputs, local: bool) -> jax.Array:
  """cuDNN's fused attention, with sequence lengths, because a mask makes it build a dense bias.

  It packs documents on GPUs of compute capability 9.0 or later; on others they are masked.
  """
  q, k, v, padding_mask, document_ids = inputs[:5]
  if document_ids is None:
    # A length of 0 would give 0 / 0 = NaN, also in the gradient of the weights.
    lengths = jnp.maximum(padding_mask.sum(-1, dtype=jnp.int32), 1)
    return jax.nn.dot_product_attention(
      q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths, implementation="cudnn"
    )
  try:
    # The only function that takes several documents per row is private (JAX 0.10 to 0.12).
    from jax._src.cudnn import fused_attention_stablehlo as fused

    packs = fused.check_compute_capability("9.0")
  except (ImportError, AttributeError):
    packs = False
  if not packs:
    warnings.warn(
      "cuDNN packs documents only on Hopper GPUs and later: masking them instead", stacklevel=2
    )
    return _xla(cfg, inputs, local)
  lengths, starts = packed_layout(document_ids)
  return fused.dot_product_attention(
    q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=starts, kv_offsets=starts,
    scale=q.shape[-1] ** -0.5, mask_type=fused.MaskType.PADDING,
  )  # fmt: skip


def packed_layout(document_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns lengths [B, M] and starts [B, M + 1] int32 of the M = L / 8 + 1 documents of a row.

  Padding counts as a document, because cuDNN leaves tokens outside documents uninitialised. Missing
  documents have -1.
  """
  L = document_ids.shape[1]
  most = L // TOKENS_PER_DOCUMENT + 1
  last = document_ids.max(-1, keepdims=True)
  number = jnp.where(document_ids == 0, last, document_ids - 1)
  lengths = (number[..., None] == jnp.arange(most)).sum(1, dtype=jnp.int32)
  starts = jnp.where(lengths > 0, jnp.cumsum(lengths, -1) - lengths, -1)
  return jnp.where(lengths > 0, lengths, -1), jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)


SPLASH_BLOCK = 128  # tokens


def _splash(cfg: TransformerConfig, inputs: Inputs, local: bool, interpret=False) -> jax.Array:
  """Splash attention, a Pallas kernel for TPUs that skips the blocks outside a window.

  With `interpret` it also runs without a TPU, slowly.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  q, k, v, padding_mask, document_ids = inputs[:5]
  length, H, d = q.shape[1:]
  ids = padding_mask.astype(jnp.int32) if document_ids is None else document_ids
  missing = -length % SPLASH_BLOCK
  q, k, v, ids = (
    jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2))) for x in (q, k, v, ids)
  )
  L = length + missing
  side = cfg.window // 2
  mask = masks.LocalMask((L, L), (side, side), 0) if local else masks.FullMask((L, L))
  names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
  sizes = splash.BlockSizes(**{f"block_{name}": SPLASH_BLOCK for name in names})
  kernel = splash.make_splash_mha(
    masks.MultiHeadMask([mask] * H),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )
  q, k, v = (x.swapaxes(1, 2) for x in (q * d**-0.5, k, v))
  return jax.vmap(kernel)(q, k, v, splash.SegmentIds(ids, ids)).swapaxes(1, 2)[:, :length]


@dataclasses.dataclass(frozen=True)
class AttentionDef:
  """The definition of an implementation of attention."""

  apply: Callable[[TransformerConfig, Inputs, bool], jax.Array]
  platform: str | None = None  # the platform that it runs on; None: any
  dropout: bool = False  # on the probabilities
  local: bool = False  # supports windows; else "xla" computes local layers
  one_direction: bool = False
  bias: bool = False  # supports `Inputs.bias`
  takes_head: Callable[[int], bool] = lambda width: True


# All have the same results up to rounding.
ATTENTION = {
  "xla": AttentionDef(_xla, dropout=True, local=True, one_direction=True, bias=True),
  "cudnn": AttentionDef(_cudnn, "gpu", takes_head=lambda width: width % 8 == 0 and width <= 128),
  "splash": AttentionDef(_splash, "tpu", local=True),
}


def _within(cfg: TransformerConfig, distance: jax.Array, local: bool) -> jax.Array:
  """Returns whether a query may see a key `distance` tokens to its right."""
  seen = jnp.ones(distance.shape, bool)
  if cfg.direction != "both":
    seen = distance <= 0 if cfg.direction == "ltr" else distance >= 0
  return seen & (jnp.abs(distance) <= cfg.window // 2) if local else seen


def local_scores(cfg: TransformerConfig, length: int) -> int:
  """Returns the number of scores that a head of a local layer computes for `length` tokens."""
  size = cfg.window // 2
  return min(length * length, -(-length // size) * size * 3 * size)


def encoder_scores(cfg: TransformerConfig, length: int) -> int:
  """Returns the number of scores that a head computes, summed over layers."""
  whole = -(-cfg.num_layers // cfg.global_every)
  return whole * length * length + (cfg.num_layers - whole) * local_scores(cfg, length)


def _attend_in_blocks(cfg: TransformerConfig, inputs: Inputs) -> jax.Array:
  """Local attention: a block of window // 2 queries attends to its keys and the adjacent blocks'.

  A query has 3 (window // 2) scores instead of L, on every device.
  """
  q, k, v, padding_mask, document_ids, seeds = inputs[:6]
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
  if document_ids is not None:
    own, others = padded(document_ids, 0, 0), neighbours(document_ids)
    seen &= (own[..., None] == others[:, :, None])[:, :, None]
  scores = einsum_float32("bnqhd,bnkhd->bnhqk", q, k)
  scores = jnp.where(seen, scores * d**-0.5, -1e9)
  probs = dropout(jax.nn.softmax(scores), cfg.attention_dropout, seeds).astype(v.dtype)
  y = jnp.einsum("bnhqk,bnkhd->bnqhd", probs, v)
  return y.reshape(B, count * size, H, d)[:, :L]
