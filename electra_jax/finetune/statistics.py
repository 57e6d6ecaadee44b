"""Summarises several seeds: medians, bootstrap intervals of differences, a table and a plot.

The paper reports the median of 10 fine-tuning runs from one checkpoint (Clark et al. 2020, Section
3.1). A row of results is a dict: {"task": "mrpc", "split": "dev", "seed": 0, "metrics":
{"accuracy": 87.3}, "collapsed": False, "majority": {"accuracy": 68.4}}; metrics are percent, the
main one first. "majority", the metrics of always predicting the most frequent class or the mean,
may be None or (in earlier versions) missing. With own.folds a row has its "fold", with
train.patience the "step" of the best evaluation.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Column, Table
from rich.text import Text

from electra_jax.finetune.tasks import TASKS
from electra_jax.monitor import curves
from electra_jax.runtime import terminal

# Metrics as printed in papers.
TITLES = {
  "mcc": "MCC",
  "f1": "F1",
  "spearman": "Spearman",
  "pearson": "Pearson",
  "exact": "EM",
  "exact_match": "EM",
  "ndcg@10": "nDCG@10",
  "mrr@10": "MRR@10",
}


class Summary(NamedTuple):
  """Statistics of n seeds; `std` is the sample standard deviation (n - 1), 0 for one seed."""

  median: float
  mean: float
  std: float
  n: int


class Difference(NamedTuple):
  """The difference between two systems, with a 95 % percentile interval."""

  a: float  # the metric, a mean over the system's seeds
  b: float
  difference: float  # a - b
  low: float
  high: float
  p: float  # two-sided bootstrap p-value


def summary(values: Sequence[float]) -> Summary:
  """Returns the statistics of one value per seed; raises ValueError for no values.

  >>> summary([61.0, 64.0, 63.0])
  Summary(median=63.0, mean=62.66..., std=1.52..., n=3)
  """
  values = np.asarray(values, np.float64)
  if not values.size:
    raise ValueError("there are no seeds to summarise")
  std = float(values.std(ddof=1)) if values.size > 1 else 0.0
  return Summary(float(np.median(values)), float(values.mean()), std, values.size)


def paired_bootstrap(
  scores_a: Sequence[np.ndarray],
  scores_b: Sequence[np.ndarray],
  metrics: Sequence[Callable[[np.ndarray], Mapping[str, float]]],
  metric: str,
  *,
  samples: int = 2000,
  seed: int = 0,
) -> Difference:
  """Returns the difference of two systems on the same examples, with its 95 % interval.

  Each resampling draws n examples, the same for both systems, and S and S' seeds, all with
  replacement. The interval covers the choice of test examples and seeds; with one seed per system,
  only of examples.

  Args:
    scores_a, scores_b: example scores [S, n, m] and [S', n, m]; row i is the same example in both.
    metrics: of a and of b, functions from example scores [n, m] to {metric: value}.
    metric: the metric to compare.

  Raises:
    ValueError: a system has no seeds or no examples, or the numbers of examples differ.
  """
  systems = [[np.asarray(s) for s in scores] for scores in (scores_a, scores_b)]
  sizes = sorted({len(scores) for system in systems for scores in system})
  if not all(systems) or sizes[0] == 0:
    raise ValueError("a comparison needs at least one seed and one example of each system")
  if len(sizes) > 1:
    raise ValueError(f"systems must have the same examples: one has {sizes[0]}, one {sizes[-1]}")
  a, b = (
    float(np.mean([compute(scores)[metric] for scores in system]))
    for system, compute in zip(systems, metrics, strict=True)
  )
  rng = np.random.default_rng(seed)
  n, found = sizes[0], np.zeros(samples)
  for i in range(samples):
    rows = rng.integers(n, size=n)
    means = []
    for system, compute in zip(systems, metrics, strict=True):
      drawn = np.bincount(rng.integers(len(system), size=len(system)), minlength=len(system))
      values = [compute(system[s][rows])[metric] * drawn[s] for s in np.flatnonzero(drawn)]
      means.append(sum(values) / len(system))
    found[i] = means[0] - means[1]
  low, high = np.quantile(found, [0.025, 0.975])
  # Adding 1 to both counts keeps p above 0, as a finite sample cannot show that it is 0.
  tail = (1 + min((found <= 0).sum(), (found >= 0).sum())) / (1 + samples)
  return Difference(a, b, a - b, float(low), float(high), float(min(1.0, 2 * tail)))


def grouped(rows: Sequence[Mapping]) -> dict[tuple[str, str], dict[int, Mapping]]:
  """Returns {(task, split): {seed: row}}, tasks in the order of the rows, seeds sorted.

  For rows with a "fold" the inner dict is {fold: row with the means of its seeds}.
  """
  groups = {(row["task"], row["split"]): {} for row in rows}
  for row in sorted(rows, key=_place):
    groups[row["task"], row["split"]].setdefault(_place(row), []).append(row)
  return {
    group: {place: _mean(same) if "fold" in same[0] else same[-1] for place, same in found.items()}
    for group, found in groups.items()
  }


def _place(row: Mapping) -> int:
  return row.get("fold", row["seed"])


def _mean(rows: Sequence[Mapping]) -> Mapping:
  metrics = {x: float(np.mean([row["metrics"][x] for row in rows])) for x in rows[0]["metrics"]}
  return rows[0] | {"metrics": metrics, "collapsed": any(row["collapsed"] for row in rows)}


def _places(rows: Sequence[Mapping]) -> str:
  """Returns the kind of the inner keys of `grouped`: "fold", "seed" or "fold or seed"."""
  return " or ".join(sorted({"fold" if "fold" in row else "seed" for row in rows}))


def table(rows: Sequence[Mapping]) -> Table:
  """Returns a table of results: a line per metric, with statistics over seeds or folds.

  Collapsed seeds are marked but included, as in the paper's median.
  """
  groups = grouped(rows)
  seeds = sorted({seed for group in groups.values() for seed in group})
  # All seeds are in one column, which wraps in a narrow terminal instead of losing values.
  of = _places(rows)
  few = f"{of} {' '.join(map(str, seeds))}"
  collapsed = any(row["collapsed"] for row in rows)
  found = Table(
    "task",
    "split",
    Column("metric, %", no_wrap=True),
    *(Column(name, justify="right", no_wrap=True) for name in ("median", "mean", "σ")),
    few if len(seeds) < 5 else f"{len(seeds)} {of}s, {seeds[0]} to {seeds[-1]}",
    caption="* collapsed: the same prediction everywhere" if collapsed else None,
    caption_justify="left",
  )
  for (task, split), group in groups.items():
    metrics = next(iter(group.values()))["metrics"]
    percent = (metric for metric in metrics if not metric.endswith("_thresh"))  # in null odds
    for place, metric in enumerate(percent):
      stats = summary([row["metrics"][metric] for row in group.values()])
      found.add_row(
        *(("", "") if place else (Text(_title(task)), Text(split))),
        TITLES.get(metric, metric),
        Text(f"{stats.median:.2f}", style="bold"),
        f"{stats.mean:.2f}",
        f"{stats.std:.2f}" if stats.n > 1 else "",
        Text(" ").join(_cell(group.get(seed), metric) for seed in seeds if seed <= max(group)),
      )
  return found


def _title(task: str) -> str:
  return TASKS[task].title if task in TASKS else terminal.printable(task)


def _cell(row: Mapping | None, metric: str) -> Text:
  if row is None:
    return Text("–")
  value = f"{row['metrics'][metric]:.2f}"
  return Text(f"{value}*", style="red") if row["collapsed"] else Text(value)


@curves.plain_names()
def picture(path: str | Path, results: Sequence[Mapping]) -> None:
  """Draws the main metric of each task as a PNG, with a dot per seed and a line at the median.

  A dashed line is the score of the most frequent class or the labels' mean. An existing file is
  replaced atomically.

  Raises:
    ValueError: there are no results.
  """
  groups = grouped(results)
  if not groups:
    raise ValueError("there are no results to draw")
  figure = curves.new_figure(max(4.6, 1.6 + 1.05 * len(groups)), 4.2, layout="constrained")
  axis = figure.subplots()
  names = []
  for x, ((task, split), group) in enumerate(groups.items()):
    rows = list(group.values())
    metric = next(iter(rows[0]["metrics"]))
    _column(axis, x, rows, metric)
    plural = _places(rows) + ("s" if len(rows) > 1 else "")
    title = TITLES.get(metric, metric)
    names.append(f"{_title(task)}\n{split}\n{title}\n{len(rows)} {plural}")
  axis.set_xticks(range(len(names)), names, fontsize=8)
  axis.set_xlim(-0.6, len(names) - 0.4)
  axis.margins(y=0.08)
  axis.set_ylabel("metric of the task, %", fontsize=9)
  dashed = "; dashed: the most frequent class" if any(r.get("majority") for r in results) else ""
  title = f"a dot: one {_places(results)}; line and number: the median{dashed}"
  axis.set_title(title, fontsize=9 - len(dashed) / 20, loc="left")
  axis.tick_params(axis="y", labelsize=8)
  axis.tick_params(axis="x", length=0)
  axis.grid(axis="y", alpha=0.25)
  axis.spines[["top", "right"]].set_visible(False)
  if any(row["collapsed"] for row in results):
    axis.plot([], [], linestyle="none", marker="x", color="#b03030", label="collapsed")
    axis.legend(fontsize=8, frameon=False, loc="best")
  curves.save_figure(Path(path), figure)


def _column(axis, x: float, rows: Sequence[Mapping], metric: str) -> None:
  """Draws one task: its seeds, spread sideways to avoid overlap, their median and the baseline."""
  values = [row["metrics"][metric] for row in rows]
  median = summary(values).median
  axis.hlines(median, x - 0.28, x + 0.28, color="#d1602c", linewidth=2, zorder=2)
  shifts = np.linspace(-0.18, 0.18, len(rows)) if len(rows) > 1 else [0.0]
  for shift, value, row in zip(shifts, values, rows, strict=True):
    style = {"marker": "o", "color": "#1f5fa8", "markersize": 5, "markeredgecolor": "white"}
    if row["collapsed"]:
      style = {"marker": "x", "color": "#b03030", "markersize": 6}
    axis.plot([x + shift], [value], linestyle="none", zorder=3, **style)
  place = {"xytext": (2, 0), "textcoords": "offset points", "va": "center"}
  axis.annotate(f"{median:.1f}", (x + 0.3, median), fontsize=8, color="#a5451b", **place)
  if level := rows[0].get("majority"):
    axis.hlines(level[metric], x - 0.28, x + 0.28, color="#666666", linestyle="--", linewidth=1)
