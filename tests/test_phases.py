"""Phases: what a run takes from another, and what each of its schedules then does."""

import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from conftest import make_tiny_config
from rich.console import Console
from test_train import STEPS, lines, programs_of, saved

from electra_jax.config import compare, files
from electra_jax.data import build, pretrain_batches, tokenizer
from electra_jax.export import writer
from electra_jax.interop import sources
from electra_jax.monitor import journal
from electra_jax.pretrain import train
from electra_jax.runtime import parallel
from electra_jax.runtime.checkpoint import CheckpointError, Checkpoints


@pytest.fixture(scope="module")
def straight(tiny_shards, tmp_path_factory):
  """A run that warms up, learns at a constant rate and ends with a decay of four steps."""
  workdir = tmp_path_factory.mktemp("straight")
  assert train.train(decaying(make_tiny_config(tiny_shards)), workdir).step == STEPS
  return workdir


def decaying(config):
  """Returns the configuration with a constant rate until the last four steps.

  Of one network, because it compiles in half the time.
  """
  config.objective.name = "bert"
  config.optimizer.schedule, config.optimizer.decay_steps = "wsd", 4
  return config


def state_at(workdir, step, config):
  """Returns the state of a run's checkpoint."""
  run = Checkpoints(workdir, keep=5, keep_every_steps=0)
  sharding = parallel.StateSharding(programs_of(config).shapes, sharded=False)
  state, _ = run.restore(step, sharding.shapes())
  run.close()
  return state


@pytest.mark.long
def test_a_run_may_be_made_longer_before_its_decay(straight, tiny_config, tmp_path):
  """It ends in the bits of the run that was as long from the start."""
  workdir, config = tmp_path / "copy", decaying(tiny_config)
  shutil.copytree(straight, workdir)
  shutil.rmtree(workdir / "checkpoints" / "12")  # step 8 is the last before the decay
  config.train.steps, config.allow_config_change = 16, "train.steps"
  assert train.train(config, workdir).step == 16
  config.allow_config_change = ""
  assert train.train(config, tmp_path / "long").step == 16
  assert saved(workdir, 16) == saved(tmp_path / "long", 16)


@pytest.mark.long
def test_a_phase_takes_the_moments_and_counts_its_own_steps(straight, tiny_config, tmp_path):
  config = decaying(tiny_config)
  before = state_at(straight, 8, config)
  config.init_from, config.init_step, config.init_optimizer = str(straight), 8, True
  config.train.steps, config.optimizer.warmup_steps, config.seed = 4, 0, 1
  config.optimizer.learning_rate = 1e-30  # leaves weights as they are
  assert train.train(config, tmp_path / "phase").step == 4
  after = state_at(tmp_path / "phase", 4, config)
  assert jax.tree.all(jax.tree.map(np.array_equal, after.params, before.params))
  find = optax.tree.get_all_with_path
  counts = {path[-1].tuple_name: int(x) for path, x in find(after.opt_state, "count")}
  assert counts == {"ScaleByAdamState": 12, "ScaleByScheduleState": 4}
  assert after.step == 4
  # v = b2 v + (1 - b2) g^2: of the old moments b2^4 is left, and more is added.
  old, new = (optax.tree.get(s.opt_state, "nu") for s in (before, after))
  for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
    assert (b >= config.optimizer.b2**4 * a * (1 - 1e-6)).all() and a.any()


