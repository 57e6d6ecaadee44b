"""Pretraining heads and their FLOPs. Letters as in `encoder`."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from electra_jax.core.gradients import by_hand
from electra_jax.core.layers import dense, gelu, norm
from electra_jax.core.positions import first_states
from electra_jax.core.transformer_config import TransformerConfig


@by_hand
def _word_logits(x: jax.Array, word: jax.Array, bias: jax.Array) -> jax.Array:
  """Returns float32 logits [B, K, V] of states [B, K, E], a word table [V, E] and a bias [V].

  The incoming gradient, the largest array of a step, is rounded to the dtype of x once and never
  stored in float32. The bias gradient is a matmul with a row of ones, because XLA's row sum takes
  three times as long on CPU, 143 ms of a 2.9 s step at [32, 19, 30522].
  """
  return jnp.einsum("bke,ve->bkv", x, word, preferred_element_type=jnp.float32) + bias


def _word_logits_bwd(residuals, g: jax.Array) -> tuple[jax.Array, ...]:
  x, word = residuals
  # Without the barrier XLA recomputes the gradient from the logits for each use.
  g = jax.lax.optimization_barrier(g.astype(x.dtype))
  _, vjp = jax.vjp(functools.partial(jnp.einsum, "bke,ve->bkv"), x, word)
  ones = jnp.ones((1, g.shape[0] * g.shape[1]), g.dtype)
  rows = g.reshape(-1, g.shape[-1])
  return *vjp(g), jnp.matmul(ones, rows, preferred_element_type=jnp.float32)[0]


_word_logits.defvjp(
  lambda x, word, bias: (_word_logits(x, word, bias), (x, word)), _word_logits_bwd
)


class MlmHead(nn.Module):
  """Vocabulary logits at gathered positions: dense, GELU, LayerNorm, tied word embeddings."""

  cfg: TransformerConfig

  @nn.compact
  def __call__(self, x: jax.Array, word: jax.Array) -> jax.Array:
    """Returns [B, K, V] float32 logits from states [B, K, D] and the word table [V, E]."""
    cfg = self.cfg
    x = gelu(dense(cfg, cfg.embedding_size, "dense")(x))
    x = norm(cfg, "layer_norm")(x).astype(cfg.compute.dtype)
    bias = self.param("bias", nn.initializers.zeros, (cfg.vocab_size,))
    return _word_logits(x, word.astype(cfg.compute.dtype), bias)


class TokenLogit(nn.Module):
  """One logit per token, e.g. All-Tokens MLM's copy gate or REINFORCE's baseline."""

  cfg: TransformerConfig
  hidden: bool = False  # before it dense, GELU and the options cfg.head_...

  @nn.compact
  def __call__(self, x: jax.Array, document_ids: jax.Array | None = None) -> jax.Array:
    """Returns logits [...] of states [..., D] in float32; near 10, bfloat16 has steps of 1/16.

    Args:
      document_ids: [B, L] as in `Batch`, for head_first_token and states [B, L, D].
    """
    cfg = self.cfg
    if self.hidden:
      if cfg.head_first_token:
        x = norm(cfg, "first_norm")(x + first_states(x, document_ids)).astype(cfg.compute.dtype)
      x = gelu(dense(cfg, cfg.hidden_size, "dense")(x))
      x = norm(cfg, "layer_norm")(x).astype(cfg.compute.dtype) if cfg.head_norm else x
    # As in the original: Glorot, unlike the other layers.
    init = nn.initializers.glorot_uniform()
    layer = dense(cfg, 1, "logit", kernel_init=init, dtype=jnp.float32, use_bias=True)
    return layer(x)[..., 0]


RtdHead = functools.partial(TokenLogit, hidden=True)  # positive logits mean replaced


def mlm_head_flops(cfg: TransformerConfig, positions: int) -> int:
  """Returns the forward FLOPs of `MlmHead` at `positions` states."""
  return 2 * positions * (cfg.hidden_size + cfg.vocab_size) * cfg.embedding_size


@dataclasses.dataclass(frozen=True)
class HeadDef:
  """The definition of a head."""

  # (cfg) -> a Linen module for states [B, K or L, D]
  module: Callable[[TransformerConfig], nn.Module]
  # (cfg, positions) -> forward FLOPs of one sequence
  flops: Callable[[TransformerConfig, int], int]
  # whether the logits are over the vocabulary; the module then also takes the word table, and runs
  # only at the masked positions unless the objective predicts all
  predicts_words: bool = False
  causal: bool = False  # whether the states are of the tokens to the left


_TOKEN_LOGIT = HeadDef(TokenLogit, lambda cfg, positions: 2 * positions * cfg.hidden_size)
HEADS = {
  "rtd_head": HeadDef(RtdHead, lambda cfg, n: 2 * n * (cfg.hidden_size + 1) * cfg.hidden_size),
  "mlm_head": HeadDef(MlmHead, mlm_head_flops, predicts_words=True),
  "clm_head": HeadDef(MlmHead, mlm_head_flops, predicts_words=True, causal=True),
  "copy_head": _TOKEN_LOGIT,
  "baseline_head": _TOKEN_LOGIT,
}
