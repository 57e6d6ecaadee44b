"""Objects in buckets and on web servers: s3://, gs://, hf:// and https://.

The only module that imports fsspec. A URL names one object or, except with https, is a pattern.
Requests are retried if a connection breaks or a server is busy. Tags reveal objects that are
replaced while they are read.
"""

import contextlib
import dataclasses
import functools
import glob
import http.client
import importlib
import io
import logging
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from electra_jax.runtime.workdir import replacing

RANGE_BYTES = 8 << 20
WAITS = 0.5, 1, 2, 4, 8  # seconds between attempts
TIMEOUT_SECS = 60
TRY_AGAIN = 408, 429
# Modules whose exceptions mean that a request failed, even if they are not OSErrors.
LIBRARIES = (
  "aiohttp aiobotocore botocore fsspec gcsfs google httpcore httpx httpx2 requests".split()
)
# Parameters in the query of a signed URL.
SECRETS = re.compile(r"[?&][^=&]*(signature|credential|token|secret|sig|key)=", re.IGNORECASE)
LOG_IN = {
  "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or run aws configure; for a public bucket"
  " set FSSPEC_S3_ANON=true",
  "gs": "run gcloud auth application-default login",
  "hf": "run hf auth login, or set HF_TOKEN",
}


@dataclasses.dataclass(frozen=True)
class Object:
  """The metadata of an object at one time."""

  url: str
  size: int  # bytes
  tag: str  # its version: ETag, generation or commit; "" if a web server has none
  ranged: bool = dataclasses.field(default=True, compare=False)  # supports range requests


class ChangedError(OSError):
  """An object has changed since it was found."""


def is_remote(text: str) -> bool:
  """Returns whether `text` is a URL, not a path."""
  return "://" in text


def find(pattern: str) -> list[Object]:
  """Returns the objects that match a URL or a pattern of URLs (*, **, ?, [...]), in order.

  A pattern may match none. URLs of datasets on the Hub get the commit of their revision:
  hf://datasets/OWNER/NAME@COMMIT/PATH.

  Raises:
    ValueError: the URL has credentials or an unknown scheme, or is a pattern for a web server.
    OSError: the bucket or object is missing or cannot be read; the message is one line.
    ModuleNotFoundError: a package of the extra `buckets` is missing.
  """
  return _tried(pattern, lambda store: store.find(pattern))


def look(url: str) -> Object:
  """Returns the current metadata of an object. Raises as `find`."""
  return _tried(url, lambda store: store.look(url))


@contextlib.contextmanager
def opened(found: Object) -> Iterator[BinaryIO]:
  """Opens an object for reading, without seeking unless it is `ranged`.

  Raises as `find`, and ChangedError if the object has changed, which is checked before and after
  reading.
  """
  _check_same(found)
  try:
    with io.BufferedReader((_Ranges if found.ranged else _Stream)(found), 1 << 16) as stream:
      yield stream
  except (OSError, EOFError, ValueError):
    _check_same(found)
    raise
  _check_same(found)


def read(url: str) -> bytes:
  """Reads an object; starts again if it changes meanwhile. Raises as `find`."""
  while True:
    with contextlib.suppress(ChangedError), opened(look(url)) as stream:
      return stream.read()


def fetch(url: str | Object, path: str | os.PathLike) -> None:
  """Copies an object to a file, atomically. Raises as `opened`."""
  found = url if isinstance(url, Object) else look(url)
  with opened(found) as stream, replacing(Path(path)) as temporary, temporary.open("wb") as file:
    shutil.copyfileobj(stream, file, RANGE_BYTES)


def put(url: str, data: bytes, create: bool = False) -> None:
  """Writes an object atomically.

  With `create`, only one of several writers of different bytes succeeds, even if it repeats the
  request because the response was lost.

  Raises:
    FileExistsError: with `create`, if the object exists with different bytes.
    ValueError, OSError, ModuleNotFoundError: as `find`.
  """
  try:
    _tried(url, lambda store: store.put(url, data, create))
  except FileExistsError:
    if not create or read(url) != data:
      raise FileExistsError(f"{url}: exists already") from None


