"""Fine-tuning heads (classification, regression, tagging) and their losses.

A head is a record of functions of its weights. Source: the original's code and Clark et al. 2020,
Appendix B. Letters as in `encoder`; C is the number of classes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from electra_jax.core import layers, networks
from electra_jax.core.batch import Batch
from electra_jax.core.terms import Term
from electra_jax.core.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
  """A task head, whose loss ignores padding rows. Compiled programs are cached by object."""

  init: Callable  # (cfg, key) -> initial weights
  # (cfg, weights, states [B, L, D], batch, dropout keys [B] or None) -> {name: Term}
  loss: Callable
  predict: Callable  # (cfg, weights, states, batch) -> {name: [B, ...]}
  token_outputs: tuple[str, ...] = ()  # names of the predictions of shape [B, L, ...]
  export: str | None = None  # a key of `EXPORT_FORMS`: the equivalent Hugging Face head, if any


def glorot(key: jax.Array, inputs: int, outputs: int) -> dict:
  """Initialises a dense layer. As in the original: Glorot, unlike the encoder."""
  kernel = jax.nn.initializers.glorot_uniform()(key, (inputs, outputs), jnp.float32)
  return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def dense(weights: dict, x: jax.Array) -> jax.Array:
  """Applies a dense layer to x [..., inputs], in float32."""
  return x.astype(jnp.float32) @ weights["kernel"] + weights["bias"]


def _drop(x: jax.Array, cfg: TransformerConfig, keys: jax.Array | None, site: int) -> jax.Array:
  if keys is None:
    return x
  words = jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, site), (2,), jnp.uint32))
  return layers.dropout(x, cfg.dropout, words(keys))


def first_token(states: jax.Array, padding_mask: jax.Array) -> jax.Array:
  """Returns the states [B, D] of [CLS]."""
  return states[:, 0]


def mean_of_tokens(states: jax.Array, padding_mask: jax.Array) -> jax.Array:
  """Returns the float32 mean [B, D] of the states [B, L, D] that are not padding."""
  mask = padding_mask.astype(jnp.float32)[..., None]
  return (states * mask).sum(1) / jnp.maximum(mask.sum(1), 1)


class Layers(NamedTuple):
  """The layers of a head, from states [..., D] to outputs."""

  init: Callable  # (cfg, key, outputs) -> initial weights
  apply: Callable  # (cfg, weights, states, keys [B] or None) -> [..., outputs] float32
  last: str  # name of the last layer
  # {"text", "token" or "span": the equivalent Hugging Face head, a key of
  # `interop.weights.Family.classes`}
  exports: dict[str, str]
  pool: Callable = first_token  # states [B, L, D] of texts, padding mask [B, L] -> [B, D]


class ExportForm(NamedTuple):
  """The form of a Hugging Face head's logits."""

  layers: Layers
  is_pooled: bool  # whether they are [B, C], one row per text

  def logits(
    self, cfg: TransformerConfig, weights: dict, states: jax.Array, padding_mask: jax.Array
  ) -> jax.Array:
    """Returns float32 logits, [B, L, C] or [B, C], of states [B, L, D]."""
    states = self.layers.pool(states, padding_mask) if self.is_pooled else states
    return self.layers.apply(cfg, weights, states, None)


def linear(name: str, **exports: str) -> Layers:
  """Returns the paper's layers: dropout and a dense layer with a name."""
  return Layers(
    lambda cfg, key, outputs: {name: glorot(key, cfg.hidden_size, outputs)},
    lambda cfg, weights, x, keys: dense(weights[name], _drop(x, cfg, keys, 1)),
    name,
    exports,
  )


def _init_two(cfg: TransformerConfig, key: jax.Array, outputs: int) -> dict:
  first, second = jax.random.split(key)
  return {
    "dense": glorot(first, cfg.hidden_size, cfg.hidden_size),
    "out_proj": glorot(second, cfg.hidden_size, outputs),
  }


def _apply_two(cfg: TransformerConfig, weights: dict, x: jax.Array, keys) -> jax.Array:
  x = layers.gelu(dense(weights["dense"], _drop(x, cfg, keys, 1)))
  return dense(weights["out_proj"], _drop(x, cfg, keys, 2))


def _init_modernbert(cfg: TransformerConfig, key: jax.Array, outputs: int) -> dict:
  first, second = jax.random.split(key)
  return {
    "dense": {"kernel": glorot(first, cfg.hidden_size, cfg.hidden_size)["kernel"]},
    "layer_norm": {"scale": jnp.ones(cfg.hidden_size)},
    "classifier": glorot(second, cfg.hidden_size, outputs),
  }


