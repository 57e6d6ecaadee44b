"""A run's folder: its lock, its configuration file, and atomic writes."""

import contextlib
import errno
import fcntl
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

CONFIG_FILE, LOCK_FILE = "config.json", ".lock"
BUCKET_FILE = ".bucket"  # in the local folder of a workdir at a URL: the URL
CHECKPOINTS = "checkpoints"  # a folder for each step
VOCAB_FOLDER = "vocab"  # a copy of the vocabulary and of the manifest of the shards
GROUPS = {"model", "data", "train"}  # every version's run configuration has these
# Identifies this process: in a container, its number and host may be the same as in an earlier pod.
ID = uuid.uuid4().hex[:8]
UNFINISHED_SECS = 2  # how long to try to delete unfinished files
NO_LOCKS = errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS  # errors of file systems without locks


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
  """Adds the path to an OSError, which may lack it."""
  try:
    yield
  except OSError as error:
    if error.errno is None:  # a library's own
      raise
    raise OSError(error.errno, error.strerror, str(path)) from None


def own_temporary(path: Path) -> Path:
  """Returns a name beside `path` that no other process, on no other host, uses."""
  return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}-{ID}.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
  """Yields a temporary path that atomically replaces `path` if the block succeeds.

  An OSError in it names `path`.
  """
  temporary = own_temporary(path)
  try:
    with naming(path):
      yield temporary
      with temporary.open("rb") as file:  # else it may be empty under its name after a power cut
        os.fsync(file.fileno())
      os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def free_name(path: Path) -> Path:
  """Returns the first of `path`, `path`.1, `path`.2, ... that does not exist."""
  names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
  return next(name for name in itertools.chain([path], names) if not name.exists())


def check_new(out: Path, replaces: bool = False) -> None:
  """Raises ValueError if `out` exists, with `replaces` as a folder; OSError if it can't be made."""
  with naming(out):
    if out.is_dir() or (out.exists() and not replaces):
      raise ValueError(f"{out} exists: nothing is overwritten")
    if not out.exists():
      tempfile.TemporaryFile(dir=out.parent).close()


@contextlib.contextmanager
def new_folder(out: Path, needed: int = 0) -> Iterator[Path]:
  """Yields a temporary folder that becomes `out` if the block succeeds.

  All files in it get the usual permissions (umask), also files that a library created as private.
  Raises ValueError if `out` exists, OSError if there is no space for the `needed` bytes.
  """
  if out.exists():
    raise ValueError(f"{out} exists: nothing is overwritten")
  try:
    out.parent.mkdir(parents=True, exist_ok=True)
  except FileExistsError:
    raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(out.parent)) from None
  if (free := shutil.disk_usage(out.parent).free) < needed:
    sizes = f"{needed / 1e6:,.1f} MB are needed and {free / 1e6:,.1f} MB free"
    raise OSError(errno.ENOSPC, f"No space left ({sizes})", str(out))
  temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
  with naming(out):
    temporary.mkdir()
  try:
    mode = temporary.stat().st_mode
    yield temporary
    for path in temporary.rglob("*"):
      path.chmod(mode if path.is_dir() else mode & 0o666)
    with naming(out):
      os.rename(temporary, out)
  finally:
    delete_unfinished(temporary)


def delete_unfinished(folder: Path) -> None:
  """Deletes a folder if it is there; tries again if threads that failed still write into it."""
  end = time.monotonic() + UNFINISHED_SECS
  while folder.exists():
    shutil.rmtree(folder, ignore_errors=True)
    if time.monotonic() > end:
      break
    time.sleep(0.05)


def flock(file: IO, shared: bool = False, wait: bool = False) -> None:
  """Locks an open file until it is closed, where the file system has locks (some buckets do not).

  Raises BlockingIOError if another process holds it, and this one does not wait.
  """
  try:
    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
  except OSError as error:
    if error.errno not in NO_LOCKS:
      raise


@contextlib.contextmanager
def claim(workdir: Path) -> Iterator[None]:
  """Locks a folder for this process, creating it if needed; the lock ends with the process.

  A new folder in which nothing was written is removed again. Mounted buckets may lack locks that
  other hosts see; `check_claim` covers these. Raises ValueError if a live process holds it.
  """
  if re.match(r"\w+:/", str(workdir)):  # a Path makes one slash of two
    raise ValueError(f"--workdir={workdir}: give a URL as text, not as a Path")
  is_new = not workdir.exists()
  workdir.mkdir(parents=True, exist_ok=True)
  with (workdir / LOCK_FILE).open("a+") as lock:
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
    try:
      yield
    finally:
      if is_new:
        remove_unused(workdir)


def remove_unused(folder: Path) -> None:
  """Removes a folder in which nothing is but its lock, which the caller holds."""
  if [path.name for path in folder.glob("*")] == [LOCK_FILE]:
    shutil.rmtree(folder, ignore_errors=True)


def check_claim(workdir: Path) -> None:
  """Raises ValueError if another process has claimed the folder since, with its name."""
  try:
    holder = (workdir / LOCK_FILE).read_text().strip()
  except FileNotFoundError:  # deleted by somebody; the next claim recreates it
    return
  if holder != _holder():
    raise ValueError(f"{workdir} has been taken over by {holder}")


def _holder() -> str:
  return f"process {os.getpid()} on {socket.gethostname()} ({ID})"


def read_config(workdir: Path) -> dict | None:
  """Returns the configuration saved by `write_config`, None in an unused folder or without one.

  Raises ValueError if the file is damaged or another program's, or the folder is not a run's.
  """
  if not workdir.is_dir():
    return None
  path = workdir / CONFIG_FILE
  if path.exists():
    try:
      config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path} is damaged ({error})") from error
    if not isinstance(config, dict) or not all(isinstance(config.get(x), dict) for x in GROUPS):
      raise ValueError(
        f"{path} is not a configuration of electra-jax train: {workdir} is not a run"
      )
    return config
  # Other folders are allowed: they may hold shards or the compilation cache.
  own = CHECKPOINTS, VOCAB_FOLDER
  files = (p.name for p in workdir.iterdir() if p.is_file() or p.name in own)
  hidden = LOCK_FILE, BUCKET_FILE
  if found := sorted(x for x in files if x not in hidden and not x.endswith(".tmp")):
    raise ValueError(f"{workdir} holds {found[0]} but no {CONFIG_FILE}: it is not a run")
  return None


def read_run_config(workdir: str | Path) -> dict:
  """Returns the configuration that a run saved; raises ValueError if the folder holds none."""
  saved = read_config(Path(workdir))
  if saved is None:
    raise ValueError(f"{workdir} holds no run of electra-jax train")
  return saved


def write_config(workdir: Path, config: dict) -> None:
  """Writes the configuration atomically."""
  with replacing(workdir / CONFIG_FILE) as temporary:
    temporary.write_text(json.dumps(config, indent=2) + "\n")
