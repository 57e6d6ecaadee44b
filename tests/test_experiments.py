"""Experiments: what is run, what is left to run, and the table against NumPy."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from electra_jax.commands import cli
from electra_jax.core.flops import step_flops
from electra_jax.experiments import definition, jobs, summary
from electra_jax.experiments.definition import Arm, Budget, Experiment
from electra_jax.pretrain.run import spec_without_data

TINY = """
from electra_jax.experiments.definition import Arm, Experiment

FIELDS = {{
  "data.dir": {data!r}, "data.seq_length": 16, "data.vocab_size": 45, "model.max_positions": 16,
  "model.hidden_size": 16, "model.num_layers": 1, "model.num_heads": 2, "model.ffn_size": 32,
  "model.embedding_size": 16, "model.global_every": 1, "train.batch_size": 16,
  "eval.batch_size": 16, "eval.max_examples": 16, "eval.every_steps": 0, "log.trackers": "",
  "objective.temperature_schedule": "", "generator.width_multiplier": 0.5,
}}


def get_experiment(arg=None):
  return Experiment(
    arms={{
      "bert": Arm("bert:quickstart", rates=(1e-2, 1e-9)),
      "electra": Arm("quickstart", rate_of="bert", after="bert"),
    }},
    control="bert", budgets=(8,), unit="steps", seeds=1, heldout=("mlm_loss", "rtd_auc"),
    fields=FIELDS, detect={data!r},
  )
"""


@pytest.mark.long
def test_arms_are_trained_with_the_rate_that_was_best_and_only_once(
  tiny_shards, tmp_path, monkeypatch, capsys
):
  monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
  monkeypatch.chdir(tmp_path)
  Path("mine.py").write_text(TINY.format(data=str(tiny_shards)))
  cli.call("experiment", ["mine.py", "--out=out", "--only=bert", "--at-once=2"])
  rows = jobs.json_lines(Path("out/rows.jsonl"))
  searched = {row["rate"]: row["mlm_loss"] for row in rows if "search" in row}
  assert searched[1e-2] < searched[1e-9]  # the second learns nothing
  (row,) = (row for row in rows if row.get("arm") == "bert")
  assert (row["rate"], row["steps"], row["mlm_loss"]) == (1e-2, 8, searched[1e-2])
  assert "detect" not in row and row["rtd_auc"] is None  # BERT does not detect
  cli.call("experiment", ["mine.py", "--out=out"])
  bert, electra = (row for row in jobs.json_lines(Path("out/rows.jsonl")) if "arm" in row)
  assert bert == row and electra["rate"] == 1e-2 and electra["steps"] == 4
  assert 0 < electra["detect"] < 1 and electra["detect"] != electra["rtd_auc"]
  # Half of the steps are of BERT.
  experiment = definition.load("mine.py")
  costs = {
    arm: step_flops(spec_without_data(experiment.configuration(arm)), 16, 16)
    for arm in experiment.arms
  }
  assert electra["flops"] == pytest.approx(4 * costs["bert"] + 4 * costs["electra"])
  started = json.loads(Path("out/runs/electra-8-0.01-0/config.json").read_text())["init_from"]
  assert started == "out/runs/bert-4-0.01-0"
  # Nothing is left: no program is started.
  commands = Path("out/commands.jsonl").read_text()
  capsys.readouterr()
  cli.call("experiment", ["mine.py", "--out=out", "--part=1/2"])
  assert Path("out/commands.jsonl").read_text() == commands
  assert capsys.readouterr().out.startswith("## 8 steps\n\n| arm | rate | steps | seeds | mlm_loss")
  assert Path("out/results.png").stat().st_size > 10_000
  cli.call("experiment", ["mine.py", "--out=out", "--report"])
  assert Path("out/results.md").read_text().count("| bert | 0.01 | 8 | 1 |") == 1


def made(**fields):
  return Experiment(**{"arms": {"a": Arm("small"), "b": Arm("small")}, "budgets": (1,)} | fields)


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
  few = [row for row in rows if (row["arm"], row["seed"]) != ("b", 2)]
  assert summary.paired(summary.values(few, "b", 1, "loss"), summary.values(few, "a", 1, "loss"))[
    0
  ] == pytest.approx((y - x)[:2].mean())


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"unit": "hours"}, "unit must be one of flops, steps, minutes, got 'hours'"),
    ({"arms": {}}, "needs an arm"),
    ({"budgets": (0,)}, "budgets above 0"),
    ({"control": "c"}, "unknown control 'c'; arms: a, b"),
    ({"arms": {"a": Arm("small", after="x")}}, "arm 'a' refers to 'x'; the other arms: none"),
    ({"arms": {"a": Arm("small", rate_of="a")}}, "arm 'a' refers to 'a'; the other arms: none"),
    (
      {"arms": {x: Arm("small", after=y) for x, y in ("ab", "ba")}},
      "'b', which starts from another",
    ),
    ({"arms": {"a": Arm("small", share=1.0)}}, "share must be between 0 and 1"),
    ({"arms": {"a": Arm("small", rates=(1,))}, "unit": "minutes"}, "at equal flops or steps"),
  ],
)
def test_a_definition_that_makes_no_sense_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    made(**fields)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("def get_experiment(:\n", "mine.py defines no experiment: SyntaxError"),
    ("x = 1\n", "mine.py defines no experiment: AttributeError"),
    ("def get_experiment():\n  return 3\n", "must return an Experiment, got 3"),
    (
      "from electra_jax.experiments.definition import Arm, Experiment\n"
      "get_experiment = lambda: Experiment({'a': Arm('small', {'train.step': 1})}, (1,))\n",
      "unknown field config.train.step; did you mean",
    ),
  ],
)
def test_a_definition_file_that_cannot_be_read_is_named(tmp_path, text, message):
  (tmp_path / "mine.py").write_text(text)
  with pytest.raises(ValueError, match=message):
    definition.load(str(tmp_path / "mine.py"))


def test_configurations_are_compared_at_the_first_ones_flops():
  fields = {"train.steps": 100}
  found = definition.of_configurations(["small", "bert:small"], "flops", fields, 2)
  config = found.configuration("small")
  step = step_flops(spec_without_data(config), config.train.batch_size, config.data.seq_length)
  assert found.budgets == (Budget(100 * step),) and found.control == "small" and found.seeds == 2
  with pytest.raises(ValueError, match="two arms have the same name"):
    definition.of_configurations(["small", "small"], "flops", fields, 2)
  with pytest.raises(ValueError, match="no train.minutes"):
    definition.of_configurations(["small", "bert:small"], "minutes", fields, 2)


def test_flops_takes_fields_of_both_configurations(capsys):
  config, match = ["--config=small.py", "--config.train.steps=10"], ["--match=small.py"]
  cli.call("flops", [*config, *match, "--match.train.steps=70"])
  assert "70 steps cost as much as all of small.py" in capsys.readouterr().out
