"""Entries of a user's own: registered in a module, needed by a run, found in worker processes."""

import dataclasses
import importlib
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import long_except, make_tiny_config
from ml_collections import ConfigDict

import electra_jax
from electra_jax.commands import cli
from electra_jax.config import compare, load, registry, schema, validate
from electra_jax.core.attention import ATTENTION
from electra_jax.core.learning_rates import SCHEDULES
from electra_jax.core.objectives import OBJECTIVES, ObjectiveDef
from electra_jax.data import build, runners, shards, sources
from electra_jax.experiments import jobs
from electra_jax.pretrain import train

pytestmark = pytest.mark.usefixtures("tables")
GUIDE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "research.md"


@pytest.fixture
def module(tmp_path, monkeypatch):
  """The guide's first objective as a module of the current folder."""
  code = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)[1]
  (tmp_path / "my_objectives.py").write_text(code)
  monkeypatch.chdir(tmp_path)
  yield "my_objectives"
  sys.modules.pop("my_objectives", None)


def shuffled(shards_folder: str):
  config = make_tiny_config(shards_folder)
  config.objective.name, config.objective.temperature_schedule = "shuffled", ""
  config.optimizer.separate_optimizers, config.optimizer.generator_learning_rate = False, None
  config.train.steps, config.checkpoint.every_steps = 2, 1
  return config


def forget() -> None:
  """Leaves the tables as a new process has them."""
  del OBJECTIVES["shuffled"], schema.PRETRAINING["objective.shuffle_distance"]
  registry._origins.clear()
  sys.modules.pop("my_objectives", None)


def test_a_run_names_the_module_that_it_needs(module, tiny_shards, tmp_path):
  registry.import_module(module)
  assert train.train(shuffled(tiny_shards), tmp_path / "run").step == 2
  forget()
  wanted = f"^{tmp_path / 'run'} needs the objective 'shuffled': add --import=my_objectives$"
  for use in (
    lambda: train.train(shuffled(tiny_shards), tmp_path / "run"),
    lambda: electra_jax.load(tmp_path / "run"),
  ):
    with pytest.raises(ValueError, match=wanted):
      use()
  registry.import_module("my_objectives.py")  # a run resumes with its entry from another file
  longer = shuffled(tiny_shards)
  longer.train.steps, longer.allow_config_change = 3, "train.steps"
  assert train.train(longer, tmp_path / "run").step == 3
  encoder = electra_jax.load(tmp_path / "run")
  assert encoder.embed("abc").shape == (16,)
  encoder.save(tmp_path / "out", "orbax")
  forget()
  assert electra_jax.load(tmp_path / "out").embed(["abc"]).shape == (1, 16)
  with pytest.raises(ValueError, match="objective 'shuffled': add --import=MODULE"):
    from electra_jax.evaluate.likelihoods import Scorer

    Scorer(str(tmp_path / "out"))


def test_an_objectives_own_field_is_a_field_like_others(module, tiny_shards, tmp_path, capsys):
  registry.import_module(module)
  losses = []
  for distance in (1, 2):
    config = shuffled(tiny_shards)
    config.objective.shuffle_distance = distance
    losses.append(train.train(config, tmp_path / str(distance)).history()[-1]["shuffled_loss"])
  assert losses[0] != losses[1]
  with pytest.raises(ValueError, match="objective.shuffle_distance was 2, is 1; use another"):
    train.train(shuffled(tiny_shards), tmp_path / "2")
  config.objective.shuffle_distance = -1
  with pytest.raises(ValueError, match="objective.shuffle_distance must be at least 0, got -1"):
    train.train(config, tmp_path / "new")
  capsys.readouterr()
  cli.call("config", ["small.py", "--grep=shuffle", "--config.objective.shuffle_distance=3"])
  assert capsys.readouterr().out == (
    "* objective.shuffle_distance = 3 (default 1)  # chosen positions to shift by"
    " [defines the run]\n"
    f"{len(compare.changed_from_base(load('small.py'))) + 1} of"
    f" {len(schema.PRETRAINING)} fields differ from configs/base.py (*)\n"
  )
  with pytest.warns(UserWarning, match="objective electra does not read objective.shuffle_dist"):
    config.objective.name = "electra"
    validate.warn_of_unread(config.objective)


@pytest.mark.parametrize(
  "option", long_except(0, of=["--import=my_objectives", "--import=my_objectives.py", None])
)
def test_the_option_and_a_configuration_file_register(module, tmp_path, option):
  start = (tmp_path / "my_objectives.py").read_text() if option is None else ""
  (tmp_path / "mine.py").write_text(
    f"{start}\nfrom electra_jax.config import load\n\n\ndef get_config(arg=None):\n"
    "  c = load('quickstart.py')\n  c.objective.name = 'shuffled'\n"
    "  c.objective.temperature_schedule = ''\n  c.optimizer.separate_optimizers = False\n"
    "  c.optimizer.generator_learning_rate = None\n  return c\n"
  )
  command = [sys.executable, "-m", "electra_jax.flops", "--config=mine.py"]
  found = subprocess.run(
    [*command, *([option] if option else [])], capture_output=True, text=True, timeout=300
  )
  assert found.returncode == 0, found.stderr
  assert "FLOPs" in found.stdout


def test_the_guide_names_every_kind():
  text = GUIDE.read_text()
  assert [kind for kind in registry.KINDS if f"`{kind}`" not in text] == []


