"""Generators of replaced tokens, and the corruption of a batch.

To add a generator, write a function (spec, params, GeneratorInputs) -> GeneratorOutput and an entry
in GENERATORS. Other code reads the entry and never compares names.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from electra_jax.core import layers, masking, networks
from electra_jax.core.batch import Batch
from electra_jax.core.networks import TIES, PretrainSpec
from electra_jax.core.params import count
from electra_jax.core.terms import Term, token_terms
from electra_jax.core.transformer_config import TransformerConfig


class Streams(NamedTuple):
  """A batch's random keys by purpose, [B] typed keys each.

  Dropout keys are [B, 2], as in `step.row_keys`, and None in evaluation.
  """

  positions: jax.Array
  mask_tokens: jax.Array
  samples: jax.Array
  generator_dropout: jax.Array | None
  discriminator_dropout: jax.Array | None


def split_streams(keys: jax.Array, training: bool) -> Streams:
  """Splits keys [B, 2] (`step.row_keys`); [B], one for each sequence, will do in evaluation."""
  split = jax.vmap(jax.vmap(lambda key: jax.random.split(key, len(Streams._fields))))
  *own, generator, discriminator = jnp.moveaxis(split(keys.reshape(len(keys), -1)), 2, 0)
  dropouts = (generator, discriminator) if training else (None, None)
  return Streams(*(x[:, 0] for x in own), *dropouts)


class GeneratorInputs(NamedTuple):
  """The inputs of a generator."""

  batch: Batch  # the original text
  masked: masking.MaskedPositions  # the positions to predict and their labels
  masked_ids: jax.Array  # [B, L] int32, the text with [MASK]
  # from `layers.make_dropout_seeds`; None for no dropout
  dropout_seeds: tuple[jax.Array, jax.Array] | None


class GeneratorOutput(NamedTuple):
  """A generator's predictions for a batch."""

  # [B, K, V] float32 at the masked positions, differentiable if the generator is trained
  logits: jax.Array
  terms: dict[str, Term]  # its losses and metrics
  # [B, K, D] at the masked positions ([B, K, 2 D] of two towers); None without a network
  states: jax.Array | None = None
  # [B, L] -log q(token | all others) of a two-tower generator that never samples [MASK]; else None
  nll: jax.Array | None = None


class Corruption(NamedTuple):
  """A batch with generated tokens."""

  masked: masking.MaskedPositions  # K positions per sequence
  output: GeneratorOutput
  sampled: jax.Array  # [B, K] int32, tokens sampled at the masked positions
  ids: jax.Array  # [B, L] int32, the corrupted text
  is_replaced: jax.Array  # [B, L] bool; False where the sample equals the original
  detected: jax.Array  # [B, L] bool, real tokens but [MASK]: those that a detector classifies
  terms: dict[str, Term]  # the generator's, plus statistics of the replacements


def transformer(spec: PretrainSpec, params: dict, inputs: GeneratorInputs) -> GeneratorOutput:
  """A masked language model on the masked text (Clark et al. 2020, Section 3.1)."""
  masked, cfg = inputs.masked, spec.generator
  network = networks.weights_of(spec, params, "generator")
  states = networks.states_to_predict(
    cfg, network, inputs.masked_ids, inputs.batch, inputs.dropout_seeds, masked.positions
  )
  logits = networks.vocabulary_logits(cfg, network, states)
  loss = networks.nll(logits, masked.labels, spec.masking.mask_id)
  return GeneratorOutput(logits, token_terms("mlm", *loss, masked.weights, spec.mlm_weight), states)


def frozen(spec: PretrainSpec, params: dict, inputs: GeneratorInputs) -> GeneratorOutput:
  """A masked language model, without training or dropout (Fast-ELECTRA)."""
  params = {**params, "generator": jax.lax.stop_gradient(params["generator"])}
  output = transformer(spec, params, inputs._replace(dropout_seeds=None))
  return output._replace(terms={k: Term(t.total, t.count) for k, t in output.terms.items()})


