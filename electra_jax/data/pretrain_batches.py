"""Shards to batches, through tf.data.

The example at (seed, epoch, position) is a pure function, so there is no shuffle buffer and no
iterator to save: to resume is to start at another step, and the first step costs what the millionth
does. Every epoch is a full shuffle, and host h of H reads its rows of the same global batch for
any H. TensorFlow is kept off accelerators and is not imported before the first training batch.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from electra_jax.core.batch import Batch
from electra_jax.data import examples, shards
from electra_jax.data.shards import DataError
from electra_jax.data.tokenizer import Vocab

__all__ = ["DataError", "Shards", "eval_batches", "train_batches"]

# Batches read ahead of the one in use, and the threads that read them: for a disk that is slow.
READ_AHEAD = 4
READERS = 2


@dataclasses.dataclass(frozen=True)
class Shards:
  """The examples of one split of a folder that electra_jax.data.build wrote.

  Fields:
    folder: where the files are.
    split: 'train' or 'heldout'.
    manifest: the whole manifest.
    vocab: facts about the vocabulary.
    seq_length: tokens of an example, L.
    num_examples: records of this split, N.
    digest: SHA-256 of the manifest, which holds the sums of all shards: it names the data.
  """

  folder: Path
  split: str
  manifest: dict
  vocab: Vocab
  seq_length: int
  num_examples: int
  digest: str

  @classmethod
  def open(
    cls,
    folder: str | os.PathLike,
    split: str = "train",
    *,
    seq_length: int | None = None,
    verify: bool = False,
  ) -> "Shards":
    """Opens a split after checking that its files are what the manifest says.

    Args:
      folder: config.data.dir.
      split: 'train' or 'heldout'.
      seq_length: the sequence length that is expected, or None for any.
      verify: read every byte and check the SHA-256 sums, not the sizes only.

    Raises:
      DataError: there is no finished build, a file is missing, damaged or not the manifest's, the
        vocabulary is another one, the length differs, or the split is empty.
    """
    manifest = shards.read_manifest(folder)
    folder = Path(folder)
    path = folder / shards.MANIFEST
    try:
      vocab = Vocab.from_json(manifest["vocab"])
      length, count = manifest["seq_length"], manifest["splits"][split]["examples"]
    except (KeyError, TypeError) as error:
      raise DataError(f"{path} is damaged: {error}") from None
    if seq_length not in (None, length):
      raise DataError(f"{path}: shards of {length} tokens, but data.seq_length is {seq_length}")
    shards.check_vocab(folder, vocab)
    shards.check_files(folder, manifest, (split,), verify)
    if not count:
      raise DataError(f"{path}: the {split} split has no example")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return cls(folder, split, manifest, vocab, length, count, digest)

  @property
  def frequencies(self) -> np.ndarray:
    """How often each id occurs in this split, [V] int64; special tokens count nothing."""
    return np.array(self.manifest["splits"][self.split]["frequencies"], np.int64)

  @property
  def unigram_entropy(self) -> float:
    """The entropy of the ordinary tokens' frequencies, in nats a token.

    What a model that knows how frequent each token is, and nothing else, gets as masked-LM loss.
    """
    counts = self.frequencies
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())

  @functools.cached_property
  def _maps(self) -> tuple[np.ndarray, list[np.ndarray]]:
    """The first record's number of each shard, and the shards, mapped into memory."""
    files = self.manifest["splits"][self.split]["shards"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(files) + 512  # a map keeps its file open
    if soft != resource.RLIM_INFINITY and soft < wanted:
      limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
      resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    dtype = examples.record_dtype(self.seq_length, self.vocab.size)
    maps = [np.asarray(np.memmap(self.folder / shard["file"], dtype, "r")) for shard in files]
    return np.cumsum([0] + [len(records) for records in maps[:-1]]), maps

  def read(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns examples by number.

    Args:
      index: [n] numbers below `num_examples`.

    Returns:
      ids [n, L] int32, token_type_ids [n, L] int32 and mask [n, L] bool, as in `Batch`.
    """
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
    return records["ids"].astype(np.int32), second.astype(np.int32), padding_mask


def batch_number(step: int, skipped: Sequence[int]) -> int:
  """Returns which batch a step trains on, both from 0, where some batches are left out.

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

  Row r of step s is position p = s x batch_size + r of an endless sequence of epochs; the example
  there is index_shuffle(p mod N, seed=(seed, p div N)).

  Args:
    skipped: numbers of batches that are left out; the steps after them take the next ones.

  Raises:
    DataError: the corpus is smaller than one batch.
    ValueError: the batch does not divide over the hosts.
  """
  rows = _rows(batch_size, host, hosts)
  if batch_size > data.num_examples:
    raise DataError(
      f"{data.folder}: {data.num_examples} examples are too few for a batch of {batch_size}"
    )
  row = rows.astype(np.int32)
  with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    try:
      for index in _indices(data.num_examples, seed, batch_size, rows, start_step, skipped):
        waiting.append(pool.submit(data.read, index))
        if len(waiting) > READ_AHEAD:
          yield Batch(*waiting.popleft().result(), row)
    finally:
      pool.shutdown(wait=False, cancel_futures=True)


def _indices(
  num_examples: int,
  seed: int,
  batch_size: int,
  rows: np.ndarray,
  start_step: int,
  skipped: Sequence[int],
) -> Iterator[np.ndarray]:
  """Yields [b] numbers of the examples in `rows` of each step, from tf.data, for ever.

  Nothing in this pipeline is Python: a `numpy_function` under way when an iterator is deleted waits
  for the interpreter, which waits for it (seen to hang at exit with TensorFlow 2.21).
  """
  tf = _tensorflow()
  count = tf.constant(num_examples, tf.int64)

  def indices(step):
    position = step * batch_size + tf.constant(rows, tf.int64)
    first, last = step * batch_size // count, ((step + 1) * batch_size - 1) // count

    def shuffled(epoch):
      seeds = tf.stack([tf.constant(seed, tf.int64), epoch])
      return tf.random.experimental.index_shuffle(position % count, seeds, count - 1)

    # A batch touches two epochs at most, mostly one. index_shuffle takes one seed for all of its
    # indices only: a seed for each, as documented, fails in TensorFlow 2.21.
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
  # There is nothing to tune, and who drops an iterator waits for its tuner, which in time looks up
  # once a minute only: a run of an hour took that long to stop (TensorFlow 2.21).
  options.autotune.enabled = False
  yield from dataset.with_options(options).as_numpy_iterator()


def eval_batches(
  data: Shards, *, batch_size: int, max_examples: int, host: int = 0, hosts: int = 1
) -> Iterator[Batch]:
  """Yields this host's rows of batches over at most `max_examples` examples, spread evenly.

  The same examples in the same order for any number of hosts. The last batch is filled up with rows
  that are all padding. `row` is the number of the example within the evaluation.

  Raises:
    ValueError: the batch does not divide over the hosts.
  """
  rows = _rows(batch_size, host, hosts)
  count = min(max_examples, data.num_examples)
  for start in range(0, count, batch_size):
    row = start + rows
    index = np.minimum(row, count - 1) * data.num_examples // count
    ids, token_type_ids, padding_mask = data.read(index)
    extra = row >= count
    ids[extra], token_type_ids[extra], padding_mask[extra] = data.vocab.pad, 0, False
    yield Batch(ids, token_type_ids, padding_mask, row.astype(np.int32))


def _rows(batch_size: int, host: int, hosts: int) -> np.ndarray:
  if batch_size % hosts:
    raise ValueError(f"a batch of {batch_size} does not divide over {hosts} hosts")
  share = batch_size // hosts
  return np.arange(host * share, (host + 1) * share)


def _tensorflow():
  """Imports TensorFlow and hides every accelerator from it: it would take all of their memory."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # it says that it is on, twice, on stderr
  import tensorflow as tf

  for kind in ("GPU", "TPU"):
    tf.config.set_visible_devices([], kind)
  return tf
