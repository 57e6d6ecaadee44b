"""What fine-tuning puts on the tower: heads, their losses and what they predict.

A head is three functions of plain weights; a network here is one tree {"embeddings", "encoder",
"head"}. Facts: the original's code and Clark et al. 2020, Appendix B. Letters as in `model`; C is
the number of classes.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from electra_jax.core import encoder, networks
from electra_jax.core.batch import Examples
from electra_jax.core.encoder import TransformerConfig
from electra_jax.core.terms import Term


class Head(NamedTuple):
  """A task's part of the network.

  Fields:
    init: (cfg, key) -> its weights.
    loss: (cfg, weights, states [B, L, D], batch, keys [B] or None) -> {name: Term}; keys are for
      dropout. Rows that are padding count for nothing.
    predict: (cfg, weights, states, batch) -> {name: [B, ...]}.
    of_tokens: names of what is predicted of each token, [B, L, ...].
  """

  init: Callable
  loss: Callable
  predict: Callable
  of_tokens: tuple[str, ...] = ()


def glorot(key: jax.Array, inputs: int, outputs: int) -> dict:
  """Returns a fresh dense layer. As in the original: Glorot, unlike the tower."""
  kernel = jax.nn.initializers.glorot_uniform()(key, (inputs, outputs), jnp.float32)
  return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def dense(weights: dict, x: jax.Array) -> jax.Array:
  """Returns x [..., inputs] through a dense layer, in float32."""
  return x.astype(jnp.float32) @ weights["kernel"] + weights["bias"]


def _drop(x: jax.Array, cfg: TransformerConfig, keys: jax.Array | None, site: int) -> jax.Array:
  if keys is None:
    return x
  words = jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, site), (2,), jnp.uint32))
  return encoder.dropout(x, cfg.dropout, words(keys))


def _one_layer(outputs: int) -> tuple[Callable, Callable]:
  """The paper's: dropout, then one product. Hugging Face's for tokens is the same."""

  def init(cfg, key):
    return {"classifier": glorot(key, cfg.hidden_size, outputs)}

  def apply(cfg, weights, x, keys):
    return dense(weights["classifier"], _drop(x, cfg, keys, 1))

  return init, apply


def _two_layers(outputs: int) -> tuple[Callable, Callable]:
  """Hugging Face's for sentences: dropout, dense, GELU, dropout, and a product."""

  def init(cfg, key):
    first, second = jax.random.split(key)
    return {
      "dense": glorot(first, cfg.hidden_size, cfg.hidden_size),
      "out_proj": glorot(second, cfg.hidden_size, outputs),
    }

  def apply(cfg, weights, x, keys):
    x = encoder.gelu(dense(weights["dense"], _drop(x, cfg, keys, 1)))
    return dense(weights["out_proj"], _drop(x, cfg, keys, 2))

  return init, apply


LAYERS = {"linear": _one_layer, "two_layers": _two_layers}


def _rows(batch: Examples) -> jax.Array:
  """Returns 1 for each row that is an example, 0 for padding: [B]."""
  return batch.padding_mask[:, 0].astype(jnp.float32)


def classification(outputs: int, layers: str = "linear") -> Head:
  """Classes of a text or a pair, from [CLS]; target "label" [B] int32, predicts "logits" [B, C]."""
  init, apply = LAYERS[layers](outputs)

  def loss(cfg, weights, states, batch, keys):
    logits, rows = apply(cfg, weights, states[:, 0], keys), _rows(batch)
    nll, hit = networks.nll(logits[:, None], batch.target["label"].astype(jnp.int32)[:, None])
    return {
      "loss": Term((nll[:, 0] * rows).sum(), rows.sum(), 1.0),
      "accuracy": Term((hit[:, 0] * rows).sum(), rows.sum()),
    }

  def predict(cfg, weights, states, batch):
    return {"logits": apply(cfg, weights, states[:, 0], None)}

  return Head(init, loss, predict)


def regression(layers: str = "linear") -> Head:
  """A number for a text or a pair, from [CLS]; target "label" [B] float32, predicts "score" [B].

  As in the original: squared error, nothing squashed.
  """
  init, apply = LAYERS[layers](1)

  def loss(cfg, weights, states, batch, keys):
    said, rows = apply(cfg, weights, states[:, 0], keys)[:, 0], _rows(batch)
    error = jnp.square(said - batch.target["label"]) * rows
    return {"loss": Term(error.sum(), rows.sum(), 1.0)}

  def predict(cfg, weights, states, batch):
    return {"score": apply(cfg, weights, states[:, 0], None)[:, 0]}

  return Head(init, loss, predict)


def tagging(outputs: int) -> Head:
  """A class a word; target "tag" [B, L] int32, -1 where none; predicts "logits" [B, L, C]."""
  init, apply = _one_layer(outputs)

  def loss(cfg, weights, states, batch, keys):
    logits, tag = apply(cfg, weights, states, keys), batch.target["tag"].astype(jnp.int32)
    counts = (batch.padding_mask & (tag >= 0)).astype(jnp.float32)
    nll, hit = networks.nll(logits, jnp.maximum(tag, 0))
    return {
      "loss": Term((nll * counts).sum(), counts.sum(), 1.0),
      "accuracy": Term((hit * counts).sum(), counts.sum()),
    }

  def predict(cfg, weights, states, batch):
    return {"logits": apply(cfg, weights, states, None)}

  return Head(init, loss, predict, of_tokens=("logits",))
