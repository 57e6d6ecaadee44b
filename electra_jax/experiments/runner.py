"""Trains and measures the arms of an experiment, each with each budget and seed.

What is made is in one folder: runs, logs, rows.jsonl with a row for each result. Started again it
goes on where it was; several machines may add rows to one folder.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from electra_jax.cost import tables
from electra_jax.experiments import jobs
from electra_jax.experiments.definition import Experiment, is_better

ROWS = "rows.jsonl"


class Place(NamedTuple):
  """A run of an experiment."""

  arm: str
  budget: float
  seed: int
  rate: float | None = None  # None: the configuration's

  @property
  def name(self) -> str:
    """The name of its folder."""
    rate = "" if self.rate is None else f"-{self.rate:g}"
    return f"{self.arm.replace(' ', '-').replace('/', '-')}-{self.budget:g}{rate}-{self.seed}"


def places(experiment: Experiment, only: list[str]) -> list[Place]:
  """Returns the runs whose results are reported: budget by budget, seed by seed."""
  return [
    Place(arm, budget, seed)
    for budget in experiment.budgets
    for seed in range(experiment.seeds)
    for arm in only
  ]


class Runner:
  """Runs an experiment in a folder."""

  def __init__(self, experiment: Experiment, out: Path, console: Console):
    self.experiment, self.out, self.console = experiment, out, console
    self.rows = jobs.Rows(out / ROWS)

  def run(self, only: list[str], at_once: int, part: tuple[int, int] = (0, 1)) -> list[dict]:
    """Does what is left of the part i of n of the runs of some arms; returns all rows there are.

    Raises:
      SystemExit: a program failed; the message ends with its last output.
    """
    index, parts = part
    self._build(only)
    with jobs.workers(at_once) as pool:
      searches = list(self._searches(only))[index::parts]
      jobs.finish([pool.submit(self._search, *search) for search in searches])
      mine = places(self.experiment, only)[index::parts]
      ready = [place for place in mine if self._is_searched(place)]
      jobs.finish([pool.submit(self._measured, place) for place in ready])
    if waiting := len(mine) - len(ready):
      self.console.print(f"{waiting} runs wait for rates that other parts search: start again")
    return self.rows.read()

  def _build(self, only: list[str]) -> None:
    """Builds the shards of the arms that are not there."""
    for arm in only:
      config = self.experiment.configuration(arm)
      folder = Path(config.data.dir or "")
      if config.data.dir and not (folder / "manifest.json").is_file():
        fields = {**self.experiment.fields, **self.experiment.arms[arm].fields}
        jobs.build(self.out, folder, self.experiment.arms[arm].config, fields)

  def _searched(self, arm: str) -> list[str]:
    """Returns the arms whose searches give the rates of an arm and of what it starts from."""
    mine = self.experiment.arms[arm]
    return [mine.rate_of or arm, *(self._searched(mine.after) if mine.after else [])]

  def _searches(self, only: list[str]) -> Iterator[tuple[str, float, float]]:
    """Yields (arm, budget, rate) of the runs by which rates are chosen."""
    for budget in self.experiment.budgets:
      for arm in dict.fromkeys(x for name in only for x in self._searched(name)):
        yield from ((arm, budget, rate) for rate in self.experiment.arms[arm].rates)

  def _search(self, arm: str, budget: float, rate: float) -> dict:
    def measure() -> dict:
      folder, _ = self._trained(Place(arm, budget, 0, rate))
      last = jobs.heldout(folder)[-1]
      return {self.experiment.choose: last[self.experiment.choose]}

    return self.rows.once({"search": arm, "budget": budget, "rate": rate}, measure)

  def _found(self, arm: str, budget: float) -> list[dict | None]:
    """Returns the rows of the search of an arm; None for one that is not there."""
    rates = self.experiment.arms[arm].rates
    return [self.rows.find({"search": arm, "budget": budget, "rate": rate}) for rate in rates]

  def _is_searched(self, place: Place) -> bool:
    return all(all(self._found(arm, place.budget)) for arm in self._searched(place.arm))

  def _rate(self, arm: str, budget: float) -> float | None:
    """Returns the best of an arm's rates, None for the configuration's."""
    metric, best = self.experiment.choose, None
    for row in self._found(self._searched(arm)[0], budget):
      if best is None or is_better(metric, row[metric], best[metric]):
        best = row
    return best and best["rate"]

  def _measured(self, place: Place) -> dict:
    key = {"arm": place.arm, "budget": place.budget, "seed": place.seed}
    place = place._replace(rate=self._rate(place.arm, place.budget))
    return self.rows.once(key, functools.partial(self._measure, place))

  def _measure(self, place: Place) -> dict:
    folder, flops = self._trained(place)
    last = jobs.heldout(folder)[-1]
    rate = place.rate or self.experiment.configuration(place.arm).optimizer.learning_rate
    row = {"rate": rate, "steps": last["step"], "flops": flops}
    row |= {"train_secs": round(jobs.seconds(self.out, f"train/{folder.name}"), 1)}
    row |= {name: last.get(name) for name in self.experiment.heldout}
    return row | self._scores(folder, last, place.seed)

  def _scores(self, folder: Path, last: dict, seed: int) -> dict[str, float]:
    """Returns the measures beside the held-out ones, in percent but for the AUC."""
    e, found = self.experiment, {}
    if e.pairs:
      found["pairs"] = 100 * self._evaluate(folder, "pairs", f"--data={e.pairs}")["all"]["accuracy"]
    if e.detect and "rtd_auc" in last:
      found["detect"] = self._evaluate(folder, "detect", f"--data={e.detect}")["auc"]
    if e.probe:
      train, test = e.probe
      scores = self._evaluate(folder, "probe", f"--train={train}", f"--test={test}")["metrics"]
      found["probe"] = next(iter(scores.values()))
    for name, (config, fields) in e.tasks.items():
      start = {"init": folder, "seed": seed, "seeds": 1, "keep": "none"}
      rows = jobs.finetune(self.out, f"{folder.name}-{name}", config, {**start, **fields})
      found[name] = jobs.main_metric(next(row for row in rows if row["split"] == "dev"))
    return found

  def _evaluate(self, folder: Path, what: str, *options: str) -> dict:
    place = self.out / what / f"{folder.name}{'' if what == 'pairs' else '.json'}"
    found = place / "pairs.json" if what == "pairs" else place
    if not found.is_file():  # it overwrites nothing
      arguments = [what, f"--model={folder}", *options, f"--out={place}"]
      jobs.run(self.out, f"{what}/{folder.name}", "electra_jax.evaluate", arguments, found.is_file)
    return json.loads(found.read_text())

  def _fields(self, place: Place) -> dict[str, Any]:
    """Returns the fields of a run, with what its budget pays for."""
    e, arm = self.experiment, self.experiment.arms[place.arm]
    fields = {**e.fields, **arm.fields, "seed": place.seed}
    if e.unit == "minutes":
      return fields | {"train.minutes": place.budget}
    rate = place.rate or e.configuration(place.arm).optimizer.learning_rate
    if e.unit == "flops":
      return jobs.at_rate(arm.config, fields, rate, place.budget)
    return jobs.at_rate(arm.config, fields, rate, 0, steps=round(place.budget))

  def _trained(self, place: Place) -> tuple[Path, float]:
    """Trains a run, and what it starts from; returns its workdir and the matrix products."""
    e, arm, start, before = self.experiment, self.experiment.arms[place.arm], {}, 0.0
    name = place.name
    if arm.after:
      rate = self._rate(arm.after, place.budget)
      first = Place(arm.after, place.budget * arm.share, place.seed, rate)
      folder, before = self._trained(first)
      start = {"init_from": folder}
      place = place._replace(budget=place.budget * (1 - arm.share))
    timed = e.unit == "minutes"
    folder = jobs.train(self.out, name, arm.config, self._fields(place) | start, timed=timed)
    step = sum(tables.step_costs(e.configuration(place.arm))[1].values())
    return folder, before + step * jobs.heldout(folder)[-1]["step"]
