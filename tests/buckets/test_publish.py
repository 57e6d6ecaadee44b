"""Shards written to a bucket: the bytes of a local build, whole or not there."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from test_build import make_config
from test_mirror import contents

from electra_jax.data import build, mirror, publish
from electra_jax.data.shards import MANIFEST, DataError
from electra_jax.runtime import claims, storage

pytestmark = pytest.mark.buckets


@pytest.fixture(autouse=True)
def one_second(monkeypatch):
  """A holder that was killed is taken for dead after a second."""
  monkeypatch.setattr(claims, "STALE_SECS", 1)


@pytest.fixture(scope="module", name="local")
def local_build(tmp_path_factory) -> dict[str, bytes]:
  """The files of a local build."""
  config = make_config(tmp_path_factory.mktemp("local"), examples_per_shard=100)
  build.build(config)
  return contents(config.data.dir)


def config_at(url: str, folder: Path, **fields):
  config = make_config(folder, examples_per_shard=100, dir=url, cache=str(folder / "cache"))
  config.data.update(fields)
  return config


def objects(url: str) -> dict[str, bytes]:
  return {name: storage.read(f"{url}/{name}") for name in publish.sizes(url)}


def without_paths(files: dict[str, bytes]) -> dict[str, bytes]:
  """Leaves out what a manifest says about where the text was."""
  manifest = json.loads(files[MANIFEST])
  for place in (manifest["sources"][0], manifest["build"]):
    for name in ("source", "sources", "vocab"):
      place.pop(name, None)
  return files | {MANIFEST: manifest}


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_build_is_published_once_and_reused(stores, local, tmp_path, scheme, capsys):
  url, proxy = f"{scheme}://corpus/{stores['prefix']}", stores[scheme]
  config = config_at(f"{url}/", tmp_path)
  manifest = build.build(config)
  assert without_paths(objects(url)) == without_paths(local)
  assert not list((tmp_path / "cache").iterdir())
  proxy.requests.clear()
  assert build.build(config) == manifest
  assert f"{url} is built already" in capsys.readouterr().out
  assert {method for method, _ in proxy.requests} <= {"GET", "HEAD"}
  assert contents(mirror.local(url, str(tmp_path / "copied"))) == objects(url)


def test_another_build_is_replaced_only_with_overwrite_and_is_never_half_there(
  stores, local, tmp_path
):
  url, proxy = f"s3://corpus/{stores['prefix']}", stores["s3"]
  build.build(config_at(url, tmp_path, examples_per_shard=50))
  before, config = objects(url), config_at(url, tmp_path)
  with pytest.raises(DataError, match=f"{url} holds another build .*examples_per_shard was 50"):
    build.build(config)
  assert objects(url) == before
  proxy.requests.clear()
  build.build(config, overwrite=True)
  assert without_paths(objects(url)) == without_paths(local)
  changes = [
    (method, name)
    for method, path in proxy.requests
    if method in ("PUT", "DELETE") and ".claims" not in path
    for name in [re.sub(r".*/|\?.*", "", path)]
  ]
  assert changes[0] == ("DELETE", MANIFEST) and changes[-1] == ("PUT", MANIFEST)
  assert changes.count(("PUT", MANIFEST)) == 1
  removed = {name for method, name in changes if method == "DELETE"}
  assert removed == {MANIFEST} | before.keys() - local.keys()


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_publication_that_is_killed_is_seen_by_nobody_and_goes_on_without_building(
  stores, local, tmp_path, capsys, scheme
):
  url, proxy = f"{scheme}://corpus/{stores['prefix']}", stores[scheme]
  config = config_at(url, tmp_path)
  fields = [f"--config.data.{name}={value}" for name, value in config.data.items() if value]
  command = [sys.executable, "-m", "electra_jax.data.build", f"--config={ROOT}/configs/base.py"]
  env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
  proxy.delay = 0.05
  proxy.requests.clear()
  with subprocess.Popen([*command, *fields], env=env) as process:
    # Two are of the claim and the old manifest; gs has the names in the bodies.
    while sum(method in ("PUT", "POST", "DELETE") for method, _ in proxy.requests) < 6:
      assert process.poll() is None
      time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
  proxy.delay = 0
  assert MANIFEST not in publish.sizes(url)
  with pytest.raises(DataError, match="build and publish the shards first"):
    mirror.local(url, str(tmp_path / "copied"))
  capsys.readouterr()
  build.build(config, overwrite=True)
  said = capsys.readouterr().out
  assert "is built already" in said and " building: " not in said
  assert without_paths(objects(url)) == without_paths(local)


def test_a_build_of_another_configuration_that_was_not_published_is_replaced(
  stores, local, tmp_path
):
  url = f"s3://corpus/{stores['prefix']}"
  config = config_at(url, tmp_path)
  folder = publish.work_folder(url, config.data.cache)
  build.build(config_at(str(folder), tmp_path, examples_per_shard=50))
  build.build(config)
  assert without_paths(objects(url)) == without_paths(local)


def test_one_process_at_a_time_builds_for_a_url(stores, tmp_path, monkeypatch):
  monkeypatch.setattr(claims, "STALE_SECS", 20)  # the holder lives, however slow its writes
  url = f"gs://corpus/{stores['prefix']}"
  with claims.claim(url), pytest.raises(ValueError, match=f"{url} is in use by process"):
    build.build(config_at(url, tmp_path))
  assert publish.sizes(url) == {}


def test_who_has_lost_the_claim_publishes_nothing_more(stores, tmp_path):
  url, config = f"s3://corpus/{stores['prefix']}", config_at("", tmp_path)
  config.data.dir = str(tmp_path / "shards")
  build.build(config)
  with publish.claimed(url) as check_claim:
    storage.put(f"{url}/.claims/000002", b"another\nbegun")
    with pytest.raises(ValueError, match=f"{url} has been taken over by another"):
      publish.publish(tmp_path / "shards", url, check_claim)
  assert publish.sizes(url) == {}


def test_objects_of_another_kind_are_not_replaced(stores, tmp_path):
  url = f"s3://corpus/{stores['prefix']}"
  storage.put(f"{url}/vocab.txt", b"mine")
  with pytest.raises(DataError, match=f"{url} holds vocab.txt but no manifest.json"):
    build.build(config_at(url, tmp_path))
  assert objects(url) == {"vocab.txt": b"mine"}


def test_a_missing_object_is_said(stores, tmp_path):
  url, config = f"s3://corpus/{stores['prefix']}", config_at("", tmp_path)
  config.data.dir = url
  build.build(config)
  storage.remove(f"{url}/train-00003-of-00022.bin")
  with pytest.raises(DataError, match=f"{url}/train-00003-of-00022.bin is missing or damaged: pub"):
    build.build(config)


def test_machines_share_a_folder_and_not_a_url(tmp_path):
  config = config_at("gs://corpus/parts", tmp_path, cache=None)
  with pytest.raises(
    ValueError, match=r"--part=0/2: .* copy the finished build to gs://corpus/parts"
  ):
    build.build_part(config, 0, 2)
