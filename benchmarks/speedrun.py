"""Ten minutes on one GPU: shards, pretraining for some minutes, exports, tasks, a row of results.

  make speedrun PYTHON=python3 ARGS="--text FILE --glue DIR --chunk DIR --pairs FILE"
  python benchmarks/speedrun.py [--arm electra|bert|small|bert_small] [--seed N] [--minutes 8]
      [--text FILE ... [--vocab FILE] | --shards DIR] [--glue DIR] [--chunk DIR] [--pairs FILE]
      [--out DIR]
  python benchmarks/speedrun.py --only train ...                   # shards, training, exports
  python benchmarks/speedrun.py --only evaluate --model DIR ...    # tasks, on any machine
  python benchmarks/speedrun.py --only 'control tasks' ...         # these steps
  python benchmarks/speedrun.py --report                           # docs/speedrun.md, its picture
  python benchmarks/speedrun.py --smoke                            # in miniature, on the CPU

shards      from --text, on all cores, or --shards, or from Python's documentation
train       for --minutes; if the time limit stops it, the next start continues
export      both networks for Hugging Face, in bfloat16 and files of 15 MB
tasks       CoLA, SST-2, MRPC, STS-B and RTE, if their folders are in --glue
chunking    train.txt and test.txt of --chunk, in columns
pairs       minimal pairs of --pairs, JSON lines
control     the tasks and chunking from random weights

Needs no TensorFlow, PyTorch or zstandard (unless the text is a .zst). Each step writes a JSON file;
started again with the same arguments, the script continues with the missing steps. It ends within
--budget_mins and prints what is left. DIR/compiled has the compiled programs, which may be copied
to another machine of the same kind. On a GPU the row goes to
benchmarks/results/speedrun_rows.jsonl, elsewhere to DIR. Exit codes: 0 all done, 143 start again, 1
something failed.
"""

import argparse
import importlib.metadata
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import machine
import speedrun_report
from resumable import (
  DONE,
  ROOT,
  OutOfTime,
  Step,
  Work,
  choose,
  exit_code,
  json_lines,
  open_folder,
  run_script,
  run_steps,
  say,
)

ROWS = ROOT / "benchmarks" / "results" / "speedrun_rows.jsonl"
TOTAL_MINS, SAVING_SECS = 10, 45
TASKS = {name: speedrun_report.NAMES[name] for name in speedrun_report.FIVE}
# The paper's networks with a time limit: their rates, a shorter warm-up, and a decay.
PAPER = {
  "optimizer.schedule": "wsd",
  "optimizer.decay_frac": 0.3,
  "optimizer.warmup_steps": 2000,
  "eval.every_steps": 5000,
  "checkpoint.every_steps": 5000,
  "checkpoint.keep": 1,
  "log.trackers": "",
}
ARMS = {
  "electra": ("configs/speedrun.py:electra", {}),
  "bert": ("configs/speedrun.py:bert", {}),
  "small": ("configs/small.py", PAPER),
  "bert_small": ("configs/bert_small.py", PAPER),
}
# One length and the layers in a loop: three programs for all tasks.
TUNING = {
  "seeds": 3,
  "keep": "none",
  "data.buckets": 0,
  "model.unroll": 1,
  "model.dropout": 0.1,
  "model.attention_dropout": 0.0,
  "optimizer.learning_rate": 2e-4,
}
# Keeps all programs, under names that do not depend on the folder: JAX puts the path of XLA's
# caches into the names.
KEPT = {
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
}

SMOKE = {  # a tiny network
  "model.num_layers": 1,
  "model.hidden_size": 32,
  "model.num_heads": 1,
  "model.ffn_size": 32,
  "model.embedding_size": 32,
  "model.max_positions": 128,  # as many as the tasks have tokens
  "generator.depth_multiplier": 1.0,
  "data.seq_length": 32,
  "data.vocab_size": 500,
  "data.holdout_frac": 0.2,
  "optimizer.warmup_steps": 5,
  "train.batch_size": 8,
  "train.minutes": 5.0,
  "train.steps": 60,  # they end it: a machine may be slow
  "eval.batch_size": 8,
  "eval.max_examples": 8,
  "log.every_steps": 20,
}

Options = argparse.Namespace  # of `main`, with absolute paths


def tasks_of(o: Options) -> list[str]:
  """Returns the GLUE tasks that have a folder."""
  return [name for name, folder in TASKS.items() if o.glue and (Path(o.glue) / folder).is_dir()]


