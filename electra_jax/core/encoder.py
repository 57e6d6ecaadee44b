"""The encoder: BERT's post-norm blocks as ELECTRA uses them, or ModernBERT's pre-norm blocks.

ELECTRA: Clark et al. 2020, Section 3 and Appendix A. ModernBERT: Warner et al. 2024, Section 2.1.
Modules are pure functions of (params, inputs, dropout_seeds). Letters: B batch, L length, K masked
positions, D hidden size, E embedding size, F feed-forward size, H heads, d head size, V vocabulary,
N layers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from electra_jax.core import attention, positions
from electra_jax.core.layers import block_output, dense, dropout, feed_forward, norm, unstack
from electra_jax.core.positions import POSITIONS
from electra_jax.core.transformer_config import TransformerConfig


class Embeddings(nn.Module):
  """Word + position + token type embeddings and their norm; `Encoder` applies dropout."""

  cfg: TransformerConfig

  @nn.compact
  def __call__(
    self, ids: jax.Array, token_type_ids: jax.Array, document_ids: jax.Array | None = None
  ) -> jax.Array:
    """Returns [B, L, E] float32 for [B, L] int32 each; document_ids as in `Batch`."""
    cfg, init = self.cfg, nn.initializers.truncated_normal(self.cfg.init_stddev)
    word = self.param("word", init, (cfg.vocab_size, cfg.embedding_size))
    x = word[ids]
    if POSITIONS[cfg.positions].embedded:
      position = self.param("position", init, (cfg.max_positions, cfg.embedding_size))
      if document_ids is None:
        x = x + position[: ids.shape[1]]
      else:
        x = x + position[positions.document_positions(document_ids)]
    if cfg.token_types:
      token_type = self.param("token_type", init, (2, cfg.embedding_size))
      # With two rows, a select is cheaper than a gather, forward and backward.
      x = x + jnp.where((token_type_ids == 0)[..., None], token_type[0], token_type[1])
    return norm(cfg, "layer_norm")(x) if cfg.embedding_norm else x


def _post_norm(cfg: TransformerConfig, x, attend, feed_forward, normalised):
  """Maps x [B, L, D] to [B, L, D], with a norm after each sum (Vaswani et al. 2017)."""
  x = norm(cfg, "attention_norm")(x + attend(x)).astype(cfg.compute.dtype)
  return norm(cfg, "ffn_norm")(x + feed_forward(x)).astype(cfg.compute.dtype)


def _pre_norm(cfg: TransformerConfig, x, attend, feed_forward, normalised):
  """Maps x [B, L, D] to [B, L, D], with a norm before each sublayer (Xiong et al. 2020)."""
  y = x if normalised else norm(cfg, "attention_norm")(x)
  x = x + attend(y.astype(cfg.compute.dtype))
  return x + feed_forward(norm(cfg, "ffn_norm")(x).astype(cfg.compute.dtype))


@dataclasses.dataclass(frozen=True)
class BlockDef:
  """The definition of a block."""

  # (cfg, x, attend, feed_forward, normalised) -> states [B, L, D], as x and both functions' inputs
  # and outputs; `normalised` is True in the first layer of a network without first_norm
  apply: Callable
  # the states between blocks are a float32 residual stream, which is normalised at the end
  residual: bool = False


BLOCKS = {"post_norm": BlockDef(_post_norm), "pre_norm": BlockDef(_pre_norm, residual=True)}


class Context(NamedTuple):
  """Inputs shared by all blocks of an encoder."""

  padding_mask: jax.Array  # [B, L] bool
  document_ids: jax.Array | None  # [B, L] int32 as in `Batch`
  positions: Any  # what `PositionsDef.tables` returns


class Queries(NamedTuple):
  """K tokens of each row, which attend to all of it."""

  states: jax.Array  # [B, K, D]
  at: jax.Array  # [B, K] int32, their positions


class Block(nn.Module):
  """Self-attention and feed-forward in the order of cfg.block."""

  cfg: TransformerConfig
  local: bool = False  # whether tokens attend to a window
  normalised: bool = False  # whether the input is normalised

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    context: Context,
    dropout_seeds: jax.Array | None,
    queries: Queries | None = None,
  ):
    """Returns (states, None), [B, L, D] for x [B, L, D] or those [B, K, D] of `queries` to x.

    dropout_seeds: [B, 4, 2] uint32 or None.
    """
    cfg, encoding = self.cfg, POSITIONS[self.cfg.positions]

    def seeds_of(site: int) -> jax.Array | None:
      return None if dropout_seeds is None else dropout_seeds[:, site]

    def attend(y):
      qkv = dense(cfg, (3, cfg.num_heads, cfg.head_size), "qkv")
      q, k, v = unstack(qkv(y if queries is None else x), 2, from_rows=not encoding.rotary)
      if queries is not None:
        q = unstack(qkv(y), 2)[0]
      if cfg.qk_norm:
        q = norm(cfg, "q_norm")(q).astype(v.dtype)
        k = norm(cfg, "k_norm")(k).astype(v.dtype)
      at = None if queries is None else queries.at
      layer = positions.Layer(q, k, self.local, lambda t: unstack(qkv(t), 1)[:2], seeds_of(3), at)
      q, k, *_, bias, summands = encoding.apply(cfg, layer, context.positions)
      masks = context.padding_mask, context.document_ids
      inputs = attention.Inputs(q, k, v, *masks, seeds_of(0), bias, summands, at)
      y = attention.attend(cfg, inputs, self.local)
      y = block_output(cfg, "attention_output", axis=(-2, -1))(y)
      return dropout(y, cfg.dropout, seeds_of(1))

    def forward(x):
      rate = cfg.dropout if cfg.ffn_dropout is None else cfg.ffn_dropout
      return dropout(feed_forward(cfg, x), rate, seeds_of(2))

    own = x if queries is None else queries.states
    return BLOCKS[cfg.block].apply(cfg, own, attend, forward, self.normalised), None


def _apply_layers(
  cfg: TransformerConfig, count: int, stacked, x: jax.Array, context: Context
) -> jax.Array:
  """Maps x [B, L, D] to [B, L, D] by `count` blocks, the N of what follows.

  Each iteration of the scan runs cfg.global_every layers, so that XLA knows at compile time whether
  a layer's attention is global or local. A choice at run time would keep the activations of both
  branches for the backward pass. The N % global_every remaining layers run before the scan; if N is
  divisible and the first layer has no first norm, the first global_every layers do.

  Args:
    stacked: (params, dropout_seeds) of `Block`, each array [N, ...].
  """
  period, own_kind = cfg.global_every, not cfg.first_norm
  before = min(count % period or period * own_kind, count)
  iterations = (count - before) // period
  unroll = max(min(cfg.compute.unroll // period, iterations), 1)

  def layer(index: int, x: jax.Array, inputs, in_loop: bool) -> jax.Array:
    block = Block(cfg, index % period != 0, own_kind and index == 0, parent=None)

    def apply(x, params, seeds):
      return block.apply({"params": params}, x, context, seeds)[0]

    if cfg.compute.remat:
      apply = jax.checkpoint(apply, prevent_cse=not in_loop)
    return apply(x, *inputs)

  def at(i: int, tree):
    return jax.tree.map(lambda a: a[i], tree)

  for i in range(before):
    x = layer(i, x, at(i, stacked), False)

  def iteration(x, inputs):
    for j in range(period):
      x = layer(before + j, x, at(j, inputs), unroll < iterations)
    return x, None

  def group(a):
    return a[before:].reshape(iterations, period, *a.shape[1:])

  return jax.lax.scan(iteration, x, jax.tree.map(group, stacked), iterations, unroll=unroll)[0]


def _decode(
  cfg: TransformerConfig, stacked, x: jax.Array, context: Context, queries: Queries
) -> jax.Array:
  """Returns states [B, K, D] by the enhanced mask decoder (He et al. 2020, Section 3.2).

  The states of all layers but the last, plus `queries.states`, attend twice to these states by the
  last layer's weights, as in Microsoft's code. Other positions' results are not needed.
  """
  but_last = jax.tree.map(lambda a: a[:-1], stacked)
  x = _apply_layers(cfg, cfg.num_layers - 1, but_last, x, context)
  params, seeds = jax.tree.map(lambda a: a[-1], stacked)
  y = jnp.take_along_axis(x, queries.at[..., None], axis=1) + queries.states.astype(x.dtype)
  for salt in (0, 0x9E3779B9):  # dropout differs
    salted = None if seeds is None else seeds ^ jnp.uint32(salt)
    apply = Block(cfg, parent=None).apply
    apply = jax.checkpoint(apply) if cfg.compute.remat else apply
    y = apply({"params": params}, x, context, salted, Queries(y, queries.at))[0]
  return y


class Encoder(nn.Module):
  """Dropout, a projection if E and D differ, and N blocks with stacked parameters."""

  cfg: TransformerConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    padding_mask: jax.Array,
    dropout_seeds: tuple[jax.Array, jax.Array] | None,
    document_ids: jax.Array | None = None,
    queries: Queries | None = None,
  ) -> jax.Array:
    """Returns the last hidden states, [B, L, D] in the compute dtype, for x [B, L, E].

    With `queries`, returns those [B, K, D] of the enhanced mask decoder (`_decode`).
    """
    cfg, kind = self.cfg, BLOCKS[self.cfg.block]
    embedding_seeds, layer_seeds = (None, None) if dropout_seeds is None else dropout_seeds
    rate = cfg.dropout if cfg.embedding_dropout is None else cfg.embedding_dropout
    x = dropout(x, rate, embedding_seeds).astype(cfg.compute.dtype)
    if cfg.embedding_size != cfg.hidden_size:
      # As in the original: Glorot, unlike the other layers.
      x = dense(cfg, cfg.hidden_size, "project", kernel_init=nn.initializers.glorot_uniform())(x)
    tables = POSITIONS[cfg.positions].tables(cfg, x.shape[1], document_ids)
    context = Context(padding_mask, document_ids, tables)
    if kind.residual:
      x = x.astype(jnp.float32)
    if self.is_initializing():
      # The initial weights depend on this scan, which traces a block twice.
      layers = nn.scan(
        Block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(nn.broadcast, 0),
        length=cfg.num_layers,
      )
      x, _ = layers(cfg, name="layers")(x, context, layer_seeds)
    else:
      stacked = (self.variables["params"]["layers"], layer_seeds)
      if queries is not None:
        return _decode(cfg, stacked, x, context, queries)
      x = _apply_layers(cfg, cfg.num_layers, stacked, x, context)
    return norm(cfg, "final_norm")(x).astype(cfg.compute.dtype) if kind.residual else x
