"""Losses and measures: a hand-worked batch, exact zeros in gradients, scores by scikit-learn."""

import functools
import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import precision_score, recall_score

from electra_jax.core import generators, heads, masking, networks, objectives, step, terms
from electra_jax.core.batch import Batch
from electra_jax.core.networks import generator_size
from electra_jax.core.transformer_config import TransformerConfig

D = TransformerConfig(60, 8, 16, 2, 2, 32, 16)
RATES = masking.Masking(0.25, 0.85, 1.0, 4, (0, 2, 3, 4))
SPEC = objectives.PretrainSpec(generator_size(D, 0.5, 1.0), D, RATES)


@functools.cache
def _fresh(spec):
  rng = np.random.default_rng(0)

  def make(path, x):
    name = jax.tree_util.keystr(path)
    if "bias" in name or "delta" in name:
      return jnp.zeros(x.shape)
    return jnp.asarray(1.0 + 0 * x if "scale" in name else 0.02 * x)

  shapes = jax.eval_shape(lambda: objectives.init_params(spec, jax.random.key(0)))
  drawn = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape).clip(-2, 2)), shapes)
  return jax.tree_util.tree_map_with_path(make, drawn)


def fresh(spec):
  """Returns weights as the initial ones are, in dicts of the caller's own.

  Drawn by NumPy: to compile what draws them takes longer than most tests.
  """
  return jax.tree.map(lambda x: x, _fresh(spec))


@pytest.fixture
def params():
  return fresh(SPEC)


def make_batch(B=4, L=16, seed=0):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(6, L + 1, B)
  mask = np.arange(L) < lengths[:, None]
  ids = np.where(mask, rng.integers(5, 60, (B, L)), 0).astype(np.int32)
  ids[:, 0] = 2
  return Batch(ids, np.zeros_like(ids), mask, np.arange(B, dtype=np.int32))


@jax.jit
def keys_of(batch):
  return step.row_keys(0, jnp.int32(0), jnp.asarray(batch.row))


def evaluate(spec, params, batch):
  """Returns the terms of an evaluation."""
  objective = objectives.make(spec)
  return jax.jit(lambda p, b, k: objective(p, b, k, None))(params, batch, keys_of(batch))


def test_losses_equal_a_hand_worked_example():
  # Two slots count, one does not. Uniform logits over 4 words: log 4. Then 3 : 1 : 1 : 1 in
  # probability on the right word: log 2.
  logits = jnp.log(jnp.array([[[1.0, 1, 1, 1], [3, 1, 1, 1], [9, 1, 1, 1]]]))
  masked = masking.MaskedPositions(*map(jnp.array, ([[1, 2, 3]], [[2, 0, 1]], [[1.0, 1, 0]])))
  t = terms.token_terms("mlm", *networks.nll(logits, masked.labels), masked.weights, 1.0)
  assert float(t["mlm_loss"].total) == pytest.approx(math.log(4) + math.log(2), rel=1e-6)
  assert (float(t["mlm_loss"].count), t["mlm_loss"].weight) == (2.0, 1.0)
  assert float(t["mlm_accuracy"].total) == 2.0  # the uniform one is a tie, which is not below

  # Four tokens and one of padding. Logit log 3 says replaced with probability 3/4.
  scores = jnp.log(jnp.array([[3.0, 1 / 3, 3.0, 1 / 3, 7.0]]))
  replaced = jnp.array([[True, True, False, False, False]])
  mask = jnp.array([[True, True, True, True, False]])
  t = terms.detection_terms("rtd", scores, replaced, mask, 50.0)
  assert float(t["rtd_loss"].total) == pytest.approx(2 * math.log(4) + 2 * math.log(4 / 3))
  assert (float(t["rtd_loss"].count), t["rtd_loss"].weight) == (4.0, 50.0)
  for name, total, count in (("rtd_accuracy", 2, 4), ("rtd_recall", 1, 2), ("rtd_precision", 1, 2)):
    assert (float(t[name].total), float(t[name].count)) == (total, count), name
  assert t["rtd_scores"].total.sum(1).tolist() == [2.0, 2.0]
  assert t["rtd_scores"].count == 4.0


