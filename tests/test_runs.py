"""Nothing of a run is lost in silence: its folder stands alone, and a resume erases nothing."""

import errno
import os
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import long_except, make_tiny_config
from test_train import STEPS, lines, saved

from electra_jax.commands import cli
from electra_jax.config import compare, files
from electra_jax.core import params
from electra_jax.data import pretrain_batches, shards
from electra_jax.export import writer
from electra_jax.interop import sources
from electra_jax.monitor import journal, metrics
from electra_jax.pretrain import train
from electra_jax.pretrain.run import prepare
from electra_jax.report import saved_run
from electra_jax.runtime import memory
from electra_jax.runtime.checkpoint import Checkpoints, WriteError


@pytest.fixture(scope="module")
def finished(tiny_shards, tmp_path_factory):
  """A run of its own copy of the shards, which are deleted at its end."""
  folder = tmp_path_factory.mktemp("finished")
  shutil.copytree(tiny_shards, folder / "shards")
  assert train.train(make_tiny_config(str(folder / "shards")), folder / "run").step == STEPS
  shutil.rmtree(folder / "shards")
  return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
  """A copy of that run."""
  return shutil.copytree(finished, tmp_path / "run")


def delete_checkpoints(run) -> None:
  for step in (run / "checkpoints").glob("[0-9]*"):
    shutil.rmtree(step)


def test_a_run_is_read_without_its_shards(finished, tiny_shards):
  source = sources.open_source(finished)
  assert source.networks.keys() == {"discriminator", "generator"}
  assert source.card["text"] and source.tokenizer.vocab == sources.vocab_of(tiny_shards)
  assert not (finished.parent / "shards").exists()


def test_the_card_of_a_checkpoint_has_the_evaluation_that_was_before_it(run):
  shutil.rmtree(run / "checkpoints" / str(STEPS))  # killed after that evaluation
  source = sources.open_source(run)
  assert source.card["steps"] == 8
  assert source.card["heldout"] in lines(run) and source.card["heldout"]["step"] == 6
  card = writer.model_card("discriminator", source.networks["discriminator"], source, False)
  assert "\n| held-out documents at step 6 | |\n" in card
  (run / "metrics.jsonl").write_text("")
  assert sources.open_source(run).card["heldout"] == {}


def test_a_relative_folder_of_shards_is_the_one_where_the_run_was_started(
  tiny_shards, tiny_config, tmp_path, monkeypatch, capsys
):
  shutil.copytree(tiny_shards, tmp_path / "here" / "shards")
  monkeypatch.chdir(tmp_path / "here")
  tiny_config.data.dir = "shards"
  train.train(tiny_config, "run")
  assert f"{tmp_path}/here/shards: " in capsys.readouterr().out
  shutil.rmtree("run/vocab")  # as in a run of an earlier version
  monkeypatch.chdir(tmp_path)
  assert sources.open_source("here/run").tokenizer is not None


def test_a_damaged_line_is_named_and_those_after_it_are_kept(run, tiny_config, capsys):
  path, before = run / "metrics.jsonl", lines(run)
  texts = path.read_text().splitlines()
  texts[2] = texts[2][:40]
  others = ['{"step": "5", "split": "train"}', '{"step": 6}']
  others += ['{"step": 7, "split": "train", "x": "y"}']
  path.write_text("\n".join([*texts, *others, '{"step": 13, "spl']))
  train.train(tiny_config, run)
  assert lines(run) == before[:2] + before[3:]
  n = len(texts)
  dropped = f"{path}: dropped damaged lines: 3, {n + 1}, {n + 2}, {n + 3}, {n + 4}\n"
  assert dropped in capsys.readouterr().out


def test_training_that_starts_over_keeps_the_earlier_history(run, tiny_config, capsys):
  before = (run / "metrics.jsonl").read_bytes()
  delete_checkpoints(run)
  for number in (1, 2):
    train.train(tiny_config, run)
    delete_checkpoints(run)
    told = f"renamed the earlier metrics.jsonl to {run}/metrics.jsonl.{number}"
    assert told in capsys.readouterr().out
  assert (run / "metrics.jsonl.1").read_bytes() == before


def test_the_warnings_of_a_run_that_started_over_are_those_since_then(run, tiny_config, capsys):
  events = journal.Journal(run)
  events.write("warning", text="of the first attempt")
  assert saved_run.read(run, "run").warnings == ["of the first attempt"]
  delete_checkpoints(run)
  train.train(tiny_config, run)
  out = capsys.readouterr().out
  assert (
    "training starts over: renamed the earlier metrics.jsonl to" in out and "warning:" not in out
  )
  assert saved_run.read(run, "run").warnings == []
  events.write("warning", text="of the second")
  train.train(tiny_config, run)  # which is finished
  starts = [event for event in journal.read(run) if event["event"] == "start"]
  assert [event["step"] for event in starts] == [0, 0, STEPS]
  assert saved_run.read(run, "run").warnings == ["of the second"]


