"""The definition of an experiment: its arms, budgets and measures.

A definition file is Python with `get_experiment(arg)`:

  from electra_jax.experiments.definition import Arm, Experiment

  def get_experiment(arg=None):
    return Experiment(
      arms={"electra": Arm("quickstart"), "bert": Arm("bert:quickstart")},
      control="bert", budgets=(2e13,), seeds=3, heldout=("mlm_loss", "rtd_auc"),
      fields={"data.dir": "shards"}, pairs="blimp.jsonl",
    )
"""

import dataclasses
import importlib.util
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from electra_jax.config import files
from electra_jax.config.fields import load_config
from electra_jax.cost import tables

UNITS = ("flops", "steps", "minutes")
HIGHER = ("accuracy", "auc", "recall", "precision")  # kinds of metrics where higher is better
TRAINING = "train/"  # prefix of a metric: its mean over training lines in the last tenth


@dataclasses.dataclass(frozen=True)
class Arm:
  """An arm of the experiment: a configuration with some fields changed."""

  config: str = ""  # as in `load_config`: "quickstart", "bert:small", a file
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # learning rates to search with the first seed; (): the configuration's. The ratio to
  # generator_learning_rate is kept
  rates: tuple[float, ...] = ()
  rate_of: str | None = None  # the arm whose learning rate to take
  after: str | None = None  # the arm to train first, with `share` of the budget
  share: float = 0.5
  start_fields: tuple[str, ...] = ("init_from",)  # fields to set to the run of `after`
  same_rate: bool = False  # train `after` at this arm's learning rate
  times: float = 1.0  # multiple of the budget to spend
  seeds: int | None = None  # None: the experiment's
  untrained: str | None = None  # use random weights in this arm's shape, measured by `tasks` only


