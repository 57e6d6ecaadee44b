"""JSON files of other people: any value at any place is read, or is one line."""

import copy
import dataclasses
import functools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from test_added_tokens import write_tokens
from test_hf import GOLDEN, SIZES, random_network

from electra_jax.data import source_files, sources
from electra_jax.data.pretrain_batches import Shards
from electra_jax.evaluate import samples
from electra_jax.experiments import jobs
from electra_jax.finetune import model, results, statistics
from electra_jax.interop import huggingface
from electra_jax.interop import sources as networks
from electra_jax.monitor import bands
from electra_jax.report import saved_run, tables, verdict

V02 = GOLDEN / "version_0_2"
ODD = (None, True, False, -1, 0, 7, 10**400, 2**63, 1.5, float("inf"), float("nan"), "x", "")
ODD += ("\ud800", "../x", [], {}, [[]], {"x": 1}, [None, "x", 1], "1", ["x"] * 3)
DEEP = {kind: kind * 100_000 for kind in ("[", '{"a":')}
RATE = {"low": 50.0, "high": 70.0, "pairs": 10, "accuracy": 0.6}
PAIRS = {"all": RATE, "categories": {"a": RATE}, "model": "runs/a", "scorer": "rtd"}
ROW = {"task": "own", "split": "dev", "seed": 0, "metrics": {"f1": 50.0}, "collapsed": False}
ROW |= {"majority": {"f1": 40.0}, "step": 4}
STARTED = {"event": "start", "step": 0, "devices": 1, "device_kind": "cpu", "jax": "0.11"}
JOURNAL = [STARTED, {"event": "goodput", "secs": {"steps": 2.0}}, {"event": "warning", "text": "x"}]
JOURNAL = [{"time": 1.0, **event} for event in JOURNAL]
INFO = {"kind": "text", "name": "own", "max_length": 16, "labels": []}
INFO |= {"head": {"kind": "text", "arguments": {"outputs": 2}}}


def mutated(content, rng: random.Random):
  """Returns a copy of a JSON value with another value, or none, somewhere."""
  content = copy.deepcopy(content)
  place, at, node = None, None, content
  while isinstance(node, dict | list) and node and (place is None or rng.random() < 0.8):
    place, at = node, rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
    node = place[at]
  if place is None or rng.random() < 0.05:
    return rng.choice(ODD)
  if rng.random() < 0.15:
    del place[at]
  else:
    place[at] = copy.deepcopy(rng.choice(ODD))
  return content


def write(path: Path, content, lines: bool = False) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  rows = content if lines and isinstance(content, list) else [content]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def report(folder: Path) -> None:
  run = saved_run.read(folder / "run", "run")
  (arm,) = saved_run.arms([run])
  tables.overview([arm], 2.0)
  tables.fields([arm])
  tables.evaluations([arm])
  tables.time([arm])
  verdict.judge_arm(arm)


def finetuned(folder: Path) -> None:
  rows = results.read_results(folder)
  statistics.table(rows)
  tables.finetuning([folder])
  results.print_average(rows, Console(quiet=True))


# {name: (file, what reads it)}; the files of `made`.
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
  "manifest": ("data/manifest.json", lambda x: Shards.open(x / "data")),
  "run": ("run/config.json", report),
  "metrics": ("run/metrics.jsonl", report),
  "journal": ("run/journal.jsonl", report),
  "export": ("finetuned/export.json", lambda x: model.load(x / "finetuned")),
  "hf": ("hf/config.json", lambda x: networks.open_source(x / "hf")),
  "tokenizer_config": ("hf/tokenizer_config.json", lambda x: huggingface.load_tokenizer(x / "hf")),
  "special_tokens_map": (
    "hf/special_tokens_map.json",
    lambda x: huggingface.load_tokenizer(x / "hf"),
  ),
  "added_tokens": ("hf/added_tokens.json", lambda x: huggingface.load_tokenizer(x / "hf")),
  "index": ("parts/model.safetensors.index.json", lambda x: networks.open_source(x / "parts")),
  "results": ("task/results.jsonl", lambda x: finetuned(x / "task")),
  "task": ("task/own/config.json", lambda x: results.read_task(x / "task" / "own")),
  "pairs": ("pairs.json", lambda x: tables.minimal_pairs([x / "pairs.json"])),
  "band": ("band.json", lambda x: bands.read(x / "band.json")),
  "samples": ("run/samples.json", lambda x: samples.read(x / "run")),
  "rows": ("rows.jsonl", lambda x: jobs.Rows(x / "rows.jsonl").read()),
  "dataset": ("state.json", lambda x: source_files.files(sources.parse(f"hf:{x}#text")[0])),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
  """Folders in which every file of READERS is whole."""
  folder = tmp_path_factory.mktemp("made")
  shutil.copytree(V02, folder, dirs_exist_ok=True)
  saved = json.loads((folder / "run" / "config.json").read_text("utf-8"))
  saved["data"]["dir"] = str(folder / "data")
  write(folder / "run" / "config.json", saved)
  write(folder / "run" / "journal.jsonl", JOURNAL, lines=True)
  cfg = dataclasses.replace(SIZES["equal widths"], vocab_size=48)
  for name in ("hf", "parts"):
    (folder / name).mkdir()
    others = {huggingface.TRAINING: {"objective": "electra", "mask_prob": 0.15}}
    huggingface.save(folder / name, cfg, random_network(cfg, "rtd_head"), "rtd_head", 0, others)
  write_tokens(folder / "hf")
  weights = (folder / "parts" / "model.safetensors").rename(folder / "parts" / "a.safetensors")
  write(folder / "parts/model.safetensors.index.json", {"weight_map": {"x": weights.name}})
  write(folder / "task" / "results.jsonl", [ROW, ROW | {"seed": 1}], lines=True)
  task = {"config": {}, "facts": INFO, "examples": {"dev": "same"}}
  write(folder / "task" / "own" / "config.json", task)
  np.savez(folder / "task" / "own" / "units.npz", dev=np.zeros((1, 4, 2)))
  write(folder / "pairs.json", PAIRS)
  band = {"runs": 3, "every_steps": 5, "fields": {"seed": 0}}
  write(folder / "band.json", band | {"levels": {"train": {"5": {"loss": [2.0, 0.1]}}}})
  write(folder / "rows.jsonl", [{"arm": "a", "budget": 1, "seed": 0}], lines=True)
  (folder / "data-0.arrow").write_bytes(b"")
  write(folder / "state.json", {"_data_files": [{"filename": "data-0.arrow"}]})
  return folder


def check(read: Callable[[], object]) -> bool:
  """Returns whether a file was read; an error must be one line for the user."""
  try:
    read()
  except (ValueError, OSError) as error:
    assert "\n" not in str(error), error
    assert len(str(error)) < 1000, error
    return False
  return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_any_value_at_any_place_is_read_or_is_one_line(made, name, seed=0):
  file, read = READERS[name]
  count = 5 if read is report else 20
  path, rng = made / file, random.Random(seed)
  whole = path.read_bytes() if path.exists() else b"{}"
  lines = file.endswith(".jsonl")
  content = [json.loads(x) for x in whole.splitlines()] if lines else json.loads(whole)
  try:
    read(made)  # is whole
    for _ in range(count):
      change = mutated(content, rng)
      write(path, change, lines)
      try:
        check(functools.partial(read, made))
      except Exception as error:
        raise AssertionError(f"{file} with {json.dumps(change)[:2000]}") from error
    for deep in DEEP.values():
      path.write_text(deep, "utf-8")
      check(functools.partial(read, made))
  finally:
    path.write_bytes(whole)
