"""Position encodings: tables of the embeddings, RoPE, and DeBERTa's disentangled attention.

A new one is an entry in POSITIONS. Letters as in `encoder`; R rows of a table of distances.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from electra_jax.core.layers import dropout, norm
from electra_jax.core.transformer_config import POSITIONS, PositionsDef, TransformerConfig

# cosines and sines [L, d / 2], or [B, L, d / 2] if positions differ between rows; float32
Table = tuple[jax.Array, jax.Array]


def document_positions(document_ids: jax.Array) -> jax.Array:
  """Returns the index of each token in its document, [B, L] int32, of document_ids [B, L]."""
  at = jnp.arange(document_ids.shape[1], dtype=jnp.int32)
  before = jnp.pad(document_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  starts = jnp.where(document_ids != before, at, 0)
  return at - jax.lax.cummax(starts, axis=1)


def first_states(states: jax.Array, document_ids: jax.Array | None) -> jax.Array:
  """Returns the state of the first token of each token's document, [B, 1 or L, D] of [B, L, D]."""
  if document_ids is None:
    return states[:, :1]
  at = jnp.arange(states.shape[1]) - document_positions(document_ids)
  return jnp.take_along_axis(states, at[..., None], axis=1)


def rope_table(length: int, width: int, theta: float) -> Table:
  """Returns cos and sin of the angles i theta^(-2 j / width) (Su et al. 2021, Section 3.2.2)."""
  rates = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
  angles = jnp.arange(length, dtype=jnp.float32)[:, None] * rates
  return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, table: Table) -> jax.Array:
  """Rotates x [B, L, H, d] by position; element j pairs with j + d / 2, as in ModernBERT."""
  cos, sin = (t[..., None, :] for t in table)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
  return turned.astype(x.dtype)


class Layer(NamedTuple):
  """What a position encoding changes in a layer."""

  q: jax.Array  # [B, L or K, H, d]
  k: jax.Array  # [B, L, H, d]
  local: bool  # whether tokens attend to a window
  # table [R, D] -> its queries and keys [R, H, d] by the layer's own weights
  project: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
  seeds: jax.Array | None  # [B, 2] uint32 for dropout, the same in all rows; None for no dropout
  at: jax.Array | None = None  # [B, K] int32, positions of the queries if not all L are asked for
  bias: jax.Array | None = None  # [B, H, L or K, L], added to the products of queries and keys
  summands: int = 1  # of a score: their sum is divided by sqrt(summands x d)


def _rope_tables(
  cfg: TransformerConfig, length: int, document_ids: jax.Array | None
) -> dict[str, Table]:
  """Returns the table of the global layers and, if it differs, of the local ones."""
  tables = {"global": rope_table(length, cfg.head_size, cfg.rope_theta)}
  if cfg.global_every > 1 and cfg.local_rope_theta != cfg.rope_theta:
    tables["local"] = rope_table(length, cfg.head_size, cfg.local_rope_theta)
  if document_ids is None:
    return tables
  at = document_positions(document_ids)
  return jax.tree.map(lambda table: table[at], tables)


def _rope(cfg: TransformerConfig, layer: Layer, tables: dict[str, Table]) -> Layer:
  table = tables.get("local" if layer.local else "global", tables["global"])
  return layer._replace(q=rotate(layer.q, table), k=rotate(layer.k, table))


def distance_rows(length: int, buckets: int, max_positions: int) -> np.ndarray:
  """Returns the table row of each distance query - key: L - 1, ..., -(L - 1), [2 L - 1] int.

  Distances up to buckets // 2 have rows of their own, larger ones share rows by their logarithm (He
  et al. 2021, Section 4.1, as in Microsoft's code). In NumPy, because `jnp` rounds one pair of
  (buckets, distance) = (320, 511) to another row.

  >>> distance_rows(3, 256, 512).tolist()
  [258, 257, 256, 255, 254]
  """
  at = np.arange(length - 1, -length, -1)
  half = buckets // 2
  far = np.maximum(np.abs(at), half).astype(np.float32)
  steps = np.log(far / np.float32(half)) / np.float32(math.log((max_positions - 1) / half))
  shared = np.sign(at) * (np.ceil(steps * np.float32(half - 1)).astype(int) + half)
  rows = np.where(np.abs(at) <= half, at, shared) + buckets
  return np.clip(rows, 0, 2 * buckets - 1)


