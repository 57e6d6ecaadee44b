"""A run's workdir at a URL, gs:// or s3://: a local folder whose files are uploaded.

The files of the workdir and vocab/ are downloaded when a run starts, and uploaded whole before each
checkpoint and once a minute. Compiled programs, traces and TensorBoard files stay in the local
folder, in ~/.cache/electra_jax/runs or $XDG_CACHE_HOME. orbax writes directly to gs://; for s3://,
a step is written locally and then uploaded, with its commit file last.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from electra_jax.runtime import claims, processes, storage
from electra_jax.runtime.foreign import inside, read_json
from electra_jax.runtime.workdir import (
  BUCKET_FILE,
  CHECKPOINTS,
  CONFIG_FILE,
  LOCK_FILE,
  VOCAB_FOLDER,
  flock,
  open_lock,
  replacing,
  temporary,
)

COMMITTED = "commit_success.txt"  # marks a complete step in a bucket
UPLOAD_SECS = 60
TRANSFERS = 8  # files at a time
SCHEMES = "gs", "s3"
DAMAGED = "damaged"  # beside CHECKPOINTS: steps set aside
NOT_COPIED = CHECKPOINTS, DAMAGED, claims.FOLDER


class Bucket:
  """Process 0's view of the folder at a URL.

  Args:
    folder: the local folder, with the files at the URL.
    check: raises if another process has taken over the URL.
  """

  def __init__(self, url: str, folder: Path, check: Callable[[], None]):
    self.url, self.folder, self._check = url, folder, check
    self._uploaded = {path: _stamp(path) for path in _files(folder)}
    self._lock, self._is_lost = threading.Lock(), False

  def upload(self) -> None:
    """Uploads changed files. Raises ClaimError, or OSError with one line."""
    with self._lock:
      try:
        self._check()
        # The config first: it marks the files at the URL as a run.
        for path in sorted(_files(self.folder), key=lambda path: path.name != CONFIG_FILE):
          if self._uploaded.get(path) != (stamp := _stamp(path)):
            storage.put(f"{self.url}/{path.relative_to(self.folder)}", path.read_bytes())
            self._uploaded[path] = stamp
        self._is_lost = False
      except OSError:
        self._is_lost = True
        raise

  def upload_steps(self, keep: int, keep_every: int) -> None:
    """Uploads complete steps that the URL lacks, and removes steps there that are not kept.

    Raises as `upload`.

    Args:
      keep, keep_every: as `Checkpoints` takes them.
    """
    self._check()
    whole, _ = _list_steps(self.url)
    for path in (self.folder / CHECKPOINTS).iterdir():
      if path.name.isdigit() and int(path.name) not in whole:
        marker, files = path / COMMITTED, [x for x in path.rglob("*") if x.is_file()]
        with ThreadPoolExecutor(TRANSFERS) as pool:
          list(pool.map(self._upload_file, [x for x in files if x != marker]))
        self._upload_file(marker)
    whole, found = _list_steps(self.url)
    kept = {*whole[-keep:], *(step for step in whole if keep_every and step % keep_every == 0)}
    for step in found.keys() - kept:
      # The marker first: a process that dies here must not leave a partial step marked complete.
      for item in sorted(found[step], key=lambda x: not x.url.endswith(f"/{step}/{COMMITTED}")):
        storage.remove(item.url)

  def _upload_file(self, path: Path) -> None:
    storage.upload(path, f"{self.url}/{path.relative_to(self.folder)}")

  def set_aside(self, step: int) -> None:
    """Moves a step to DAMAGED and downloads the step before it."""
    storage.move(f"{self.url}/{CHECKPOINTS}/{step}", f"{self.url}/{DAMAGED}/{step}")
    _download_newest(self.url, self.folder)

  @contextlib.contextmanager
  def uploading(self) -> Iterator[None]:
    """Uploads every UPLOAD_SECS until the block ends, then once more."""
    over = threading.Event()

    def upload() -> None:
      with contextlib.suppress(OSError, claims.ClaimError):  # the next save raises it
        self.upload()

    def repeat() -> None:
      while not over.wait(UPLOAD_SECS):
        upload()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
      yield
    finally:
      over.set()
      if not self._is_lost:  # otherwise each attempt would take minutes
        thread.join()
        upload()


@contextlib.contextmanager
def opened(workdir: str | Path) -> Iterator[tuple[Path, Bucket | None]]:
  """Yields a workdir's local folder and, on process 0 for a URL, its `Bucket`.

  All processes of a run call this together. Process 0 claims a URL until the block ends; each
  process has a separate local folder.

  Raises:
    ValueError: the URL cannot be a workdir, is not a run or is in use; one line.
    OSError: the bucket cannot be read or written; one line.
  """
  if not storage.is_remote(str(workdir)):
    yield Path(workdir), None
    return
  url, process = str(workdir).rstrip("/"), jax.process_index()
  scheme, folder = url.partition("://")[0], local_folder("runs", f"{url} {process}", url)
  with contextlib.ExitStack() as stack:

    def claim() -> Callable[[], None] | None:
      if scheme not in SCHEMES:
        raise ValueError(f"--workdir={url}: use a folder, gs:// or s3://")
      if scheme == "s3" and jax.process_count() > 1:
        raise ValueError(f"--workdir={url}: s3:// supports only runs of one process: use gs://")
      if process > 0:
        return None
      _list_files(url)  # raises before anything is written there
      return stack.enter_context(claims.claim(url))

    check = processes.run_on_all(claim)
    processes.run_on_all(lambda: _download_files(url, folder))
    bucket = Bucket(url, folder, check) if process == 0 else None
    if bucket:
      stack.enter_context(bucket.uploading())
    try:
      yield folder, bucket
    except ValueError as error:
      error.args = (str(error).replace(str(folder), url),)
      raise


def local(path: str | Path, step: int | None = None, every: bool = False) -> Path:
  """Returns a path or, for a URL of gs:// or s3://, a local copy of the run or networks there.

  Copies `every` checkpoint, or that of a step: the newest (None), or none (0). Unchanged files are
  not copied again. Not for the workdir of a run that trains here.

  Raises:
    ValueError: the URL is empty or lacks the step.
    OSError: the bucket cannot be read; one line.
  """
  url = str(path).rstrip("/")
  if url.partition("://")[0] not in SCHEMES:
    return Path(path)
  whole, steps = _list_steps(url)
  if step and step not in whole:
    raise ValueError(f"{url} has no checkpoint of step {step}; choose one of {whole}")
  chosen = whole if every else [step or whole[-1]] if whole and step != 0 else []
  found = {x.url[len(url) + 1 :]: x for x in storage.find(f"{url}/**")}
  found = {k: x for k, x in found.items() if k.partition("/")[0] not in NOT_COPIED}
  found |= {x.url[len(url) + 1 :]: x for one in chosen for x in steps[one]}
  if not found:
    raise ValueError(f"{url} is empty or does not exist")
  folder = local_folder("copies", url, url)
  folder.parent.mkdir(parents=True, exist_ok=True)
  with open_lock(folder.parent / LOCK_FILE) as lock:
    flock(lock, wait=True)
    record, tags = folder.parent / "tags.json", {k: x.tag for k, x in found.items()}
    known = read_json(record) if record.exists() else {}
    if known.keys() - tags.keys():  # for example another step
      record.unlink()
      shutil.rmtree(folder, ignore_errors=True)
      known = {}
    (folder / CHECKPOINTS if whole else folder).mkdir(parents=True, exist_ok=True)
    fetch(url, folder, [x for k, x in found.items() if known.get(k) != x.tag])
    with replacing(record) as draft:
      draft.write_text(json.dumps(tags), "utf-8")
  return folder


@contextlib.contextmanager
def uploaded(out: str | Path) -> Iterator[Path]:
  """Yields a path for a new folder, which is uploaded at the end if `out` is a URL.

  Raises ValueError if the URL is not empty, OSError if it cannot be written; one line.
  """
  url = str(out).rstrip("/")
  if not storage.is_remote(url):
    yield Path(out)
    return
  if storage.find(f"{url}/**"):
    raise ValueError(f"{url} exists: choose another name")
  place = local_folder("uploads", url, url)
  place.parent.mkdir(parents=True, exist_ok=True)
  with temporary(place, folder=True) as parent:
    folder = parent / place.name
    yield folder
    # JSON last: it marks the format, so a partial upload is not readable.
    files = sorted(folder.rglob("*"), key=lambda path: path.suffix == ".json")
    for path in (path for path in files if path.is_file()):
      storage.upload(path, f"{url}/{path.relative_to(folder)}")


def fetch(url: str, folder: Path, found: Iterable[storage.Object]) -> None:
  """Copies objects below a URL to a folder, with their names."""

  def copy(item: storage.Object) -> None:
    path = inside(folder, item.url[len(url) + 1 :])
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.fetch(item, path)

  with ThreadPoolExecutor(TRANSFERS) as pool:
    list(pool.map(copy, found))


def local_folder(kind: str, key: str, url: str) -> Path:
  """Returns this machine's folder of a kind for a URL; `key` makes it unique."""
  cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
  digest = hashlib.sha256(key.encode()).hexdigest()[:16]
  return cache / "electra_jax" / kind / digest / url.rpartition("/")[2]


