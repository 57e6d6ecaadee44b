"""Tables and a figure of an experiment's rows."""

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path

from electra_jax.experiments import jobs
from electra_jax.experiments.definition import Experiment, number
from electra_jax.experiments.plan import Plan, WaitingError, reported, search_key
from electra_jax.monitor import curves, quantities

FACTS = ("arm", "budget", "seed", "rate", "steps", "flops", "train_secs", "diverged")

NUMBERS = int | float | list  # a measure's value; a list for several fine-tuning seeds


def measures(rows: Sequence[dict]) -> list[str]:
  """Returns the names of the measures, in the order of the rows."""
  names = dict.fromkeys(name for row in rows for name in row if name not in FACTS)
  return [name for name in names if any(isinstance(row.get(name), NUMBERS) for row in rows)]


def values(rows: Sequence[dict], arm: str, budget: float, name: str) -> dict[int, float]:
  """Returns {seed: value} of a measure."""
  mine = (row for row in rows if (row["arm"], row["budget"]) == (arm, budget))
  return {row["seed"]: number(row[name]) for row in mine if isinstance(row.get(name), NUMBERS)}


def paired(mine: dict[int, float], theirs: dict[int, float]) -> tuple[float, float] | None:
  """Returns the mean paired difference and its standard error; None without two common seeds.

  >>> paired({0: 3.0, 1: 5.0, 2: 7.0}, {0: 1.0, 1: 2.0})
  (2.5, 0.5)
  """
  differences = [mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()]
  if len(differences) < 2:
    return None
  return statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5


def table(experiment: Experiment, rows: Sequence[dict], budget: float) -> list[str]:
  """Returns a markdown table of the measures' means ± standard deviations over seeds.

  It adds paired differences from the control ± their standard errors.
  """
  names, lines = measures(rows), []
  lines.append(f"| arm | rate | steps | seeds | {' | '.join(names)} |")
  lines.append("|---" * (4 + len(names)) + "|")
  for arm in experiment.arms:
    spent = 0.0 if experiment.arms[arm].untrained else budget
    mine = [row for row in rows if (row["arm"], row["budget"]) == (arm, spent)]
    if not mine:
      continue
    ended = [row for row in mine if not row.get("diverged")]
    cells = [arm, "-", "0", f"{len(ended)}"]
    if spent and ended:
      steps = round(statistics.fmean(row["steps"] for row in ended))
      cells[1:3] = [f"{ended[0]['rate']:g}", f"{steps:,}"]
    if len(mine) > len(ended):
      cells[3] += f", {len(mine) - len(ended)} diverged"
    for name in names:
      found = values(rows, arm, spent, name)
      cell = jobs.compared(list(found.values()), []) if found else "-"
      control = values(rows, experiment.control or arm, budget, name)
      if arm != experiment.control and (gain := paired(found, control)) and experiment.control:
        cell += f" ({gain[0]:+.3f} ± {gain[1]:.3f})"
      cells.append(cell)
    lines.append(f"| {' | '.join(cells)} |")
  return lines


def search_table(experiment: Experiment, rows: Sequence[dict], at: int) -> list[str]:
  """Returns a markdown table of the learning rates searched at a budget, or [].

  The best rate is bold. A note names the arms whose best rate is the lowest or highest one tried.
  """
  plan = Plan(experiment, rows, list(experiment.arms))
  found: dict[str, dict[float, dict]] = {}
  with contextlib.suppress(WaitingError):
    for arm, rate in plan.searches(at):
      with contextlib.suppress(WaitingError):
        key = search_key(experiment, arm, experiment.budgets[at], rate)
        found.setdefault(arm, {})[rate] = plan.find(key)
  if not found:
    return []
  rates = sorted({rate for mine in found.values() for rate in mine})
  lines = [f"| {experiment.choose} at rate | {' | '.join(f'{rate:g}' for rate in rates)} |"]
  lines.append("|---" * (1 + len(rates)) + "|")
  at_an_end = []
  for arm, mine in found.items():
    best = max(mine, key=lambda rate, mine=mine: plan.score(mine[rate]))
    texts = {
      rate: "diverged" if row.get("diverged") else f"{number(row[experiment.choose]):.3f}"
      for rate, row in mine.items()
    }
    texts[best] = f"**{texts[best]}**"
    lines.append(f"| {arm} | {' | '.join(texts.get(rate, '') for rate in rates)} |")
    if len(mine) > 2 and best in (min(mine), max(mine)):
      at_an_end.append(arm)
  if at_an_end:
    lines += ["", f"The best rate is the lowest or highest one tried: {', '.join(at_an_end)}."]
  return lines


def report(experiment: Experiment, rows: Sequence[dict]) -> list[str]:
  """Returns a heading, the results and the learning-rate search of each budget."""
  lines, shown = [], reported(experiment, rows)
  for at, budget in enumerate(x.spend for x in experiment.budgets):
    if any(row["budget"] == budget for row in shown):
      lines += [f"## {budget:g} {experiment.unit}", "", *table(experiment, shown, budget), ""]
    if searched := search_table(experiment, rows, at):
      lines += [*searched, ""]
  return lines


@curves.plain_names()
def draw(path: Path, experiment: Experiment, rows: Sequence[dict]) -> None:
  """Draws each measure against the FLOPs of the runs, with a line per arm and a point per seed.

  With one budget the arms are side by side, each with a bar at its mean.
  """
  if not (names := measures(rows)):
    return
  from matplotlib.ticker import LogFormatter

  one_budget = len(experiment.budgets) == 1
  figure = curves.new_figure(4.2 * len(names), 3.4, layout="constrained")
  for place, name in enumerate(names):
    axis = figure.add_subplot(1, len(names), place + 1)
    colours = curves.COLOURS * len(experiment.arms)
    for at, (arm, colour) in enumerate(zip(experiment.arms, colours, strict=False)):
      means = []
      for budget in experiment.budgets:
        mine = [row for row in rows if (row["arm"], row["budget"]) == (arm, budget.spend)]
        # Old rows have no "flops", only their budget.
        points = [
          (at if one_budget else row.get("flops", row["budget"]), number(row[name]))
          for row in mine
          if isinstance(row.get(name), NUMBERS)
        ]
        if points:
          axis.plot(*zip(*points, strict=True), "o", color=colour, markersize=4)
          means.append(tuple(map(statistics.fmean, zip(*points, strict=True))))
      if means:
        mark = "_" if one_budget else None
        axis.plot(
          *zip(*means, strict=True), marker=mark, ms=24, color=colour, linewidth=1.4, label=arm
        )
    if one_budget:
      axis.set_xticks(range(len(experiment.arms)), list(experiment.arms), rotation=20)
      axis.set_xlim(-0.5, len(experiment.arms) - 0.5)
    else:
      axis.set_xscale("log")
      for set_formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        set_formatter(LogFormatter())  # the default writes LaTeX
      axis.set_xlabel("FLOPs", fontsize=8)
    axis.set_ylabel(quantities.unit(name), fontsize=8)
    axis.set_title(quantities.label(name), fontsize=9)
    axis.grid(alpha=0.25)
    axis.tick_params(labelsize=8)
  if not one_budget:
    figure.axes[0].legend(fontsize=7, frameon=False)
  curves.save_figure(path, figure)
