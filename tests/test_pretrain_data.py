"""Batches: a pure function of (seed, epoch, position), for any host count and any first step."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from test_build import make_config

from electra_jax.data import build, pretrain_batches, shards, tfds
from electra_jax.data.index_shuffle import index_shuffle
from electra_jax.data.pretrain_batches import Shards, eval_batches, train_batches
from electra_jax.data.shards import DataError


def built(folder, **options):
  config = make_config(folder, examples_per_shard=50, holdout_frac=0.2, **options)
  build.build(config)
  return Path(config.data.dir)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """About 400 examples of 16 tokens in shards of 50."""
  return built(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
  return Shards.open(built(tmp_path_factory.mktemp("packed"), examples="packed"))


@pytest.fixture
def data(folder):
  return Shards.open(folder, verify=True)


@pytest.fixture
def copy(folder, tmp_path):
  """A copy that a test may damage."""
  return shutil.copytree(folder, tmp_path, dirs_exist_ok=True)


def take(data, count, **options):
  return list(itertools.islice(train_batches(data, **options), count))


def assert_equal(first, second):
  for a, b in zip(first, second, strict=True):
    if a is not None or b is not None:
      np.testing.assert_array_equal(a, b)
      assert a.dtype == b.dtype


def joined(parts):
  """Returns the rows of several batches as one batch."""
  return jax.tree.map(lambda *fields: np.concatenate(fields), *parts)


def test_batches_have_the_shapes_and_types_of_batch(data):
  (batch,) = take(data, 1, seed=0, batch_size=8)
  assert batch.document_ids is None and batch.target is None
  assert [x.shape for x in batch[:4]] == [(8, 16), (8, 16), (8, 16), (8,)]
  assert [x.dtype for x in batch[:4]] == [np.int32, np.int32, bool, np.int32]
  assert batch.row.tolist() == list(range(8))


def test_packed_batches_say_which_document_a_token_belongs_to(packed):
  for batch in take(packed, 5, seed=0, batch_size=32):
    assert batch.document_ids.dtype == np.int32
    starts = np.cumsum(batch.ids == packed.vocab.cls, axis=1)
    np.testing.assert_array_equal(batch.document_ids, starts * batch.padding_mask)
  *_, last = eval_batches(packed, batch_size=64, max_examples=65)
  assert last.document_ids[0].any() and not last.document_ids[1:].any()


def test_packed_shards_of_an_earlier_version_have_one_document_a_row(packed, tmp_path):
  shutil.copytree(packed.folder, tmp_path, dirs_exist_ok=True)
  old = json.loads((tmp_path / "manifest.json").read_text())
  del old["document_starts"]
  for split in old["splits"].values():
    for shard in split["shards"]:
      records = np.fromfile(tmp_path / shard["file"], shards.layout(packed.manifest))
      written = records[["length", "first", "ids"]].astype(np.dtype([
        ("length", "<u2"), ("first", "<u2"), ("ids", "<u2", 16)
      ])).tobytes()  # fmt: skip
      (tmp_path / shard["file"]).write_bytes(written)
      shard["bytes"] = len(written)
  (tmp_path / "manifest.json").write_text(json.dumps(old))
  batch = Shards.open(tmp_path).read(np.arange(4))
  assert batch.document_ids is None
  np.testing.assert_array_equal(batch.ids, packed.read(np.arange(4)).ids)


def test_segments_and_padding_follow_the_separators(data):
  vocab = data.vocab
  for batch in take(data, 5, seed=0, batch_size=32):
    for ids, token_type_ids, mask in zip(*batch[:3], strict=True):
      length = mask.sum()
      assert mask[:length].all() and (ids[length:] == vocab.pad).all()
      assert ids[0] == vocab.cls and ids[length - 1] == vocab.sep
      ends = np.flatnonzero(ids == vocab.sep)
      expected = np.zeros(16, int)
      if len(ends) == 2:
        expected[ends[0] + 1 : ends[1] + 1] = 1
      assert token_type_ids.tolist() == expected.tolist()


@pytest.mark.parametrize("share", [0.02, 1])  # of all examples in a batch
def test_every_epoch_is_another_permutation_of_all_examples(data, share):
  count, size = data.num_examples, int(share * data.num_examples)
  batches = take(data, 3 * count // size + 1, seed=3, batch_size=size)
  rows = np.concatenate([batch.ids for batch in batches])
  whole = sorted(ids.tobytes() for ids in data.read(np.arange(count))[0])
  epochs = [[ids.tobytes() for ids in rows[i * count : (i + 1) * count]] for i in range(3)]
  assert all(sorted(epoch) == whole for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2]
  moved = np.mean([a != b for a, b in zip(epochs[0], epochs[1], strict=True)])
  assert moved > 0.95


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 1000])
def test_index_shuffle_is_a_permutation_of_any_number_of_examples(count):
  orders = [index_shuffle(np.arange(count), (9, epoch), count - 1) for epoch in range(3)]
  assert all(sorted(order.tolist()) == list(range(count)) for order in orders)
  if count > 15:
    assert not np.array_equal(orders[0], orders[1])


def test_numpys_order_is_tensorflows_which_is_pinned():
  import tensorflow as tf

  rng = np.random.default_rng(0)
  powers = [2**n + d for n in (6, 15, 16, 17, 18, 20, 33) for d in (-1, 0, 1)]
  # A small range takes 2^16 / size rounds for each number.
  for most in [0, 1, 5, *powers, *(int(2**x) for x in rng.uniform(6, 45, 100))]:
    index, seed = rng.integers(0, most + 1, 20), rng.integers(-(2**62), 2**62, 2)
    expected = tf.random.experimental.index_shuffle(index, seed, np.int64(most)).numpy()
    found = index_shuffle(index, (int(seed[0]), int(seed[1])), most)
    np.testing.assert_array_equal(found, expected, err_msg=str(most))
  # A resumed run relies on the order: a library that shuffles differently must not go unnoticed.
  order = tf.random.experimental.index_shuffle(tf.range(8, dtype=tf.int64), [3, 1], 99).numpy()
  assert order.tolist() == [10, 34, 5, 1, 66, 45, 51, 40]


@pytest.mark.parametrize("host", [0, 1])
def test_batches_are_the_same_without_tensorflow(data, host, monkeypatch):
  """Over the end of an epoch, with batches left out, for each host."""
  last = data.num_examples // 8  # its batch is of two epochs, if 8 does not divide the examples
  assert data.num_examples % 8
  options = {"seed": 5, "batch_size": 8, "host": host, "hosts": 2}
  options |= {"start_step": last - 3, "skipped": (2, last - 1)}
  expected = take(data, 6, **options)
  monkeypatch.setitem(sys.modules, "tensorflow", None)
  with pytest.raises(ModuleNotFoundError):
    tfds.import_tensorflow()
  for found, right in zip(take(data, 6, **options), expected, strict=True):
    assert_equal(found, right)


def test_another_seed_is_another_order(data):
  (first,), (second,) = (take(data, 1, seed=seed, batch_size=16) for seed in (0, 1))
  assert not np.array_equal(first.ids, second.ids)


@pytest.mark.parametrize("start", [0, 2, 3, 40])
def test_batches_that_are_left_out_are_the_only_ones_missing(data, start):
  left_out = (2, 3, 41)
  batches = take(data, 60, seed=0, batch_size=16)
  kept = [batch for number, batch in enumerate(batches) if number not in left_out]
  found = take(data, 5, seed=0, batch_size=16, start_step=start, skipped=left_out)
  for ours, theirs in zip(found, kept[start : start + 5], strict=True):
    assert np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.row, theirs.row)


@pytest.mark.parametrize("start", [1, 13, 100, 1_000_000, 10**12])
def test_starting_at_a_step_equals_reaching_it(data, start):
  (found,) = take(data, 1, seed=0, batch_size=16, start_step=start)
  if start <= 100:
    expected = take(data, start + 1, seed=0, batch_size=16)[-1]
  else:
    position, count = start * 16 + np.arange(16), data.num_examples
    index = [index_shuffle(np.array([p % count]), (0, p // count), count - 1) for p in position]
    expected = data.read(np.concatenate(index))
  assert_equal(found, expected)


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_the_hosts_slices_are_one_global_batch(data, hosts):
  options = {"seed": 5, "batch_size": 12, "start_step": data.num_examples // 12 - 1}
  whole = take(data, 3, **options)  # over the end of an epoch
  parts = [take(data, 3, host=host, hosts=hosts, **options) for host in range(hosts)]
  for step in range(3):
    rows = joined([p[step] for p in parts])
    assert_equal(rows, whole[step])


def test_evaluation_uses_a_fixed_even_subset_once_and_pads_the_end(folder):
  data = Shards.open(folder, "heldout")
  count = data.num_examples
  assert count > 50
  batches = list(eval_batches(data, batch_size=16, max_examples=41))
  assert [batch.padding_mask.any(axis=1).sum() for batch in batches] == [16, 16, 9]
  assert np.concatenate([batch.row for batch in batches]).tolist() == list(range(48))
  assert (batches[-1].ids[9:] == data.vocab.pad).all()
  found = np.concatenate([batch.ids for batch in batches])[:41]
  index = np.arange(41) * count // 41
  np.testing.assert_array_equal(found, data.read(index)[0])
  assert index[-1] > 0.9 * count and len(set(index)) == 41
  everything = list(eval_batches(data, batch_size=16, max_examples=10**6))
  assert sum(batch.padding_mask.any(axis=1).sum() for batch in everything) == count


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_share_the_evaluation(folder, hosts):
  data = Shards.open(folder, "heldout")
  whole = list(eval_batches(data, batch_size=8, max_examples=21))
  parts = [
    list(eval_batches(data, batch_size=8, max_examples=21, host=h, hosts=hosts))
    for h in range(hosts)
  ]
  for batch, *slices in zip(whole, *parts, strict=True):
    assert_equal(joined(slices), batch)


# What is refused.


def test_a_corpus_too_small_for_one_batch_is_refused_with_both_numbers(data):
  with pytest.raises(DataError, match=f"{data.num_examples} examples.*batch of 5000"):
    take(data, 1, seed=0, batch_size=5000)


def test_a_batch_that_does_not_divide_over_hosts_is_refused(data):
  with pytest.raises(ValueError, match="batch of 9 .* 2 hosts"):
    take(data, 1, seed=0, batch_size=9, hosts=2)


def first_shard(folder) -> Path:
  return sorted(Path(folder).glob("train-00000-*"))[0]


def test_a_missing_shard_is_refused(copy):
  first_shard(copy).unlink()
  with pytest.raises(DataError, match="train-00000.*No such file"):
    Shards.open(copy)


@pytest.mark.parametrize("size", [0, 100])
def test_an_empty_or_truncated_shard_is_refused_with_both_sizes(copy, size):
  path = first_shard(copy)
  whole = path.stat().st_size
  path.write_bytes(path.read_bytes()[:size])
  with pytest.raises(
    DataError, match=f"{path.name} has {size} bytes, but the manifest says {whole}"
  ):
    Shards.open(copy)
  assert Shards.open(copy, "heldout").num_examples > 0


def test_a_flipped_bit_is_found_by_verify(copy):
  path = first_shard(copy)
  content = bytearray(path.read_bytes())
  content[777] ^= 4
  path.write_bytes(content)
  Shards.open(copy)
  with pytest.raises(DataError, match=f"{path.name} is damaged"):
    Shards.open(copy, verify=True)


def merged(was, change):
  """Returns `was` with the fields of `change`, those of fields included; {} stays empty."""
  if not (isinstance(was, dict) and isinstance(change, dict) and change):
    return change
  return was | {key: merged(was.get(key), value) for key, value in change.items()}


@pytest.mark.parametrize(
  "change, message",
  [
    ({"version": 99}, "format version 99, but must have 1"),
    ({"format": "other"}, "not a manifest of shards"),
    ({"vocab": {}}, "is damaged"),
    ({"splits": {}}, "is damaged"),
    ({"vocab": "words"}, "is damaged"),
    ({"vocab": {"size": "many"}}, "is damaged: 'many' is not of type int"),
    ({"vocab": {"file": 7}}, "is damaged: 7 is not of type str"),
    ({"seq_length": None}, "is damaged: None is not of type int"),
    ({"sources": None}, "is damaged"),
    ({"splits": {"train": {"frequencies": ["x"]}}}, "is damaged: 'x' is not of type int"),
    ({"splits": {"train": {"shards": [{"examples": 1}]}}}, "is damaged: KeyError 'bytes'"),
  ],
)
def test_another_manifest_is_refused(copy, change, message):
  path = copy / shards.MANIFEST
  path.write_text(json.dumps(merged(json.loads(path.read_text()), change)))
  with pytest.raises(DataError, match=message):
    Shards.open(copy)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_manifest_is_refused(copy, content):
  (copy / shards.MANIFEST).write_bytes(content)
  with pytest.raises(DataError, match="manifest.json"):
    Shards.open(copy)


def test_an_empty_split_is_refused(tmp_path):
  config = make_config(tmp_path, holdout_frac=0.0)
  build.build(config)
  with pytest.raises(DataError, match="heldout split has no example"):
    Shards.open(config.data.dir, "heldout")


def test_the_digest_names_the_data(folder, copy):
  assert Shards.open(folder).digest == Shards.open(copy).digest
  path = copy / shards.MANIFEST
  path.write_text(path.read_text() + " ")
  assert Shards.open(folder).digest != Shards.open(copy).digest


def test_shards_open_and_evaluate_without_tensorflow(folder):
  program = (
    "import sys; sys.modules['tensorflow'] = None\n"
    "from electra_jax.data.pretrain_batches import Shards, eval_batches\n"
    f"data = Shards.open({str(folder)!r}, 'heldout', verify=True)\n"
    "assert next(eval_batches(data, batch_size=4, max_examples=4)).padding_mask.any()\n"
  )
  subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_tensorflow_sees_no_accelerator():
  tf = tfds.import_tensorflow()
  assert tf.config.get_visible_devices("GPU") == [] and tf.config.get_visible_devices("TPU") == []


def test_an_order_has_no_thread_that_tunes_it():
  """Who drops an iterator waits for its tuner, which after an hour looks up once a minute."""

  def threads() -> int:
    return len(os.listdir("/proc/self/task"))

  def order():
    order = pretrain_batches._indices(100, 0, 4, np.arange(4), 0, ())
    next(order)
    return order

  kept = [order()]  # and what all share
  before = threads()
  kept += [order() for _ in range(8)]
  # Each has one of its own and one of what it has read ahead; four with a tuner.
  assert (threads() - before) / 8 <= 2