def _files(folder: Path) -> list[Path]:
  """Returns the files of a local folder that are kept at its URL."""
  found = [*folder.glob("*"), *(folder / VOCAB_FOLDER).glob("*")]
  hidden = re.compile(r"\.|.*\.tmp$")
  return [path for path in found if path.is_file() and not hidden.match(path.name)]


def _stamp(path: Path) -> tuple[int, int]:
  facts = path.stat()
  return facts.st_mtime_ns, facts.st_size


def _list_files(url: str) -> list[storage.Object]:
  """Lists the files of the run at a URL. Raises ValueError if the URL holds something else."""
  found = [
    x
    for pattern in ("*", f"{VOCAB_FOLDER}/*")
    for x in storage.find(f"{url}/{pattern}")
    if not x.url.endswith("/")  # folders made in a web console
  ]
  if found and not any(x.url == f"{url}/{CONFIG_FILE}" for x in found):
    raise ValueError(
      f"{url} holds {found[0].url[len(url) + 1 :]} but no {CONFIG_FILE}: it is not a run"
    )
  return found


def _download_files(url: str, folder: Path) -> None:
  """Replaces the local files by the files at a URL."""
  folder.mkdir(parents=True, exist_ok=True)
  for path in _files(folder):
    path.unlink()
  shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
  (folder / BUCKET_FILE).write_text(url, "utf-8")
  fetch(url, folder, found := _list_files(url))
  if found:
    (folder / CHECKPOINTS).mkdir()
  if url.startswith("s3://"):
    _download_newest(url, folder)


def _download_newest(url: str, folder: Path) -> None:
  """Downloads the newest complete step at a URL, if any."""
  whole, found = _list_steps(url)
  fetch(url, folder, [item for step in whole[-1:] for item in found[step]])


def _list_steps(url: str) -> tuple[list[int], dict[int, list[storage.Object]]]:
  """Returns the sorted complete steps at a URL, and the objects of all steps, partial ones too."""
  found, whole = {}, []
  for item in storage.find(f"{url}/{CHECKPOINTS}/**"):
    step, _, rest = item.url[len(f"{url}/{CHECKPOINTS}/") :].partition("/")
    if step.isdigit():
      found.setdefault(int(step), []).append(item)
      if rest == COMMITTED:
        whole.append(int(step))
  return sorted(whole), found
