"""Plots of a run: metrics.jsonl as curves.png."""

import math
from collections.abc import Mapping
from pathlib import Path

from electra_jax.runtime import metrics, terminal
from electra_jax.runtime.workdir import replacing

# One colour per metric, for its training line and its held-out points.
COLOURS = ("#1f5fa8", "#d1602c", "#3a8f4d", "#8a4fa3", "#937a2a")
FRACTIONS = ("accuracy", "recall", "precision", "auc", "replaced", "copied")


def draw(path: Path, history: list[dict], references: Mapping[str, tuple[str, float]]) -> None:
  """Plots training as lines and held-out evaluations as points, and writes a PNG atomically.

  Args:
    history: lines of metrics.jsonl.
    references: {metric: (label, value)}, drawn as dashed lines.
  """
  # A canvas of its own, so that matplotlib never looks for a display.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  panels = layout(history)
  if not panels:
    return
  columns = min(len(panels), 3 if len(panels) <= 6 else 4)
  rows = math.ceil(len(panels) / columns)
  width, height = 4.6 * columns, 3.1 * rows  # inches
  figure = Figure(figsize=(width, height), dpi=130)
  FigureCanvasAgg(figure)
  axes = figure.subplots(rows, columns, squeeze=False).flatten()
  for axis, (title, names) in zip(axes, panels.items(), strict=False):
    _panel(axis, title, names, history, references)
  for axis in axes[len(panels) :]:
    axis.remove()
  # Fixed margins: a layout engine draws everything twice, half a second of each run.
  figure.subplots_adjust(
    *(0.6 / width, 0.45 / height, 1 - 0.1 / width, 1 - 0.3 / height), wspace=0.22, hspace=0.32
  )
  with replacing(path) as temporary:
    figure.savefig(temporary, format="png")


def layout(history: list[dict]) -> dict[str, list[str]]:
  """Returns {title: metric names}, one entry per panel.

  Each loss has a panel. Fractions with a common prefix share one, and single ones share another.
  Other metrics have a panel each; timings are omitted.
  """
  skipped = {"step", "split", *metrics.TIMING, "param_norm", "update_norm"}
  names = [n for n in dict.fromkeys(k for line in history for k in line) if n not in skipped]
  losses = [n for n in names if n.endswith("loss")]
  fractions = [n for n in names if n.endswith(FRACTIONS)]
  families: dict[str, list[str]] = {}
  for name in fractions:
    families.setdefault(name.split("_")[0], []).append(name)
  alone = [group[0] for group in families.values() if len(group) == 1]
  panels = {terminal.label(name): [name] for name in losses}
  panels |= {prefix: group for prefix, group in families.items() if len(group) > 1}
  if alone:
    panels[terminal.label(alone[0]) if len(alone) == 1 else "other fractions"] = alone
  rest = [n for n in names if n not in losses and n not in fractions]
  return panels | {terminal.label(name): [name] for name in rest}


def _panel(axis, title: str, names: list[str], history: list[dict], references) -> None:
  for name, colour in zip(names, COLOURS * len(names), strict=False):
    text = terminal.label(name)
    points = {split: _points(history, split, name) for split in ("train", "heldout")}
    axis.plot(*points["train"], color=colour, linewidth=1.4, label=text)
    axis.plot(
      *points["heldout"],
      color=colour,
      linestyle="none",
      marker="o",
      markersize=4.5,
      markeredgecolor="white",
      markeredgewidth=0.6,
      label=f"{text}, held-out" if len(names) == 1 else None,
    )
    if name in references:
      reference, value = references[name]
      axis.axhline(value, color="#666666", linestyle="--", linewidth=1, label=reference)
  fractions = all(name.endswith(FRACTIONS) for name in names)
  unit = "nats" if title.endswith("loss") else "fraction" if fractions else ""
  axis.set_title(title if len(names) == 1 else f"{title} (points: held-out)", fontsize=10)
  axis.set_xlabel("step", fontsize=8)
  axis.set_ylabel(unit, fontsize=8)
  axis.tick_params(labelsize=8)
  axis.grid(alpha=0.25)
  axis.spines[["top", "right"]].set_visible(False)
  if len(names) > 1 or _points(history, "heldout", names[0])[0] or names[0] in references:
    axis.legend(fontsize=7, frameon=False)


def _points(history: list[dict], split: str, name: str) -> tuple[list[int], list[float]]:
  lines = [x for x in history if x["split"] == split and name in x]
  # None (a count of 0) leaves a gap.
  return [x["step"] for x in lines], [math.nan if x[name] is None else x[name] for x in lines]
