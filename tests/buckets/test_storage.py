"""Objects: read through faults, replaced under a reader, written once."""

import concurrent.futures
import io
import os
import random

import pytest
import servers

from electra_jax.runtime import storage

pytestmark = pytest.mark.buckets
DATA = random.Random(0).randbytes(1_000_000)
SCHEMES = ("s3", "gs", "hf", "http")


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
  monkeypatch.setattr(storage, "RANGE_BYTES", 200_000)
  monkeypatch.setattr(storage, "WAITS", (0.05,) * 5)


def store(stores: dict, scheme: str, data: bytes, name: str = "a.bin") -> str:
  """Puts an object, not through the module that is tested, and returns its URL."""
  return servers.store(stores, scheme, f"{stores['prefix']}/{name}", data)


@pytest.mark.parametrize("fault", ["cut", "whole", "503"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_object_is_read_through_faults(stores, scheme, fault):
  url = store(stores, scheme, DATA)
  stores[scheme].fault = fault
  assert storage.read(url) == DATA
  assert stores[scheme].spoiled


def test_a_server_without_ranges_is_read_from_its_beginning_again(stores):
  url = servers.store(stores, "http", "whole/a.bin", DATA)
  stores["http"].fault = "cut"
  (found,) = storage.find(url)
  with storage.opened(found) as stream:
    assert not found.ranged and not stream.seekable()
    assert stream.read() == DATA
  assert stores["http"].spoiled


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_order_of_seeks_and_reads_gives_what_a_file_would(stores, scheme):
  url, rng = store(stores, scheme, DATA), random.Random(1)
  with storage.opened(storage.look(url)) as stream:
    expected = io.BytesIO(DATA)
    for _ in range(40):
      if rng.random() < 0.6:
        at = rng.randrange(len(DATA) + 10)
        assert stream.seek(at) == expected.seek(at) == stream.tell()
      size = rng.choice((1, 1000, 150_000, 450_000))
      assert stream.read(size) == expected.read(size)


@pytest.mark.parametrize("scheme", ["s3", "gs", "http"])
@pytest.mark.parametrize("when", ["before", "during"])
def test_an_object_that_is_replaced_is_refused(stores, scheme, when):
  url = store(stores, scheme, DATA)
  (found,) = storage.find(url if scheme == "http" else url.replace("a.bin", "*.bin"))
  with pytest.raises(OSError, match=" has changed: it was 1,000,000 bytes, .*is 1,000,000"):
    if when == "before":
      store(stores, scheme, DATA[::-1])
    with storage.opened(found) as stream:
      assert stream.read(10) == DATA[:10]
      store(stores, scheme, DATA[::-1])
      stream.read()


def test_a_dataset_is_read_at_the_commit_that_was_found(stores):
  (found,) = storage.find(store(stores, "hf", DATA))
  store(stores, "hf", DATA[::-1])
  assert storage.read(found.url) == DATA and f"@{found.tag}/" in found.url
  (now,) = storage.find(found.url.replace(f"@{found.tag}", ""))
  assert now.tag != found.tag and storage.read(now.url) == DATA[::-1]


@pytest.mark.parametrize("scheme", ["s3", "gs", "hf"])
def test_a_pattern_names_objects_in_order(stores, scheme):
  for name in ("d/b.txt", "d/a.txt", "d/e/c.txt", "d/a.bin"):
    url = store(stores, scheme, b"x", name)
  base = url.rpartition("/d/")[0]
  for pattern, names in (
    ("d/*.txt", ["d/a.txt", "d/b.txt"]),
    ("**/*.txt", ["d/a.txt", "d/b.txt", "d/e/c.txt"]),
    ("d/?.bin", ["d/a.bin"]),
    ("d/*.zst", []),
  ):
    found = storage.find(f"{base}/{pattern}")
    assert [x.url.partition(stores["prefix"])[2][1:] for x in found] == names
    assert all(x.size == 1 and x.tag for x in found)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_of_many_writers_one_creates_an_object(stores, scheme):
  url = f"{scheme}://corpus/{stores['prefix']}/claim"

  def create(i: int) -> bool:
    try:
      storage.put(url, b"%d" % i, create=True)
    except FileExistsError as error:
      assert str(error) == f"{url}: exists already"
      return False
    return True

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    won = list(pool.map(create, range(8)))
  assert sum(won) == 1 and storage.read(url) == b"%d" % won.index(True)
  assert create(won.index(True))  # it may not have heard that it won
  storage.put(url, b"other")
  assert storage.read(url) == b"other"


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("fault", [None, "503"])
def test_files_go_there_and_back_and_away(stores, scheme, fault, tmp_path):
  url = f"{scheme}://corpus/{stores['prefix']}/file"
  (tmp_path / "there").write_bytes(DATA)
  stores[scheme].fault = fault
  storage.upload(tmp_path / "there", url)
  storage.fetch(url, tmp_path / "back")
  assert (tmp_path / "back").read_bytes() == DATA
  for _ in range(2):
    storage.remove(url)
  with pytest.raises(FileNotFoundError, match=f"^{url}: no such object or bucket$"):
    storage.fetch(url, tmp_path / "gone")
  assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
  "url, kind, message",
  [
    ("s3://nobucket/*.txt", FileNotFoundError, "s3://nobucket/*.txt: no such object or bucket"),
    ("gs://nobucket/*.txt", FileNotFoundError, "gs://nobucket/*.txt: no such object or bucket"),
    ("gs://corpus/none", FileNotFoundError, "gs://corpus/none: no such object or bucket"),
    ("hf://datasets/me/none/*", FileNotFoundError, "hf://datasets/me/none/*: no such object"),
    ("hf://datasets/me/corpus@dev/*", FileNotFoundError, "me/corpus@dev/*: no such object"),
    ("http://127.0.0.1:9/a", ConnectionError, "http://127.0.0.1:9/a: the server fails, even after"),
  ],
)
def test_what_cannot_be_found_is_said_in_one_line_with_the_url(stores, url, kind, message):
  store(stores, "hf", b"x")
  with pytest.raises(kind) as caught:
    storage.find(url)
  assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_credentials_are_named_with_what_to_do(stores, monkeypatch):
  import s3fs

  for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
    monkeypatch.delenv(name)
  monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
  storage._store.cache_clear()
  s3fs.S3FileSystem.clear_instance_cache()
  try:
    with pytest.raises(PermissionError, match="s3://corpus/a: access denied .*aws configure"):
      storage.look("s3://corpus/a")
  finally:
    storage._store.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("scheme", ["hf", "http"])
def test_what_is_only_read_is_not_written(stores, scheme):
  url = store(stores, scheme, b"x")
  for write in (
    storage.remove,
    lambda url: storage.put(url, b""),
    lambda url: storage.upload(os.devnull, url),
  ):
    with pytest.raises(ValueError, match="is read-only: write to s3:// or gs://"):
      write(url)
