"""Runs of earlier versions: they resume, are exported, scored and fine-tuned as they were then.

tests/golden/version_*: what that version wrote, by these commands in one folder, on one CPU device
(`text.txt` were 60 documents of random words; version_0_2 has modern blocks, windows and Muon):

  build --config=configs/quickstart.py --config.data.dir=data --config.data.sources=text:text.txt
  train --config=configs/quickstart.py --config.data.dir=data --workdir=run, width 32, 8 steps
  score --checkpoint=run (of step 4); finetune on two columns of random words; finetune --predict

Of the run the checkpoint of step 4 is kept, and all lines of its log as `expected_metrics.jsonl`.
The folders are never made again: a later version adds its own. `commands_0_1.txt` and
`plug_in_0_1.py` hold the command lines and the Python that the pages of that version show.
"""

import dataclasses
import importlib
import json
import shlex
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from test_objectives import SPEC, D, fresh, keys_of, make_batch

import electra_jax
from electra_jax.commands import cli
from electra_jax.config import compare, files, registry
from electra_jax.core import objectives
from electra_jax.evaluate import likelihoods
from electra_jax.export import writer
from electra_jax.finetune import model
from electra_jax.finetune.metrics import METRICS
from electra_jax.finetune.tasks import TASKS
from electra_jax.interop import sources
from electra_jax.pretrain import train
from electra_jax.runtime import workdir

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(GOLDEN.glob("version_*"))
TIMING = ("sequences_per_sec", "tokens_per_sec", "mfu", "eta_secs", "elapsed_secs")


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def earlier(request, tmp_path, monkeypatch) -> Path:
  """A copy of what an earlier version wrote, as the current folder: its paths are relative."""
  shutil.copytree(request.param, tmp_path, dirs_exist_ok=True)
  monkeypatch.chdir(tmp_path)
  return tmp_path


def lines(path: Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def config_of(run: Path):
  """Returns today's configuration with the fields that the run was started with."""
  config = files.load("quickstart.py")
  fields = compare.flatten(config)
  saved = compare.upgrade(saved_fields(run))
  config.update_from_flattened_dict({k: v for k, v in saved.items() if fields.get(k, v) != v})
  return config


def saved_fields(run: Path) -> dict:
  return compare.flatten(json.loads((run / "config.json").read_text()))


def test_every_field_that_an_earlier_run_lacks_has_the_value_that_was_computed_then(earlier):
  # A field that is new in base.py, or called something else, and is not in `compare`.
  saved = compare.upgrade(saved_fields(earlier / "run"))
  assert not compare.flatten(files.load("base.py")).keys() - saved.keys()


def test_a_new_field_refuses_an_earlier_run_only_where_it_changes_what_is_computed():
  current = compare.flatten(files.load("base.py"))
  saved = {name: value for name, value in current.items() if name != "model.block"}
  assert compare.refuse_other_run(saved, current, "", "run") == []
  with pytest.raises(ValueError, match="model.block was 'post_norm', is 'pre_norm'"):
    compare.refuse_other_run(saved, current | {"model.block": "pre_norm"}, "", "run")


def test_a_run_of_an_earlier_version_goes_on_as_it_did_then(earlier):
  assert train.train(config_of(earlier / "run"), "run").step == 8
  expected, found = (lines(Path(p)) for p in ("expected_metrics.jsonl", "run/metrics.jsonl"))
  assert [(x["step"], x["split"]) for x in found] == [(x["step"], x["split"]) for x in expected]
  for a, b in zip(found, expected, strict=True):
    for name in set(b) - {"step", "split", *TIMING}:
      # Other processors and numbers of devices add up in another order; four steps of Adam with
      # rates of 5e-4 enlarge that by less than a hundred.
      assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-7), (a["step"], name)


def test_a_run_of_an_earlier_version_is_scored_as_it_was_then(earlier):
  expected = json.loads((earlier / "expected.json").read_text())["scores"]
  found = likelihoods.Scorer("run")([text for _, _, text in expected])
  assert [tokens for _, tokens in found] == [tokens for _, tokens, _ in expected]
  # Printed with four decimals; since then the generator's log q leaves out [MASK], which it never
  # samples: that adds 0.17 to 0.47 %.
  np.testing.assert_allclose([x for x, _ in found], [x for x, _, _ in expected], atol=1e-4)


@pytest.mark.parametrize("form", ["hf", "orbax"])
def test_a_run_of_an_earlier_version_is_exported_and_read_again(earlier, form, capsys):
  from rich.console import Console

  source = sources.open_source("run")
  if form == "hf":
    writer.export_hf(source, earlier / "out", Console(soft_wrap=True))
    again = sources.open_source(earlier / "out")
    assert again.networks.keys() == {"discriminator", "generator"}
  else:
    with workdir.new_folder(earlier / "out") as folder:
      sources.save_orbax(folder, source)
    again = sources.open_source(earlier / "out")
  for role, network in again.networks.items():
    ours, theirs = source.networks[role].weights, network.weights
    np.testing.assert_array_equal(ours["embeddings"]["word"], theirs["embeddings"]["word"])
    np.testing.assert_array_equal(
      ours["encoder"]["layers"]["qkv"]["kernel"], theirs["encoder"]["layers"]["qkv"]["kernel"]
    )


def test_a_network_that_an_earlier_version_fine_tuned_predicts_as_it_did_then(earlier):
  expected = json.loads((earlier / "expected.json").read_text())["predictions"]
  found = model.load("finetuned")([text for text, _, _ in expected])
  assert [x["label"] for x in found] == [label for _, label, _ in expected]
  for a, (_, _, probability) in zip(found, expected, strict=True):
    assert a["probability"] == pytest.approx(probability, abs=2e-6)  # printed with six digits


@pytest.mark.parametrize("line", (GOLDEN / "commands_0_1.txt").read_text().splitlines())
def test_a_command_line_of_version_0_1_is_understood(line):
  name, *words = shlex.split(line)
  assert cli.parser(name.removeprefix("data."), words).parse(words)


@pytest.mark.long
def test_a_plug_in_of_version_0_1_adds_its_entries_which_compute(tables):
  registry.import_module(str(GOLDEN / "plug_in_0_1.py"))
  assert METRICS["balanced"].compute(np.array([[0, 0], [0, 1], [1, 1]]), 2) == 0.75
  assert TASKS["docstrings"].metrics == ("balanced", "accuracy")
  parallel = dataclasses.replace(D, block="parallel")
  for change in (
    {"objective": "shuffled"},
    {"generator_kind": "similar"},
    {"discriminator": parallel},
  ):
    spec, batch = dataclasses.replace(SPEC, **change), make_batch()
    terms = objectives.make(spec)(fresh(spec), batch, keys_of(batch), jnp.int32(0)).values()
    assert all(np.isfinite(term.total / term.count) for term in terms if term.in_loss)


@pytest.mark.parametrize(("old", "new"), electra_jax._MOVED.items())
def test_a_module_of_version_0_1_that_moved_says_where_it_is(old, new):
  importlib.import_module(f"electra_jax.{new}")
  with pytest.raises(ImportError, match=f"electra_jax.{old} is now electra_jax.{new}$"):
    importlib.import_module(f"electra_jax.{old}")
  package, _, name = f"electra_jax.{old}".rpartition(".")
  with pytest.raises(ImportError, match=f"is now electra_jax.{new}$"):
    exec(f"from {package} import {name}")
