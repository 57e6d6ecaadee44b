"""Ten minutes of one GPU: shards, a training by the clock, exports, tasks, and a row of results.

  make speedrun PYTHON=python3 ARGS="--text FILE --glue DIR --chunk DIR --pairs FILE"
  python benchmarks/speedrun.py [--arm electra|bert|small|bert_small] [--seed N] [--minutes 8]
      [--text FILE ... [--vocab FILE] | --shards DIR] [--glue DIR] [--chunk DIR] [--pairs FILE]
      [--out DIR]
  python benchmarks/speedrun.py --only train ...                   # shards, training, exports
  python benchmarks/speedrun.py --only evaluate --model DIR ...    # tasks, on any machine
  python benchmarks/speedrun.py --only 'control tasks' ...         # these steps
  python benchmarks/speedrun.py --report                           # docs/speedrun.md, its picture
  python benchmarks/speedrun.py --smoke                            # in miniature, on the CPU

shards      of --text, on all cores, or --shards; of Python's documentation without them
train       by the clock; stopped by the end of the time, it goes on at the next start
export      both networks for Hugging Face, in bfloat16 and files of 15 MB
tasks       CoLA, SST-2, MRPC, STS-B, RTE: those whose folders are in --glue
chunking    train.txt and test.txt of --chunk, in columns
pairs       minimal pairs of --pairs, JSON lines
control     the tasks, and chunking, from fresh weights

Needs no TensorFlow, PyTorch or zstandard (unless the text is a .zst). Each step leaves a JSON;
started again with the same arguments, it goes on with what is not done. A call ends before
--budget_mins are over and says what is left. What XLA compiled is in DIR/compiled, which may be
taken to the next machine of that kind. On a GPU the row goes to
benchmarks/results/speedrun_rows.jsonl, elsewhere to DIR. Exit codes: 0 all done, 143 start it
again, 1 something failed.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import speedrun_report
import speedrun_smoke
from gpu import SMOKE_FLAGS
from resumable import (
  DONE,
  FAILED,
  LEFT,
  STOPPED,
  OutOfTime,
  Step,
  Work,
  find_device,
  run_script,
  run_steps,
)

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "results" / "speedrun_rows.jsonl"
TOTAL_MINS, SAVING_SECS = 10, 45
TASKS = {name: speedrun_report.NAMES[name] for name in speedrun_report.FIVE}
# The paper's networks by the clock: their rates, a shorter warm-up, and a decay.
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
# All programs are kept, under names that do not depend on the folder: JAX puts the path of XLA's
# own cache into them.
KEPT = {
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
}


@dataclasses.dataclass(frozen=True)
class Options:
  """What the steps depend on, beside the machine."""

  arm: str
  seed: int
  minutes: float
  text: tuple[str, ...]
  vocab: str | None
  shards: str | None  # built before, used instead of a text
  glue: str | None
  chunk: str | None
  pairs: str | None
  model: str | None  # evaluated instead of the network that is trained here
  smoke: bool

  @property
  def config(self) -> str:
    """The arm's configuration file."""
    return ARMS[self.arm][0]

  @property
  def tasks(self) -> list[str]:
    """The tasks of GLUE whose folders are there."""
    return [name for name, folder in TASKS.items() if (Path(self.glue or "") / folder).is_dir()]


def program(work: Work, name: str, module: str, config: str, fields: dict, *args: str, **more):
  """Runs a program of the package; fields may be those of `speedrun_smoke`, too."""
  changes = [f"--config.{field}={value}" for field, value in fields.items()]
  command = [sys.executable, "-m", module, f"--config={config}", *changes, *args]
  return work.program(name, command, **more)


def build(work: Work, options: Options) -> dict:
  """Builds the shards, which arms with one configuration of data share; --shards are read."""
  if not options.shards:
    build_shards(work, options)
  manifest = json.loads((shards(work, options) / "manifest.json").read_text())
  return {
    "vocabulary": manifest["vocab"]["size"],
    **{split: facts["tokens"] for split, facts in manifest["splits"].items()},
  }