def build(work: Work, o: Options) -> dict:
  """Builds the shards, which arms with the same data configuration share, or uses --shards."""
  fields = {"data.dir": shards(work, o), "data.sources": "python-docs"}
  if o.text:
    fields["data.sources"] = ",".join(f"text:{path}" for path in o.text)
  if o.vocab:
    fields["data.vocab"] = o.vocab
  if o.smoke:
    fields |= {k: v for k, v in SMOKE.items() if k.startswith("data.")}
    fields["data.sources"] = f"text:{ROOT}/*.md"
  if not o.shards:
    work.module("shards", "electra_jax.data.build", ARMS[o.arm][0], fields)
  manifest = read_manifest(work, o)
  return {
    "vocabulary": manifest["vocab"]["size"],
    **{split: facts["tokens"] for split, facts in manifest["splits"].items()},
  }


def shards(work: Work, o: Options) -> Path:
  name = f"shards-{re.split('[/.]', ARMS[o.arm][0])[1]}"
  return Path(o.shards) if o.shards else work.folder.parent / name


def read_manifest(work: Work, o: Options) -> dict:
  return json.loads((shards(work, o) / "manifest.json").read_text("utf-8"))


def train(work: Work, o: Options) -> dict:
  """Trains for --minutes, or continues with the seconds left."""
  config, fields = ARMS[o.arm]
  own = {"data.dir": shards(work, o), "seed": o.seed, "train.minutes": o.minutes}
  fields = fields | own
  if o.smoke:
    of_build = ("data.vocab_size", "data.holdout_frac")
    fields |= {k: v for k, v in SMOKE.items() if k not in of_build}
  run = work.folder / "run"
  arguments = ("electra_jax.train", config, fields, f"--workdir={run}")
  work.module("train", *arguments, stop_secs=SAVING_SECS)
  lines, events = json_lines(run / "metrics.jsonl"), json_lines(run / "journal.jsonl")
  trained, heldout = ([x for x in lines if x["split"] == s] for s in ("train", "heldout"))
  horizon = [x for x in events if x["event"] == "horizon"][-1]
  last_start = [x for x in events if x["event"] == "goodput"][-1]
  return {
    "steps": horizon["steps"],
    "decay_steps": horizon["decay_steps"],
    "train_secs": sum(last_start["secs"].values()),
    "mfu": sum(x["mfu"] or 0 for x in trained) / len(trained),
    "heldout": {k: v for k, v in (heldout or [{}])[-1].items() if k not in ("step", "split")},
    "curve": [{k: x[k] for k in speedrun_report.CURVE if k in x} for x in heldout],
    **costs(work, o, fields, horizon["steps"]),
    "could_not": [] if heldout else ["held-out losses: the text has no held-out documents"],
  }


COSTS = """
import json, sys
from electra_jax.config import files
from electra_jax.cost import tables
config = files.load_named(sys.argv[1])
config.update_from_flattened_dict(json.loads(sys.argv[2]))
steps = int(sys.argv[3])
tokens = steps * config.train.batch_size * config.data.seq_length
print(json.dumps({"flops": steps * sum(tables.step_costs(config)[1].values()), "tokens": tokens}))
"""


def costs(work: Work, o: Options, fields: dict, steps: int) -> dict:
  """Returns the FLOPs of a training in matrix products, and its tokens."""
  fields = {k: v for k, v in fields.items() if k != "data.dir"}
  vocabulary = read_manifest(work, o)["vocab"]["size"]
  fields |= {"data.vocab_size": vocabulary, "data.vocab": "wordpiece"}
  command = [sys.executable, "-c", COSTS, ARMS[o.arm][0], json.dumps(fields), str(steps)]
  return json.loads(work.program("costs", command, JAX_PLATFORMS="cpu").splitlines()[-1])


def export(work: Work, o: Options) -> dict:
  """Exports the networks for Hugging Face; returns the sizes of their files."""
  out = work.folder / "hf"
  shutil.rmtree(out, ignore_errors=True)  # of a start that ended before it was noted
  command = [sys.executable, "-m", "electra_jax.export", str(work.folder / "run"), str(out)]
  command += ["--to", "hf", "--dtype=bfloat16", "--max-shard-mb=15"]
  work.program("export", command, JAX_PLATFORMS="cpu")
  files = sorted(out.rglob("*.safetensors"))
  return {"bytes": {str(path.relative_to(out)): path.stat().st_size for path in files}}


def source(work: Work, o: Options) -> str:
  return o.model or str(work.folder / "run")


def tuned(work: Work, o: Options, name: str, config: str, fields: dict, fresh: bool) -> dict:
  """Fine-tunes; returns the main metric of each seed on the first split of each task."""
  name = f"control {name}" if fresh else name
  place = work.folder / name.replace(" ", "-")
  start = {"init": "random", "like": source(work, o)} if fresh else {"init": source(work, o)}
  fields = start | TUNING | fields
  if o.smoke:
    fields |= {"seeds": 2, "data.max_length": 32, "train.epochs": 1.0}
  config = f"configs/finetune/{config}"
  work.module(name, "electra_jax.finetune", config, fields, f"--workdir={place}")
  found: dict = {}
  for row in json_lines(place / "results.jsonl"):
    splits = found.setdefault(row["task"], {})
    splits.setdefault(row["split"], []).append(next(iter(row["metrics"].values())))
  return {task: next(iter(splits.values())) for task, splits in found.items()}


