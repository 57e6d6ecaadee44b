"""The committed experiments: their contestants, and that the pages are made of their rows."""

import importlib
import runpy
from pathlib import Path

import numpy as np
import pytest

from electra_jax.commands import cli
from electra_jax.config import compare, files, validate
from electra_jax.config.fields import load_config
from electra_jax.experiments import definition, jobs, plan

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
CONFIG = BENCHMARKS / "evidence_config.py"
RESULTS = BENCHMARKS / "results"


@pytest.mark.parametrize("arm", runpy.run_path(str(CONFIG))["ARMS"])
def test_contestants_differ_in_objective_and_generator_alone(arm):
  config, reference = files.load(CONFIG, arm), files.load(CONFIG, "bert")
  validate.check(config)
  mine, theirs = compare.flatten(config), compare.flatten(reference)
  changed = {name for name in mine if mine[name] != theirs[name]}
  own = {"optimizer.separate_optimizers", "optimizer.generator_learning_rate"}
  assert all(name.startswith(("objective.", "generator.")) for name in changed - own)


def test_the_committed_tables_are_those_of_the_rows(monkeypatch):
  monkeypatch.syspath_prepend(BENCHMARKS)
  evidence = importlib.import_module("evidence")
  text, shown, fresh = evidence.report(evidence.ROWS)
  assert (RESULTS / "evidence.md").read_text() == text
  assert len(shown) > 100 and len(fresh) == 3
  # The best by pairs and chunking on the data for choices go on, with the control.
  rows, e = jobs.Rows(evidence.ROWS).read(), evidence.get_experiment()
  found = plan.Plan(e, rows, [arm for arm in e.arms if arm != "bert-from-bert"])  # has one seed
  assert {row["arm"] for row in shown if row["budget"] == 8e13} == set(found.contestants(2))
  assert found.rate("bert", 0) == 6.4e-3 and found.rates("bert", 1) == (6.4e-3, 3.2e-3)


COMMITTED = (
  "bets",
  "bodies",
  "detection",
  "evidence",
  "learn",
  "modern_ab",
  "positions",
  "speedrun_rates",
)


@pytest.mark.parametrize("name", COMMITTED)
def test_arms_and_tasks_of_a_committed_experiment_have_valid_configurations(name):
  e = definition.load(str(BENCHMARKS / f"{name}.py"))
  for task in e.tasks.values():
    load_config(task.config, task.fields)
  assert e.control is None or e.control in e.arms
  for arm in e.arms:
    validate.check(e.configuration(arm))


