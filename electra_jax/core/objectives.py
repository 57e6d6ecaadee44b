"""Pretraining objectives: functions from parameters and a corrupted batch to named terms.

Clark et al. 2020 (ELECTRA) and 2020b (Electric). To add an objective, write a function (spec,
params, ObjectiveInputs) -> terms, an entry in OBJECTIVES and a config; the step does not change.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from electra_jax.core import contrast, layers, masking, networks, scoring
from electra_jax.core.batch import Batch
from electra_jax.core.generators import (
  GENERATORS,
  Corruption,
  GeneratorDef,
  Streams,
  corrupt,
  init_generator,
  split_streams,
)
from electra_jax.core.networks import PretrainSpec, init_discriminator
from electra_jax.core.params import make_key
from electra_jax.core.terms import Term, detection_terms, token_terms

# (params, batch, keys [B, 2], step) -> terms; step is None in evaluation: no dropout, no schedules.
Objective = Callable[[dict, Batch, jax.Array, jax.Array | None], dict[str, Term]]


class ObjectiveInputs(NamedTuple):
  """The inputs of an objective."""

  batch: Batch  # the original text
  keys: Streams
  step: jax.Array | None  # [] int32 training step, for schedules; None in evaluation
  corruption: Corruption | None  # by the generator; None if the objective has none


@dataclasses.dataclass(frozen=True)
class ObjectiveDef:
  """The definition of an objective and its networks."""

  # returns the discriminator's terms, to which the generator's are added
  terms: Callable[[PretrainSpec, dict, ObjectiveInputs], dict[str, Term]]
  heads: tuple[str, ...] = ("rtd_head",)  # of the discriminator, keys of `heads.HEADS`
  uses_generator: bool = True
  # whether it works with a generator
  accepts: Callable[[GeneratorDef], bool] = lambda generator: True
  generator_heads: tuple[str, ...] = ()  # the generator's heads besides its vocabulary layer
  # whether the discriminator's vocabulary layer covers all tokens, not just the masked ones
  predicts_all: bool = False
  second_pass: bool = False  # whether the discriminator also encodes a second view of each sequence
  # fields of config.objective that not all objectives read; NAME includes NAME_schedule
  own_fields: tuple[str, ...] = ()
  # whether its loss uses the sampling probabilities, so that settings must not distort them
  exact_sampling: bool = False
  causal: bool = False  # whether the main network's attention is causal in training
  # a function of `scoring`, or None if the networks give no likelihood
  log_p: Callable[..., jax.Array] | None = None
  # keys of `scorers.SCORERS`, to score sentences by the first whose head exists; () for any
  scorers: tuple[str, ...] = ()


def make(spec: PretrainSpec) -> Objective:
  """Builds the spec's objective; with an RTD head, evaluations include `detect_unigrams`."""
  definition = OBJECTIVES[spec.objective]
  detects = "rtd_head" in definition.heads and spec.fixed_noise and bool(spec.frequencies)

  def objective(params, batch, keys, step):
    streams = split_streams(keys, training=step is not None)
    corruption = None
    if definition.uses_generator:
      corruption = corrupt(spec, params, batch, streams, step)
    terms = definition.terms(spec, params, ObjectiveInputs(batch, streams, step, corruption))
    if corruption is not None:
      terms = corruption.terms | terms
    if detects and step is None:
      terms |= detect_unigrams(spec, params, batch)
    return terms

  return objective


def detect_unigrams(spec: PretrainSpec, params, batch: Batch) -> dict[str, Term]:
  """Returns detection scores for replacements of 15 % of the tokens, drawn by token frequency.

  The replacements are the same for every run on the data, whatever its generator.
  """
  rates = dataclasses.replace(
    spec.masking, mask_prob=0.15, temperature=1.0, disallow_correct=False, unigram_share=0.0,
    keep_mask_share=0.0,
  )  # fmt: skip
  noise = dataclasses.replace(spec, generator_kind="unigram", masking=rates)
  keys = jax.vmap(lambda row: jax.random.fold_in(make_key(0), row))(batch.row)
  c = corrupt(noise, params, batch, split_streams(keys, training=False), None)
  states = networks.main_states(spec, params, c.ids, batch, None)
  scores = _rtd_logits(spec, params, states, batch)
  terms = detection_terms("unigram", scores, c.is_replaced, batch.padding_mask, 0.0)
  return {"unigram_scores": terms["unigram_scores"]}


