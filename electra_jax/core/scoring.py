"""How likely a text is to a pretrained network: pseudo-log-likelihoods.

The sum over a sentence's tokens of log p(token | all others). Electric gives them up to a constant
in one pass (Clark et al. 2020b, Section 2.3); ELECTRA's discriminator and generator imply them
together; a masked language model is asked for one token at a time.

Every function here is (spec, params, batch, step) -> log p of every token [B, L], in nats, and an
entry of `objectives.OBJECTIVES` names the one that holds for it.
"""

import jax
import jax.numpy as jnp

from electra_jax.core import generators, networks
from electra_jax.core.batch import Batch
from electra_jax.core.networks import PretrainSpec


def masked_lm(spec: PretrainSpec, params: dict, batch: Batch, step: int | None) -> jax.Array:
  """Returns a masked language model's, each token being the only [MASK]."""
  return generators.one_at_a_time(spec, params, batch)


def energy(spec: PretrainSpec, params: dict, batch: Batch, step: int | None) -> jax.Array:
  """Returns Electric's, not normalised: noise-contrastive training makes them nearly so."""
  return -_logits(spec, params, batch)


def original(spec: PretrainSpec, params: dict, batch: Batch, step: int | None) -> jax.Array:
  """Returns the log-probability that a token is original, of a discriminator of masked positions.

  At its best that is the data's own probability of the token.
  """
  return jax.nn.log_sigmoid(-_logits(spec, params, batch))


def implied(spec: PretrainSpec, params: dict, batch: Batch, step: int | None) -> jax.Array:
  """Returns what the discriminator and its generator imply (Clark et al. 2020, Appendix G).

  Args:
    step: the training step of the parameters, whose mask rate and temperature hold.

  Raises:
    ValueError: samples were drawn from other probabilities than the generator's.
  """
  if spec.masking.temperature.at(step) != 1 or spec.masking.disallow_correct:
    raise ValueError("samples were not drawn from the generator's own probabilities")
  log_q = generators.GENERATORS[spec.generator_kind].log_q(spec, params, batch)
  return implied_log_p(_logits(spec, params, batch), log_q, spec.masking.mask_prob.at(step))


def _logits(spec: PretrainSpec, params: dict, batch: Batch) -> jax.Array:
  states = networks.main_states(spec, params, batch.ids, batch, None)
  return networks.token_logits(spec.discriminator, params["discriminator"], "rtd_head", states)


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