@pytest.mark.long
def test_a_first_try_without_a_checkpoint_does_not_block_the_corrected_command(
  tiny_config, tmp_path, finished
):
  wrong = tiny_config.copy_and_resolve_references()
  wrong.init_from = str(tmp_path / "typo")
  with pytest.raises(ValueError, match="typo"):
    train.train(wrong, tmp_path / "run")
  assert train.train(tiny_config, tmp_path / "run").step == STEPS
  assert saved(tmp_path / "run") == saved(finished)


@pytest.mark.long
def test_an_evaluation_is_no_larger_than_what_is_evaluated(tiny_config, tmp_path, finished):
  tiny_config.eval.batch_size = 1 << 20
  assert train.train(tiny_config, tmp_path).step == STEPS
  for ours, theirs in zip(lines(tmp_path), lines(finished), strict=True):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
      # 20 examples in 24 rows instead of three times 8: sums in another order.
      same = ours[name] == value or ours[name] == pytest.approx(value, rel=1e-5)
      assert same, name


@pytest.mark.parametrize(
  ("what", "remedy"), [("the state", "low"), ("the training step", "raise train.acc")]
)
def test_what_needs_more_memory_than_is_free_is_refused_with_both_numbers(
  tiny_config, tmp_path, monkeypatch, what, remedy
):
  monkeypatch.setattr(memory, "available", lambda: 1000)
  if what != "the state":
    monkeypatch.setattr(train, "check_state_memory", lambda run: None)
  message = rf"{what} needs 0.\d\d GB of memory, but 0.00 GB are free: {remedy}"
  with pytest.raises(ValueError, match=message):
    train.train(tiny_config, tmp_path)
  assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


def test_a_program_needs_its_temporaries_and_new_results_on_every_device_of_a_cpu(monkeypatch):
  sizes = {"temp_size_in_bytes": 100, "output_size_in_bytes": 50, "alias_size_in_bytes": 40}
  compiled = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes))
  needed = 8 * (100 + 50 - 40)  # of 50, 40 are donated arguments
  monkeypatch.setattr(memory, "available", lambda: needed)
  memory.check("it", compiled, "")
  monkeypatch.setattr(memory, "available", lambda: needed - 1)
  with pytest.raises(ValueError, match="it needs"):
    memory.check("it", compiled, "")


