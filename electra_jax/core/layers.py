"""Dropout, normalisation and feed-forward layers. Letters as in `encoder`."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from electra_jax.core.gradients import by_hand
from electra_jax.core.transformer_config import TransformerConfig

SITES_PER_LAYER = 3  # attention probabilities, attention output, feed-forward output


def make_dropout_seeds(
  keys: jax.Array | None, num_layers: int
) -> tuple[jax.Array, jax.Array] | None:
  """Draws two uint32 seeds per dropout site and row; returns None for keys None.

  The seeds are [B, 2] for the embeddings and [N, B, 4, 2] for the layers. The last site's are the
  same in all rows, for what the rows of a batch share.

  Args:
    keys: [B, 2], of the row and of the batch (`step.row_keys`).
  """
  if keys is None:
    return None
  sites = 1 + SITES_PER_LAYER * num_layers
  words = jax.vmap(lambda key: jax.random.bits(key, (sites, 2), jnp.uint32))(keys[:, 0])
  layers = words[:, 1:].reshape(-1, num_layers, SITES_PER_LAYER, 2).swapaxes(0, 1)
  shared = jax.random.bits(keys[0, -1], (num_layers, 1, 1, 2), jnp.uint32)
  shared = jnp.broadcast_to(shared, (num_layers, len(keys), 1, 2))
  return words[:, 0], jnp.concatenate([layers, shared], 2)


def _mix(h: jax.Array) -> jax.Array:
  """A bijective 32-bit hash; flipping one input bit flips about half of the output bits."""
  h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
  h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
  return h ^ (h >> 16)


def dropout(x: jax.Array, rate: float, seeds: jax.Array | None) -> jax.Array:
  """Zeroes elements of x [B, ...] with probability `rate`, scales the rest by 1 / (1 - rate).

  The mask is a hash of the row's seeds [B, 2] (uint32, None for no dropout) and the element's
  index. Threefry takes ten times as long: 8.5 ms instead of 0.8 ms for [32, 4, 128, 128] on two
  cores, a tenth of a training step.
  """
  if seeds is None or rate == 0.0:
    return x
  count = jax.lax.iota(jnp.uint32, x[0].size).reshape(x.shape[1:])
  ones = (1,) * (x.ndim - 1)
  first, second = seeds[:, 0].reshape(-1, *ones), seeds[:, 1].reshape(-1, *ones)
  word = _mix(_mix(count * jnp.uint32(0x9E3779B9) + first) ^ second)
  keep = word >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
  return jnp.where(keep, x * (1.0 / (1.0 - rate)), 0).astype(x.dtype)


@by_hand
def gelu(x: jax.Array) -> jax.Array:
  """The exact (erf) GELU in float32, as in the original; bfloat16 would round 1 + erf(-2.5) to 0.

  The custom gradient saves only x; autodiff would save two more arrays of the feed-forward width.
  """
  z = x.astype(jnp.float32)
  return (0.5 * z * (1.0 + jax.lax.erf(z * 0.5**0.5))).astype(x.dtype)


def _gelu_bwd(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
  z = x.astype(jnp.float32)
  density = jnp.exp(-0.5 * z * z) * (2 * jnp.pi) ** -0.5
  slope = 0.5 * (1.0 + jax.lax.erf(z * 0.5**0.5)) + z * density
  return ((g * slope).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_bwd)


@by_hand
def normalize(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
  """LayerNorm over the last axis of x [..., D], in float32, with scale and bias [D].

  The variance takes two passes, because one pass can make it negative, which eps 1e-12 does not
  hide. The custom gradient saves memory, as `gelu`'s.
  """
  return _normalize_fwd(x, scale, bias, eps)[0]


def _normalize_fwd(x, scale, bias, eps):
  centred = x.astype(jnp.float32)
  centred = centred - centred.mean(-1, keepdims=True)
  inv_std = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps)
  normal = centred * inv_std
  return normal * scale + bias, (normal, inv_std, scale, jnp.zeros((), x.dtype))


def _normalize_bwd(residuals, g):
  normal, inv_std, scale, like = residuals
  rows = tuple(range(g.ndim - 1))
  scaled = g * scale
  to_x = inv_std * (
    scaled - scaled.mean(-1, keepdims=True) - normal * (scaled * normal).mean(-1, keepdims=True)
  )
  return to_x.astype(like.dtype), (g * normal).sum(rows), g.sum(rows), None


normalize.defvjp(_normalize_fwd, _normalize_bwd)


@functools.partial(by_hand, nondiff_argnums=(0,))
def einsum_float32(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns the einsum of x and y in float32.

  The incoming gradient is rounded to the dtype of x. Autodiff would keep it in float32, which
  halves the speed of matmuls on a GPU and doubles the reads of the largest arrays of a step.
  """
  return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _einsum_bwd(subscripts, residuals, g):
  _, vjp = jax.vjp(functools.partial(jnp.einsum, subscripts), *residuals)
  return vjp(g.astype(residuals[0].dtype))


