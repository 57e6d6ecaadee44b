"""The files of a text source: on local disks, in buckets and on web servers."""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import os
from collections.abc import Iterator
from typing import BinaryIO

from electra_jax.data.compressed import decompressed
from electra_jax.data.tokenizer import first_line
from electra_jax.runtime import foreign, storage
from electra_jax.runtime.storage import Object

STREAMED = ("text", "jsonl")  # kinds that are read sequentially
WHOLE_BYTES, BLOCK_BYTES = 1 << 20, 1 << 16  # read for the tag of a file


# {what a file may be in place of text: what to do}; FORMAT stands for its name
REMEDIES = {
  **dict.fromkeys(("UTF-16", "UTF-32", "Windows-1252"), "convert it: iconv -f FORMAT -t UTF-8"),
  "GBK, Shift-JIS or Windows-1251": "convert it to UTF-8 with iconv",
  "gzip": "add .gz to its name",
  "Zstandard": "add .zst to its name",
  "xz": "add .xz to its name",
  "bzip2": "add .bz2 to its name",
  "Parquet": "read it as parquet:GLOB#field",
  "a JSON array": "write one object a line: jq -c '.[]'",
}


class SourceError(ValueError):
  """A source cannot be read; the message is one line that names it."""


@dataclasses.dataclass(frozen=True)
class TextSource:
  """One entry of a specification; `text` is the entry without its weight."""

  text: str
  kind: str
  target: str = ""
  split: str = ""
  field: str = ""
  weight: float = 1.0


def likely(data: bytes, json: bool = False) -> str:
  """Returns "; probably FORMAT: what to do" for the beginning of a file that is not what it should.

  Args:
    json: whether it should be JSON lines.
  """
  is_array = json and data.lstrip().startswith(b"[")
  if not (kind := "a JSON array" if is_array else foreign.likely_format(data)):
    return ""
  return f"; probably {kind}: {REMEDIES.get(kind, 'extract its text').replace('FORMAT', kind)}"


def first_bad_byte(file: Object) -> str:
  """Returns where a file first deviates from UTF-8 text, why, and its likely format; "" if nowhere.

  Raises SourceError as `opened`.
  """
  line, offset, rest, head, ascii_only = 1, 0, b"", b"", True
  with opened(file) as raw:
    stream = decompressed(raw, file.url)
    while True:
      block = stream.read(BLOCK_BYTES)
      data, rest, bad = rest + block, b"", -1
      head = head or data
      try:
        data.decode("utf-8")
        bad = data.find(0) if data.count(0) > len(data) // 4 else -1
      except UnicodeDecodeError as error:
        bad = error.start
        if block and error.end == len(data):  # a character that the next block may end
          data, rest, bad = data[:bad], data[bad:], -1
      ascii_only &= data[: bad if bad >= 0 else None].isascii()
      if bad >= 0:
        line += data.count(b"\n", 0, bad)
        near = data[max(bad - 500, 0) if offset else 0 : bad + 500]
        hint = likely(head[:8] * bool(offset) + near) if ascii_only else ""
        where = f"{file.url}:{line}: byte 0x{data[bad]:02x} at {offset + bad:,} is not UTF-8 text"
        return where + hint
      if not block:
        return ""
      line, offset = line + data.count(b"\n"), offset + len(data)


def with_kind(url: str) -> str:
  """Returns a URL as a source, with the kind guessed from its name."""
  path = url.partition("#")[0]
  kind = next((kind for kind in ("jsonl", "parquet") if f".{kind}" in path), "text")
  kind = "parquet" if kind == "text" and url.startswith("hf:") else kind
  return f"{kind}:{path}{'' if kind == 'text' else '#text'}"


def files(source: TextSource) -> list[Object]:
  """Returns the files, in order, of a source whose kind is in READERS; only remote ones have tags.

  Raises:
    SourceError: there are no files, or they cannot be listed or read.
    ModuleNotFoundError: a package of the extra `buckets` is missing.
  """
  if storage.is_remote(source.target):
    return _remote_files(source)
  paths = _dataset_files(source) if source.kind == "hf" else _local_files(source)
  return [Object(path, os.path.getsize(path), "") for path in paths]


def _remote_files(source: TextSource) -> list[Object]:
  if source.kind == "hf":
    raise SourceError(f"source {source.text!r}: write {with_kind(source.target)}")
  try:
    found = storage.find(source.target)
  except (OSError, ValueError) as error:
    raise SourceError(first_line(error)) from None  # names the URL without credentials
  if not found:
    raise SourceError(f"source {source.text!r} matches no file")
  for file in found:
    if not file.ranged and source.kind not in STREAMED:
      raise SourceError(f"{file.url}: the server does not support ranges: download the file")
  return found


