"""Tables and pictures of experiments: spread, paired differences, searches."""

import dataclasses
import types

import numpy as np
import pytest
from scipy import stats
from test_experiments import halving, made

from electra_jax.experiments import summary
from electra_jax.experiments.definition import Arm


def test_the_report_shows_the_rates_that_were_searched():
  e = halving(choose="mlm_loss")
  rows = [
    {"search": arm, "budget": 1.0, "rate": rate, "mlm_loss": loss}
    for arm, losses in (("bert", (3.0, 2.5)), ("electra", (4.0,)))
    for rate, loss in zip((0.1, 0.2), losses, strict=False)
  ]
  assert summary.search_table(e, rows, 0) == [
    "| mlm_loss at rate | 0.1 | 0.2 |",
    "|---|---|---|",
    "| bert | 3.000 | **2.500** |",
    "| electra | **4.000** |  |",
  ]
  three = dataclasses.replace(e, arms={"bert": Arm("small", rates=(0.1, 0.2, 0.4))})
  more = [*rows, {"search": "bert", "budget": 1.0, "rate": 0.4, "mlm_loss": 2.6}]
  assert summary.search_table(three, more, 0)[2:] == ["| bert | 3.000 | **2.500** | 2.600 |"]
  more[-1] = {**more[-1], "diverged": True}
  assert summary.search_table(three, more, 0)[2] == "| bert | 3.000 | **2.500** | diverged |"
  more[-1] = {**more[-1], "mlm_loss": 2.4, "diverged": False}
  told = "The best rate is the lowest or highest one tried: bert."
  assert summary.search_table(three, more, 0)[3:] == ["", told]
  assert summary.search_table(three, [], 0) == [] == summary.search_table(made(), rows, 0)


def test_the_table_has_spread_and_paired_difference():
  rng = np.random.default_rng(0)
  shared, own = rng.normal(size=3), rng.normal(scale=0.1, size=(2, 3))
  rows = [
    {"arm": arm, "budget": 1, "seed": s, "rate": 1e-3, "steps": 10, "flops": 1.0, "loss": x}
    for arm, noise in zip("ab", own, strict=True)
    for s, x in enumerate(shared + noise)
  ]
  _, _, a, b = summary.table(made(control="a"), rows, 1)
  x, y = (shared + noise for noise in own)
  assert a == f"| a | 0.001 | 10 | 3 | {x.mean():.3f} ± {x.std(ddof=1):.3f} |"
  assert b.endswith(f" ({(y - x).mean():+.3f} ± {stats.sem(y - x):.3f}) |")
  # Of seeds that both have; a measure that an arm lacks is not compared.
  gone = {"arm": "b", "budget": 1, "seed": 3, "diverged": True}
  assert summary.table(made(control="a"), [*rows, gone], 1)[3] == b.replace("3", "3, 1 diverged", 1)
  few = [row for row in rows if (row["arm"], row["seed"]) != ("b", 2)]
  difference, *_ = summary.paired(*(summary.values(few, arm, 1, "loss") for arm in "ba"))
  assert difference == pytest.approx((y - x)[:2].mean())


@pytest.mark.parametrize("budgets", [(1e15, 1e16), (1e15,)])
def test_a_picture_has_flops_or_arms_below_its_points(budgets, monkeypatch, tmp_path):
  texts = []
  spends = [types.SimpleNamespace(spend=x) for x in budgets]
  experiment = types.SimpleNamespace(arms=["$a", "b"], budgets=spends)
  rows = [
    {"arm": arm, "budget": x, "flops": x, "mlm_loss": 3.0}
    for arm in experiment.arms
    for x in budgets
  ]

  def draw(path, figure):
    figure.draw_without_rendering()
    texts.extend(x.get_text() for x in figure.axes[0].get_xticklabels())
    if legend := figure.axes[0].get_legend():
      texts.extend(x.get_text() for x in legend.get_texts())

  monkeypatch.setattr(summary.curves, "save_figure", draw)
  summary.draw(tmp_path / "x.png", experiment, rows)
  if len(budgets) == 1:
    assert texts == ["$a", "b"]
  else:
    assert {"1e+15", "1e+16", "$a"} <= set(texts) and not any("mathdefault" in x for x in texts)
