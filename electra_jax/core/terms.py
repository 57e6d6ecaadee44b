"""Named sums over a batch, and the measures that objectives share.

A term is a total and a count, so that a loss is total / count over the *global* batch however it is
spread over devices and microbatches. An objective never normalises; the step does.
"""

import jax
import jax.numpy as jnp
from flax import struct

SCORE_RANGE = (-16.0, 16.0)  # of the discriminator's logits in a score histogram; the ends clip
SCORE_BINS = 256


@struct.dataclass
class Term:
  """A sum over the batch, what it is to be divided by, and its weight in the loss.

  Fields:
    total: scalar, or an array for a quantity such as a histogram.
    count: scalar, the number of things summed; it does not depend on the parameters.
    weight: 0 for a term that is only reported; an array where it follows a schedule.
  """

  total: jax.Array
  count: jax.Array
  weight: float | jax.Array = 0.0

  @property
  def in_loss(self) -> bool:
    """Whether it is part of the loss; one whose schedule gives 0 just now is."""
    return isinstance(self.weight, jax.Array) or self.weight != 0


def token_terms(name: str, loss, hit, counts: jax.Array, weight) -> dict[str, Term]:
  """Returns {name}_loss (nats a token) and {name}_accuracy of tokens that were predicted.

  Args:
    loss, hit: [B, K] or [B, L], from `networks.nll`.
    counts: the same shape, 1 on tokens that count, 0 elsewhere.
  """
  counts = counts.astype(jnp.float32)
  number = counts.sum()
  return {
    f"{name}_loss": Term((loss * counts).sum(), number, weight),
    f"{name}_accuracy": Term((hit * counts).sum(), number),
  }


def score_histogram(logits: jax.Array, label: jax.Array, weight: jax.Array) -> jax.Array:
  """Counts logits [B, L] into [2, SCORE_BINS] bins, row 0 where label is False, 1 where True.

  As a product of one-hot matrices, because a scatter is serial on TPUs.
  """
  low, high = SCORE_RANGE
  bins = jnp.clip((logits - low) * (SCORE_BINS / (high - low)), 0, SCORE_BINS - 1)
  bins = jax.nn.one_hot(bins.astype(jnp.int32).reshape(-1), SCORE_BINS)
  rows = (jnp.stack([~label, label]) * weight).reshape(2, -1).astype(jnp.float32)
  return rows @ bins


def detection_terms(name: str, logits, label, mask, weight) -> dict[str, Term]:
  """Returns a binary classifier's loss (nats a token) and measures over the tokens in `mask`.

  Args:
    name: prefix of the terms: "rtd" for replaced-token detection.
    logits: [B, L] float32, positive where it says True.
    label, mask: [B, L] bool.
  """
  mask = mask.astype(jnp.float32)
  loss = jax.nn.softplus(jnp.where(label, -logits, logits)) * mask
  predicted = jax.lax.stop_gradient(logits) > 0
  tokens, positives = mask.sum(), (label * mask).sum()
  found = (predicted & label & (mask > 0)).sum().astype(jnp.float32)
  return {
    f"{name}_loss": Term(loss.sum(), tokens, weight),
    f"{name}_accuracy": Term(((predicted == label) * mask).sum(), tokens),
    f"{name}_recall": Term(found, positives),
    f"{name}_precision": Term(found, (predicted * mask).sum()),
    f"{name}_scores": Term(score_histogram(jax.lax.stop_gradient(logits), label, mask), tokens),
  }
