"""Rows of `speedrun.py` as a file, as the table of docs/speedrun.md and as its picture."""

import json
import math
import os
import statistics
from pathlib import Path

import machine
from resumable import ROOT, json_lines

PAGE, PICTURE = ROOT / "docs" / "speedrun.md", ROOT / "docs" / "speedrun.png"
KEY = ("arm", "seed", "device", "model", "minutes")
NAMES = {
  "cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "rte": "RTE",
  "chunk": "chunking",
}  # fmt: skip
FIVE = tuple(NAMES)[:5]
CURVE = ("step", "mlm_loss", "rtd_auc")  # of the evaluations while it trains
# Rows that are wanted: arm, seed.
WANTED = (
  ("electra", 0), ("bert", 0), ("small", 0), ("bert_small", 0), ("electra", 1), ("bert", 1),
)  # fmt: skip


def keep(path: Path, row: dict) -> None:
  """Adds a row to a file, in place of an earlier one of the same run."""
  rows = [x for x in json_lines(path) if any(x.get(k) != row.get(k) for k in KEY)]
  draft = path.with_suffix(".tmp")
  draft.write_text("".join(json.dumps(x) + "\n" for x in [*rows, row]), "utf-8")
  os.replace(draft, path)


def spread(values: list[float]) -> str:
  """Returns the mean of some seeds and their standard deviation.

  >>> spread([70.0, 72.0]), spread([70.0]), spread([])
  ('71.0 ± 1.4', '70.0', '')
  """
  if not values:
    return ""
  sigma = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
  return f"{statistics.fmean(values):.1f}{sigma}"


def mean_of_five(tasks: dict[str, list[float]]) -> str:
  """Returns the mean of the five tasks, "" unless all are there.

  If each has seeds, it has the standard deviation for one seed of each.

  >>> mean_of_five({name: [70.0, 80.0] for name in FIVE})
  '75.0 ± 3.2'
  """
  if not {*FIVE} <= {*tasks}:
    return ""
  seeds = [tasks[name] for name in FIVE]
  mean = f"{statistics.fmean(map(statistics.fmean, seeds)):.1f}"
  if min(map(len, seeds)) < 2:
    return mean
  return f"{mean} ± {math.hypot(*map(statistics.stdev, seeds)) / len(FIVE):.1f}"


def table(rows: list[dict]) -> list[str]:
  """Returns the rows as a table in markdown, each followed by its fresh weights."""
  heads = ["run", "device", "steps", "FLOPs", "words, nats", "pairs, %", "mean of five"]
  lines = ["| " + " | ".join([*heads, *NAMES.values()]) + " |"]
  lines.append("|---" * (len(heads) + len(NAMES)) + "|")
  for row in rows:
    loss = row.get("heldout", {}).get("mlm_loss")
    pairs = row.get("pairs", {}).get("all", {}).get("accuracy")
    cells = [
      f"{row['arm']}, seed {row['seed']}",
      row["device"],
      f"{row['steps']:,}" if "steps" in row else "",
      f"{row['flops']:.1e}" if "flops" in row else "",
      "" if loss is None else f"{loss:.2f}",
      "" if pairs is None else f"{100 * pairs:.1f}",
    ]
    for first, tasks in ((cells, row["tasks"]), (["its fresh weights"], row["control"])):
      first = first + [""] * (6 - len(first)) + [mean_of_five(tasks)]
      scores = [spread(tasks.get(name, [])) for name in NAMES]
      if tasks or first[0] != "its fresh weights":
        lines.append(f"| {' | '.join(first + scores)} |")
  return lines


def draw(path: Path, rows: list[dict]) -> None:
  """Draws the held-out losses of words, and the scores of each task with the seeds' deviations."""
  from electra_jax.monitor import curves

  figure = curves.new_figure(12, 4, layout="constrained")
  left, right = figure.subplots(1, 2, width_ratios=(1, 2))
  series = {}
  for row in rows:
    name = f"{row['arm']}, seed {row['seed']}"
    series[name] = row["tasks"]
    if points := [x for x in row.get("curve", []) if x["step"] and "mlm_loss" in x]:
      left.plot([x["step"] for x in points], [x["mlm_loss"] for x in points], "o-", label=name)
  series |= {f"{row['arm']}, fresh weights": row["control"] for row in rows if row["control"]}
  names = [name for name in NAMES if any(name in tasks for tasks in series.values())]
  width = 0.8 / max(len(series), 1)
  for i, (label, tasks) in enumerate(series.items()):
    known = {j: tasks[name] for j, name in enumerate(names) if name in tasks}
    right.bar(
      [j + (i - (len(series) - 1) / 2) * width for j in known],
      [statistics.fmean(values) for values in known.values()],
      width,
      yerr=[statistics.stdev(v) if len(v) > 1 else 0 for v in known.values()],
      label=label,
    )
  left.set(xlabel="step", ylabel="nats", title="masked LM, held-out loss")
  right.set(ylabel="%", title="main metric of each task")
  right.set_xticks(range(len(names)), [NAMES[name] for name in names])
  for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
      axes.legend(frameon=False, fontsize=8)
  curves.save_figure(path, figure)


def write(path: Path) -> None:
  """Writes the table of docs/speedrun.md, with the rows that are missing, and the picture."""
  rows = json_lines(path)
  done = {(row["arm"], row["seed"]) for row in rows}
  lines = table(rows) if rows else []
  lines += [""] * bool(rows)
  lines += [f"- {arm}, seed {seed}: not run" for arm, seed in WANTED if (arm, seed) not in done]
  if rows:
    draw(PICTURE, rows)
    lines = ["![scores by task](speedrun.png)", "", *lines]
  machine.write_between(PAGE, "speedrun", "\n".join(lines) + "\n")
