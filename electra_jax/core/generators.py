"""Where replaced tokens come from: the kinds of generator, and a corrupted batch made with one.

A generator is a function (spec, params, batch, masked, masked_ids, dropout_seeds, step) ->
GeneratorOutput. A new one is a function here, an entry of GENERATORS, and its weights in
`networks.init_generator`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from electra_jax.core import masking, model, networks
from electra_jax.core.batch import Batch
from electra_jax.core.networks import PretrainSpec
from electra_jax.core.terms import Term, token_terms


class GeneratorOutput(NamedTuple):
  """What a generator says about a batch.

  Fields:
    logits: [B, K, V] float32 at the masked positions, with gradient where the generator is trained.
    terms: its own losses and measures.
    states: [B, K, D] its states at the masked positions; None for one without a network.
    nll: [B, L] -log q of every token given the others, from a two-tower generator; else None.
  """

  logits: jax.Array
  terms: dict[str, Term]
  states: jax.Array | None = None
  nll: jax.Array | None = None


class Corruption(NamedTuple):
  """A batch with generated tokens in it, and how it came about.

  Fields:
    masked: `masking.MaskedPositions`, K a sequence.
    output: the generator's `GeneratorOutput`.
    sampled: [B, K] int32, the tokens drawn at the masked positions.
    ids: [B, L] int32, the corrupted text.
    is_replaced: [B, L] bool; a sample that equals the original counts as original.
    terms: the generator's, and what was replaced.
  """

  masked: masking.MaskedPositions
  output: GeneratorOutput
  sampled: jax.Array
  ids: jax.Array
  is_replaced: jax.Array
  terms: dict[str, Term]


def transformer(
  spec: PretrainSpec, params, batch, masked, masked_ids, dropout_seeds, step
) -> GeneratorOutput:
  """A small masked language model on the masked text (Clark et al. 2020, Section 3.1)."""
  del step
  tables = networks.embeddings(spec, params, "generator")
  weights = networks.encoder(spec, params, "generator")
  states = networks.encode(spec.generator, tables, weights, masked_ids, batch, dropout_seeds)
  states = masking.gather(states, masked)
  logits = networks.vocabulary_logits(spec.generator, params["generator"], tables, states)
  loss = networks.nll(logits, masked.labels)
  return GeneratorOutput(logits, token_terms("mlm", *loss, masked.weights, spec.mlm_weight), states)


def frozen(
  spec: PretrainSpec, params, batch, masked, masked_ids, dropout_seeds, step
) -> GeneratorOutput:
  """Another run's masked language model, not trained and without dropout (Fast-ELECTRA)."""
  del dropout_seeds
  params = {**params, "generator": jax.lax.stop_gradient(params["generator"])}
  said = transformer(spec, params, batch, masked, masked_ids, None, step)
  return said._replace(terms={k: Term(t.total, t.count) for k, t in said.terms.items()})


def two_tower_states(spec: PretrainSpec, params: dict, batch: Batch, dropout_seeds) -> jax.Array:
  """Returns the states [B, L, 2 D] that know each token's left and right, but not the token.

  One tower reads from the left and one from the right (Clark et al. 2020b, Section 3); place t gets
  the left one's state of t - 1 and the right one's of t + 1.

  Differs from the original: zeros stand beyond the edges and at padding, where it wraps around.
  """
  tables = networks.embeddings(spec, params, "generator")
  left, right = (
    networks.encode(
      model.in_direction(spec.generator, tower), tables, params["generator"][tower], batch.ids,
      batch, seeds,
    )
    for tower, seeds in zip(("ltr", "rtl"), dropout_seeds, strict=True)
  )  # fmt: skip
  # A reader at padding has no token to look at and looks at all: the last would see itself in it.
  left, right = (x * batch.padding_mask[..., None] for x in (left, right))
  left = jnp.pad(left[:, :-1], ((0, 0), (1, 0), (0, 0)))
  right = jnp.pad(right[:, 1:], ((0, 0), (0, 1), (0, 0)))
  return jnp.concatenate([left, right], -1)


