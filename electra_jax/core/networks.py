"""The two networks together: their parameters, what they share, and their parts applied.

Parameters: {"embeddings", "generator": {...}, "discriminator": {"encoder", a head or more}}. The
discriminator is the network that is kept, whatever it is trained for; its heads are an objective's.
Letters as in `encoder`.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from electra_jax.core import encoder, masking
from electra_jax.core.batch import Batch
from electra_jax.core.encoder import TransformerConfig
from electra_jax.core.heads import HEADS
from electra_jax.core.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class PretrainSpec:
  """What an objective is built from.

  Fields:
    objective: a key of `objectives.OBJECTIVES`.
    generator_kind: a key of `generators.GENERATORS`.
    tying: what the networks share, a key of TIES (Clark et al. 2020, Section 3.2).
    sampling_dropout: whether the generator's samples are drawn under its dropout.
    frequencies: of the tokens, for the unigram generator; V numbers.
    mlm_weight: of the generator's loss, or of a masked LM's without a generator.
    discriminator_weight: of the main network's loss, a `Schedule` or a number.
    adversarial_weight: of REINFORCE and its baseline.
  """

  generator: TransformerConfig
  discriminator: TransformerConfig
  masking: masking.Masking
  mlm_weight: float = 1.0
  discriminator_weight: Schedule = Schedule(50.0)
  objective: str = "electra"
  generator_kind: str = "transformer"
  tying: str = "embeddings"
  sampling_dropout: bool = True
  frequencies: tuple[float, ...] = ()
  adversarial_weight: float = 1.0

  def __post_init__(self):
    object.__setattr__(self, "discriminator_weight", Schedule.of(self.discriminator_weight))


# What is shared.


@dataclasses.dataclass(frozen=True)
class Tying:
  """A way for the generator and the discriminator to share weights.

  Fields:
    lookup: (params, "generator" or "discriminator") -> the embeddings that the network looks up.
    split: fresh tables -> those in params["embeddings"], and what the discriminator has beside
      them.
    own: fresh tables -> those that the generator has for itself, {} for none.
    own_width: whether the generator's tables are as wide as the generator.
    shares_encoder: whether there is one encoder, so that both networks have one size.
    trained_with: the network with which params["embeddings"] are trained.
  """

  lookup: Callable[[dict, str], dict]
  split: Callable[[dict], tuple[dict, dict]] = lambda tables: (tables, {})
  own: Callable[[dict], dict] = lambda tables: {}
  own_width: bool = False
  shares_encoder: bool = False
  trained_with: str = "discriminator"


def _shared(params: dict, network: str) -> dict:
  return params["embeddings"]


def _none(params: dict, network: str) -> dict:
  return params["generator"]["embeddings"] if network == "generator" else params["embeddings"]


def _tokens(params: dict, network: str) -> dict:
  return {**params[network]["embeddings"], **params["embeddings"]}


def _without_word(tables: dict) -> dict:
  return {name: table for name, table in tables.items() if name != "word"}


def _gdes(params: dict, network: str) -> dict:
  if network == "generator":
    return params["embeddings"]
  delta = params["discriminator"]["embedding_delta"]
  return jax.tree.map(lambda e, d: jax.lax.stop_gradient(e) + d, params["embeddings"], delta)


TIES = {
  # Each has its own, the generator's as wide as itself.
  "none": Tying(_none, own=lambda tables: tables, own_width=True),
  # The word table; positions, token types and LayerNorm are each one's own.
  "tokens": Tying(
    _tokens,
    split=lambda tables: ({"word": tables["word"]}, {"embeddings": _without_word(tables)}),
    own=_without_word,
  ),
  # All tables and their LayerNorm: the paper's choice.
  "embeddings": Tying(_shared),
  # The encoder too.
  "all": Tying(_shared, shares_encoder=True),
  # The discriminator adds its own change to embeddings that the generator trains (He et al. 2021).
  "gdes": Tying(
    _gdes,
    split=lambda tables: (tables, {"embedding_delta": jax.tree.map(jnp.zeros_like, tables)}),
    trained_with="generator",
  ),
}


def embeddings(spec: PretrainSpec, params: dict, network: str) -> dict:
  """Returns the embeddings of "generator" or "discriminator" as plain tables."""
  return TIES[spec.tying].lookup(params, network)


def encoder_weights(spec: PretrainSpec, params: dict, network: str) -> dict:
  """Returns the encoder's weights of "generator" or "discriminator"."""
  return params["discriminator" if TIES[spec.tying].shares_encoder else network]["encoder"]


# Fresh parameters.


def _init(module, key, *inputs) -> dict:
  return module.init(key, *inputs)["params"]


