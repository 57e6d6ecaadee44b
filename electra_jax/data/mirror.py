"""Copies shards from a bucket, a web server or the Hub to this host, where they can be mapped.

CACHE/8f3a9c0d12b4e567/   a folder of shards, named by the first digits of its manifest's SHA-256
  .lock                   locked by the process of this host that copies
A file gets its name once its SHA-256 is verified; the manifest is written last. Nothing is deleted.
"""

import errno
import functools
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from electra_jax.data import shards
from electra_jax.data.shards import MANIFEST, SPLITS, DataError
from electra_jax.data.status import Status, print_line
from electra_jax.runtime import storage
from electra_jax.runtime.workdir import LOCK_FILE, flock, open_lock, replacing, sweep

AT_ONCE = 8  # files
CHUNK_BYTES = 1 << 20


def local(
  place: str | os.PathLike,
  cache: str | None = None,
  *,
  wanted: str | None = None,
  splits: Sequence[str] = SPLITS,
) -> Path:
  """Returns a folder of shards on this host: `place` itself or, for a URL, a copy in the cache.

  One process of each host copies while the others wait. Files that an earlier process copied are
  not copied again, even if it was killed.

  Args:
    cache: config.data.cache.
    wanted: the SHA-256 of the manifest of the run that resumes; if these shards are in the cache,
      the URL need not be reachable.
    splits: the splits to copy, besides the vocabulary and the manifest.

  Raises:
    DataError: the build at the URL is unfinished, damaged, or not `wanted`.
    ValueError, OSError, ModuleNotFoundError: as `storage.find`, or the disk is full.
  """
  if not storage.is_remote(str(place)):
    return Path(place)
  url, root = str(place).rstrip("/"), cache_folder(cache)
  try:
    content = shards.manifest_content(url)
  except OSError as error:
    folder = root / str(wanted)[:16]
    if not _is_whole(folder, splits):
      raise
    print_line(f"{error}: using the copy in {folder}")
    return folder
  if content is None:
    raise DataError(f"{url}/{MANIFEST} is missing: build and publish the shards first")
  digest = hashlib.sha256(content).hexdigest()
  if wanted not in (None, digest):
    raise DataError(
      f"{url} has changed since the run began: data.manifest was {wanted!r}, is {digest!r}; use"
      " another --workdir, or resume anyway with --config.allow_config_change=data.manifest"
    )
  folder = root / digest[:16]
  folder.mkdir(parents=True, exist_ok=True)
  files = files_of(shards.parse_manifest(content, f"{url}/{MANIFEST}"), splits)
  if not _is_whole(folder, splits):
    with open_lock(folder / LOCK_FILE) as lock:
      _wait_for(lock, f"another process of this host that copies {url}")
      if missing := _missing(folder, files):  # the other process may have copied them
        _copy(url, folder, missing)
      with replacing(folder / MANIFEST) as temporary:
        temporary.write_bytes(content)
  return folder


def cache_folder(cache: str | None) -> Path:
  """Returns the cache folder."""
  default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "electra_jax" / "shards"
  return Path(cache or default).expanduser()


def files_of(manifest: dict, splits: Sequence[str] = SPLITS) -> list[dict]:
  """Returns the "file", "sha256" and "bytes" (None: the vocabulary) of each file of a build."""
  vocab = {"file": manifest["vocab"]["file"], "sha256": manifest["vocab"]["hash"], "bytes": None}
  return [vocab, *(shard for split in splits for shard in manifest["splits"][split]["shards"])]


def _is_whole(folder: Path, splits: Sequence[str]) -> bool:
  there = (folder / MANIFEST).exists()
  return there and not _missing(folder, files_of(shards.read_manifest(folder), splits))


def _missing(folder: Path, files: Iterable[dict]) -> list[dict]:
  def is_there(entry: dict) -> bool:
    path = folder / entry["file"]
    return path.exists() and entry["bytes"] in (None, path.stat().st_size)

  return [entry for entry in files if not is_there(entry)]


def _wait_for(lock, whom: str) -> None:
  try:
    flock(lock)
  except BlockingIOError:
    print_line(f"waiting for {whom}")
    flock(lock, wait=True)


def _copy(url: str, folder: Path, files: Sequence[dict]) -> None:
  """Copies files in parallel; raises at the first failure."""
  sweep(folder)
  needed, free = sum(entry["bytes"] or 0 for entry in files), shutil.disk_usage(folder).free
  if free < needed:
    sizes = f"{needed / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free"
    reason = f"No space left to copy {url} ({sizes}): set config.data.cache to another disk"
    raise OSError(errno.ENOSPC, reason, str(folder))
  copy = functools.partial(_copy_file, url, folder)
  at_once(f"copying {url} to {folder}", copy, files)


def at_once(label: str, action: Callable[[dict, Callable[[int], None]], None], files) -> None:
  """Calls action(file, count) for files in parallel; raises at the first failure.

  Args:
    label: shown in progress lines.
    action: calls `count` with the number of bytes moved since the last call.
    files: as `files_of` returns them.
  """
  total, done = sum(entry["bytes"] or 0 for entry in files), [0]
  lock, stop = threading.Lock(), threading.Event()

  def count(size: int) -> None:
    if stop.is_set():
      raise InterruptedError
    with lock:
      done[0] += size
      status.update(size)

  with (
    Status(label, lambda: min(1.0, done[0] / max(total, 1)), "MB", bar=False) as status,
    ThreadPoolExecutor(AT_ONCE) as pool,
  ):
    ends = [pool.submit(action, entry, count) for entry in files]
    try:
      for end in as_completed(ends):
        end.result()
    except BaseException:
      stop.set()
      pool.shutdown(wait=False, cancel_futures=True)
      raise


def _copy_file(url: str, folder: Path, entry: dict, count: Callable[[int], None]) -> None:
  source, path = f"{url}/{entry['file']}", folder / entry["file"]
  found, sums = storage.look(source), hashlib.sha256()
  if entry["bytes"] not in (None, found.size):
    raise DataError(f"{source} has {found.size:,} bytes, but {MANIFEST} says {entry['bytes']:,}")
  with storage.opened(found) as stream, replacing(path) as temporary, temporary.open("wb") as file:
    while data := stream.read(CHUNK_BYTES):
      file.write(data)
      sums.update(data)
      count(len(data))
    if (digest := sums.hexdigest()) != entry["sha256"]:
      raise DataError(
        f"{source} is damaged: SHA-256 {digest[:12]}, but {MANIFEST} says {entry['sha256'][:12]}"
      )
