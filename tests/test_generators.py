"""The kinds of generator: what they see, what they sample."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import long_except
from test_objectives import SPEC, evaluate, fresh, keys_of, make_batch

from electra_jax.core import generators, masking, objectives, schedules
from electra_jax.core.layers import dropout, make_dropout_seeds

TOWERS = dataclasses.replace(SPEC, generator_kind="two_tower")


def corrupt(spec, weights, batch, training=True, step=0):
  at = jnp.int32(step) if training else None
  keys = generators.split_streams(keys_of(batch), training)
  return jax.jit(functools.partial(generators.corrupt, spec))(weights, batch, keys, at)


def changed(**fields):
  """Returns the specification with other rates of masking."""
  return dataclasses.replace(SPEC, masking=dataclasses.replace(SPEC.masking, **fields))


def tower_states(weights, batch):
  """Returns the function from ids to the states of both towers."""
  return jax.jit(
    lambda ids: generators.two_tower_states(TOWERS, weights, batch._replace(ids=ids), (None, None))
  )


@pytest.mark.slow
def test_the_towers_never_see_the_token_they_predict_and_see_all_others():
  batch = make_batch(B=1, seed=5)._replace(padding_mask=np.ones((1, 16), bool))
  states = tower_states(fresh(TOWERS), batch)
  before = np.asarray(states(batch.ids))
  half = TOWERS.generator.hidden_size
  for t in range(16):
    ids = batch.ids.copy()
    ids[0, t] = 5 + (ids[0, t] + 7) % 50
    after = np.asarray(states(ids))
    changed = (after != before).any(-1)[0]
    assert not changed[t]  # bit for bit: q of a token does not depend on it
    assert changed[np.arange(16) != t].all()
    left, right = (after != before)[0, :, :half].any(-1), (after != before)[0, :, half:].any(-1)
    assert left.tolist() == [place > t for place in range(16)]
    assert right.tolist() == [place < t for place in range(16)]
  # Nothing wraps around: beyond the edges there are zeros.
  assert not before[0, 0, :half].any() and not before[0, -1, half:].any()


def test_the_towers_do_not_look_at_padding():
  batch = make_batch(B=8, seed=6)
  states = tower_states(fresh(TOWERS), batch)
  other = np.where(batch.padding_mask, batch.ids, 9)
  a, b = np.asarray(states(batch.ids)), np.asarray(states(other))
  np.testing.assert_array_equal(a[batch.padding_mask], b[batch.padding_mask])
  # Nor does the last token see itself through what is beyond it.
  last = batch.padding_mask.sum(-1) - 1
  assert not a[np.arange(8), last, TOWERS.generator.hidden_size :].any()


def test_the_cloze_loss_covers_every_ordinary_token():
  weights, batch = fresh(TOWERS), make_batch()
  terms = corrupt(TOWERS, weights, batch, training=False).terms
  ordinary = batch.padding_mask & ~np.isin(batch.ids, TOWERS.masking.special_ids)
  assert float(terms["cloze_loss"].count) == ordinary.sum()
  assert "mlm_loss" not in terms


@pytest.mark.parametrize("kind", ["uniform", "unigram"])
def test_samples_without_a_network_have_the_right_frequencies(kind):
  counts = np.arange(60.0) ** 2
  spec = dataclasses.replace(SPEC, generator_kind=kind, frequencies=tuple(counts))
  batch = make_batch(B=4096, seed=2)
  c = corrupt(spec, fresh(spec), batch)
  assert fresh(spec)["generator"] == {}
  drawn = np.bincount(np.asarray(c.sampled)[np.asarray(c.masked.weights) > 0], minlength=60)
  counts = counts if kind == "unigram" else np.ones(60)
  counts[spec.masking.mask_id] = 0
  p = counts / counts.sum()
  expected = drawn.sum() * p
  some = expected > 0
  assert drawn[~some].sum() == 0
  # Pearson's statistic of 58 degrees of freedom: its 99.99th percentile is 108.
  assert ((drawn[some] - expected[some]) ** 2 / expected[some]).sum() < 108
  # The entropy that it reports is theirs; five standard deviations, 1e-5 for float32.
  log_p = np.log(p, where=p > 0, out=np.zeros_like(p))
  entropy, n = -(p * log_p).sum(), drawn.sum()
  sigma = np.sqrt(max((p * log_p**2).sum() - entropy**2, 0) / n)
  term = c.terms["sample_entropy"]
  assert float(term.count) == n
  assert abs(float(term.total) / n - entropy) < 5 * sigma + 1e-5


@pytest.mark.slow
def test_the_entropy_is_that_of_what_is_sampled_from():
  weights, batch = fresh(SPEC), make_batch(B=8)
  for change in ({}, {"temperature": 0.05}, {"disallow_correct": True}):
    spec = changed(**change)
    c = corrupt(spec, weights, batch)
    z = np.array(c.output.logits, np.float64)
    if change.get("disallow_correct"):
      np.put_along_axis(z, np.asarray(c.masked.labels)[..., None], -np.inf, -1)
    z = z / spec.masking.temperature.constant
    log_p = z - z.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    drawn = np.take_along_axis(log_p, np.asarray(c.sampled)[..., None], -1)[..., 0]
    total = -(drawn * np.asarray(c.masked.weights)).sum()
    assert float(c.terms["sample_entropy"].total) == pytest.approx(total, rel=1e-5), change


@pytest.mark.slow
def test_a_correct_sample_can_be_disallowed():
  spec = dataclasses.replace(changed(disallow_correct=True), generator_kind="uniform")
  batch = make_batch(B=256)
  for training in (True, False):
    c = corrupt(spec, fresh(spec), batch, training)
    assert float(c.terms["sampled_accuracy"].total) == 0.0
    assert int(c.is_replaced.sum()) == int(c.masked.weights.sum())
  c = corrupt(dataclasses.replace(SPEC, generator_kind="uniform"), fresh(SPEC), batch)
  hits = np.asarray(c.sampled == c.masked.labels)
  counted = hits[np.asarray(c.masked.weights) > 0].sum()
  assert float(c.terms["sampled_accuracy"].total) == counted < hits.sum()


@pytest.mark.slow
def test_samples_without_dropout_are_those_of_evaluation():
  still = dataclasses.replace(SPEC, sampling_dropout=False)
  weights, batch = fresh(SPEC), make_batch(B=64)
  training, evaluation = corrupt(still, weights, batch), corrupt(still, weights, batch, False)
  np.testing.assert_array_equal(training.sampled, evaluation.sampled)
  assert (training.output.logits != evaluation.output.logits).any()  # learns under dropout
  np.testing.assert_array_equal(*(c.terms["sample_entropy"].total for c in (training, evaluation)))
  assert (corrupt(SPEC, weights, batch).sampled != evaluation.sampled).any()


@pytest.mark.slow
def test_a_frozen_generator_has_no_dropout_no_weight_and_no_gradient():
  spec = dataclasses.replace(SPEC, generator_kind="frozen", tying="none")
  weights, batch = fresh(spec), make_batch()
  keys = generators.split_streams(keys_of(batch), True)

  def loss(weights):
    c = generators.corrupt(spec, weights, batch, keys, jnp.int32(0))
    assert not c.terms["mlm_loss"].in_loss
    return c.output.logits.sum()

  assert not any(map(np.any, jax.tree.leaves(jax.jit(jax.grad(loss))(weights))))
  a, b = corrupt(spec, weights, batch), corrupt(spec, weights, batch, False)
  np.testing.assert_array_equal(a.output.logits, b.output.logits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_except(1, of=generators.GENERATORS))
def test_every_kind_corrupts_the_chosen_slots_only(kind):
  tie = "none" if kind == "frozen" else "embeddings"
  spec = dataclasses.replace(SPEC, generator_kind=kind, tying=tie, frequencies=(1.0,) * 60)
  batch = make_batch(B=8)
  c = corrupt(spec, fresh(spec), batch)
  chosen = np.asarray(masking.is_masked(c.masked, 16))
  assert chosen.sum() == c.masked.weights.sum()
  assert not (np.asarray(c.ids) != batch.ids)[~chosen].any()
  np.testing.assert_array_equal(c.is_replaced, np.asarray(c.ids) != batch.ids)


def test_samples_of_a_two_tower_generator_follow_its_distribution():
  # One sequence again and again, its positions drawn anew: compare frequencies with q.
  weights = fresh(TOWERS)
  weights = jax.tree.map(lambda x: 5 * x, weights)  # far from uniform
  one = make_batch(B=1, seed=8)._replace(padding_mask=np.ones((1, 16), bool))
  many = jax.tree.map(lambda x: np.repeat(x, 4096, 0), one)
  batch = many._replace(row=np.arange(4096, dtype=np.int32))
  c = corrupt(TOWERS, weights, batch, training=False)
  at = 3
  hit = np.asarray(c.masked.positions) == at
  drawn = np.bincount(np.asarray(c.sampled)[hit], minlength=60)
  logits = np.asarray(c.output.logits)[hit][0].astype(np.float64)
  q = np.exp(logits - logits.max())
  q /= q.sum()
  big = drawn.sum() * q > 5
  assert big.sum() > 3
  z = (drawn - drawn.sum() * q)[big] / np.sqrt(drawn.sum() * q * (1 - q))[big]
  assert np.abs(z).max() < 4.5  # of at most 60 normal deviates: one in 2,500 times


def test_generator_kinds_of_one_size_are_what_their_parameters_say():
  shapes = jax.eval_shape(lambda: objectives.init_params(TOWERS, jax.random.key(0)))["generator"]
  assert set(shapes) == {"ltr", "rtl", "mlm_head"}
  assert shapes["mlm_head"]["dense"]["kernel"].shape == (2 * TOWERS.generator.hidden_size, 8)


def test_the_two_towers_drop_other_elements():
  dropout_seeds = make_dropout_seeds(jax.random.split(jax.random.key(0), (8, 2)), 2)
  (first, layers), (other, others) = dropout_seeds, generators._two_seeds(dropout_seeds)[1]

  def signs(salt):
    return np.where(np.asarray(dropout(jnp.ones((8, 64, 64)), 0.5, salt)) > 0, 1.0, -1.0)

  for a, b in ((first, other), (layers[1][:, 2], others[1][:, 2])):
    product = signs(a) * signs(b)
    # Of independent signs the mean is 0, with a standard deviation of 1 / 181: five of them.
    assert abs(product.mean()) < 5 / np.sqrt(product.size)


def test_samples_follow_the_schedule_of_the_temperature_and_replaced_is_a_share_of_all_tokens():
  counts = 1.0 + np.arange(60)
  cold = changed(temperature=schedules.Schedule(1.0, schedules.parse("0=1e-3,8=1", 10)))
  spec = dataclasses.replace(cold, generator_kind="unigram", frequencies=tuple(counts))
  batch = make_batch(B=64)
  first, last = (corrupt(spec, {"generator": {}}, batch, step=step) for step in (0, 8))
  assert np.unique(first.sampled).tolist() == [59]  # at 1/1000 the likeliest always
  assert np.unique(last.sampled).size > 20
  for c in (first, last):
    share = c.terms["replaced"]
    assert float(share.total) == np.asarray(c.is_replaced).sum()
    assert float(share.count) == batch.padding_mask.sum()


@pytest.mark.slow
def test_a_share_of_the_samples_follows_the_frequencies_by_its_schedule():
  counts = np.r_[np.zeros(5), np.arange(1, 56)]
  falling = changed(unigram_share=schedules.Schedule(0.25, schedules.parse("0=1,10=0", 10)))
  spec = dataclasses.replace(falling, frequencies=tuple(counts))
  weights, batch = fresh(spec), make_batch(B=512, seed=3)
  weights["generator"]["mlm_head"]["bias"] += 50.0 * (jnp.arange(60) == 7)  # it writes 7 alone
  u = counts / counts.sum()
  for step, share in ((0, 1.0), (5, 0.5), (10, 0.0)):
    c = corrupt(spec, weights, batch, step=step)
    real = np.asarray(c.masked.weights) > 0
    found = np.bincount(np.asarray(c.sampled)[real], minlength=60) / real.sum()
    expected = share * u + (1 - share) * (np.arange(60) == 7)
    # Of about 1,600 draws; four standard deviations.
    assert (np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / real.sum())).all()
    entropy = -(expected * np.log(np.maximum(expected, 1e-30))).sum()
    term = c.terms["sample_entropy"]
    assert float(term.total / term.count) == pytest.approx(entropy, abs=0.15)


def test_a_share_by_frequency_never_writes_the_original_where_that_is_disallowed():
  counts = np.where(np.arange(60) == 9, 1e6, 1.0)  # nearly always 9
  by_frequency = changed(unigram_share=1.0, disallow_correct=True)
  spec = dataclasses.replace(by_frequency, frequencies=tuple(counts))
  batch = make_batch(B=64)
  batch = batch._replace(ids=np.where(batch.ids >= 5, 9, batch.ids))
  c = corrupt(spec, fresh(spec), batch, training=False)
  assert not np.asarray(c.sampled == 9)[np.asarray(c.masked.weights) > 0].any()


@pytest.mark.parametrize("disallow", [False, True])
def test_the_entropy_is_that_of_the_samples_where_a_share_follows_the_frequencies(disallow):
  u = np.array([0, 0, 0, 0, 0, 5, 3, 2]) / 10
  mixed = changed(unigram_share=0.4, disallow_correct=disallow)
  spec = dataclasses.replace(mixed, frequencies=tuple(u))
  logits = np.random.default_rng(0).normal(size=(1, 1, 8)).astype(np.float32)
  logits[..., :5] = -1e30
  original = 5
  if disallow:
    logits[..., original] = -1e30
  g = np.exp(logits[0, 0]) / np.exp(logits[0, 0]).sum()
  # A draw by frequency that is the original leaves the generator's sample.
  kept = 0.6 + 0.4 * u[original] * disallow
  expected = kept * g + 0.4 * u * (np.arange(8) != original if disallow else 1)
  assert expected.sum() == pytest.approx(1)
  n = 4000
  sampled, surprise = generators._mix_unigrams(
    spec, jnp.broadcast_to(logits, (n, 1, 8)),
    jax.random.categorical(jax.random.key(1), logits[0], shape=(n, 1)),
    jnp.full((n, 1), original), jax.random.split(jax.random.key(2), n), None,
  )  # fmt: skip
  sampled = np.asarray(sampled)[:, 0]
  np.testing.assert_allclose(surprise[:, 0], -np.log(expected[sampled]), rtol=1e-4)
  found = np.bincount(sampled, minlength=8) / n
  assert (np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / n)).all()


def test_no_temperature_lets_the_mask_token_be_sampled():
  masked = masking.disallow(jnp.zeros((64, 50, 20)), jnp.int32(4))
  keys = jax.random.split(jax.random.key(0), 64)
  assert not np.asarray(masking.sample(masked, 1e5, keys)[0] == 4).any()


# Detection of fixed noise, in evaluations.


@pytest.mark.slow
def test_fixed_noise_is_drawn_by_frequency_whatever_the_generator_writes():
  counts = np.r_[np.zeros(5), np.arange(1, 56)]
  spec = dataclasses.replace(changed(temperature=9), tying="none", frequencies=tuple(counts))
  batch, weights = make_batch(B=256, seed=2), fresh(spec)
  found = evaluate(spec, weights, batch)["unigram_scores"].total
  other = {**weights, "generator": jax.tree.map(lambda x: x + 0.1, weights["generator"])}
  np.testing.assert_array_equal(found, evaluate(spec, other, batch)["unigram_scores"].total)
  without = dataclasses.replace(spec, fixed_noise=False)  # saves the pass
  assert "unigram_scores" not in evaluate(without, weights, batch)
  # 15 % of each row, whatever the masking, less what equals the token that it replaces.
  p = counts / counts.sum()
  ordinary = batch.ids[batch.padding_mask & (batch.ids >= 5)]
  chosen = np.clip(np.round(0.15 * batch.padding_mask.sum(-1)), 1, None).sum()
  expected = chosen * (1 - p[ordinary].mean())
  assert abs(found[1].sum() - expected) < 20  # four standard deviations of 440 draws of 0.98
  assert found.sum() == batch.padding_mask.sum()


def test_only_evaluations_of_objectives_that_detect_measure_fixed_noise():
  batch = make_batch()

  def names(objective, step):
    spec = dataclasses.replace(SPEC, objective=objective, frequencies=(1.0,) * 60)
    return jax.eval_shape(objectives.make(spec), fresh(spec), batch, keys_of(batch), step).keys()

  assert "unigram_scores" in names("electra", None)
  assert "unigram_scores" not in names("electra", jnp.int32(0))
  assert "unigram_scores" not in names("bert", None)


def test_a_share_of_the_chosen_tokens_stays_mask_and_is_not_detected():
  spec, batch = changed(keep_mask_share=0.4), make_batch(B=256, seed=3)
  weights, mask = fresh(spec), SPEC.masking.mask_id
  c, whole = corrupt(spec, weights, batch), corrupt(SPEC, weights, batch)
  chosen, kept = np.asarray(c.masked.weights) > 0, np.asarray(c.sampled) == mask
  # Of about 800 tokens; four standard deviations. The others are the samples of a share of 0.
  share, n = kept[chosen].mean(), chosen.sum()
  assert abs(share - 0.4) <= 4 * (0.4 * 0.6 / n) ** 0.5
  np.testing.assert_array_equal(c.sampled[~kept], whole.sampled[~kept])
  ids = np.asarray(c.ids)
  assert (ids == mask).sum() == (kept & chosen).sum()
  np.testing.assert_array_equal(c.detected, batch.padding_mask & (ids != mask))
  np.testing.assert_array_equal(c.is_replaced, (ids != batch.ids) & (ids != mask))
  replaced, loss = c.terms["replaced"], evaluate(spec, weights, batch)["rtd_loss"]
  assert float(replaced.total) == c.is_replaced.sum() and replaced.count == c.detected.sum()
  assert 0 < float(loss.count) < batch.padding_mask.sum()


def test_words_are_predicted_at_masks_that_stay_as_at_samples():
  spec = dataclasses.replace(changed(keep_mask_share=1.0), objective="electra_mlm")
  batch = make_batch(B=4, seed=2)
  terms = evaluate(spec, fresh(spec), batch)
  assert float(terms["replace_mlm_loss"].count) == float(terms["sampled_accuracy"].count) > 0
  assert float(terms["rtd_recall"].count) == 0  # no sample is left
