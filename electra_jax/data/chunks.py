"""Documents in, records out, on many cores: the same bytes for any number of them.

The text is cut into chunks of about `CHUNK_BYTES` at ends of documents. A chunk's records depend
on its text, its number and the seed, and results are taken in order, so which process worked on it
does not show. A bounded number of chunks is under way, so memory does not grow with the corpus.
"""

import dataclasses
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from electra_jax.data import examples, pool, sources
from electra_jax.data import tokenizer as tokenizers
from electra_jax.data.examples import ExampleSpec
from electra_jax.data.shards import SPLITS

CHUNK_BYTES = 1 << 20
# Chunks under way per process: one at work, one waiting.
IN_FLIGHT = 2


class Chunk(NamedTuple):
  """Documents that one process works on; `texts[split]` holds those of a split, in order."""

  index: int
  texts: dict[str, list[str]]
  size: int


class EncodedSplit(NamedTuple):
  """What became of one split of a chunk.

  Fields:
    data: records [n], or the packed stream of ids [n].
    tokens: ids of the text, before anything is discarded.
    discarded: ids that are in no record.
  """

  data: np.ndarray
  tokens: int
  discarded: int


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
  """All that a process needs: it is started fresh and knows nothing else."""

  folder: str  # where the vocabulary file is
  vocab: tokenizers.Vocab
  spec: ExampleSpec
  seed: int


def chunks(pieces: Iterable[sources.TextChunk], holdout_frac: float) -> Iterator[Chunk]:
  """Yields chunks; a document is held out by its hash alone, and then only once."""
  index, size = 0, 0
  texts: dict[str, list[str]] = {split: [] for split in SPLITS}
  for piece in pieces:
    held_out = is_held_out(piece.key, holdout_frac)
    if held_out and piece.repeat:
      continue
    texts["heldout" if held_out else "train"].append(piece.text)
    size += piece.size
    if size >= CHUNK_BYTES:
      yield Chunk(index, texts, size)
      index, size, texts = index + 1, 0, {split: [] for split in SPLITS}
  if size:
    yield Chunk(index, texts, size)


def is_held_out(key: bytes, holdout_frac: float) -> bool:
  """Says whether the document with this key is kept for evaluation."""
  return sources.fraction(key, "heldout") < holdout_frac


class Worker:
  """Turns chunks into records."""

  def __init__(self, work: WorkerSpec):
    self._work = work
    self._tokenizer = tokenizers.load_from(work.folder, work.vocab)
    self._dtype = examples.record_dtype(work.spec.seq_length, work.vocab.size)

  def __call__(self, chunk: Chunk) -> tuple[int, dict[str, EncodedSplit]]:
    """Returns the size of a chunk in bytes and what became of each split."""
    return chunk.size, {
      split: self._part(texts, random.Random(f"{self._work.seed} {chunk.index} {split}"))
      for split, texts in chunk.texts.items()
    }

  def _part(self, texts: list[str], rng: random.Random) -> EncodedSplit:
    spec = self._work.spec
    split_lines = spec.examples == "segments" and spec.split_lines
    documents = [
      [part for line in text.split("\n") for part in examples.sentences(line)]
      if split_lines
      else text.split("\n")
      for text in texts
    ]
    encoded = iter(self._tokenizer.encode_batch([line for lines in documents for line in lines]))
    ids = [[next(encoded) for _ in lines] for lines in documents]
    tokens = sum(len(line) for lines in ids for line in lines)
    if spec.examples == "packed":
      return EncodedSplit(examples.stream(ids, spec, self._dtype), tokens, 0)
    if split_lines:
      ids = [[part for line in lines for part in examples.cut(line, spec)] for lines in ids]
    made = examples.two_segment(ids, spec, rng)
    records, discarded = examples.to_records(made, spec, self._dtype)
    return EncodedSplit(records, tokens, discarded)


_worker: Worker | None = None


def _prepare(work: WorkerSpec) -> None:
  global _worker
  _worker = Worker(work)


def _run(chunk: Chunk) -> tuple[int, dict[str, EncodedSplit]]:
  return _worker(chunk)


def process(work: WorkerSpec, items: Iterable[Chunk], workers: int) -> Iterator[tuple[int, dict]]:
  """Yields what `Worker` returns for each chunk, in order, computed by `workers` processes."""
  if workers == 1:
    yield from map(Worker(work), items)
    return
  with pool.start(workers, _prepare, work) as executor:
    yield from pool.in_order(executor, _run, items, IN_FLIGHT * workers)
