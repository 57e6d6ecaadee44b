r"""Reads text from files, JSON lines, tables, TFDS datasets and the local Python's docstrings.

A specification is a comma-separated list; each entry may end in `@weight`:

  text:GLOB             plain text, in which a blank line ends a document
  jsonl:GLOB#field      one JSON object per line, whose string `field` is a document
  parquet:GLOB#field    one document per row, in the string column `field`
  hf:PATH#field         the same, for a folder written by `save_to_disk` of Hugging Face's datasets
  tfds:NAME[:SPLIT][#field]   a dataset of tensorflow_datasets; default 'train' and 'text'
  python-docs           docstrings of the standard library and of every installed package

Text and JSON lines may be compressed: .gz, .xz, .zst or .bz2. A backslash in front of , @ # [ ] * ?
or \ makes it a part of the name; a comma needs none unless a word and a colon follow, and brackets
none where a file has the name.

A GLOB may be a URL: s3://BUCKET/GLOB, gs://BUCKET/GLOB, hf://datasets/OWNER/NAME[@REVISION]/GLOB,
or https://HOST/PATH, which names one file.

With weight w every document appears floor(w) times, and a fraction w - floor(w) of the documents,
chosen by hash, appears once more. Each repetition is a pass over the whole source.

Text is streamed: no file is held in memory whole, and a document only in JSON lines and tables.
Documents above `PIECE_BYTES` are split into chunks, and lines above `LINE_BYTES` into lines.
"""

import codecs
import dataclasses
import functools
import hashlib
import io
import json
import math
import os
import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from electra_jax.data import tfds
from electra_jax.data.compressed import decompressed
from electra_jax.data.source_files import (
  SourceError,
  TextSource,
  files,
  first_bad_byte,
  likely,
  opened,
  with_kind,
)
from electra_jax.data.tokenizer import first_line
from electra_jax.runtime import storage
from electra_jax.runtime.storage import Object

PIECE_BYTES = 1 << 20
LINE_BYTES = 1 << 16
TABLE_ROWS = 64  # of a Parquet file in memory at a time
JSON_BYTES = 1 << 28  # of the longest line that is parsed
LONG_DOCUMENT = 1000  # mean number of lines from which blank lines may be missing
EARLY_STOP_DOCUMENTS = 10_000  # with fewer, the share of undecodable documents is unreliable

_ESCAPED = re.compile(r"\\([,@#\[\]*?\\\s])", re.ASCII)
_HIDDEN = 0xD800  # plus an escaped character: a surrogate, which neither text nor names have
_NEXT_ENTRY = re.compile(r",(?=\s*(?:$|,|[\w-]+:|python-docs\s*(?:$|[,@])))")
_TFDS = re.compile(r"(?P<name>[^:#]+(:\d+\.\d+\.\d+)?)(:(?P<split>[^#]+))?(#(?P<field>.+))?")


class TextChunk(NamedTuple):
  """A document or a part of one."""

  key: bytes  # [16] hash of the document's first chunk, shared by all of its chunks
  first: bool  # the document begins here
  repeat: int  # number of earlier passes over the source
  text: str  # non-blank lines separated by line feeds
  size: int  # UTF-8 bytes of the text
  document: int = -1  # index of the document in its part, where `parts.take_sample` counts them


@dataclasses.dataclass
class SourceStats:
  """Counts of the text read from one source so far, summed over passes."""

  source: TextSource
  file_bytes: int = 0  # on disk, in one pass; 0 if unknown
  done_bytes: float = 0.0  # out of file_bytes x passes
  documents: int = 0
  undecodable: int = 0
  text_bytes: int = 0
  kept: int = 0  # documents of the first pass that a weight below 1 keeps
  bad: str = ""  # the place of the first undecodable document, and why
  lines: int = 0  # without blank ones
  returns: int = 0  # carriage returns inside lines
  files: int = 0  # in one pass
  file: Object | None = None  # being read
  before: int = 0  # documents and undecodable ones in front of `file`

  @property
  def total_bytes(self) -> float:
    return self.file_bytes * self.source.weight

  @property
  def seen(self) -> int:
    return self.documents + self.undecodable

  @property
  def note(self) -> str:
    """What is odd about the text; "" if nothing is."""
    if self.undecodable:
      return f"{self.undecodable:,} of {self.seen:,} documents are undecodable, first {self.bad}"
    documents = "document" if self.documents == 1 else "documents"
    lines, hint = self.lines, ""
    if self.returns > lines:
      lines, hint = lines + self.returns, "; convert its carriage returns: tr '\\r' '\\n'"
    long = lines >= LONG_DOCUMENT * max(self.files, self.documents, 1)
    if self.source.kind == "text" and (long or hint):
      return (
        f"{self.documents:,} {documents} in {lines:,} lines: blank lines separate documents{hint}"
      )
    return ""