def two_tower(
  spec: PretrainSpec, params, batch, masked, masked_ids, dropout_seeds, step
) -> GeneratorOutput:
  """Two causal towers on the clean text, trained on every ordinary token (the cloze loss)."""
  del masked_ids
  cfg, network = spec.generator, params["generator"]
  towers = (None, None) if dropout_seeds is None else _two_dropout_seeds(dropout_seeds)
  states = two_tower_states(spec, params, batch, towers)
  tables = networks.embeddings(spec, params, "generator")
  # In slices as long as the masked positions: no more memory than a masked language model takes.
  at = spec.masking.num_masked(batch.ids.shape[1], step is not None)
  loss, hit = networks.chunked_nll(cfg, network, tables, states, batch.ids, at)
  terms = token_terms("cloze", loss, hit, masking.maskable(batch, spec.masking), spec.mlm_weight)
  states = masking.gather(states, masked)
  logits = networks.vocabulary_logits(cfg, network, tables, states)
  return GeneratorOutput(logits, terms, states, loss)


def _two_dropout_seeds(dropout_seeds):
  # The same hash with other words is another mask.
  other = jax.tree.map(lambda s: s ^ jnp.uint32(0x9E3779B9), dropout_seeds)
  return dropout_seeds, other


def uniform(
  spec: PretrainSpec, params, batch, masked, masked_ids, dropout_seeds, step
) -> GeneratorOutput:
  """Any token of the vocabulary but [MASK], the other special ones too, as in the original."""
  del params, batch, masked_ids, dropout_seeds, step
  return GeneratorOutput(jnp.zeros((*masked.positions.shape, spec.generator.vocab_size)), {})


def unigram(
  spec: PretrainSpec, params, batch, masked, masked_ids, dropout_seeds, step
) -> GeneratorOutput:
  """Tokens as frequent as in the training text (Clark et al. 2020, Section 3.4)."""
  del params, batch, masked_ids, dropout_seeds, step
  counts = jnp.array(spec.frequencies, jnp.float32)
  logits = jnp.where(counts > 0, jnp.log(jnp.maximum(counts, 1)), -1e4)
  return GeneratorOutput(jnp.broadcast_to(logits, (*masked.positions.shape, counts.size)), {})


GENERATORS = {
  "transformer": transformer,
  "two_tower": two_tower,
  "uniform": uniform,
  "unigram": unigram,
  "frozen": frozen,
}


def corrupt(spec: PretrainSpec, params: dict, batch: Batch, keys: jax.Array, step) -> Corruption:
  """Masks, asks the generator, samples, and writes the samples into the text.

  Args:
    keys: [B, 4] typed keys: for positions, masking, sampling and the generator's dropout.
    step: [] int32 of a training step; None in evaluation, which has no dropout.
  """
  m, generate = spec.masking, GENERATORS[spec.generator_kind]
  dropout_seeds = None
  if step is not None:
    dropout_seeds = model.make_dropout_seeds(keys[:, 3], spec.generator.num_layers)
  masked = masking.choose(batch, m, keys[:, 0], step)
  masked_ids = masking.mask(batch.ids, masked, m, keys[:, 1])
  output = generate(spec, params, batch, masked, masked_ids, dropout_seeds, step)
  # Differs from the original: [MASK] is never sampled, so the main network never sees one.
  mask_id = jnp.int32(m.mask_id)
  output = output._replace(logits=masking.disallow(output.logits, mask_id))

  logits = output.logits
  if dropout_seeds is not None and not spec.sampling_dropout:
    fixed = jax.lax.stop_gradient(params)
    logits = generate(spec, fixed, batch, masked, masked_ids, None, step).logits
    logits = masking.disallow(logits, mask_id)
  if m.disallow_correct:
    logits = masking.disallow(logits, masked.labels)
  sampled, surprise = masking.sample(logits, m.temperature_at(step), keys[:, 2])
  ids, is_replaced = masking.corrupt(batch.ids, masked, sampled)

  hits = (sampled == masked.labels) * masked.weights
  number = masked.weights.sum()
  terms = {
    **output.terms,
    "sampled_accuracy": Term(hits.sum(), number),
    # Of what is sampled from: after temperature and whatever was disallowed, in nats.
    "sample_entropy": Term((surprise * masked.weights).sum(), number),
    "replaced": Term(
      (is_replaced & batch.padding_mask).sum().astype(jnp.float32), batch.padding_mask.sum()
    ),
  }
  return Corruption(masked, output, sampled, ids, is_replaced, terms)