def init_params(spec: PretrainSpec, key: jax.Array) -> dict:
  """Initialises the parameters of the objective's networks; see `networks`."""
  definition, k = OBJECTIVES[spec.objective], jax.random.split(key, 3)
  tables, discriminator = init_discriminator(spec, definition.heads, k[0])
  params = {"embeddings": tables, "discriminator": discriminator}
  if definition.uses_generator:
    params["generator"] = init_generator(spec, k[1], definition.generator_heads, k[2])
  return params


def param_shapes(spec: PretrainSpec) -> dict:
  """Returns the shapes of `init_params` as a tree of ShapeDtypeStruct, without computing it."""
  return jax.eval_shape(lambda: init_params(spec, make_key(0)))


def generator_of(spec: PretrainSpec) -> GeneratorDef | None:
  """Returns the definition of the spec's generator, None if the objective has none."""
  return GENERATORS[spec.generator_kind] if OBJECTIVES[spec.objective].uses_generator else None


def token_scores(spec: PretrainSpec, params: dict, batch: Batch, step: int | None) -> jax.Array:
  """Returns log p(token | all others) [B, L] in nats; 0 at padding and special tokens.

  Of a causal network, log p(token | those to its left).

  Args:
    step: training step of `params`, for schedules; None for their evaluation values.

  Raises:
    ValueError: the networks give no likelihood.
  """
  batch = jax.tree.map(jnp.asarray, batch)
  log_p, generator = OBJECTIVES[spec.objective].log_p, generator_of(spec)
  if log_p is None or (log_p is scoring.implied and generator.log_q is None):
    raise ValueError(
      f"objective {spec.objective} with a {spec.generator_kind} generator cannot score text"
    )
  scores = log_p(spec, params, batch, step)
  return jnp.where(masking.maskable(batch, spec.masking), scores, 0.0)


