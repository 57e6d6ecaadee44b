"""What an experiment compares, and on what it is judged.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from electra_jax.config import files
from electra_jax.config.fields import load_config
from electra_jax.cost import tables
from electra_jax.monitor import quantities

UNITS = ("flops", "steps", "minutes")
HIGHER = ("accuracy", "auc", "recall", "precision")  # kinds of metrics; of others, lower is better


@dataclasses.dataclass(frozen=True)
class Arm:
  """A contestant: a configuration with some fields changed."""

  config: str  # as of `load_config`: "quickstart", "bert:small", a file
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # learning rates to search with the first seed; () is the configuration's. A generator with a rate
  # of its own keeps the ratio
  rates: tuple[float, ...] = ()
  rate_of: str | None = None  # another arm, whose rate it takes
  after: str | None = None  # another arm, which is trained with `share` of the budget first
  share: float = 0.5


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Arms, what each may spend, and the measures.

  Raises:
    ValueError: an arm or a unit is unknown, or a number out of range.
  """

  arms: Mapping[str, Arm]
  budgets: tuple[float, ...]  # of a run, generator and heads included
  unit: str = "flops"  # one of UNITS; FLOPs are those of matrix products
  seeds: int = 3
  control: str | None = None  # the arm that the others are compared with, seed by seed
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of every arm
  choose: str = "mlm_loss"  # the held-out metric that rates are chosen by
  heldout: tuple[str, ...] = ("mlm_loss",)  # metrics of the last evaluation
  pairs: str | None = None  # minimal pairs, as of `electra-jax evaluate pairs`
  detect: str | None = None  # shards, as of `electra-jax evaluate detect`
  probe: tuple[str, str] | None = None  # training and test file of `electra-jax evaluate probe`
  # {name: (configuration of fine-tuning, its fields)}
  tasks: Mapping[str, tuple[str, Mapping[str, Any]]] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.unit not in UNITS:
      raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {self.unit!r}")
    if not self.arms or not self.budgets or min(self.budgets) <= 0 or self.seeds < 1:
      raise ValueError("an experiment needs an arm, budgets above 0 and a seed")
    for name, arm in self.arms.items():
      for other in (arm.rate_of, arm.after):
        if other is not None and (other not in self.arms or other == name):
          others = ", ".join(x for x in self.arms if x != name)
          raise ValueError(f"arm {name!r} refers to {other!r}; the other arms: {others or 'none'}")
      if arm.after and self.arms[arm.after].after:
        raise ValueError(f"arm {name!r} starts from {arm.after!r}, which starts from another")
      if not 0 < arm.share < 1:
        raise ValueError(f"arm {name!r}: share must be between 0 and 1, got {arm.share}")
      if arm.rates and self.unit == "minutes":
        raise ValueError(f"arm {name!r}: rates are searched at equal flops or steps")
    if self.control is not None and self.control not in self.arms:
      raise ValueError(f"unknown control {self.control!r}; arms: {', '.join(self.arms)}")

  def configuration(self, name: str) -> ConfigDict:
    """Returns the configuration of an arm, with the fields of the experiment and its own."""
    arm = self.arms[name]
    return load_config(arm.config, {**self.fields, **arm.fields})


def is_better(metric: str, value: float, other: float) -> bool:
  """Returns whether a value of a metric is better than another.

  >>> is_better("mlm_loss", 3.0, 4.0), is_better("rtd_auc", 0.6, 0.7)
  (True, False)
  """
  return value > other if quantities.of(metric).kind in HIGHER else value < other


def load(name: str) -> Experiment:
  """Returns the experiment of a definition file FILE or FILE:ARG.

  Raises:
    ValueError, OSError: it cannot be read, or what it defines is invalid; one line.
  """
  file, colon, arg = name.partition(":")
  if not Path(file).is_file():
    raise ValueError(f"{file}: no such file")
  spec = importlib.util.spec_from_file_location("electra_jax_experiment", file)
  if spec is None:
    raise ValueError(f"{file} is not a definition of an experiment: its name must end in .py")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    found = module.get_experiment(arg) if colon else module.get_experiment()
  except (SyntaxError, *files.MISTAKES) as error:
    text = files.one_line(error)
    raise ValueError(f"{file} defines no experiment: {type(error).__name__}: {text}") from error
  if not isinstance(found, Experiment):
    raise ValueError(f"{file}: get_experiment must return an Experiment, got {found!r:.80}")
  for arm in found.arms:
    found.configuration(arm)
  return found


def of_configurations(
  names: list[str], match: str, fields: Mapping[str, Any], seeds: int, **measures
) -> Experiment:
  """Returns the comparison of configurations; the first is the control and sets the budget.

  Args:
    match: one of UNITS: what all spend as much of as the first one's whole run.
    fields: of every arm.
  """
  arms = {Path(name).stem if "/" in name else name: Arm(name) for name in names}
  if len(arms) < len(names):
    raise ValueError(f"two arms have the same name: {', '.join(names)}")
  first = load_config(names[0], fields)
  return Experiment(
    arms, (whole_run(first, match),), match, seeds, next(iter(arms)), fields, **measures
  )


def whole_run(config: ConfigDict, unit: str) -> float:
  """Returns what a configuration's whole run spends."""
  if unit == "minutes":
    if config.train.minutes is None:
      raise ValueError("the first configuration has no train.minutes")
    return config.train.minutes
  return config.train.steps * (sum(tables.step_costs(config)[1].values()) if unit == "flops" else 1)
