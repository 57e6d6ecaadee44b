"""Killed again and again, a run by the clock is annealed, and equal to one of its decided steps."""

import json
import random
import time

import harness
import pytest
from test_kill import SEED

pytestmark = pytest.mark.faults
BY_THE_CLOCK = {
  "optimizer__schedule": "wsd",
  "optimizer__decay_frac": 0.5,
  "optimizer__warmup_steps": 2,
  "checkpoint__every_steps": 2,
}
MANY = 2000  # steps, more than the time allows
SLOW = harness.program(harness.PACED.replace("0.3", "0.6"))  # each second one saves


def decisions(workdir) -> list[dict]:
  """Returns the decisions of a run's journal; one that no checkpoint has yet is made again."""
  text = (workdir / "journal.jsonl").read_text() if (workdir / "journal.jsonl").exists() else ""
  found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
  return [event for event in found if event["event"] == "horizon"]


def of_steps(found: dict) -> dict:
  """Returns the fields of the run that has the decided steps from the start."""
  fields = BY_THE_CLOCK | {"optimizer__decay_steps": found["decay_steps"]}
  del fields["optimizer__decay_frac"]
  return fields


def without_decisions(workdir) -> list[dict]:
  """Returns a run's lines without the evaluations of decisions, unless they were due there."""
  steps = {event["step"] for event in decisions(workdir)}
  extra = {step for step in steps if step % int(harness.FIELDS["eval.every_steps"])}
  lines = harness.lines(workdir)
  return [x for x in lines if x["split"] != "heldout" or x["step"] not in extra]


@pytest.mark.parametrize("each", [1, pytest.param(5, marks=pytest.mark.nightly)])
def test_kills_of_a_run_by_the_clock_end_in_the_bits_of_its_steps(data, tmp_path, each):
  """So many before the decay has begun, and as many after."""
  rng, workdir, alone = random.Random(SEED), tmp_path / "run", tmp_path / "alone"
  print(f"FAULTS_SEED={SEED}")

  def start() -> harness.Run:
    fields = BY_THE_CLOCK | {"train__minutes": 1 + 0.4 * each}
    return harness.Run(data, workdir, MANY, head=SLOW, **fields)

  kills = {False: 0, True: 0}  # by whether the decay has begun
  while (run := start()) and sum(kills.values()) < 2 * each:
    decay = kills[False] >= each
    run.until(harness.newest(workdir) + 1)
    if decay:
      run.when(lambda: decisions(workdir))
    time.sleep(rng.uniform(0, 1.2))
    run.kill()
    kills[decay] += 1
    print(f"last line {harness.last_line(workdir)}, newest {harness.newest(workdir)}")
  run.finish()
  found = decisions(workdir)[-1]
  assert found["step"] + found["decay_steps"] == found["steps"] < MANY
  harness.Run(data, alone, found["steps"], **of_steps(found)).finish()
  assert harness.saved(workdir, found["steps"]) == harness.saved(alone, found["steps"])
  assert without_decisions(workdir) == harness.lines(alone)


def test_two_processes_agree_on_where_a_run_by_the_clock_ends(data, tmp_path):
  fields = BY_THE_CLOCK | {"train__minutes": 1.0}
  harness.finish(harness.pair(data, tmp_path / "run", MANY, head=SLOW, **fields))
  found = decisions(tmp_path / "run")[-1]
  harness.finish(harness.pair(data, tmp_path / "alone", found["steps"], **of_steps(found)))
  steps = found["steps"]
  assert harness.saved(tmp_path / "run", steps) == harness.saved(tmp_path / "alone", steps)
