"""A run's folder: its lock, its configuration file, and atomic writes."""

import contextlib
import errno
import fcntl
import functools
import itertools
import json
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from electra_jax.runtime.foreign import read_json

CONFIG_FILE, LOCK_FILE = "config.json", ".lock"
BUCKET_FILE = ".bucket"  # holds the URL, in the local folder of a workdir at a URL
CHECKPOINTS = "checkpoints"  # a folder for each step
VOCAB_FOLDER = "vocab"  # a copy of the vocabulary and of the manifest of the shards
GROUPS = {"model", "data", "train"}  # in the run configurations of all versions
# Identifies this process, because process id and host may be the same in another container.
ID = uuid.uuid4().hex[:8]
UNFINISHED_SECS = 2  # for retries of deleting unfinished files
TEMPORARY = re.compile(r"-\d+-[0-9a-f]{8}\.tmp$")  # the names of `own_temporary`
FOREIGN_SECS = 24 * 3600  # until another host's are swept
NO_LOCKS = errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS  # errors of file systems without locks


@contextlib.contextmanager
def naming(path: Path, keep: bool = False) -> Iterator[None]:
  """Adds the path to an OSError; with `keep`, unless it names a file."""
  try:
    yield
  except OSError as error:
    if error.errno is None or (keep and error.filename):  # None: from a library
      raise
    raise OSError(error.errno, error.strerror, str(path)) from None


def own_temporary(path: Path) -> Path:
  """Returns a new name beside `path` that no other process on any host uses."""
  unique = uuid.uuid4().hex[:8]
  return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}-{unique}.tmp")


def _without_links(path: str, flags: int) -> int:
  return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def open_lock(path: Path) -> IO:
  """Opens a file to lock, creating it; raises OSError for a symbolic link."""
  with naming(path):
    try:
      return open(path, "a+", encoding="utf-8", opener=_without_links)
    except OSError as error:
      if error.errno != errno.ELOOP:
        raise
      raise OSError(errno.ELOOP, "A symbolic link: delete it") from None


@contextlib.contextmanager
def temporary(path: Path, folder: bool = False) -> Iterator[Path]:
  """Yields a new file, or a new hidden folder, beside `path`; deletes it unless it was renamed.

  First deletes what killed processes left in `path`'s folder (`sweep`). The process holds a lock
  while it uses them: on the file, or on a file with the folder's name and .tmp.
  """
  sweep(path.parent)
  while True:
    name = own_temporary(path.with_name(f".{path.name.lstrip('.')}") if folder else path)
    lock = open_lock(name)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):  # swept before it was locked
      flock(lock)
      if os.path.samestat(os.fstat(lock.fileno()), name.stat()):
        break
    lock.close()
  yielded = name.with_suffix("") if folder else name
  with lock:
    try:
      if folder:
        yielded.mkdir()
      yield yielded
    finally:
      if folder:
        delete_unfinished(yielded)
      name.unlink(missing_ok=True)


@functools.cache
def sweep(folder: Path) -> None:
  """Deletes what `temporary` made in a folder for processes that were killed, once per process."""
  here = f".{socket.gethostname()}-"
  for path in (path for path in folder.glob("*.tmp") if TEMPORARY.search(path.name)):
    with contextlib.suppress(OSError), open(path, "rb+", opener=_without_links) as lock:
      # The locks of a mounted bucket may be invisible to other hosts.
      old = here in path.name or time.time() - path.stat().st_mtime > FOREIGN_SECS
      if old and flock(lock):  # raises for a live process
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
        path.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
  """Yields a temporary path that atomically replaces `path` if the block succeeds.

  An OSError in the block names `path`.
  """
  with naming(path), temporary(path) as draft:
    yield draft
    with draft.open("rb") as file:  # otherwise `path` may be empty after a power cut
      os.fsync(file.fileno())
    os.replace(draft, path)


def free_name(path: Path) -> Path:
  """Returns the first of `path`, `path`.1, `path`.2, ... that does not exist."""
  names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
  return next(name for name in itertools.chain([path], names) if not name.exists())


def check_name(folder: Path) -> Path:
  """Returns the folder; raises ValueError if its path is not UTF-8, which tensorstore needs."""
  try:
    str(folder.absolute()).encode()
    return folder
  except UnicodeEncodeError:
    raise ValueError(
      f"the path {folder} is not UTF-8: set PYTHONUTF8=1 if it was typed as text, or rename it"
    ) from None


def check_new(out: Path, replaces: bool = False) -> None:
  """Raises ValueError if `out` exists (`replaces`: as a folder), OSError if not writable."""
  with naming(out):
    if out.is_dir() or (out.exists() and not replaces):
      raise ValueError(f"{out} exists: choose another name")
    if not out.exists():
      tempfile.TemporaryFile(dir=out.parent).close()