def glue(work: Work, o: Options, fresh: bool) -> dict:
  """Fine-tunes on the GLUE tasks in --glue, and lists the missing ones."""
  there, fields = tasks_of(o), {"data.dir": o.glue, "model.head": "mean"}
  found = tuned(work, o, "tasks", f"glue.py:{','.join(there)}", fields, fresh)
  missing = [f"{TASKS[x]}: no folder of it in --glue" for x in TASKS if x not in there]
  return {"tasks": found, "could_not": missing}


def chunking(work: Work, o: Options, fresh: bool) -> dict:
  files = {"data.train": Path(o.chunk) / "train.txt", "data.dev": Path(o.chunk) / "test.txt"}
  fields = files | {"data.max_length": 128, "model.head": "linear"}
  return {"tasks": tuned(work, o, "chunking", "tagging.py:chunk", fields, fresh)}


def pairs(work: Work, o: Options) -> dict:
  out = work.folder / "pairs"
  shutil.rmtree(out, ignore_errors=True)
  command = [sys.executable, "-m", "electra_jax.evaluate", "pairs", f"--model={source(work, o)}"]
  work.program("pairs", [*command, f"--data={o.pairs}", f"--out={out}"])
  found = json.loads((out / "pairs.json").read_text("utf-8"))
  return {"pairs": {k: found[k] for k in ("scorer", "all")}}


def make_steps(o: Options) -> dict[str, Step]:
  """Returns the steps whose files are given, the most useful first."""

  def trained(run: Callable[..., dict], mins: float, *args: bool, goes_on: bool = False) -> Step:
    def checked(work: Work) -> dict:
      if not o.model and work.record("train").get("status") != DONE:
        raise OutOfTime("waits for the training")
      return run(work, o, *args)

    return Step(checked, mins, goes_on)

  training = {
    "shards": Step(partial(build, o=o), 1, goes_on=True),
    "train": Step(partial(train, o=o), o.minutes, goes_on=True),
    "export": trained(export, 0.3),
  }
  evaluation = {"pairs": trained(pairs, 1)} if o.pairs else {}
  for prefix, fresh in (("", False), ("control ", True)):
    if tasks_of(o):
      evaluation[f"{prefix}tasks"] = trained(glue, 2, fresh, goes_on=True)
    if o.chunk:
      evaluation[f"{prefix}chunking"] = trained(chunking, 2, fresh, goes_on=True)
  return ({} if o.model else training) | evaluation


def make_row(o: Options, device: str, records: dict[str, dict]) -> dict:
  """Returns the row of results, with the missing steps in "left"."""
  results = {name: record.get("result", {}) for name, record in records.items()}
  row = {"arm": o.arm, "seed": o.seed, "device": device, "minutes": o.minutes}
  if o.model:
    row["model"] = Path(o.model).name
  row["secs"] = {name: round(r.get("secs", 0.0), 1) for name, r in records.items()}
  row |= {k: v for k, v in results.get("train", {}).items() if k != "could_not"}
  row |= {"text": results.get("shards", {}), **results.get("pairs", {}), "tasks": {}, "control": {}}
  for name, result in results.items():
    row["control" if name.startswith("control") else "tasks"] |= result.get("tasks", {})
  lines = [line for result in results.values() for line in result.get("could_not", [])]
  row["could_not"] = list(dict.fromkeys(lines))
  row["left"] = [name for name, r in records.items() if r.get("status") != DONE]
  return row


def check_cache(folder: Path, device: str) -> str:
  """Describes the compiled programs, and records their JAX version and device."""
  mine = f"jax {importlib.metadata.version('jax')} on {device}"
  note = folder / "made_for.txt"
  known = note.read_text(errors="replace", encoding="utf-8").strip() if note.exists() else mine
  folder.mkdir(parents=True, exist_ok=True)
  note.write_text(f"{mine}\n", "utf-8")
  if known == mine:
    return f"{folder.name}: {len(list(folder.iterdir())) - 1} programs are compiled"
  return f"{folder.name} was made for {known!r}: for {mine!r} everything compiles anew"


