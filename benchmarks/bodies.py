"""Which body fits a budget: width and depth at equal FLOPs, for `bert` and for `electra_mlm`.

  electra-jax experiment benchmarks/bodies.py:DATA --out=DIR [--at-once=2]
      --rows=benchmarks/results/bodies_rows.jsonl
  python benchmarks/bodies.py [--rows FILE]      # the best width at each budget, and at 1e17

Data:     DATA as for benchmarks/positions.py.
Hardware: two CPU cores; the three budgets take half a minute, two and eight minutes a run on one.

Question: which width is best at a budget, for each objective? Do the speedrun's 512 at 1e17 FLOPs
lie on the line through the best widths?
Design: four layers of width 32, 64, 96 and 128, and eight of 64, in the body of positions.py with
RoPE; text, vocabulary and seeds are the same. The learning rate of each body is the best of two at
the smallest budget, by the held-out loss of the words that its main network predicts.
Measure: that loss, in nats per token: of masked words for `bert`, of replaced ones for
`electra_mlm`, whose generator grows with the body. One seed: the losses of three seeds differ by
0.01 to 0.03 nats (results/positions_rows.jsonl).
Rule, decided before the rows: the best width at a budget is the vertex of the parabola through the
three four-layer bodies around the lowest mean loss, in the logarithm of the width; the line is the
least-squares fit of its logarithm to that of the FLOPs. Where the lowest loss is that of the
narrowest or widest body, it bounds the best width, and the budget has no point on the line.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import machine
import numpy as np
from positions import BODY

from electra_jax.experiments import jobs, plan
from electra_jax.experiments.definition import Arm, Budget, Experiment

ROWS = Path(__file__).resolve().parent / "results" / "bodies_rows.jsonl"
BUDGETS, RATES = (1e12, 5e12, 2e13), (3.2e-3, 6.4e-3)
BODIES = {(4, 32), (4, 64), (4, 96), (4, 128), (8, 64)}  # layers, width
# objective -> the loss of the words that its main network predicts
LOSSES = {"bert": "mlm_loss", "electra_mlm": "replace_mlm_loss"}
SPEEDRUN = 1e17  # FLOPs


def body(layers: int, width: int) -> dict:
  """Returns the fields of a body."""
  return {
    "model.num_layers": layers,
    "model.hidden_size": width,
    "model.embedding_size": width,
    "model.num_heads": max(1, width // 32),
    "model.ffn_size": 3 * width,
  }


def name_of(objective: str, layers: int, width: int) -> str:
  """Returns the name of an arm."""
  return f"{objective} {layers}x{width}"


def get_experiment(arg: str = "data") -> Experiment:
  """Returns the experiment; `arg` is the folder of the data."""
  data = Path(arg)
  return Experiment(
    arms={
      name_of(objective, *size): Arm(f"{objective}:quickstart", body(*size), RATES)
      for objective in LOSSES
      for size in sorted(BODIES)
    },
    budgets=(BUDGETS[0], *(Budget(spend, factors=(1.0,)) for spend in BUDGETS[1:])),
    seeds=1,
    fields=BODY | {"data.dir": str(data / "shards"), "data.sources": f"text:{data / 'text.txt'}"},
    heldout=("mlm_loss", "replace_mlm_loss", "rtd_auc", "unigram_auc"),
  )


def best_width(losses: Mapping[int, float]) -> tuple[float, bool]:
  """Returns the width at the vertex of the parabola, and whether widths around it were tried.

  >>> width, inside = best_width({32: 2.0, 64: 1.0, 128: 2.0})
  >>> round(width), inside
  (64, True)
  >>> best_width({32: 1.0, 64: 2.0, 128: 3.0})
  (32, False)
  """
  widths = sorted(losses)
  at = widths.index(min(losses, key=losses.get))
  if at in (0, len(widths) - 1):
    return widths[at], False
  near = widths[at - 1 : at + 2]
  a, b, _ = np.polyfit(np.log(near), [losses[w] for w in near], 2)
  return math.exp(-b / (2 * a)), True


def table(rows: Sequence[Mapping]) -> list[str]:
  """Returns a markdown table of losses and best widths, and the lines through the latter."""
  sizes = sorted(BODIES)
  lines = [f"| | FLOPs | {' | '.join(f'{n} x {w}' for n, w in sizes)} | best width |"]
  lines += ["|---" * (3 + len(sizes)) + "|"]
  fits = []
  for objective, loss in LOSSES.items():
    points = []
    for budget in BUDGETS:
      found = {
        size: [
          row[loss]
          for row in rows
          if (row["arm"], row["budget"]) == (name_of(objective, *size), budget)
        ]
        for size in sizes
      }
      if not all(found.values()):
        continue
      means = {size: statistics.fmean(x) for size, x in found.items()}
      width, inside = best_width({w: x for (n, w), x in means.items() if n == 4})
      points += [(budget, width)] if inside else []
      bound = "" if inside else "at the end: "
      cells = [f"{x:.3f}" for x in means.values()] + [f"{bound}{width:.0f}"]
      lines.append(f"| {objective} | {budget:.0e} | {' | '.join(cells)} |")
    if len(points) > 1:
      slope, start = np.polyfit(*np.log(points).T, 1)
      width = math.exp(start + slope * math.log(SPEEDRUN))
      fits.append(f"{objective}: width ~ FLOPs^{slope:.2f}, {width:.0f} at {SPEEDRUN:.0e}")
  return [*lines, "", *fits]


def main(rows: Path = ROWS) -> None:
  """
  --rows  the rows of the experiment
  """
  print("\n".join(table(plan.reported(get_experiment(), jobs.Rows(rows).read()))))


if __name__ == "__main__":
  machine.start(main)
