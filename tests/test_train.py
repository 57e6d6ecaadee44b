"""The program: exact however it is interrupted, loud about what is wrong."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import long_except
from rich.console import Console

from electra_jax.config import compare, specs
from electra_jax.data import pretrain_batches
from electra_jax.monitor import bands, journal, metrics
from electra_jax.pretrain import summary, train
from electra_jax.pretrain.loop import Loop, UnhealthyError
from electra_jax.pretrain.run import TrainFns, make_train_fns, prepare, start_or_continue
from electra_jax.runtime import parallel, signals, terminal
from electra_jax.runtime.checkpoint import Checkpoints

ROOT = Path(__file__).resolve().parent.parent
STEPS = 12


def lines(workdir: Path) -> list[dict]:
  """Returns the run's history without what depends on the clock."""
  history = metrics.read_history(Path(workdir) / "metrics.jsonl")
  return [{k: v for k, v in line.items() if k not in metrics.TIMING} for line in history]


def saved(workdir: Path, done: int = STEPS) -> dict:
  """Returns {array: shape, dtype, CRC} of a checkpoint."""
  meta = Path(workdir) / "checkpoints" / str(done) / "meta" / "metadata"
  return json.loads(meta.read_text())["arrays"]


def interrupt_at(monkeypatch, done: int, action) -> None:
  """Calls action() in the middle of step `done`, once."""
  original = metrics.Window.add

  def add(window, step, values):
    if step == done:
      monkeypatch.undo()
      action()
    original(window, step, values)

  monkeypatch.setattr(metrics.Window, "add", add)


def assert_same_run(workdir: Path, other: Path) -> None:
  """Checks that two runs ended with the same bits and said the same on the way."""
  assert saved(workdir) == saved(other)
  assert lines(workdir) == lines(other)


@pytest.fixture(name="copy")
def copy_of_run(straight, tmp_path) -> Path:
  return shutil.copytree(straight, tmp_path / "run")


@pytest.fixture(name="begun")
def begun_run(copy) -> Path:
  """A run that has its checkpoints of steps 4 and 8 of 12."""
  shutil.rmtree(copy / "checkpoints" / str(STEPS))
  return copy


def test_a_run_leaves_everything_it_promises(straight):
  files = ".lock checkpoints config.json curves.png journal.jsonl metrics.jsonl vocab"
  assert sorted(p.name for p in straight.iterdir()) == files.split()
  history = lines(straight)
  told = " ".join(f"{x['split']} {x['step']}" for x in history)
  assert told == "heldout 0 train 3 train 6 heldout 6 train 9 train 12 heldout 12"
  assert history[-1]["mlm_loss"] < history[0]["mlm_loss"]
  assert 0 < history[-1]["rtd_auc"] < 1


@pytest.mark.parametrize("k", long_except(1, of=[1, 4, 8, 11]))
def test_k_steps_and_the_rest_are_the_whole_run_bit_for_bit(
  straight, tiny_config, tmp_path, monkeypatch, capsys, k
):
  interrupt_at(monkeypatch, k, lambda: signal.raise_signal(signal.SIGTERM))
  assert train.train(tiny_config, tmp_path).step == k
  output = capsys.readouterr().out
  assert f"SIGTERM: stopping after step {k}" in output
  place = tmp_path / "checkpoints" / str(k)
  assert f"stopped after step {k} of {STEPS}, saved: {place}\n" in output
  assert "resume by training in the same workdir again\n" in output
  for line in output.splitlines():
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)
    assert len(line) <= 160
  assert f"train step 1/{STEPS} | mlm loss " in output  # which is no line of the history
  assert train.train(tiny_config, tmp_path).step == STEPS
  assert_same_run(tmp_path, straight)


@pytest.mark.long
def test_a_run_of_two_optimizers_and_schedules_resumes_bit_for_bit(
  tiny_config, tmp_path, monkeypatch
):
  tiny_config.update_from_flattened_dict(
    {
      "optimizer.separate_optimizers": True,
      "generator.tie": "gdes",
      "objective.name": "electra_mlm",
      "objective.mask_prob_schedule": "0%=0.3,100%=0.1",
      "objective.temperature_schedule": "0=2,50%=1",
      "objective.unigram_share_schedule": "0=1,100%=0",
      "objective.discriminator_weight_schedule": "50%=0,50%=50",
      "objective.replace_mlm_weight_schedule": "0=50,100%=1",
    }
  )
  assert train.train(tiny_config, tmp_path / "straight").step == STEPS
  interrupt_at(monkeypatch, 4, lambda: signal.raise_signal(signal.SIGTERM))
  assert train.train(tiny_config, tmp_path / "stopped").step == 4
  assert train.train(tiny_config, tmp_path / "stopped").step == STEPS
  assert_same_run(tmp_path / "stopped", tmp_path / "straight")