def two_tower_states(spec: PretrainSpec, params: dict, batch: Batch, dropout_seeds) -> jax.Array:
  """Returns states [B, L, 2 D] of each token's left and right context without the token.

  One tower reads left to right, one right to left (Clark et al. 2020b, Section 3). Position t
  concatenates the left tower's state at t - 1 and the right tower's at t + 1.

  Differs from the original: states beyond the edges and at padding are 0 and do not wrap around.

  Args:
    dropout_seeds: (left, right).
  """
  weights = networks.weights_of(spec, params, "generator")

  def tower(direction: str, seeds) -> jax.Array:
    network = {**weights, "encoder": weights[direction]}
    return networks.causal_states(spec.generator, network, batch, seeds, direction)

  return jnp.concatenate([*map(tower, ("ltr", "rtl"), dropout_seeds)], -1)


def two_tower(spec: PretrainSpec, params: dict, inputs: GeneratorInputs) -> GeneratorOutput:
  """Two causal towers on the original text, trained on all non-special tokens (the cloze loss)."""
  cfg, batch = spec.generator, inputs.batch
  states = two_tower_states(spec, params, batch, _two_seeds(inputs.dropout_seeds))
  network = networks.weights_of(spec, params, "generator")
  # Chunks of K positions need no more memory than a masked language model.
  K = inputs.masked.positions.shape[1]
  never = spec.masking.mask_id
  loss, hit, nll = networks.chunked_nll(cfg, network, states, batch.ids, chunk_size=K, never=never)
  terms = token_terms("cloze", loss, hit, masking.maskable(batch, spec.masking), spec.mlm_weight)
  states = masking.gather(states, inputs.masked)
  logits = networks.vocabulary_logits(cfg, network, states)
  return GeneratorOutput(logits, terms, states, nll)


def _two_seeds(dropout_seeds):
  """Returns the dropout seeds of the left and the right tower, (None, None) without dropout."""
  other = jax.tree.map(lambda s: s ^ jnp.uint32(0x9E3779B9), dropout_seeds)
  return dropout_seeds, other


def uniform(spec: PretrainSpec, params: dict, inputs: GeneratorInputs) -> GeneratorOutput:
  """Uniform over all tokens but [MASK], including other special tokens, as in the original."""
  shape = inputs.masked.positions.shape
  return GeneratorOutput(jnp.zeros((*shape, spec.generator.vocab_size)), {})


def unigram(spec: PretrainSpec, params: dict, inputs: GeneratorInputs) -> GeneratorOutput:
  """Samples tokens by their frequency in the training text (Clark et al. 2020, Section 3.4)."""
  counts = jnp.array(spec.frequencies, jnp.float32)
  logits = jnp.where(counts > 0, jnp.log(jnp.where(counts > 0, counts, 1)), -1e30)
  shape = inputs.masked.positions.shape
  return GeneratorOutput(jnp.broadcast_to(logits, (*shape, counts.size)), {})


def one_at_a_time(
  spec: PretrainSpec, params: dict, batch: Batch, sampled: bool = True
) -> jax.Array:
  """Returns a masked LM's log-probabilities [B, L], in L passes that mask one token each.

  With `sampled`, those it samples from as a generator, without [MASK].
  """
  cfg, network = masked_language_model(spec, params)

  def at(t):
    masked_ids = batch.ids.at[:, t].set(spec.masking.mask_id)
    here = jnp.full((len(batch.ids), 1), t)
    states = networks.states_to_predict(cfg, network, masked_ids, batch, None, here)
    logits = networks.vocabulary_logits(cfg, network, states)
    if sampled:
      logits = masking.disallow(logits, jnp.int32(spec.masking.mask_id))
    return -networks.nll(logits, jax.lax.dynamic_slice_in_dim(batch.ids, t, 1, axis=1))[0][:, 0]

  return jax.lax.map(at, jnp.arange(batch.ids.shape[1])).T


def two_tower_log_q(spec: PretrainSpec, params: dict, batch: Batch) -> jax.Array:
  """Returns the log-probabilities [B, L] that a two-tower generator samples from, in one pass."""
  states = two_tower_states(spec, params, batch, (None, None))
  network = networks.weights_of(spec, params, "generator")
  K = spec.masking.num_masked(batch.ids.shape[1], training=False)
  never = spec.masking.mask_id
  found = networks.chunked_nll(
    spec.generator, network, states, batch.ids, chunk_size=K, never=never
  )
  return -found[2]


