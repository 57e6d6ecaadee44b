"""Publishes shards that were built on this host to s3:// or gs://.

URL/manifest.json                  deleted first, written last: present only for a complete build
URL/.claims/                       the claim of the one process that builds
CACHE/building-1d2f9c0d12b4e567/   the build before publication, named by a hash of the URL
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from electra_jax.data import mirror, shards
from electra_jax.data.shards import MANIFEST, DataError
from electra_jax.data.status import print_line
from electra_jax.monitor.display import doing
from electra_jax.runtime import claims, storage, terminal

SCHEMES = "s3://", "gs://"


def work_folder(url: str, cache: str | None) -> Path:
  """Returns the local folder in which the shards of a URL are built."""
  name = f"building-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
  return mirror.cache_folder(cache) / name


@contextlib.contextmanager
def claimed(url: str) -> Iterator[Callable[[], None]]:
  """Claims a URL for this process; see `claims.claim`."""
  with contextlib.ExitStack() as stack:
    with doing(f"claiming {url}", terminal.log_console()):  # takes minutes after a killed process
      check = stack.enter_context(claims.claim(url))
    yield check


def sizes(url: str) -> dict[str, int]:
  """Returns the bytes of the objects directly below a URL, by name."""
  return {found.url.rpartition("/")[2]: found.size for found in storage.find(f"{url}/*")}


def check_files(url: str, manifest: dict) -> None:
  """Raises DataError if an object is missing or its size differs from the manifest."""
  found = sizes(url)
  for entry in mirror.files_of(manifest):
    name, size = entry["file"], entry["bytes"]
    if name not in found or size not in (None, found[name]):
      raise DataError(f"{url}/{name} is missing or damaged: publish it again with --overwrite")


def publish(folder: Path, url: str, check_claim: Callable[[], None]) -> None:
  """Uploads a finished build in place of the one at the URL; the manifest is last.

  Raises:
    ValueError: another process has claimed the URL; this one stops writing.
    OSError: the bucket cannot be written.
  """
  content = shards.manifest_content(folder)
  files = mirror.files_of(shards.parse_manifest(content, folder / MANIFEST))
  names = {entry["file"] for entry in files}
  check_claim()
  storage.remove(f"{url}/{MANIFEST}")
  for name in sizes(url):
    if shards.is_shard(name) and name not in names:
      storage.remove(f"{url}/{name}")

  def upload(entry: dict, count: Callable[[int], None]) -> None:
    check_claim()
    storage.upload(folder / entry["file"], f"{url}/{entry['file']}")
    count(entry["bytes"] or 0)

  mirror.at_once(f"publishing {folder} to {url}", upload, files)
  check_claim()
  storage.put(f"{url}/{MANIFEST}", content)
  print_line(f"wrote {url}/{MANIFEST}")
