"""Shards at a URL: the batches of the local ones, copied once, and never a wrong byte."""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, make_tiny_config
from test_build import make_config
from test_train import assert_same_run, interrupt_at

from electra_jax.data import build, mirror, shards
from electra_jax.data.index_shuffle import index_shuffle
from electra_jax.data.pretrain_batches import Shards, train_batches
from electra_jax.data.shards import MANIFEST, DataError
from electra_jax.evaluate import likelihoods, measures, pairs
from electra_jax.pretrain import train
from electra_jax.runtime import storage

pytestmark = pytest.mark.buckets
SCHEMES = "s3", "gs", "http", "hf"
COPY = "import sys; from electra_jax.data import mirror; print(mirror.local(*sys.argv[1:]))"


@pytest.fixture(scope="module", name="folder")
def folder_of_shards(tmp_path_factory) -> Path:
  """A folder with 22 files of shards of 100 records."""
  config = make_config(tmp_path_factory.mktemp("built"), examples_per_shard=100)
  assert len(build.build(config)["splits"]["train"]["shards"]) == 22
  return Path(config.data.dir)


def contents(folder: str | Path) -> dict[str, bytes]:
  return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.name[0] != "."}


def publish(stores: dict, scheme: str, folder: str | Path, name: str) -> str:
  """Puts a folder into a store, and returns its URL."""
  url, files = f"{scheme}://corpus/{name}", contents(folder)
  if scheme == "http":
    stores["web"].files |= {f"/{name}/{file}": data for file, data in files.items()}
    return f"{stores['http'].url}/{name}"
  if scheme == "hf":
    stores["hub"].commit({f"{name}/{file}": data for file, data in files.items()})
    return f"hf://datasets/me/corpus/{name}"
  for file, data in files.items():
    storage.put(f"{url}/{file}", data)
  return url


def read(proxy, method: str = "GET") -> list[str]:
  """Returns the shards that were read since the proxy's requests were cleared, sorted."""
  found = (re.search(r"\w+-\d{5}-of-\d{5}\.bin", path) for m, path in proxy.requests if m == method)
  return sorted(match[0] for match in found if match)


@contextlib.contextmanager
def copying(url: str, cache: Path):
  """Runs a process that copies."""
  process = subprocess.Popen(
    [sys.executable, "-c", COPY, url, cache],
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
  )
  try:
    yield process
  finally:
    process.kill()
    process.wait()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batches_are_those_of_the_local_shards_in_the_order_of_the_shuffle(
  stores, folder, tmp_path, scheme
):
  url = publish(stores, scheme, folder, "shards")
  here, there = Shards.open(folder), Shards.open(mirror.local(f"{url}/", str(tmp_path)))
  assert there.digest == here.digest and there.folder.parent == tmp_path
  assert there.folder.name == hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]
  dtype = shards.layout(here.manifest)
  names = [shard["file"] for shard in here.manifest["splits"]["train"]["shards"]]
  records = np.frombuffer(b"".join((folder / name).read_bytes() for name in names), dtype)
  for start in (0, 10_000):
    batches = (train_batches(x, seed=3, batch_size=32, start_step=start) for x in (here, there))
    for step, (local, copied) in enumerate(itertools.islice(zip(*batches, strict=True), 3), start):
      assert [x.tobytes() for x in local[:4]] == [x.tobytes() for x in copied[:4]]
      epochs, index = np.divmod(np.arange(step * 32, step * 32 + 32), len(records))
      pairs = zip(epochs, index, strict=True)
      order = [index_shuffle(np.array([i]), (3, int(e)), len(records) - 1)[0] for e, i in pairs]
      np.testing.assert_array_equal(copied.ids, records["ids"][order])


def test_a_copy_that_is_killed_goes_on_with_the_files_that_are_not_there(stores, folder, tmp_path):
  url, proxy = publish(stores, "s3", folder, "killed"), stores["s3"]
  with copying(url, tmp_path) as process:
    while len(list(tmp_path.glob("*/*.bin"))) < 3 or not list(tmp_path.glob("*/*.tmp")):
      assert process.poll() is None
      time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
  done = {path.name for path in tmp_path.glob("*/*.bin")}
  names = {name for name in contents(folder) if name.endswith(".bin")}
  assert done < names and not list(tmp_path.glob(f"*/{MANIFEST}"))
  assert [p for p in tmp_path.glob("*/*.tmp")]
  proxy.requests.clear()
  copied = mirror.local(url, str(tmp_path))
  assert read(proxy) == sorted(names - done)
  assert contents(copied) == contents(folder)
  proxy.requests.clear()
  assert mirror.local(url, str(tmp_path)) == copied and read(proxy) == []