@pytest.mark.long
def test_decays_branch_from_one_run_at_another_length(straight, tiny_shards, tmp_path, capsys):
  config = make_tiny_config(tiny_shards)
  config.data.dir = str(tmp_path / "short")
  config.data.sources = f"text:{Path(tiny_shards).parent / 'text.txt'}"
  config.data.vocab, config.data.seq_length = f"{tiny_shards}/vocab.txt", 12
  config.data.workers = 1
  build.build(config)
  rates = []
  for steps in (4, 6):
    config = decaying(make_tiny_config(tiny_shards))
    config.init_from, config.init_step, config.init_optimizer = str(straight), 8, True
    config.optimizer.warmup_steps, config.optimizer.decay_steps = 0, steps
    config.train.steps, config.train.batch_size = steps, 16
    config.data.dir, config.data.seq_length = str(tmp_path / "short"), 12
    workdir = tmp_path / str(steps)
    assert train.train(config, workdir).step == steps
    output = capsys.readouterr().out
    assert f"the optimizer of {straight}, step 8" in output
    assert "it reads the same data again" not in output  # these shards are others
    rates.append([x["learning_rate"] for x in lines(workdir) if x["split"] == "train"])
  peak = make_tiny_config(tiny_shards).optimizer.learning_rate
  # After t steps of n: 1 - sqrt(t / n); metrics give the rate of the last step of each window.
  for steps, found in zip((4, 6), rates, strict=True):
    assert found[0] == pytest.approx(peak * (1 - np.sqrt(2 / steps)), rel=1e-6)


@pytest.mark.long
def test_detection_after_masked_lm_takes_the_moments_of_what_both_have(
  straight, tiny_shards, tmp_path, capsys
):
  """Of the main network and its words; the generator and the detection head start anew."""
  before = state_at(straight, 8, decaying(make_tiny_config(tiny_shards)))
  config = make_tiny_config(tiny_shards)
  config.objective.name, config.objective.keep_mask_share = "electra_mlm", 0.5
  config.init_from, config.init_step, config.init_optimizer = str(straight), 8, True
  config.train.steps, config.optimizer.warmup_steps, config.seed = 4, 0, 1
  config.optimizer.learning_rate = 1e-30  # leaves weights as they are
  assert train.train(config, tmp_path / "phase").step == 4
  output = capsys.readouterr().out
  assert "newly initialised: discriminator/rtd_head, generator/" in output
  goes_on = "goes on for discriminator/encoder, discriminator/mlm_head, embeddings/"
  assert f"the optimizer of {straight}, step 8, {goes_on}" in output
  after = state_at(tmp_path / "phase", 4, config)
  (count,) = (
    int(x) for path, x in optax.tree.get_all_with_path(after.opt_state, "count")
    if path[-1].tuple_name == "ScaleByAdamState"
  )  # fmt: skip
  assert count == 12
  # v = b2 v + (1 - b2) g^2: of the old moments b2^4 is left, and more is added.
  old, new = (optax.tree.get(s.opt_state, "nu") for s in (before, after))
  for part in ("embeddings", "discriminator"):
    for name in old[part]:
      for a, b in zip(*map(jax.tree.leaves, (old[part][name], new[part][name])), strict=True):
        assert (b >= config.optimizer.b2**4 * a * (1 - 1e-6)).all() and a.any(), (part, name)


def test_a_phase_that_cannot_continue_a_run_is_refused(straight, tiny_config, tmp_path):
  config = decaying(tiny_config)
  config.init_from, config.init_step, config.init_optimizer = str(straight), 8, True
  config.optimizer.name = "muon"
  with pytest.raises(CheckpointError, match=r"^the checkpoint .*8.* does not fit"):
    train.train(config, tmp_path / "d")
  other = tmp_path / "other"
  shutil.copytree(straight, other)
  vocab = pretrain_batches.Shards.open(config.data.dir).vocab
  path = other / "vocab" / vocab.file
  path.write_bytes(path.read_bytes().rstrip() + b"zzz\n")
  use_vocab_of_folder(other, path.name)
  config.init_from, config.optimizer.name = str(other), "electra_adam"
  with pytest.raises(ValueError, match="other and .* have different vocabularies"):
    train.train(config, tmp_path / "e")