einsum_float32.defvjp(lambda s, x, y: (einsum_float32(s, x, y), (x, y)), _einsum_bwd)


class LayerNorm(nn.Module):
  """`normalize` with parameters."""

  eps: float
  use_bias: bool = True

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns float32 in the shape of x."""
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    bias = jnp.zeros_like(scale)
    if self.use_bias:
      bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
    return normalize(x, scale, bias, self.eps)


class RmsNorm(nn.Module):
  """RMSNorm in float32 (Zhang and Sennrich 2019)."""

  eps: float

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns float32 in the shape of x."""
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.eps) * scale


# (eps, name=) -> a module
NORMS: dict[str, Callable[..., nn.Module]] = {
  "layer_norm": LayerNorm,
  "layer_norm_no_bias": lambda eps, **kwargs: LayerNorm(eps, use_bias=False, **kwargs),
  "rms_norm": RmsNorm,
}


def norm(cfg: TransformerConfig, name: str) -> nn.Module:
  """Returns the norm layer of `cfg`, which returns float32."""
  return NORMS[cfg.norm](cfg.layer_norm_eps, name=name)


@by_hand
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Returns x [T, K] times kernel [K, N], with a faster kernel gradient on CPUs.

  For autodiff's, XLA multiplies two transposed matrices at half the speed: 9 % of a step of Small.
  """
  return x @ kernel


def _product_bwd(residuals: tuple, g: jax.Array) -> tuple[jax.Array, jax.Array]:
  x, kernel = residuals
  over_rows = (((0,), (0,)), ((), ()))

  def transpose_smaller(x, g):
    if x.shape[1] <= g.shape[1]:
      return jax.lax.dot_general(x, g, over_rows)
    # Without the barrier XLA swaps the operands.
    return jax.lax.optimization_barrier(jax.lax.dot_general(g, x, over_rows)).T

  def as_autodiff(x, g):
    return jax.lax.dot_general(g, x, over_rows).T

  of_kernel = jax.lax.platform_dependent(x, g, cpu=transpose_smaller, default=as_autodiff)
  return g @ kernel.T, of_kernel


product.defvjp(lambda x, kernel: (product(x, kernel), (x, kernel)), _product_bwd)


def dot_general(x: jax.Array, kernel: jax.Array, dimensions, precision=None) -> jax.Array:
  """`product` of x [..., *K] and kernel [*K, *N] in DenseGeneral's interface: [..., *N]."""
  summed = len(dimensions[0][0])
  K = math.prod(kernel.shape[:summed])
  y = product(x.reshape(-1, K), kernel.reshape(K, -1))
  return y.reshape(*x.shape[: x.ndim - summed], *kernel.shape[summed:])