def build_shards(work: Work, options: Options) -> None:
  """Builds the shards."""
  fields = {"data.dir": shards(work, options), "data.sources": "python-docs"}
  if options.text:
    fields["data.sources"] = ",".join(f"text:{path}" for path in options.text)
  if options.vocab:
    fields["data.vocab"] = options.vocab
  if options.smoke:
    fields |= {k: v for k, v in speedrun_smoke.FIELDS.items() if k.startswith("data.")}
    fields["data.sources"] = f"text:{ROOT}/*.md"
  program(work, "shards", "electra_jax.data.build", options.config, fields)


def shards(work: Work, options: Options) -> Path:
  """Returns the folder of the shards."""
  name = f"shards-{re.split('[/.]', options.config)[1]}"
  return Path(options.shards) if options.shards else work.folder.parent / name


def train(work: Work, options: Options) -> dict:
  """Trains by the clock, or goes on with the seconds that are left."""
  fields = ARMS[options.arm][1] | {
    "data.dir": shards(work, options),
    "seed": options.seed,
    "train.minutes": options.minutes,
  }
  if options.smoke:
    fields |= {
      k: v
      for k, v in speedrun_smoke.FIELDS.items()
      if k not in ("data.vocab_size", "data.holdout_frac")
    }
  run = work.folder / "run"
  arguments = (options.config, fields, f"--workdir={run}")
  program(work, "train", "electra_jax.train", *arguments, stop_secs=SAVING_SECS)
  lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
  trained, heldout = ([x for x in lines if x["split"] == s] for s in ("train", "heldout"))
  horizon = [x for x in journal(run) if x["event"] == "horizon"][-1]
  return {
    "steps": horizon["steps"],
    "decay_steps": horizon["decay_steps"],
    "train_secs": sum(last_secs(run).values()),
    "mfu": sum(x["mfu"] or 0 for x in trained) / len(trained),
    "heldout": {k: v for k, v in (heldout or [{}])[-1].items() if k not in ("step", "split")},
    "curve": [{k: x[k] for k in speedrun_report.CURVE if k in x} for x in heldout],
    **costs(work, options, fields, horizon["steps"]),
    "could_not": [] if heldout else ["held-out losses: the text has no held-out documents"],
  }


def journal(run: Path) -> list[dict]:
  """Returns the whole lines of a run's journal."""
  texts = (run / "journal.jsonl").read_text().splitlines(keepends=True)
  return [json.loads(text) for text in texts if text.endswith("\n")]


def last_secs(run: Path) -> dict:
  """Returns the seconds by activity of the run's last start."""
  return [x["secs"] for x in journal(run) if x["event"] == "goodput"][-1]


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


def costs(work: Work, options: Options, fields: dict, steps: int) -> dict:
  """Returns the FLOPs of a training in matrix products, and its tokens."""
  vocabulary = json.loads((shards(work, options) / "manifest.json").read_text())["vocab"]["size"]
  fields = {k: v for k, v in fields.items() if k != "data.dir"}
  fields |= {"data.vocab_size": vocabulary, "data.vocab": "wordpiece"}
  command = [sys.executable, "-c", COSTS, options.config, json.dumps(fields), str(steps)]
  return json.loads(work.program("costs", command, JAX_PLATFORMS="cpu").splitlines()[-1])


def export(work: Work, options: Options) -> dict:
  """Exports the networks for Hugging Face; returns the sizes of their files."""
  out = work.folder / "hf"
  shutil.rmtree(out, ignore_errors=True)  # of a start that ended before it was noted
  command = [sys.executable, "-m", "electra_jax.export", str(work.folder / "run"), str(out)]
  command += ["--to", "hf", "--dtype=bfloat16", "--max-shard-mb=15"]
  work.program("export", command, JAX_PLATFORMS="cpu")
  sizes = {
    str(path.relative_to(out)): path.stat().st_size for path in sorted(out.rglob("*.safetensors"))
  }
  return {"bytes": sizes}


def source(work: Work, options: Options) -> str:
  """Returns the network that is evaluated."""
  return options.model or str(work.folder / "run")


def tuned(work: Work, options: Options, name: str, config: str, fields: dict, fresh: bool) -> dict:
  """Fine-tunes; returns the main metric of each seed on the first split of each task."""
  place = work.folder / name.replace(" ", "-")
  start = {"init": "random", "like": source(work, options)} if fresh else {}
  fields = {"init": source(work, options)} | start | TUNING | fields
  if options.smoke:
    fields |= {"seeds": 2, "data.max_length": 32, "train.epochs": 1.0}
  arguments = ("electra_jax.finetune", config, fields, f"--workdir={place}")
  program(work, name, *arguments)
  found: dict = {}
  for text in (place / "results.jsonl").read_text().splitlines():
    row = json.loads(text)
    splits = found.setdefault(row["task"], {})
    splits.setdefault(row["split"], []).append(next(iter(row["metrics"].values())))
  return {task: next(iter(splits.values())) for task, splits in found.items()}


