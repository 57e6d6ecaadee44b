"""How likely a text is to a pretrained network: pseudo-log-likelihoods.

The sum over a sentence's tokens of log p(token | all others). Electric gives them up to a constant
in one pass (Clark et al. 2020b, Section 2.3); ELECTRA's discriminator and generator imply them
together; a masked language model is asked for one token at a time.
"""

import jax
import jax.numpy as jnp

from electra_jax.core import generators, masking, networks
from electra_jax.core.batch import Batch
from electra_jax.core.networks import PretrainSpec


def implied_log_p(score: jax.Array, log_q: jax.Array, mask_prob: float) -> jax.Array:
  """Returns the log-probability that a discriminator and its generator imply.

  At its best the discriminator says "original" with probability D = p (a + q) / (a p + q), where p
  is the data's probability, q the generator's and a = (1 - m) / m for mask rate m. Solved for p:
  p = D q / (a (1 - D) + q) (Clark et al. 2020, Appendix G).

  Args:
    score: the discriminator's logit, positive where it says replaced.
    log_q: the generator's log-probability of the same token.

  >>> p, q, a = 0.3, 0.2, 3.0
  >>> d = p * (a + q) / (a * p + q)
  >>> float(jnp.exp(implied_log_p(jnp.log((1 - d) / d), jnp.log(q), 0.25)))
  0.3...
  """
  log_a = jnp.log((1 - mask_prob) / mask_prob)
  other = jnp.logaddexp(log_a + jax.nn.log_sigmoid(score), log_q)
  return jax.nn.log_sigmoid(-score) + log_q - other


def one_at_a_time(spec: PretrainSpec, params: dict, batch: Batch) -> jax.Array:
  """Returns a masked language model's log-probabilities [B, L], each token being the only [MASK].

  As many passes as there are tokens, one after the other.
  """
  cfg, weights = networks.masked_language_model(spec, params)
  tables = weights["embeddings"]

  def at(t):
    masked_ids = batch.ids.at[:, t].set(spec.masking.mask_id)
    states = networks.encode(cfg, tables, weights["encoder"], masked_ids, batch, None)
    states = jax.lax.dynamic_slice_in_dim(states, t, 1, axis=1)
    logits = networks.vocabulary_logits(cfg, weights, tables, states)
    return -networks.nll(logits, jax.lax.dynamic_slice_in_dim(batch.ids, t, 1, axis=1))[0][:, 0]

  return jax.lax.map(at, jnp.arange(batch.ids.shape[1])).T


def two_tower_log_q(spec: PretrainSpec, params: dict, batch: Batch) -> jax.Array:
  """Returns a two-tower generator's log-probabilities [B, L], in one pass."""
  states = generators.two_tower_states(spec, params, batch, (None, None))
  tables = networks.embeddings(spec, params, "generator")
  at = spec.masking.num_masked(batch.ids.shape[1], False)
  cfg = spec.generator
  return -networks.chunked_nll(cfg, params["generator"], tables, states, batch.ids, at)[0]


def token_scores(spec: PretrainSpec, params: dict, batch: Batch) -> jax.Array:
  """Returns log p(token | all others) [B, L] of every token, in nats; 0 at padding and specials.

  Electric's are not normalised: its noise-contrastive training makes them nearly so.

  Raises:
    ValueError: the run's networks give no such number.
  """
  batch = jax.tree.map(jnp.asarray, batch)
  if spec.objective == "bert":
    scores = one_at_a_time(spec, params, batch)
  elif "rtd_head" in params["discriminator"] and spec.generator_kind in _LOG_Q:
    states = networks.main_states(spec, params, batch.ids, batch, None)
    logits = networks.token_logits(spec.discriminator, params["discriminator"], "rtd_head", states)
    if spec.objective == "electric":
      scores = -logits
    elif spec.objective == "electra_15":
      # Learned from masked positions only: at its best "original" has the data's own probability
      # there.
      scores = jax.nn.log_sigmoid(-logits)
    else:
      if spec.masking.temperature != 1 or spec.masking.disallow_correct:
        raise ValueError("samples were not drawn from the generator's own probabilities")
      log_q = _LOG_Q[spec.generator_kind](spec, params, batch)
      scores = implied_log_p(logits, log_q, spec.masking.mask_prob)
  else:
    raise ValueError(
      f"objective {spec.objective} with a {spec.generator_kind} generator gives no likelihood of"
      " a text"
    )
  return jnp.where(masking.maskable(batch, spec.masking), scores, 0.0)


_LOG_Q = {"transformer": one_at_a_time, "frozen": one_at_a_time, "two_tower": two_tower_log_q}