@pytest.mark.parametrize("fault", ["cut", "503"])
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_every_third_response_is_spoiled_and_the_bytes_are_right(
  stores, folder, tmp_path, monkeypatch, scheme, fault
):
  monkeypatch.setattr(storage, "WAITS", (0.05,) * 12)
  url, proxy = publish(stores, scheme, folder, "spoiled"), stores[scheme]
  proxy.fault, proxy.spoiled = fault, 0
  try:
    assert contents(mirror.local(url, str(tmp_path))) == contents(folder)
  finally:
    proxy.fault = None
  assert proxy.spoiled > 10


@pytest.mark.parametrize(
  "damage, told",
  [
    (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "is damaged: SHA-256"),
    (lambda data: data[:-1], "has 3,599 bytes, but manifest.json says 3,600"),
  ],
)
@pytest.mark.parametrize("scheme", ["gs", "http"])
def test_a_damaged_object_is_refused_with_its_url(stores, folder, tmp_path, scheme, damage, told):
  broken = shutil.copytree(folder, tmp_path / "broken")
  name = json.loads((folder / MANIFEST).read_text())["splits"]["train"]["shards"][5]["file"]
  (broken / name).write_bytes(damage((folder / name).read_bytes()))
  url = publish(stores, scheme, broken, "damaged")
  with pytest.raises(DataError, match=f"{re.escape(url)}/{name} {told}"):
    mirror.local(url, str(tmp_path / "cache"))
  assert not [*tmp_path.glob(f"cache/*/{name}"), *tmp_path.glob(f"cache/*/{MANIFEST}")]


def test_a_manifest_cannot_name_a_file_outside_of_the_folder(stores, folder, tmp_path):
  evil = shutil.copytree(folder, tmp_path / "evil")
  manifest = json.loads((folder / MANIFEST).read_text())
  manifest["splits"]["train"]["shards"][0]["file"] = "../../train-00000-of-00001.bin"
  (evil / MANIFEST).write_text(json.dumps(manifest))
  with pytest.raises(DataError, match="is not the name of a shard"):
    mirror.local(publish(stores, "http", evil, "evil"), str(tmp_path / "cache"))


def test_what_is_not_built_is_said(stores, folder, tmp_path):
  unfinished = shutil.copytree(folder, tmp_path / "unfinished")
  (unfinished / MANIFEST).unlink()
  for scheme in SCHEMES:
    url = publish(stores, scheme, unfinished, "unfinished")
    with pytest.raises(DataError, match=f"{url}/{MANIFEST} is missing: build and publish"):
      mirror.local(url, str(tmp_path / "cache"))


@pytest.mark.skipif(os.geteuid() > 0, reason="root mounts a small disk")
def test_a_disk_that_is_too_small_is_refused_first_with_both_sizes(stores, folder, tmp_path):
  url, proxy = publish(stores, "http", folder, "small"), stores["http"]
  size = ["-t", "tmpfs", "-o", "size=64k", "tmpfs"]
  subprocess.run(["mount", *size, tmp_path], check=True, timeout=300)
  try:
    proxy.requests.clear()
    with pytest.raises(OSError, match=r"copy .*small \(0.1 MB needed, 0.\d MB free\): set"):
      mirror.local(url, str(tmp_path))
    assert read(proxy) == []
  finally:
    subprocess.run(["umount", "-l", tmp_path], check=True, timeout=300)