def glue(work: Work, options: Options, fresh: bool) -> dict:
  """Fine-tunes on the tasks of GLUE that are there, on others says that they are not."""
  name = "control tasks" if fresh else "tasks"
  config = f"configs/finetune/glue.py:{','.join(options.tasks)}"
  fields = {"data.dir": options.glue, "model.head": "mean"}
  found = tuned(work, options, name, config, fields, fresh)
  missing = [TASKS[task] for task in TASKS if task not in options.tasks]
  return {"tasks": found, "could_not": [f"{x}: no folder of it in --glue" for x in missing]}


def chunking(work: Work, options: Options, fresh: bool) -> dict:
  """Fine-tunes on chunking."""
  folder = Path(options.chunk)
  fields = {"data.train": folder / "train.txt", "data.dev": folder / "test.txt"}
  fields |= {"data.max_length": 128}
  name = "control chunking" if fresh else "chunking"
  return {"tasks": tuned(work, options, name, "configs/finetune/tagging.py:chunk", fields, fresh)}


def pairs(work: Work, options: Options) -> dict:
  """Scores the minimal pairs; returns their accuracy."""
  out = work.folder / "pairs"
  shutil.rmtree(out, ignore_errors=True)
  model = source(work, options)
  command = [sys.executable, "-m", "electra_jax.evaluate", "pairs", f"--model={model}"]
  work.program("pairs", [*command, f"--data={options.pairs}", f"--out={out}"])
  found = json.loads((out / "pairs.json").read_text())
  return {"pairs": {k: found[k] for k in ("scorer", "all")}}


def make_steps(options: Options) -> dict[str, Step]:
  """Returns the steps whose files are given, in the order of their worth."""

  def trained(run: Callable[..., dict], mins: float, *args: bool, goes_on: bool = False) -> Step:
    def checked(work: Work) -> dict:
      if not options.model and work.record("train").get("status") != DONE:
        raise OutOfTime("waits for the training")
      return run(work, options, *args)

    return Step(checked, mins, goes_on)

  training = {
    "shards": Step(lambda work: build(work, options), 1, goes_on=True),
    "train": Step(lambda work: train(work, options), options.minutes, goes_on=True),
    "export": trained(export, 0.3),
  }
  evaluation = {"pairs": trained(pairs, 1)} if options.pairs else {}
  for prefix, fresh in (("", False), ("control ", True)):
    if options.tasks:
      evaluation[f"{prefix}tasks"] = trained(glue, 2, fresh, goes_on=True)
    if options.chunk:
      evaluation[f"{prefix}chunking"] = trained(chunking, 2, fresh, goes_on=True)
  return ({} if options.model else training) | evaluation


def make_row(options: Options, device: str, records: dict[str, dict]) -> dict:
  """Returns the row of results; phases that are not done are named in "left"."""
  results = {name: record.get("result", {}) for name, record in records.items()}
  row = {"arm": options.arm, "seed": options.seed, "device": device, "minutes": options.minutes}
  if options.model:
    row["model"] = Path(options.model).name
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
  """Returns whether compiled programs are there for this JAX and device, and notes for which."""
  mine = f"jax {importlib.metadata.version('jax')} on {device}"
  note = folder / "made_for.txt"
  known = note.read_text(errors="replace").strip() if note.exists() else mine
  folder.mkdir(parents=True, exist_ok=True)
  note.write_text(f"{mine}\n")
  if known == mine:
    return f"{folder.name}: {len(list(folder.iterdir())) - 1} programs are compiled"
  return f"{folder.name} was made for {known!r}: for {mine!r} everything compiles anew"