def test_memory_is_no_more_than_a_container_may_take(tmp_path, monkeypatch):
  (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
  (tmp_path / "memory.max").write_text("max\n")
  (tmp_path / "memory.current").write_text("1000\n")
  monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
  monkeypatch.setattr(memory, "CGROUPS", (tmp_path,))
  assert memory.available() == 4000 * 1024
  (tmp_path / "memory.max").write_text("3000\n")
  assert memory.available() == 2000
  # What the kernel keeps of files is given back when a program needs it.
  (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 700\n")
  assert memory.available() == 2700
  # The limit of a job's own group, as SLURM sets it, or of one above it.
  job = tmp_path / "slurm" / "job_7"
  job.mkdir(parents=True)
  (tmp_path / "own").write_text("0::/slurm/job_7/step_0\n")
  monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
  (job / "memory.max").write_text("900\n")
  (job / "memory.current").write_text("100\n")
  assert memory.available() == 800


@pytest.mark.parametrize(
  ("fields", "warning"),
  [
    (
      {"optimizer.warmup_steps": 10, "train.steps": 5},
      "optimizer.warmup_steps=10 is above train.steps=5: ",
    ),
    ({"optimizer.warmup_steps": 10, "train.steps": 12}, None),
    ({"data.examples": "packed"}, "'packed', but the shards were built with 'segments'"),
    ({"data.examples": "segments"}, None),
  ],
)
def test_fields_that_contradict_each_other_are_a_warning(tiny_config, tmp_path, fields, warning):
  tiny_config.update_from_flattened_dict(fields)
  found = [*train.contradictions(prepare(tiny_config, tmp_path, False), [])]
  assert len(found) == bool(warning) and all(warning in text for text in found)


def test_overrides_may_stand_before_the_configuration():
  before, after = "--config.seed=3", "--config.eval.batch_size=4"
  argv = ["--workdir=x", before, "--config", "configs/base.py", after]
  args = cli.parser("train").parse(argv)
  assert (args.workdir, args.config_fields) == ("x", ["seed", "eval.batch_size"])
  assert (args.config.seed, args.config.eval.batch_size) == (3, 4)


@pytest.mark.parametrize(
  ("words", "found"),
  [
    ("--workdir=x --num_processes=2 --process_id 1", ("x", 2, 1, False)),
    ("--workdir=x --num-processes=2 --process-id=1 --verify", ("x", 2, 1, True)),
    ("-workdir=a_b --noverify", ("a_b", 0, -1, False)),
    ("--workdir x --verify=true", ("x", 0, -1, True)),
  ],
)
def test_options_have_their_earlier_spellings_too(words, found):
  args = cli.parser("train").parse(words.split())
  assert (args.workdir, args.num_processes, args.process_id, args.verify) == found


def test_both_learning_rates_are_named_where_there_are_two():
  o = files.load("quickstart.py").optimizer
  both = f"optimizer.learning_rate (now {o.learning_rate:g}) or optimizer.generator_learning_rate"
  assert both in train.remedy(o)


def test_a_changed_shape_is_refused_without_the_hint_to_resume_anyway():
  def refuse(allowed="", **changed):
    fields = compare.upgrade({"model.num_layers": 2, "train.steps": 5})
    compare.refuse_other_run(fields, fields | changed, allowed, "run")

  with pytest.raises(ValueError, match=r"was 2, is 4; use another --workdir$"):
    refuse(**{"model.num_layers": 4})
  with pytest.raises(ValueError, match=r"was 2, is 4; use another --workdir$"):
    refuse("model,train", **{"model.num_layers": 4})  # it could not be resumed
  with pytest.raises(ValueError, match=r"resume anyway with --config.allow_config_change=train.st"):
    refuse(**{"train.steps": 6})


def test_a_source_has_many_spellings(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  saved = {"init_from": "runs/a", "generator.init_from": None}
  for path in ("runs/a", str(tmp_path / "runs" / "a")):
    assert compare.differences(saved, saved | {"init_from": path}) == {}
  assert compare.differences(saved, saved | {"init_from": "runs/b"}).keys() == {"init_from"}
  assert compare.differences(saved, saved | {"generator.init_from": "runs/a"})


def test_many_arrays_of_other_shapes_are_three_and_a_number():
  def tree(n):
    return {"discriminator": {"encoder": {f"w{i}": np.ones((n, n)) for i in range(40)}}}

  with pytest.raises(ValueError, match="and 37 more arrays differ") as error:
    params.inherit(tree(2), tree(3))
  assert len(str(error.value)) < 300


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda split: split.update(examples=split["examples"] + 1), "train has .* its files"),
    (lambda split: split["shards"][0].update(examples=1), "has 1 examples of .* bytes, but"),
  ],
)
def test_a_count_of_examples_that_the_files_do_not_hold_is_refused(
  tiny_shards, tmp_path, change, message
):
  shutil.copytree(tiny_shards, tmp_path, dirs_exist_ok=True)
  manifest = shards.read_manifest(tmp_path)
  change(manifest["splits"]["train"])
  (tmp_path / shards.MANIFEST).write_text(shards.dump(manifest))
  with pytest.raises(shards.DataError, match=message):
    pretrain_batches.Shards.open(tmp_path)


@pytest.mark.long
def test_checking_memory_compiles_nothing_twice(tiny_config, tmp_path):
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, secs, **kw: (
      compiled.append(kw.get("fun_name", event))
      if event.endswith("backend_compile_duration")
      else None
    )
  )
  tiny_config.seed = 99  # a step that no other test has compiled
  tiny_config.objective.name = "bert"  # of one network: the quickest
  train.train(tiny_config, tmp_path)
  assert len(compiled) == 4  # parameters, state, the step, the evaluation


@pytest.mark.parametrize("on_error", long_except(1, of=["continue", "stop"]))
def test_going_back_from_nan_meets_a_failed_save_as_the_next_save_does(
  tiny_config, tmp_path, monkeypatch, capsys, on_error
):
  read, wait, done = metrics.Window._read, Checkpoints._wait_for_save, []

  def nan_at_step_10(window):
    if window._unread[0][0] == 10 and not done:
      done.append("nan")
      error = metrics.NotFiniteError("step 10: mlm_loss = nan")
      error.step = 10
      raise error
    read(window)

  def full_disk(checkpoints):  # under the save of step 8
    wait(checkpoints)
    if done == ["nan"]:
      done.append("full")
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(metrics.Window, "_read", nan_at_step_10)
  monkeypatch.setattr(Checkpoints, "_wait_for_save", full_disk)
  tiny_config.objective.name = "bert"
  tiny_config.health.on_nan, tiny_config.checkpoint.on_error = "rollback", on_error
  if on_error == "stop":
    with pytest.raises(WriteError, match="No space left on device"):
      train.train(tiny_config, tmp_path)
    return
  assert train.train(tiny_config, tmp_path).step == STEPS
  output = capsys.readouterr().out
  assert "(No space left on device); the checkpoint of step 8 is intact; training cont" in output
  assert "resuming from step 8" in output
  assert [e["event"] for e in journal.read(tmp_path)].count("first step") == 1