def test_parameters_of_another_run_start_a_new_one(straight, tiny_config, tmp_path, capsys):
  config = decaying(tiny_config)
  config.init_from = str(straight)
  assert train.train(config, tmp_path / "new").step == STEPS
  assert f"starting from the parameters of {straight}" in capsys.readouterr().out
  ours, theirs = lines(tmp_path / "new"), lines(straight)
  assert {**ours[0], "step": STEPS} == theirs[-1]  # the same weights, masks and samples
  assert ours[1]["learning_rate"] == theirs[1]["learning_rate"]  # the optimizer starts anew
  assert saved(tmp_path / "new") != saved(straight)
  config.model.ffn_size = 64
  with pytest.raises(ValueError, match=r"has model.ffn_size=32 \(here 64\): leave"):
    train.train(config, tmp_path / "other")


@pytest.mark.long
def test_the_second_stage_copies_the_first_exactly_and_never_changes_its_generator(
  tiny_shards, tmp_path, capsys
):
  def shrunk(stage):
    config = files.load("two_stage.py", f"{stage},base")
    tiny = compare.flatten(make_tiny_config(tiny_shards))
    config.update_from_flattened_dict(
      {k: v for k, v in tiny.items() if k.split(".")[0] not in ("objective", "generator")}
    )
    return config

  one, two = tmp_path / "one", tmp_path / "two"
  assert train.train(shrunk("stage1"), one).step == STEPS
  config = shrunk("stage2")
  config.init_from = config.generator.init_from = str(one)
  config.optimizer.weight_decay = 0.5  # would shrink what is not frozen
  assert train.train(config, two).step == STEPS
  output = capsys.readouterr().out
  assert "newly initialised: discriminator/rtd_head" in output
  tokens = tokenizer.load_from(tiny_shards, pretrain_batches.Shards.open(tiny_shards).vocab)
  first = sources.read_run(one, tokens).params
  second = sources.read_run(two, tokens).params
  same = jax.tree.map(np.array_equal, second["generator"], {
    "embeddings": first["embeddings"], **first["discriminator"]
  })  # fmt: skip
  assert all(jax.tree.leaves(same))
  moved = jax.tree.map(
    lambda a, b: not np.array_equal(a, b),
    (second["embeddings"]["word"], second["discriminator"]["encoder"]),
    (first["embeddings"]["word"], first["discriminator"]["encoder"]),
  )
  assert all(jax.tree.leaves(moved))
  # The copy itself: a run of no learning ends where it starts.
  config.optimizer.learning_rate, config.train.steps = 1e-30, 1
  assert train.train(config, tmp_path / "still").step == 1
  copied = sources.read_run(tmp_path / "still", tokens).params
  for part in ("embeddings", "discriminator"):
    for name in first[part].keys() & copied[part].keys():
      same = jax.tree.map(np.array_equal, first[part][name], copied[part][name])
      assert all(jax.tree.leaves(same)), name
  # A vocabulary is known by its entries: the same ones in another file, then others.
  path = one / "vocab" / tokens.vocab.file
  content = path.read_bytes()
  path.write_bytes(content.replace(b"\n", b"\r\n"))
  use_vocab_of_folder(one, path.name)
  assert sources.read_run(one, tokens).step == STEPS
  path.write_bytes(content.rstrip() + b"zzz\n")
  use_vocab_of_folder(one, path.name)
  with pytest.raises(ValueError, match="have different vocabularies"):
    sources.read_run(one, tokens)


