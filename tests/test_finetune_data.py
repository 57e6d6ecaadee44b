"""Batches for fine-tuning: every example once, few lengths, the same lengths for every seed."""

import itertools

import numpy as np
import pytest

from electra_jax.finetune import batches as data
from electra_jax.finetune.batches import Feature, Plan


def some_lengths(n=101, seed=0):
  return np.random.default_rng(seed).integers(3, 60, n)


def some_features(n=21) -> list[Feature]:
  rng = np.random.default_rng(1)
  made = []
  for i, length in enumerate(some_lengths(n)):
    target = {"label": np.int32(i), "tag": rng.integers(1, 9, length)}
    made.append(Feature(rng.integers(1, 99, length).astype(np.int32), int(length) // 2, target))
  return made


@pytest.mark.parametrize("most", [1, 2, 3, 4, 99])
def test_bucket_lengths_pad_least_of_all_choices(most):
  lengths = some_lengths()
  found = data.bucket_lengths(lengths, most)
  steps = sorted({-(-int(n) // data.ROUND) * data.ROUND for n in lengths})

  def tokens(buckets):
    return sum(min(b for b in buckets if b >= n) for n in lengths)

  choices = itertools.combinations(steps[:-1], min(most, len(steps)) - 1)
  assert tokens(found) == min(tokens((*choice, steps[-1])) for choice in choices)
  assert len(found) <= most and found[-1] == steps[-1]


@pytest.mark.parametrize("batch_size", [1, 8, 200])
def test_an_epoch_has_every_example_once_and_one_batch_that_is_not_full(batch_size):
  lengths = some_lengths()
  buckets = data.bucket_lengths(lengths, 4)
  plans = data.plan_epoch(lengths, buckets, batch_size, seed=3, epoch=0)
  assert sorted(np.concatenate([p.rows for p in plans])) == list(range(len(lengths)))
  assert sum(len(p.rows) != batch_size for p in plans) == bool(len(lengths) % batch_size)
  assert all(lengths[p.rows].max() <= p.length for p in plans)


def test_the_lengths_of_the_batches_depend_on_the_epoch_and_not_on_the_seed():
  lengths = some_lengths()
  buckets = data.bucket_lengths(lengths, 4)
  epochs = {}
  for seed, epoch in itertools.product((0, 1), (0, 1)):
    epochs[seed, epoch] = data.plan_epoch(lengths, buckets, 8, seed, epoch)
  shapes = {at: [p.length for p in plans] for at, plans in epochs.items()}
  assert shapes[0, 0] == shapes[1, 0] != shapes[0, 1]
  rows = {at: [p.rows.tolist() for p in plans] for at, plans in epochs.items()}
  assert rows[0, 0] != rows[1, 0]
  again = data.plan_epoch(lengths, buckets, 8, 0, 0)
  assert [p.rows.tolist() for p in again] == rows[0, 0]


def test_what_is_evaluated_is_every_example_once_the_shortest_first():
  lengths = some_lengths()
  plans = data.plan_once(lengths, data.bucket_lengths(lengths, 3), 16)
  assert sorted(np.concatenate([p.rows for p in plans])) == list(range(len(lengths)))
  assert [p.length for p in plans] == sorted(p.length for p in plans)
  assert all(lengths[p.rows].max() <= p.length for p in plans)


def test_a_batch_holds_its_rows_and_padding_that_is_marked():
  features = some_features()
  batch = data.collate(features, Plan(np.array([4, 2]), 64), batch_size=3, pad=7)
  for place, row in enumerate((4, 2)):
    feature, n = features[row], len(features[row].ids)
    assert batch.ids[place, :n].tolist() == feature.ids.tolist()
    assert (batch.ids[place, n:] == 7).all()
    assert batch.padding_mask[place].sum() == n and batch.padding_mask[place, :n].all()
    segments = [0] * feature.second + [1] * (n - feature.second) + [0] * (64 - n)
    assert batch.token_type_ids[place].tolist() == segments
    assert batch.target["label"][place] == row
    assert batch.target["tag"][place].tolist() == [*feature.target["tag"], *[0] * (64 - n)]
  assert not batch.padding_mask[2].any() and (batch.ids[2] == 7).all()
  assert batch.row.tolist() == [0, 1, 2]


def test_seeds_travel_together_and_each_sees_what_it_would_see_alone():
  features = some_features()
  options = {"buckets": (16, 64), "batch_size": 4, "epochs": 1.5, "pad": 0}
  together = list(data.batches(features, seeds=(5, 6), **options))
  alone = list(data.batches(features, seeds=(6,), **options))
  assert len(together) == len(alone) == data.steps_of(len(features), 4, 1.5) == 9
  for both, one in zip(together, alone, strict=True):
    assert both.ids.shape[:2] == (4, 2) and both.row.shape == (4, 2)
    np.testing.assert_array_equal(both.ids[:, 1], one.ids[:, 0])
    np.testing.assert_array_equal(both.target["tag"][:, 1], one.target["tag"][:, 0])
