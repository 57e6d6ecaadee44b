"""Experiments: what is run, what is left to run, and the table against NumPy."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from electra_jax.commands import cli
from electra_jax.core.flops import step_flops
from electra_jax.experiments import definition, jobs, plan
from electra_jax.experiments.definition import Arm, Budget, Experiment, Task
from electra_jax.pretrain.run import spec_without_data

TINY = """
from electra_jax.experiments.definition import Arm, Experiment

FIELDS = {{
  "data.dir": {data!r}, "data.seq_length": 16, "data.vocab_size": 45, "model.max_positions": 16,
  "model.hidden_size": 16, "model.num_layers": 1, "model.num_heads": 2, "model.ffn_size": 32,
  "generator.depth_multiplier": 1.0,
  "model.embedding_size": 16, "model.global_every": 1, "train.batch_size": 16,
  "eval.batch_size": 16, "eval.max_examples": 16, "eval.every_steps": 0, "log.trackers": "",
  "objective.temperature_schedule": "", "generator.width_multiplier": 0.5,
}}


def get_experiment(arg=None):
  return Experiment(
    arms={{
      "bert": Arm("bert:quickstart", rates=(1e-2, 1e-9, 1e30)),
      "electra": Arm("quickstart", rate_of="bert", after="bert"),
    }},
    control="bert", budgets=(8,), unit="steps", seeds=1, heldout=("mlm_loss", "rtd_auc"),
    fields=FIELDS, cloze=("gaps.jsonl", 2), detect={data!r},
  )
"""


@pytest.mark.long
def test_arms_are_trained_with_the_rate_that_was_best_and_only_once(
  tiny_shards, tmp_path, monkeypatch, capsys
):
  monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
  monkeypatch.chdir(tmp_path)
  Path("mine.py").write_text(TINY.format(data=str(tiny_shards)), "utf-8")
  gap = {"left": "a b ", "right": " d", "words": ["c", "e"]}
  Path("gaps.jsonl").write_text((json.dumps(gap) + "\n") * 3, "utf-8")
  cli.call("experiment", ["mine.py", "--out=out", "--only=bert", "--at-once=2"])
  rows = jobs.json_lines(Path("out/rows.jsonl"))
  searched = {row["rate"]: row.get("mlm_loss") for row in rows if "search" in row}
  assert searched[1e-2] < searched[1e-9]  # the second learns nothing
  diverged = {"search": "bert", "budget": 8, "rate": 1e30, "diverged": True}
  assert diverged in rows
  (row,) = (row for row in rows if row.get("arm") == "bert")
  assert (row["rate"], row["steps"], row["mlm_loss"]) == (1e-2, 8, searched[1e-2])
  assert "detect" not in row and row["rtd_auc"] is None  # BERT does not detect
  assert row["cloze"] in (0, 100)  # both gaps are equal
  cli.call("experiment", ["mine.py", "--out=out"])
  bert, electra = (row for row in jobs.json_lines(Path("out/rows.jsonl")) if "arm" in row)
  assert bert == row and electra["rate"] == 1e-2 and electra["steps"] == 4
  assert 0 < electra["detect"] < 1 and electra["detect"] != electra["rtd_auc"]
  # Half of the steps are of BERT.
  experiment = definition.load("mine.py")
  configs = map(experiment.configuration, ("bert", "electra"))
  costs = [step_flops(spec_without_data(config), 16, 16) for config in configs]
  assert electra["flops"] == pytest.approx(4 * sum(costs))
  started = json.loads(Path("out/runs/electra-8-0.01-0/config.json").read_text("utf-8"))[
    "init_from"
  ]
  assert started == "out/runs/bert-4-0.01-0"
  # Nothing is left: no program is started.
  commands = Path("out/commands.jsonl").read_text("utf-8")
  capsys.readouterr()
  cli.call("experiment", ["mine.py", "--out=out", "--part=1/2"])
  assert Path("out/commands.jsonl").read_text("utf-8") == commands
  assert capsys.readouterr().out.startswith("## 8 steps\n\n| arm | rate | steps | seeds | mlm_loss")
  assert Path("out/results.png").stat().st_size > 10_000
  cli.call("experiment", ["mine.py", "--out=out", "--report"])
  assert Path("out/results.md").read_text("utf-8").count("| bert | 0.01 | 8 | 1 |") == 1


WORDS = ["a", "ab", "abc", "cab", "bad", "dab", "cad", "bead"]
MEASURED = """
from electra_jax.experiments.definition import Arm, Budget, Experiment, Pairs, Task

