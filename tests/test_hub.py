"""Names of the Hugging Face Hub, in and out, against a small server of real HTTP."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import test_torch_files
from conftest import make_tiny_config, python, without_activities
from hub_server import Hub
from rich.console import Console
from safetensors.numpy import load_file
from test_calls import run_card
from test_finetune import make_config, write_glue
from test_finetune import run as fine_tune
from test_hf import needs_torch, random_network, same

import electra_jax
from electra_jax.commands import cli
from electra_jax.config import specs
from electra_jax.data import tokenizer
from electra_jax.export import writer
from electra_jax.interop import hub, sources
from electra_jax.interop.sources import ExchangeError, Network, Source
from electra_jax.pretrain import train
from electra_jax.runtime.workdir import read_config

NAME, TEXT = "hf://me/tiny", "abc def"


@pytest.fixture(scope="module")
def source(tiny_shards) -> Source:
  """A random discriminator and a generator of `tiny_config`'s shapes, with one embedding."""
  tokens = tokenizer.load_from(tiny_shards, sources.vocab_of(tiny_shards))
  config = make_tiny_config(tiny_shards)
  spec = specs.make_spec(config, tokens.vocab, (1,) * tokens.vocab.size)
  shapes = sources.plain(spec.discriminator), sources.plain(spec.generator)
  main, other = (random_network(cfg, x) for cfg, x in zip(shapes, HEADS, strict=True))
  networks = (main, other | {"embeddings": main["embeddings"]})
  found = [Network(*x) for x in zip(shapes, networks, HEADS, strict=True)]
  return Source(dict(zip(("discriminator", "generator"), found, strict=True)), tokens, {})


HEADS = "rtd_head", "mlm_head"


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory) -> Path:
  """Its export, with files of other libraries beside it."""
  out = tmp_path_factory.mktemp("exported") / "hf"
  writer.write(source, out, "hf", Console(quiet=True))
  for name in ("onnx/model.onnx", "discriminator/pytorch_model.bin", "generator/tf_model.h5"):
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_bytes(b"not to be fetched")
  return out


@pytest.fixture
def server(tmp_path, monkeypatch):
  """A Hub for this process, an empty cache, nobody logged in; waiting takes no time."""
  import huggingface_hub
  from huggingface_hub import constants

  with Hub() as found:
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    url = found.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server has LFS only
    monkeypatch.delenv("HF_TOKEN", raising=False)
    wait = time.sleep
    monkeypatch.setattr(time, "sleep", lambda secs: wait(min(secs, 0.01)))
    huggingface_hub.close_session()
    yield found
    found.shutdown()


@pytest.fixture
def me(monkeypatch):
  """Logs in the owner of me/ and lab/."""
  monkeypatch.setenv("HF_TOKEN", "hf_me")


def stop(server: Hub) -> None:
  import huggingface_hub

  server.shutdown()
  server.server_close()
  huggingface_hub.close_session()  # with its open connections


def refused(name: str, why: str) -> None:
  with pytest.raises(ExchangeError, match=why) as error:
    sources.open_source(name)
  assert "\n" not in str(error.value)


def weights(path) -> dict:
  return {role: network.weights for role, network in sources.open_source(path).networks.items()}


def test_a_name_opens_the_networks_of_its_files_and_fetches_no_others(server, folder):
  commit = server.put("me/tiny", folder)
  found = electra_jax.load(NAME)
  assert same(weights(NAME), weights(folder))
  np.testing.assert_array_equal(found.embed(TEXT), electra_jax.load(folder).embed(TEXT))
  fetched = hub.local(NAME)
  assert fetched.name == commit == hub.pinned(NAME).partition("@")[2]
  names = {str(x.relative_to(fetched)) for x in fetched.rglob("*") if x.is_file()}
  files = "config.json", "model.safetensors", "vocab.txt", "tokenizer.json", "tokenizer_config.json"
  assert names == {f"{x}/{file}" for x in ("discriminator", "generator") for file in files}
  assert not any(re.search("onnx|bin|h5|README", request) for request in server.requests)


def test_a_commit_that_is_there_asks_nobody(server, folder):
  commit = server.put("me/tiny", folder)
  before = weights(f"{NAME}@{commit}")
  server.requests.clear()
  assert same(weights(f"{NAME}@{commit}"), before) and server.requests == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(server, source, folder, tmp_path):
  old = server.put("me/tiny", folder)
  server.repos["me/tiny"].refs |= {"v1": old, "refs/pr/1": old}
  (tmp_path / "only" / "generator").mkdir(parents=True)
  shutil.copytree(folder / "generator", tmp_path / "only" / "generator", dirs_exist_ok=True)
  server.put("me/tiny", tmp_path / "only")
  assert weights(NAME).keys() == {"generator"}
  for revision in ("v1", "refs/pr/1", old):
    assert weights(f"{NAME}@{revision}").keys() == source.networks.keys()


