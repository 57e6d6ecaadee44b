"""Plots of a run: metrics.jsonl as curves.png."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from electra_jax.monitor import metrics, quantities
from electra_jax.monitor.baselines import Baselines
from electra_jax.monitor.thinned import Thinned
from electra_jax.runtime.workdir import replacing

# One colour per metric, for its training line and its held-out points.
COLOURS = ("#1f5fa8", "#d1602c", "#3a8f4d", "#8a4fa3", "#937a2a")
REDRAW_SECS = 20  # minimum between drawings, each of which takes half a second


class Redrawn:
  """A tracker that redraws the curves at evaluations, at most once in REDRAW_SECS.

  Args:
    draw: takes the lines so far, thinned.
    history: the lines of a resumed run.
  """

  def __init__(self, draw: Callable[[list[Mapping]], None], history: Thinned):
    self._draw, self._history, self._drawn = draw, history, time.monotonic()

  def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
    self._history.add({"step": step, "split": split, **values})
    if split == "heldout" and time.monotonic() - self._drawn >= REDRAW_SECS:
      self._draw(self._history.lines())
      self._drawn = time.monotonic()

  def close(self, failed: bool) -> None:
    pass  # the run draws the final plot


def draw(path: Path, title: str, history: list[dict], baselines: Baselines) -> None:
  """Draws training as lines, held-out evaluations as points and baselines as dashed lines."""
  panels = layout(history)
  if not panels:
    return
  columns = min(len(panels), 3 if len(panels) <= 6 else 4)
  rows = math.ceil(len(panels) / columns)
  width, height = 4.6 * columns, 3.4 * rows + 0.3  # inches
  figure = new_figure(width, height)
  axes = figure.subplots(rows, columns, squeeze=False).flatten()
  for axis, (heading, names) in zip(axes, panels.items(), strict=False):
    _panel(axis, heading, names, history, baselines)
  for axis in axes[len(panels) :]:
    axis.remove()
  # Fixed margins: a layout engine draws everything twice, which takes half a second.
  figure.subplots_adjust(
    *(0.6 / width, 0.85 / height, 1 - 0.1 / width, 1 - 0.6 / height), wspace=0.22, hspace=0.48
  )
  # The name of a folder is not LaTeX.
  figure.suptitle(title, x=0.1 / width, y=1 - 0.1 / height, ha="left", va="top", parse_math=False)
  save_figure(path, figure)


def new_figure(width: float, height: float, **options):
  """Returns a matplotlib figure, in inches, that needs no display."""
  from matplotlib.figure import Figure

  return Figure(figsize=(width, height), dpi=130, **options)


@contextlib.contextmanager
def plain_names():
  """A context manager and decorator in which figures show $ literally: names are not LaTeX."""
  import matplotlib

  with matplotlib.rc_context({"text.parse_math": False}):
    yield


def save_figure(path: Path, figure) -> None:
  """Writes a figure as PNG, atomically."""
  with replacing(path) as temporary:
    figure.savefig(temporary, format="png")


def layout(history: list[dict]) -> dict[str, list[str]]:
  """Returns {title: metric names}, one entry per panel.

  Each loss has a panel. Fractions with a common prefix share a panel, as do all single fractions.
  Other metrics have a panel each; timings and the norms of weights and updates are omitted.
  """
  skipped = {"step", "split", *metrics.TIMING, "param_norm", "update_norm"}
  names = [n for n in dict.fromkeys(k for line in history for k in line) if n not in skipped]
  losses, families, rest = {}, {}, {}
  for name in names:
    if quantities.unit(name) == "fraction":
      families.setdefault(name.split("_")[0], []).append(name)
    else:
      (losses if quantities.of(name).kind == "loss" else rest)[quantities.label(name)] = [name]
  alone = [group[0] for group in families.values() if len(group) == 1]
  together = {prefix: group for prefix, group in families.items() if len(group) > 1}
  if alone:
    together[quantities.label(alone[0]) if len(alone) == 1 else "other fractions"] = alone
  return losses | together | rest


def _panel(axis, title: str, names: list[str], history: list[dict], baselines: Baselines) -> None:
  for name, colour in zip(names, COLOURS * len(names), strict=False):
    alone = len(names) == 1
    text, dots = ("training", "held-out") if alone else (quantities.label(name), None)
    axis.plot(*points(history, "train", name), color=colour, linewidth=1.4, label=text)
    if (heldout := points(history, "heldout", name))[0]:
      axis.plot(*heldout, "o", color=colour, markersize=4.5, mec="white", mew=0.6, label=dots)
    steps, values, what = levels(history, name, baselines)
    if steps:
      label = f"trivial baseline: {what}" if alone else None
      grey = "#666666" if alone else colour
      axis.plot(steps, values, color=grey, linestyle="--", linewidth=1, label=label)
  notes = "" if len(names) == 1 else " (points: held-out; dashed: trivial baseline)"
  axis.set_title(f"{title}{notes}", fontsize=10 if not notes else 8.5)
  axis.set_xlabel("step", fontsize=8)
  axis.set_ylabel(quantities.unit(names[0]), fontsize=8)
  axis.tick_params(labelsize=8)
  axis.grid(alpha=0.25)
  axis.spines[["top", "right"]].set_visible(False)
  if len(axis.get_legend_handles_labels()[1]) > 1:
    below = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.17)}  # covers no points
    axis.legend(fontsize=7, frameon=False, ncols=3, columnspacing=1, **below)


def levels(
  history: list[dict], name: str, baselines: Baselines
) -> tuple[list[int], list[float], str | None]:
  """Returns the steps, values and description of a metric's trivial baseline; empty if unknown.

  The detection baseline depends on the share of replaced tokens, taken from training lines if
  there are any, else from evaluations.
  """
  for split in ("train", "heldout"):
    lines = [line for line in history if line["split"] == split and line.get(name) is not None]
    found = [(line["step"], baselines.level(name, line)) for line in lines]
    if known := [(step, *level) for step, level in found if level]:
      return [x[0] for x in known], [x[2] for x in known], known[0][1]
  return [], [], None


def points(history: list[dict], split: str, name: str) -> tuple[list[int], list[float]]:
  """Returns the steps and values of a metric; NaN, which leaves a gap, for None."""
  lines = [x for x in history if x["split"] == split and name in x]
  return [x["step"] for x in lines], [math.nan if x[name] is None else x[name] for x in lines]
