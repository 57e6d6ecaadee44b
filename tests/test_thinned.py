"""Long histories are thinned before they are drawn; many runs have distinct colours."""

import dataclasses

import numpy as np
from test_report import GOLDEN

from electra_jax.monitor import thinned
from electra_jax.report import figures, saved_run


def test_a_long_history_keeps_its_extremes_and_a_short_one_every_line(monkeypatch):
  monkeypatch.chdir(GOLDEN)  # where the run finds its shards
  run = saved_run.read(GOLDEN / "run", "run")
  rng = np.random.default_rng(0)
  values = rng.normal(size=20_000)
  values[[7_777, 13_131]] = 40.0, -40.0
  many = [{"split": "train", "step": i + 1, "mlm_loss": float(x)} for i, x in enumerate(values)]
  kept = thinned.Thinned(many).lines()
  assert thinned.Thinned(many).lines() == kept and len(kept) <= thinned.LINES
  steps = [x["step"] for x in kept]
  assert steps == sorted(set(steps)) and {1, 7_778, 13_132, 20_000} <= {*steps}
  drawn = figures.spread(
    saved_run.Arm("a", (dataclasses.replace(run, history=kept),)), "train", "mlm_loss"
  )
  assert {1, 7_778, 13_132, 20_000} <= {*drawn["step"]} and len(drawn["step"]) <= figures.POINTS
  assert drawn["value"] == [values[step - 1] for step in drawn["step"]]
  short = many[: thinned.LINES]  # whole
  assert thinned.Thinned(short).lines() == short
  few = run.history * 3
  assert thinned.Thinned(few).lines() == few


def test_ends_and_extremes_equal_a_search_by_loops():
  rng = np.random.default_rng(1)
  for _ in range(50):
    values = rng.integers(-3, 4, (40, 3)).astype(float)
    values[rng.random(values.shape) < 0.3] = np.nan
    groups = np.sort(rng.integers(0, 6, 40))
    expected = set()
    for group in set(groups):
      rows = np.flatnonzero(groups == group)
      for column in values.T:
        known = [i for i in rows if not np.isnan(column[i])]
        if known:
          expected |= {known[0], known[-1], min(known, key=column.__getitem__)}
          expected.add(max(known, key=column.__getitem__))
    assert thinned.ends_and_extremes(values, groups).tolist() == sorted(expected)


def test_fifty_runs_have_fifty_colours():
  found = [np.array([int(x[i : i + 2], 16) for i in (1, 3, 5)]) for x in figures.colours(50)]
  assert figures.colours(8) == list(figures.COLOURS)
  apart = min(np.abs(a - b).max() for i, a in enumerate(found) for b in found[:i])
  assert apart >= 20, apart  # of 255, in one of red, green and blue