@pytest.mark.parametrize("fault", [503, 429, 0])
def test_what_passes_is_tried_again(fault, server, folder):
  server.put("me/tiny", folder)
  server.fault = lambda number, request: fault if number % 3 == 0 else None
  assert same(weights(NAME), weights(folder))
  assert len(server.requests) > 20


def test_what_does_not_pass_is_one_line(server, folder):
  server.put("me/tiny", folder)
  server.fault = lambda number, request: 503
  refused(NAME, "me/tiny: .*503")
  assert len(server.requests) == len(hub.WAITS) + 1


def test_a_repository_that_is_not_open_says_how_to_log_in(server, folder, monkeypatch):
  server.put("me/tiny", folder, private=True)
  server.put("me/gated", folder, gated=True)
  log_in = "hf auth login"
  for token in (None, "hf_other", "hf_of_nobody"):
    if token:
      monkeypatch.setenv("HF_TOKEN", token)
    refused(NAME, f"hf://me/tiny is private or not on the Hub: .*{log_in}")
    refused("hf://me/nothing", f"hf://me/nothing is private or not on the Hub: .*{log_in}")
    if token != "hf_of_nobody":
      refused("hf://me/gated", f"gated: ask for access at {server.url}/me/gated, .*{log_in}")
  monkeypatch.setenv("HF_TOKEN", "hf_me")
  assert same(weights(NAME), weights("hf://me/gated"))


@pytest.mark.parametrize("name", ["hf://tiny", "hf://me/tiny/sub", "hf://me/tiny@", "hf://me/a--b"])
def test_a_name_of_another_form_is_refused_without_asking(name, server):
  refused(name, "hf://ORG/NAME|Cannot have -- or ..")
  assert server.requests == []


def test_a_missing_revision_is_named(server, folder):
  server.put("me/tiny", folder)
  refused(f"{NAME}@v9", "hf://me/tiny has no branch, tag or commit v9")


def test_a_repository_without_weights_says_what_it_has(server, tmp_path):
  (tmp_path / "x").mkdir()
  (tmp_path / "x" / "tf_model.h5").write_bytes(b"x")
  server.put("me/tiny", tmp_path / "x")
  refused(NAME, r"me/tiny has no model.safetensors, .*; its files: .gitattributes, tf_model.h5$")


def test_without_a_network_the_cache_serves_and_what_it_lacks_is_one_line(server, folder):
  server.put("me/tiny", folder)
  before = weights(NAME)
  stop(server)
  assert same(weights(NAME), before)
  refused("hf://me/other", f"me/other: not in the cache, and {server.url} cannot be reached: ")


def test_a_missing_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(ModuleNotFoundError) as error:
    sources.open_source(NAME)
  assert cli.explain(error.value).endswith("is not installed: pip install 'electra_jax[data]'")