def test_a_run_that_dies_goes_on_from_the_last_checkpoint_bit_for_bit(
  straight, tiny_config, tmp_path, monkeypatch
):
  def die():
    raise KeyboardInterrupt  # as a second Ctrl-C: nothing is saved

  interrupt_at(monkeypatch, 7, die)
  with pytest.raises(KeyboardInterrupt, match="the newest checkpoint: .*/checkpoints/4$"):
    train.train(tiny_config, tmp_path)
  assert [x["step"] for x in lines(tmp_path)] == [0, 3, 6, 6]
  assert train.train(tiny_config, tmp_path).step == STEPS  # from step 4
  assert_same_run(tmp_path, straight)


def test_a_run_resumes_with_the_flags_of_jax_that_it_has_recorded(begun, tiny_config):
  changed = "jax.default_matmul_precision was None, is 'bfloat16'"
  with jax.default_matmul_precision("bfloat16"):
    with pytest.raises(ValueError, match=f"holds another run: {changed}; .*allow_config_change="):
      train.train(tiny_config, begun)
    config = json.loads((begun / "config.json").read_text())
    del config["jax"]  # an earlier version resumes
    (begun / "config.json").write_text(json.dumps(config))
    prepared = prepare(tiny_config, begun, verify=False)
    assert start_or_continue(prepared) == []
    assert prepared.record["jax"]["default_matmul_precision"] == "bfloat16"


@pytest.mark.parametrize(
  ("number", "told"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "interrupted")]
)
def test_a_signal_while_the_step_is_compiled_ends_the_run(
  tiny_config, tmp_path, monkeypatch, number, told
):
  before = signal.getsignal(number)

  def compile_step(*unused):
    signal.raise_signal(number)

  monkeypatch.setattr(Loop, "_check_memory", compile_step)
  with pytest.raises(KeyboardInterrupt, match=f"^{told}; nothing is saved yet$") as ended:
    train.train(tiny_config, tmp_path)
  assert isinstance(ended.value, signals.Terminated) == (number == signal.SIGTERM)
  assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_other_signals_finish_the_step_and_save(tiny_config, tmp_path, monkeypatch, capsys, number):
  before = signal.getsignal(number)
  interrupt_at(monkeypatch, 2, lambda: signal.raise_signal(number))
  assert train.train(tiny_config, tmp_path).step == 2
  assert (tmp_path / "checkpoints" / "2").exists()
  output = capsys.readouterr().out
  assert f"{signal.Signals(number).name}: stopping after step 2\n" in output
  assert f"stopped after step 2 of {STEPS}, saved: {tmp_path / 'checkpoints' / '2'}\n" in output
  assert signal.getsignal(number) is before


def test_a_finished_run_is_not_trained_again(straight, copy, tiny_config, capsys):
  assert train.train(tiny_config, copy).step == STEPS
  assert_same_run(copy, straight)
  output = capsys.readouterr().out
  assert f"already at step {STEPS}" in output and "held-out documents" in output


def test_resuming_with_another_config_is_refused_with_the_differences(straight, copy, tiny_config):
  tiny_config.optimizer.learning_rate = 0.5
  tiny_config.log.every_steps = 1  # free
  with pytest.raises(ValueError, match=r"another run: optimizer.learning_rate was 0.01, is 0.5;"):
    train.train(tiny_config, copy)
  assert saved(copy) == saved(straight)
  tiny_config.optimizer.learning_rate = 0.01
  tiny_config.init_from = "elsewhere"
  with pytest.raises(ValueError, match="init_from was None, is 'elsewhere'"):
    train.train(tiny_config, copy)
  tiny_config.allow_config_change = "optimizer,init_from"
  assert train.train(tiny_config, copy).step == STEPS
  assert json.loads((copy / "config.json").read_text())["init_from"] == "elsewhere"


