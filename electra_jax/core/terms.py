"""Terms: named sums over a batch, and the metrics that objectives share.

A term is a total and a count, so that total / count over the *global* batch does not depend on
sharding or microbatches. Objectives never normalise; the step does.
"""

import jax
import jax.numpy as jnp
from flax import struct

SCORE_RANGE = (-16.0, 16.0)  # logits of a score histogram, clipped
SCORE_BINS = 256


@struct.dataclass
class Term:
  """A sum over the batch, its divisor, and its weight in the loss."""

  total: jax.Array  # scalar, or an array such as a histogram
  count: jax.Array  # scalar number of summands; independent of the parameters if in the loss
  # 0 for a term that is only reported; an array if it follows a schedule
  weight: float | jax.Array = 0.0

  @property
  def in_loss(self) -> bool:
    """Whether it is part of the loss, even with a weight of 0 at this step."""
    return isinstance(self.weight, jax.Array) or self.weight != 0


def token_terms(name: str, loss, hit, counts: jax.Array, weight) -> dict[str, Term]:
  """Returns {name}_loss (nats per token) and {name}_accuracy of predicted tokens.

  Args:
    loss, hit: [B, K] or [B, L], from `networks.nll`.
    counts: in the same shape, 1 on tokens to count, else 0.
  """
  counts = counts.astype(jnp.float32)
  number = counts.sum()
  return {
    f"{name}_loss": Term((loss * counts).sum(), number, weight),
    f"{name}_accuracy": Term((hit * counts).sum(), number),
  }


def score_histogram(logits: jax.Array, label: jax.Array, weight: jax.Array) -> jax.Array:
  """Counts logits [B, L] in [2, SCORE_BINS] bins, row 0 for label False, row 1 for True.

  It multiplies one-hot matrices, because a scatter is serial on TPUs.
  """
  low, high = SCORE_RANGE
  bins = jnp.clip((logits - low) * (SCORE_BINS / (high - low)), 0, SCORE_BINS - 1)
  bins = jax.nn.one_hot(bins.astype(jnp.int32).reshape(-1), SCORE_BINS)
  rows = (jnp.stack([~label, label]) * weight).reshape(2, -1).astype(jnp.float32)
  return rows @ bins


def detection_terms(name: str, logits, label, mask, weight) -> dict[str, Term]:
  """Returns a binary classifier's loss (nats per token) and metrics over tokens in `mask`.

  Args:
    name: prefix of the terms, "rtd" for replaced-token detection.
    logits: [B, L] float32, positive for True.
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
