"""Reads batches from shards, in an order computed by tf.data.

The example at a position is a pure function of (seed, epoch, position). The reader needs neither a
shuffle buffer nor iterator state, and seeks to any step in constant time. Every epoch is a full
shuffle, and the global batch does not depend on the number of hosts. TensorFlow is imported with
the first training batch, without accelerators; if it is not installed, NumPy computes the same
order.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from electra_jax.core.batch import Batch
from electra_jax.data import examples, mirror, pool, shards
from electra_jax.data.index_shuffle import index_shuffle
from electra_jax.data.shards import DataError
from electra_jax.data.tfds import import_tensorflow
from electra_jax.data.tokenizer import Vocab

READ_AHEAD = 4  # batches read ahead of the current one, for slow disks
READERS = 2  # threads


@dataclasses.dataclass(frozen=True)
class Shards:
  """The examples of one split in a folder written by electra_jax.data.build."""

  folder: Path
  split: str  # 'train' or 'heldout'
  manifest: dict
  vocab: Vocab
  seq_length: int  # tokens of an example, L
  num_examples: int  # records of this split, N
  digest: str  # SHA-256 of the manifest, which holds the checksums of all shards

  @classmethod
  def open(
    cls,
    folder: str | os.PathLike,
    split: str = "train",
    *,
    seq_length: int | None = None,
    verify: bool = False,
  ) -> "Shards":
    """Opens a split after checking its files against the manifest.

    Args:
      folder: a folder, or a URL whose split is copied to the default cache.
      seq_length: the expected sequence length, or None for any.
      verify: check the SHA-256 sum of every file, not only the sizes.

    Raises:
      DataError: the folder has no finished build; a file is missing, damaged or not as in the
        manifest; `seq_length` is not the shards' length; or the split has no examples.
      ValueError, OSError, ModuleNotFoundError: from `mirror.local`, for a URL.
    """
    folder = mirror.local(folder, splits=(split,))
    manifest = shards.read_manifest(folder)
    path = folder / shards.MANIFEST
    vocab = Vocab.from_json(manifest["vocab"])
    length, count = manifest["seq_length"], manifest["splits"][split]["examples"]
    files = manifest["splits"][split]["shards"]
    if seq_length not in (None, length):
      raise DataError(f"{path}: shards have {length} tokens, but data.seq_length is {seq_length}")
    itemsize = shards.layout(manifest).itemsize
    for shard in files:
      if shard["bytes"] != shard["examples"] * itemsize:
        raise DataError(
          f"{path} is damaged: {shard['file']} has {shard['examples']:,} examples of {itemsize}"
          f" bytes, but {shard['bytes']:,} bytes"
        )
    if count != (held := sum(shard["examples"] for shard in files)):
      raise DataError(f"{path} is damaged: {split} has {count:,} examples, but its files {held:,}")
    shards.check_vocab(folder, vocab)
    shards.check_files(folder, manifest, (split,), verify)
    if not count:
      raise DataError(f"{path}: the {split} split has no examples")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return cls(folder, split, manifest, vocab, length, count, digest)

  @property
  def frequencies(self) -> np.ndarray:
    """The count of each id in this split, [V] int64; 0 for special tokens."""
    return np.array(self.manifest["splits"][self.split]["frequencies"], np.int64)

  @functools.cached_property
  def _maps(self) -> tuple[np.ndarray, list[np.ndarray]]:
    """The index of each shard's first record, and the memory-mapped shards."""
    files = self.manifest["splits"][self.split]["shards"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(files) + 512  # a map keeps its file open
    if soft != resource.RLIM_INFINITY and soft < wanted:
      limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
      resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    dtype = shards.layout(self.manifest)
    maps = [np.asarray(np.memmap(self.folder / shard["file"], dtype, "r")) for shard in files]
    return np.cumsum([0] + [len(records) for records in maps[:-1]]), maps

  def read(self, index: np.ndarray, row: np.ndarray | None = None) -> Batch:
    """Returns the examples at `index` [n]; `row` [n] in the global batch is 0, 1, ... if None."""
    starts, maps = self._maps
    if len(maps) == 1:
      records = maps[0][index]
    else:
      records = np.empty(len(index), maps[0].dtype)
      where = np.searchsorted(starts, index, side="right") - 1
      for shard in np.unique(where):
        rows = np.flatnonzero(where == shard)
        records[rows] = maps[shard][index[rows] - starts[shard]]
    column = np.arange(self.seq_length, dtype=np.uint16)
    padding_mask = column < records["length"][:, None]
    second = (column >= records["first"][:, None]) & padding_mask
    row = np.arange(len(index)) if row is None else row
    return Batch(
      records["ids"].astype(np.int32),
      second.astype(np.int32),
      padding_mask,
      row.astype(np.int32),
      examples.document_ids(records),
    )


def batch_number(step: int, skipped: Sequence[int]) -> int:
  """Returns the index of the batch of a step, both from 0, when some batches are skipped.

  >>> [batch_number(step, [2, 3]) for step in range(5)]
  [0, 1, 4, 5, 6]
  """
  for number in sorted(skipped):
    step += number <= step
  return step


def train_batches(
  data: Shards,
  *,
  seed: int,
  batch_size: int,
  start_step: int = 0,
  skipped: Sequence[int] = (),
  host: int = 0,
  hosts: int = 1,
) -> Iterator[Batch]:
  """Yields this host's rows of the global batches of steps start_step, start_step + 1, ...

  Row r of step s is position p = s x batch_size + r of an endless sequence of epochs; its example
  is index_shuffle(p mod N, seed=(seed, p div N)). The `skipped` batches are left out.

  Raises:
    DataError: the corpus is smaller than one batch.
    ValueError: the batch does not divide over the hosts.
  """
  rows = _rows(batch_size, host, hosts)
  if batch_size > data.num_examples:
    raise DataError(
      f"{data.folder}: {data.num_examples} examples are too few for a batch of {batch_size}"
    )
  read = functools.partial(data.read, row=rows)
  with concurrent.futures.ThreadPoolExecutor(READERS) as threads:
    try:
      indices = _indices(data.num_examples, seed, batch_size, rows, start_step, skipped)
      yield from pool.in_order(threads, read, indices, READ_AHEAD)
    finally:
      threads.shutdown(wait=False, cancel_futures=True)


def _indices(num_examples, seed, batch_size, rows, start_step, skipped) -> Iterator[np.ndarray]:
  """Yields the example indices [b] of `rows` for each step, from an endless tf.data pipeline.

  The pipeline runs no Python: deleting an iterator while a `numpy_function` runs deadlocks (seen at
  exit with TensorFlow 2.21).
  """
  try:
    tf = import_tensorflow()
  except ModuleNotFoundError as error:
    if error.name != "tensorflow":
      raise
    yield from _numpy_indices(num_examples, seed, batch_size, rows, start_step, skipped)
    return
  count = tf.constant(num_examples, tf.int64)

  def indices(step):
    position = step * batch_size + tf.constant(rows, tf.int64)
    first, last = step * batch_size // count, ((step + 1) * batch_size - 1) // count

    def shuffled(epoch):
      seeds = tf.stack([tf.constant(seed, tf.int64), epoch])
      return tf.random.experimental.index_shuffle(position % count, seeds, count - 1)

    # A batch spans at most two epochs, usually one. index_shuffle takes a single seed for all
    # indices: a seed per index, as documented, fails in TensorFlow 2.21.
    return tf.cond(
      first == last,
      lambda: shuffled(first),
      lambda: tf.where(position // count == first, shuffled(first), shuffled(last)),
    )

  numbers = tf.data.Dataset.counter(batch_number(start_step, skipped), dtype=tf.int64)
  if skipped:
    left_out = tf.constant(skipped, tf.int64)
    numbers = numbers.filter(lambda number: tf.reduce_all(number != left_out))
  dataset = numbers.map(indices).prefetch(READ_AHEAD)
  options = tf.data.Options()
  options.threading.private_threadpool_size = 1
  # Deleting an iterator waits for its tuner, which in a long run wakes only once a minute
  # (TensorFlow 2.21), and there is nothing to tune.
  options.autotune.enabled = False
  yield from dataset.with_options(options).as_numpy_iterator()


def _numpy_indices(
  num_examples, seed, batch_size, rows, start_step, skipped
) -> Iterator[np.ndarray]:
  """Yields the same indices as `_indices`, without TensorFlow."""
  for step in itertools.count(start_step):
    position = batch_number(step, skipped) * batch_size + rows.astype(np.int64)
    epochs, index = position // num_examples, position % num_examples
    for epoch in np.unique(epochs):
      here = epochs == epoch
      index[here] = index_shuffle(index[here], (seed, int(epoch)), num_examples - 1)
    yield index


def eval_batches(
  data: Shards, *, batch_size: int, max_examples: int, host: int = 0, hosts: int = 1
) -> Iterator[Batch]:
  """Yields this host's rows of batches over at most `max_examples` examples, evenly spaced.

  The examples and their order do not depend on the number of hosts. The last batch is filled up
  with padding rows. `row` is the index of the example within the evaluation.

  Raises:
    ValueError: the batch does not divide over the hosts.
  """
  rows = _rows(batch_size, host, hosts)
  count = min(max_examples, data.num_examples)
  for start in range(0, count, batch_size):
    row = start + rows
    index = np.minimum(row, count - 1) * data.num_examples // count
    batch, extra = data.read(index, row), row >= count
    batch.ids[extra], batch.token_type_ids[extra] = data.vocab.pad, 0
    batch.padding_mask[extra] = False
    if batch.document_ids is not None:
      batch.document_ids[extra] = 0
    yield batch


def _rows(batch_size: int, host: int, hosts: int) -> np.ndarray:
  if batch_size % hosts:
    raise ValueError(f"a batch of {batch_size} is not divisible by {hosts} hosts")
  share = batch_size // hosts
  return np.arange(host * share, (host + 1) * share)
