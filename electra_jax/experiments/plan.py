"""Plans the next runs of an experiment from the rows so far."""

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from electra_jax.experiments.definition import HIGHER, TRAINING, Budget, Experiment, number
from electra_jax.monitor import quantities

Row = Mapping[str, Any]


class WaitingError(Exception):
  """A rate or the arms at a budget depend on rows that do not exist yet."""


class Place(NamedTuple):
  """A run of an experiment."""

  arm: str
  budget: float  # `Budget.spend`; 0 for random weights
  seed: int
  rate: float | None = None  # None: the configuration's

  @property
  def name(self) -> str:
    """The name of the run's folder."""
    rate = "" if self.rate is None else f"-{self.rate:g}"
    arm = self.arm.replace(" ", "-").replace("/", "-")
    return f"{arm}-{self.budget:g}{rate}-{self.seed}"

  @property
  def key(self) -> dict[str, Any]:
    """The key of the run's row."""
    key = {"arm": self.arm, "budget": self.budget, "seed": self.seed}
    return key if self.rate is None else key | {"rate": self.rate}


def search_key(experiment: Experiment, arm: str, budget: Budget, rate: float) -> dict[str, Any]:
  """Returns the key of the row that scores a learning rate."""
  if experiment.is_measure(experiment.choose):
    return Place(arm, budget.spend, 0, rate).key
  return {"search": arm, "budget": budget.spend, "rate": rate}


class Plan:
  """Rates and arms of each budget. Methods raise WaitingError if rows are missing.

  Args:
    only: the arms to run.
  """

  def __init__(self, experiment: Experiment, rows: Iterable[Row], only: Sequence[str]):
    self.experiment, self.only = experiment, only
    self._rows = list(rows)

  def find(self, key: Row) -> Row:
    """Returns the row with the values of `key`."""
    for row in self._rows:
      if key.items() <= row.items():
        return row
    raise WaitingError(f"no row yet: {dict(key)}")

  def tuned_with(self, arm: str) -> str:
    """Returns the arm whose search determines an arm's rate."""
    return self.experiment.arms[arm].rate_of or arm

  def rates(self, arm: str, at: int) -> tuple[float, ...]:
    """Returns the rates of an arm to search at a budget; (): the configuration's."""
    arm, budget = self.tuned_with(arm), self.experiment.budgets[at]
    own = self.experiment.arms[arm].rates
    if not own or not budget.factors:
      return own
    before = self.rate(arm, at - 1)
    return tuple(before * factor for factor in budget.factors)

  def rate(self, arm: str, at: int) -> float | None:
    """Returns the best rate of an arm at a budget; None: the configuration's."""
    arm, budget = self.tuned_with(arm), self.experiment.budgets[at]
    rates = self.rates(arm, at)
    if len(rates) < 2:
      return rates[0] if rates else None
    keys = {rate: search_key(self.experiment, arm, budget, rate) for rate in rates}
    return max(rates, key=lambda rate: self.score(self.find(keys[rate])))

  def score(self, row: Row) -> float:
    """Returns the value of `Experiment.choose`, negated if lower is better."""
    name = self.experiment.choose
    higher = quantities.of(name.removeprefix(TRAINING)).kind in HIGHER
    sign = 1 if higher or self.experiment.is_measure(name) else -1
    value = row.get(name)
    value = math.nan if value is None else number(value)
    return -math.inf if math.isnan(value) else sign * value

  def contestants(self, at: int) -> list[str]:
    """Returns the arms to train with a budget."""
    e, best = self.experiment, self.experiment.budgets[at].best
    if best is None:
      return [arm for arm in self.only if not e.arms[arm].untrained]
    before = self.contestants(at - 1)
    others = [arm for arm in before if arm != e.control]
    rank = e.rank or (lambda rows: statistics.fmean(map(self.score, rows)))
    found = {arm: [self.find(place.key) for place in self.of_arm(arm, at - 1)] for arm in others}

    def ranked(arm: str) -> float:
      return -math.inf if any(row.get("diverged") for row in found[arm]) else rank(found[arm])

    others.sort(key=ranked, reverse=True)
    return [arm for arm in before if arm == e.control] + others[:best]

  def of_arm(self, arm: str, at: int) -> list[Place]:
    """Returns the runs of an arm at a budget, at its best rate."""
    budget = self.experiment.budgets[at]
    rate, count = self.rate(arm, at), self.experiment.seeds_of(arm, budget)
    return [Place(arm, budget.spend, seed, rate) for seed in range(count)]

  def searches(self, at: int) -> Iterator[tuple[str, float]]:
    """Yields the (arm, rate) to search at a budget."""
    tuned: dict[str, None] = {}
    shapes = [self.experiment.arms[name].untrained for name in self.only if at == 0]
    for name in [*self.contestants(at), *filter(None, shapes)]:
      arm = self.experiment.arms[name]
      tuned[self.tuned_with(name)] = None
      if arm.after and not arm.same_rate:
        tuned[self.tuned_with(arm.after)] = None
    for arm in tuned:
      rates = self.rates(arm, at)
      yield from ((arm, rate) for rate in (rates if len(rates) > 1 else ()))

  def places(self, at: int) -> list[Place]:
    """Returns the runs at a budget, seed by seed; the first budget includes random weights."""
    e = self.experiment
    found = [place for arm in self.contestants(at) for place in self.of_arm(arm, at)]
    if at == 0:
      fresh = (arm for arm in self.only if e.arms[arm].untrained)
      found += [Place(arm, 0.0, s) for arm in fresh for s in range(e.seeds_of(arm, e.budgets[0]))]
    return sorted(found, key=lambda place: place.seed)


def reported(experiment: Experiment, rows: Sequence[Row]) -> list[Row]:
  """Returns the rows of random weights and of arms at their best rates, in order.

  Arms without a row of the first seed are left out.
  """
  plan = Plan(experiment, rows, list(experiment.arms))

  @functools.cache
  def rates(arm: str, at: int) -> tuple[float | None, ...]:
    try:
      first = plan.of_arm(arm, at)[0]
      plan.find(first.key)
    except WaitingError:  # the search is not finished, or the first seed has no row
      return ()
    return (first.rate,)

  spends = [x.spend for x in experiment.budgets]

  def counts(row: Row) -> bool:
    arm = experiment.arms.get(row.get("arm"))
    if arm is None or arm.untrained:
      return arm is not None
    known = rates(row["arm"], spends.index(row["budget"])) if row["budget"] in spends else ()
    return any(rate in (None, row.get("rate")) for rate in known)

  return [row for row in rows if counts(row)]