def write_smoke_files(folder: Path) -> dict[str, str]:
  """Writes tiny tasks in the formats of the real ones: whether the words of a line are in order."""
  rng, text = random.Random(0), (ROOT / "docs" / "run.md").read_text("utf-8")
  lines = [words for line in text.splitlines() if 5 < len(words := line.split()) < 40]
  (folder / "glue" / "CoLA").mkdir(parents=True, exist_ok=True)
  (folder / "chunk").mkdir(exist_ok=True)
  for splits, kept in ((("train", "train"), lines[8:]), (("dev", "test"), lines[:8])):
    rows, columns, pairs = [], [], []
    for i, words in enumerate(kept):
      mixed = rng.sample(words, len(words))
      rows.append(f"docs\t{i % 2}\t\t{' '.join(words if i % 2 else mixed)}\n")
      columns.append("".join(f"{word} {'BI'[j > 0]}-NP\n" for j, word in enumerate(words)) + "\n")
      pairs.append({"sentence_good": " ".join(words), "sentence_bad": " ".join(mixed)})
    (folder / "glue" / "CoLA" / f"{splits[0]}.tsv").write_text("".join(rows), "utf-8")
    (folder / "chunk" / f"{splits[1]}.txt").write_text("".join(columns), "utf-8")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in pairs), "utf-8")
  return {name: str(folder / name) for name in ("glue", "chunk")} | {
    "pairs": str(folder / "pairs.jsonl")
  }


def main(
  arm: Literal["electra", "bert", "small", "bert_small"] = "electra",
  seed: int = 0,
  minutes: float = 8.0,
  text: list[str] = (),
  vocab: str | None = None,
  shards: str | None = None,
  glue: str | None = None,
  chunk: str | None = None,
  pairs: str | None = None,
  model: str | None = None,
  only: list[str] = ("train", "evaluate"),
  out: Path | None = None,
  rows: Path | None = None,
  budget_mins: float = TOTAL_MINS,
  report: bool = False,
  smoke: bool = False,
) -> int:
  """
  --minutes      of training
  --text         files to train on
  --vocab        vocabulary file (one is trained)
  --shards       finished shards, instead of --text and --vocab
  --glue         folder with GLUE's folders
  --chunk        folder with train.txt and test.txt
  --pairs        minimal pairs
  --model        export or run to evaluate
  --only         train, evaluate, or names of steps
  --out          folder (runs/speedrun, or runs/speedrun-smoke)
  --rows         file for the row
  --budget_mins  time limit
  --report       write docs/speedrun.md from the rows
  --smoke        in miniature, on the CPU
  """
  if report:
    speedrun_report.write(ROWS)
    return 0
  given = [*text, *filter(None, (vocab, shards, glue, chunk, pairs, model))]
  if missing := [path for path in given if not Path(path).exists()]:
    raise SystemExit(f"error: not there: {', '.join(missing)}")
  if model and "train" in only:
    raise SystemExit("error: --model needs --only evaluate")
  if shards and (text or vocab):
    raise SystemExit("error: --shards cannot be combined with --text or --vocab")
  out = (out or Path(f"runs/speedrun{'-smoke' * smoke}")).absolute()
  folder = out / (Path(model).name if model else f"{arm}-{seed}")
  folder.mkdir(parents=True, exist_ok=True)
  places = {"shards": shards, "glue": glue, "chunk": chunk, "pairs": pairs}
  places |= write_smoke_files(out) if smoke else {}
  settings = {
    "arm": arm, "seed": seed, "minutes": minutes, "vocab": vocab, "model": model, "smoke": smoke,
    "text": [str(Path(path).absolute()) for path in text],
    **{name: path and str(Path(path).absolute()) for name, path in places.items()},
  }  # fmt: skip
  o, compiled = Options(**settings), out / "compiled"
  os.chdir(ROOT)  # where the configurations are
  work, platform, device = open_folder(folder, compiled, budget_mins, settings, **KEPT)
  say(check_cache(compiled, device))
  steps = make_steps(o)
  parts = {"train": [x for x in ("shards", "train", "export") if x in steps]}
  parts["evaluate"] = [name for name in steps if name not in parts["train"]]
  chosen = choose(steps, only, parts)
  if not chosen:
    raise SystemExit("error: nothing to evaluate: give --glue, --chunk or --pairs")

  found = run_steps(chosen, work, say)
  row = make_row(o, device, {name: found.get(name) or work.record(name) for name in steps})
  rows = rows or (ROWS if platform == "gpu" and not smoke else out / "rows.jsonl")
  speedrun_report.keep(rows, row)
  print("\n".join(speedrun_report.table([row])))
  for line in row["could_not"]:
    print(f"could not: {line}")
  for name in row["left"]:
    print(f"left: {name}: {found.get(name, {}).get('reason', 'not asked for')}")
  print(f"row: {rows}")
  return exit_code(found)


if __name__ == "__main__":
  run_script(partial(machine.start, main))