@pytest.mark.long
def test_a_frozen_generator_of_any_source_is_not_needed_after_the_start(tiny_shards, tmp_path):
  assert train.train(make_tiny_config(tiny_shards), tmp_path / "run").step == STEPS
  writer.export_hf(sources.open_source(tmp_path / "run"), tmp_path / "hf", Console(quiet=True))
  found = []
  for origin in (tmp_path / "run", tmp_path / "hf" / "generator"):
    config = make_tiny_config(tiny_shards)
    config.generator.kind, config.generator.tie = "frozen", "none"
    config.generator.init_from, config.train.steps = str(origin), 2
    workdir = tmp_path / f"from_{origin.name}"
    assert train.train(config, workdir).step == 2
    earlier = json.loads((workdir / "config.json").read_text())
    del earlier["frozen_generator"]  # as earlier versions wrote it
    shutil.copytree(workdir, tmp_path / "earlier", dirs_exist_ok=True)
    (tmp_path / "earlier" / "config.json").write_text(json.dumps(earlier))
    if origin.name == "run":
      assert sources.open_source(tmp_path / "earlier").card["steps"] == 2
    shutil.rmtree(origin)
    assert train.train(config, workdir).step == 2  # resumes, and is done
    found.append(sources.open_source(workdir).networks["generator"])
    with pytest.raises(ValueError, match=f"{origin} (is not a run of|does not exist)"):
      sources.open_source(tmp_path / "earlier")
  assert jax.tree.all(jax.tree.map(np.array_equal, found[0].weights, found[1].weights))
  assert lines(tmp_path / "from_run") == lines(tmp_path / "from_generator")
  config.generator.init_from = str(tmp_path / "hf" / "discriminator")
  with pytest.raises(ValueError, match="discriminator has no masked language model"):
    train.train(config, tmp_path / "none")


def test_a_phase_takes_the_frozen_generator_that_it_names(straight, tiny_config, tmp_path, capsys):
  """Not the generator of the run whose optimizer it continues; a run that resumes keeps its own."""
  earlier, phase = tmp_path / "earlier", tmp_path / "phase"
  shutil.copytree(straight, earlier)
  shutil.rmtree(earlier / "checkpoints" / str(STEPS))
  tiny_config.generator.kind, tiny_config.generator.tie = "frozen", "none"
  tiny_config.generator.init_from, tiny_config.train.steps = str(straight), 1
  assert train.train(tiny_config, tmp_path / "first").step == 1
  tiny_config.init_from, tiny_config.init_optimizer = str(tmp_path / "first"), True
  tiny_config.generator.init_from = str(earlier)
  assert train.train(tiny_config, phase).step == 1
  warnings = [event["text"] for event in journal.read(phase) if event["event"] == "warning"]
  assert f"seed=0 as in {tmp_path / 'first'}: it reads the same data again" in warnings
  wanted, found = (sources.open_source(path).networks for path in (earlier, phase))
  same = jax.tree.map(np.array_equal, wanted["discriminator"].weights, found["generator"].weights)
  assert jax.tree.all(same)
  tiny_config.generator.init_from = str(straight)
  tiny_config.allow_config_change = "generator.init_from"
  capsys.readouterr()
  assert train.train(tiny_config, phase).step == 1
  assert "warning: generator.init_from has no effect on a run that" in capsys.readouterr().out


@pytest.mark.long
def test_a_frozen_generator_takes_the_place_of_that_of_init_from(
  straight, tiny_shards, tmp_path, capsys
):
  config = make_tiny_config(tiny_shards)
  config.train.steps = 1
  assert train.train(config, tmp_path / "origin").step == 1  # its generator is half as wide
  config.generator.kind, config.generator.tie = "frozen", "none"
  config.generator.init_from, config.init_from = str(straight), str(tmp_path / "origin")
  capsys.readouterr()
  assert train.train(config, tmp_path / "new").step == 1
  taken = capsys.readouterr().out.partition("starting from the parameters of ")[2].splitlines()[0]
  assert "discriminator/encoder" in taken and "generator/" not in taken


def use_vocab_of_folder(workdir: Path, file: str) -> None:
  """Turns a run into one of the vocabulary that its folder holds now."""
  digest = hashlib.sha256((workdir / "vocab" / file).read_bytes()).hexdigest()
  for name, group, field in (
    ("config.json", "data", "vocab_hash"),
    ("vocab/manifest.json", "vocab", "hash"),
  ):
    content = json.loads((workdir / name).read_text())
    content[group][field] = digest
    (workdir / name).write_text(json.dumps(content))