{fields}
CHUNK = {{"data.train": "train.txt", "data.dev": "dev.txt", "data.test": "test.txt"}}
CHUNK |= {{"data.max_length": 16, "train.epochs": 1.0, "optimizer.learning_rate": 1e-3}}


def scorers_of(config):
  return ("mlm",) if config.objective.name == "bert" else ("mlm", "mlm_unmasked")


def get_experiment(arg=None):
  return Experiment(
    arms={{
      "bert": Arm("bert:quickstart", rates=(1e-2, 1e-9)),
      "tt": Arm("electra_mlm:quickstart", rate_of="bert", after="bert", same_rate=True),
      "fresh": Arm(untrained="bert"),
    }},
    control="bert", budgets=(8, Budget(12, best=0, factors=(0.5,), without=("chunk",))),
    unit="steps", seeds=1, fields=FIELDS, choose="chunk_choices",
    pairs=Pairs("pairs.jsonl", 30, scorers_of, every=3),
    tasks={{
      "chunk": Task(
        "finetune/tagging:chunk", CHUNK, {{"chunk_choices": "dev", "chunk": "test"}}, seeds=2
      )
    }},
  )
"""


@pytest.mark.long
def test_networks_are_measured_and_a_row_needs_no_folder(tiny_shards, tmp_path, monkeypatch):
  monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
  monkeypatch.chdir(tmp_path)
  rng = random.Random(0)
  fields = TINY[TINY.index("FIELDS") : TINY.index("def get")].format(data=str(tiny_shards)).strip()
  Path("mine.py").write_text(MEASURED.format(fields=fields), "utf-8")
  for split in ("train", "dev", "test"):
    tagged = ("\n".join(f"{w} X B-{w[0]}" for w in rng.choices(WORDS, k=5)) for _ in range(24))
    Path(f"{split}.txt").write_text("\n\n".join(tagged) + "\n", "utf-8")
  sentences = [[" ".join(rng.choices(WORDS, k=4)) for _ in range(2)] for _ in range(60)]
  pairs = (
    {"sentence_good": a, "sentence_bad": b, "UID": f"p{i % 5}"}
    for i, (a, b) in enumerate(sentences)
  )
  Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), "utf-8")
  cli.call("experiment", ["mine.py", "--out=out", "--rows=rows.jsonl", "--at-once=2"])
  rows = jobs.json_lines(Path("rows.jsonl"))
  keys = [(row["arm"], row["budget"], row.get("rate")) for row in rows]
  searched = [row for row in rows if (row["arm"], row["budget"]) == ("bert", 8)]
  best = max(searched, key=lambda row: definition.number(row["chunk_choices"]))["rate"]
  assert sorted(keys, key=str) == sorted(
    [("bert", 8, 1e-2), ("bert", 8, 1e-9), ("tt", 8, best), ("fresh", 0.0, None)]
    + [("bert", 12, best / 2)],
    key=str,
  )
  for row in rows:
    assert ("chunk" in row) == (row["budget"] != 12)
    measured = {"bert": {"pairs_mlm_choices"}, "tt": {"pairs_mlm_choices", "pairs_mlm_unmasked"}}
    assert measured.get(row["arm"], set()) == {
      x for x in row if x in ("pairs_mlm_choices", "pairs_mlm_unmasked")
    }
  assert all(len(row["chunk"]) == len(row["chunk_choices"]) == 2 for row in rows if "chunk" in row)
  # By hand: every third of the paradigms, and the others.
  found = json.loads(Path("out/pairs/bert-8-0.01-0-mlm/pairs.json").read_text("utf-8"))["paradigms"]
  count = np.array([x["pairs"] for x in found.values()])
  right = count * [x["accuracy"] for x in found.values()]
  (row,) = (row for row in searched if row["rate"] == 1e-2)
  for name, at in (("pairs_mlm_choices", [0, 3]), ("pairs_mlm", [1, 2, 4])):
    assert row[name] == pytest.approx(100 * right[at].sum() / count[at].sum())
  # Another machine has the rows, without what is missing, and no folder.
  Path("rows.jsonl").write_text(
    "".join(json.dumps(x) + "\n" for x in rows if x["arm"] != "fresh"), "utf-8"
  )
  shutil.rmtree("out")
  cli.call("experiment", ["mine.py", "--out=out", "--rows=rows.jsonl"])
  started = [x["job"] for x in jobs.json_lines(Path("out/commands.jsonl"))]
  assert started == [f"train/bert-8-{best:g}-0", "finetune/fresh-0-0-chunk"]


A = Arm("small")


def made(**fields):
  return Experiment(**{"arms": {"a": A, "b": A}, "budgets": (1,)} | fields)


def row_of(arm, budget, rate, seed=0, **more):
  return {"arm": arm, "budget": budget, "rate": rate, "seed": seed} | more


def halving(**fields):
  arms = {name: Arm("small", rates=(0.1, 0.2)) for name in ("bert", "electra", "metro")}
  arms |= {"tied": Arm("small", rate_of="electra"), "fresh": Arm(untrained="bert")}
  second = Budget(2.0, best=1, factors=(1.0, 0.5), seeds=2)
  more = {"arms": arms, "budgets": (1.0, second), "control": "bert", "choose": "pairs", "seeds": 1}
  return made(**(more | {"pairs": "x"} | fields))


def test_rates_and_the_best_arms_go_on_to_the_next_budget():
  e = halving()
  rows = [
    row_of(arm, 1.0, rate, pairs=value)
    for arm, rate, value in [
      ("bert", 0.1, 80), ("bert", 0.2, 85), ("electra", 0.1, 90), ("electra", 0.2, 70),
      ("metro", 0.1, 60), ("metro", 0.2, 75), ("tied", 0.1, 88), ("fresh", 0.0, 50),
    ]
  ]  # fmt: skip
  found = plan.Plan(e, rows, list(e.arms))
  assert list(found.searches(0))[:2] == [("bert", 0.1), ("bert", 0.2)]
  assert len(list(found.searches(0))) == 6  # `tied` searches nothing
  assert [found.rate(arm, 0) for arm in e.arms if arm != "fresh"] == [0.2, 0.1, 0.2, 0.1]
  assert found.contestants(1) == ["bert", "electra"]
  assert list(found.searches(1)) == [
    ("bert", 0.2), ("bert", 0.1), ("electra", 0.1), ("electra", 0.05)
  ]  # fmt: skip
  with pytest.raises(plan.WaitingError):
    found.rate("bert", 1)
  with pytest.raises(plan.WaitingError):
    found.places(1)
  assert [place.arm for place in found.places(0)] == ["bert", "electra", "metro", "tied", "fresh"]
  more = [row_of("bert", 2.0, rate, pairs=value) for rate, value in ((0.2, 1), (0.1, 3))]
  assert plan.Plan(e, rows + more, ["bert", "fresh"]).places(1) == [
    plan.Place("bert", 2.0, seed, 0.1) for seed in (0, 1)
  ]
  # Only rows at the best rate are reported, and none of an arm whose search goes on.
  shown = plan.reported(e, [*rows, *more[:1]])
  assert [(row["arm"], row["rate"]) for row in shown] == [
    ("bert", 0.2), ("electra", 0.1), ("metro", 0.2), ("tied", 0.1), ("fresh", 0.0)
  ]  # fmt: skip
  # Nor of one without its first seed.
  assert plan.reported(e, [*rows, *more, row_of("bert", 2.0, 0.1, 1, pairs=3)])[-1]["seed"] == 1
  assert not plan.reported(made(), [row_of("a", 1, 0.1, 1, mlm_loss=3.0)])


def test_fresh_weights_alone_need_the_search_of_the_arm_whose_shape_they_have():
  e = halving()
  assert list(plan.Plan(e, [], ["fresh"]).searches(0)) == [("bert", 0.1), ("bert", 0.2)]
  assert e.needed(["fresh", "tied"]) == ["bert", "fresh", "electra", "tied"]


def test_a_loss_is_better_where_it_is_lower_and_a_rank_can_be_given():
  e = halving(choose="train/mlm_loss", rank=lambda rows: -rows[0]["mlm_loss"])
  rows = [
    {"search": arm, "budget": 1.0, "rate": rate, "train/mlm_loss": 10 * rate}
    for arm in ("bert", "electra", "metro")
    for rate in (0.2, 0.1)
  ]
  losses = {"bert": 3, "electra": 5, "metro": 4, "tied": 6}
  results = [row_of(arm, 1.0, 0.1, mlm_loss=x) for arm, x in losses.items()]
  found = plan.Plan(e, rows + results, list(e.arms))
  assert found.rate("electra", 0) == 0.1 and found.contestants(1) == ["bert", "metro"]
  diverged = {"search": "bert", "budget": 1.0, "rate": 0.2, "train/mlm_loss": float("nan")}
  assert plan.Plan(e, [diverged, *rows[1:]], []).rate("bert", 0) == 0.1
  gone = row_of("electra", 1.0, 0.1, diverged=True)
  found = plan.Plan(e, [*rows, results[0], gone, *results[2:]], list(e.arms))
  assert found.contestants(1) == ["bert", "metro"]
  e = halving(choose="rtd_auc")
  assert plan.Plan(e, [], []).score({"rtd_auc": 0.7}) == 0.7


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"unit": "hours"}, "unit must be one of flops, steps, minutes, got 'hours'"),
    ({"arms": {}}, "needs an arm"),
    ({"budgets": (0,)}, "budgets above 0"),
    ({"budgets": (1, Budget(1))}, "budgets must be different"),
    ({"budgets": (Budget(1, best=2),)}, "it has no previous one"),
    ({"budgets": (1, Budget(2, seeds=0))}, "and a seed"),
    ({"arms": {"a": Arm("small", seeds=0)}}, "and a seed"),
    ({"budgets": (1, Budget(2, best=1), Budget(3)), "control": "a"}, "must also set best"),
    (
      {"choose": "x", "tasks": {"x": Task("", first_seed=True)}},
      "choose='x' must be measured on all",
    ),
    (
      {"arms": {"a": A, "b": Arm("small", rates=(1,), rate_of="a")}},
      "arm 'b': rate_of needs rates",
    ),
    (
      {"arms": {"a": A, "b": Arm(untrained="a"), "c": Arm("small", after="b")}},
      "'c': rate_of and after must name trained",
    ),
    ({"arms": {"a": Arm(untrained="b"), "b": Arm(untrained="a")}}, "'b', which must be trained"),
    ({"control": "c"}, "unknown control 'c'; arms: a, b"),
    ({"arms": {"a": Arm("small", after="x")}}, "arm 'a' refers to 'x'; the other arms: none"),
    ({"arms": {"a": Arm("small", rate_of="a")}}, "arm 'a' refers to 'a'; the other arms: none"),
    ({"arms": {x: Arm("small", after=y) for x, y in ("ab", "ba")}}, "'b', which must not have"),
    ({"arms": {"a": Arm("small", share=1.0)}}, "share must be between 0 and 1"),
    ({"arms": {"a": Arm("small", rates=(1,))}, "unit": "minutes"}, "needs unit flops or steps"),
  ],
)
def test_a_definition_that_makes_no_sense_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    made(**fields)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("def get_experiment(:\n", "mine.py is not an experiment: SyntaxError"),
    ("x = 1\n", "mine.py is not an experiment: AttributeError"),
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


def test_an_arm_with_a_comma_in_its_name_can_be_chosen(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  text = TINY.format(data="data").replace('"electra": Arm', '"tuned, electra": Arm')
  Path("mine.py").write_text(text, "utf-8")
  only = ["--only=tuned, electra", "--only=bert"]
  with pytest.raises(ValueError, match="has no results for these arms"):
    cli.call("experiment", ["mine.py", "--out=out", "--report", *only])
  with pytest.raises(ValueError, match="--only: unknown arm 'electra'; arms: bert, tuned, electra"):
    cli.call("experiment", ["mine.py", "--out=out", "--report", "--only=bert,electra"])


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    ("detect=", 'pairs="absent.jsonl", detect=', r"absent\.jsonl: no such file"),
    ("detect={data!r}", 'detect="absent"', "absent: no such file"),
    ('"gaps.jsonl"', '"absent.jsonl"', r"absent\.jsonl: no such file"),
    ("detect=", 'probe=("absent.txt", "mine.py"), detect=', r"absent\.txt: no such file"),
    (
      "detect=",
      'tasks={{"rte": ("finetune/glue:rte", {{"data.dir": "absent"}})}}, detect=',
      "absent: no such file",
    ),
    ('"model.embedding_size": 16', '"model.embedding_size": 16, "model.norm": "absent"', "absent"),
  ],
)
def test_what_is_missing_is_said_before_anything_is_trained(
  old, new, message, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  text = TINY.replace(old, new).format(data="data")
  Path("mine.py").write_text(text, encoding="utf-8")
  Path("gaps.jsonl").touch()
  with pytest.raises(ValueError, match=message):
    cli.call("experiment", ["mine.py", "--out=out"])
  assert not list(Path("out").iterdir())


def test_configurations_are_compared_at_the_first_ones_flops():
  fields = {"train.steps": 100}
  found = definition.of_configurations(["small", "bert:small"], "flops", fields, 2)
  config = found.configuration("small")
  step = step_flops(spec_without_data(config), config.train.batch_size, config.data.seq_length)
  assert found.budgets == (Budget(100 * step),) and found.control == "small" and found.seeds == 2
  with pytest.raises(ValueError, match="arms must have different names"):
    definition.of_configurations(["small", "small"], "flops", fields, 2)
  with pytest.raises(ValueError, match="set train.minutes in the first"):
    definition.of_configurations(["small", "bert:small"], "minutes", fields, 2)


def test_flops_takes_fields_of_both_configurations(capsys):
  config, match = ["--config=small.py", "--config.train.steps=10"], ["--match=small.py"]
  cli.call("flops", [*config, *match, "--match.train.steps=70"])
  assert "70 steps cost as much as a whole run of small.py" in capsys.readouterr().out


def test_a_terminated_experiment_ends_its_programs(tmp_path):
  (tmp_path / "slow.py").write_text(
    "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
  )
  code = """
import signal, sys
from pathlib import Path
from electra_jax.experiments import jobs
signal.signal(signal.SIGTERM, jobs.stop)
with jobs.workers(1) as pool:
  jobs.finish([pool.submit(jobs.run, Path("out"), "slow", "slow", [], lambda: True)])
"""
  path = {"PYTHONPATH": f"{Path(__file__).resolve().parent.parent}{os.pathsep}{tmp_path}"}
  with subprocess.Popen(
    [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | path
  ) as parent:
    log = tmp_path / "out" / "logs" / "slow.log"
    while parent.poll() is None and not (log.exists() and log.read_text().endswith("\n")):
      time.sleep(0.05)
    parent.terminate()
    assert parent.wait(60) == 143
  (line,) = jobs.json_lines(tmp_path / "out" / "commands.jsonl")
  assert line["returncode"] == -signal.SIGTERM and not line["ended"]
  with pytest.raises(ProcessLookupError):
    os.kill(int(log.read_text()), 0)
