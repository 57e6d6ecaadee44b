"""Writes and checks folders of shards.

manifest.json                written last: a folder without it is incomplete
vocab.txt, tokenizer.json or spm.model
train-00000-of-00007.bin     records of electra_jax.data.examples, without separators
heldout-00000-of-00001.bin   the same, from documents excluded from training
.building/                   an unfinished build (electra_jax.data.parts)
.lock                        locked by all processes that build
.vocabulary.lock             locked by the process that trains the vocabulary
.joining.lock                locked by the process that joins the parts
"""

import collections
import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from electra_jax.data import examples
from electra_jax.data.tokenizer import FILES, Vocab
from electra_jax.runtime import storage
from electra_jax.runtime.foreign import parse_json
from electra_jax.runtime.workdir import flock, open_lock, replacing

FORMAT = "electra_jax shards"
FORMAT_VERSION = 1
SPLITS = ("train", "heldout")
MANIFEST = "manifest.json"
BUILDING = ".building"

_SHARD = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}-of-\d{{5,}}\.bin")


class DataError(ValueError):
  """Shards cannot be written or used; the message is one line that names the path."""


class ShardWriter:
  """Writes the records of one split to files of `per_shard` records and counts their tokens."""

  def __init__(self, folder: Path, split: str, dtype: np.dtype, per_shard: int, vocab_size: int):
    self._folder, self._split, self._per_shard = folder, split, per_shard
    self._dtype = dtype
    self._left = 0  # records that still fit the open file; 0: no open file
    self._shards: list[dict] = []
    self.counts = collections.Counter(examples=0, length=0)  # length: including special tokens
    self.frequencies = np.zeros(vocab_size, np.int64)  # of each id, padding excluded

  def append(self, records: np.ndarray) -> None:
    """Writes records [n]; closes and syncs full files."""
    used = np.arange(self._dtype["ids"].shape[0]) < records["length"][:, None]
    self.frequencies += np.bincount(records["ids"][used], minlength=len(self.frequencies))
    length = int(records["length"].sum(dtype=np.int64))
    self.counts.update(examples=len(records), length=length)
    while len(records):
      if not self._left:
        self._open()
      part, records = records[: self._left], records[self._left :]
      data = part.tobytes()
      try:
        self._file.write(data)
      except OSError as error:
        raise self._at(error) from None
      self._hash.update(data)
      self._left -= len(part)
      self._shards[-1]["examples"] += len(part)
      if not self._left:
        self._close()

  def _open(self) -> None:
    path = self._folder / f"{self._split}-{len(self._shards):05d}"
    self._file = open(path, "wb")
    self._hash = hashlib.sha256()
    self._left = self._per_shard
    self._shards.append({"file": path.name, "examples": 0})

  def _at(self, error: OSError) -> OSError:
    """Closes the file after a failed write and returns the error with the file's path."""
    with contextlib.suppress(OSError):  # closing flushes, which fails again
      self._file.close()
    return OSError(error.errno, error.strerror, str(self._file.name))

  def _close(self) -> None:
    try:
      self._file.flush()
      os.fsync(self._file.fileno())
    except OSError as error:
      raise self._at(error) from None
    self._file.close()
    shard = self._shards[-1]
    shard["bytes"] = shard["examples"] * self._dtype.itemsize
    shard["sha256"] = self._hash.hexdigest()

  def finish(self) -> list[dict]:
    """Closes the last file and returns each file's "file", "examples", "bytes" and "sha256"."""
    if self._left:
      self._close()
    return self._shards


@contextlib.contextmanager
def locked(path: Path, shared: bool = False, wait: bool = False) -> Iterator[None]:
  """Creates and locks a file; the lock ends with the process, even if it is killed.

  If another process holds the lock (unless both are `shared`), waits or raises DataError.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with open_lock(path) as lock:
    try:
      flock(lock, shared, wait)
    except BlockingIOError:
      raise DataError(f"{path.parent}: another build is writing here: wait until it ends") from None
    yield


def check_unused(folder: Path, vocab: str) -> None:
  """Raises DataError if a folder has no build but files that a build would replace.

  The file `vocab`, config.data.vocab, is exempt: a build leaves it alone.
  """
  if (folder / MANIFEST).exists() or (folder / BUILDING).exists():
    return
  paths = (path for path in folder.iterdir() if path.resolve() != Path(vocab).resolve())
  refuse_files(folder, (path.name for path in paths))


def refuse_files(place: str | os.PathLike, names: Iterable[str]) -> None:
  """Raises DataError if a build at `place` would replace one of the files `names`."""
  if found := [name for name in sorted(names) if name in FILES.values() or is_shard(name)]:
    raise DataError(
      f"{place} holds {found[0]} but no {MANIFEST}: choose another config.data.dir, or replace the"
      " file with --overwrite"
    )


def is_shard(name: str) -> bool:
  """Returns whether `name` is the file name of a shard."""
  return bool(_SHARD.fullmatch(name))


def publish(temporary: Path, folder: Path, manifest: dict) -> None:
  """Moves the files of `temporary` to `folder`, replacing an older build; the manifest is last.

  Several processes may publish the same files without deleting each other's.
  """
  new, last = sorted(temporary.iterdir()), folder / MANIFEST
  content = dump(manifest).encode(errors="backslashreplace")  # JSON of names that are not UTF-8
  stale = [path for path in folder.iterdir() if is_shard(path.name)]
  if last.exists() and last.read_bytes() != content:
    with contextlib.suppress(DataError, KeyError, TypeError):
      stale.append(folder / read_manifest(folder)["vocab"]["file"])
    last.unlink(missing_ok=True)
  names = {path.name for path in new}
  for path in stale:
    if path.name not in names:
      path.unlink(missing_ok=True)
  for path in new:
    os.replace(path, folder / path.name)
  _sync(folder)
  with replacing(last) as draft:
    draft.write_bytes(content)
  _sync(folder)


def _sync(folder: Path) -> None:
  handle = os.open(folder, os.O_RDONLY)
  with contextlib.suppress(OSError):  # some file systems cannot sync a folder
    os.fsync(handle)
  os.close(handle)


def dump(manifest: dict) -> str:
  """Returns the manifest as JSON with one line per field, also for lists of numbers."""
  text = json.dumps(manifest, indent=1, ensure_ascii=False)
  return re.sub(r"\[[\d,\s]*\]", lambda m: re.sub(r"\s+", "", m[0]), text) + "\n"


def read_manifest(folder: str | os.PathLike) -> dict:
  """Reads a folder's manifest. Raises DataError if missing, damaged or of another version."""
  path = Path(folder) / MANIFEST
  try:
    if (content := manifest_content(folder)) is not None:
      return parse_manifest(content, path)
  except OSError as error:
    raise DataError(f"{path} cannot be read: {error}") from None
  state = "finish the build" if (Path(folder) / BUILDING).exists() else "build the shards first"
  raise DataError(f"{path} is missing: {state}")


