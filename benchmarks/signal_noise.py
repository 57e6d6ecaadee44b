"""Which measures can tell arms apart: the spread between arms over the noise within seeds.

Command:  python benchmarks/signal_noise.py FILE.jsonl [FILE.jsonl ...]
          # rows of experiments, e.g. benchmarks/results/positions_rows.jsonl
Hardware: any.

For each measure and budget, over arms with at least two seeds at one learning rate (the one with
most seeds): sigma within is the pooled standard deviation over seeds, sigma between that of the
arms' means without the noise of these means, and the signal is between / within. A measure with a
signal below 1 cannot tell arms apart with three seeds.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path

from electra_jax.experiments import jobs, summary
from electra_jax.experiments.definition import number


def signal(arms: list[list[float]]) -> tuple[float, float]:
  """Returns sigma between and within, from the values of each arm's seeds.

  >>> between, within = signal([[1.0, 3.0], [11.0, 13.0]])
  >>> round(between**2, 6), round(within**2, 6)  # 50 - 2 / 2, 2
  (49.0, 2.0)
  """
  within = statistics.fmean(statistics.variance(x) for x in arms)
  seeds = statistics.fmean(map(len, arms))
  between = statistics.variance(statistics.fmean(x) for x in arms) - within / seeds
  return max(between, 0.0) ** 0.5, within**0.5


def table(rows: list[dict]) -> list[str]:
  """Returns a markdown table of every measure at every budget."""
  lines = ["| measure | budget | arms | between | within | signal |", "|---" * 6 + "|"]
  for name in summary.measures(rows):
    for budget in sorted({row["budget"] for row in rows if row.get("budget")}):
      found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
      for row in rows:
        if row["budget"] == budget and row.get(name) is not None and "seed" in row:
          found[row["arm"]][row["rate"]].append(number(row[name]))
      arms = [max(by_rate.values(), key=len) for by_rate in found.values()]
      arms = [values for values in arms if len(values) > 1]
      if len(arms) > 2:
        between, within = signal(arms)
        ratio = f"{between / within:.1f}" if within else "-"
        cells = [name, f"{budget:.0e}", str(len(arms)), f"{between:.2f}", f"{within:.2f}", ratio]
        lines.append(f"| {' | '.join(cells)} |")
  return lines


if __name__ == "__main__":
  for file in sys.argv[1:]:
    print(f"{file}\n\n" + "\n".join(table(jobs.Rows(Path(file)).read())) + "\n")
