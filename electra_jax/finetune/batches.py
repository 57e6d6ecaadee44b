"""Makes fine-tuning batches from examples in memory, padded to one of a few lengths.

A batch has examples of similar length to limit padding. Its rows depend on the seed but its padded
length does not, so that the batches of several seeds can be stacked.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from electra_jax.core.batch import Batch

ROUND = 8  # lengths are multiples of this
T = TypeVar("T")


class Feature(NamedTuple):
  """One row of a batch."""

  ids: np.ndarray  # [n] int32, with [CLS] and [SEP]
  second: int  # start of the second segment; n if there is none
  # A number for the row or [n] for its tokens; {} to predict. "document_ids" become the batch's
  target: dict[str, np.ndarray]


class Plan(NamedTuple):
  """The rows of a batch and its padded length."""

  rows: np.ndarray  # indices of features, [<= batch size]
  length: int


def subset(items: Sequence[T], most: int | None) -> list[T]:
  """Returns at most `most` items (None: all), evenly spaced, because the items may be sorted."""
  count = len(items) if most is None else min(most, len(items))
  return [items[i * len(items) // count] for i in range(count)]


def bucket_lengths(
  lengths: np.ndarray, most: int, max_positions: float = np.inf, max_length: int | None = None
) -> tuple[int, ...]:
  """Returns at most `most` lengths with the least padding for `lengths` [n]; 0: `max_length` alone.

  They are multiples of ROUND, limited to the network's `max_positions`; only rows of several
  documents are longer.

  >>> bucket_lengths(np.array([5, 6, 7, 30, 31, 60]), 2, max_positions=62)
  (8, 62)
  >>> bucket_lengths(np.array([5, 6, 7, 30, 31, 60]), 3)
  (8, 32, 64)
  >>> bucket_lengths(np.array([5, 6, 7, 30, 31, 60]), 0, max_length=128)
  (128,)
  """
  longest = np.max(lengths, initial=0)
  lengths, most = (lengths, most) if most else ([max(max_length, longest)], 1)
  steps, counts = np.unique(-(-np.asarray(lengths) // ROUND), return_counts=True)
  below = np.concatenate([[0], np.cumsum(counts)])
  # options[j]: the padded tokens and the ends of the buckets for the first j distinct lengths.
  options = [(0.0, ())] + [(np.inf, ())] * len(steps)
  best = options[-1]
  for _ in range(min(most, len(steps))):
    options = [(np.inf, ())] + [
      min(
        (cost + steps[j] * (below[j + 1] - below[i]), (*ends, j))
        for i, (cost, ends) in enumerate(options[: j + 1])
      )
      for j in range(len(steps))
    ]
    best = min(best, options[-1])
  return tuple(min(int(steps[j]) * ROUND, max(max_positions, longest)) for j in best[1])


def plan_epoch(
  lengths: np.ndarray, buckets: Sequence[int], batch_size: int, seed: int, epoch: int
) -> list[Plan]:
  """Returns an epoch's batches in order, with every example once and all batches full but one.

  Rows depend on (seed, epoch), padded lengths only on the epoch. Examples that do not fill a batch
  move to the next longer bucket. `buckets` increase, and the last one is at least the longest
  example.
  """
  rng = np.random.default_rng((seed, epoch))
  bucket_of = np.searchsorted(buckets, lengths)
  plans, rest = [], np.zeros(0, np.int64)
  for bucket, length in enumerate(buckets):
    rows = rng.permutation(np.concatenate([rest, np.flatnonzero(bucket_of == bucket)]))
    full = len(rows) - len(rows) % batch_size
    plans += [Plan(rows[i : i + batch_size], length) for i in range(0, full, batch_size)]
    rest = rows[full:]
  if len(rest):
    plans.append(Plan(rest, buckets[-1]))
  order = np.random.default_rng(epoch).permutation(len(plans))
  return [plans[i] for i in order]


def plan_once(lengths: np.ndarray, buckets: Sequence[int], batch_size: int) -> list[Plan]:
  """Returns batches with every example once, the shortest first."""
  order = np.argsort(lengths, kind="stable")
  groups = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
  return [Plan(g, int(buckets[np.searchsorted(buckets, lengths[g].max())])) for g in groups]


def collate(features: Sequence[Feature], plan: Plan, batch_size: int, pad: int) -> Batch:
  """Returns a batch [batch_size, plan.length] whose missing rows are padding."""
  B, L = batch_size, plan.length
  ids = np.full((B, L), pad, np.int32)
  token_type_ids, padding_mask = np.zeros((B, L), np.int32), np.zeros((B, L), bool)
  target: dict[str, np.ndarray] = {}
  for place, row in enumerate(plan.rows):
    feature = features[row]
    n = len(feature.ids)
    ids[place, :n], padding_mask[place, :n] = feature.ids, True
    token_type_ids[place, feature.second : n] = 1
    for name, value in feature.target.items():
      value = np.asarray(value)
      if name not in target:
        target[name] = np.zeros((B, L) if value.ndim else B, value.dtype)
      target[name][(place, slice(n)) if value.ndim else place] = value
  row, documents = np.arange(B, dtype=np.int32), target.pop("document_ids", None)
  return Batch(ids, token_type_ids, padding_mask, row, documents, target)


def batches(
  features: Sequence[Feature],
  *,
  buckets: Sequence[int],
  batch_size: int,
  epochs: float,
  seeds: Sequence[int],
  pad: int,
) -> Iterator[Batch]:
  """Yields the batches of all seeds, stacked: [B, S, L], [B, S]; `epochs` may be fractional."""
  lengths = np.array([len(f.ids) for f in features])
  left = steps_of(len(features), batch_size, epochs)
  epoch = 0
  while left:
    plans = [plan_epoch(lengths, buckets, batch_size, seed, epoch) for seed in seeds]
    for together in list(zip(*plans, strict=True))[:left]:
      parts = [collate(features, plan, batch_size, pad) for plan in together]
      yield jax.tree.map(lambda *of_seeds: np.stack(of_seeds, 1), *parts)
      left -= 1
    epoch += 1


def steps_of(examples: int, batch_size: int, epochs: float) -> int:
  """Returns the number of steps; an epoch's last batch may be smaller than the others."""
  return round(-(-examples // batch_size) * epochs)
