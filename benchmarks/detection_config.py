"""Detection at masked slots, with and without a product of token and context.

Command:  python -m electra_jax.train --config=benchmarks/detection_config.py:OBJECTIVE
          --workdir=DIR --config.data.dir=SHARDS
Hardware: two CPU cores.
Expected: LOG.md, "Why detection learns late".

Loading this file adds two objectives, which differ in what a score is made of. In both, half of the
masked slots get a sample of the generator and half keep their token; only slots are scored.

in_text   the main network reads the tokens in the text: ELECTRA's head on its states.
product   the main network reads [MASK], so that its states do not contain the token: their product
          with the token's embedding. The gradient of a fresh network towards it is not zero.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import linen as nn
from ml_collections import ConfigDict

from electra_jax.config import files
from electra_jax.core import generators, heads, layers, masking, networks, objectives, terms


def slots(spec: networks.PretrainSpec, params, batch, keys, step):
  """Returns the generator's `Corruption`, and tokens [B, K] for the slots, half of them samples."""
  c = generators.corrupt(spec, params, batch, keys, step)
  half = jax.vmap(lambda key: jax.random.bernoulli(key, shape=c.sampled.shape[1:]))
  drawn = half(jax.vmap(jax.random.fold_in, (0, None))(keys.samples, 4))
  return c, jnp.where(drawn, c.sampled, c.masked.labels)


def detection(c, tokens, scores, weight) -> dict[str, terms.Term]:
  """Returns the terms of scores [B, K] of the slots' tokens."""
  replaced = tokens != c.masked.labels
  return c.terms | terms.detection_terms("rtd", scores, replaced, c.masked.weights, weight)


def in_text(spec: networks.PretrainSpec) -> objectives.Objective:
  """Detection at the slots, of tokens that the main network reads."""

  def objective(params, batch, keys, step):
    keys = generators.split_streams(keys, training=step is not None)
    c, tokens = slots(spec, params, batch, keys, step)
    ids = masking.write(batch.ids, c.masked, tokens)
    states = networks.main_states(spec, params, ids, batch, keys.discriminator_dropout)
    states, main = masking.gather(states, c.masked), params["discriminator"]
    scores = networks.token_logits(spec.discriminator, main, "rtd_head", states)
    return detection(c, tokens, scores, spec.discriminator_weight.at(step))

  return objective


def product(spec: networks.PretrainSpec) -> objectives.Objective:
  """Detection at the slots, by tokens' embeddings times states that do not contain the tokens."""
  all_masked = dataclasses.replace(spec.masking, mask_token_prob=1.0)

  def objective(params, batch, keys, step):
    keys = generators.split_streams(keys, training=step is not None)
    c, tokens = slots(spec, params, batch, keys, step)
    ids = masking.mask(batch.ids, c.masked, all_masked, keys.mask_tokens)
    states = networks.main_states(spec, params, ids, batch, keys.discriminator_dropout)
    states, main = masking.gather(states, c.masked), params["discriminator"]
    context = networks.token_logits(spec.discriminator, main, "product_head", states)
    embedded = networks.embeddings(spec, params, "discriminator")["word"][tokens]
    scores = -layers.einsum_float32("bke,bke->bk", context, embedded.astype(context.dtype))
    return detection(c, tokens, scores, spec.discriminator_weight.at(step))

  return objective


class ProductHead(nn.Module):
  """What states [B, K, D] expect of a token, [B, K, E]: the masked LM's head without its logits."""

  cfg: networks.TransformerConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = layers.gelu(layers.dense(self.cfg, self.cfg.embedding_size, "dense")(x))
    return layers.norm(self.cfg, "layer_norm")(x).astype(self.cfg.compute.dtype)


def product_flops(cfg: networks.TransformerConfig, positions: int) -> int:
  """Returns the forward FLOPs of `ProductHead` and its product at `positions` states."""
  return 2 * positions * (cfg.hidden_size * cfg.embedding_size + cfg.embedding_size)


heads.HEADS["product_head"] = heads.HeadDef(ProductHead, product_flops)
ADDED = {
  "in_text": objectives.ObjectiveDef(in_text),
  "product": objectives.ObjectiveDef(product, heads=("product_head",)),
}
objectives.OBJECTIVES.update(ADDED)


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns evidence_config.py's `electra` on unigram noise, with an objective of ADDED."""
  if arg not in ADDED:
    raise ValueError(f"{arg!r} is none of {', '.join(ADDED)}")
  c = files.load(Path(__file__).with_name("evidence_config.py"), "electra")
  c.objective.name = arg
  c.generator.kind = "unigram"
  return c
