"""Training by the clock: it ends in its time, and from the decision on it depends on no clock."""

import dataclasses
import itertools
import shutil
import time
import types

import pytest
from conftest import make_tiny_config
from test_train import lines, saved

from electra_jax.config import specs
from electra_jax.monitor import goodput, journal
from electra_jax.pretrain import clock, train
from electra_jax.report import saved_run, verdict
from electra_jax.runtime import checkpoint


def by_the_clock(config, minutes: float, decay_frac: float = 0.25):
  """Returns the configuration, of one network, with a budget of time."""
  config.objective.name = "bert"
  config.optimizer.schedule, config.optimizer.decay_frac = "wsd", decay_frac
  config.train.minutes = minutes
  return config


@dataclasses.dataclass
class Simulation:
  """A run whose steps, evaluations and saves take what they are given, in seconds."""

  step: float
  evaluation: float
  save: float
  start: float
  now: float = 0.0
  steps: float = 0.0

  def monotonic(self) -> float:
    return self.now

  def secs(self) -> dict[str, float]:
    return {"steps": self.steps, "evaluation": self.evaluation}

  def summary(self) -> str:
    return "simulated"

  def run(self, config, slower: float = 1.0) -> clock.Clock:
    """Trains to the end; steps after the decision take `slower` times as long."""
    self.now = self.start + self.evaluation
    c = clock.Clock(config, self, 0.0)
    for done in itertools.count(1):
      if done > c.horizon.steps:
        return c
      secs = self.step * (1 if c.is_open else slower)
      self.now, self.steps = self.now + secs, self.steps + secs
      if done == 1:
        c.restart(done)
      deciding, last = c.is_due(done), done == c.horizon.steps
      if deciding or last or done % config.eval.every_steps == 0:
        self.now += self.evaluation
      if deciding or last or done % config.checkpoint.every_steps == 0:
        self.now += self.save
      if deciding:
        c.decide(done, self.evaluation, self.save)


@pytest.mark.parametrize(
  ("step", "evaluation", "save", "start"),
  [
    (0.012, 1.5, 0.8, 40),  # ELECTRA-Small on a GPU
    (1.3, 9.0, 0.5, 30),  # on two cores
    (0.3, 0.0, 0.1, 5),  # without held-out text
    (5.0, 30.0, 10.0, 100),
  ],
)
def test_a_simulated_run_ends_in_its_time_and_uses_it(
  tiny_config, monkeypatch, step, evaluation, save, start
):
  config = by_the_clock(tiny_config, minutes=8, decay_frac=0.2)
  config.train.steps, config.eval.every_steps, config.checkpoint.every_steps = 10**6, 500, 1000
  for slower in (1.0, 1.02):
    run = Simulation(step, evaluation, save, start)
    monkeypatch.setattr(clock, "time", run)
    c = run.run(config, slower)
    left = 480 - run.now
    decay_secs = c.horizon.decay_steps * step
    assert left >= clock.CLOSING_SECS - 1e-6
    if slower == 1.0:
      # Less than one more step, with the margin, and an evaluation or a save that it may bring.
      spare = clock.MARGIN * decay_secs + 1.02 * step + evaluation + save
      assert left <= clock.CLOSING_SECS + spare
    assert 0.7 * 96 < decay_secs < 1.1 * 96  # beside evaluations and saves


@pytest.mark.parametrize(("steps", "decay_steps"), [(1, 0), (2, 1), (5, 1), (8, 2), (1000, 200)])
def test_the_first_of_both_limits_ends_a_run(tiny_config, monkeypatch, steps, decay_steps):
  config = by_the_clock(tiny_config, minutes=8, decay_frac=0.2)
  config.train.steps, config.eval.every_steps = steps, 500
  run = Simulation(0.1, 1.0, 0.5, 20)
  monkeypatch.setattr(clock, "time", run)
  assert run.run(config).horizon == (steps, decay_steps)
  assert run.now < 300


def test_steps_that_get_slower_near_the_limit_of_steps_shorten_the_decay(tiny_config, monkeypatch):
  """The steps say when the decay begins, the time where it ends."""
  config = by_the_clock(tiny_config, minutes=2, decay_frac=0.5)
  config.train.steps, config.eval.every_steps = 1000, 500
  run = Simulation(0.1, 1.0, 0.5, 20)
  monkeypatch.setattr(clock, "time", run)
  horizon = run.run(config).horizon
  assert horizon.steps < 1000 and horizon.steps - horizon.decay_steps <= 500