def upload(path: str | os.PathLike, url: str) -> None:
  """Uploads a file and checks the size. Raises as `find`."""
  here = os.path.getsize(path)
  _tried(url, lambda store: store.upload(os.fspath(path), url))
  if (there := look(url).size) != here:
    raise OSError(f"{url} has {there:,} of the {here:,} bytes of {path}: write it again")


def remove(url: str) -> None:
  """Removes an object if it exists. Raises as `find`."""
  with contextlib.suppress(FileNotFoundError):
    _tried(url, lambda store: store.remove(url))


def move(url: str, to: str) -> None:
  """Moves the objects below a URL to another in the same bucket. Raises as `find`."""
  _tried(url, lambda store: store.move(url, to))


def _check_same(found: Object) -> None:
  if (now := look(found.url)) != found:
    was, is_now = (f"{x.size:,} bytes, {x.tag or 'no tag'}" for x in (found, now))
    raise ChangedError(f"{found.url} has changed: it was {was}, and is {is_now}")


class _Ranges(io.RawIOBase):
  """An object, read in ranges, with read-ahead for sequential reads."""

  def __init__(self, found: Object):
    self._found, self._at = found, 0
    self._start, self._data = 0, b""  # the buffered range
    self._ahead, self._pool = (0, None), ThreadPoolExecutor(1)

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    self._at = offset + (0, self._at, self._found.size)[whence]
    return self._at

  def readinto(self, buffer) -> int:
    if self._at >= self._found.size:
      return 0
    if not 0 <= self._at - self._start < len(self._data):
      follows = self._at == self._start + len(self._data)
      self._start, self._data = self._at, self._next()
      end = self._start + len(self._data)
      if follows and end < self._found.size:
        self._ahead = end, self._pool.submit(self._range, end)
    part = memoryview(self._data)[self._at - self._start :][: len(buffer)]
    buffer[: len(part)] = part
    self._at += len(part)
    return len(part)

  def _next(self) -> bytes:
    (at, asked), self._ahead = self._ahead, (0, None)
    return asked.result() if asked and at == self._at else self._range(self._at)

  def _range(self, start: int) -> bytes:
    end = min(start + RANGE_BYTES, self._found.size)

    def get(store: Any) -> bytes:
      if len(data := store.get(self._found.url, start, end)) != end - start:
        raise EOFError(f"got {len(data):,} of {end - start:,} bytes")
      return data

    return _tried(self._found.url, get)

  def close(self) -> None:
    self._pool.shutdown(wait=False, cancel_futures=True)
    self._data = b""
    super().close()


class _Stream(io.RawIOBase):
  """An object of a web server without ranges; re-read from the start if the connection breaks."""

  def __init__(self, found: Object):
    self._found, self._at, self._answer = found, 0, None

  def readable(self) -> bool:
    return True

  def tell(self) -> int:
    return self._at

  def readinto(self, buffer) -> int:
    wanted = min(len(buffer), self._found.size - self._at)
    data = _tried(self._found.url, lambda store: self._read(wanted)) if wanted else b""
    buffer[: len(data)] = data
    self._at += len(data)
    return len(data)

  def _read(self, size: int) -> bytes:
    try:
      if not self._answer:
        self._answer, left = _request(self._found.url), self._at
        while left:
          left -= len(self._some(min(left, RANGE_BYTES)))
      return self._some(size)
    except Exception:
      self._answer = None
      raise

  def _some(self, size: int) -> bytes:
    if not (data := self._answer.read(size)):
      raise EOFError("the connection ended")
    return data

  def close(self) -> None:
    if self._answer:
      self._answer.close()
    super().close()


