"""Turns documents into records on many cores; the bytes do not depend on the number of cores.

Text is split into chunks of about `CHUNK_BYTES` between documents, or inside one longer than
`sources.PIECE_BYTES`. A chunk's records depend only on its text, its index and the seed, and are
collected in order. The number of pending chunks is bounded, and so is memory.
"""

import dataclasses
import functools
import random
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from electra_jax.data import examples, pool, sources
from electra_jax.data import tokenizer as tokenizers
from electra_jax.data.examples import ExampleSpec
from electra_jax.data.shards import SPLITS

CHUNK_BYTES = 1 << 20
IN_FLIGHT = 2  # chunks per process: one running, one queued


class Chunk(NamedTuple):
  """Documents for one process; `texts[split]` holds a split's documents in order."""

  index: int
  texts: dict[str, list[str]]
  size: int  # UTF-8 bytes
  last: bool  # the last chunk of its part


class EncodedSplit(NamedTuple):
  """The encoded documents of one split of a chunk."""

  data: np.ndarray  # records [n], or the packed stream of ids [n]
  tokens: int  # token ids of the text before discarding
  discarded: int  # token ids in no record
  text: Mapping[str, int]  # the counts of `parts.TEXT_COUNTS`


class EncodedChunk(NamedTuple):
  """The encoded documents of a chunk."""

  splits: dict[str, EncodedSplit]
  size: int
  last: bool


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
  """The settings sent to each worker process, which inherits no state."""

  folder: str  # of the vocabulary file
  vocab: tokenizers.Vocab
  spec: ExampleSpec
  seed: int


def chunks(
  text_chunks: Iterable[sources.TextChunk], holdout_frac: float, part: int = 0
) -> Iterator[Chunk]:
  """Yields the chunks of a part, of which the last may be empty.

  Held-out documents are chosen by hash alone and never repeated.
  """
  index, size = part << 32, 0  # so that random numbers differ between parts
  texts: dict[str, list[str]] = {split: [] for split in SPLITS}
  for text in text_chunks:
    held_out = is_held_out(text.key, holdout_frac)
    if held_out and text.repeat:
      continue
    texts["heldout" if held_out else "train"].append(text.text)
    size += text.size
    if size >= CHUNK_BYTES:
      yield Chunk(index, texts, size, last=False)
      index, size, texts = index + 1, 0, {split: [] for split in SPLITS}
  yield Chunk(index, texts, size, last=True)


def is_held_out(key: bytes, holdout_frac: float) -> bool:
  """Returns whether the document with this key is held out for evaluation."""
  return sources.fraction(key, "heldout") < holdout_frac


def encode(work: WorkerSpec, chunk: Chunk) -> EncodedChunk:
  """Turns the documents of a chunk into records."""
  splits = {
    split: _encode_split(work, texts, random.Random(f"{work.seed} {chunk.index} {split}"))
    for split, texts in chunk.texts.items()
  }
  return EncodedChunk(splits, chunk.size, chunk.last)


def _encode_split(work: WorkerSpec, texts: list[str], rng: random.Random) -> EncodedSplit:
  tokenizer, spec = _tokenizer(work.folder, work.vocab, threading.get_ident()), work.spec
  dtype = examples.record_dtype(spec.seq_length, work.vocab.size)
  documents = [text.split("\n") for text in texts]
  lines = sum(map(len, documents))
  split_lines = spec.examples == "segments" and spec.split_lines
  if split_lines:
    documents = [[s for line in lines for s in examples.sentences(line)] for lines in documents]
  documents = list(map(tokenizer.spaced, texts, documents))
  with tokenizer.counting() as counts:
    encoded = iter(tokenizer.encode_batch([line for lines in documents for line in lines]))
  counts["lines"] = lines
  ids = [[next(encoded) for _ in lines] for lines in documents]
  tokens = sum(len(line) for lines in ids for line in lines)
  if spec.examples == "packed":
    return EncodedSplit(examples.stream(ids, spec, dtype), tokens, 0, counts)
  if split_lines:
    ids = [[part for line in lines for part in examples.cut(line, spec)] for lines in ids]
  records, discarded = examples.to_records(examples.two_segment(ids, spec, rng), spec, dtype)
  return EncodedSplit(records, tokens, discarded, counts)


@functools.lru_cache(maxsize=64)
def _tokenizer(folder: str, vocab: tokenizers.Vocab, thread: int) -> tokenizers.Tokenizer:
  """Returns the thread's tokenizer, which caches words of earlier chunks and parts."""
  return tokenizers.load_from(folder, vocab)


def process(work: WorkerSpec, items: Iterable[Chunk], workers: int) -> Iterator[EncodedChunk]:
  """Yields the encoded chunks in order, computed by `workers` processes."""
  return pool.mapped(workers, functools.partial(encode, work), items, IN_FLIGHT)
