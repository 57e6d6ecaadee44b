"""The generator and the discriminator: parameters, weight sharing and forward passes.

Parameters: {"embeddings", "generator": {...}, "discriminator": {"encoder", one or more heads}}. A
network with unshared tables (TIES) also has "embeddings" or an "embedding_delta". For every
objective, also BERT's, "discriminator" is the main network, to be fine-tuned. Letters as in
`encoder`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from electra_jax.core import encoder, layers, masking, positions
from electra_jax.core.batch import Batch
from electra_jax.core.gradients import by_hand
from electra_jax.core.heads import HEADS
from electra_jax.core.schedules import Schedule
from electra_jax.core.transformer_config import TransformerConfig


class TokenCounts:
  """A hashable array [V] of token counts, so that a spec can be a cache key."""

  def __init__(self, counts: Sequence[float] | np.ndarray = ()):
    self._counts = np.array(counts, np.float64)
    self._bytes = self._counts.tobytes()  # bytes are hashed once

  def __eq__(self, other: object) -> bool:
    return isinstance(other, TokenCounts) and self._bytes == other._bytes

  def __hash__(self) -> int:
    return hash(self._bytes)

  def __len__(self) -> int:
    return len(self._counts)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    return self._counts.astype(dtype or np.float64)


@dataclasses.dataclass(frozen=True)
class PretrainSpec:
  """The settings of an objective."""

  generator: TransformerConfig
  discriminator: TransformerConfig
  masking: masking.Masking
  mlm_weight: float = 1.0  # of the generator's loss, or BERT's masked-LM loss
  # of the discriminator's loss, a `Schedule` or a number
  discriminator_weight: Schedule = Schedule(50.0)
  # of the discriminator's token-prediction loss besides detection, a `Schedule` or a number
  replace_mlm_weight: Schedule = Schedule(1.0)
  objective: str = "electra"  # a key of `objectives.OBJECTIVES`
  generator_kind: str = "transformer"  # a key of `generators.GENERATORS`
  tying: str = "embeddings"  # a key of TIES (Clark et al. 2020, Section 3.2)
  sampling_dropout: bool = True  # whether the generator samples with dropout
  # of the training text, [V]; empty if unknown
  frequencies: TokenCounts = dataclasses.field(default_factory=TokenCounts, repr=False)
  fixed_noise: bool = True  # evaluations also detect replacements drawn by these counts
  adversarial_weight: float = 1.0  # of REINFORCE and its baseline
  contrast_weight: float = 1.0  # of the contrastive loss
  contrast_group: int = 8  # consecutive sequences to contrast
  options: tuple[tuple[str, Any], ...] = ()  # (name, value) of the objective's other own_fields

  def __post_init__(self):
    for name in ("discriminator_weight", "replace_mlm_weight"):
      object.__setattr__(self, name, Schedule.of(getattr(self, name)))
    if not isinstance(self.frequencies, TokenCounts):
      object.__setattr__(self, "frequencies", TokenCounts(self.frequencies))

  def option(self, name: str) -> Any:
    """Returns one of the objective's own_fields, as a Schedule if it has one; raises KeyError."""
    return dict(self.options)[name]


@dataclasses.dataclass(frozen=True)
class Tying:
  """A scheme of weight sharing between the networks."""

  # (params, "generator" or "discriminator") -> that network's embedding tables
  lookup: Callable[[dict, str], dict]
  # initial tables -> (params["embeddings"], the discriminator's additional tables)
  split: Callable[[dict], tuple[dict, dict]] = lambda tables: (tables, {})
  own: Callable[[dict], dict] = lambda tables: {}  # initial tables -> the generator's unshared ones
  own_width: bool = False  # whether the generator's tables have the generator's width
  shares_encoder: bool = False  # whether the networks share one encoder, hence have one size
  # the network whose optimizer group params["embeddings"] joins
  trained_with: str = "discriminator"


def _own_or_shared(params: dict, network: str) -> dict:
  return params[network].get("embeddings", params["embeddings"])


def _without_word(tables: dict) -> dict:
  return {name: table for name, table in tables.items() if name != "word"}


def _gdes(params: dict, network: str) -> dict:
  if network == "generator":
    return params["embeddings"]
  delta, own = (params["discriminator"].get(x, {}) for x in ("embedding_delta", "embeddings"))
  shared = {name: params["embeddings"][name] for name in delta}
  return jax.tree.map(lambda e, d: jax.lax.stop_gradient(e) + d, shared, delta) | own


