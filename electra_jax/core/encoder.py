"""The encoder: BERT's post-norm blocks as ELECTRA uses them, or ModernBERT's pre-norm blocks.

ELECTRA: Clark et al. 2020, Section 3 and Appendix A. ModernBERT: Warner et al. 2024, Section 2.1.
Modules are pure functions of (params, inputs, dropout_seeds). Letters: B batch, L length, K masked
positions, D width, E embedding width, F feed-forward width, H heads, d head width, V vocabulary, N
layers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from electra_jax.core import attention
from electra_jax.core.layers import block_output, dense, dropout, feed_forward, norm, unstack
from electra_jax.core.transformer_config import POSITIONS, TransformerConfig


class Embeddings(nn.Module):
  """Word + position + token type embeddings, normalised; `Encoder` applies dropout."""

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
        x = x + position[attention.document_positions(document_ids)]
    if cfg.token_types:
      token_type = self.param("token_type", init, (2, cfg.embedding_size))
      # With two rows, a select is cheaper than a gather, forward and backward.
      x = x + jnp.where((token_type_ids == 0)[..., None], token_type[0], token_type[1])
    return norm(cfg, "layer_norm")(x)


def _post_norm(cfg: TransformerConfig, x, attend, feed_forward, flags):
  """Returns [B, L, D] of x [B, L, D]: each sum is normalised (Vaswani et al. 2017)."""
  x = norm(cfg, "attention_norm")(x + attend(x)).astype(cfg.compute.dtype)
  return norm(cfg, "ffn_norm")(x + feed_forward(x)).astype(cfg.compute.dtype)


def _pre_norm(cfg: TransformerConfig, x, attend, feed_forward, flags):
  """Returns [B, L, D] of x [B, L, D]: each input is normalised (Xiong et al. 2020)."""
  y = norm(cfg, "attention_norm")(x)
  if "is_first" in flags:  # the embeddings are normalised already
    y = jnp.where(flags["is_first"], x, y)
  x = x + attend(y.astype(cfg.compute.dtype))
  return x + feed_forward(norm(cfg, "ffn_norm")(x).astype(cfg.compute.dtype))


@dataclasses.dataclass(frozen=True)
class BlockDef:
  """The definition of a block."""

  # (cfg, x, attend, feed_forward, flags) -> states; the two take and return [B, L, D]
  apply: Callable
  # the states between blocks are sums, which stay float32 and are normalised at the end
  residual: bool = False


BLOCKS = {"post_norm": BlockDef(_post_norm), "pre_norm": BlockDef(_pre_norm, residual=True)}


class Context(NamedTuple):
  """Inputs shared by all blocks of an encoder."""

  padding_mask: jax.Array  # [B, L] bool
  document_ids: jax.Array | None  # [B, L] int32 as in `Batch`
  tables: dict[str, attention.Table]  # `_rope_tables`


class Block(nn.Module):
  """Self-attention and feed-forward in the order of cfg.block."""

  cfg: TransformerConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    context: Context,
    dropout_seeds: jax.Array | None,
    flags: dict[str, jax.Array],
  ):
    """Returns ([B, L, D], None) for x [B, L, D].

    Args:
      dropout_seeds: [B, 3, 2] uint32 or None.
      flags: this layer's of `_layer_flags`.
    """
    cfg, tables = self.cfg, context.tables

    def seeds_of(site: int) -> jax.Array | None:
      return None if dropout_seeds is None else dropout_seeds[:, site]

    def attend(x):
      q, k, v = unstack(dense(cfg, (3, cfg.num_heads, cfg.head_size), "qkv")(x), 2)
      if cfg.qk_norm:
        q = norm(cfg, "q_norm")(q).astype(v.dtype)
        k = norm(cfg, "k_norm")(k).astype(v.dtype)
      if tables:
        table = tables["global"]
        if "local" in tables:
          choose = functools.partial(jnp.where, flags["is_local"])
          table = jax.tree.map(choose, tables["local"], table)
        q, k = attention.rotate(q, table), attention.rotate(k, table)
      inputs = attention.Inputs(q, k, v, context.padding_mask, context.document_ids, seeds_of(0))
      if "is_local" in flags:
        y = jax.lax.cond(
          flags["is_local"],
          lambda: attention.attend(cfg, inputs, local=True),
          lambda: attention.attend(cfg, inputs),
        )
      else:
        y = attention.attend(cfg, inputs)
      y = block_output(cfg, "attention_output", axis=(-2, -1))(y)
      return dropout(y, cfg.dropout, seeds_of(1))

    def forward(x):
      rate = cfg.dropout if cfg.ffn_dropout is None else cfg.ffn_dropout
      return dropout(feed_forward(cfg, x), rate, seeds_of(2))

    return BLOCKS[cfg.block].apply(cfg, x, attend, forward, flags), None


def _layer_flags(cfg: TransformerConfig) -> dict[str, np.ndarray]:
  """Returns the flags that differ between layers, {name: [N] bool}.

  They are NumPy's, so that XLA knows them where layers are compiled in a row: no branch is left.
  """
  layer, flags = np.arange(cfg.num_layers), {}
  if cfg.global_every > 1:
    flags["is_local"] = layer % cfg.global_every != 0
  if not cfg.first_norm:
    flags["is_first"] = layer == 0
  return flags


def _rope_tables(
  cfg: TransformerConfig, length: int, document_ids: jax.Array | None
) -> dict[str, attention.Table]:
  """Returns the table of the layers that attend to all tokens and, if it differs, of the others."""
  if not POSITIONS[cfg.positions].rotary:
    return {}
  tables = {"global": attention.rope_table(length, cfg.head_size, cfg.rope_theta)}
  if cfg.global_every > 1 and cfg.local_rope_theta != cfg.rope_theta:
    tables["local"] = attention.rope_table(length, cfg.head_size, cfg.local_rope_theta)
  if document_ids is None:
    return tables
  at = attention.document_positions(document_ids)
  return jax.tree.map(lambda table: table[at], tables)


class Encoder(nn.Module):
  """Dropout, a projection E -> D if they differ, and N blocks with stacked parameters."""

  cfg: TransformerConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    padding_mask: jax.Array,
    dropout_seeds: tuple[jax.Array, jax.Array] | None,
    document_ids: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the last hidden states, [B, L, D] in the compute dtype, for x [B, L, E]."""
    cfg, kind = self.cfg, BLOCKS[self.cfg.block]
    embedding_seeds, layer_seeds = (None, None) if dropout_seeds is None else dropout_seeds
    rate = cfg.dropout if cfg.embedding_dropout is None else cfg.embedding_dropout
    x = dropout(x, rate, embedding_seeds).astype(cfg.compute.dtype)
    if cfg.embedding_size != cfg.hidden_size:
      # As in the original: Glorot, unlike the other layers.
      x = dense(cfg, cfg.hidden_size, "project", kernel_init=nn.initializers.glorot_uniform())(x)
    block = nn.remat(Block, prevent_cse=False) if cfg.compute.remat else Block
    layers = nn.scan(
      block,
      variable_axes={"params": 0},
      split_rngs={"params": True},
      in_axes=(nn.broadcast, 0, 0),
      length=cfg.num_layers,
      unroll=min(cfg.compute.unroll, cfg.num_layers),
      # Traces each block twice; initial weights depend on that, nothing else does.
      check_constancy_invariants=self.is_initializing(),
    )
    tables = _rope_tables(cfg, x.shape[1], document_ids)
    context = Context(padding_mask, document_ids, tables)
    if kind.residual:
      x = x.astype(jnp.float32)
    x, _ = layers(cfg, name="layers")(x, context, layer_seeds, _layer_flags(cfg))
    return norm(cfg, "final_norm")(x).astype(cfg.compute.dtype) if kind.residual else x