@dataclasses.dataclass(frozen=True)
class GeneratorDef:
  """The definition of a generator."""

  apply: Callable[[PretrainSpec, dict, GeneratorInputs], GeneratorOutput]
  # names of its encoders, whose states are concatenated; () if it has no weights
  encoders: tuple[str, ...] = ()
  trained: bool = False  # whether it is trained jointly, with dropout
  # whether its loss covers all tokens, with causal encoders on the unmasked text
  predicts_all: bool = False
  pretrained: bool = False  # whether its weights are from generator.init_from
  decodes: bool = False  # whether the enhanced mask decoder predicts its words
  # (spec, params, batch) -> log q(token | all others) [B, L] of its samples, or None
  log_q: Callable[[PretrainSpec, dict, Batch], jax.Array] | None = None

  @property
  def is_masked_lm(self) -> bool:
    """Whether it is a masked language model."""
    return bool(self.encoders) and not self.predicts_all


GENERATORS = {
  "transformer": GeneratorDef(transformer, ("encoder",), trained=True, log_q=one_at_a_time),
  # DeBERTa's, with absolute positions in its enhanced mask decoder (`networks.states_to_predict`).
  "enhanced_mask_decoder": GeneratorDef(
    transformer, ("encoder",), trained=True, log_q=one_at_a_time, decodes=True
  ),
  "two_tower": GeneratorDef(
    two_tower, ("ltr", "rtl"), trained=True, predicts_all=True, log_q=two_tower_log_q
  ),
  "uniform": GeneratorDef(uniform),
  "unigram": GeneratorDef(unigram),
  "frozen": GeneratorDef(frozen, ("encoder",), pretrained=True, log_q=one_at_a_time),
  "frozen_mask_decoder": GeneratorDef(
    frozen, ("encoder",), pretrained=True, log_q=one_at_a_time, decodes=True
  ),
}


def masked_lm_kind(decodes: bool, pretrained: bool) -> str:
  """Returns the kind of a masked language model with or without the enhanced mask decoder."""
  masked_lms = ((name, x) for name, x in GENERATORS.items() if x.is_masked_lm)
  return next(k for k, x in masked_lms if (x.decodes, x.pretrained) == (decodes, pretrained))


def init_generator(
  spec: PretrainSpec, key: jax.Array, heads: tuple[str, ...], heads_key: jax.Array
) -> dict:
  """Returns the generator's unshared parameters and the additional `heads`; {} without weights."""
  definition, tying = GENERATORS[spec.generator_kind], TIES[spec.tying]
  names = definition.encoders
  if not names:
    return {}
  cfg, k = spec.generator, jax.random.split(key, 4)
  width = len(names) * cfg.hidden_size
  weights = {"mlm_head": networks.init_head("mlm_head", cfg, width, k[2])}
  if not tying.shares_encoder:
    weights |= {name: networks.init_encoder(cfg, k[i]) for i, name in enumerate(names)}
  if own := tying.own(networks.init_embeddings(cfg, k[3])):
    weights["embeddings"] = own
  if definition.decodes:
    weights["mask_decoder"] = networks.init_mask_decoder(cfg, jax.random.fold_in(key, len(k)))
  return weights | {name: networks.init_head(name, cfg, width, heads_key) for name in heads}


def groups(spec: PretrainSpec, params: dict) -> dict:
  """Returns "generator", "discriminator" or "frozen" for each weight: its optimizer group.

  Shared embeddings belong to the discriminator; with gdes, to the generator.
  """
  own = "generator" if GENERATORS[spec.generator_kind].trained else "frozen"
  group = {"generator": own, "discriminator": "discriminator"}
  group["embeddings"] = TIES[spec.tying].trained_with
  return jax.tree.broadcast({part: group[part] for part in params}, params)


def count_networks(spec: PretrainSpec, params: dict) -> dict[str, int]:
  """Returns the parameter counts of "discriminator", "generator" and all that are "trained".

  Shared embeddings count once, in the network that trains them: the discriminator, or the generator
  with gdes. The paper's 14M, 110M and 335M are the discriminator's.
  """
  counts = {network: count(params.get(network, {})) for network in ("discriminator", "generator")}
  counts[TIES[spec.tying].trained_with] += count(params["embeddings"])
  trained = params if GENERATORS[spec.generator_kind].trained else {**params, "generator": {}}
  return counts | {"trained": count(trained)}