def _states(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> jax.Array:
  """Returns the discriminator's states [B, L, D] of the corrupted text."""
  ids, keys = inputs.corruption.ids, inputs.keys.discriminator_dropout
  return networks.main_states(spec, params, ids, inputs.batch, keys)


def _rtd_logits(spec: PretrainSpec, params: dict, states: jax.Array, batch: Batch) -> jax.Array:
  network = params["discriminator"]
  return networks.token_logits(spec.discriminator, network, "rtd_head", states, batch.document_ids)


def _detect(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> jax.Array:
  return _rtd_logits(spec, params, _states(spec, params, inputs), inputs.batch)


def _rtd_terms(spec: PretrainSpec, scores: jax.Array, inputs: ObjectiveInputs) -> dict[str, Term]:
  c, weight = inputs.corruption, spec.discriminator_weight.at(inputs.step)
  return detection_terms("rtd", scores, c.is_replaced, c.detected, weight)


def electra(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> dict[str, Term]:
  """The generator's loss + weight x replaced-token detection, trained jointly (Section 3).

  Samples carry no gradient, so the discriminator's loss trains shared weights but not the
  generator's others.
  """
  return _rtd_terms(spec, _detect(spec, params, inputs), inputs)


def electra_15(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> dict[str, Term]:
  """ELECTRA with the discriminator's loss on masked positions only (Section 3.4)."""
  c = inputs.corruption
  scores = _detect(spec, params, inputs)
  at_masked = masking.is_masked(c.masked, inputs.batch.ids.shape[1])
  weight = spec.discriminator_weight.at(inputs.step)
  return detection_terms("rtd", scores, c.is_replaced, at_masked & c.detected, weight)


def bert(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> dict[str, Term]:
  """Masked language modelling with dynamic masking; no generator, no next-sentence loss."""
  batch, keys = inputs.batch, inputs.keys
  masked = masking.choose(batch, spec.masking, keys.positions, inputs.step)
  masked_ids = masking.mask(batch.ids, masked, spec.masking, keys.mask_tokens)
  states = networks.main_states(spec, params, masked_ids, batch, keys.discriminator_dropout)
  loss = networks.nll(_at_masked(spec, params, states, masked), masked.labels)
  return token_terms("mlm", *loss, masked.weights, spec.mlm_weight)


def clm(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> dict[str, Term]:
  """Causal language modelling: predicts each token from those to its left; no generator.

  To start an encoder from: its causal stage is cheaper per predicted token than masked language
  modelling (Gisserot-Boukhlef et al. 2025, arXiv:2507.00994).
  """
  batch, cfg = inputs.batch, spec.discriminator
  seeds = layers.make_dropout_seeds(inputs.keys.discriminator_dropout, cfg.num_layers)
  network = networks.weights_of(spec, params, "discriminator")
  states = networks.causal_states(cfg, network, batch, seeds)
  # Chunks of K positions need no more memory than a masked language model.
  K = spec.masking.num_masked(batch.ids.shape[1], training=True)
  loss = networks.chunked_nll(cfg, network, states, batch.ids, chunk_size=K, head="clm_head")
  # Without a token to the left the state is 0.
  counted = masking.maskable(batch, spec.masking) & (states != 0).any(-1)
  return token_terms("clm", *loss, counted, spec.mlm_weight)


def _at_masked(spec: PretrainSpec, params, states, masked) -> jax.Array:
  network = networks.weights_of(spec, params, "discriminator")
  return networks.vocabulary_logits(spec.discriminator, network, masking.gather(states, masked))


def _replace_mlm_terms(spec: PretrainSpec, params, states, c, weight) -> dict[str, Term]:
  loss = networks.nll(_at_masked(spec, params, states, c.masked), c.masked.labels)
  return token_terms("replace_mlm", *loss, c.masked.weights, weight)


def replace_mlm(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> dict[str, Term]:
  """Masked language modelling on the generator's text, without [MASK] (Section 3.4)."""
  weight = spec.discriminator_weight.at(inputs.step)
  states = _states(spec, params, inputs)
  return _replace_mlm_terms(spec, params, states, inputs.corruption, weight)


def electra_mlm(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> dict[str, Term]:
  """ELECTRA whose discriminator also predicts the original tokens at masked positions.

  The loss is the generator's + discriminator_weight x detection + replace_mlm_weight x Replace MLM.
  """
  states, weight = _states(spec, params, inputs), spec.replace_mlm_weight.at(inputs.step)
  detection = _rtd_terms(spec, _rtd_logits(spec, params, states, inputs.batch), inputs)
  return detection | _replace_mlm_terms(spec, params, states, inputs.corruption, weight)


def _corrective_terms(
  spec: PretrainSpec, params: dict, inputs: ObjectiveInputs
) -> tuple[dict[str, Term], jax.Array]:
  """Returns the terms of `metro` and the discriminator's states [B, L, D]."""
  c, states = inputs.corruption, _states(spec, params, inputs)
  scores = _rtd_logits(spec, params, states, inputs.batch)
  nll, hit = networks.nll(_at_masked(spec, params, states, c.masked), c.masked.labels)
  original = -jax.lax.stop_gradient(jnp.take_along_axis(scores, c.masked.positions, axis=1))
  loss = copy_nll(original, nll, c.sampled == c.masked.labels)
  weight = spec.replace_mlm_weight.at(inputs.step)
  words = token_terms("corrective", loss, hit, c.masked.weights, weight)
  return _rtd_terms(spec, scores, inputs) | words, states


def metro(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> dict[str, Term]:
  """ELECTRA whose discriminator also corrects the masked tokens (METRO, Bajaj et al. 2022).

  The loss is the generator's + discriminator_weight x detection + replace_mlm_weight x corrective
  language modelling: -log(d 1[sample = original] + (1 - d) p(original)) at masked positions, with d
  the discriminator's probability of "original", without gradient (Meng et al. 2021, Section 3.2).
  """
  return _corrective_terms(spec, params, inputs)[0]


def coco_lm(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> dict[str, Term]:
  """`metro` + contrast_weight x contrast of the sequence with a crop of it (Meng et al. 2021).

  Differs from the paper: a sequence's negatives are its `contrast_group` of consecutive rows, not
  all rows of a device, so that devices and microbatches do not change the loss; and the detection
  head has ELECTRA's two layers instead of one, so that it can be exported.

  Raises:
    ValueError: rows hold several documents, or the groups do not divide a device's rows.
  """
  batch, keys, group = inputs.batch, inputs.keys, spec.contrast_group
  if batch.document_ids is not None:
    raise ValueError(f"objective {spec.objective} needs data.examples=segments, got packed")
  if len(batch.ids) % group:
    raise ValueError(
      f"objective.contrast_group={group} does not divide a device's {len(batch.ids)} sequences per"
      " microbatch: change it, train.batch_size, train.accumulation or eval.batch_size"
    )
  terms, states = _corrective_terms(spec, params, inputs)
  again = jax.vmap(lambda key: jax.random.fold_in(key, 1))
  cropped, dropout = contrast.crop(batch, again(keys.samples)), keys.discriminator_dropout
  dropout = None if dropout is None else jax.vmap(again)(dropout)
  view = networks.main_states(spec, params, cropped.ids, cropped, dropout)
  present = batch.padding_mask.any(-1)
  return terms | contrast.contrast_terms(
    states[:, 0], view[:, 0], present, group, spec.contrast_weight
  )


def copy_nll(gate: jax.Array, nll: jax.Array, same: jax.Array) -> jax.Array:
  """Returns -log(D 1[same] + (1 - D) p) in log-space, D = sigmoid(gate) and p = exp(-nll).

  >>> float(copy_nll(jnp.float32(0.0), jnp.log(4.0), False))  # -log(1/2 x 1/4)
  2.079...
  """
  generated = jax.nn.log_sigmoid(-gate) - nll
  return -jnp.where(same, jnp.logaddexp(jax.nn.log_sigmoid(gate), generated), generated)


def all_tokens_mlm(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> dict[str, Term]:
  """Predicts every original token from the generator's text, with a copy gate (Section 3.4)."""
  cfg, batch, c = spec.discriminator, inputs.batch, inputs.corruption
  states = _states(spec, params, inputs)
  network = networks.weights_of(spec, params, "discriminator")
  K = c.masked.positions.shape[1]
  nll, hit = networks.chunked_nll(cfg, network, states, batch.ids, chunk_size=K)
  gate = networks.token_logits(cfg, network, "copy_head", states)
  loss = copy_nll(gate, nll, c.ids == batch.ids)
  at_masked = masking.is_masked(c.masked, batch.ids.shape[1])
  mask, tokens = batch.padding_mask, batch.padding_mask.sum()
  weight = spec.discriminator_weight.at(inputs.step)
  return {
    "all_tokens_loss": Term((loss * mask).sum(), tokens, weight),
    "copied": Term((jax.nn.sigmoid(gate) * mask).sum(), tokens),
    **token_terms("ungated", nll, hit, at_masked, 0.0),
  }


def adversarial(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> dict[str, Term]:
  """Trains the generator to fool the discriminator, by REINFORCE (Section 3.2, Appendix F).

  A masked position's reward is the discriminator's loss there. The discriminator's output at a
  token is assumed not to depend on other samples, so the loss splits over positions. The baseline
  is -log sigmoid(w h) with the generator's state h; the sigmoid is trained by cross-entropy with
  the discriminator's probability of the right label.
  """
  c, at = inputs.corruption, inputs.corruption.masked.positions
  scores = _detect(spec, params, inputs)
  score, replaced = (jnp.take_along_axis(x, at, axis=1) for x in (scores, c.is_replaced))
  reward = jax.nn.softplus(jnp.where(replaced, -score, score))
  states = jax.lax.stop_gradient(c.output.states)
  guess = networks.token_logits(spec.generator, params["generator"], "baseline_head", states)
  advantage = jax.lax.stop_gradient(reward - jax.nn.softplus(-guess))
  temperature = spec.masking.temperature.at(inputs.step)
  log_p = -networks.nll(c.output.logits / temperature, c.sampled)[0]
  right = jnp.exp(-jax.lax.stop_gradient(reward))
  cross_entropy = right * jax.nn.softplus(-guess) + (1 - right) * jax.nn.softplus(guess)

  w, count = c.masked.weights, c.masked.weights.sum()
  return {
    # Only the gradient of this term is meaningful.
    "reinforce": Term(-(advantage * log_p * w).sum(), count, spec.adversarial_weight),
    "baseline_loss": Term((cross_entropy * w).sum(), count, spec.adversarial_weight),
    "slot_rtd_loss": Term((jax.lax.stop_gradient(reward) * w).sum(), count),
    **_rtd_terms(spec, scores, inputs),
  }


def electric(spec: PretrainSpec, params: dict, inputs: ObjectiveInputs) -> dict[str, Term]:
  """An energy for every token, by noise-contrastive estimation (Clark et al. 2020b).

  The logit of "noise" is energy + log q + log(p / (1 - p)), with q the two-tower generator's
  probability of the token given the original text and p the mask rate. All sampled positions are
  labelled noise, even if the sample equals the original.
  """
  batch, c, step = inputs.batch, inputs.corruption, inputs.step
  energy = _detect(spec, params, inputs)
  rate = spec.masking.mask_prob.at(step)
  logits = energy + jax.lax.stop_gradient(_log_q(c, batch)) + jnp.log(rate / (1 - rate))
  noised = masking.is_masked(c.masked, batch.ids.shape[1])
  weight = spec.discriminator_weight.at(step)
  return detection_terms("nce", logits, noised, batch.padding_mask, weight)


def _log_q(c: Corruption, batch: Batch) -> jax.Array:
  """Returns the generator's log-probability [B, L] of each token of the corrupted text."""
  at_masked = -networks.nll(c.output.logits, c.sampled)[0]
  at_masked = jnp.where(c.masked.weights > 0, at_masked, 0.0)
  rows = jnp.arange(batch.ids.shape[0])[:, None]
  changed = masking.is_masked(c.masked, batch.ids.shape[1])
  return jnp.where(changed, 0.0, -c.output.nll).at[rows, c.masked.positions].add(at_masked)


_WITH_WORDS = ObjectiveDef(
  electra_mlm,
  heads=("rtd_head", "mlm_head"),
  own_fields=("replace_mlm_weight",),
  log_p=scoring.implied,
  scorers=("rtd", "mlm_unmasked"),
)

OBJECTIVES: dict[str, ObjectiveDef] = {
  "electra": ObjectiveDef(electra, log_p=scoring.implied),
  "electra_15": ObjectiveDef(electra_15, log_p=scoring.original),
  "electra_mlm": _WITH_WORDS,
  "metro": dataclasses.replace(_WITH_WORDS, terms=metro),
  "coco_lm": dataclasses.replace(
    _WITH_WORDS,
    terms=coco_lm,
    second_pass=True,
    own_fields=("replace_mlm_weight", "contrast_weight", "contrast_group"),
  ),
  "replace_mlm": ObjectiveDef(replace_mlm, heads=("mlm_head",), scorers=("mlm_unmasked",)),
  "all_tokens_mlm": ObjectiveDef(
    all_tokens_mlm, heads=("mlm_head", "copy_head"), predicts_all=True, scorers=("mlm_unmasked",)
  ),
  "bert": ObjectiveDef(bert, heads=("mlm_head",), uses_generator=False, log_p=scoring.masked_lm),
  "clm": ObjectiveDef(
    clm,
    heads=("clm_head",),
    uses_generator=False,
    predicts_all=True,
    causal=True,
    log_p=scoring.causal,
  ),
  "adversarial": ObjectiveDef(
    adversarial,
    accepts=lambda generator: generator.trained,
    generator_heads=("baseline_head",),
    own_fields=("adversarial_weight",),
    exact_sampling=True,
    log_p=scoring.implied,
  ),
  "electric": ObjectiveDef(
    electric,
    accepts=lambda generator: generator.predicts_all,
    exact_sampling=True,
    log_p=scoring.energy,
    scorers=("energy",),
  ),
}