def manifest_content(folder: str | os.PathLike) -> bytes | None:
  """Reads the manifest of a folder or a URL; None if missing. Raises other OSErrors."""
  path = f"{folder}/{MANIFEST}"
  with contextlib.suppress(FileNotFoundError):
    return storage.read(path) if storage.is_remote(path) else Path(path).read_bytes()


def parse_manifest(content: bytes, path: str | os.PathLike) -> dict:
  """Parses a manifest. Raises DataError with the path if damaged or of another version."""
  try:
    manifest = parse_json(content, path)
  except ValueError as error:
    raise DataError(str(error)) from None
  if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
    raise DataError(f"{path} is not a manifest of shards")
  if manifest.get("version") != FORMAT_VERSION:
    raise DataError(
      f"{path} has format version {manifest.get('version')}, but must have {FORMAT_VERSION}: "
      "build the shards again"
    )
  try:
    for value, kind in _typed(manifest):
      if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is not of type {kind.__name__}")
  except ValueError as error:
    raise DataError(f"{path} is damaged: {error}") from None
  except (KeyError, TypeError, AttributeError) as error:
    raise DataError(f"{path} is damaged: {type(error).__name__} {error}") from None
  return manifest


def _typed(manifest: dict) -> Iterator[tuple[object, type]]:
  """Yields the used values of a manifest with their types."""
  Vocab.from_json(manifest["vocab"])
  numbers, names = [manifest["seq_length"]], []
  for split in (manifest["splits"][name] for name in SPLITS):
    numbers += [split["examples"], *split["frequencies"]]
    for shard in split["shards"]:
      numbers += [shard["examples"], shard["bytes"]]
      names += [shard["sha256"]]
      if not is_shard(shard["file"]):  # the name stays inside the folder
        raise ValueError(f"{shard['file']!r:.80} is not the name of a shard")
  for source in manifest["sources"]:
    numbers += [source["files"], source["file_bytes"]]
  names += [manifest["build"][field] for field in ("vocab", "sources")]
  yield from ((number, int) for number in numbers)
  yield from ((name, str) for name in names)


def layout(manifest: dict) -> np.dtype:
  """Returns the layout of the records; packed shards of version 0.1 have no starts."""
  starts = manifest.get("document_starts", False)
  return examples.record_dtype(manifest["seq_length"], manifest["vocab"]["size"], starts)


def check_files(
  folder: str | os.PathLike, manifest: dict, splits: Sequence[str] = SPLITS, verify: bool = False
) -> None:
  """Raises DataError if a file's size, or its SHA-256 with `verify`, differs from the manifest."""
  for split in splits:
    for shard in manifest["splits"][split]["shards"]:
      path = Path(folder) / shard["file"]
      try:
        size, found = path.stat().st_size, shard["sha256"]
        if verify and size == shard["bytes"]:
          with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
      except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
      if size != shard["bytes"]:
        raise DataError(f"{path} has {size} bytes, but the manifest says {shard['bytes']}")
      if found != shard["sha256"]:
        raise DataError(
          f"{path} is damaged: SHA-256 {found[:12]}, but the manifest says {shard['sha256'][:12]}"
        )


def copy_vocab(folder: str | os.PathLike, vocab: Vocab, to: Path) -> None:
  """Copies the vocabulary file and the manifest of a folder of shards."""
  to.mkdir(exist_ok=True)
  for name in (vocab.file, MANIFEST):
    with replacing(to / name) as temporary:
      shutil.copyfile(Path(folder) / name, temporary)


def check_vocab(folder: str | os.PathLike, vocab: Vocab) -> None:
  """Raises DataError if the SHA-256 of a folder's vocabulary file differs from `vocab.hash`."""
  path = Path(folder) / vocab.file
  try:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
  except OSError as error:
    raise DataError(f"{path} cannot be read: {error.strerror}") from None
  if found != vocab.hash:
    raise DataError(
      f"{path} has SHA-256 {found[:12]}, but the vocabulary of the shards has {vocab.hash[:12]}"
    )