def parse(spec: str) -> tuple[TextSource, ...]:
  """Parses a specification. Raises SourceError, which names the invalid entry."""
  hidden = _ESCAPED.sub(lambda match: chr(_HIDDEN + ord(match[1])), spec)
  entries = (entry.strip(string.whitespace) for entry in _NEXT_ENTRY.split(hidden))
  sources = tuple(_parse_entry(entry) for entry in entries if entry.strip(","))
  if not sources:
    raise SourceError("data.sources is empty")
  return sources


def escape(path: str) -> str:
  r"""Returns a file's path as a part of a specification.

  >>> escape("Corpus [v2], cleaned.txt")
  'Corpus \\[v2\\]\\, cleaned.txt'
  """
  return re.sub(r"[,@#\[\]*?\\]|\s(?=\s*$)", r"\\\g<0>", path, flags=re.ASCII)


def _shown(text: str, form: str) -> str:
  """Returns a text with its escaped characters restored; `form` formats glob characters."""

  def show(match: re.Match) -> str:
    char = chr(ord(match[0]) - _HIDDEN)
    return form.format(char) if char in "[*?" or "\\" in form else char

  return re.sub("[\ud800-\ud87f]", show, text)


def _parse_entry(entry: str) -> TextSource:
  text, _, weight = entry.rpartition("@")
  try:
    value = float(weight) if text else 1.0
  except ValueError:  # the @ belongs to a path
    text, value = entry, 1.0
  whole, part = (x.partition(":")[2] for x in (entry, text))
  if os.path.isfile(whole) and not os.path.exists(part):
    text, value = entry, 1.0
  kind, _, target = (text or entry).partition(":")
  pattern, _, field = target.rpartition("#")
  entry, text = (_shown(x, "\\{}") for x in (entry, text or entry))
  target, pattern = (_shown(x, "{}" if kind == "hf" else "[{}]") for x in (target, pattern))
  field = _shown(field, "{}")
  if not 0 < value < math.inf:
    raise SourceError(f"source {entry!r}: the weight must be above 0, got {weight}")
  if f"{kind}://" == text[: len(kind) + 3] and kind in storage.STORES:
    raise SourceError(f"source {text!r}: name the kind of file, e.g. {with_kind(text)}")
  if text == "python-docs":
    return TextSource(text, text, weight=value)
  if kind in READERS and pattern and field and kind != "text":
    return TextSource(text, kind, pattern, field=field, weight=value)
  if kind in OF_FIELDS and target:
    example = "hf:PATH" if kind == "hf" else f"{kind}:GLOB"
    raise SourceError(f"source {text!r}: name the field, e.g. {example}#text")
  if kind in READERS and target:
    return TextSource(text, kind, target, weight=value)
  if kind == "tfds" and (match := _TFDS.fullmatch(target)):
    split, field = match["split"] or "train", match["field"] or "text"
    return TextSource(text, kind, match["name"], split, field, value)
  raise SourceError(
    f"source {text!r}: expected text:GLOB, jsonl:GLOB#field, parquet:GLOB#field, hf:PATH#field, "
    "tfds:NAME[:SPLIT][#field] or python-docs"
    f"{''.join(f', or {kind}:GLOB' for kind in READERS if kind not in ('text', *OF_FIELDS))}"
  )


def fraction(key: bytes, purpose: str) -> float:
  """Hashes a document's key and a purpose to [0, 1)."""
  digest = hashlib.blake2b(key, digest_size=8, person=purpose.encode()).digest()
  return int.from_bytes(digest, "little") / 2**64


