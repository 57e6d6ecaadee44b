"""Detection at masked slots, with and without a product of token and context.

Command:  python -m electra_jax.train --config=benchmarks/detection_config.py:OBJECTIVE
          --workdir=DIR --config.data.dir=SHARDS
Hardware: two CPU cores.
Expected: after 1e13 FLOPs an AUC against noise at the slots of 0.57 (in_text) and 0.81 (product):
          LOG.md, "Why detection learns late".

Loading this file adds two objectives with different scores. In both, half of the masked slots get a
sample of the generator and half keep their token; only slots are scored.

in_text   the main network reads the tokens in the text; the score is ELECTRA's head on its states.
product   the main network reads [MASK], so its states do not contain the token; the score is state
          times token embedding, whose gradient at initialisation is not zero.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import linen as nn
from ml_collections import ConfigDict

from electra_jax.config import files
from electra_jax.core import heads, layers, masking, networks, objectives, terms


def slots(inputs: objectives.ObjectiveInputs) -> jax.Array:
  """Returns tokens [B, K] for the slots, half of them samples."""
  c = inputs.corruption
  half = jax.vmap(lambda key: jax.random.bernoulli(key, shape=c.sampled.shape[1:]))
  drawn = half(jax.vmap(jax.random.fold_in, (0, None))(inputs.keys.samples, 4))
  return jnp.where(drawn, c.sampled, c.masked.labels)


def states(spec: networks.PretrainSpec, params, inputs, ids) -> jax.Array:
  """Returns the main network's states [B, K, D] of the slots in ids [B, L]."""
  keys = inputs.keys.discriminator_dropout
  return masking.gather(
    networks.main_states(spec, params, ids, inputs.batch, keys), inputs.corruption.masked
  )


def detection(spec, inputs, tokens, scores) -> dict[str, terms.Term]:
  """Returns the terms of scores [B, K] of the slots' tokens."""
  masked, weight = inputs.corruption.masked, spec.discriminator_weight.at(inputs.step)
  return terms.detection_terms("rtd", scores, tokens != masked.labels, masked.weights, weight)


def in_text(spec: networks.PretrainSpec, params, inputs) -> dict[str, terms.Term]:
  """Detection at the slots, of tokens that the main network reads."""
  tokens = slots(inputs)
  ids = masking.write(inputs.batch.ids, inputs.corruption.masked, tokens)
  found, main = states(spec, params, inputs, ids), params["discriminator"]
  scores = networks.token_logits(spec.discriminator, main, "rtd_head", found)
  return detection(spec, inputs, tokens, scores)


def product(spec: networks.PretrainSpec, params, inputs) -> dict[str, terms.Term]:
  """Detection at the slots, by tokens' embeddings times states that do not contain the tokens."""
  tokens, masked = slots(inputs), inputs.corruption.masked
  all_masked = dataclasses.replace(spec.masking, mask_token_prob=1.0)
  ids = masking.mask(inputs.batch.ids, masked, all_masked, inputs.keys.mask_tokens)
  found, main = states(spec, params, inputs, ids), params["discriminator"]
  context = networks.token_logits(spec.discriminator, main, "product_head", found)
  embedded = networks.embeddings(spec, params, "discriminator")["word"][tokens]
  scores = -layers.einsum_float32("bke,bke->bk", context, embedded.astype(context.dtype))
  return detection(spec, inputs, tokens, scores)


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
    raise ValueError(f"{arg!r} is not one of {', '.join(ADDED)}")
  c = files.load(Path(__file__).with_name("evidence_config.py"), "electra")
  c.objective.name = arg
  c.generator.kind = "unigram"
  return c
