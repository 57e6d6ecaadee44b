"""The files of a text source: on local disks, in buckets and on web servers."""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import os
from collections.abc import Iterator
from typing import BinaryIO

from electra_jax.data.tokenizer import first_line
from electra_jax.runtime import storage
from electra_jax.runtime.foreign import inside, read_json
from electra_jax.runtime.storage import Object

STREAMED = ("text", "jsonl")  # kinds that are read sequentially
WHOLE_BYTES, BLOCK_BYTES = 1 << 20, 1 << 16  # read for the tag of a file


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
  paths = glob.glob(source.target, recursive=True)
  for path in sorted(paths, key=lambda path: (len(path), path)):
    folder, name = os.path.split(path)
    found.setdefault((real(folder), name), path)  # once, although ** may follow a cyclic link
  paths = sorted(filter(os.path.isfile, found.values()))
  for path in sorted({*found.values()}.difference(paths)):
    if not os.path.exists(path):
      raise SourceError(f"source {source.text!r}: {path} is a link to a missing file")
  if not paths:
    raise SourceError(f"source {source.text!r} matches no file")
  return paths


def _dataset_files(source: TextSource) -> list[str]:
  """Returns the Arrow files of a saved dataset in the order of its rows."""
  state, splits = (os.path.join(source.target, x) for x in ("state.json", "dataset_dict.json"))
  path = splits if os.path.isfile(splits) else state
  try:
    content = read_json(path)
    if path == splits:
      names, first = ", ".join(content["splits"]), content["splits"][0]
    else:
      found = [str(inside(source.target, x["filename"])) for x in content["_data_files"]]
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

  Also raises SourceError if an Object's tag is not the file's.
  """
  found = file if isinstance(file, Object) else Object(os.fspath(file), 0, "")
  is_remote = storage.is_remote(found.url)
  try:
    if is_remote and found is not file:
      found = storage.look(found.url)
    with storage.opened(found) if is_remote else open(found.url, "rb") as raw:
      if not is_remote and found.tag and found.tag != tag(raw):
        raise OSError("it has changed since the build began")
      yield raw
  except (OSError, EOFError) as error:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    named = reason.startswith(found.url)
    raise SourceError(reason if named else f"{found.url}: cannot be read ({reason})") from None


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
