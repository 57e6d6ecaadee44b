"""Draws docs/quickstart.png, the README's picture, from the four seeds in bands.json.

python docs/picture.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np

DOCS = Path(__file__).resolve().parent
BANDS = DOCS.parent / "benchmarks" / "results" / "bands.json"
CURVES = (  # metric, factor, title, baseline, its label
  # 15 % of the positions to predict stay visible (Clark et al. 2020, as in their code).
  ("mlm_accuracy", 100, "Tokens filled in correctly, %", 15, "copying visible tokens"),
  ("rtd_auc", 1, "Generator's replacements found, AUC", 0.5, "chance"),
  ("unigram_auc", 1, "Random replacements found, AUC", 0.5, "chance"),
)


def main() -> None:
  """Runs from the command line."""
  runs = [run for run in json.loads(BANDS.read_text("utf-8"))["judged"] if not run["fault"]]
  heldout = [[line for line in run["lines"] if line["split"] == "heldout"] for run in runs]
  steps = [line["step"] for line in heldout[0]]
  figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
  axes[1].sharey(axes[2])
  for axis, (metric, factor, title, baseline, label) in zip(axes, CURVES, strict=True):
    values = factor * np.array([[line[metric] for line in lines] for lines in heldout])
    axis.fill_between(steps, values.min(0), values.max(0), color="#1f5fa8", alpha=0.25, lw=0)
    axis.plot(steps, values.mean(0), "o-", color="#1f5fa8", lw=2.2)
    axis.axhline(baseline, color="#777777", ls="--")
    axis.annotate(label, (steps[-1], baseline), (0, 4), textcoords="offset points", ha="right")
    axis.set_title(title, fontsize=12, loc="left")
    axis.set_xlabel("training step")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
  figure.savefig(DOCS / "quickstart.png", dpi=150)


if __name__ == "__main__":
  main()
