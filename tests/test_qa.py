"""The question answering heads against NumPy written out, row by row."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import long_except

from electra_jax.core import qa_head
from electra_jax.core.batch import Batch
from electra_jax.core.transformer_config import TransformerConfig

CFG = TransformerConfig(50, 6, 6, 1, 1, 12, 16)
B, L, D = 3, 7, 6
# float32 sums of a dozen products, taken in another order.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
SMALL = qa_head.QASettings(
  beam_size=4, joint=True, answerable_weight=0.5, hidden=5, max_answer_length=30
)
HEADS = {
  "joint": SMALL,
  "joint, no classifier": dataclasses.replace(SMALL, answerable_weight=0.0),
  "independent": dataclasses.replace(SMALL, joint=False, answerable_weight=0.0),
  "independent, classifier": dataclasses.replace(SMALL, joint=False),
  "ModernBERT's": dataclasses.replace(
    SMALL, joint=False, answerable_weight=0.0, layers="modernbert"
  ),
}
of_each_head = pytest.mark.parametrize(
  "settings", long_except(0, len(HEADS) - 1, of=HEADS.values()), ids=HEADS.keys()
)


def dense(layer, x):
  return x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)


def gelu(x):
  return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def log_softmax(x):
  return x - x.max() - np.log(np.exp(x - x.max()).sum())


class Plain:
  """One row of a head in float64: the end given a start is computed from the concatenation."""

  def __init__(self, weights, states, allowed):
    self.w, self.x, self.allowed = weights, np.asarray(states, np.float64), allowed
    logits = dense(weights["start"], self.x) if "start" in weights else self.both()
    self.start = log_softmax(np.where(allowed, logits[:, 0], -1000.0))

  def both(self):
    if "qa_outputs" in self.w:
      return dense(self.w["qa_outputs"], self.x)
    x = gelu(self.x @ np.asarray(self.w["dense"]["kernel"], np.float64))
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + CFG.layer_norm_eps)
    return dense(self.w["classifier"], x * np.asarray(self.w["layer_norm"]["scale"]))

  def end(self, start):
    if "start" not in self.w:
      logits = self.both()[:, 1]
    else:
      both = np.concatenate([np.tile(self.x[start], (len(self.x), 1)), self.x], 1)
      logits = dense(self.w["end"], gelu(dense(self.w["end_dense"], both)))[:, 0]
    return log_softmax(np.where(self.allowed, logits, -1000.0))

  def impossible(self):
    both = np.concatenate([self.x[0], np.exp(self.start) @ self.x])
    return dense(self.w["answerable"], gelu(dense(self.w["answerable_dense"], both)))[0]


def make(settings, seed=0):
  """Returns weights with biases that are not 0, states and a batch whose last row is padding."""
  rng = np.random.default_rng(seed)
  weights = qa_head.make_head(settings).init(CFG, jax.random.key(seed))
  weights = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), weights)
  states = rng.normal(0, 1, (B, L, D)).astype(np.float32)
  mask = np.arange(L) < np.array([7, 6, 0])[:, None]
  allowed = np.zeros((B, L), bool)
  allowed[0, [0, 3, 4, 5]] = allowed[1, [0, 2, 3, 4]] = True  # not the question, not a [SEP]
  target = {
    "start": np.array([3, 0, 0], np.int32),
    "end": np.array([5, 0, 0], np.int32),
    "impossible": np.array([0, 1, 0], np.float32),
    "allowed": allowed,
  }
  ids = np.zeros((B, L), np.int32)
  return weights, states, Batch(ids, ids, mask, np.arange(B, dtype=np.int32), target=target)


def predict(settings, weights, states, batch):
  head = qa_head.make_head(settings)
  return jax.jit(lambda *inputs: head.predict(CFG, *inputs))(weights, states, batch)


def terms_of(settings, weights, states, batch):
  head = qa_head.make_head(settings)
  return jax.jit(lambda *inputs: head.loss(CFG, *inputs, None))(weights, states, batch)


def loss_of(terms):
  return sum(term.weight * term.total / term.count for term in terms.values())


@pytest.mark.slow
@of_each_head
def test_losses_are_those_of_the_formulas_over_the_rows_that_are_no_padding(settings):
  weights, states, batch = make(settings)
  terms = terms_of(settings, weights, states, batch)
  rows = [Plain(weights, states[b], batch.target["allowed"][b]) for b in range(2)]
  starts = [-row.start[t] for row, t in zip(rows, (3, 0), strict=True)]
  ends = [-row.end(s)[t] for row, s, t in zip(rows, (3, 0), (5, 0), strict=True)]
  np.testing.assert_allclose(terms["start_loss"].total, sum(starts), **CLOSE)
  np.testing.assert_allclose(terms["end_loss"].total, sum(ends), **CLOSE)
  hits = [row.start.argmax() == t for row, t in zip(rows, (3, 0), strict=True)]
  assert terms["start_accuracy"].total == sum(hits)
  hits = [row.end(s).argmax() == t for row, s, t in zip(rows, (3, 0), (5, 0), strict=True)]
  assert terms["end_accuracy"].total == sum(hits)
  expected = (sum(starts) + sum(ends)) / 4
  if settings.answerable_weight:
    logits = [row.impossible() for row in rows]
    cross = [np.log1p(np.exp(logits[0])), np.log1p(np.exp(-logits[1]))]
    np.testing.assert_allclose(terms["answerable_loss"].total, sum(cross), **CLOSE)
    assert terms["answerable_accuracy"].total == sum([logits[0] <= 0, logits[1] > 0])
    expected += 0.5 * sum(cross) / 2
  assert all(term.count == 2 for term in terms.values())
  np.testing.assert_allclose(loss_of(terms), expected, **CLOSE)


@pytest.mark.slow
@of_each_head
def test_beams_hold_the_likeliest_starts_and_the_likeliest_ends_given_each(settings):
  weights, states, batch = make(settings)
  batch = batch._replace(target={"allowed": batch.target["allowed"]})
  got = predict(settings, weights, states, batch)
  assert got["start"].dtype == got["end"].dtype == jnp.int32
  for b in range(2):
    row = Plain(weights, states[b], batch.target["allowed"][b])
    starts = np.argsort(-row.start, kind="stable")[:4]
    assert got["start"][b].tolist() == starts.tolist()
    np.testing.assert_allclose(got["start_logp"][b], row.start[starts], **CLOSE)
    for i, start in enumerate(starts):
      ends = np.argsort(-row.end(start), kind="stable")[:4]
      assert got["end"][b, i].tolist() == ends.tolist()
      np.testing.assert_allclose(got["end_logp"][b, i], row.end(start)[ends], **CLOSE)


def test_the_null_score_is_the_classifiers_logit():
  settings = HEADS["joint"]
  weights, states, batch = make(settings)
  got = predict(settings, weights, states, batch)
  rows = [Plain(weights, states[b], batch.target["allowed"][b]) for b in range(2)]
  np.testing.assert_allclose(got["null"][:2], [row.impossible() for row in rows], **CLOSE)


@pytest.mark.parametrize("name", ["joint, no classifier", "independent"])
def test_without_a_classifier_the_null_score_is_that_of_cls_over_the_best_short_span(name):
  settings = dataclasses.replace(HEADS[name], max_answer_length=2)
  weights, states, batch = make(settings)
  got = predict(settings, weights, states, batch)
  for b, context in enumerate([(3, 4, 5), (2, 3, 4)]):
    row = Plain(weights, states[b], batch.target["allowed"][b])
    spans = [row.start[s] + row.end(s)[e] for s in context for e in context if s <= e < s + 2]
    np.testing.assert_allclose(got["null"][b], row.start[0] + row.end(0)[0] - max(spans), **CLOSE)


def test_a_beam_wider_than_the_text_is_filled_up_with_what_is_never_chosen():
  settings = dataclasses.replace(HEADS["joint"], beam_size=9)
  weights, states, batch = make(settings)
  got = predict(settings, weights, states, batch)
  assert got["start"].shape == got["start_logp"].shape == (B, 9)
  assert got["end"].shape == got["end_logp"].shape == (B, 9, 9)
  assert np.all(got["start"][:, 7:] == 0) and np.all(got["end"][:, :, 7:] == 0)
  assert np.all(got["start_logp"][:, 7:] < -900) and np.all(got["end_logp"][:, :, 7:] < -900)


@pytest.mark.slow
@of_each_head
def test_what_is_in_the_rows_of_padding_changes_nothing(settings):
  weights, states, batch = make(settings)
  loss = jax.jit(jax.value_and_grad(lambda *inputs: loss_of(terms_of(settings, *inputs))))
  other = np.array(states)
  other[2] = 1e4
  target = {**batch.target, "impossible": np.array([0, 1, 1], np.float32)}
  one = loss(weights, states, batch)
  two = loss(weights, other, batch._replace(target=target))
  jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.slow
@of_each_head
def test_every_parameter_has_a_gradient(settings):
  weights, states, batch = make(settings)
  grads = jax.grad(lambda w: loss_of(terms_of(settings, w, states, batch)))(weights)
  for name, layer in grads.items():
    for weight, gradient in layer.items():
      # A bias on the logits of all places alike moves no probability.
      alike = weight == "bias" and name in ("start", "end", "qa_outputs", "classifier")
      assert (jnp.abs(gradient).max() < 1e-6) if alike else jnp.abs(gradient).max() > 1e-4, name


def test_independent_logits_without_a_classifier_are_hugging_faces_head_alone():
  weights = qa_head.make_head(HEADS["independent"]).init(CFG, jax.random.key(0))
  shapes = jax.tree.map(jnp.shape, weights)
  assert shapes == {"qa_outputs": {"kernel": (D, 2), "bias": (2,)}}


def test_kernels_start_glorot_uniform_and_biases_at_zero():
  settings = dataclasses.replace(HEADS["joint"], hidden=512)
  weights = qa_head.make_head(settings).init(CFG, jax.random.key(0))
  limit = math.sqrt(6 / (2 * D + 512))
  largest = float(jnp.abs(weights["end_dense"]["kernel"]).max())
  assert 0.98 * limit < largest <= limit
  assert all(not layer["bias"].any() for layer in weights.values())


def test_logits_are_float32_where_states_are_bfloat16():
  settings = HEADS["joint"]
  weights, states, batch = make(settings)
  low = jnp.asarray(states, jnp.bfloat16)
  one, two = (predict(settings, weights, x, batch) for x in (low, low.astype(jnp.float32)))
  assert one["start_logp"].dtype == one["end_logp"].dtype == one["null"].dtype == jnp.float32
  # The start is one product with a float32 kernel: the states' own rounding is all there is.
  np.testing.assert_array_equal(one["start_logp"], two["start_logp"])
  np.testing.assert_allclose(one["null"], two["null"], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("wrong", [{"beam_size": 0}, {"hidden": 0}, {"answerable_weight": -1.0}])
def test_settings_that_make_no_head_are_refused(wrong):
  with pytest.raises(ValueError, match=next(iter(wrong))):
    dataclasses.replace(SMALL, **wrong)