def dense(cfg: TransformerConfig, features: int | tuple[int, ...], name: str, **kwargs):
  """Returns a dense layer with the biases, initialisation and dtype of `cfg`."""
  kwargs.setdefault("kernel_init", nn.initializers.truncated_normal(cfg.init_stddev))
  kwargs.setdefault("dtype", cfg.compute.dtype)
  kwargs.setdefault("use_bias", cfg.biases)
  return nn.DenseGeneral(features, name=name, dot_general=dot_general, **kwargs)


def block_output(cfg: TransformerConfig, name: str, **kwargs):
  """Returns a dense layer whose output is added to the residual stream."""
  if cfg.scaled_init:  # Megatron's, as in ModernBERT
    stddev = cfg.init_stddev * (2 * cfg.num_layers) ** -0.5
    kwargs["kernel_init"] = nn.initializers.truncated_normal(stddev)
  return dense(cfg, cfg.hidden_size, name, **kwargs)


@dataclasses.dataclass(frozen=True)
class FeedForward:
  """A kind of feed-forward layer."""

  activation: Callable[[jax.Array], jax.Array]
  gated: bool = False  # multiplied by a second projection (Shazeer 2020)


FEED_FORWARDS = {
  "gelu": FeedForward(gelu),
  "geglu": FeedForward(gelu, gated=True),
  "swiglu": FeedForward(jax.nn.silu, gated=True),
}


@functools.partial(by_hand, nondiff_argnums=(1, 2))
def unstack(x: jax.Array, axis: int, from_rows: bool = False) -> tuple[jax.Array, ...]:
  """Returns the n slices [...] of x [..., n, ...] along `axis`, as `jnp.unstack`.

  The gradient is written once. Autodiff pads and adds the gradients of the slices, which XLA does
  element by element on CPUs: 14 % of a step of the quickstart's network.

  Args:
    from_rows: on a GPU, slice x as a matrix, so that XLA copies queries, keys and values into the
      layout of their matmuls once instead of twice; with RoPE this would add a copy.
  """

  def cut(x):
    *before, n = x.shape[: axis + 1]
    rows = x.reshape(math.prod(before), -1)
    return tuple(part.reshape(*before, *x.shape[axis + 1 :]) for part in jnp.split(rows, n, 1))

  def unstacked(x):
    return tuple(jnp.unstack(x, axis=axis))

  return jax.lax.platform_dependent(x, cuda=cut if from_rows else unstacked, default=unstacked)


def _unstack_bwd(axis, _, __, gs):
  before, after, n = gs[0].shape[:axis], gs[0].shape[axis:], len(gs)

  def rows_of(gs):
    return [g.reshape(math.prod(before), -1) for g in gs]

  def copied(gs):  # without the barriers XLA fuses the copies into a loop over elements
    rows = jax.lax.optimization_barrier(rows_of(gs))
    whole = jax.lax.optimization_barrier(jnp.concatenate(rows, 1))
    return whole.reshape(*before, n, *after)

  def added(gs):  # XLA fuses a sum with the layout change, but not a concatenation
    width = math.prod(after)
    padded = (
      jnp.pad(row, ((0, 0), (i * width, (n - 1 - i) * width))) for i, row in enumerate(rows_of(gs))
    )
    return sum(padded).reshape(*before, n, *after)

  def stacked(gs):
    return jnp.stack(gs, axis)

  return (jax.lax.platform_dependent(gs, cpu=copied, cuda=added, default=stacked),)


unstack.defvjp(lambda x, *args: (unstack(x, *args), None), _unstack_bwd)


def feed_forward(cfg: TransformerConfig, x: jax.Array) -> jax.Array:
  """Maps x [B, L, D] to [B, L, D]; call it in a module."""
  kind = FEED_FORWARDS[cfg.feed_forward]
  inner = (2, cfg.ffn_size) if kind.gated else cfg.ffn_size
  x = dense(cfg, inner, "ffn_in")(x)
  if kind.gated:
    x, gate = unstack(x, x.ndim - 2)
    x = kind.activation(x) * gate
  else:
    x = kind.activation(x)
  return block_output(cfg, "ffn_output")(x)
