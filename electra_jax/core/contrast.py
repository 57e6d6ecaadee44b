"""Contrastive loss between sequences and their crops (COCO-LM, Meng et al. 2021)."""

import jax
import jax.numpy as jnp

from electra_jax.core.batch import Batch
from electra_jax.core.terms import Term

KEPT = 0.9  # share of the tokens after [CLS] in a crop (Section 3.2)
TEMPERATURE = 1.0  # of the softmax over cosines (Table 6)


def crop(batch: Batch, keys: jax.Array) -> Batch:
  """Returns each row's [CLS] and a random contiguous fraction KEPT of its other tokens.

  Args:
    keys: [B] typed keys.
  """
  length = batch.ids.shape[1]
  tokens = batch.padding_mask.sum(-1) - 1
  kept = jnp.ceil(KEPT * tokens).astype(jnp.int32)
  draw = jax.vmap(jax.random.uniform)(keys)
  start = jnp.minimum((draw * (tokens - kept + 1)).astype(jnp.int32), tokens - kept)
  at = jnp.arange(length)
  index = jnp.clip(jnp.where(at > 0, at + start[:, None], 0), 0, length - 1)
  return batch._replace(
    ids=jnp.take_along_axis(batch.ids, index, axis=1),
    token_type_ids=jnp.take_along_axis(batch.token_type_ids, index, axis=1),
    padding_mask=at <= kept[:, None],
  )


def contrast_terms(
  first: jax.Array, second: jax.Array, valid: jax.Array, group: int, weight
) -> dict[str, Term]:
  """Returns the loss, in nats, of finding each sequence's other view among its group's views.

  Args:
    first, second: [B, D] vectors of the two views, compared by cosine.
    valid: [B] bool, False for rows without tokens.
    group: number of consecutive rows to contrast; divides B.
  """
  views = jnp.stack([first, second]).astype(jnp.float32)
  views = views / jnp.maximum(jnp.linalg.norm(views, axis=-1, keepdims=True), 1e-6)
  size = views.shape[-1]
  grouped = views.reshape(2, -1, group, size).swapaxes(0, 1).reshape(-1, 2 * group, size)
  logits = jnp.einsum("gid,gjd->gij", grouped, grouped) / TEMPERATURE
  valid = jnp.tile(valid.reshape(-1, group), (1, 2))
  row = jnp.arange(2 * group)
  logits = jnp.where((row[:, None] == row) | ~valid[:, None], -1e4, logits)
  other = jnp.roll(row, group)
  picked = logits[:, row, other]
  loss = jax.nn.logsumexp(logits, axis=-1) - picked
  count = valid.sum().astype(jnp.float32)
  return {
    "contrast_loss": Term((loss * valid).sum(), count, weight),
    "contrast_accuracy": Term(((picked >= logits.max(-1)) * valid).sum(), count),
  }
