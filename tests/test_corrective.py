"""METRO and COCO-LM: correction with a copy gate by hand, crops, and the contrast of sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_objectives import SPEC, evaluate, fresh, keys_of, learns, make_batch
from test_paper_objectives import corruption, main, sigmoid, vocabulary

from electra_jax.core import contrast, masking, networks, objectives

METRO = dataclasses.replace(SPEC, objective="metro", replace_mlm_weight=2.0)
COCO = dataclasses.replace(SPEC, objective="coco_lm", contrast_group=4)


@pytest.mark.slow
def test_metro_corrects_with_the_probability_of_detection_as_copy_gate():
  weights, batch = fresh(METRO), make_batch()
  c = corruption(METRO, weights, batch)
  kept = 1 - sigmoid(main(METRO, weights, c.ids, batch, "rtd_head"))
  p = np.take_along_axis(vocabulary(METRO, weights, c.ids, batch), batch.ids[..., None], -1)[..., 0]
  mixed = kept * (np.asarray(c.ids) == batch.ids) + (1 - kept) * p
  chosen = np.asarray(masking.is_masked(c.masked, 16))
  terms = evaluate(METRO, weights, batch)
  found = terms["corrective_loss"]
  assert float(found.total) == pytest.approx(-np.log(mixed[chosen]).sum(), rel=1e-5)
  assert float(found.count) == chosen.sum() and found.weight == 2.0
  # Some samples equal their originals, so that the gate's two sides are both taken.
  same = (np.asarray(c.ids) == batch.ids)[chosen]
  assert float(terms["rtd_loss"].count) == batch.padding_mask.sum() and not same.all()


def test_correction_does_not_train_detection_nor_the_generator():
  correction, detection = learns(METRO, "corrective_loss"), learns(METRO, "rtd_loss")
  assert "discriminator/mlm_head" in correction and "discriminator/rtd_head" not in correction
  assert "discriminator/rtd_head" in detection and "discriminator/mlm_head" not in detection
  assert not any(name.startswith("generator") for name in correction | detection)


def test_a_crop_is_cls_and_nine_tenths_of_the_other_tokens_in_order():
  lengths, length = np.array([21, 16, 6, 2, 1]), 24
  ids = np.where(np.arange(length) < lengths[:, None], 10 + np.arange(length), 0).astype(np.int32)
  batch = make_batch(B=5)._replace(
    ids=ids, token_type_ids=ids % 2, padding_mask=np.arange(length) < lengths[:, None]
  )
  starts = []
  for seed in range(60):
    cropped = jax.jit(contrast.crop)(batch, jax.random.split(jax.random.key(seed), 5))
    mask = np.asarray(cropped.padding_mask)
    shown = [row[m] for row, m in zip(np.asarray(cropped.ids), mask, strict=True)]
    for row, tokens in zip(shown, lengths, strict=True):
      kept = int(np.ceil(0.9 * (tokens - 1)))
      assert row[0] == 10 and len(row) == 1 + kept  # [CLS] is there, whatever is cut
      assert (np.diff(row[1:]) == 1).all() and (row < 10 + tokens).all()
    segments, seen = np.asarray(cropped.token_type_ids)[mask], np.asarray(cropped.ids)[mask]
    np.testing.assert_array_equal(segments, seen % 2)
    starts.append(int(shown[0][1]) - 11)
  assert set(starts) == {0, 1, 2}  # of 20 tokens 18 stay: three places


def test_the_contrast_is_that_of_cosines_in_numpy():
  rng = np.random.default_rng(0)
  one, two = rng.normal(size=(2, 6, 5))
  valid, total, hits = np.array([True, True, True, True, True, False]), 0.0, 0
  for first in (0, 3):  # groups of three rows, the last one empty
    rows = [r for r in range(first, first + 3) if valid[r]]
    views = [("one", r, one[r]) for r in rows] + [("two", r, two[r]) for r in rows]
    for kind, r, x in views:
      cosines = {
        (k, s): x @ y / np.linalg.norm(x) / np.linalg.norm(y)
        for k, s, y in views if (k, s) != (kind, r)
      }  # fmt: skip
      other = cosines[("two" if kind == "one" else "one", r)]
      total -= np.log(np.exp(other) / sum(np.exp(c) for c in cosines.values()))
      hits += other == max(cosines.values())
  terms = contrast.contrast_terms(jnp.array(one), jnp.array(two), jnp.array(valid), 3, 0.5)
  loss = terms["contrast_loss"]
  assert float(loss.total) == pytest.approx(total, rel=1e-5)
  assert (float(loss.count), loss.weight) == (10.0, 0.5)
  assert float(terms["contrast_accuracy"].total) == hits


@pytest.mark.slow
def test_coco_lm_contrasts_the_corrupted_text_with_a_crop_of_the_original():
  weights, batch = fresh(COCO), make_batch(B=8)
  present = np.arange(8) != 5  # a row of padding fills the last batch of an evaluation
  batch = batch._replace(padding_mask=batch.padding_mask & present[:, None])
  terms = evaluate(COCO, weights, batch)
  c = corruption(COCO, weights, batch)
  samples = jax.vmap(lambda key: jax.random.split(key, 5))(keys_of(batch)[:, 0])[:, 2]
  cropped = contrast.crop(batch, jax.vmap(lambda key: jax.random.fold_in(key, 1))(samples))

  @jax.jit
  def first_state(ids, batch):
    return networks.main_states(COCO, weights, ids, batch, None)[:, 0]

  views = first_state(c.ids, batch), first_state(cropped.ids, cropped)
  expected = contrast.contrast_terms(*views, present, 4, 1.0)
  for name in ("contrast_loss", "contrast_accuracy"):
    assert float(terms[name].total) == pytest.approx(float(expected[name].total), rel=1e-5)
  assert terms["contrast_loss"].in_loss and float(terms["contrast_loss"].count) == 14
  assert {"corrective_loss", "rtd_loss", "mlm_loss"} <= terms.keys()  # METRO's


@pytest.mark.slow
def test_the_two_views_of_a_sequence_have_dropout_of_their_own():
  weights, batch = fresh(COCO), make_batch(B=8)
  # Only [CLS]: nothing is masked or cut.
  batch = batch._replace(padding_mask=np.arange(16) < np.ones((8, 1)))
  objective = objectives.make(COCO)

  @jax.jit
  def accuracy(step):
    found = objective(weights, batch, keys_of(batch), step)["contrast_accuracy"]
    return found.total / found.count

  # In evaluation both views are the same vector; with one dropout for both they would be, too.
  assert accuracy(None) == 1 and accuracy(jnp.int32(0)) < 0.75


def test_the_contrast_does_not_depend_on_how_rows_are_spread():
  one, two = np.random.default_rng(1).normal(size=(2, 8, 5))
  valid = np.arange(8) != 5

  def loss(rows):
    return contrast.contrast_terms(one[rows], two[rows], valid[rows], 4, 1.0)["contrast_loss"]

  whole, parts = loss(slice(8)), [loss(slice(0, 4)), loss(slice(4, 8))]
  # float32 sums of 14 numbers in another order.
  assert float(whole.total) == pytest.approx(sum(float(p.total) for p in parts), rel=1e-6)
  assert float(whole.count) == sum(float(p.count) for p in parts) == 14


def test_groups_that_do_not_fit_are_refused_before_compilation():
  six, packed = make_batch(B=6), make_batch(B=8)
  packed = packed._replace(document_ids=packed.padding_mask.astype(np.int32))
  for batch, message in ((six, "group=4 does not divide a d"), (packed, "data.examples=seg")):
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(objectives.make(COCO), fresh(COCO), batch, keys_of(batch), None)