def documents(
  source: TextSource,
  stats: SourceStats,
  *,
  found: Sequence[Object] | None = None,
  tfds_dir: str | None = None,
  max_bad_frac: float = 0.0,
  duplicates: Sequence[bool] | None = None,
) -> Iterator[TextChunk]:
  """Yields the chunks of a source, repeated by its weight, and counts them in `stats`.

  Skips undecodable documents: not UTF-8, a quarter NUL, not JSON, or null.

  Args:
    found: the files to read; None means all files of the source.
    tfds_dir: data_dir of tensorflow_datasets.
    max_bad_frac: reading stops when a larger fraction of at least `EARLY_STOP_DOCUMENTS` documents
      is undecodable; call `check_undecodable` at the end.
    duplicates: whether to drop each of the documents that the first pass keeps.

  Raises:
    SourceError: nothing matches, a file is damaged, or too many documents are undecodable.
  """
  for repeat in range(math.ceil(source.weight)):
    share, place = min(1.0, source.weight - repeat), -1
    if source.kind == "tfds":
      lines = _tfds_lines(source, stats, tfds_dir)
    else:
      lines = _file_lines(source, stats, files(source) if found is None else found)
    for text in _assemble(lines, stats, repeat):
      check_undecodable(stats, max_bad_frac, EARLY_STOP_DOCUMENTS)
      kept = share == 1.0 or fraction(text.key, "weight") < share
      # `duplicates` indexes the documents that the first pass keeps: half of them at weight 0.5.
      if text.first and (kept or repeat > 0):
        place += 1
        stats.kept += repeat == 0
      if kept and not (duplicates is not None and duplicates[place]):
        yield text


def check_undecodable(stats: SourceStats, max_bad_frac: float, at_least: int = 1) -> None:
  """Raises SourceError if too large a share of `at_least` or more documents is undecodable."""
  if stats.undecodable > max_bad_frac * max(stats.seen, at_least):
    raise SourceError(
      f"source {stats.source.text!r}: {stats.undecodable} of {stats.seen} documents are null or"
      f" undecodable: fix the files or raise data.max_bad_frac={max_bad_frac}"
      + (f"; the first: {stats.bad}" if stats.bad else "")
    )


def _assemble(
  lines: Iterator[bytes | str | None], stats: SourceStats, repeat: int
) -> Iterator[TextChunk]:
  """Yields chunks of documents from their lines; see READERS."""
  held: list[bytes] = []
  size, key, skip = 0, None, False

  for line in lines:
    if isinstance(line, str):
      stats.undecodable += 1
      stats.bad = stats.bad or line
      continue
    if line is not None:
      if skip or not (line := line.strip()):
        continue
      held.append(line)
      size += len(line) + 1
      if size < PIECE_BYTES:
        continue
    if held:
      data, number = b"\n".join(held), len(held)
      held, size = [], 0
      if (text := _decoded(data)) is None:
        stats.bad = stats.bad or _place(stats)
        stats.undecodable += 1
        skip = True  # the rest of this document
      else:
        if not repeat:
          stats.lines += number
          stats.returns += data.count(b"\r")
        if first := key is None:
          key = hashlib.blake2b(data, digest_size=16).digest()
          stats.documents += 1
        stats.text_bytes += len(data)
        yield TextChunk(key, first, repeat, text, len(data))
    if line is None:
      key, skip = None, False


def _decoded(data: bytes) -> str | None:
  """Returns the text, or None if it is not UTF-8 or as full of NULs as UTF-16."""
  try:
    return None if data.count(0) > len(data) // 4 else data.decode("utf-8")
  except UnicodeDecodeError:
    return None


def _place(stats: SourceStats) -> str:
  """Returns the place of the document that is being read, which is not text."""
  number = f"document {stats.seen - stats.before + 1:,} is not UTF-8"
  if stats.file is None:
    return number
  tables = stats.source.kind in OF_FIELDS
  return ("" if tables else first_bad_byte(stats.file)) or f"{stats.file.url}: {number}"


def _file_lines(
  source: TextSource, stats: SourceStats, found: Sequence[Object]
) -> Iterator[bytes | str | None]:
  """Yields the lines of each document, then None; updates `stats`."""
  stats.file_bytes, stats.files = sum(file.size for file in found), len(found)
  for file in found:
    before = stats.done_bytes
    stats.file, stats.before = file, stats.seen
    with opened(file) as raw:
      for line in READERS[source.kind](decompressed(raw, file.url), file.url, source.field):
        if line is None:
          stats.done_bytes = before + raw.tell()
        yield line
    yield None  # a document never spans files
    stats.done_bytes = before + file.size


def _text_lines(stream: BinaryIO, path: str, field: str) -> Iterator[bytes | None]:
  mark, empty = codecs.BOM_UTF8, True  # empty: the file's line so far, which `_lines` may split
  for line in _lines(stream):
    line, mark = line.removeprefix(mark), b""
    if not line.isspace():
      yield line
      empty = False
    if line.endswith(b"\n"):
      if empty:
        yield None
      empty = True


