"""The two networks together: their parameters, what they share, and their parts applied.

Parameters: {"embeddings", "generator": {...}, "discriminator": {"encoder", a head or more}}. The
discriminator is the network that is kept, whatever it is trained for; its heads are an objective's.
Letters as in `model`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from electra_jax.core import masking, model
from electra_jax.core.batch import Batch
from electra_jax.core.model import TransformerConfig
from electra_jax.core.schedules import Piecewise, value_at

HEADS = {
  "rtd_head": model.RtdHead,
  "mlm_head": model.MlmHead,
  "copy_head": model.TokenLogit,
  "baseline_head": model.TokenLogit,
}


@dataclasses.dataclass(frozen=True)
class PretrainSpec:
  """What an objective is built from.

  Fields:
    objective: a key of `objectives.OBJECTIVES`.
    generator_kind: a key of `generators.GENERATORS`.
    tying: what the networks share, a key of TIES (Clark et al. 2020, Section 3.2).
    sampling_dropout: whether the generator's samples are drawn under its dropout.
    frequencies: of the tokens, for the unigram generator; V numbers.
    mlm_weight, discriminator_weight, ...: of the losses; discriminator_weight is that of the main
      network's loss, whatever the objective.
  """

  generator: TransformerConfig
  discriminator: TransformerConfig
  masking: masking.Masking
  mlm_weight: float = 1.0
  discriminator_weight: float = 50.0
  objective: str = "electra"
  generator_kind: str = "transformer"
  tying: str = "embeddings"
  sampling_dropout: bool = True
  frequencies: tuple[float, ...] = ()
  discriminator_weight_schedule: Piecewise | None = None
  adversarial_weight: float = 1.0

  def main_weight(self, step: jax.Array | None):
    """Returns the weight of the main network's loss at a training step, or in evaluation (None)."""
    return value_at(self.discriminator_weight, self.discriminator_weight_schedule, step)


# What is shared. Each entry: (spec, params) -> the embeddings that the network looks up.


def _shared(params: dict, network: str) -> dict:
  return params["embeddings"]


def _tokens(params: dict, network: str) -> dict:
  return {**params[network]["embeddings"], **params["embeddings"]}


def _none(params: dict, network: str) -> dict:
  return params["generator"]["embeddings"] if network == "generator" else params["embeddings"]


def _gdes(params: dict, network: str) -> dict:
  if network == "generator":
    return params["embeddings"]
  delta = params["discriminator"]["embedding_delta"]
  return jax.tree.map(lambda e, d: jax.lax.stop_gradient(e) + d, params["embeddings"], delta)


TIES = {
  "none": _none,  # each has its own, the generator's as wide as itself
  "tokens": _tokens,  # the word table; positions, token types and LayerNorm are each one's own
  "embeddings": _shared,  # all tables and their LayerNorm: the paper's choice
  "all": _shared,  # the encoder too: both networks have one size
  "gdes": _gdes,  # the discriminator adds its own change to the generator's (He et al. 2021)
}


def embeddings(spec: PretrainSpec, params: dict, network: str) -> dict:
  """Returns the embeddings of "generator" or "discriminator" as plain tables."""
  return TIES[spec.tying](params, network)


def encoder(spec: PretrainSpec, params: dict, network: str) -> dict:
  """Returns the encoder's weights of "generator" or "discriminator"."""
  return params["discriminator" if spec.tying == "all" else network]["encoder"]


# Fresh parameters.


def _init(module, key, *inputs) -> dict:
  return module.init(key, *inputs)["params"]


def init_embeddings(cfg: TransformerConfig, key: jax.Array) -> dict:
  """Returns fresh embedding tables with their LayerNorm."""
  ids = jnp.zeros((1, 2), jnp.int32)
  return _init(model.Embeddings(cfg), key, ids, ids)


def init_encoder(cfg: TransformerConfig, key: jax.Array) -> dict:
  """Returns a fresh encoder."""
  states, padding_mask = jnp.zeros((1, 2, cfg.embedding_size)), jnp.ones((1, 2), bool)
  return _init(model.Encoder(cfg), key, states, padding_mask, None)


def init_head(name: str, cfg: TransformerConfig, width: int, key: jax.Array) -> dict:
  """Returns a fresh head of HEADS on states of `width`."""
  inputs = [jnp.zeros((1, 2, width))]
  if name == "mlm_head":
    inputs.append(jnp.zeros((cfg.vocab_size, cfg.embedding_size)))
  return _init(HEADS[name](cfg), key, *inputs)


def init_generator(spec: PretrainSpec, key: jax.Array) -> dict:
  """Returns what the generator has for itself; nothing where it has no weights."""
  cfg, k = spec.generator, jax.random.split(key, 4)
  if spec.generator_kind in ("uniform", "unigram"):
    return {}
  if spec.generator_kind == "two_tower":
    weights = {
      "ltr": init_encoder(cfg, k[0]),
      "rtl": init_encoder(cfg, k[1]),
      "mlm_head": init_head("mlm_head", cfg, 2 * cfg.hidden_size, k[2]),
    }
  else:
    weights = {"mlm_head": init_head("mlm_head", cfg, cfg.hidden_size, k[2])}
    if spec.tying != "all":
      weights["encoder"] = init_encoder(cfg, k[0])
  if spec.tying == "none":
    weights["embeddings"] = init_embeddings(cfg, k[3])
  if spec.tying == "tokens":
    weights["embeddings"] = _without_word(init_embeddings(cfg, k[3]))
  return weights


