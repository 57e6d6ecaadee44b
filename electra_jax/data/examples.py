"""Turns tokenized text into fixed-size records: the paper's two-segment examples or packed rows.

A record is one example, little-endian; record i of a shard starts at byte
i x `record_dtype(...).itemsize`:

  length  uint16        tokens, special tokens included; the rest is padding
  first   uint16        tokens of the first segment with its [CLS] and [SEP]
  ids     uint16 [L]    uint32 if the vocabulary has more than 65,536 entries
  starts  uint8 [L / 8] packed records only: bit i % 8 of byte i // 8 is set where a document starts
"""

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Iterable, Iterator

import numpy as np

from electra_jax.core.batch import TOKENS_PER_DOCUMENT

# A space after the end of a sentence and before a possible start.
_SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]’”])) +(?=["'(\[‘“]?[^\W_a-z])""")
# In other scripts, in Oniguruma's syntax: a Sentence_Terminal, closing punctuation, then space; not
# before what continues a sentence (UAX #29, SB8a), nor at a full-width point before a digit.
_OTHER_END = (
  r"(?:[\p{Sentence_Terminal}&&[^\x00-\x7f․﹒．]]|[․﹒．](?!\p{N}))"
  r"""[\p{Sentence_Terminal}\p{Pe}\p{Pf}"']*+\s*+(?![-–—,:;،؛、，：；]|\z)"""
)


@dataclasses.dataclass(frozen=True)
class ExampleSpec:
  """The example fields of config.data, plus the special ids."""

  seq_length: int
  examples: str
  split_lines: bool
  short_prob: float
  short_min_tokens: int
  single_segment_prob: float
  boundary_prob: float
  cls: int
  sep: int
  pad: int


# A document is split at the end of a packed record if at least this many of its tokens fit.
SHORTEST_CUT = 8


def record_dtype(seq_length: int, vocab_size: int, starts: bool = False) -> np.dtype:
  """Returns the layout of one record, with or without document starts.

  >>> record_dtype(128, 30522).itemsize, record_dtype(128, 30522, starts=True).itemsize
  (260, 276)
  """
  ids = "<u2" if vocab_size <= 1 << 16 else "<u4"
  fields = [("length", "<u2"), ("first", "<u2"), ("ids", ids, (seq_length,))]
  if starts:
    fields.append(("starts", "u1", (-(-seq_length // 8),)))
  return np.dtype(fields)


def document_ids(records: np.ndarray) -> np.ndarray | None:
  """Returns the document index of each token [n, L] int32, from 1, with 0 for padding.

  Returns None if the records have no starts.
  """
  if "starts" not in records.dtype.names:
    return None
  L = records["ids"].shape[1]
  starts = np.unpackbits(records["starts"], axis=1, count=L, bitorder="little")
  used = np.arange(L) < records["length"][:, None]
  return np.cumsum(starts, axis=1, dtype=np.int32) * used


def sentences(line: str) -> list[str]:
  """Splits a paragraph into sentences by punctuation.

  Sentence terminals of other scripts are Unicode's, from the `tokenizers` library.

  >>> sentences('It rains. "Does it?" Yes, 3.5 mm.')
  ['It rains.', '"Does it?"', 'Yes, 3.5 mm.']
  >>> sentences("下雨吗？“下。”是的")
  ['下雨吗？', '“下。”', '是的']
  """
  parts = _SENTENCE_END.split(line)
  if line.isascii():
    return parts
  split = _other_end().pre_tokenize_str
  return [found.strip() for part in parts for found, _ in split(part)] or [line]


@functools.cache
def _other_end():
  from tokenizers import Regex, pre_tokenizers

  return pre_tokenizers.Split(Regex(_OTHER_END), "merged_with_previous")


def two_segment(
  documents: Iterable[Iterable[list[int]]], spec: ExampleSpec, rng: random.Random
) -> Iterator[tuple[list[int], list[int], int]]:
  """Yields (first segment, second segment, tokens discarded) of each example.

  `documents` holds the token ids of each sentence of each document. As in the original: sentences
  accumulate until they reach a target length or the document ends; some targets are short, some
  examples have one segment, and overflowing tokens are discarded.
  """
  target = spec.seq_length
  for document in documents:
    held: list[list[int]] = []
    size = 0
    for sentence in document:
      held.append(sentence)
      size += len(sentence)
      if size >= target:
        yield _segments(held, size, target, spec, rng)
        held, size, target = [], 0, _next_target(spec, rng)
    if size:
      yield _segments(held, size, target, spec, rng)
      target = _next_target(spec, rng)


def _next_target(spec: ExampleSpec, rng: random.Random) -> int:
  if rng.random() < spec.short_prob:
    return spec.short_min_tokens + int(rng.random() * (spec.seq_length - spec.short_min_tokens + 1))
  return spec.seq_length


def _segments(
  held: list[list[int]], size: int, target: int, spec: ExampleSpec, rng: random.Random
) -> tuple[list[int], list[int], int]:
  """Distributes sentences over two segments and truncates them to the sequence length."""
  single = rng.random() < spec.single_segment_prob
  first_target = 100_000 if single else (target - 3) // 2
  first, second = [], []
  for sentence in held:
    # As in the original: a short sentence can join the first segment after the second has begun.
    if (
      not first
      or len(first) + len(sentence) < first_target
      or (not second and len(first) < first_target and rng.random() < spec.boundary_prob)
    ):
      first += sentence
    else:
      second += sentence
  first = first[: spec.seq_length - 2]
  second = second[: max(0, spec.seq_length - len(first) - 3)]
  return first, second, size - len(first) - len(second)


def to_records(
  examples: Iterable[tuple[list[int], list[int], int]], spec: ExampleSpec, dtype: np.dtype
) -> tuple[np.ndarray, int]:
  """Returns the records [n] of examples and the number of discarded tokens."""
  lengths, firsts, flat, discarded = [], [], [], 0
  for first, second, lost in examples:
    ids = [spec.cls, *first, spec.sep, *second, spec.sep]
    firsts.append(len(first) + 2)
    lengths.append(len(ids) if second else firsts[-1])
    flat += ids[: lengths[-1]]
    discarded += lost
  records = np.zeros(len(lengths), dtype)
  records["length"], records["first"] = lengths, firsts
  ids = np.full((len(lengths), spec.seq_length), spec.pad, dtype["ids"].base)
  ids[np.arange(spec.seq_length) < np.array(lengths, np.int64)[:, None]] = flat
  records["ids"] = ids
  return records, discarded


def stream(
  documents: Iterable[Iterable[list[int]]], spec: ExampleSpec, dtype: np.dtype
) -> np.ndarray:
  """Returns the concatenated ids [n] of all documents, each followed by [SEP]."""
  flat: list[int] = []
  for document in documents:
    if ids := list(itertools.chain.from_iterable(document)):
      flat += [*ids, spec.sep]
  return np.array(flat, dtype["ids"].base)


def pack(
  ids: np.ndarray, spec: ExampleSpec, dtype: np.dtype, last: bool = False
) -> tuple[np.ndarray, np.ndarray]:
  """Packs a stream [n] of documents, each closed by a [SEP], into records.

  Each document gets a [CLS] and a [SEP]. A document that overflows a record continues in the next
  record as a separate document.

  Returns the records and the documents of the open record, to be prepended to the next stream. If
  `last`, the open record is padded and returned with the others.
  """
  L = spec.seq_length
  rows: list[list[np.ndarray]] = [[]]
  used = 0  # tokens of the last row
  begin = 0
  for end in np.flatnonzero(ids == spec.sep):
    while begin < end:
      room, row = L - used - 2, rows[-1]
      too_short = room < min(end - begin, SHORTEST_CUT)
      if row and (too_short or len(row) == L // TOKENS_PER_DOCUMENT):
        rows.append([])
        used = 0
        continue
      part = ids[begin : min(end, begin + room)]
      row.append(part)
      used += len(part) + 2
      begin += len(part)
    begin = end + 1
  open_row = [] if last else rows.pop()
  records = np.zeros(len(rows), dtype)
  records["ids"] = spec.pad
  for record, row in zip(records, rows, strict=True):
    _write_packed(record, row, spec)
  rest = [np.append(part, dtype["ids"].base.type(spec.sep)) for part in open_row]
  return records[records["length"] > 0], np.concatenate([ids[:0], *rest])


def _write_packed(record: np.void, documents: list[np.ndarray], spec: ExampleSpec) -> None:
  at, starts = 0, np.zeros(spec.seq_length, np.uint8)
  for part in documents:
    starts[at] = 1
    record["ids"][at] = spec.cls
    record["ids"][at + 1 : at + 1 + len(part)] = part
    at += len(part) + 2
    record["ids"][at - 1] = spec.sep
  record["length"] = record["first"] = at
  record["starts"] = np.packbits(starts, bitorder="little")


def cut(sentence: list[int], spec: ExampleSpec) -> Iterator[list[int]]:
  """Splits a long sentence into parts that fit a segment, instead of truncating it."""
  most = (spec.seq_length - 3) // 2
  for start in range(0, len(sentence), most):
    yield sentence[start : start + most]
