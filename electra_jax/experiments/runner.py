"""Trains and measures the arms of an experiment with each budget and seed.

Runs, logs and rows.jsonl, with a row for each result, are in one folder. Started again, it
continues; several machines may add rows to one folder.
"""

import json
import shutil
import statistics
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from electra_jax.config import validate
from electra_jax.config.fields import load_config
from electra_jax.core.objectives import OBJECTIVES
from electra_jax.cost import tables
from electra_jax.experiments import jobs
from electra_jax.experiments.definition import TRAINING, Budget, Experiment, Pairs
from electra_jax.experiments.plan import Place, Plan, search_key
from electra_jax.monitor import journal
from electra_jax.monitor.metrics import read_history
from electra_jax.runtime.storage import is_remote

ROWS = "rows.jsonl"
OTHER_SEEDS = 1_000  # above those of runs from the start


class DivergedError(Exception):
  """A training run ended with a loss that is NaN or infinite."""


class Runner:
  """Runs an experiment in a folder.

  Args:
    rows: the file of rows.
  """

  def __init__(self, experiment: Experiment, out: Path, rows: Path, console: Console):
    self.experiment, self.out, self.console = experiment, out, console
    self.rows = jobs.Rows(rows)

  def run(self, only: list[str], at_once: int, part: tuple[int, int] = (0, 1)) -> list[dict]:
    """Does the unfinished runs of some arms; returns all rows.

    Args:
      part: (i, n): this process is part i of n. It starts with runs i, i + n, ..., then takes
        unfinished runs of the other parts. It waits for jobs that another process is running.

    Raises:
      ValueError: an arm's configuration is invalid, or a file to measure with is missing.
      SystemExit: a program failed; the message ends with its last output.
    """
    self._check(only)
    self._build(only)

    def mine_first(runs: list) -> list:
      index, parts = part
      shares = [runs[(index + k) % parts :: parts] for k in range(parts)]
      # From the end, because the part that they belong to comes from the front.
      return shares[0] + [run for share in shares[1:] for run in share[::-1]]

    def plan() -> Plan:
      return Plan(self.experiment, self.rows.read(), only)

    with jobs.workers(at_once) as pool:
      for at, budget in enumerate(self.experiment.budgets):
        searches = mine_first(list(plan().searches(at)))
        jobs.finish([pool.submit(self._search, arm, budget, rate) for arm, rate in searches])
        places = mine_first(plan().places(at))
        jobs.finish([pool.submit(self._measured, place, budget) for place in places])
    return self.rows.read()

  def _check(self, only: list[str]) -> None:
    """Raises ValueError for what would otherwise fail after hours of training."""
    e = self.experiment
    configs = {name: e.configuration(name) for name in e.needed(only)}
    for config in configs.values():
      validate.check(config)
    shards = {config.data.dir for config in configs.values()}  # may be built later
    files = [e.pairs and e.pairs.file, e.cloze and e.cloze[0]]
    files += [file for both in e.probe.values() for file in both]
    files.append(e.detect not in shards and e.detect)
    for task in e.tasks.values():
      data = load_config(task.config, task.fields).data
      files += [data[name] for name in ("dir", "train", "dev", "test")]
    for file in filter(None, files):
      if not (is_remote(file) or file.startswith("tfds:") or Path(file).exists()):
        raise ValueError(f"{file}: no such file or folder; the experiment measures with it")

  def _build(self, only: list[str]) -> None:
    """Builds the missing shards of the arms."""
    pairs = self.experiment.pairs
    if pairs and pairs.count:
      jobs.write_pairs(self.out, Path(pairs.file), pairs.count)
    for name in self.experiment.needed(only):
      arm = self.experiment.arms[self.experiment.arms[name].untrained or name]
      config = self.experiment.configuration(name)
      folder = config.data.dir  # a URL must have shards already
      if folder and not is_remote(folder) and not (Path(folder) / "manifest.json").is_file():
        jobs.build(self.out, Path(folder), arm.config, {**self.experiment.fields, **arm.fields})

  def _search(self, arm: str, budget: Budget, rate: float) -> dict:
    e, place = self.experiment, Place(arm, budget.spend, 0, rate)
    if e.is_measure(e.choose):
      return self._measured(place, budget)

    def measure() -> dict:
      return {e.choose: self._chosen(self._trained(place)[0])}

    return self._row(search_key(e, arm, budget, rate), measure)

  def _row(self, key: dict, measure: Callable[[], dict]) -> dict:
    """Returns the row of `key`, which has no measures if the training diverged."""

    def found() -> dict:
      try:
        return measure()
      except DivergedError:
        return {"diverged": True}

    return self.rows.once(key, found)

  def _chosen(self, folder: Path) -> float | None:
    """Returns a run's `Experiment.choose`."""
    name = self.experiment.choose
    if name.startswith(TRAINING):
      return training_mean(folder, name.removeprefix(TRAINING))
    return jobs.heldout(folder)[-1].get(name)

  def _measured(self, place: Place, budget: Budget) -> dict:
    return self._row(place.key, lambda: self._measure(place, budget))

  def _measure(self, place: Place, budget: Budget) -> dict:
    e = self.experiment
    if like := e.arms[place.arm].untrained:
      first = Place(like, e.budgets[0].spend, 0, self._rate(like, 0))
      start = {"init": "random", "like": self._trained(first)[0]}
      without = set.intersection(*(set(x.without) for x in e.budgets))
      return self._tasks(place.name, start, place.seed, without)
    (folder, flops), config = self._trained(place), e.configuration(place.arm)
    last = jobs.heldout(folder)[-1]
    row = {"rate": place.rate or config.optimizer.learning_rate}
    row |= {"steps": last["step"], "flops": flops}
    row |= {"train_secs": round(jobs.seconds(self.out, f"train/{folder.name}"), 1)}
    row |= {name: last.get(name) for name in e.heldout}
    scorers = e.pairs.scorers(config) if e.pairs and e.pairs.scorers else [""]
    row |= self._pairs(folder, scorers, e.pairs) if e.pairs else {}
    for scorer in scorers if e.cloze else ():
      data = f"--data={e.cloze[0]}", f"--gaps={e.cloze[1]}"
      found = self._scored(folder, "cloze", scorer, *data)
      row[_join("cloze", scorer)] = accuracy([found["first"]])
    if e.detect and "rtd_head" in OBJECTIVES[config.objective.name].heads:
      row["detect"] = self._evaluate(folder, "detect", f"--data={e.detect}")["auc"]
    for name, (train, test) in e.probe.items():
      options = [f"--train={train}", f"--test={test}", "--best-layer"]
      options += [f"--max-words={e.probe_words}"] if e.probe_words else []
      found = self._evaluate(folder, "probe", *options, name="" if name == "probe" else name)
      row[name] = next(iter(found["metrics"].values()))
    if not e.is_measure(e.choose) and e.rank is None:
      row[e.choose] = self._chosen(folder)
    return row | self._tasks(folder.name, {"init": folder}, place.seed, budget.without)

  def _scored(self, folder: Path, what: str, scorer: str, *options: str) -> dict:
    options = (*options, f"--scorer={scorer}") if scorer else options
    return self._evaluate(folder, what, *options, name=scorer)

  def _pairs(self, folder: Path, scorers: Sequence[str], pairs: Pairs) -> dict[str, float]:
    """Returns the accuracy of each scorer, in percent."""
    data, found = self.out / "pairs.jsonl" if pairs.count else pairs.file, {}
    for scorer in scorers:
      scored, name = self._scored(folder, "pairs", scorer, f"--data={data}"), _join("pairs", scorer)
      if "effect" in scored:  # an earlier version wrote none
        found[f"{name}_effect"] = scored["effect"]
      if pairs.every:
        groups = list(scored["paradigms"].values())
        chosen = groups[:: pairs.every]
        found[f"{name}_choices"] = accuracy(chosen)
        found[name] = accuracy([x for i, x in enumerate(groups) if i % pairs.every])
      else:
        found[name] = accuracy([scored["all"]])
    return found

  def _tasks(self, name: str, start: dict, seed: int, without: Collection[str]) -> dict[str, Any]:
    """Returns the main metric of each task in percent, as a list for several seeds."""
    found = {}
    for title, task in self.experiment.tasks.items():
      if title in without or (task.first_seed and seed):
        continue
      fields = start | {"seed": seed, "seeds": task.seeds, "keep": "none"} | dict(task.fields)
      rows = jobs.finetune(self.out, f"{name}-{title}", task.config, fields)
      for measure, split in task.splits.items():
        values = [jobs.main_metric(row) for row in rows if row["split"] == split]
        if len(values) != task.seeds:
          splits = ", ".join(dict.fromkeys(row["split"] for row in rows))
          raise SystemExit(
            f"task {title!r} must be one task with the split {split!r}, got {splits}"
          )
        found[measure] = values if task.seeds > 1 else values[0]
    return found

  def _evaluate(self, folder: Path, what: str, *options: str, name: str = "") -> dict:
    job = f"{what}/{'-'.join(filter(None, (folder.name, name)))}"
    place = self.out / (job if what == "pairs" else f"{job}.json")
    found = place / "pairs.json" if what == "pairs" else place
    arguments = [what, f"--model={folder}", *options, f"--out={place}"]
    if found.is_file() and not jobs.has_ended(
      self.out, job, arguments
    ):  # made with other arguments
      shutil.rmtree(place) if place.is_dir() else place.unlink()
    jobs.run(self.out, job, "electra_jax.evaluate", arguments, found.is_file)
    return json.loads(found.read_text("utf-8"))

  def _rate(self, arm: str, at: int) -> float | None:
    return Plan(self.experiment, self.rows.read(), [arm]).rate(arm, at)

  def _fields(self, place: Place, start: dict[str, str]) -> dict[str, Any]:
    """Returns the fields of a run, with those of `start` and the steps or minutes of its budget."""
    e, arm = self.experiment, self.experiment.arms[place.arm]
    # Another seed, so that a run after another does not read the same data again.
    seed = place.seed + (OTHER_SEEDS if arm.after else 0)
    fields = {**e.fields, **arm.fields, **start, "seed": seed}
    if e.unit == "minutes":
      return fields | {"train.minutes": place.budget}
    rate = place.rate or e.configuration(place.arm).optimizer.learning_rate
    if e.unit == "flops":
      return jobs.at_rate(arm.config, fields, rate, place.budget)
    return jobs.at_rate(arm.config, fields, rate, 0, steps=round(place.budget))

  def _trained(self, place: Place) -> tuple[Path, float]:
    """Trains a run and the run that it starts from; returns its workdir and the FLOPs."""
    e, arm, start, before = self.experiment, self.experiment.arms[place.arm], {}, 0.0
    name, at = place.name, [x.spend for x in e.budgets].index(place.budget)
    place = place._replace(budget=place.budget * arm.times)
    if arm.after:
      rate = place.rate if arm.same_rate else self._rate(arm.after, at)
      first = Place(arm.after, place.budget * arm.share, place.seed, rate)
      folder, before = self._spent(first, first.name, {})
      start = dict.fromkeys(arm.start_fields, str(folder))
      place = place._replace(budget=place.budget * (1 - arm.share))
    folder, flops = self._spent(place, name, start)
    return folder, before + flops

  def _spent(self, place: Place, name: str, start: dict[str, str]) -> tuple[Path, float]:
    """Trains only the run of a place; returns the workdir and the matmul FLOPs."""
    e, arm = self.experiment, self.experiment.arms[place.arm]
    timed = e.unit == "minutes"
    try:
      folder = jobs.train(self.out, name, arm.config, self._fields(place, start), timed=timed)
    except SystemExit:
      if journal.diverged(journal.read(self.out / "runs" / name)):
        raise DivergedError from None
      raise
    config = e.configuration(place.arm)
    config.update_from_flattened_dict(start)
    step = sum(tables.step_costs(config)[1].values())
    return folder, step * jobs.heldout(folder)[-1]["step"]


def _join(what: str, scorer: str) -> str:
  return f"{what}_{scorer}" if scorer else what


def accuracy(groups: list[dict]) -> float:
  """Returns the accuracy in percent of groups of pairs."""
  return 100 * sum(x["accuracy"] * x["pairs"] for x in groups) / sum(x["pairs"] for x in groups)


def training_mean(folder: Path, metric: str) -> float:
  """Returns the mean of a metric over the training lines in the last tenth of a run's steps."""
  lines = [x for x in read_history(folder / "metrics.jsonl") if x["split"] == "train"]
  return statistics.fmean(x[metric] for x in lines if x["step"] > 0.9 * lines[-1]["step"])
