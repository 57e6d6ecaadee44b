"""Workdirs and exports at URLs: written, refused, read by the other commands."""

import io
import json
import time

import jax
import numpy as np
import pytest

import electra_jax
from electra_jax.commands import cli
from electra_jax.core.params import named
from electra_jax.interop import sources
from electra_jax.runtime import bucket, claims, storage

pytestmark = pytest.mark.buckets


@pytest.fixture
def url(request, stores, tmp_path, monkeypatch) -> str:
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  return f"{getattr(request, 'param', 'gs')}://corpus/{tmp_path.name}/run"


both = pytest.mark.parametrize("url", ["gs", "s3"], indirect=True)


def weights(path) -> dict:
  found = sources.open_source(path).networks["discriminator"].weights
  return named(jax.tree.map(np.asarray, found))


def scores(model: object, monkeypatch, capsys) -> str:
  monkeypatch.setattr(
    "sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc def\ngh ab\n"), encoding="utf-8")
  )
  capsys.readouterr()
  cli.call("score", [f"--model={model}"])
  return capsys.readouterr().out


@both
def test_what_a_run_leaves_at_a_url_is_what_it_leaves_in_a_folder(
  url, tiny_config, tmp_path, monkeypatch, capsys
):
  tiny_config.checkpoint.keep, tiny_config.checkpoint.keep_every_steps = 1, 8
  trained = electra_jax.train(tiny_config, url)
  alone = electra_jax.train(tiny_config, tmp_path / "alone")
  assert trained.finished and trained.step == 12
  names = {x.url[len(url) + 1 :] for x in storage.find(f"{url}/**")}
  outside = {name for name in names if "/" not in name}
  assert outside == {"config.json", "curves.png", "journal.jsonl", "metrics.jsonl"}
  assert {x.split("/")[1] for x in names if x.startswith("checkpoints/")} == {"8", "12"}
  # The commands read it.
  expected = weights(alone.workdir)
  copied = bucket.local(url)
  assert sorted(p.name for p in (copied / "checkpoints").iterdir()) == ["12"]
  for name, array in weights(url).items():
    np.testing.assert_array_equal(array, expected[name])
  assert scores(url, monkeypatch, capsys) == scores(alone.workdir, monkeypatch, capsys) != ""
  cli.call("report", [url, f"--out={tmp_path}/report.html"])
  assert "mlm loss" in (tmp_path / "report.html").read_text()
  cli.call("export", [f"--model={url}", "--to=orbax", f"--out={url}-export", "--step=8"])
  local = str(tmp_path / "export")
  cli.call("export", [f"--model={alone.workdir}", "--to=orbax", f"--out={local}", "--step=8"])
  expected = weights(local)
  for name, array in weights(f"{url}-export").items():
    np.testing.assert_array_equal(array, expected[name])
  with pytest.raises(ValueError, match=f"^{url}-export exists: choose another name$"):
    cli.call("export", [f"--model={url}", "--to=orbax", f"--out={url}-export"])
  with pytest.raises(ValueError, match=r"has no checkpoint of step 4; choose one of \[8, 12\]"):
    cli.call("export", [f"--model={url}", "--to=orbax", f"--out={url}-4", "--step=4"])
  # Another run starts from it.
  tiny_config.init_from, tiny_config.init_step, tiny_config.train.steps = url, 8, 1
  began = electra_jax.train(tiny_config, tmp_path / "second").history()[0]
  tiny_config.init_from = str(alone.workdir)
  assert (
    began["rtd_loss"] == electra_jax.train(tiny_config, tmp_path / "third").history()[0]["rtd_loss"]
  )


@both
def test_what_cannot_be_a_workdir_is_refused_in_one_line(url, tiny_config, tmp_path):
  tiny_config.train.steps = 1
  electra_jax.train(tiny_config, url)
  before = {x.url: x.tag for x in storage.find(f"{url}/[a-z]*")}
  tiny_config.optimizer.learning_rate = 1.0
  with pytest.raises(ValueError, match=rf"^{url} holds another run: optimizer.learning_rate was"):
    electra_jax.train(tiny_config, url)
  assert {x.url: x.tag for x in storage.find(f"{url}/[a-z]*")} == before
  storage.put(f"{url}-other/notes.txt", b"mine")
  with pytest.raises(
    ValueError, match=f"^{url}-other holds notes.txt but no config.json: it is not"
  ):
    electra_jax.train(tiny_config, f"{url}-other")
  assert [x.url for x in storage.find(f"{url}-other/**")] == [f"{url}-other/notes.txt"]
  with claims.claim(f"{url}-held", 5):
    with pytest.raises(claims.ClaimError, match=f"^{url}-held is in use by process "):
      with bucket.opened(f"{url}-held"):
        pass


def test_other_schemes_are_refused(tiny_config):
  with pytest.raises(ValueError, match=r"^--workdir=https://x/y: use a folder, gs:// "):
    electra_jax.train(tiny_config, "https://x/y")


@both
def test_a_damaged_checkpoint_at_a_url_is_set_aside(url, tiny_config):
  electra_jax.train(tiny_config, url)
  largest = max(storage.find(f"{url}/checkpoints/12/**"), key=lambda x: x.size)
  storage.put(largest.url, b"\0" * largest.size)
  with pytest.raises(ValueError, match="checkpoints/12 is damaged"):
    electra_jax.train(tiny_config, url)
  tiny_config.checkpoint.fallback = True
  assert electra_jax.train(tiny_config, url).finished
  names = [x.url for x in storage.find(f"{url}/**")]
  assert any(f"{url}/damaged/12/" in name for name in names)
  journal = storage.read(f"{url}/journal.jsonl").decode().splitlines()
  starts = [x["step"] for x in map(json.loads, journal) if x["event"] == "start"]
  assert starts[-1] == 8


def test_files_are_uploaded_meanwhile_and_not_by_who_was_overtaken(url, monkeypatch):
  monkeypatch.setattr(bucket, "UPLOAD_SECS", 0.1)
  with bucket.opened(url) as (folder, uploads):
    (folder / "config.json").write_text("first")
    deadline = time.monotonic() + 60
    while not storage.find(f"{url}/*.json") and time.monotonic() < deadline:
      time.sleep(0.1)
    assert storage.read(f"{url}/config.json") == b"first"
    storage.put(f"{url}/{claims.FOLDER}/000002", b"somebody else\n0")
    with pytest.raises(claims.ClaimError, match=f"^{url} has been taken over by somebody else$"):
      uploads.upload()
    (folder / "config.json").write_text("second")
    time.sleep(1)
  assert storage.read(f"{url}/config.json") == b"first"
