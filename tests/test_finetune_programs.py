"""A few steps of tasks: those of one length share programs, losses fall, scores are as by hand."""

import functools
import io
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import python
from rich.console import Console
from test_finetune import both, make_config, source, squad_file, write_conll, write_glue  # noqa: F401

from electra_jax.finetune import results
from electra_jax.finetune import train as program

COMPILED = "/jax/core/compile/backend_compile_duration"  # or read from the cache on disk


@pytest.fixture
def compiled():
  """The names of the programs that are compiled, or read from the cache, during the test."""
  names = []

  def listen(event: str, secs: float, **facts) -> None:
    if event == COMPILED:
      names.append(facts["fun_name"])

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


def fields_of(folder) -> dict:
  # CoLA has 3 epochs of its own, RTE 10: the steps and the warm-up differ.
  return {"data__dir": str(folder), "data__buckets": 0, "train__epochs": None}


@pytest.mark.long
def test_a_second_task_of_as_many_classes_compiles_nothing(source, tmp_path, compiled):  # noqa: F811
  fields = fields_of(write_glue(tmp_path / "glue"))
  where = {"workdir": tmp_path / "results", "console": Console(quiet=True)}
  run = functools.partial(program.fine_tune, **where)
  run(make_config("glue", "cola", source, **fields))
  assert len(compiled) >= 2  # the step and the prediction
  compiled.clear()
  run(make_config("glue", "rte", source, **fields))
  assert compiled == []


PROCESS = """
import collections, pathlib, sys
import jax
from rich.console import Console
from test_finetune_programs import fields_of, make_config, program

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **facts: events.update([event]))
source, glue, task, seed, out = sys.argv[1:]
config = make_config("glue", task, source, seed=int(seed), **fields_of(glue))
program.fine_tune(config, pathlib.Path(out), Console(quiet=True))
print(*(events[f"/jax/compilation_cache/cache_{kind}"] for kind in ("hits", "misses")))
"""


@pytest.mark.long
def test_another_process_with_the_kept_cache_compiles_nothing(source, tmp_path):  # noqa: F811
  glue = write_glue(tmp_path / "glue")
  kept = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "kept"), "JAX_NUM_CPU_DEVICES": "1"}

  def hits_and_misses(task: str, seed: int) -> tuple[int, int]:
    args = source, glue, task, seed, tmp_path / task
    done = python("-c", PROCESS, *args, env=kept, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    hits, misses = map(int, done.stdout.split())
    return hits, misses

  assert hits_and_misses("cola", 0)[1] > 2
  hits, misses = hits_and_misses("rte", 7)
  assert hits > 2 and misses == 0


def train_little(config, workdir: Path) -> tuple[dict, list[float]]:
  """Returns the one row of results and the losses on the way."""
  config.seeds, config.train.epochs, config.log.every_steps = 1, 3.0, 1
  config.seed = 2**32 - 1  # the highest
  console = Console(record=True, width=200, file=io.StringIO())
  program.fine_tune(config, workdir, console)
  (row,) = results.read_results(workdir)
  return row, [float(x) for x in re.findall(r"\| loss (\S+) \|", console.export_text())]


@pytest.mark.slow
def test_a_few_steps_of_tagging_lower_the_loss_and_f1_is_counted_by_hand(source, tmp_path):  # noqa: F811
  for split, n in (("train", 24), ("dev", 6)):
    write_conll(tmp_path / f"{split}.txt", n)
  config = make_config("tagging", "words", source, **both(tmp_path, "txt"))
  row, losses = train_little(config, tmp_path / "results")
  assert len(losses) == 9 and np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
  written = tmp_path / "results" / "words" / "predictions" / "dev.txt"
  right = found = there = 0
  for line in filter(None, written.read_text().splitlines()):
    *_, gold, predicted = line.split()
    assert predicted in ("B-A", "O")  # so that every entity is one word
    right += gold == predicted == "B-A"
    found += predicted == "B-A"
    there += gold == "B-A"
  assert row["metrics"]["f1"] == pytest.approx(100 * 2 * right / (found + there))


@pytest.mark.slow
def test_a_few_steps_of_answering_lower_the_loss_and_matches_are_counted(source, tmp_path):  # noqa: F811
  for split, n in (("train", 24), ("dev", 6)):
    squad_file(tmp_path / f"{split}.json", n)
  small = {"qa__beam_size": 2, "qa__hidden": 8, "qa__max_query": 8}
  config = make_config("squad", None, source, **small, **both(tmp_path, "json"))
  row, losses = train_little(config, tmp_path / "results")
  assert len(losses) == 9 and np.mean(losses[-3:]) < 0.95 * np.mean(losses[:3])
  written = tmp_path / "results" / "squad" / "predictions" / "dev" / "predictions.json"
  paragraphs = json.loads((tmp_path / "dev.json").read_text())["data"][0]["paragraphs"]
  predictions = list(json.loads(written.read_text()).values())
  assert all(text in p["context"] for text, p in zip(predictions, paragraphs, strict=True))
  golds = [p["qas"][0]["answers"][0]["text"] for p in paragraphs]
  right = np.mean([text == gold for text, gold in zip(predictions, golds, strict=True)])
  assert row["metrics"]["exact_match"] == pytest.approx(100 * right)