def _split_delta(tables: dict, own: str = "") -> tuple[dict, dict]:
  """Returns all tables, and the discriminator's delta of those whose name is not `own`."""
  delta = {name: jax.tree.map(jnp.zeros_like, x) for name, x in tables.items() if name != own}
  kept = {name: table for name, table in tables.items() if name == own}
  return tables, {"embedding_delta": delta, **({"embeddings": kept} if kept else {})}


TIES = {
  # Separate tables; the generator's have the generator's width.
  "none": Tying(_own_or_shared, own=lambda tables: tables, own_width=True),
  # Only the word table is shared.
  "tokens": Tying(
    lambda params, network: {**params[network]["embeddings"], **params["embeddings"]},
    split=lambda tables: ({"word": tables["word"]}, {"embeddings": _without_word(tables)}),
    own=_without_word,
  ),
  # All tables and their LayerNorm are shared: the paper's choice.
  "embeddings": Tying(_own_or_shared),
  # The encoder is shared too.
  "all": Tying(_own_or_shared, shares_encoder=True),
  # The discriminator adds a trained delta to the generator's embeddings (He et al. 2021).
  "gdes": Tying(_gdes, split=_split_delta, trained_with="generator"),
  # The same, but the discriminator's LayerNorm is its own, as in DeBERTaV3's code.
  "gdes_tables": Tying(
    _gdes, split=functools.partial(_split_delta, own="layer_norm"), trained_with="generator"
  ),
}


def embeddings(spec: PretrainSpec, params: dict, network: str) -> dict:
  """Returns the embedding tables of "generator" or "discriminator"."""
  return TIES[spec.tying].lookup(params, network)


def weights_of(spec: PretrainSpec, params: dict, network: str) -> dict:
  """Returns {"embeddings", encoders and heads} of "generator" or "discriminator"."""
  weights = {**params[network], "embeddings": embeddings(spec, params, network)}
  if TIES[spec.tying].shares_encoder:
    weights["encoder"] = params["discriminator"]["encoder"]
  return weights


