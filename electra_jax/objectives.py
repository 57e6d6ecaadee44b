"""Pretraining objectives: functions from (params, batch, keys) to named terms.

A term is a total and a count, so that a loss is total / count over the *global* batch however it is
spread over devices and microbatches. An objective never normalises; the step does.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from electra_jax import masking, model
from electra_jax.batch import Batch
from electra_jax.model import TransformerConfig

SCORE_RANGE = (-16.0, 16.0)  # of the discriminator's logits in a score histogram; the ends clip
SCORE_BINS = 256


@struct.dataclass
class Term:
  """A sum over the batch, what it is to be divided by, and its weight in the loss.

  Fields:
    total: scalar, or an array for a quantity such as a histogram.
    count: scalar, the number of things summed; it does not depend on the parameters.
    weight: 0 for a term that is only reported.
  """

  total: jax.Array
  count: jax.Array
  weight: float = struct.field(pytree_node=False, default=0.0)


Objective = Callable[[dict, Batch, jax.Array], dict[str, Term]]


@dataclasses.dataclass(frozen=True)
class Spec:
  """What an objective is built from."""

  generator: TransformerConfig
  discriminator: TransformerConfig
  masking: masking.Masking
  mlm_weight: float = 1.0
  rtd_weight: float = 50.0


def init_params(spec: Spec, key: jax.Array) -> dict:
  """Returns fresh parameters: {"embeddings", "generator", "discriminator"}.

  The embeddings, with their LayerNorm, are shared by both networks (Section 3.2).
  """
  ids, no_mask = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool)
  k = jax.random.split(key, 5)

  def weights(module, key, *inputs):
    return module.init(key, *inputs)["params"]

  def tower(cfg, key):
    states = jnp.zeros((1, 2, cfg.embedding_size))
    return weights(model.Encoder(cfg), key, states, no_mask, None)

  def states(cfg):
    return jnp.zeros((1, 2, cfg.hidden_size))

  g, d = spec.generator, spec.discriminator
  embeddings = weights(model.Embeddings(d), k[0], ids, ids)
  return {
    "embeddings": embeddings,
    "generator": {
      "encoder": tower(g, k[1]),
      "mlm_head": weights(model.MlmHead(g), k[2], states(g), embeddings["word"]),
    },
    "discriminator": {
      "encoder": tower(d, k[3]),
      "rtd_head": weights(model.RtdHead(d), k[4], states(d)),
    },
  }


def encode(cfg, embeddings: dict, network: dict, ids, batch: Batch, salts) -> jax.Array:
  """Returns the states [B, L, D] of one network on ids [B, L]."""
  x = model.Embeddings(cfg).apply({"params": embeddings}, ids, batch.segment_ids)
  return model.Encoder(cfg).apply({"params": network["encoder"]}, x, batch.mask, salts)


def mlm_logits(cfg, embeddings: dict, network: dict, states: jax.Array, slots) -> jax.Array:
  """Returns the vocabulary logits [B, K, V] at the slots, from states [B, L, D]."""
  gathered = masking.gather(states, slots)
  return model.MlmHead(cfg).apply({"params": network["mlm_head"]}, gathered, embeddings["word"])


def mlm_terms(logits: jax.Array, slots: masking.Slots, weight: float) -> dict[str, Term]:
  """Returns the masked-LM loss (nats a masked token) and accuracy of logits [B, K, V]."""
  best = jax.lax.stop_gradient(logits.max(-1))
  picked = jnp.take_along_axis(logits, slots.originals[..., None], axis=-1)[..., 0]
  nll = jnp.log(jnp.exp(logits - best[..., None]).sum(-1)) + best - picked
  count = slots.weights.sum()
  # Right when nothing scores above the original: no arg max, which is slow on CPUs.
  hits = (picked >= best) * slots.weights
  return {
    "mlm_loss": Term((nll * slots.weights).sum(), count, weight),
    "mlm_accuracy": Term(hits.sum(), count),
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


def rtd_terms(logits, is_replaced, mask, weight: float) -> dict[str, Term]:
  """Returns replaced-token detection's loss (nats a token) and measures, over all real tokens.

  Args:
    logits: [B, L] float32, positive where the discriminator says replaced.
    is_replaced, mask: [B, L] bool.
  """
  mask = mask.astype(jnp.float32)
  loss = jax.nn.softplus(jnp.where(is_replaced, -logits, logits)) * mask
  said = jax.lax.stop_gradient(logits) > 0
  tokens, replaced = mask.sum(), (is_replaced * mask).sum()
  found = (said & is_replaced).sum().astype(jnp.float32)
  return {
    "rtd_loss": Term(loss.sum(), tokens, weight),
    "rtd_accuracy": Term(((said == is_replaced) * mask).sum(), tokens),
    "rtd_recall": Term(found, replaced),
    "rtd_precision": Term(found, (said * mask).sum()),
    "replaced": Term(replaced, tokens),
    "rtd_scores": Term(score_histogram(jax.lax.stop_gradient(logits), is_replaced, mask), tokens),
  }


def electra(spec: Spec, train: bool) -> Objective:
  """Joint training: mlm_weight x MLM + rtd_weight x RTD (Clark et al. 2020, Section 3).

  The discriminator's loss reaches the shared embeddings but not the generator's own weights: the
  samples carry no gradient.
  """
  g, d, m = spec.generator, spec.discriminator, spec.masking

  def objective(params: dict, batch: Batch, keys: jax.Array) -> dict[str, Term]:
    k = jax.vmap(lambda key: jax.random.split(key, 5))(keys)
    salts_g = model.dropout_salts(k[:, 3], g.num_layers) if train else None
    salts_d = model.dropout_salts(k[:, 4], d.num_layers) if train else None

    slots = masking.choose(batch, m, k[:, 0])
    masked = masking.mask(batch.ids, slots, m, k[:, 1])
    states = encode(g, params["embeddings"], params["generator"], masked, batch, salts_g)
    logits = mlm_logits(g, params["embeddings"], params["generator"], states, slots)

    sampled = masking.sample(logits, m.temperature, k[:, 2])
    corrupted, is_replaced = masking.corrupt(batch.ids, slots, sampled)
    states = encode(d, params["embeddings"], params["discriminator"], corrupted, batch, salts_d)
    scores = model.RtdHead(d).apply({"params": params["discriminator"]["rtd_head"]}, states)

    hits = (sampled == slots.originals) * slots.weights
    return {
      **mlm_terms(logits, slots, spec.mlm_weight),
      "sampled_accuracy": Term(hits.sum(), slots.weights.sum()),
      **rtd_terms(scores, is_replaced, batch.mask, spec.rtd_weight),
    }

  return objective


OBJECTIVES: dict[str, Callable[[Spec, bool], Objective]] = {"electra": electra}