def init_discriminator(
  spec: PretrainSpec, heads: tuple[str, ...], key: jax.Array
) -> tuple[dict, dict]:
  """Returns the embeddings that are shared (or its own), and what the discriminator adds."""
  cfg, k = spec.discriminator, jax.random.split(key, 2 + len(heads))
  tables = init_embeddings(cfg, k[0])
  weights = {"encoder": init_encoder(cfg, k[1])}
  for name, key in zip(heads, k[2:], strict=True):
    weights[name] = init_head(name, cfg, cfg.hidden_size, key)
  if spec.tying == "tokens":
    weights["embeddings"] = _without_word(tables)
    tables = {"word": tables["word"]}
  if spec.tying == "gdes":
    weights["embedding_delta"] = jax.tree.map(jnp.zeros_like, tables)
  return tables, weights


def _without_word(tables: dict) -> dict:
  return {name: table for name, table in tables.items() if name != "word"}


def groups(spec: PretrainSpec, params: dict) -> dict:
  """Returns which network each weight is trained with: "generator", "discriminator" or "frozen".

  Shared embeddings go with the discriminator, which is kept; with gdes they are the generator's.
  """
  own = "frozen" if spec.generator_kind == "frozen" else "generator"
  of = {"generator": own, "discriminator": "discriminator"}
  of["embeddings"] = "generator" if spec.tying == "gdes" else "discriminator"
  return {part: jax.tree.map(lambda _, name=of[part]: name, tree) for part, tree in params.items()}


def masked_language_model(spec: PretrainSpec, params: dict) -> tuple[TransformerConfig, dict]:
  """Returns a run's masked language model by itself: its shape and {embeddings, encoder, mlm_head}.

  The generator, or the discriminator of a run without one.

  Raises:
    ValueError: the run has none.
  """
  if "generator" not in params and "mlm_head" in params["discriminator"]:
    cfg, network = spec.discriminator, "discriminator"
  elif spec.generator_kind in ("transformer", "frozen") and "generator" in params:
    cfg, network = spec.generator, "generator"
  else:
    raise ValueError(
      f"the run ({spec.objective}, {spec.generator_kind}) has no masked language model"
    )
  weights = {
    "embeddings": embeddings(spec, params, network),
    "encoder": encoder(spec, params, network),
    "mlm_head": params[network]["mlm_head"],
  }
  return cfg, weights


# The parts applied.


def encode(
  cfg: TransformerConfig, tables: dict, weights: dict, ids: jax.Array, batch: Batch, dropout_seeds
) -> jax.Array:
  """Returns an encoder's states [B, L, D] on ids [B, L]."""
  x = model.Embeddings(cfg).apply({"params": tables}, ids, batch.token_type_ids)
  return model.Encoder(cfg).apply({"params": weights}, x, batch.padding_mask, dropout_seeds)


def main_states(spec: PretrainSpec, params: dict, ids: jax.Array, batch: Batch, keys) -> jax.Array:
  """Returns the discriminator's states [B, L, D] on ids [B, L]; keys are for dropout, or None."""
  cfg = spec.discriminator
  dropout_seeds = None if keys is None else model.make_dropout_seeds(keys, cfg.num_layers)
  tables = embeddings(spec, params, "discriminator")
  return encode(cfg, tables, encoder(spec, params, "discriminator"), ids, batch, dropout_seeds)


def token_logits(cfg: TransformerConfig, network: dict, name: str, states: jax.Array) -> jax.Array:
  """Returns one logit [B, L] a state [B, L, D], by a network's head of that name."""
  return HEADS[name](cfg).apply({"params": network[name]}, states)


def vocabulary_logits(
  cfg: TransformerConfig, network: dict, tables: dict, states: jax.Array
) -> jax.Array:
  """Returns the vocabulary logits [B, K, V] of states [B, K, D], gathered before."""
  return model.MlmHead(cfg).apply({"params": network["mlm_head"]}, states, tables["word"])


def nll(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns -log softmax(logits [B, K, V]) at tokens [B, K], and whether none scores higher."""
  best = jax.lax.stop_gradient(logits.max(-1))
  picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
  loss = jnp.log(jnp.exp(logits - best[..., None]).sum(-1)) + best - picked
  # Right when nothing scores above the token: no arg max, which is slow on CPUs.
  return loss, picked >= best


def chunked_nll(
  cfg: TransformerConfig, network: dict, tables: dict, states: jax.Array, tokens: jax.Array, at: int
) -> tuple[jax.Array, jax.Array]:
  """Returns `nll` of the vocabulary layer at every position, `at` positions at a time.

  The logits [B, L, V] never exist at once, neither on the way back: they are computed again there.

  Args:
    states: [B, L, D].
    tokens: [B, L] int32.
  """
  B, L, D = states.shape
  slices = -(-L // at)
  pad = ((0, 0), (0, slices * at - L))
  states = jnp.pad(states, (*pad, (0, 0))).reshape(B, slices, at, D).swapaxes(0, 1)
  tokens = jnp.pad(tokens, pad).reshape(B, slices, at).swapaxes(0, 1)

  @jax.checkpoint
  def of_slice(slice):
    return nll(vocabulary_logits(cfg, network, tables, slice[0]), slice[1])

  loss, hit = jax.lax.map(of_slice, (states, tokens))
  return tuple(x.swapaxes(0, 1).reshape(B, -1)[:, :L] for x in (loss, hit))