@pytest.fixture
def fast_clock(monkeypatch):
  """A clock on which every look takes a second, for runs of a few steps."""
  ticks = itertools.count()
  fast = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))
  for module in (clock, goodput, train):
    monkeypatch.setattr(module, "time", fast)


def horizon_of(workdir) -> dict:
  """Returns the newest decision of a run's journal."""
  return [e for e in journal.read(workdir) if e["event"] == "horizon"][-1]


@pytest.mark.long
def test_a_run_by_the_clock_is_the_run_of_its_decided_steps_bit_for_bit(
  tiny_shards, tmp_path, fast_clock, capsys
):
  def sparse():
    c = make_tiny_config(tiny_shards)
    c.eval.every_steps, c.checkpoint.every_steps, c.log.every_steps = 20, 5, 10
    return c

  def config():
    c = by_the_clock(sparse(), minutes=6)
    c.train.steps = 200
    return c

  timed, resumed = tmp_path / "timed", tmp_path / "resumed"
  steps = train.train(config(), timed).step
  found = horizon_of(timed)
  assert found["steps"] == steps and 0 < found["decay_steps"] < steps < 200
  assert (
    f"step {found['step']}: the learning rate decays until step {steps}" in capsys.readouterr().out
  )

  plain = sparse()
  plain.objective.name, plain.train.steps = "bert", steps
  plain.optimizer.schedule, plain.optimizer.decay_steps = "wsd", found["decay_steps"]
  assert train.train(plain, tmp_path / "plain").step == steps
  assert saved(timed, steps) == saved(tmp_path / "plain", steps)
  here = [x for x in lines(timed) if x["step"] != found["step"] or x["split"] == "train"]
  assert here == [x for x in lines(tmp_path / "plain") if x in here]

  # It is over, and stays so whatever time is left.
  assert train.train(config(), timed).step == steps
  run = saved_run.read(timed, "timed")
  assert run.finished and verdict.judge(run).sentences[0] == f"It finished its {steps} steps."

  # From a checkpoint of the decay it goes on to the same step.
  shutil.copytree(timed, resumed)
  shutil.rmtree(resumed / "checkpoints" / str(steps))
  assert checkpoint.steps_on_disk(resumed / "checkpoints")[-1] > found["step"]
  assert train.train(config(), resumed).step == steps
  assert saved(resumed, steps) == saved(timed, steps)
  assert lines(resumed) == lines(timed)

  longer = config()
  longer.train.minutes, longer.allow_config_change = 99, "train.minutes"
  capsys.readouterr()
  assert train.train(longer, timed).step == steps
  assert f"train.minutes has no effect: the run ends at step {steps}" in capsys.readouterr().out


def test_the_seconds_of_earlier_starts_count(tiny_config, tmp_path):
  config = by_the_clock(tiny_config, minutes=1)
  now = time.monotonic()
  c = clock.Clock(config, goodput.Goodput(), now, {"secs": 50.0, "horizon": None})
  assert c.is_open and 9 < c.secs_left() <= 10
  c = clock.Clock(config, goodput.Goodput(), now, {"secs": 59.0, "horizon": [40, 10]})
  assert not c.is_open and c.horizon == (40, 10) and not c.is_due(30)
  assert c.state_dict()["horizon"] == [40, 10]


def test_a_budget_that_the_start_uses_up_is_refused_with_the_number(tiny_config, tmp_path):
  config = by_the_clock(tiny_config, minutes=0.001)
  with pytest.raises(ValueError, match=r"^raise config.train.minutes=0.001: at step 6, .* of 0 s"):
    train.train(config, tmp_path)
  assert checkpoint.steps_on_disk(tmp_path / "checkpoints") == [4]  # what is done stays


def test_a_budget_that_cannot_be_kept_is_refused_before_a_folder_is_made(tiny_config, tmp_path):
  tiny_config.train.minutes = 1.0
  with pytest.raises(ValueError, match="train.minutes=1 needs optimizer.schedule=wsd"):
    train.train(tiny_config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_a_share_of_the_steps_is_as_many_steps(tiny_config):
  tiny_config.optimizer.schedule, tiny_config.optimizer.decay_frac = "wsd", 0.25
  assert specs.make_optimizer_config(tiny_config).decay_steps == 3