def test_of_two_processes_of_a_host_one_copies_and_the_other_says_that_it_waits(
  stores, folder, tmp_path
):
  url, proxy = publish(stores, "s3", folder, "twice"), stores["s3"]
  copied = tmp_path / hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]
  copied.mkdir()
  proxy.requests.clear()
  with (copied / ".lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # else the first one may end before the second begins
    with copying(url, tmp_path) as first, copying(url, tmp_path) as second:
      said = [process.stdout.readline() for process in (first, second)]
      fcntl.flock(lock, fcntl.LOCK_UN)
      ended = [process.communicate(timeout=300)[0] for process in (first, second)]
  waiting = f"waiting for another process of this host that copies {url}"
  assert all(line[20:].strip() == waiting for line in said)
  assert all(text.splitlines()[-1] == str(copied) for text in ended)
  assert sum("copying" in text for text in ended) == 1
  assert read(proxy) == sorted(name for name in contents(folder) if name.endswith(".bin"))
  assert contents(copied) == contents(folder)


@pytest.fixture(name="unreachable")
def unreachable_store(stores, monkeypatch):
  """Returns a function after which Google's store cannot be reached."""

  def stop() -> None:
    monkeypatch.setattr(storage, "WAITS", ())
    monkeypatch.setattr("gcsfs.retry.min", lambda *_: 0, raising=False)  # secs between its tries
    monkeypatch.setattr(stores["gs"], "port", 1)

  return stop


def test_a_run_from_a_bucket_is_the_local_one_and_resumes_without_the_bucket(
  stores, tiny_shards, tmp_path, monkeypatch, capsys, unreachable
):
  train.train(make_tiny_config(tiny_shards), tmp_path / "local")
  config = make_tiny_config(publish(stores, "gs", tiny_shards, "tiny"))
  config.data.cache = str(tmp_path / "cache")
  with pytest.MonkeyPatch.context() as patch:
    interrupt_at(patch, 5, lambda: signal.raise_signal(signal.SIGTERM))
    assert train.train(config, tmp_path / "run").step == 5
  saved = json.loads((tmp_path / "run/config.json").read_text())["data"]
  digest = hashlib.sha256((Path(tiny_shards) / MANIFEST).read_bytes()).hexdigest()
  assert (saved["dir"], saved["manifest"]) == ("gs://corpus/tiny", digest)
  unreachable()
  assert train.train(config, tmp_path / "run").step == 12
  assert f"using the copy in {tmp_path / 'cache' / digest[:16]}" in capsys.readouterr().out
  assert_same_run(tmp_path / "run", tmp_path / "local")
  with pytest.raises(OSError, match="gs://corpus/tiny/manifest.json: the server fails"):
    train.train(config, tmp_path / "another")  # it does not know which shards


def test_another_build_at_the_url_is_refused_before_it_is_copied(
  stores, folder, tiny_shards, tmp_path
):
  config = make_tiny_config(publish(stores, "http", tiny_shards, "changing"))
  config.data.cache, config.train.steps = str(tmp_path / "cache"), 4
  config.optimizer.warmup_steps = 1
  train.train(config, tmp_path / "run")
  other = shutil.copytree(tiny_shards, tmp_path / "other")
  text = (other / MANIFEST).read_text()
  (other / MANIFEST).write_text(text.replace('"seq_length": 16', '"seq_length":  16'))
  publish(stores, "http", other, "changing")
  with pytest.raises(ValueError, match=r"data.manifest was .* is .*=data.manifest"):
    train.train(config, tmp_path / "run")
  assert len(list((tmp_path / "cache").iterdir())) == 1
  config.allow_config_change = "data.manifest"
  assert train.train(config, tmp_path / "run").step == 4


def test_measures_copy_what_they_need(stores, tiny_shards, tmp_path, monkeypatch):
  config = make_tiny_config(tiny_shards)
  config.train.steps, config.optimizer.warmup_steps = 2, 1
  train.train(config, tmp_path / "run")
  url = publish(stores, "http", tiny_shards, "measured")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  run, copied = str(tmp_path / "run"), tmp_path / "electra_jax" / "shards"
  scored = likelihoods.Scorer(run, url)(["abc"])
  assert scored == likelihoods.Scorer(run, tiny_shards)(["abc"])
  assert not list(copied.glob("*/*.bin"))
  found = measures.evaluate_detection(run, url, batch_size=8, examples=16)
  assert found == measures.evaluate_detection(run, tiny_shards, batch_size=8, examples=16)
  assert [p.name[:7] for p in copied.glob("*/*.bin")] == ["heldout"]
  lines = tmp_path / "pairs.jsonl"
  lines.write_text('{"sentence_good": "a b", "sentence_bad": "b a"}\n')
  stores["web"].files["/pairs.jsonl"] = lines.read_bytes()
  assert pairs.read(f"{stores['http'].url}/pairs.jsonl") == pairs.read(lines)