class Distances(nn.Module):
  """DeBERTa's table of distances with its norm, shared by all layers."""

  cfg: TransformerConfig

  @nn.compact
  def __call__(self, length: int) -> jax.Array:
    """Returns the rows that `length` tokens use, [R, D] in the compute dtype."""
    cfg = self.cfg
    init = nn.initializers.truncated_normal(cfg.init_stddev)
    table = self.param("table", init, (2 * cfg.position_buckets, cfg.hidden_size))
    rows = distance_rows(length, cfg.position_buckets, cfg.max_positions)
    used = table[rows[-1] : rows[0] + 1]
    return norm(cfg, "norm")(used).astype(cfg.compute.dtype)


def _distances(cfg: TransformerConfig, length: int, document_ids: jax.Array | None) -> jax.Array:
  # Tokens of other documents are masked, so positions that begin anew have the same distances.
  if length > cfg.max_positions:
    raise ValueError(f"{length} tokens exceed model.max_positions={cfg.max_positions}")
  return Distances(cfg, name="distances")(length)


def _disentangled(cfg: TransformerConfig, layer: Layer, table: jax.Array) -> Layer:
  """Adds query x distance and key x distance to the scores (He et al. 2020, Equation 4).

  Differs from the equation as Microsoft's code does: both take the distance query - key.
  """
  q, k, at, L = layer.q, layer.k, layer.at, layer.k.shape[1]
  if layer.seeds is not None:
    table = dropout(table[None], cfg.dropout, layer.seeds[:1])[0]
  rows = distance_rows(L, cfg.position_buckets, cfg.max_positions)
  queries, keys = layer.project(table)

  def by_distance(x: jax.Array, table: jax.Array, rows: np.ndarray, at=None) -> jax.Array:
    """Returns x[i] . table[row of the distance from i to j], [B, H, L or K, L], for i of `at`."""
    products = jnp.einsum("blhd,rhd->bhlr", x, table)
    if len(rows) == table.shape[0]:  # each distance has a row
      products = products if rows[0] < rows[-1] else products[..., ::-1]
    else:
      products = jnp.take(products, rows - rows.min(), axis=-1)
    if at is not None:
      columns = L - 1 - at[..., None] + jnp.arange(L)
      return jnp.take_along_axis(products, columns[:, None], axis=-1)
    # Each token needs the columns one to the left of the token before it: shifts by reshaping.
    padded = jnp.pad(products, ((0, 0), (0, 0), (0, 0), (0, 1)))
    flat = padded.reshape(*padded.shape[:2], -1)[..., L - 1 : L - 1 + L * (2 * L - 1)]
    return flat.reshape(*flat.shape[:2], L, 2 * L - 1)[..., :L]

  of_keys = by_distance(k, queries, rows[::-1]).swapaxes(2, 3)
  if at is not None:
    of_keys = jnp.take_along_axis(of_keys, at[:, None, :, None], axis=2)
  return layer._replace(bias=by_distance(q, keys, rows, at) + of_keys, summands=3)


def _used_rows(cfg: TransformerConfig, length: int) -> int:
  rows = distance_rows(length, cfg.position_buckets, cfg.max_positions)
  return int(rows[0] - rows[-1]) + 1


POSITIONS |= {
  "rope": PositionsDef(
    rotary=True, tables=_rope_tables, apply=_rope, fields=("rope_theta", "local_rope_theta")
  ),
  "disentangled": PositionsDef(
    tables=_distances,
    apply=_disentangled,
    products=_used_rows,
    bias=True,
    fields=("position_buckets",),
  ),  # fmt: skip
}
