"""Exports of a run's checkpoints: each is the network of its step, also at step 0."""

import shutil

import jax
import numpy as np
import pytest
from conftest import long_except, make_tiny_config
from test_train import lines

from electra_jax.commands import cli
from electra_jax.interop import sources
from electra_jax.pretrain import start, train
from electra_jax.runtime.checkpoint import CheckpointError

FROZEN = {"generator.kind": "frozen", "generator.tie": "none"}
FIELDS = {
  "from its seed": {"seed": 3},
  "from a network": {"init_from": "origin"},
  "with the optimizer": {"init_from": "origin", "init_step": 2, "init_optimizer": True},
  "a frozen generator": {"generator.init_from": "origin", **FROZEN},
}


def export(*args) -> None:
  cli.call("export", [*map(str, args), "--to=hf"])


def same(a, b) -> bool:
  return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def config_of(shards: str, **fields):
  config = make_tiny_config(shards)
  config.update_from_flattened_dict(fields)
  config.train.steps, config.checkpoint.every_steps, config.eval.every_steps = 4, 2, 2
  return config


@pytest.fixture(params=long_except(0, of=list(FIELDS), nightly=(1,)))
def run(request, tiny_shards, tmp_path, monkeypatch):
  """The workdir of a run of four steps, and the parameters that it began with."""
  origin, began = tmp_path / "origin", []
  fields = {k: str(origin) if v == "origin" else v for k, v in FIELDS[request.param].items()}
  if str(origin) in fields.values():
    train.train(config_of(tiny_shards), origin)

  def keep(*args):
    state, meta = start.make_state(*args)
    began.append(jax.tree.map(np.array, state.params))  # the step donates them
    return state, meta

  monkeypatch.setattr(train, "make_state", keep)
  train.train(config_of(tiny_shards, **fields), tmp_path / "run")
  return tmp_path / "run", began[0]


@pytest.mark.long
def test_step_0_is_what_the_run_began_with_and_each_card_has_its_own_evaluation(run, tmp_path):
  workdir, began = run
  export(workdir, tmp_path / "out", "--all-checkpoints")
  steps = {step: tmp_path / "out" / f"step-{step:08d}" for step in (0, 2, 4)}
  assert sorted(steps.values()) == sorted((tmp_path / "out").iterdir())
  found = start.read_initial(workdir, sources.open_source(workdir).tokenizer)
  assert same(jax.tree.map(np.asarray, found.params), began)
  written = sources.open_source(steps[0]).networks
  for role, network in written.items():
    assert same(network.weights["encoder"], began[role]["encoder"])
  assert written.keys() == {"discriminator", "generator"}
  first, second, last = (sources.open_source(x).networks["discriminator"] for x in steps.values())
  assert not same(first.weights, second.weights) and not same(second.weights, last.weights)
  newest = sources.open_source(workdir).networks["discriminator"]
  assert same(last.weights, dict(newest.weights))
  values = {x["step"]: x["rtd_loss"] for x in lines(workdir) if x["split"] == "heldout"}
  for step, folder in steps.items():
    card = (folder / "discriminator" / "README.md").read_text()
    assert f"objective `electra`, {step} steps of" in card
    assert f"| held-out documents at step {step} | |" in card
    assert f"| rtd_loss | {values[step]:.4f} |" in card
    assert ("\nInitial ELECTRA, " in card) == (step == 0)
    export(workdir, tmp_path / str(step), "--step", step)
    name = "discriminator/model.safetensors"
    assert (tmp_path / str(step) / name).read_bytes() == (folder / name).read_bytes()
  with pytest.raises(CheckpointError, match=r"has no checkpoint of step 7; choose one of \[2, 4\]"):
    export(workdir, tmp_path / "seventh", "--step=7")


@pytest.mark.long
def test_without_what_it_started_from_a_run_exports_the_others(tiny_shards, tmp_path, capsys):
  train.train(config_of(tiny_shards), tmp_path / "origin")
  train.train(config_of(tiny_shards, init_from=str(tmp_path / "origin")), tmp_path / "run")
  shutil.rmtree(tmp_path / "origin")
  export(tmp_path / "run", tmp_path / "out", "--all-checkpoints")
  assert f"not exported: step 0: {tmp_path / 'origin'} does not exist" in capsys.readouterr().out
  assert sorted(x.name for x in (tmp_path / "out").iterdir()) == ["step-00000002", "step-00000004"]
  one = tmp_path / "out" / "step-00000002"
  for option in ("--all-checkpoints", "--step=2"):
    with pytest.raises(sources.ExchangeError, match="leave out step: .*step-00000002 is not a run"):
      export(one, tmp_path / "again", option)
  assert not (tmp_path / "again").exists()
  with pytest.raises(cli.UsageError, match="--step cannot be combined with --all-checkpoints"):
    export(tmp_path / "run", tmp_path / "again", "--all-checkpoints", "--step=2")