def parse() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
  """Returns the arguments, and the parser for its errors."""
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--arm", choices=ARMS, default="electra")
  p.add_argument("--seed", type=int, default=0)
  p.add_argument("--minutes", type=float, default=8.0, help="of the training (8)")
  p.add_argument("--text", nargs="*", default=(), help="files to train on")
  p.add_argument("--vocab", help="vocabulary file (one is trained)")
  p.add_argument("--shards", help="built before, instead of --text and --vocab")
  p.add_argument("--glue", help="folder with GLUE's folders")
  p.add_argument("--chunk", help="folder with train.txt and test.txt")
  p.add_argument("--pairs", help="minimal pairs")
  p.add_argument("--model", help="evaluate this export or run")
  p.add_argument("--only", nargs="+", metavar="STEP", help="train, evaluate, or names of steps")
  p.add_argument("--out", type=Path, help="folder (runs/speedrun, or runs/speedrun-smoke)")
  p.add_argument("--rows", type=Path, help="file for the row")
  p.add_argument("--budget_mins", type=float, default=TOTAL_MINS, help="to end before")
  p.add_argument("--report", action="store_true", help="write docs/speedrun.md from the rows")
  p.add_argument("--smoke", action="store_true", help="in miniature, on the CPU")
  args = p.parse_args()
  given = [*args.text, args.vocab, args.shards]
  given += [args.glue, args.chunk, args.pairs, args.model]
  if missing := [path for path in given if path and not Path(path).exists()]:
    p.error(f"not there: {', '.join(missing)}")
  if args.model and "train" in (args.only or ["train"]):
    p.error("--model goes with --only evaluate")
  if args.shards and (args.text or args.vocab):
    p.error("--shards are built already: give no --text and no --vocab")
  return args, p


def main() -> int:
  """Runs the steps and writes the row."""
  args, p = parse()
  if args.report:
    speedrun_report.write(ROWS)
    return 0
  started = time.monotonic()

  def say(text: str) -> None:
    print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

  out = (args.out or Path(f"runs/speedrun{'-smoke' * args.smoke}")).absolute()
  folder = out / (Path(args.model).name if args.model else f"{args.arm}-{args.seed}")
  folder.mkdir(parents=True, exist_ok=True)
  given = {name: getattr(args, name) for name in ("shards", "glue", "chunk", "pairs")}
  given |= speedrun_smoke.write_files(out) if args.smoke else {}
  given = {name: path and str(Path(path).absolute()) for name, path in given.items()}
  text = tuple(str(Path(path).absolute()) for path in args.text)
  options = Options(
    arm=args.arm, seed=args.seed, minutes=args.minutes, text=text, vocab=args.vocab,
    model=args.model, smoke=args.smoke, **given,
  )  # fmt: skip
  python_path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
  environment = {
    "PYTHONPATH": python_path,
    "JAX_COMPILATION_CACHE_DIR": str(out / "compiled"),
    **KEPT,
    **({"XLA_FLAGS": SMOKE_FLAGS, "JAX_PLATFORMS": "cpu"} if args.smoke else {}),
  }
  work = Work(folder, started + 60 * args.budget_mins, environment)
  os.chdir(ROOT)  # where the configurations are
  platform, device = find_device(work)
  work.check_settings(dataclasses.asdict(options) | {"device": device})
  say(check_cache(out / "compiled", device))
  steps = make_steps(options)
  parts = {"train": [x for x in ("shards", "train", "export") if x in steps]}
  parts["evaluate"] = [name for name in steps if name not in parts["train"]]
  asked = [name for x in args.only or parts for name in parts.get(x, [x])]
  if unknown := [name for name in asked if name not in steps]:
    p.error(f"unknown step: {', '.join(unknown)}; there are {', '.join([*parts, *steps])}")
  chosen = {name: step for name, step in steps.items() if name in asked}
  if not chosen:
    p.error("nothing to evaluate: give --glue, --chunk or --pairs")

  found = run_steps(chosen, work, say)
  row = make_row(options, device, {name: found.get(name) or work.record(name) for name in steps})
  rows = args.rows or (ROWS if platform == "gpu" and not args.smoke else out / "rows.jsonl")
  speedrun_report.keep(rows, row)
  print("\n".join(speedrun_report.table([row])))
  for line in row["could_not"]:
    print(f"could not: {line}")
  for name in row["left"]:
    print(f"left: {name}: {found.get(name, {}).get('reason', 'not asked for')}")
  print(f"row: {rows}")
  if any(r["status"] == FAILED for r in found.values()):
    return 1
  return STOPPED if any(r["status"] == LEFT for r in found.values()) else 0


if __name__ == "__main__":
  run_script(main)