def command(server: Hub, *words, **env) -> tuple[int, str, str]:
  """Runs a command as a user does: in a process of its own, with the Hub's variables."""
  home = {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1", **env}
  done = python("-m", "electra_jax", *words, env=home, input=f"{TEXT}\n", timeout=120)
  return done.returncode, done.stdout, without_activities(done.stderr)


@pytest.mark.long
def test_a_command_works_offline_after_it_worked_once(server, folder, tmp_path):
  server.put("me/tiny", folder)
  home = {"HF_HOME": str(tmp_path / "home")}
  code, out, errors = command(server, "score", f"--model={NAME}", **home)
  assert code == 0 and float(out.split()[0]) < 0, errors
  asked = len(server.requests)
  assert command(server, "score", f"--model={NAME}", **home, HF_HUB_OFFLINE="1")[:2] == (0, out)
  name = "hf://me/other"
  code, _, errors = command(server, "score", f"--model={name}", **home, HF_HUB_OFFLINE="1")
  line = f"error: {name} is not in the cache: fetch it once without HF_HUB_OFFLINE\n"
  assert (code, errors) == (1, line) and len(server.requests) == asked


def init_from(shards: str, **fields):
  config = make_tiny_config(shards)
  config.train.steps = config.checkpoint.every_steps = 2
  config.update_from_flattened_dict(fields)
  return config


@pytest.mark.long
def test_a_run_keeps_the_commit_that_it_began_with(server, folder, tiny_shards, tmp_path, capsys):
  commit = server.put("me/tiny", folder)
  start = {"generator.kind": "frozen", "generator.tie": "none", "generator.init_from": NAME}
  start |= {"init_from": f"{NAME}@main"}
  train.train(init_from(tiny_shards, **start), tmp_path / "run")
  saved, pinned = read_config(tmp_path / "run"), f"{NAME}@{commit}"
  assert saved["init_from"] == saved["generator"]["init_from"] == pinned
  assert saved["hub_names"] == {"init_from": f"{NAME}@main", "generator.init_from": NAME}
  assert f"starting from the parameters of {pinned}: " in capsys.readouterr().out

  shutil.copytree(folder / "generator", tmp_path / "moved" / "generator")
  moved = server.put("me/tiny", tmp_path / "moved")  # the branch moves, and then the Hub is gone
  other = start | {"init_from": f"{NAME}@{moved}"}
  with pytest.raises(
    ValueError, match=f"another run: init_from was '{pinned}', is '{NAME}@{moved}"
  ):
    train.train(init_from(tiny_shards, **other), tmp_path / "run")
  server.requests.clear()
  writer.run(str(tmp_path / "run"), tmp_path / "start", "orbax", Console(quiet=True), step=0)
  first = weights(tmp_path / "start")["discriminator"]["encoder"]
  assert same(first, weights(folder)["discriminator"]["encoder"]) and server.requests == []
  stop(server)
  shutil.rmtree(tmp_path / "cache")
  for steps, given in enumerate(({**start, "init_from": pinned}, start), 3):
    more = {"train.steps": steps, "allow_config_change": "train.steps"}
    config = init_from(tiny_shards, **given | more)
    assert train.train(config, tmp_path / "run").step == steps
  assert read_config(tmp_path / "run")["init_from"] == pinned


@pytest.mark.long
def test_fine_tuning_starts_from_a_name_and_predicts_from_one(server, folder, tmp_path):
  commit = server.put("me/tiny", folder)
  write_glue(tmp_path / "glue")
  fields = {"data__dir": str(tmp_path / "glue"), "data__max_length": 16, "train__epochs": 1.0}
  fine_tune(make_config("glue", "cola", NAME, **fields), tmp_path / "out")
  model, tuned = tmp_path / "out" / "cola" / "model", "hf://me/tuned"
  server.put("me/tuned", model)
  texts = ["abc def", "gh"]
  assert electra_jax.load_task(tuned)(texts) == electra_jax.load_task(model)(texts)
  asked = ["--predict", f"{tmp_path}/glue/CoLA/test.tsv", f"--model={tuned}"]
  cli.call("finetune", [*asked, f"--out={tmp_path / 'predicted.tsv'}"])
  assert (tmp_path / "predicted.tsv").read_text().count("\n") == 6
  writer.run(tuned, tmp_path / "hf", "hf", Console(quiet=True))
  card = (tmp_path / "hf" / "discriminator" / "README.md").read_text()
  assert "\nbase_model: me/tuned\n" in card
  writer.run(str(model), tmp_path / "own", "hf", Console(quiet=True))
  card = (tmp_path / "own" / "discriminator" / "README.md").read_text()
  assert "\nbase_model: me/tiny\n" in card and f"\n- from `{NAME}@{commit}`\n" in card


def push(model, out, *options: str) -> None:
  cli.call("export", [str(model), str(out), "--to=hf", "--push=me/new", *options])


def test_a_pushed_export_comes_back_with_equal_weights(server, me, folder, tmp_path, capsys):
  begun = server.put("me/tiny", folder, private=True)
  push(NAME, tmp_path / "out", "--license=mit", "--max-shard-mb=0.01")
  repo, new = server.repos["me/new"], "hf://me/new"
  assert (
    repo.private and len(repo.commits) == 2
  )  # the Hub's own, which has .gitattributes, and ours
  assert repo.files.keys() > {".gitattributes", "discriminator/config.json", "generator/vocab.txt"}
  assert f"pushed to {new}@{repo.refs['main']}" in capsys.readouterr().out.replace("\n", "")
  assert same(weights(new), weights(folder))
  card = repo.files["README.md"].decode()
  matter, text = card.split("---\n")[1:]
  assert matter.splitlines() == [
    "library_name: transformers", "tags: [electra, electra_jax]", "license: mit",
    "base_model: me/tiny",
  ]  # fmt: skip
  assert text.startswith("# me/new\n") and f"- from `{NAME}@{begun}`" in text
  assert f'electra_jax.load("{new}")' in text and 'snapshot_download("me/new")' in text
  assert (tmp_path / "out" / "README.md").read_text() == card


@needs_torch
def test_the_calls_of_a_pushed_card_work(server, me, folder, tmp_path):
  import torch

  push(folder, tmp_path / "out")
  found = run_card(tmp_path / "out")
  tokens = found["networks"].tokenizer.vocab
  ids = np.array([[tokens.cls, *found["networks"].tokenizer.encode_batch([TEXT])[0], tokens.sep]])
  theirs = found["encoder"](torch.tensor(ids)).last_hidden_state[0].detach().numpy()
  ours = found["networks"].states(TEXT).values
  np.testing.assert_allclose(ours, theirs, atol=1e-5)  # as in test_encoder.py


def test_a_push_replaces_files_only_when_told(server, me, folder, tmp_path):
  server.put("me/tiny", folder)
  push(folder, tmp_path / "first")
  repo = server.repos["me/new"]
  repo.commit(repo.files | {"notes.md": b"", "masked_lm/config.json": b"{}"})
  before = len(repo.commits)
  with pytest.raises(ExchangeError, match=r"me/new has files \(README.md, .*use --overwrite to"):
    push(folder, tmp_path / "second")
  assert len(repo.commits) == before and not (tmp_path / "second").exists()
  push(folder / "discriminator", tmp_path / "second", "--overwrite")
  assert len(repo.commits) == before + 1
  files = {str(x.relative_to(tmp_path / "second")) for x in (tmp_path / "second").rglob("*.*")}
  assert repo.files.keys() == {".gitattributes", *files}
  assert weights("hf://me/new").keys() == {"discriminator"}


@pytest.mark.parametrize(
  ("token", "repo", "why"),
  [
    (None, "me/new", "to push to me/new, log in to the Hub: hf auth login"),
    ("hf_of_nobody", "me/new", "log in: hf auth login"),
    (
      "hf_me",
      "other/new",
      "hf://other/new: no write access: use another repository, or log in as its",
    ),
    ("hf_me", "other/public", "hf://other/public: no write access: use another repository"),
    ("hf_me", "new", "write a network on the Hub as hf://ORG/NAME"),
    ("hf_me", "me/new@v1", "write the repository to push to as ORG/NAME"),
  ],
)
def test_a_push_that_may_not_be_is_refused_before_the_export(
  token, repo, why, server, folder, tmp_path, monkeypatch
):
  server.put("other/public", folder)
  if token:
    monkeypatch.setenv("HF_TOKEN", token)
  with pytest.raises(ExchangeError, match=why):
    push(folder, tmp_path / "out", f"--push={repo}")
  assert not (tmp_path / "out").exists() and server.repos.keys() == {"other/public"}


def test_a_commit_that_fails_is_tried_again(server, me, folder, tmp_path):
  failed = []

  def fault(number: int, request: str) -> int | None:
    if "/commit/" in request and len(failed) < 3:
      return failed.append(request) or (503, 0, 429)[len(failed) - 1]
    return None

  server.fault = fault
  push(folder, tmp_path / "out")
  assert len(failed) == 3 and len(server.repos["me/new"].commits) == 2
  assert same(weights("hf://me/new"), weights(folder))


@pytest.mark.slow
def test_a_push_that_fails_keeps_the_export_and_says_how_to_push_it(server, me, folder, tmp_path):
  server.fault = lambda number, request: 403 if "/commit/" in request else None
  with pytest.raises(
    ExchangeError, match="no write access.* is complete: to push it again, run hf "
  ) as e:
    push(folder, tmp_path / "out")
  assert same(weights(tmp_path / "out"), weights(folder))
  server.fault = lambda number, request: None
  again = shlex.split(str(e.value).partition("again, run ")[2])
  home = {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
  tool = Path(sys.executable).with_name(again[0])
  subprocess.run(
    [tool, *again[1:]], env={**os.environ, **home}, check=True, capture_output=True, timeout=300
  )
  assert same(weights("hf://me/new"), weights(folder))


def test_pytorchs_files_are_fetched_if_there_are_no_safetensors(server, folder, tmp_path):
  """A repository as Google's: pytorch_model.bin and files of other libraries."""
  old = shutil.copytree(folder / "discriminator", tmp_path / "old")
  test_torch_files.write(old / "pytorch_model.bin", load_file(old / "model.safetensors"))
  both = server.put("me/both", old)
  (old / "model.safetensors").unlink()
  (old / "tf_model.h5").write_bytes(b"not to be fetched")
  alone = server.put("me/old", old)
  for name, commit, expected in (
    ("both", both, "model.safetensors"),
    ("old", alone, "pytorch_model.bin"),
  ):
    assert same(weights(f"hf://me/{name}@{commit}"), weights(folder / "discriminator"))
    fetched = {x.name for x in hub.local(f"hf://me/{name}@{commit}").iterdir()}
    assert {x for x in fetched if "model" in x} == {expected}
