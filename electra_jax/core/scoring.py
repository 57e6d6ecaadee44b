"""Log-likelihoods of a text by log p(token | all others), or causally by those to the left.

Electric computes them in one pass, up to a constant (Clark et al. 2020b, Section 2.3). ELECTRA's
discriminator and generator together imply them. A masked language model takes one pass per token.

`masked_lm`, `causal`, `energy`, `original` and `implied` are (spec, params, batch, step) ->
log p [B, L] in nats, for `ObjectiveDef.log_p`.
"""

import jax
import jax.numpy as jnp

from electra_jax.core import generators, networks
from electra_jax.core.batch import Batch
from electra_jax.core.networks import PretrainSpec
from electra_jax.core.transformer_config import TransformerConfig


def masked_lm(spec: PretrainSpec, params: dict, batch: Batch, step: int | None) -> jax.Array:
  """Returns a masked language model's log p, in passes that mask one token each."""
  return generators.one_at_a_time(spec, params, batch, sampled=False)


def causal(spec: PretrainSpec, params: dict, batch: Batch, step: int | None) -> jax.Array:
  """Returns a causal language model's log p(token | those to its left), in one pass."""
  return next_token(spec.discriminator, networks.weights_of(spec, params, "discriminator"), batch)


def next_token(cfg: TransformerConfig, network: dict, batch: Batch) -> jax.Array:
  """Returns log p(token | those to its left) [B, L] of {"embeddings", "encoder", "clm_head"}."""
  states = networks.causal_states(cfg, network, batch, None)
  # In chunks, because the logits of all positions take gigabytes.
  return -networks.chunked_nll(cfg, network, states, batch.ids, chunk_size=4, head="clm_head")[0]


def energy(spec: PretrainSpec, params: dict, batch: Batch, step: int | None) -> jax.Array:
  """Returns Electric's log p; noise-contrastive training only nearly normalises it."""
  return -_logits(spec, params, batch)


def original(spec: PretrainSpec, params: dict, batch: Batch, step: int | None) -> jax.Array:
  """Returns the log-probability of "original", for a discriminator of masked positions only.

  For an optimal discriminator it is the data's log p.
  """
  return jax.nn.log_sigmoid(-_logits(spec, params, batch))


def implied(spec: PretrainSpec, params: dict, batch: Batch, step: int | None) -> jax.Array:
  """Returns the log p implied by discriminator and generator (Clark et al. 2020, Appendix G).

  The training step of the parameters sets the mask rate and temperature.

  Raises:
    ValueError: sampling did not use the generator's probabilities unchanged.
  """
  m = spec.masking
  shares = m.unigram_share.at(step), m.keep_mask_share
  if m.temperature.at(step) != 1 or any(share != 0 for share in shares) or m.disallow_correct:
    raise ValueError(
      "scoring needs a run with temperature 1, unigram_share 0, keep_mask_share 0, no"
      " disallow_correct"
    )
  log_q = generators.GENERATORS[spec.generator_kind].log_q(spec, params, batch)
  return implied_log_p(_logits(spec, params, batch), log_q, spec.masking.mask_prob.at(step))


def masked_token(
  cfg: TransformerConfig, network: dict, batch: Batch, positions: jax.Array, labels: jax.Array
) -> jax.Array:
  """Returns log p(label) [B] at one position [B] of each row, which is masked in its ids.

  `network` is {"embeddings", "encoder", "mlm_head"}.
  """
  at = positions[:, None]
  state = networks.states_to_predict(cfg, network, batch.ids, batch, None, at)
  logits = networks.vocabulary_logits(cfg, network, state)
  return -networks.nll(logits, labels[:, None])[0][:, 0]


def _logits(spec: PretrainSpec, params: dict, batch: Batch) -> jax.Array:
  states = networks.main_states(spec, params, batch.ids, batch, None)
  return networks.token_logits(
    spec.discriminator, params["discriminator"], "rtd_head", states, batch.document_ids
  )


def implied_log_p(score: jax.Array, log_q: jax.Array, mask_prob: float) -> jax.Array:
  """Returns the log p implied by a discriminator and its generator.

  An optimal discriminator says "original" with probability D = p (a + q) / (a p + q), with p the
  data's probability, q the generator's and a = (1 - m) / m for mask rate m.
  So p = D q / (a (1 - D) + q).

  Args:
    score: [B, L], the discriminator's logits, positive for replaced.
    log_q: [B, L], the generator's log-probabilities of the tokens in nats, as the result.

  >>> p, q, a = 0.3, 0.2, 3.0
  >>> d = p * (a + q) / (a * p + q)
  >>> float(jnp.exp(implied_log_p(jnp.log((1 - d) / d), jnp.log(q), 0.25)))
  0.3...
  """
  log_a = jnp.log((1 - mask_prob) / mask_prob)
  other = jnp.logaddexp(log_a + jax.nn.log_sigmoid(score), log_q)
  return jax.nn.log_sigmoid(-score) + log_q - other
