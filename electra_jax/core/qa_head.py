"""Question answering heads: start and end logits, and optionally an answerability classifier.

The joint head is the original's (Clark et al. 2020, Appendix B, after XLNet): it predicts the end
given the gold start in training, and given each start of the beam in prediction. The other head is
BERT's, with independent start and end logits. Letters as in `encoder`; k is the beam width.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from electra_jax.core.batch import Batch
from electra_jax.core.layers import gelu
from electra_jax.core.task_heads import MODERNBERT, Head, dense, glorot, linear
from electra_jax.core.terms import Term
from electra_jax.core.transformer_config import TransformerConfig

# Logit of positions that cannot be in an answer; their probability is 0 in float32.
EXCLUDED = -1000.0
# The layers of the head without `joint`, for a token's start and end logits ("qa_outputs" in
# Hugging Face).
HEAD_LAYERS = {"linear": linear("qa_outputs", span="span_head"), "modernbert": MODERNBERT}


@dataclasses.dataclass(frozen=True)
class QASettings:
  """The settings of a question answering head; fields as in config.qa."""

  beam_size: int  # starts kept in prediction, and ends kept per start
  joint: bool  # whether the end is predicted given the start; False: BERT's head
  answerable_weight: float  # of the answerability loss; 0 removes the classifier
  hidden: int  # hidden width of the end predictor and of the classifier
  max_answer_length: int  # in tokens, for BERT's null score
  layers: str = "linear"  # a key of HEAD_LAYERS, for the head without `joint`

  def __post_init__(self):
    if self.beam_size < 1 or self.max_answer_length < 1 or self.hidden < 1:
      raise ValueError(
        "qa.beam_size, qa.max_answer_length and qa.hidden must be at least 1, got "
        f"{self.beam_size}, {self.max_answer_length} and {self.hidden}"
      )
    if self.answerable_weight < 0:
      raise ValueError(f"qa.answerable_weight must be at least 0, got {self.answerable_weight}")
    known = [QASettings.layers] if self.joint else list(HEAD_LAYERS)
    if self.layers not in known:
      raise ValueError(
        f"model.head must be {' or '.join(known)} for questions with qa.joint={self.joint}, got"
        f" {self.layers!r}"
      )


def make_head(settings: QASettings) -> Head:
  """Builds the head.

  Targets in training:
    start, end: [B] int32, the answer's first and last token; 0 ([CLS]) without an answer.
    impossible: [B] float32, 1 if the window has no answer.

  Targets always:
    allowed: [B, L] bool, True on the context's tokens and position 0.

  Predictions, most probable first, padded to k with position 0 and log-probability EXCLUDED:
    start, start_logp: [B, k] int32 positions and their log-probabilities.
    end, end_logp: [B, k, k], the same for the ends given each start.
    null: [B] float32, positive for no answer: the classifier's logit or, without a classifier,
      BERT's score of [CLS] minus the best span's in the beam.
  """
  own = settings.joint or settings.answerable_weight  # Hugging Face lacks these layers
  return Head(
    init=functools.partial(_init, settings),
    loss=lambda cfg, weights, states, batch, keys: _loss(settings, cfg, weights, states, batch),
    predict=functools.partial(_predict, settings),
    export=None if own else HEAD_LAYERS[settings.layers].exports.get("span"),
  )


def _init(settings: QASettings, cfg: TransformerConfig, key: jax.Array) -> dict:
  """Initialises Glorot-uniform kernels and zero biases, as in the original."""
  width, hidden = cfg.hidden_size, settings.hidden
  shapes = {"start": (width, 1), "end_dense": (2 * width, hidden), "end": (hidden, 1)}
  shapes = shapes if settings.joint else {"spans": None}
  if settings.answerable_weight:
    shapes |= {"answerable_dense": (2 * width, hidden), "answerable": (hidden, 1)}
  keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
  spans = HEAD_LAYERS[settings.layers].init(cfg, keys["spans"], 2) if "spans" in keys else {}
  return spans | {name: glorot(keys[name], *shape) for name, shape in shapes.items() if shape}


def _half(weights: dict, x: jax.Array, half: int) -> jax.Array:
  """Returns [..., F] float32, half of a concatenated input times its rows of the kernel.

  W [a; b] = W_a a + W_b b, so a beam needs one product per token, not one per token and start.
  """
  kernel = weights["kernel"][half * x.shape[-1] : (half + 1) * x.shape[-1]].astype(x.dtype)
  return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _exclude(logits: jax.Array, allowed: jax.Array) -> jax.Array:
  return jnp.where(allowed.astype(bool), logits, EXCLUDED)


def _logits(
  settings: QASettings, cfg: TransformerConfig, weights: dict, states: jax.Array, allowed: jax.Array
) -> tuple[jax.Array, Callable]:
  """Returns start logits [B, L] and a function from starts [B] to end logits [B, L], float32."""
  if not settings.joint:
    both = HEAD_LAYERS[settings.layers].apply(cfg, weights, states, None)
    end_logits = _exclude(both[..., 1], allowed)
    return _exclude(both[..., 0], allowed), lambda start: end_logits
  of_token = _half(weights["end_dense"], states, 1) + weights["end_dense"]["bias"]

  def given(start: jax.Array) -> jax.Array:
    at_start = jnp.take_along_axis(states, start[:, None, None], axis=1)
    hidden = gelu(_half(weights["end_dense"], at_start, 0) + of_token)
    return _exclude(dense(weights["end"], hidden)[..., 0], allowed)

  return _exclude(dense(weights["start"], states)[..., 0], allowed), given


def _answerable_logit(weights: dict, states: jax.Array, start_logits: jax.Array) -> jax.Array:
  """Returns [B] float32, positive for no answer."""
  probs = jax.nn.softmax(start_logits)
  expected = jnp.einsum("bl,bld->bd", probs, states.astype(jnp.float32)).astype(states.dtype)
  layer = weights["answerable_dense"]
  hidden = _half(layer, states[:, 0], 0) + _half(layer, expected, 1) + layer["bias"]
  return dense(weights["answerable"], gelu(hidden))[..., 0]


def _loss(
  settings: QASettings, cfg: TransformerConfig, weights: dict, states: jax.Array, batch: Batch
) -> dict[str, Term]:
  """Returns (start + end) / 2 + weight x answerable in nats per row, and accuracies.

  As in the original, the head has no dropout.
  """
  target, allowed = batch.target, batch.target["allowed"]
  is_row = batch.padding_mask.any(-1)
  rows = is_row.sum().astype(jnp.float32)

  def term(values: jax.Array, weight: float = 0.0) -> Term:
    return Term(jnp.where(is_row, values, 0.0).sum(), rows, weight)

  start_logits, end_logits = _logits(settings, cfg, weights, states, allowed)
  terms = {}
  for name, logits in (("start", start_logits), ("end", end_logits(target["start"]))):
    at = target[name]
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), at[:, None], axis=1)[:, 0]
    terms[f"{name}_loss"] = term(-logp, 0.5)
    terms[f"{name}_accuracy"] = term((logits.argmax(-1) == at).astype(jnp.float32))
  if settings.answerable_weight:
    logit = _answerable_logit(weights, states, start_logits)
    impossible = target["impossible"].astype(jnp.float32)
    loss = jax.nn.softplus(logit) - impossible * logit
    terms["answerable_loss"] = term(loss, settings.answerable_weight)
    is_right = (logit > 0) == (impossible > 0.5)
    terms["answerable_accuracy"] = term(is_right.astype(jnp.float32))
  return terms


def _top(logp: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """Returns the k largest of logp [B, L] and their positions, [B, k] each, padded if L < k."""
  missing = max(0, k - logp.shape[1])
  best, place = jax.lax.top_k(logp, k - missing)
  pad = ((0, 0), (0, missing))
  return jnp.pad(best, pad, constant_values=EXCLUDED), jnp.pad(place.astype(jnp.int32), pad)


def _predict(
  settings: QASettings, cfg: TransformerConfig, weights: dict, states: jax.Array, batch: Batch
) -> dict[str, jax.Array]:
  """Returns the beams and null scores; see `make_head`."""
  allowed, beam = batch.target["allowed"], settings.beam_size
  start_logits, end_logits = _logits(settings, cfg, weights, states, allowed)
  all_starts = jax.nn.log_softmax(start_logits)
  start_logp, start = _top(all_starts, beam)
  # One start at a time: the hidden layer of all, [B, k, L, 512], takes 670 MB at B = 32, L = 512.
  end_logp, end = jax.lax.map(
    lambda at: _top(jax.nn.log_softmax(end_logits(at)), beam), start.swapaxes(0, 1)
  )
  end_logp, end = end_logp.swapaxes(0, 1), end.swapaxes(0, 1)
  if settings.answerable_weight:
    null = _answerable_logit(weights, states, start_logits)
  else:
    at_cls = jnp.zeros_like(start[:, 0])
    of_cls = all_starts[:, 0] + jax.nn.log_softmax(end_logits(at_cls))[:, 0]
    first = start[..., None]
    is_span = (first > 0) & (end >= first) & (end - first < settings.max_answer_length)
    spans = jnp.where(is_span, start_logp[..., None] + end_logp, 2 * EXCLUDED)
    null = of_cls - spans.max((1, 2))
  return {"start": start, "start_logp": start_logp, "end": end, "end_logp": end_logp, "null": null}