def test_nan_stops_with_the_step_and_the_term_and_keeps_the_checkpoints(
  straight, begun, tiny_config
):
  # A checkpoint of step 9 whose weights are finite, and whose sums are not.
  run = Checkpoints(begun, keep=5, keep_every_steps=0)
  shapes = programs_of(tiny_config).shapes
  state, meta = run.restore(8, parallel.StateSharding(shapes, sharded=False).shapes())
  params = jax.tree.map(lambda x: x * 1e30, state.params)
  run.save(9, state.replace(step=state.step + 1, params=params), meta)
  run.close()
  told = (
    r"^step 10: .*= (nan|inf); try a lower optimizer.learning_rate \(now 0.01\),"
    r" or more optimizer.warmup_steps \(now 3\)"
  )
  with pytest.raises(metrics.NotFiniteError, match=told):
    train.train(tiny_config, begun)
  warning, diverged, end = journal.read(begun)[-3:]
  assert warning["event"] == "warning" and warning["text"].startswith("stopped: step 10: ")
  assert (diverged["event"], diverged["step"]) == ("diverged", 10)
  assert end["event"] == "goodput" and end["secs"]["compile"] > 0
  assert sorted(os.listdir(begun / "checkpoints")) == ["4", "8", "9"]
  shutil.rmtree(begun / "checkpoints" / "9")
  assert train.train(tiny_config, begun).step == STEPS
  assert saved(begun) == saved(straight)


def programs_of(config) -> TrainFns:
  """Returns the functions of a run of `config`."""
  vocab = pretrain_batches.Shards.open(config.data.dir).vocab
  spec = specs.make_spec(config, vocab)
  tx = specs.make_optimizer_config(config)
  c = config.train
  return make_train_fns(spec, tx, c.steps, config.seed, c.accumulation)


def damage_newest(workdir: Path) -> None:
  shutil.rmtree(workdir / "checkpoints" / str(STEPS) / "state")


def test_a_damaged_newest_checkpoint_stops_the_run_until_it_is_deleted(straight, copy, tiny_config):
  damage_newest(copy)
  with pytest.raises(ValueError, match="checkpoints/12 is damaged .*to resume from step 8; --"):
    train.train(tiny_config, copy)
  assert lines(copy) == lines(straight)  # nothing is lost
  shutil.rmtree(copy / "checkpoints" / str(STEPS))
  assert train.train(tiny_config, copy).step == STEPS
  assert_same_run(copy, straight)


def test_a_workdir_in_use_is_refused_and_a_dead_process_holds_nothing(tiny_config, tmp_path):
  holder = (
    "import pathlib, sys, time\n"
    f"sys.path.insert(0, {str(ROOT)!r})\n"
    "from electra_jax.runtime.workdir import claim\n"
    f"with claim(pathlib.Path({str(tmp_path)!r})):\n"
    "  print('held', flush=True)\n"
    "  time.sleep(60)\n"
  )
  process = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE)
  process.stdout.readline()
  with pytest.raises(ValueError, match=rf"is in use by process {process.pid} on "):
    train.train(tiny_config, tmp_path)
  process.kill()
  process.wait()
  with train.claim(tmp_path):
    pass


def test_a_refused_run_leaves_no_folder(tiny_config, tmp_path):
  tiny_config.data.dir = str(tmp_path / "no shards")
  (tmp_path / "old").mkdir()
  for name in ("new", "old"):
    with pytest.raises(ValueError, match="is missing"):
      train.train(tiny_config, tmp_path / name)
  assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_shards_that_changed_since_are_another_run(copy, tiny_config, tmp_path):
  data = shutil.copytree(tiny_config.data.dir, tmp_path / "data")
  tiny_config.data.dir = str(data)  # moved, and the same: goes on
  assert train.train(tiny_config, copy).step == STEPS
  manifest = data / "manifest.json"
  manifest.write_text(manifest.read_text().replace('"documents": ', '"documents":  '))
  with pytest.raises(ValueError, match=r"another run: data.manifest was '"):
    train.train(tiny_config, copy)


