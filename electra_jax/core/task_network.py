"""A pretrained encoder with a task head: initialisation, objective and predictions.

Parameters: {"embeddings", "encoder", "head"}. A new head is a function and an entry in HEAD_KINDS.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax

from electra_jax.core import embedding_head, layers, networks, qa_head, task_heads
from electra_jax.core.batch import Batch
from electra_jax.core.params import make_key
from electra_jax.core.task_heads import Head
from electra_jax.core.transformer_config import TransformerConfig

HEAD_KINDS: dict[str, Callable[..., Head]] = {
  "classification": task_heads.classification,
  "regression": task_heads.regression,
  "tagging": task_heads.tagging,
  "qa": lambda **settings: qa_head.make_head(qa_head.QASettings(**settings)),
  "embedding": embedding_head.make_head,
}
EXPORT_FORMS = {
  name: task_heads.ExportForm(kind, is_pooled=level == "text")
  for kind in (*task_heads.HEAD_LAYERS.values(), *qa_head.HEAD_LAYERS.values())
  for level, name in kind.exports.items()
}


@dataclasses.dataclass(frozen=True)
class HeadSpec:
  """A serialisable head: `dataclasses.asdict` of it is JSON."""

  kind: str  # a key of HEAD_KINDS
  arguments: dict  # of its function

  def make(self) -> Head:
    """Returns the head: the same object for equal specs, so that its programs are reused."""
    return _make_head(self.kind, tuple(sorted(self.arguments.items())))


@functools.cache
def _make_head(kind: str, arguments: tuple[tuple[str, object], ...]) -> Head:
  return HEAD_KINDS[kind](**dict(arguments))


def init_backbone(cfg: TransformerConfig, key: jax.Array) -> dict:
  """Initialises {"embeddings", "encoder"}."""
  first, second = jax.random.split(key)
  return {
    "embeddings": networks.init_embeddings(cfg, first),
    "encoder": networks.init_encoder(cfg, second),
  }


def shapes(cfg: TransformerConfig, head: Head) -> dict:
  """Returns the parameters' shapes."""

  def fresh(key):
    return {**init_backbone(cfg, key), "head": head.init(cfg, key)}

  return jax.eval_shape(fresh, make_key(0))


def _states(cfg: TransformerConfig, params: dict, batch: Batch, keys) -> jax.Array:
  seeds = layers.make_dropout_seeds(keys, cfg.num_layers)
  return networks.encode(cfg, params, batch.ids, batch, seeds)


def make_objective(cfg: TransformerConfig, head: Head, scale: float = 1.0) -> Callable:
  """Returns the objective: (params, batch, keys, step) -> {name: Term}.

  Args:
    scale: multiplies the loss, a mean over rows (or words). The batch size gives the original's
      sum, with which clipping to a norm of 1 is nearly always active.
  """

  def objective(params, batch, keys, step):
    keys = None if step is None else keys
    states = _states(cfg, params, batch, keys)
    rows = None if keys is None else keys[:, 0]
    terms = head.loss(cfg, params["head"], states, batch, rows)
    return {name: term.replace(weight=term.weight * scale) for name, term in terms.items()}

  return objective


def make_predict(cfg: TransformerConfig, head: Head) -> Callable:
  """Returns (params, batch) -> {name: [B, ...]}, without dropout."""

  def predict(params, batch):
    return head.predict(cfg, params["head"], _states(cfg, params, batch, None), batch)

  return predict