def _apply_modernbert(cfg: TransformerConfig, weights: dict, x: jax.Array, keys) -> jax.Array:
  x = layers.gelu(x.astype(jnp.float32) @ weights["dense"]["kernel"])
  scale = weights["layer_norm"]["scale"]
  x = layers.normalize(x, scale, jnp.zeros_like(scale), cfg.layer_norm_eps)
  return dense(weights["classifier"], _drop(x, cfg, keys, 1))


MODERNBERT = Layers(
  _init_modernbert,
  _apply_modernbert,
  "classifier",
  {kind: f"modern_{kind}_head" for kind in ("text", "token", "span")},
)
HEAD_LAYERS = {
  "linear": linear("classifier", token="token_head"),
  # Hugging Face's ELECTRA for texts: dropout, dense, GELU, dropout, dense.
  "two_layers": Layers(_init_two, _apply_two, "out_proj", {"text": "text_head"}),
  # Dense and LayerNorm without biases, GELU between them, dropout, dense.
  "modernbert": MODERNBERT,
  # For texts: the mean of the tokens instead of [CLS].
  "mean": linear("classifier")._replace(pool=mean_of_tokens),
  "modernbert_mean": MODERNBERT._replace(
    exports={"text": "modern_text_mean_head"}, pool=mean_of_tokens
  ),
}


def _rows(batch: Batch) -> jax.Array:
  """Returns [B] float32, 1 on examples and 0 on padding rows."""
  return batch.padding_mask[:, 0].astype(jnp.float32)


def _class_terms(logits: jax.Array, classes: jax.Array, counts: jax.Array) -> dict[str, Term]:
  """Returns loss and accuracy of logits [..., C], weighted by `counts`."""
  nll, hit = networks.nll(logits, classes.astype(jnp.int32))
  return {
    "loss": Term((nll * counts).sum(), counts.sum(), 1.0),
    "accuracy": Term((hit * counts).sum(), counts.sum()),
  }


def classification(outputs: int, layers: str) -> Head:
  """Classifies a text or a pair: target "label" [B] int32, prediction "logits" [B, C]."""
  kind = HEAD_LAYERS[layers]

  def logits_of(cfg, weights, states, batch, keys):
    return kind.apply(cfg, weights, kind.pool(states, batch.padding_mask), keys)

  def loss(cfg, weights, states, batch, keys):
    logits = logits_of(cfg, weights, states, batch, keys)
    return _class_terms(logits, batch.target["label"], _rows(batch))

  def predict(cfg, weights, states, batch):
    return {"logits": logits_of(cfg, weights, states, batch, None)}

  init = functools.partial(kind.init, outputs=outputs)
  return Head(init, loss, predict, export=kind.exports.get("text"))


def regression(layers: str) -> Head:
  """Predicts a number for a text or pair: target "label" [B] float32, prediction "score" [B].

  As in the original, the loss is the squared error and the output is linear.
  """
  kind = HEAD_LAYERS[layers]

  def scores_of(cfg, weights, states, batch, keys):
    return kind.apply(cfg, weights, kind.pool(states, batch.padding_mask), keys)[:, 0]

  def loss(cfg, weights, states, batch, keys):
    scores, rows = scores_of(cfg, weights, states, batch, keys), _rows(batch)
    error = jnp.square(scores - batch.target["label"]) * rows
    return {"loss": Term(error.sum(), rows.sum(), 1.0)}

  def predict(cfg, weights, states, batch):
    return {"score": scores_of(cfg, weights, states, batch, None)}

  init = functools.partial(kind.init, outputs=1)
  return Head(init, loss, predict, export=kind.exports.get("text"))


def tagging(outputs: int, layers: str = "linear") -> Head:
  """Classifies words: target "tag" [B, L] int32, -1 for none, prediction "logits" [B, L, C].

  Raises:
    ValueError: the layers pool a text.
  """
  kind = HEAD_LAYERS[layers]
  if kind.pool is not first_token:
    raise ValueError(f"model.head={layers} pools a text: choose another head for tagging")

  def loss(cfg, weights, states, batch, keys):
    tag = batch.target["tag"]
    counts = (batch.padding_mask & (tag >= 0)).astype(jnp.float32)
    return _class_terms(kind.apply(cfg, weights, states, keys), jnp.maximum(tag, 0), counts)

  def predict(cfg, weights, states, batch):
    return {"logits": kind.apply(cfg, weights, states, None)}

  init = functools.partial(kind.init, outputs=outputs)
  return Head(init, loss, predict, ("logits",), kind.exports.get("token"))