@contextlib.contextmanager
def new_folder(out: Path, needed: int = 0) -> Iterator[Path]:
  """Yields a temporary folder that becomes `out` if the block succeeds.

  All files in it get the usual permissions (umask), even if a library created them as private.
  Raises ValueError if `out` exists or is not UTF-8, OSError if fewer than `needed` bytes are free.
  """
  check_name(out)
  if out.exists():
    raise ValueError(f"{out} exists: choose another name")
  try:
    out.parent.mkdir(parents=True, exist_ok=True)
  except FileExistsError:
    raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(out.parent)) from None
  if (free := shutil.disk_usage(out.parent).free) < needed:
    sizes = f"{needed / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free"
    raise OSError(errno.ENOSPC, f"No space left ({sizes})", str(out))
  with contextlib.ExitStack() as stack:
    with naming(out):
      draft = stack.enter_context(temporary(out, folder=True))
    mode = draft.stat().st_mode
    with naming(out, keep=True):
      yield draft
    for path in draft.rglob("*"):
      path.chmod(mode if path.is_dir() else mode & 0o666)
    with naming(out):
      os.rename(draft, out)


def delete_unfinished(folder: Path) -> None:
  """Deletes a folder, if it exists, with retries while failed threads still write to it."""
  end = time.monotonic() + UNFINISHED_SECS
  while folder.exists():
    shutil.rmtree(folder, ignore_errors=True)
    if time.monotonic() > end:
      break
    time.sleep(0.05)


def flock(file: IO, shared: bool = False, wait: bool = False) -> bool:
  """Locks an open file until it is closed; returns whether the file system has locks.

  Raises BlockingIOError if another process holds the lock and `wait` is False.
  """
  try:
    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
  except OSError as error:
    if error.errno not in NO_LOCKS:  # some buckets have none
      raise
    return False
  return True


@contextlib.contextmanager
def claim(workdir: Path) -> Iterator[None]:
  """Locks a folder for this process, creating it if needed; the lock ends with the process.

  Removes a new folder in which nothing was written. Locks on mounted buckets may be invisible to
  other hosts; `check_claim` covers these. Raises ValueError if a live process holds the lock.
  """
  if re.match(r"\w+:/", str(workdir)):  # a Path turns two slashes into one
    raise ValueError(f"--workdir={workdir}: pass a URL as a string, not as a Path")
  try:
    str(workdir.absolute()).encode()
  except UnicodeEncodeError:  # orbax cannot write there
    raise ValueError(f"--workdir={workdir}: checkpoints need a path in UTF-8: rename it") from None
  is_new = not workdir.exists()
  workdir.mkdir(parents=True, exist_ok=True)
  with open_lock(workdir / LOCK_FILE) as lock:
    try:
      flock(lock)
    except BlockingIOError:
      lock.seek(0)
      raise ValueError(f"{workdir} is in use by {lock.read().strip()}") from None
    with naming(workdir / LOCK_FILE):
      lock.truncate(0)
      lock.write(_holder() + "\n")
      lock.flush()
      os.fsync(lock.fileno())
    sweep(workdir)
    try:
      yield
    finally:
      if is_new:
        remove_unused(workdir)


def remove_unused(folder: Path) -> None:
  """Removes a folder that holds only its lock, which the caller holds."""
  if [path.name for path in folder.glob("*")] == [LOCK_FILE]:
    shutil.rmtree(folder, ignore_errors=True)


def check_claim(workdir: Path) -> None:
  """Raises ValueError, with its name, if another process has taken over the folder."""
  try:
    holder = (workdir / LOCK_FILE).read_text("utf-8").strip()
  except FileNotFoundError:  # deleted by hand; the next claim recreates it
    return
  if holder != _holder():
    raise ValueError(f"{workdir} has been taken over by {holder}")


def _holder() -> str:
  return f"process {os.getpid()} on {socket.gethostname()} ({ID})"


def read_config(workdir: Path) -> dict | None:
  """Returns the configuration saved by `write_config`; None if the folder is missing or unused.

  Raises ValueError if the file is damaged or another program's, or the folder is not a run.
  """
  if not workdir.is_dir():
    return None
  path = workdir / CONFIG_FILE
  if path.exists():
    config = read_json(path)
    if not all(isinstance(config.get(x), dict) for x in GROUPS):
      raise ValueError(f"{path} is not from electra-jax train: {workdir} is not a run")
    return config
  # Other folders are allowed: they may hold shards or the compilation cache.
  folders = CHECKPOINTS, VOCAB_FOLDER
  files = (p.name for p in workdir.iterdir() if p.is_file() or p.name in folders)
  hidden = LOCK_FILE, BUCKET_FILE
  if found := sorted(x for x in files if x not in hidden and not x.endswith(".tmp")):
    raise ValueError(f"{workdir} holds {found[0]} but no {CONFIG_FILE}: it is not a run")
  return None


def read_run_config(workdir: str | Path) -> dict:
  """Returns the configuration that a run saved; raises ValueError if there is none."""
  saved = read_config(Path(workdir))
  if saved is None:
    raise ValueError(f"{workdir} is not a run of electra-jax train")
  return saved


def write_config(workdir: Path, config: dict) -> None:
  """Writes the configuration atomically."""
  with replacing(workdir / CONFIG_FILE) as temporary:
    temporary.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