class _Bucket:
  """An fsspec store."""

  ROOT = 1  # number of names in the path of a bucket
  RETRIES = 2  # s3fs and gcsfs make five or more attempts within each

  def __init__(self, scheme: str, module: str, name: str, tag: str = "", **options):
    self._scheme, self._tag = scheme, tag
    logging.getLogger(module).setLevel(logging.CRITICAL)  # it raises what it logs
    self._files = getattr(importlib.import_module(module), name)(**options)

  def find(self, pattern: str) -> list[Object]:
    path = _path(pattern)
    if not glob.has_magic(path):
      return [self.look(pattern)]
    if not (found := self._files.glob(path, detail=True)):
      self._files.info("/".join(path.split("/")[: self.ROOT]))  # raises if the bucket is missing
    return [self._object(found[name]) for name in sorted(found) if found[name]["type"] == "file"]

  def look(self, url: str) -> Object:
    info = self._files.info(_path(url))
    if info["type"] != "file":
      raise FileNotFoundError
    return self._object(info)

  def _object(self, info: dict) -> Object:
    return Object(f"{self._scheme}://{info['name']}", info["size"], str(info[self._tag]).strip('"'))

  def get(self, url: str, start: int, end: int) -> bytes:
    return self._files.cat_file(_path(url), start=start, end=end)

  def put(self, url: str, data: bytes, create: bool) -> None:
    self._files.pipe_file(_path(url), data, mode="create" if create else "overwrite")

  def upload(self, path: str, url: str) -> None:
    self._files.put_file(path, _path(url))

  def move(self, url: str, to: str) -> None:
    for path in self._files.find(_path(url)):
      self._files.cp_file(path, _path(to) + path[len(_path(url)) :])
      self._files.rm_file(path)

  def remove(self, url: str) -> None:
    self._files.rm_file(_path(url))


def _path(url: str) -> str:
  return url.partition("://")[2]


class _ReadOnly:
  def put(self, url: str, *_) -> None:
    raise ValueError(f"{url} is read-only: write to s3:// or gs://")

  remove = put

  def upload(self, path: str, url: str) -> None:
    self.put(url)


class _Hub(_ReadOnly, _Bucket):
  """Datasets of the Hugging Face Hub."""

  RETRIES = None

  ROOT = 3

  def find(self, pattern: str) -> list[Object]:
    from huggingface_hub import HfApi

    # The branch of a dataset converted to Parquet has slashes in its name.
    place = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/\w+/[^/]+|[^/]+))?/(.+)", pattern)
    if not place:
      raise ValueError(f"{pattern}: expected hf://datasets/OWNER/NAME/PATH, or NAME@REVISION")
    name, revision, rest = place.groups()
    commit = HfApi().dataset_info(name, revision=revision).sha
    return super().find(f"hf://datasets/{name}@{commit}/{rest}")

  def _object(self, info: dict) -> Object:
    commit = re.search(r"@([^/]+)", info["name"])  # the files of a commit never change
    return Object(f"hf://{info['name']}", info["size"], commit[1] if commit else "")

  def get(self, url: str, start: int, end: int) -> bytes:
    return self._files.cat_file(_path(url), start=start, end=end, cache_type="none")


class _Web(_ReadOnly):
  """Web servers."""

  RETRIES = None

  def find(self, url: str) -> list[Object]:
    if re.search(r"[*[]", url):
      raise ValueError(f"{url}: list the URLs of files on a web server, separated by commas")
    return [self.look(url)]

  def look(self, url: str) -> Object:
    try:
      with _request(url, "bytes=0-0") as answer:
        size, headers = answer.headers["Content-Length"], answer.headers
        ranged = answer.status == http.HTTPStatus.PARTIAL_CONTENT
    except urllib.error.HTTPError as error:
      if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        raise
      headers, ranged = error.headers, True  # an empty object
    if ranged:
      size = headers["Content-Range"].rpartition("/")[2]
    if not (size or "").isdigit():
      raise ValueError(f"{url}: the server does not send its size: download it and read the file")
    tag = headers["ETag"] or headers["Last-Modified"] or ""
    return Object(url, int(size), tag.strip('"'), ranged)

  def get(self, url: str, start: int, end: int) -> bytes:
    with _request(url, f"bytes={start}-{end - 1}") as answer:
      return answer.read()