@pytest.mark.parametrize("name", ["detection", "evidence", "modern_ab"])
def test_the_command_reports_committed_rows(name, tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  rows = f"--rows={RESULTS / f'{name}_rows.jsonl'}"
  cli.call("experiment", [f"benchmarks/{name}.py", f"--out={tmp_path}", rows, "--report"])
  assert (tmp_path / "results.png").stat().st_size > 10_000


@pytest.mark.parametrize(("name", "arms"), [("detection", 28), ("modern_ab", 13)])
def test_committed_rows_are_those_of_their_experiment(name, arms):
  e = definition.load(str(BENCHMARKS / f"{name}.py"))
  rows = jobs.Rows(RESULTS / f"{name}_rows.jsonl").read()
  shown = plan.reported(e, rows)
  assert {row["arm"] for row in shown} == set(e.arms) and len(e.arms) == arms
  assert len(shown) + sum("search" in row for row in rows) == len(rows)


def test_the_signal_is_the_spread_of_arms_without_the_noise_of_seeds():
  signal = runpy.run_path(str(BENCHMARKS / "signal_noise.py"))
  rng = np.random.default_rng(0)
  arms = rng.normal(70, 2.0, (3000, 1)) + rng.normal(0, 1.5, (3000, 3))
  between, within = signal["signal"](arms.tolist())
  # Four standard errors of a standard deviation of 3,000 and of 6,000 degrees of freedom.
  assert between == pytest.approx(2.0, abs=4 * 2.2 / 6000**0.5)
  assert within == pytest.approx(1.5, abs=4 * 1.5 / 12000**0.5)
  rows = [
    {"arm": str(i), "budget": 1.0, "seed": s, "rate": 1.0, "score": x}
    for i, own in enumerate(arms[:50])
    for s, x in enumerate(own.tolist())
  ]
  other = {"arm": "0", "budget": 1.0, "seed": 0, "rate": 2.0, "score": 1e9}  # of a search
  (line,) = signal["table"]([other, *rows])[2:]
  between, within = signal["signal"](arms[:50].tolist())
  assert line == (f"| score | 1e+00 | 50 | {between:.2f} | {within:.2f} | {between / within:.1f} |")


def test_an_effect_of_the_2_x_2_is_a_paired_difference_over_the_other_factor(monkeypatch):
  monkeypatch.syspath_prepend(BENCHMARKS)
  positions = importlib.import_module("positions")
  rng, rows, scores = np.random.default_rng(0), [], {}
  for arm in positions.get_experiment().arms:
    for seed in range(3 if arm == "rope-mlm" else 2):  # the third seed has no partners
      own = {
        name: float(rng.normal())
        for name in (*(f"chunk_{n}" for n in positions.SIZES), "ner", "pairs")
      }
      rows.append({"arm": arm, "budget": 5e12, "seed": seed, **own})
      scores[arm, seed] = np.mean([own[f"chunk_{n}"] for n in positions.SIZES])
  found = {(x.factor, x.measure): x for x in positions.effects(rows)}
  assert len(found) == 6
  each = [
    (
      scores["disentangled-mlm", s] - scores["rope-mlm", s]
      + scores["disentangled-detection", s] - scores["rope-detection", s]
    ) / 2
    for s in (0, 1)
  ]  # fmt: skip
  effect = found["disentangled instead of RoPE", "chunk"]
  assert (effect.seeds, effect.mean) == (2, pytest.approx(np.mean(each)))
  assert effect.error == pytest.approx(abs(each[0] - each[1]) / 2)  # of two values


def test_the_best_width_is_where_the_parabola_turns(monkeypatch):
  monkeypatch.syspath_prepend(BENCHMARKS)
  bodies = importlib.import_module("bodies")
  losses = {w: 3.0 + (np.log(w) - np.log(80)) ** 2 for w in (32, 64, 96, 128)}
  width, inside = bodies.best_width(losses)
  assert width == pytest.approx(80) and inside
  assert bodies.best_width({32: 1.0, 64: 2.0, 96: 3.0}) == (32, False)
  rows = [
    {"arm": bodies.name_of(o, n, w), "budget": b, loss: 3 + (np.log(w) - np.log(b / 1e11)) ** 2}
    for o, loss in bodies.LOSSES.items() for n, w in bodies.BODIES for b in (5e12, 8e12)
  ]  # fmt: skip
  monkeypatch.setattr(bodies, "BUDGETS", (5e12, 8e12))
  assert bodies.table(rows)[-1] == "electra_mlm: width ~ FLOPs^1.00, 1000000 at 1e+17"


def test_the_declared_mean_takes_each_arms_best_scorer_and_pairs_its_seeds(monkeypatch):
  monkeypatch.syspath_prepend(BENCHMARKS)
  bets = importlib.import_module("bets")
  chunks = {f"chunk_{size}": [80.0, 82.0] if size == 100 else 81.0 for size in bets.SIZES}
  rows = [
    {"arm": arm, "budget": 2e13, "seed": seed, "probe_pos": 75.0 + seed, **chunks, **own}
    for arm, own in {
      "bert": {"cloze_mlm": 40.0, "pairs_mlm": 99.0, "pairs_mlm_effect": 0.1},
      "electra_mlm": {
        "cloze_rtd": 20.0, "cloze_mlm_unmasked": 51.0,
        "pairs_rtd_effect": 0.176, "pairs_mlm_unmasked_effect": -0.5,
      },
    }.items()
    for seed in (0, 1)
  ]  # fmt: skip
  found = bets.declared(rows)
  by_hand = (40 / 5.5 + 76 / 2.7 + 81 / 2.2 + 0.1 / 0.038) / 4
  assert found["bert", 2e13, 1] == pytest.approx(by_hand)
  # 11 points of cloze are two units, 0.076 of the margin too: four, of four measures.
  assert bets.table(rows)[-1] == "| electra_mlm | bert | +1.000 ± 0.000 |  |"