def test_a_run_describes_itself_in_lines_of_the_terminal(tiny_config, tmp_path):
  tiny_config.optimizer.b2 = 0.987
  run = prepare(tiny_config, tmp_path / "run", verify=False)
  console = Console(**terminal.PLAIN, width=80, file=(out := io.StringIO()))
  summary.describe(run, console, ["train.steps"])
  printed, places = out.getvalue(), (str(tmp_path), tiny_config.data.dir)
  printed_lines = [x for x in printed.splitlines() if not any(place in x for place in places)]
  assert max(map(len, printed_lines)) <= 80 and "changed in this run:" in printed
  words = printed.partition("changed from base:")[2].split()
  changed = compare.changed_from_base(tiny_config)
  assert f"{len(changed)} fields" in printed and "b2=0.987" in words
  for name, (_, value) in changed.items():
    assert f"{name.rpartition('.')[2]}={value!r}" in words


def command(config, workdir, *args) -> list[str]:
  """Returns the command line that trains `config`."""
  changed = compare.changed_from_base(config)
  fields = [f"--config.{name}={value}" for name, (_, value) in changed.items()]
  head = [sys.executable, "-m", "electra_jax.train", "--config=configs/base.py"]
  return [*head, f"--workdir={workdir}", *fields, *args]


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_devices(straight, begun, tiny_config):
  """The same examples, masks, samples and dropout: only the order of sums differs."""
  env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
  arguments = command(tiny_config, begun)
  done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
  assert done.returncode == 0, done.stderr
  assert "2 x cpu" in done.stdout and "resuming from step 8" in done.stdout
  assert_close(straight, begun)


def assert_close(one: Path, two: Path) -> None:
  """Checks that two runs say the same but for sums of float32 in another order."""
  for ours, theirs in zip(lines(one), lines(two), strict=True):
    assert ours.keys() == theirs.keys()
    for name in ours:
      if isinstance(ours[name], float):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, err_msg=name)
      else:
        assert ours[name] == theirs[name]


def test_a_line_names_every_promised_number(straight):
  history = metrics.read_history(straight / "metrics.jsonl")
  train_line = next(x for x in history if x["split"] == "train")
  promised = (
    "mlm_loss rtd_loss rtd_accuracy rtd_auc rtd_recall rtd_precision mlm_accuracy"
    " sampled_accuracy sample_entropy replaced learning_rate grad_norm sequences_per_sec"
    " tokens_per_sec mfu eta_secs"
  ).split()
  assert [name for name in promised if name not in train_line] == []


def test_a_run_records_its_start_and_its_seconds_in_the_journal(straight):
  events = journal.read(straight)
  assert {"devices": 8, "device_kind": "cpu"}.items() <= events[0].items()
  assert events[0]["event"] == "start" and "python" in events[0]["command"]
  assert [(e["event"], e.get("step")) for e in events[1:]] == [
    ("first step", None), *(("goodput", step) for step in (4, 6, 8, 12, 12))
  ]  # fmt: skip
  secs = journal.seconds(events)
  assert secs == events[-1]["secs"] and {"steps", "compile", "evaluation", "save"} <= secs.keys()


def test_a_run_is_stopped_where_it_leaves_its_reference(tiny_config, tmp_path, capsys):
  level = bands.Level(mean=1.0, tolerance=0.1)  # of a loss that starts at 4.6 nats
  fields = compare.recipe(compare.flatten(tiny_config.to_dict()))
  reference = bands.Band(3, 3, fields, {"heldout": {0: {"mlm_loss": level}}})
  bands.write(tmp_path / "band.json", reference)
  tiny_config.health.reference = str(tmp_path / "band.json")
  tiny_config.health.on_warning = "stop"
  with pytest.raises(UnhealthyError, match="step 0: left the reference .*: mlm_loss .heldout. 4"):
    train.train(tiny_config, tmp_path / "run")
  assert "Differences from the reference" not in capsys.readouterr().out


def test_the_mfu_of_a_line_is_its_flops_over_the_peak_of_all_devices(straight, tiny_config):
  run = prepare(tiny_config, straight, False)
  history = metrics.read_history(straight / "metrics.jsonl")
  trained = [x for x in history if x["split"] == "train" and x["mfu"] is not None]
  assert len(trained) == 4
  for line in trained:
    steps_per_sec = line["sequences_per_sec"] / 8  # the batch size
    peak = run.peak[0] * jax.device_count()  # measured once in a process
    assert line["mfu"] == pytest.approx(steps_per_sec * run.flops_per_step / peak, rel=1e-12)