def _request(url: str, ranges: str | None = None) -> http.client.HTTPResponse:
  headers = {"Range": ranges} if ranges else {}
  request = urllib.request.Request(url, headers=headers | {"User-Agent": "electra_jax"})
  return urllib.request.urlopen(request, timeout=TIMEOUT_SECS)


# {scheme: makes its store}. Listings are not cached, because a cache would hide changes.
STORES: dict[str, Callable] = {
  "s3": functools.partial(_Bucket, "s3", "s3fs", "S3FileSystem", "ETag", use_listings_cache=False),
  "gs": functools.partial(
    _Bucket, "gs", "gcsfs", "GCSFileSystem", "generation", use_listings_cache=False
  ),
  "hf": functools.partial(_Hub, "hf", "huggingface_hub", "HfFileSystem"),
  "http": _Web,
  "https": _Web,
}


def forget_listings() -> None:
  """Turns off the cache of gs:// listings, because orbax writes there with two libraries."""
  importlib.import_module("fsspec").config.conf["gs"] = {"use_listings_cache": False}


@functools.cache
def _store(scheme: str) -> Any:
  return STORES[scheme]()


def _tried(url: str, call: Callable[[Any], Any]) -> Any:
  """Returns `call(store)` for the URL's store, with retries after temporary failures."""
  scheme, _, rest = url.partition("://")
  if scheme not in STORES:
    raise ValueError(f"{url}: the scheme must be one of {', '.join(f'{x}://' for x in STORES)}")
  if "@" in rest.partition("/")[0] or SECRETS.search(rest):
    shown = f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"
    raise ValueError(f"{shown}: leave credentials out of the URL, which is recorded")
  store = _store(scheme)
  for wait in (*WAITS[: store.RETRIES], None):
    try:
      return call(store)
    except Exception as error:
      if not isinstance(error, OSError | EOFError | http.client.HTTPException) and (
        type(error).__module__.partition(".")[0] not in LIBRARIES
      ):
        raise
      reason = _explained(url, scheme, error)
      if wait is None or not isinstance(reason, ConnectionError):
        raise reason from None
    time.sleep(wait)


def _explained(url: str, scheme: str, error: Exception) -> OSError:
  """Returns an error of one line with the URL; a ConnectionError means that a retry may help."""
  status = _status(error)
  text = " ".join(str(error).split())[:300] or type(error).__name__
  if isinstance(error, FileNotFoundError) or status == 404:
    return FileNotFoundError(f"{url}: no such object or bucket")
  if isinstance(error, FileExistsError) or status == 412:
    return FileExistsError(f"{url}: exists already")
  denied = isinstance(error, PermissionError) or status in (401, 403) or "Forbidden" in text
  if denied or "Credentials" in type(error).__name__:
    return PermissionError(f"{url}: access denied ({text}): {LOG_IN.get(scheme, 'log in')}")
  wrong = status and 400 <= status < 500 and status not in TRY_AGAIN
  if wrong or "Validation" in type(error).__name__:
    return OSError(f"{url}: cannot be read or written ({text})")
  return ConnectionError(f"{url}: the server fails, even after retries ({text})")


def _status(error: BaseException) -> int | None:
  """Returns the HTTP status of a library's error or of its cause."""
  for found in filter(None, (error, error.__cause__)):
    response = getattr(found, "response", None)
    if isinstance(response, dict):  # botocore's
      return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    status = getattr(found, "code", None) or getattr(response, "status_code", None)
    if str(status).isdigit():
      return int(status)
  return None