def test_discriminator_measures_equal_scikit_learns():
  rng = np.random.default_rng(0)
  scores = rng.normal(size=(8, 64)).astype(np.float32)
  replaced = rng.random((8, 64)) < 0.2
  mask = rng.random((8, 64)) < 0.8
  replaced &= mask
  t = terms.detection_terms("rtd", *map(jnp.asarray, (scores, replaced, mask)), 50.0)
  y, predicted = replaced[mask], scores[mask] > 0
  mean = {k: float(v.total / v.count) for k, v in t.items() if v.total.ndim == 0}
  assert mean["rtd_recall"] == pytest.approx(recall_score(y, predicted))
  assert mean["rtd_precision"] == pytest.approx(precision_score(y, predicted))
  p = 1 / (1 + np.exp(-scores[mask].astype(np.float64)))
  assert mean["rtd_loss"] == pytest.approx(-np.log(np.where(y, p, 1 - p)).mean(), rel=1e-5)


def test_score_histogram_counts_every_token_once_and_clips_the_ends():
  low, high = terms.SCORE_RANGE
  scores = jnp.array([[low - 5, low, 0.0, high - 1e-3, high + 5, 3.0]])
  label = jnp.array([[False, True, False, True, False, True]])
  got = terms.score_histogram(scores, label, jnp.array([[1.0, 1, 1, 1, 1, 0]]))
  expected = np.zeros((2, terms.SCORE_BINS))
  expected[0, 0] = expected[1, 0] = 1
  expected[0, terms.SCORE_BINS // 2] = 1
  expected[1, -1] = expected[0, -1] = 1
  np.testing.assert_array_equal(got, expected)


def term_gradients(spec, params, *names):
  """Returns the gradient of each of these terms' totals in a step of training."""
  batch = make_batch()

  def totals(params):
    found = objectives.make(spec)(params, batch, keys_of(batch), jnp.int32(0))
    return {name: found[name].total for name in names}

  found = jax.jit(jax.jacrev(totals))(params)
  return [found[name] for name in names]


def moved(tree) -> set[str]:
  """Returns the modules "network/module" that have any gradient."""
  return {
    f"{n}/{m}"
    for n, ms in tree.items()
    for m, t in ms.items()
    if any(map(np.any, jax.tree.leaves(t)))
  }


def learns(spec, name) -> set[str]:
  """Returns the modules "network/module" whose gradient depends on anything, without compiling.

  A gradient that stops before a module is a constant of the traced program.
  """
  batch = make_batch()

  def total(params):
    keys = step.row_keys(0, jnp.int32(0), jnp.asarray(batch.row))
    return objectives.make(spec)(params, batch, keys, jnp.int32(0))[name].total

  traced = jax.make_jaxpr(jax.grad(total), return_shape=True)
  program, shapes = traced(objectives.param_shapes(spec))
  depends = set(program.jaxpr.invars)

  def is_in(variable) -> bool:  # constants are not hashable
    return isinstance(variable, jax.extend.core.Var) and variable in depends

  for equation in program.jaxpr.eqns:
    if any(map(is_in, equation.invars)):
      depends |= set(equation.outvars)
  return moved(jax.tree.unflatten(jax.tree.structure(shapes), map(is_in, program.jaxpr.outvars)))


@pytest.mark.parametrize(
  ("loss", "own", "other"),
  [("rtd_loss", "discriminator", "generator"), ("mlm_loss", "generator", "discriminator")],
)
def test_each_loss_gives_the_other_networks_weights_exactly_zero_gradient(params, loss, own, other):
  (grads,) = term_gradients(SPEC, params, loss)
  assert not any(map(np.any, jax.tree.leaves(grads[other])))
  # All that its own network uses learns from it, the shared embeddings with their LayerNorm too.
  # (Only the rows for the second segment are not looked up here, and a key's bias has no effect.)
  assert all(map(np.any, jax.tree.leaves((grads["embeddings"], grads[own]))))


def test_a_term_that_is_only_reported_has_no_gradient(params):
  names = "mlm_accuracy", "sampled_accuracy", "sample_entropy", "rtd_accuracy", "rtd_recall"
  gradients = term_gradients(SPEC, params, *names, "replaced")
  assert not any(map(np.any, jax.tree.leaves(gradients)))


def test_the_objective_is_the_walk_of_a_batch_step_by_step(params):
  # The same rooms called one by one, without dropout.
  batch = make_batch(seed=3)
  k = jax.vmap(lambda key: jax.random.split(key, 5))(keys_of(batch)[:, 0])
  g, d = SPEC.generator, SPEC.discriminator
  masked = jax.jit(masking.choose, static_argnums=1)(batch, RATES, k[:, 0])
  masked_ids = jax.jit(masking.mask, static_argnums=2)(batch.ids, masked, RATES, k[:, 1])

  @jax.jit
  def predict(network):
    x = networks.encode(g, network, masked_ids, batch, None)
    return networks.vocabulary_logits(g, network, masking.gather(x, masked))

  logits = predict({"embeddings": params["embeddings"], **params["generator"]})
  allowed = masking.disallow(logits, jnp.int32(RATES.mask_id))
  sampled, _ = jax.jit(masking.sample, static_argnums=1)(allowed, 1.0, k[:, 2])
  ids = np.array(batch.ids)
  for b, j in np.argwhere(np.asarray(masked.weights) > 0):
    ids[b, masked.positions[b, j]] = sampled[b, j]

  @jax.jit
  def detect(network):
    x = networks.encode(d, network, ids, batch, None)
    return heads.RtdHead(d).apply({"params": network["rtd_head"]}, x)

  scores = detect({"embeddings": params["embeddings"], **params["discriminator"]})
  logp = np.asarray(jax.nn.log_softmax(logits))
  nll = -np.take_along_axis(logp, np.asarray(masked.labels)[..., None], -1)[..., 0]
  p = 1 / (1 + np.exp(-np.asarray(scores, np.float64)))
  bce = -np.log(np.where(ids != batch.ids, p, 1 - p))

  terms = evaluate(SPEC, params, batch)
  w = np.asarray(masked.weights)
  assert float(terms["mlm_loss"].total) == pytest.approx((nll * w).sum(), rel=1e-5)
  assert float(terms["rtd_loss"].total) == pytest.approx(bce[batch.padding_mask].sum(), rel=1e-5)
  assert float(terms["rtd_loss"].count) == batch.padding_mask.sum()
  assert float(terms["replaced"].total) == (ids != batch.ids).sum() > 0
  logq = np.asarray(jax.nn.log_softmax(allowed))
  drawn = -np.take_along_axis(logq, np.asarray(sampled)[..., None], -1)[..., 0]
  assert float(terms["sample_entropy"].total) == pytest.approx((drawn * w).sum(), rel=1e-5)
  assert (float(terms["sample_entropy"].count), terms["sample_entropy"].weight) == (w.sum(), 0.0)


def test_a_padding_row_changes_nothing(params):
  batch = make_batch()
  longer = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x[:1])]), batch)
  longer = longer._replace(row=np.arange(5, dtype=np.int32))
  a, b = (evaluate(SPEC, params, x) for x in (batch, longer))
  for name in a:
    np.testing.assert_allclose(a[name].total, b[name].total, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(a[name].count, b[name].count, err_msg=name)


def test_no_two_random_choices_of_a_row_share_a_key():
  streams = generators.split_streams(keys_of(make_batch()), training=True)
  words = np.concatenate([np.asarray(jax.random.key_data(keys)).reshape(-1, 2) for keys in streams])
  # Of 4 rows, and of the batch for the dropout of two networks.
  assert len(np.unique(words, axis=0)) == 4 * 5 + 2
  evaluation = generators.split_streams(keys_of(make_batch()), training=False)
  assert evaluation.generator_dropout is evaluation.discriminator_dropout is None


def test_a_logit_of_zero_predicts_original():
  zero, mask = jnp.zeros((1, 3)), jnp.array([[True, True, False]])
  t = terms.detection_terms("rtd", zero, jnp.array([[True, False, False]]), mask, 1.0)
  accuracy, recall, precision = (t[f"rtd_{x}"] for x in ("accuracy", "recall", "precision"))
  assert (accuracy.total, recall.total, precision.total, precision.count) == (1, 0, 0, 0)
