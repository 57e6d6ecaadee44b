"""Builds from every scheme have the bytes of a local one, or say what changed."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pytest
import servers
import zstandard
from conftest import ROOT
from pyarrow import parquet
from test_build import contents, make_config

from electra_jax.data import build, plan, shards, sources
from electra_jax.data.sources import SourceError
from electra_jax.runtime import storage

pytestmark = pytest.mark.buckets
SCHEMES = ("s3", "gs", "hf", "http")
FILES = 3


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
  monkeypatch.setattr(storage, "RANGE_BYTES", 8_000)
  monkeypatch.setattr(storage, "WAITS", (0.05,) * 5)


def as_text(documents: list[str]) -> bytes:
  return "\n\n".join(documents).encode()


def as_json(documents: list[str]) -> bytes:
  return "".join(json.dumps({"body": x}) + "\n" for x in documents).encode()


def as_table(documents: list[str]) -> bytes:
  file = io.BytesIO()
  parquet.write_table(pyarrow.table({"body": documents}), file, row_group_size=20)
  return file.getvalue()


# {kind: (end of a file's name, field, content of a file)}.
KINDS = {
  "text": (".txt.zst", "", lambda x: zstandard.compress(as_text(x))),
  "jsonl": (".jsonl", "#body", as_json),
  "parquet": (".parquet", "#body", as_table),
}


def configs(stores: dict, scheme: str, kind: str, folder: Path, **fields) -> tuple:
  """Returns configurations of the same text, in local files and in a store; stores it."""
  config = make_config(folder, parts=FILES, **fields)
  documents = (folder / "text.txt").read_text().split("\n\n")
  end, field, make = KINDS[kind]
  urls = []
  for i in range(FILES):
    data, name = make(documents[i::FILES]), f"d/{i}{end}"
    (folder / "d").mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    urls.append(servers.store(stores, scheme, f"{stores['prefix']}/{name}", data))
  pattern = f"{urls[0].rpartition('/d/')[0]}/**/*{end}"
  names = urls if scheme == "http" else [pattern]
  config.data.sources = f"{kind}:{folder}/d/*{end}{field}"
  remote = make_config(folder, parts=FILES, dir=str(folder / "remote"), **fields)
  remote.data.sources = ",".join(f"{kind}:{name}{field}" for name in names)
  return config, remote


def bytes_of(config) -> dict:
  """Returns what a build wrote, without the names of its sources."""
  files = contents(config.data.dir)
  manifest = json.loads(files.pop(shards.MANIFEST))
  return files | {"splits": manifest["splits"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_build_has_the_bytes_of_a_local_one(stores, tmp_path, scheme, kind):
  vocab = {"vocab": "wordpiece", "vocab_size": 100} if kind == "text" else {}
  local, remote = configs(stores, scheme, kind, tmp_path, **vocab)
  build.build(local)
  build.build(remote)
  found = bytes_of(remote)
  assert found == bytes_of(local) and len(found) > FILES
  assert build.build(remote)["splits"] == found["splits"]  # it is known again


# Google's client waits for seconds: one kind.
FAULTY = [(x, kind) for x in ("s3", "hf", "http") for kind in ("text", "parquet")] + [
  ("gs", "text")
]


@pytest.mark.parametrize("fault", ["cut", "503"])
@pytest.mark.parametrize(("scheme", "kind"), FAULTY)
def test_a_build_through_faults_has_the_same_bytes(stores, tmp_path, scheme, fault, kind):
  local, remote = configs(stores, scheme, kind, tmp_path)
  build.build(local)
  stores[scheme].fault = fault
  build.build(remote)
  assert bytes_of(remote) == bytes_of(local) and stores[scheme].spoiled


def test_text_of_a_server_without_ranges_is_read_and_a_table_is_refused(stores, tmp_path):
  stores["prefix"] = "whole"
  local, remote = configs(stores, "http", "text", tmp_path)
  build.build(local)
  stores["http"].fault = "cut"
  build.build(remote)
  assert bytes_of(remote) == bytes_of(local) and stores["http"].spoiled
  stores["http"].fault = None
  _, remote = configs(stores, "http", "parquet", tmp_path)
  with pytest.raises(SourceError, match="0.parquet: the server does not support ranges: download"):
    plan.check(remote)


def replace(stores: dict, scheme: str, url: str) -> None:
  """Changes the middle of an object."""
  data = bytearray(storage.read(url))
  data[len(data) // 2] ^= 1
  servers.store(stores, scheme, stores["prefix"] + url.partition(stores["prefix"])[2], bytes(data))


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "http"])
def test_an_object_that_is_replaced_after_the_plan_is_refused(stores, tmp_path, scheme, kind, when):
  _, remote = configs(stores, scheme, kind, tmp_path)
  made = plan.make(remote, tmp_path / "work", 1)
  (last,) = made.inputs[-1].files[-1:]
  texts = plan.PartReader(made, FILES - 1).texts()
  with pytest.raises(SourceError, match=f"^{last.url} has changed: it was .* and is "):
    if when == "during":
      next(texts)
    replace(stores, scheme, last.url)
    list(texts)


def test_a_url_alone_is_opened_as_it_is_now(stores):
  for data in (b"first", b"second"):
    url = servers.store(stores, "http", "alone.txt", data)
    with sources.opened(url) as raw:
      assert raw.read() == data


def start(config) -> subprocess.Popen:
  """Starts a build in a process of its own."""
  fields = {k: v for k, v in build.settings(config).items() if k != "seed" and v is not None}
  command = [sys.executable, "-m", "electra_jax.data.build", "--config=configs/base.py"]
  command += [f"--config.data.{k}={v}" for k, v in fields.items()]
  command += [f"--config.data.dir={config.data.dir}", "--config.data.workers=1"]
  path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
  options = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": path}}
  return subprocess.Popen(command, stdout=-3, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_build_that_is_killed_goes_on_with_what_it_began_with(stores, tmp_path, scheme):
  local, remote = configs(stores, scheme, "text", tmp_path)
  build.build(local)
  work = Path(remote.data.dir) / shards.BUILDING
  stores[scheme].delay = 0.3
  process = start(remote)
  while not (work / "part-00000").exists() and process.poll() is None:
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL, process.stderr.read()
  stores[scheme].delay = 0
  written = b"".join(path.read_bytes() for path in work.glob("*.json"))
  done = (work / "part-00000").stat().st_ino
  assert (work / plan.PLAN).exists() and not (work / "part-00002").exists()
  for secret in (os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["HF_TOKEN"]):
    assert secret.encode() not in written
  if scheme == "hf":  # the branch moves
    commit = next(reversed(stores["hub"].commits))
    servers.store(stores, "hf", f"{stores['prefix']}/d/0.txt.zst", b"other")
    assert f"/corpus@{commit}/" in (work / plan.PLAN).read_text()
  made = plan.make(remote, work, 1)
  assert (work / "part-00000").stat().st_ino == done
  assert build.build(remote)["sources"][0].get("commit") == (commit if scheme == "hf" else None)
  assert bytes_of(remote) == bytes_of(local) and len(made.tags) == FILES


def test_a_build_whose_object_was_replaced_since_does_not_go_on(stores, tmp_path):
  _, remote = configs(stores, "s3", "jsonl", tmp_path)
  build.build_part(remote, 0, FILES)
  first = plan.make(remote, tmp_path / "work", 1).inputs[0].files[0]
  replace(stores, "s3", first.url)
  with pytest.raises(shards.DataError, match=f"parts of another build .{first.url} has changed"):
    build.build(remote)
