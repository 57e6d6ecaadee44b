"""The head of text embeddings: pooled states scaled to length 1, without weights.

Training is multiple negatives ranking (Henderson et al. 2017) on cosines over a temperature, as in
sentence-transformers (Reimers & Gurevych 2019). Letters as in `encoder`; T is the texts of a row.
"""

import jax
import jax.numpy as jnp

from electra_jax.core.params import AXIS
from electra_jax.core.task_heads import Head
from electra_jax.core.terms import Term


def _mean(states: jax.Array, masks: jax.Array) -> jax.Array:
  """Returns the means of the states in each mask, [B, T, D] float32.

  It is a matmul because XLA miscompiles a masked sum, mapped over T and seeds, for a CPU (JAX
  0.10.2, 64 rows of 512).
  """
  masks = masks.astype(jnp.float32)
  sums = jnp.einsum("btl,bld->btd", masks, states.astype(jnp.float32), precision="highest")
  return sums / jnp.maximum(masks.sum(2, keepdims=True), 1)


def _first(states: jax.Array, masks: jax.Array) -> jax.Array:
  """Returns the state of the first token in each mask, [B, T, D]."""
  return jnp.take_along_axis(states, masks.argmax(2)[..., None], 1).astype(jnp.float32)


# (states [B, L, D], masks [B, T, L] of each text's tokens) -> [B, T, D] float32
POOLINGS = {"mean": _mean, "cls": _first}


def make_head(pooling: str, temperature: float, texts: int) -> Head:
  """Returns the head, which predicts "embedding" [B, D] float32, of length 1.

  A training row has at most `texts` documents: an anchor, its positive and hard negatives. The loss
  is the cross-entropy of the positive among all positives and negatives of the global batch, except
  those equal to the row's anchor or positive. Target "text" [B, L] int32: the number of each
  token's text, above 0 and the same for equal texts.
  """
  pool = POOLINGS[pooling]

  def embed(states, masks):
    pooled = pool(states, masks)
    # The mean of a missing text is 0, where a norm has no gradient.
    return pooled * jax.lax.rsqrt(jnp.maximum(jnp.square(pooled).sum(-1, keepdims=True), 1e-24))

  def loss(cfg, weights, states, batch, keys):
    of_text = batch.document_ids[:, None] == 1 + jnp.arange(texts)[:, None]  # [B, T, L]
    numbers = (of_text * batch.target["text"][:, None]).max(-1)  # [B, T], 0 for a missing text
    vectors = embed(states, of_text)  # [B, T, D]
    found, others = (
      jax.lax.all_gather(x[:, 1:], AXIS, tiled=True).reshape(-1, *x.shape[2:])
      for x in (numbers, vectors)
    )
    left_out = (found == numbers[:, :1]) | (found == numbers[:, 1:2]) | (found == 0)
    anchors, positives = vectors[:, 0], vectors[:, 1]
    cosines = jnp.matmul(anchors, others.T, precision="highest")
    own = (anchors * positives).sum(-1, keepdims=True)
    logits = jnp.concatenate([own, jnp.where(left_out, -jnp.inf, cosines)], 1) / temperature
    rows = (numbers[:, 0] > 0).astype(jnp.float32)
    return {"loss": Term((-jax.nn.log_softmax(logits)[:, 0] * rows).sum(), rows.sum(), 1.0)}

  def predict(cfg, weights, states, batch):
    return {"embedding": embed(states, batch.padding_mask[:, None])[:, 0]}

  return Head(lambda cfg, key: {}, loss, predict)
