"""Curves of several runs on shared axes, as Bokeh figures; for seeds their mean and range."""

import colorsys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from bokeh.models import ColumnDataSource, HoverTool, Whisker
from bokeh.plotting import figure

from electra_jax.monitor import baselines, curves, quantities
from electra_jax.monitor.thinned import ends_and_extremes
from electra_jax.report.saved_run import Arm

# The colours of eight arms; the page turns the lightness around in the dark, so mid-tones are used.
COLOURS = ("#1f5fa8", "#d1602c", "#3a8f4d", "#8a4fa3", "#937a2a", "#b03060", "#2a8f8f", "#666666")
POINTS = 500  # in a line, at most: no screen shows more
TITLES = {
  "generator": "Words: the masked language model",
  "discriminator": "Detection: the discriminator",
  "rest": "Loss, norms and rates",
}


def group(name: str, names: Sequence[str]) -> str:
  """Returns the key of TITLES for a metric, judging by the names of all metrics."""
  quantity = quantities.of(name)
  if quantity.subject in ("sample", "sampled", *baselines.words(names)):
    return "generator"
  if quantity.other("recall") in names or quantity.kind in ("auc", "replaced"):
    return "discriminator"
  return "rest"


def colours(count: int) -> list[str]:
  """Returns as many colours: COLOURS, then others of all hues in three lightnesses.

  >>> colours(9)[7:]
  ['#666666', '#a11212']
  """
  more = (colorsys.hls_to_rgb(i * 0.137 % 1, (0.35, 0.5, 0.65)[i % 3], 0.8) for i in range(count))
  made = ("#" + "".join(f"{round(255 * x):02x}" for x in rgb) for rgb in more)
  return [*COLOURS, *made][:count]


def thinned(values: np.ndarray) -> np.ndarray:
  """Returns the indices of at most POINTS rows of values [n, columns], with ends and extremes."""
  count, columns = values.shape
  groups = np.arange(count) * (POINTS // (2 + 2 * columns)) // max(count, 1)
  return np.arange(count) if count <= POINTS else ends_and_extremes(values, groups)


class Panel(NamedTuple):
  """A figure with its captions."""

  title: str  # the metric and its unit
  note: str  # meaning of the dashed line, or ""
  plot: figure


def draw(arms: Sequence[Arm]) -> dict[str, dict[str, Panel]]:
  """Returns {group: {metric: panel}} of the metrics in `curves.layout`."""
  layout = curves.layout([line for arm in arms for run in arm.runs for line in run.history])
  names = [name for together in layout.values() for name in together]
  groups = {key: [name for name in names if group(name, names) == key] for key in TITLES}
  return {key: {name: panel(name, arms) for name in own} for key, own in groups.items() if own}


def spread(arm: Arm, split: str, name: str) -> dict[str, list]:
  """Returns the columns step, value (mean over seeds), low and high, at steps that all have."""
  found = [dict(zip(*curves.points(run.history, split, name), strict=True)) for run in arm.runs]
  steps = [step for step in found[0] if all(step in one for one in found)]
  values = np.array([[one[step] for step in steps] for one in found], float)
  columns = np.stack([values.mean(0), values.min(0), values.max(0)], 1)
  kept = thinned(columns if len(found) > 1 else columns[:, :1])
  names = dict(zip(("value", "low", "high"), columns[kept].T.tolist(), strict=True))
  return {"step": [steps[i] for i in kept]} | names


def panel(name: str, arms: Sequence[Arm]) -> Panel:
  """Draws one metric: a line for training, dots for evaluations, dashes for baselines.

  For several seeds these are means, in a band or with whiskers from the lowest to the highest.
  """
  tools = {"tools": "pan,xwheel_zoom,box_zoom,reset", "toolbar_location": "above"}
  plot = figure(name=name, height=250, sizing_mode="stretch_width", **tools)
  plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
  plot.toolbar.logo, plot.toolbar.autohide = None, True
  plot.grid.grid_line_alpha = 0.35
  plot.xaxis.axis_label = "step"
  pointed, coloured = [], list(zip(arms, colours(len(arms)), strict=True))
  for arm, colour in coloured:
    for split, draw_split in (("train", plot.line), ("heldout", plot.scatter)):
      columns = spread(arm, split, name)
      if not (count := len(columns["step"])):
        continue
      columns |= {"run": [arm.name] * count, "split": [split] * count}
      source = ColumnDataSource(columns, name=f"{arm.name} {split} {name}")
      between = {"source": source, "line_color": colour}
      if len(arm.runs) > 1 and split == "train":
        plot.varea("step", "low", "high", source=source, fill_color=colour, fill_alpha=0.18)
      elif len(arm.runs) > 1:
        plot.add_layout(Whisker(base="step", lower="low", upper="high", **between))
      style = {"line_width": 1.6} if split == "train" else {"size": 7}
      pointed.append(draw_split("step", "value", source=source, color=colour, **style))
  found = [
    (*curves.levels(arm.runs[0].history, name, arm.runs[0].baselines), colour)
    for arm, colour in coloured
  ]
  found = [level for level in found if level[0]]
  if len({frozenset(values) for _, values, _, _ in found}) == 1:  # one for all runs
    found = [(*max(found, key=lambda level: level[0][-1])[:3], "#777777")]
  for steps, values, _, colour in found:
    line = np.stack([steps, values], 1)
    line = line[thinned(line[:, 1:])].T.tolist()
    plot.line(*line, color=colour, line_dash="dashed", line_width=1.2)
  note = f"dashed: trivial baseline ({found[0][2]})" if found else ""
  label = quantities.label(name)
  tips = [("run", "@run, @split"), ("step", "@step{0,0}"), (label, "@value{0.0000}")]
  plot.add_tools(HoverTool(renderers=pointed, tooltips=tips, mode="mouse"))
  plot.axis.axis_label_text_font_size = "9pt"
  title = ", ".join(filter(None, (label, quantities.unit(name))))
  return Panel(title, note, plot)