def _json_lines(stream: BinaryIO, path: str, field: str) -> Iterator[bytes | str | None]:
  number = 0
  while line := stream.readline(JSON_BYTES):
    number += 1
    if line.isspace():
      continue
    place, wrong, text = f"{path}:{number}", "", None
    if len(line) == JSON_BYTES:
      wrong = f"above {JSON_BYTES:,} bytes"
      while line and not line.endswith(b"\n"):
        line = stream.readline(JSON_BYTES)
    else:
      try:
        value = json.loads(line)
        text = value.get(field, value) if isinstance(value, dict) else value
        wrong = f"{field!r} is null" if text is None else ""
        text = text.encode("utf-8") if isinstance(text, str) else text
      except UnicodeEncodeError as error:
        wrong = f"{field!r} has a lone surrogate, \\u{ord(error.object[error.start]):x}"
      except (ValueError, RecursionError) as error:  # nested thousands deep
        wrong = f"not JSON ({error})" + likely(line, json=True)
    if wrong:
      yield f"{place}: {wrong}"
    elif isinstance(text, bytes):
      yield from _lines(io.BytesIO(text))
    else:
      has = ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
      raise SourceError(
        f"{path}: line {number} has no string field {field!r} (found: {has:.200})"
        + likely(line, json=True)
      )
    yield None


def _table_lines(read: Callable, stream: BinaryIO, path: str, field: str) -> Iterator:
  """Yields the lines of a column; `read(stream, field)` returns the table's schema and batches."""
  import pyarrow

  try:
    schema, batches = read(stream, field)
    if field not in schema.names:
      has = ", ".join(schema.names)
      raise SourceError(f"{path} has no column {field!r} (it has: {has:.200})")
    found = schema.field(field).type
    try:
      pyarrow.array([], found).cast(pyarrow.large_binary())
    except pyarrow.ArrowException:
      raise SourceError(f"{path}: column {field!r} is {found}, not text") from None
    number = 0
    for batch in batches:
      for value in batch.column(field).cast(pyarrow.large_binary()).to_pylist():
        number += 1
        null = f"{path}: {field!r} of row {number:,} is null"
        yield from [null] if value is None else _lines(io.BytesIO(value))
        yield None
  except (pyarrow.ArrowException, OSError) as error:
    raise OSError(first_line(error)) from None


def _read_parquet(stream: BinaryIO, field: str):
  from pyarrow import parquet

  table = parquet.ParquetFile(stream)
  return table.schema_arrow, table.iter_batches(TABLE_ROWS, columns=[field], use_threads=False)


def _read_arrow(stream: BinaryIO, field: str):
  from pyarrow import ipc

  reader = ipc.open_stream(stream)
  return reader.schema, reader


# Kinds of files: {kind: (stream, path, field) -> for each document its lines, bytes, or else a str,
# why it is undecodable; then None}.
OF_FIELDS = ("jsonl", "parquet", "hf")
READERS = {
  "text": _text_lines,
  "jsonl": _json_lines,
  "parquet": functools.partial(_table_lines, _read_parquet),
  "hf": functools.partial(_table_lines, _read_arrow),
}


def _tfds_lines(
  source: TextSource, stats: SourceStats, tfds_dir: str | None
) -> Iterator[bytes | None]:
  try:
    dataset, about = tfds.open_split(source.target, source.split, tfds_dir)
  except tfds.TfdsError as error:
    raise SourceError(f"source {source.text!r}: {error}") from None
  info = about.splits[source.split]
  if source.field not in dataset.element_spec:
    has = ", ".join(dataset.element_spec)
    raise SourceError(f"source {source.text!r} has no field {source.field!r} (found: {has})")
  stats.file_bytes = info.num_bytes or 0
  for value in dataset.map(lambda x: x[source.field]).as_numpy_iterator():
    if not isinstance(value, bytes):
      kind = type(value).__name__
      raise SourceError(f"source {source.text!r}: field {source.field!r} is {kind}, not text")
    yield from _lines(io.BytesIO(value))
    yield None
    stats.done_bytes += stats.file_bytes / info.num_examples


def _lines(stream: BinaryIO) -> Iterator[bytes]:
  """Yields lines; splits those above `LINE_BYTES` at a space or else between characters."""
  rest = b""
  while line := stream.readline(LINE_BYTES):
    line, rest = rest + line, b""
    if len(line) >= LINE_BYTES and not line.endswith(b"\n"):
      cut = line.rfind(b" ") + 1 or len(line)
      if cut == len(line):
        # Cut before the last character, which may be incomplete.
        cut = next((i for i in range(cut - 1, cut - 5, -1) if line[i] & 0xC0 != 0x80), cut)
      line, rest = line[:cut], line[cut:]
    yield line
  if rest:
    yield rest