@dataclasses.dataclass(frozen=True)
class Budget:
  """The budget of a run, and the arms to train with it."""

  spend: float  # including the generator and heads
  seeds: int | None = None  # None: the experiment's
  # keep the control and this many of the best other arms of the previous budget; None: all arms
  best: int | None = None
  # rates to search, as multiples of each arm's best rate at the previous budget; (): `Arm.rates`
  factors: tuple[float, ...] = ()
  without: tuple[str, ...] = ()  # tasks to skip


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Minimal pairs; each scorer is a measure."""

  file: str
  count: int | None = None  # number of pairs, evenly spaced; None: all
  # configuration -> names of its scorers; None: the objective's default
  scorers: Callable[[ConfigDict], Sequence[str]] | None = None
  # reserve every Nth paradigm for choices: NAME_choices is measured on these, NAME on the others
  every: int | None = None


@dataclasses.dataclass(frozen=True)
class Task:
  """A fine-tuning task."""

  config: str
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  splits: Mapping[str, str] = dataclasses.field(default_factory=dict)  # {measure: split}
  seeds: int = 1  # fine-tuning seeds for each pretrained network
  first_seed: bool = False  # fine-tune only networks of the first pretraining seed


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Arms, budgets and measures.

  Raises:
    ValueError: an arm or a unit is unknown, or a number out of range.
  """

  arms: Mapping[str, Arm]
  budgets: tuple[float | Budget, ...]  # of a run; a number stands for Budget(number)
  unit: str = "flops"  # one of UNITS; FLOPs are of matmuls
  seeds: int = 3
  control: str | None = None  # the arm to compare the others with, seed by seed
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of every arm
  # criterion for learning rates: a metric of the run's last evaluation, TRAINING with a metric, or
  # a measure, which runs all measures at each rate
  choose: str = "mlm_loss"
  # an arm's rows -> the key that `Budget.best` sorts by, highest first; None: `choose`
  rank: Callable[[Sequence[Mapping[str, Any]]], float] | None = None
  heldout: tuple[str, ...] = ("mlm_loss",)  # metrics of the last evaluation
  pairs: str | Pairs | None = None  # minimal pairs, as for `electra-jax evaluate pairs`
  # gaps, and their number, for `electra-jax evaluate cloze`; each of `Pairs.scorers` is a measure
  cloze: tuple[str, int] | None = None
  detect: str | None = None  # shards, as for `electra-jax evaluate detect`
  # training and test file of `electra-jax evaluate probe --best-layer`, or {measure: both files}
  probe: tuple[str, str] | Mapping[str, tuple[str, str]] | None = None
  probe_words: int | None = None  # number of training words; None: the command's
  # {name: (fine-tuning configuration, its fields) or a `Task`}
  tasks: Mapping[str, Task | tuple[str, Mapping[str, Any]]] = dataclasses.field(
    default_factory=dict
  )

  def __post_init__(self):
    budgets = tuple(x if isinstance(x, Budget) else Budget(x) for x in self.budgets)
    tasks = {k: x if isinstance(x, Task) else Task(*x) for k, x in self.tasks.items()}
    tasks = {
      name: task if task.splits else dataclasses.replace(task, splits={name: "dev"})
      for name, task in tasks.items()
    }
    object.__setattr__(self, "budgets", budgets)
    object.__setattr__(self, "tasks", tasks)
    if not isinstance(self.probe, Mapping):
      object.__setattr__(self, "probe", {"probe": self.probe} if self.probe else {})
    if isinstance(self.pairs, str):
      object.__setattr__(self, "pairs", Pairs(self.pairs))
    if self.unit not in UNITS:
      raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {self.unit!r}")
    counts = [self.seeds, *(x.seeds for x in budgets if x.seeds is not None)]
    counts += [arm.seeds for arm in self.arms.values() if arm.seeds is not None]
    if not self.arms or not budgets or min(x.spend for x in budgets) <= 0 or min(counts) < 1:
      raise ValueError("an experiment needs an arm, budgets above 0 and a seed")
    if len({x.spend for x in budgets}) < len(budgets):
      raise ValueError("budgets must be different")
    if budgets[0].best is not None or budgets[0].factors:
      raise ValueError("the first budget cannot set best or factors: it has no previous one")
    for before, budget in zip(budgets, budgets[1:], strict=False):
      if before.best is not None and budget.best is None:
        raise ValueError("a budget after one with best must also set best")
    searched = {name for x in budgets if len(x.factors) != 1 for name in x.without}
    for name, task in tasks.items():
      if self.choose in task.splits and (task.first_seed or name in searched):
        raise ValueError(f"choose={self.choose!r} must be measured on all networks")
    for name, arm in self.arms.items():
      self._check_arm(name, arm)
    if self.control is not None and self.control not in self.arms:
      raise ValueError(f"unknown control {self.control!r}; arms: {', '.join(self.arms)}")

  def _check_arm(self, name: str, arm: Arm) -> None:
    for other in (arm.rate_of, arm.after, arm.untrained):
      if other is not None and (other not in self.arms or other == name):
        others = ", ".join(x for x in self.arms if x != name)
        raise ValueError(f"arm {name!r} refers to {other!r}; the other arms: {others or 'none'}")
    if arm.after and self.arms[arm.after].after:
      raise ValueError(f"arm {name!r} starts after {arm.after!r}, which must not have an `after`")
    if arm.untrained and self.arms[arm.untrained].untrained:
      raise ValueError(f"arm {name!r} has the shape of {arm.untrained!r}, which must be trained")
    if not 0 < arm.share < 1:
      raise ValueError(f"arm {name!r}: share must be between 0 and 1, got {arm.share}")
    if arm.rate_of and (arm.rates or self.arms[arm.rate_of].rate_of):
      raise ValueError(f"arm {name!r}: rate_of needs rates=() and an arm without rate_of")
    if any(other and self.arms[other].untrained for other in (arm.rate_of, arm.after)):
      raise ValueError(f"arm {name!r}: rate_of and after must name trained arms")
    if arm.rates and self.unit == "minutes":
      raise ValueError(f"arm {name!r}: a search of rates needs unit flops or steps, got minutes")

  @property
  def measures(self) -> tuple[str, ...]:
    """The measures but those of pairs and gaps, which depend on the arm."""
    tasks = (x for task in self.tasks.values() for x in task.splits)
    return ("detect", *self.probe, *tasks)

  def is_measure(self, name: str) -> bool:
    """Returns whether a quantity is measured on a network instead of read from its run."""
    return name in self.measures or name.split("_")[0] in ("pairs", "cloze")

  def needed(self, only: Sequence[str]) -> list[str]:
    """Returns some arms, each after the arms that it takes a rate, a start or a shape from."""
    found: dict[str, None] = {}
    for name in only:
      arm = self.arms[name]
      others = [x for x in (arm.rate_of, arm.after, arm.untrained) if x and x not in found]
      found |= dict.fromkeys([*self.needed(others), name])
    return list(found)

  def seeds_of(self, arm: str, budget: Budget) -> int:
    """Returns the number of seeds of an arm at a budget."""
    return budget.seeds or self.arms[arm].seeds or self.seeds

  def configuration(self, name: str) -> ConfigDict:
    """Returns the configuration of an arm, with the experiment's and the arm's fields.

    Fields that will name the run of `Arm.after` are "RUN".
    """
    arm = self.arms[self.arms[name].untrained or name]
    start = dict.fromkeys(arm.start_fields if arm.after else (), "RUN")
    return load_config(arm.config, {**self.fields, **arm.fields, **start})