def _local_files(source: TextSource) -> list[str]:
  real, found = functools.cache(os.path.realpath), {}
  # Brackets are a part of the name where no file matches them as a pattern.
  names = (source.target, source.target.replace("[", "[[]"))
  paths = next(filter(None, (glob.glob(name, recursive=True) for name in names)), [])
  for path in sorted(paths, key=lambda path: (len(path), path)):
    folder, name = os.path.split(path)
    found.setdefault((real(folder), name), path)  # once, although ** may follow a cyclic link
  paths = sorted(filter(os.path.isfile, found.values()))
  for path in sorted({*found.values()}.difference(paths)):
    if not os.path.exists(path):
      raise SourceError(f"source {source.text!r}: {path} is a link to a missing file")
  if not paths:
    raise SourceError(_no_file(source, [*found.values()]))
  return paths


def _no_file(source: TextSource, others: list[str]) -> str:
  """Returns why a source has no file; `others` are the folders, pipes and so on that it matches."""
  if any(map(os.path.isdir, others)):
    return f"source {source.text!r}: {others[0]} is a folder: name files, e.g. {others[0]}/*.txt"
  if others:
    return f"source {source.text!r}: {others[0]} is a pipe or a device: copy it to a file"
  comma = "; a source begins with its kind, e.g. text:" if "," in source.target else ""
  return f"source {source.text!r} matches no file{comma}"


def _dataset_files(source: TextSource) -> list[str]:
  """Returns the Arrow files of a saved dataset in the order of its rows."""
  state, splits = (os.path.join(source.target, x) for x in ("state.json", "dataset_dict.json"))
  path = splits if os.path.isfile(splits) else state
  try:
    content = foreign.read_json(path)
    if path == splits:
      names, first = ", ".join(content["splits"]), content["splits"][0]
    else:
      found = [str(foreign.inside(source.target, x["filename"])) for x in content["_data_files"]]
  except FileNotFoundError:
    raise SourceError(
      f"source {source.text!r}: {state} is missing: save the dataset with save_to_disk"
    ) from None
  except (ValueError, LookupError, TypeError) as error:
    raise SourceError(f"{path} is damaged ({type(error).__name__}: {error})") from None
  if path == splits:
    raise SourceError(
      f"source {source.text!r} has the splits {names}: name one, e.g."
      f" hf:{os.path.join(source.target, first)}#{source.field}"
    )
  if content.get("_indices_data_files"):
    raise SourceError(f"{state} selects rows by an index: call flatten_indices() before saving")
  for path in found:
    if not os.path.isfile(path):
      raise SourceError(f"{path} is missing, but {state} names it")
  return found


@contextlib.contextmanager
def opened(file: str | os.PathLike | Object) -> Iterator[BinaryIO]:
  """Opens a file. Raises SourceError if it cannot be opened, read or decompressed.

  Also raises SourceError if an Object's tag is not the file's, or the file changes meanwhile.
  """
  found = file if isinstance(file, Object) else Object(os.fspath(file), 0, "")
  is_remote = storage.is_remote(found.url)
  try:
    if is_remote and found is not file:
      found = storage.look(found.url)
    with storage.opened(found) if is_remote else open(found.url, "rb") as raw:
      if not is_remote and found.tag and found.tag != tag(raw):
        raise OSError("it has changed since the build began")
      before = is_remote or _version(raw)
      yield raw
      if not is_remote and before != _version(raw):
        raise OSError("it has changed while it was read")
  except (OSError, EOFError) as error:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    named = reason.startswith(found.url)
    raise SourceError(reason if named else f"{found.url}: cannot be read ({reason})") from None


def _version(file: BinaryIO) -> tuple[int, int]:
  found = os.fstat(file.fileno())
  return found.st_size, found.st_mtime_ns


def tag_of(file: Object) -> str:
  """Returns a file's tag: computed now, or as found for a remote file; raises as `opened`."""
  if storage.is_remote(file.url):
    return file.tag
  with opened(file) as raw:
    return tag(raw)


def tag(file: BinaryIO) -> str:
  """Hashes an open file's size and content; of a large file only both ends and the middle.

  Unlike the modification time, the hash is the same for a copy. The ends hold the checksums of
  compressed files and the index of tables.
  """
  size = os.fstat(file.fileno()).st_size
  whole, starts = size <= WHOLE_BYTES, (0, size // 2, size - BLOCK_BYTES)
  digest = hashlib.blake2b(str(size).encode(), digest_size=16)
  for start in (0,) if whole else starts:
    digest.update(os.pread(file.fileno(), WHOLE_BYTES if whole else BLOCK_BYTES, start))
  return digest.hexdigest()
