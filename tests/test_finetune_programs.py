"""Tasks that are padded to one length share the programs that the first of them compiles."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from rich.console import Console
from test_finetune import make_config, source, write_glue  # noqa: F401 (a fixture)

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


@pytest.mark.slow
def test_a_second_task_of_as_many_classes_compiles_nothing(source, tmp_path, compiled):  # noqa: F811
  fields = fields_of(write_glue(tmp_path / "glue"))
  run = functools.partial(
    program.fine_tune, workdir=tmp_path / "results", console=Console(quiet=True)
  )
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
def test_another_process_with_the_kept_cache_compiles_nothing_for_another_task(
  source,  # noqa: F811
  tmp_path,
):
  glue = write_glue(tmp_path / "glue")
  env = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "kept"),
    "JAX_NUM_CPU_DEVICES": "1",
  }

  def hits_and_misses(task: str, seed: int) -> tuple[int, int]:
    args = [str(source), str(glue), task, str(seed), str(tmp_path / task)]
    command = [sys.executable, "-c", PROCESS, *args]
    done = subprocess.run(
      command, env=env, cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    hits, misses = map(int, done.stdout.split())
    return hits, misses

  assert hits_and_misses("cola", 0)[1] > 2
  hits, misses = hits_and_misses("rte", 7)
  assert hits > 2 and misses == 0