def generator_size(
  discriminator: TransformerConfig, width_multiplier: float, depth_multiplier: float
) -> TransformerConfig:
  """Returns the generator's shape by the original's rule: ffn 4 x width, heads of 64.

  A gated feed-forward layer keeps its ratio to the width.

  Raises:
    ValueError: the generator has no layer or no width, or the heads do not divide its width.

  >>> base = TransformerConfig(30522, 768, 768, 12, 12, 3072, 512)
  >>> g = generator_size(base, 1 / 3, 1.0)
  >>> g.hidden_size, g.num_layers, g.num_heads, g.ffn_size
  (256, 12, 4, 1024)
  """
  width = round(discriminator.hidden_size * width_multiplier)
  depth = round(discriminator.num_layers * depth_multiplier)
  ffn = round(discriminator.ffn_size * width_multiplier)
  if width < 1 or depth < 1:
    raise ValueError(
      f"the generator has {depth} layers of width {width}: raise"
      f" generator.depth_multiplier={depth_multiplier:g} (of {discriminator.num_layers} layers) or"
      f" generator.width_multiplier={width_multiplier:g} (of width {discriminator.hidden_size})"
    )
  try:
    return dataclasses.replace(
      discriminator,
      hidden_size=width,
      num_layers=depth,
      num_heads=max(1, width // 64),
      ffn_size=ffn if layers.FEED_FORWARDS[discriminator.feed_forward].gated else 4 * width,
    )
  except ValueError as error:  # model.num_heads is not at fault
    fitting = (w for w in range(8, width + 64, 8) if w % (2 * max(1, w // 64)) == 0)
    near = min(fitting, key=lambda w: abs(w - width))
    raise ValueError(
      f"generator.width_multiplier={width_multiplier:g}: {error}; set it to"
      f" {near / discriminator.hidden_size:g}, for a width of {near}"
    ) from None


def _init(module, key, *inputs) -> dict:
  return module.init(key, *inputs)["params"]


def init_embeddings(cfg: TransformerConfig, key: jax.Array) -> dict:
  """Initialises embedding tables and their LayerNorm."""
  ids = jnp.zeros((1, 2), jnp.int32)
  return _init(encoder.Embeddings(cfg), key, ids, ids)


def init_encoder(cfg: TransformerConfig, key: jax.Array) -> dict:
  """Initialises an encoder."""
  states, padding_mask = jnp.zeros((1, 2, cfg.embedding_size)), jnp.ones((1, 2), bool)
  return _init(encoder.Encoder(cfg), key, states, padding_mask, None)


def init_head(name: str, cfg: TransformerConfig, width: int, key: jax.Array) -> dict:
  """Initialises a head of HEADS for states of `width`."""
  inputs = [jnp.zeros((1, 2, width))]
  if HEADS[name].predicts_words:
    inputs.append(jnp.zeros((cfg.vocab_size, cfg.embedding_size)))
  return _init(HEADS[name].module(cfg), key, *inputs)


def init_discriminator(
  spec: PretrainSpec, heads: tuple[str, ...], key: jax.Array
) -> tuple[dict, dict]:
  """Returns initial params["embeddings"] and params["discriminator"]."""
  cfg, k = spec.discriminator, jax.random.split(key, 2 + len(heads))
  tables, weights = TIES[spec.tying].split(init_embeddings(cfg, k[0]))
  weights["encoder"] = init_encoder(cfg, k[1])
  for name, key in zip(heads, k[2:], strict=True):
    weights[name] = init_head(name, cfg, cfg.hidden_size, key)
  return tables, weights


def encode(
  cfg: TransformerConfig,
  network: dict,
  ids: jax.Array,
  batch: Batch,
  dropout_seeds,
  queries: encoder.Queries | None = None,
) -> jax.Array:
  """Returns the states [B, L, D] of a network {"embeddings", "encoder"} for ids [B, L].

  `dropout_seeds` are from `layers.make_dropout_seeds`, None for no dropout. With `queries`, returns
  the states [B, K, D] of the enhanced mask decoder.
  """
  documents, tables = batch.document_ids, {"params": network["embeddings"]}
  x = encoder.Embeddings(cfg).apply(tables, ids, batch.token_type_ids, documents)
  return encoder.Encoder(cfg).apply(
    {"params": network["encoder"]}, x, batch.padding_mask, dropout_seeds, documents, queries
  )


def init_mask_decoder(cfg: TransformerConfig, key: jax.Array) -> dict:
  """Initialises the absolute positions [max_positions, D] of the enhanced mask decoder."""
  init = nn.initializers.truncated_normal(cfg.init_stddev)
  return {"position": init(key, (cfg.max_positions, cfg.hidden_size))}


def states_to_predict(
  cfg: TransformerConfig, network: dict, ids: jax.Array, batch: Batch, dropout_seeds, at: jax.Array
) -> jax.Array:
  """Returns the states [B, K, D] from which a masked language model predicts positions `at` [B, K].

  A network with a "mask_decoder" has the enhanced mask decoder (He et al. 2020, Section 3.2).
  """
  if "mask_decoder" not in network:
    states = encode(cfg, network, ids, batch, dropout_seeds)
    return jnp.take_along_axis(states, at[..., None], axis=1)
  K = at.shape[1]
  # XLA for GPUs finds no tiles for products over [B, K] if K is 79.
  place = at = jnp.pad(at, ((0, 0), (0, -K % 16)))
  if batch.document_ids is not None:
    place = jnp.take_along_axis(positions.document_positions(batch.document_ids), at, axis=1)
  queries = encoder.Queries(network["mask_decoder"]["position"][place], at)
  return encode(cfg, network, ids, batch, dropout_seeds, queries)[:, :K]


def causal_states(
  cfg: TransformerConfig, network: dict, batch: Batch, dropout_seeds, direction: str = "ltr"
) -> jax.Array:
  """Returns states [B, L, D] of each token's left context without the token, or of its right one.

  They are 0 where a document has no token on that side.
  """
  cfg = dataclasses.replace(cfg, direction=direction)
  x = encode(cfg, network, batch.ids, batch, dropout_seeds)
  # At padding, "rtl" masks all scores: its attention would be uniform and leak the last token.
  x = x * batch.padding_mask[..., None]
  left = direction == "ltr"
  x = x[:, :-1] if left else x[:, 1:]
  if batch.document_ids is not None:
    x = x * (batch.document_ids[:, 1:] == batch.document_ids[:, :-1])[..., None]
  return jnp.pad(x, ((0, 0), (int(left), int(not left)), (0, 0)))


def main_states(spec: PretrainSpec, params: dict, ids: jax.Array, batch: Batch, keys) -> jax.Array:
  """Returns the discriminator's states [B, L, D] for ids [B, L], without dropout for keys None."""
  seeds = layers.make_dropout_seeds(keys, spec.discriminator.num_layers)
  network = weights_of(spec, params, "discriminator")
  return encode(spec.discriminator, network, ids, batch, seeds)


def token_logits(
  cfg: TransformerConfig,
  network: dict,
  name: str,
  states: jax.Array,
  document_ids: jax.Array | None = None,
) -> jax.Array:
  """Returns logits [B, L] of states [B, L, D] from the network's head `name`."""
  return HEADS[name].module(cfg).apply({"params": network[name]}, states, document_ids)


def vocabulary_logits(
  cfg: TransformerConfig, network: dict, states: jax.Array, name: str = "mlm_head"
) -> jax.Array:
  """Returns logits [B, K, V] of states [B, K, D] from a network {"embeddings", the head `name`}."""
  head, word = HEADS[name].module(cfg), network["embeddings"]["word"]
  return head.apply({"params": network[name]}, states, word)


@functools.partial(by_hand, nondiff_argnums=(2,))
def nll(
  logits: jax.Array, tokens: jax.Array, apart: int | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns -log softmax(logits [..., V]) at tokens [...], and whether no logit is higher.

  On accelerators the gradient is computed from the logits, without another array of their size.

  Args:
    apart: a token that `masking.sample` never draws from these logits. It is summed apart from the
      others, so that the sampler can share their sums.
  """
  return _nll_fwd(logits, tokens, apart)[0]


def _nll_fwd(logits: jax.Array, tokens: jax.Array, apart: int | None):
  picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]

  def with_exp(logits):
    best = logits.max(-1)
    kept = jnp.exp(logits - best[..., None])
    return best, kept.sum(-1), kept

  def with_logits(logits):
    if apart is None:
      best = logits.max(-1)
      return best, jnp.exp(logits - best[..., None]).sum(-1), logits
    others, sums = masking.exp_sums(masking.disallow(logits, jnp.int32(apart)))
    others, logit = others[..., 0], logits[..., apart]
    best = jnp.maximum(others, logit)
    return best, sums.sum(-1) * jnp.exp(others - best) + jnp.exp(logit - best), logits

  # On a CPU, exp takes longer than reading its stored result: 4 % of a step of `modern:17m`.
  best, total, kept = jax.lax.platform_dependent(logits, cpu=with_exp, default=with_logits)
  # argmax would be slow on CPUs.
  return (jnp.log(total) + best - picked, picked >= best), (kept, tokens, best, total)


def _nll_bwd(apart: int | None, residuals, gradients):
  kept, tokens, best, total = residuals
  scale = gradients[0][..., None]  # the loss's gradient
  exp = jax.lax.platform_dependent(
    kept, best, cpu=lambda kept, _: kept, default=lambda kept, best: jnp.exp(kept - best[..., None])
  )
  one_hot = jnp.arange(kept.shape[-1]) == tokens[..., None]
  return exp * (scale / total[..., None]) - jnp.where(one_hot, scale, 0), None


nll.defvjp(_nll_fwd, _nll_bwd)


def chunked_nll(
  cfg: TransformerConfig,
  network: dict,
  states: jax.Array,
  tokens: jax.Array,
  *,
  chunk_size: int,
  never: int | None = None,
  head: str = "mlm_head",
) -> tuple[jax.Array, ...]:
  """Returns `nll` of tokens [B, L] from states [B, L, D] and a network as in `vocabulary_logits`.

  The logits [B, L, V] are computed in chunks of `chunk_size` positions, and recomputed in the
  backward pass.

  Args:
    never: a token of probability 0 in an additional third result: -log p [B, L], without gradient.
  """
  B, L, D = states.shape
  chunks = -(-L // chunk_size)
  pad = ((0, 0), (0, chunks * chunk_size - L))
  states = jnp.pad(states, (*pad, (0, 0))).reshape(B, chunks, chunk_size, D).swapaxes(0, 1)
  tokens = jnp.pad(tokens, pad).reshape(B, chunks, chunk_size).swapaxes(0, 1)

  @jax.checkpoint
  def of_chunk(chunk):
    logits = vocabulary_logits(cfg, network, chunk[0], head)
    if never is None:
      return nll(logits, chunk[1])
    allowed = masking.disallow(jax.lax.stop_gradient(logits), jnp.int32(never))
    return *nll(logits, chunk[1]), nll(allowed, chunk[1])[0]

  found = jax.lax.map(of_chunk, (states, tokens))
  return tuple(x.swapaxes(0, 1).reshape(B, -1)[:, :L] for x in found)