def masked_language_model(spec: PretrainSpec, params: dict) -> tuple[TransformerConfig, dict]:
  """Returns the config and {embeddings, encoder, mlm_head} of the generator or discriminator.

  A generator with an enhanced mask decoder also has "mask_decoder".

  Raises:
    ValueError: the run has no masked language model.
  """
  if "generator" not in params and "mlm_head" in params["discriminator"]:
    cfg, network = spec.discriminator, "discriminator"
  elif GENERATORS[spec.generator_kind].is_masked_lm and "generator" in params:
    cfg, network = spec.generator, "generator"
  else:
    raise ValueError(
      f"the run ({spec.objective}, {spec.generator_kind}) has no masked language model"
    )
  weights = networks.weights_of(spec, params, network)
  names = ("embeddings", "encoder", "mlm_head", "mask_decoder")
  return cfg, {name: weights[name] for name in names if name in weights}


def corrupt(
  spec: PretrainSpec, params: dict, batch: Batch, keys: Streams, step: jax.Array | None
) -> Corruption:
  """Masks the batch, runs the generator and replaces the masked tokens by its samples."""
  m, generate = spec.masking, GENERATORS[spec.generator_kind].apply
  dropout_seeds = layers.make_dropout_seeds(keys.generator_dropout, spec.generator.num_layers)
  masked = masking.choose(batch, m, keys.positions, step)
  masked_ids = masking.mask(batch.ids, masked, m, keys.mask_tokens)
  inputs = GeneratorInputs(batch, masked, masked_ids, dropout_seeds)
  output = generate(spec, params, inputs)
  # Differs from the original: [MASK] is never sampled. Without keep_mask_share the discriminator
  # never sees it.
  mask_id = jnp.int32(m.mask_id)
  output = output._replace(logits=masking.disallow(output.logits, mask_id))

  logits = output.logits
  if dropout_seeds is not None and not spec.sampling_dropout:
    fixed = jax.lax.stop_gradient(params)
    logits = generate(spec, fixed, inputs._replace(dropout_seeds=None)).logits
    logits = masking.disallow(logits, mask_id)
  if m.disallow_correct:
    logits = masking.disallow(logits, masked.labels)
  sampled, surprise = masking.sample(logits, m.temperature.at(step), keys.samples)
  if any(m.unigram_share.values):
    sampled, surprise = _mix_unigrams(spec, logits, sampled, masked.labels, keys.samples, step)
  hits = (sampled == masked.labels) * masked.weights
  if m.keep_mask_share:
    fourth = jax.vmap(jax.random.fold_in, (0, None))(keys.samples, 4)
    draw = jax.vmap(lambda key: jax.random.uniform(key, sampled.shape[1:]))(fourth)
    sampled = jnp.where(draw < m.keep_mask_share, mask_id, sampled)
  ids, is_replaced = masking.corrupt(batch.ids, masked, sampled)
  detected = batch.padding_mask
  if m.keep_mask_share:
    detected &= ids != mask_id
    is_replaced &= detected

  number = masked.weights.sum()
  terms = {
    **output.terms,
    "sampled_accuracy": Term(hits.sum(), number),
    # In nats, of the distribution sampled from: with temperature and the other sampling settings.
    "sample_entropy": Term((surprise * masked.weights).sum(), number),
    "replaced": Term((is_replaced & detected).sum().astype(jnp.float32), detected.sum()),
  }
  return Corruption(masked, output, sampled, ids, is_replaced, detected, terms)


def _mix_unigrams(spec: PretrainSpec, logits, sampled, labels, keys, step):
  """Redraws a fraction of the samples [B, K] by token frequency; returns all and their -log p."""
  m, again = spec.masking, jax.vmap(jax.random.fold_in, (0, None))
  noise, log_u = masking.sample_unigrams(spec.frequencies, labels.shape[1], again(keys, 2))
  share = m.unigram_share.at(step)
  draw = jax.vmap(lambda key: jax.random.uniform(key, labels.shape[1:]))(again(keys, 3))
  chosen, replaced = draw < share, share
  if m.disallow_correct:  # a draw of the original keeps the generator's sample
    chosen &= noise != labels
    replaced = share * (1 - jnp.exp(log_u[labels]))
  sampled = jnp.where(chosen, noise, sampled)
  log_q = -networks.nll(jax.lax.stop_gradient(logits) / m.temperature.at(step), sampled)[0]
  return sampled, -jnp.log((1 - replaced) * jnp.exp(log_q) + share * jnp.exp(log_u[sampled]))