def test_only_new_names_of_known_kinds_and_types_are_registered():
  entry = ObjectiveDef(lambda spec, params, inputs: {})
  electra_jax.register(objective={"mine": entry}, schedule={"flat": lambda c, steps: None})
  electra_jax.register(objective={"mine": entry})  # a cell that is run again
  assert OBJECTIVES["mine"] is entry and "flat" in SCHEDULES
  for kinds, error, why in (
    ({"objective": {"bert": entry}}, ValueError, "'bert' is built in"),
    ({"objectiv": {"x": entry}}, ValueError, "did you mean 'objective'"),
    ({"objective": {"x": len}}, TypeError, "'x' must be ObjectiveDef, got builtin"),
    ({"field": {"model.x": schema.own_field(1, "x")}}, ValueError, "must be objective.NAME"),
    ({"field": {"objective.x": 1}}, TypeError, "'objective.x' must be Row, got int"),
    ({"schedule": {"x": 3}}, TypeError, "'x' must be a function, got int"),
    ({"objective": {"x": entry}, "schedule": {"x": 3}}, TypeError, "'x' must be a function"),
    ({"objective": {"x": entry}, "shedule": {}}, ValueError, "did you mean 'schedule'"),
  ):
    with pytest.raises(error, match=why):
      electra_jax.register(**kinds)
    assert "x" not in OBJECTIVES and "x" not in SCHEDULES


def test_an_attention_for_any_platform_may_lack_dropout():
  mine = dataclasses.replace(ATTENTION["cudnn"], platform=None)
  electra_jax.register(attention={"mine": mine})
  model = ConfigDict({"attention": "mine", "attention_dropout": 0.0})
  validate.check_attention(model)
  model.attention_dropout = 0.1
  with pytest.raises(ValueError, match="mine needs model.attention_dropout=0, got cpu and 0.1: "):
    validate.check_attention(model)


def test_the_programs_of_an_experiment_know_the_entries(module, tmp_path):
  registry.import_module(module)
  code = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)[2]
  Path("shuffled.py").write_text(code, "utf-8")
  assert code.startswith('"""shuffled.py')
  jobs.run(tmp_path, "flops/x", "electra_jax.flops", ["--config=shuffled.py"], lambda: True)
  (line,) = jobs.json_lines(tmp_path / "commands.jsonl")
  assert line["ended"] and line["arguments"] == ["--config=shuffled.py"]


READER = """
import electra_jax


def lines(stream, path, field):
  for line in stream:
    yield line.rstrip().removeprefix(b"> ") or None
  yield None


electra_jax.register(source={"quoted": lines})
"""


@pytest.mark.parametrize("file", [{}, {"__file__": "<stdin>"}])
def test_a_notebook_or_a_program_on_stdin_names_no_module(file):
  exec(READER, {"__name__": registry.NOTEBOOK, **file})
  assert registry.origin("source", "quoted") == registry.NOTEBOOK and not registry.origins()


def elsewhere(work, todo, options):
  """Runs parts in processes that know only what they are sent, as engines do."""
  code = "import pickle, sys; pickle.load(sys.stdin.buffer)(int(sys.argv[1]))"
  for part in todo:
    command = [sys.executable, "-c", code, str(part)]
    subprocess.run(command, input=pickle.dumps(work), check=True, timeout=300)


def test_a_source_of_ones_own_is_read_on_engines(tiny_shards, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setitem(runners.RUNNERS, "elsewhere", elsewhere)
  (tmp_path / "quotes.py").write_text(READER)
  registry.import_module("quotes.py")
  documents = (Path(tiny_shards).parent / "text.txt").read_text().split("\n\n")
  for i, half in enumerate((documents[:150], documents[150:])):
    text = "\n\n".join(half)
    (tmp_path / f"plain{i}.txt").write_text(text)
    (tmp_path / f"quoted{i}.txt").write_text(re.sub(r"(?m)^(?=.)", "> ", text))
  config = make_tiny_config(str(tmp_path / "shards"))
  config.data.sources = f"quoted:{tmp_path}/quoted*.txt"
  config.data.vocab_size, config.data.holdout_frac = 100, 0.1
  config.data.workers, config.data.parts = 2, 2
  build.build(config, runner="elsewhere")
  same = ConfigDict(config)
  same.data.dir, same.data.sources = str(tmp_path / "plain"), f"text:{tmp_path}/plain*.txt"
  build.build(same)
  mine, plain = (shards.read_manifest(folder) for folder in (config.data.dir, same.data.dir))
  assert mine["splits"] == plain["splits"] and mine["vocab"] == plain["vocab"]
  with pytest.raises(sources.SourceError, match=r"or python-docs, or quoted:GLOB$"):
    sources.parse("unknown:x")


def test_a_script_without_a_guard_builds_with_several_processes(tiny_shards, tmp_path):
  text = Path(tiny_shards).parent / "text.txt"
  (tmp_path / "script.py").write_text(
    f"print('started')\n{READER}\n"
    "config = electra_jax.load_config('base', {'data.dir': 'shards', 'data.workers': 2,\n"
    f"  'data.sources': 'quoted:{text}', 'data.seq_length': 16, 'data.vocab_size': 100,\n"
    "  'data.holdout_frac': 0.1})\n"
    "print(electra_jax.build(config)['splits']['train']['examples'], __file__)\n"
  )
  done = subprocess.run(
    [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr
  examples = shards.read_manifest(tiny_shards)["splits"]["train"]["examples"]
  assert done.stdout.count("started") == 1
  *_, last = done.stdout.splitlines()
  assert last.split()[0] == str(examples) and last.endswith("script.py")


@pytest.mark.parametrize("name", [n for n in electra_jax.__all__ if n != "__version__"])
def test_every_name_of_the_package_is_there_and_documented(name):
  assert getattr(electra_jax, name).__doc__
  with pytest.raises(AttributeError):
    importlib.import_module("electra_jax").nothing  # noqa: B018