def init_embeddings(cfg: TransformerConfig, key: jax.Array) -> dict:
  """Returns fresh embedding tables with their LayerNorm."""
  ids = jnp.zeros((1, 2), jnp.int32)
  return _init(encoder.Embeddings(cfg), key, ids, ids)


def init_encoder(cfg: TransformerConfig, key: jax.Array) -> dict:
  """Returns a fresh encoder."""
  states, padding_mask = jnp.zeros((1, 2, cfg.embedding_size)), jnp.ones((1, 2), bool)
  return _init(encoder.Encoder(cfg), key, states, padding_mask, None)


def init_head(name: str, cfg: TransformerConfig, width: int, key: jax.Array) -> dict:
  """Returns a fresh head of HEADS on states of `width`."""
  inputs = [jnp.zeros((1, 2, width))]
  if HEADS[name].predicts_words:
    inputs.append(jnp.zeros((cfg.vocab_size, cfg.embedding_size)))
  return _init(HEADS[name].module(cfg), key, *inputs)


def init_discriminator(
  spec: PretrainSpec, heads: tuple[str, ...], key: jax.Array
) -> tuple[dict, dict]:
  """Returns the embeddings that are shared (or its own), and what the discriminator adds."""
  cfg, k = spec.discriminator, jax.random.split(key, 2 + len(heads))
  tables, weights = TIES[spec.tying].split(init_embeddings(cfg, k[0]))
  weights["encoder"] = init_encoder(cfg, k[1])
  for name, key in zip(heads, k[2:], strict=True):
    weights[name] = init_head(name, cfg, cfg.hidden_size, key)
  return tables, weights


# The parts applied.


def encode(
  cfg: TransformerConfig, tables: dict, weights: dict, ids: jax.Array, batch: Batch, dropout_seeds
) -> jax.Array:
  """Returns an encoder's states [B, L, D] on ids [B, L]."""
  x = encoder.Embeddings(cfg).apply({"params": tables}, ids, batch.token_type_ids)
  return encoder.Encoder(cfg).apply({"params": weights}, x, batch.padding_mask, dropout_seeds)


def main_states(spec: PretrainSpec, params: dict, ids: jax.Array, batch: Batch, keys) -> jax.Array:
  """Returns the discriminator's states [B, L, D] on ids [B, L]; keys are for dropout, or None."""
  cfg = spec.discriminator
  dropout_seeds = None if keys is None else encoder.make_dropout_seeds(keys, cfg.num_layers)
  tables = embeddings(spec, params, "discriminator")
  return encode(
    cfg, tables, encoder_weights(spec, params, "discriminator"), ids, batch, dropout_seeds
  )


def token_logits(cfg: TransformerConfig, network: dict, name: str, states: jax.Array) -> jax.Array:
  """Returns one logit [B, L] a state [B, L, D], by a network's head of that name."""
  return HEADS[name].module(cfg).apply({"params": network[name]}, states)


def vocabulary_logits(
  cfg: TransformerConfig, network: dict, tables: dict, states: jax.Array
) -> jax.Array:
  """Returns the vocabulary logits [B, K, V] of states [B, K, D], gathered before."""
  return (
    HEADS["mlm_head"].module(cfg).apply({"params": network["mlm_head"]}, states, tables["word"])
  )


def nll(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns -log softmax(logits [B, K, V]) at tokens [B, K], and whether none scores higher."""
  best = jax.lax.stop_gradient(logits.max(-1))
  picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
  loss = jnp.log(jnp.exp(logits - best[..., None]).sum(-1)) + best - picked
  # Right when nothing scores above the token: no arg max, which is slow on CPUs.
  return loss, picked >= best


def chunked_nll(
  cfg: TransformerConfig,
  network: dict,
  tables: dict,
  states: jax.Array,
  tokens: jax.Array,
  *,
  chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns `nll` of the vocabulary layer at every position, in chunks of positions.

  The logits [B, L, V] never exist at once: the backward pass computes each chunk's again.

  Args:
    states: [B, L, D].
    tokens: [B, L] int32.
  """
  B, L, D = states.shape
  chunks = -(-L // chunk_size)
  pad = ((0, 0), (0, chunks * chunk_size - L))
  states = jnp.pad(states, (*pad, (0, 0))).reshape(B, chunks, chunk_size, D).swapaxes(0, 1)
  tokens = jnp.pad(tokens, pad).reshape(B, chunks, chunk_size).swapaxes(0, 1)

  @jax.checkpoint
  def of_chunk(chunk):
    return nll(vocabulary_logits(cfg, network, tables, chunk[0]), chunk[1])

  loss, hit = jax.lax.map(of_chunk, (states, tokens))
  return tuple(x.swapaxes(0, 1).reshape(B, -1)[:, :L] for x in (loss, hit))