def number(value: float | Sequence[float]) -> float:
  """Returns a value of a row, averaged over fine-tuning seeds."""
  return statistics.fmean(value) if isinstance(value, Sequence) else value


def load(name: str) -> Experiment:
  """Returns the experiment of a definition file FILE or FILE:ARG.

  Raises:
    ValueError, OSError: the file cannot be read or its definition is invalid.
  """
  file, colon, arg = name.partition(":")
  if not Path(file).is_file():
    raise ValueError(f"{file}: no such file")
  spec = importlib.util.spec_from_file_location("electra_jax_experiment", file)
  if spec is None:
    raise ValueError(f"{file} is not an experiment definition: its name must end in .py")
  module = importlib.util.module_from_spec(spec)
  sys.path.insert(0, str(Path(file).resolve().parent))  # it may import modules beside it
  try:
    spec.loader.exec_module(module)
    found = module.get_experiment(arg) if colon else module.get_experiment()
  except (SyntaxError, *files.MISTAKES) as error:
    text = files.one_line(error)
    raise ValueError(f"{file} is not an experiment: {type(error).__name__}: {text}") from error
  if not isinstance(found, Experiment):
    raise ValueError(f"{file}: get_experiment must return an Experiment, got {found!r:.80}")
  for arm in found.arms:
    found.configuration(arm)
  return found


def of_configurations(
  names: list[str], match: str, fields: Mapping[str, Any], seeds: int, **measures
) -> Experiment:
  """Returns a comparison of configurations; the first is the control and sets the budget.

  Args:
    match: one of UNITS, in which each run spends what the control's whole run does.
    fields: set in every arm.
  """
  arms = {Path(x).stem if "/" in x or x.endswith(".py") else x: Arm(x) for x in names}
  if len(arms) < len(names):
    raise ValueError(f"arms must have different names, got {', '.join(names)}")
  first = load_config(names[0], fields)
  budget, control = whole_run(first, match), next(iter(arms))
  heldout = ("mlm_loss", "unigram_auc")  # mlm_loss also depends on the generator's size
  return Experiment(arms, (budget,), match, seeds, control, fields, heldout=heldout, **measures)


def whole_run(config: ConfigDict, unit: str) -> float:
  """Returns the cost of a configuration's whole run."""
  if unit == "minutes":
    if config.train.minutes is None:
      raise ValueError("set train.minutes in the first configuration")
    return config.train.minutes
  return config.train.steps * (sum(tables.step_costs(config)[1].values()) if unit == "flops" else 1)
