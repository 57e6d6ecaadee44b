"""Minutes of pretraining with five objectives at equal compute, then fine-tuning on six tasks.

  python benchmarks/evidence.py --out DIR --glue DIR --chunk DIR --text 'text:GLOB'
                                [--nets quickstart|small] [--minutes N | --steps N]
                                [--objectives NAME...] [--at_once N] [--smoke]

--out      what is made: shards, runs, results, evidence.json. Started again with the same
           arguments, it goes on where it was: nothing that has ended is done again.
--glue     folder with GLUE's folders (SST-2/train.tsv, ...).
--chunk    folder with CoNLL-2000's train.txt and test.txt.
--text     what to pretrain on, as config.data.sources.
--nets     quickstart's networks, in an hour and a half on two cores, or ELECTRA-Small, for a GPU.
--minutes  quickstart: of all pretrainings together on two cores, roughly; gives the steps.
--steps    small: of ELECTRA.
--objectives  of them all, to save time.
--at_once  programs that run side by side, each on its share of the cores; 1 on an accelerator.
--smoke    two objectives for a few steps and two tasks, to see that everything runs.

Every objective has the same data, main network, optimizer and compute; fresh weights are the
control. Quickstart's networks learn from short sequences first, in which they find the neighbours
of a token soonest (LOG.md), and then from longer ones, for the positions that tasks need. Compute
is counted in matrix products as they are done; the paper's accounting, which multiplies by whole
embedding tables, is in the JSON beside it.

It prints tables in markdown: medians over seeds, means, standard deviations, the paper's order.
"""

import argparse
import contextlib
import itertools
import json
import os
import queue
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

import machine
from evidence_settings import (
  MINUTES,
  PAPER,
  Phase,
  Setting,
  quickstart_setting,
  small_setting,
  smoke_setting,
)

from electra_jax import flops
from electra_jax.config import files
from electra_jax.finetune.statistics import summary
from electra_jax.runtime.metrics import read_history

REFERENCE = "electra"  # whose steps are given; the others take as many as cost the same
RANDOM = "random"
HELDOUT = {"mlm_loss", "replace_mlm_loss", "all_tokens_loss", "mlm_accuracy", "rtd_auc"}


# Commands.


def json_lines(path: Path) -> list[dict]:
  """Returns the JSON objects of a file, without a line that was cut off."""
  found = []
  for line in path.read_text().splitlines() if path.exists() else ():
    with contextlib.suppress(ValueError):
      found.append(json.loads(line))
  return found


def run(out: Path, job: str, module: str, arguments: list[str], ended: Callable[[], bool]) -> None:
  """Runs a program of the package, unless it has already ended well with the same arguments.

  Its output goes to out/logs, its arguments and seconds to out/commands.jsonl. Fine-tunings share
  what they compile, because all starts have the same shapes.

  Args:
    ended: whether the work is complete; a program that is interrupted exits with 0, too.

  Raises:
    SystemExit: it failed or was interrupted; the message ends with its last output.
  """
  lines = json_lines(out / "commands.jsonl")
  if any(x["job"] == job and x["arguments"] == arguments and x["ended"] for x in lines):
    return
  command = [sys.executable, "-m", module, *arguments]
  log = out / "logs" / f"{job.replace('/', '-')}.log"
  log.parent.mkdir(parents=True, exist_ok=True)
  print(f"{job}: {shlex.join(command)}", flush=True)
  environment = os.environ | (
    {"JAX_COMPILATION_CACHE_DIR": str((out / "compiled").absolute())}
    if job.startswith("finetune/")
    else {}
  )
  start, code, complete = time.perf_counter(), None, False
  try:
    with log.open("w") as file:
      code = subprocess.run(
        command, stdout=file, stderr=subprocess.STDOUT, env=environment
      ).returncode
    complete = code == 0 and ended()
  finally:
    line = {"job": job, "arguments": arguments, "secs": time.perf_counter() - start}
    with (out / "commands.jsonl").open("a") as file:
      file.write(json.dumps(line | {"returncode": code, "ended": complete}) + "\n")
  if not complete:
    why = f"ended with {code}" if code else "was interrupted"
    raise SystemExit(f"{log.read_text()[-4000:]}\n{job} {why}; all of its output: {log}")
  print(f"{job}: {line['secs']:.0f} s", flush=True)


@contextlib.contextmanager
def workers(at_once: int) -> Iterator[ThreadPoolExecutor]:
  """Gives threads that run programs, each on its own share of the cores.

  Networks this small leave most of a second core idle: two trainings on a core each took 30,300
  tokens/s together, one on both cores 23,300. If one fails, what is still in the queue is dropped.
  """
  cores = sorted(os.sched_getaffinity(0))
  shares = queue.SimpleQueue()
  for place in range(at_once):
    shares.put(cores[place % len(cores) :: at_once])
  # Linux keeps affinity for a thread, and the programs that it starts inherit it.
  with ThreadPoolExecutor(
    at_once, initializer=lambda: os.sched_setaffinity(0, shares.get())
  ) as pool:
    try:
      yield pool
    except BaseException:
      pool.shutdown(cancel_futures=True)
      raise


def finish(jobs: list[Future]) -> None:
  """Waits for all jobs; raises as soon as one fails, whatever is before it."""
  done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
  for job in done:
    job.result()


def assignments(overrides: dict) -> list[str]:
  """Returns fields of a configuration as a command line sets them."""
  return [f"--config.{name}={value}" for name, value in overrides.items()]


# Pretraining.


def shards(out: Path, phase: Phase) -> Path:
  """Returns the folder of the shards of a phase."""
  return out / "shards" / str(phase.seq_length)


def run_folder(out: Path, objective: str, place: int) -> Path:
  """Returns the workdir of the phase at a place in the setting."""
  return out / "pretrain" / objective / f"phase{place + 1}"


def build(out: Path, setting: Setting, phase: Phase, text: str) -> None:
  """Builds the shards of a phase; all have the vocabulary that the first one trains."""
  fields = {k: v for k, v in setting.recipe.items() if k.startswith(("data.", "model."))} | {
    "data.dir": shards(out, phase),
    "data.seq_length": phase.seq_length,
    "data.examples": phase.examples,
    "data.sources": text,
  }
  if phase is not setting.phases[0]:
    fields["data.vocab"] = shards(out, setting.phases[0]) / "vocab.txt"
  arguments = [f"--config=configs/{setting.nets}.py", *assignments(fields)]
  ended = (shards(out, phase) / "manifest.json").is_file
  run(out, f"build/{phase.seq_length}", "electra_jax.data.build", arguments, ended)


def phase_fields(setting: Setting, phase: Phase) -> dict:
  """Returns what a pretraining sets in a phase, but for the number of steps and paths."""
  return setting.recipe | {
    "data.seq_length": phase.seq_length,
    "train.batch_size": phase.batch_size,
    "optimizer.learning_rate": phase.learning_rate,
    "optimizer.warmup_steps": phase.warmup_steps,
  }


def count_steps(setting: Setting) -> dict[str, list[dict]]:
  """Returns the steps of each objective and phase, and what they cost by both accountings."""
  plan = {name: [] for name in setting.objectives}
  for phase in setting.phases:
    costs = {}
    for name in {REFERENCE, *setting.objectives}:
      config = files.load(f"{name}.py", setting.nets)
      config.update_from_flattened_dict(phase_fields(setting, phase))
      costs[name] = [sum(parts.values()) for parts in flops.step_costs(config)]
    for name in setting.objectives:
      counted, products = costs[name]
      steps = max(1, round(phase.steps * costs[REFERENCE][1] / products))
      plan[name].append(
        {
          "steps": steps,
          "tokens": steps * phase.batch_size * phase.seq_length,
          "flops_matrix_products": steps * products,
          "flops_paper_accounting": steps * counted,
        }
      )
  return plan


def heldout(folder: Path) -> list[dict]:
  """Returns the evaluations of a run, first to last."""
  return [x for x in read_history(folder / "metrics.jsonl") if x["split"] == "heldout"]


def pretrain(out: Path, setting: Setting, name: str, plan: list[dict]) -> None:
  """Trains an objective; a phase starts from the weights of the one before."""
  for place, (phase, planned) in enumerate(zip(setting.phases, plan, strict=True)):
    steps, folder = planned["steps"], run_folder(out, name, place)
    fields = phase_fields(setting, phase) | {"data.dir": shards(out, phase), "train.steps": steps}
    if files.load(f"{name}.py", setting.nets).optimizer.separate_optimizers:
      fields["optimizer.generator_learning_rate"] = phase.learning_rate
    if place:
      fields["init_from"] = run_folder(out, name, place - 1)
    arguments = [f"--config=configs/{name}.py:{setting.nets}", f"--workdir={folder}"]

    def ended(folder=folder, steps=steps) -> bool:
      lines = heldout(folder)
      return bool(lines) and lines[-1]["step"] == steps

    job = f"pretrain/{name}/phase{place + 1}"
    run(out, job, "electra_jax.train", arguments + assignments(fields), ended)


# Fine-tuning.


def finetune(
  out: Path, setting: Setting, init: str, name: str, glue: str, chunk: str
) -> list[dict]:
  """Fine-tunes a pretrained network, or fresh weights, on the tasks of a command.

  Returns:
    A row a task and seed: {"task", "split", "seed", "metrics": {name: percent, the main one first},
    "collapsed"}.
  """
  finetuning = setting.finetunings[name]
  last = len(setting.phases) - 1
  if init == RANDOM:
    fields = {"init": RANDOM, "like": run_folder(out, setting.objectives[0], last)}
  else:
    fields = {"init": run_folder(out, init, last)}
  if name == "chunk":
    fields |= {"data.train": f"{chunk}/train.txt", "data.dev": f"{chunk}/test.txt"}
  else:
    fields |= {"data.dir": glue}
  fields |= {"seeds": setting.seeds} | setting.finetune_recipe | finetuning.overrides
  folder = out / "finetune" / init / name
  arguments = [f"--config=configs/finetune/{finetuning.config}", f"--workdir={folder}"]
  arguments += assignments(fields)
  results = folder / "results.jsonl"
  run(out, f"finetune/{init}/{name}", "electra_jax.finetune", arguments, results.is_file)
  rows = [row for row in json_lines(results) if row["split"] == "dev"]
  expected = len(finetuning.tasks) * setting.seeds
  if len(rows) != expected:
    raise SystemExit(f"{results}: {len(rows)} results on dev, expected {expected}")
  return rows


def run_all(out: Path, setting: Setting, plan: dict, args: argparse.Namespace) -> dict:
  """Builds, pretrains and fine-tunes; returns the rows of results of each start."""
  first, *others = setting.phases
  names = setting.objectives
  build(out, setting, first, args.text)
  with workers(args.at_once) as pool:
    for built in [pool.submit(build, out, setting, x, args.text) for x in others]:
      built.result()
    pretrained = {name: pool.submit(pretrain, out, setting, name, plan[name]) for name in names}

    def tune(init: str, name: str) -> list[dict]:
      # First come, first served: what is waited for has begun, so this does not wait for itself.
      pretrained[names[0] if init == RANDOM else init].result()
      return finetune(out, setting, init, name, args.glue, args.chunk)

    tuned = {
      init: [pool.submit(tune, init, name) for name in setting.finetunings]
      for init in (names[0], RANDOM, *names[1:])
    }
    finish([*pretrained.values(), *itertools.chain(*tuned.values())])
    return {init: [row for job in jobs for row in job.result()] for init, jobs in tuned.items()}


# What came of it.


def collect(out: Path, setting: Setting, plan: dict, results: dict[str, list[dict]]) -> dict:
  """Returns everything that is kept: settings, costs, held-out metrics, every seed's result."""
  secs: dict[str, float] = {}
  for line in json_lines(out / "commands.jsonl"):
    secs[line["job"]] = secs.get(line["job"], 0.0) + line["secs"]
  pretrained = {}
  for name in setting.objectives:
    phases = []
    for place, planned in enumerate(plan[name]):
      first, *_, last = heldout(run_folder(out, name, place))
      spent = secs[f"pretrain/{name}/phase{place + 1}"]
      phases.append(planned | {"heldout_first": first, "heldout_last": last, "secs": spent})
    pretrained[name] = phases
  return {
    "settings": {
      "phases": [phase._asdict() for phase in setting.phases],
      "nets": setting.nets,
      "pretraining_with": setting.recipe,
      "finetuning_with": setting.finetune_recipe,
      "finetunings": {k: f._asdict() for k, f in setting.finetunings.items()},
      "seeds": setting.seeds,
      "equal_compute": "matrix products as they are done (electra_jax.flops), in each phase",
    },
    "pretraining": pretrained,
    "finetuning": results,
    "paper_glue_dev_base": PAPER,
    "secs": secs,
  }


def main_metrics(rows: list[dict]) -> dict[str, list[float]]:
  """Returns {task: the main metric of its seeds}."""
  found: dict[str, list[float]] = {}
  for row in rows:
    found.setdefault(row["task"], []).append(next(iter(row["metrics"].values())))
  return found


def pretraining_table(setting: Setting, content: dict) -> list[str]:
  """Returns the lines of a table of the pretrainings, in markdown."""
  lines = [
    "| objective | steps | tokens | FLOPs | held out at the end | minutes |",
    "|---|---|---|---|---|---|",
  ]
  for name in setting.objectives:
    phases = content["pretraining"][name]
    steps = " + ".join(f"{p['steps']:,}" for p in phases)
    tokens, cost, secs = (
      sum(p[k] for p in phases) for k in ("tokens", "flops_matrix_products", "secs")
    )
    last = phases[-1]["heldout_last"]
    said = ", ".join(f"{k} {v:.3f}" for k, v in last.items() if k in HELDOUT and v is not None)
    lines.append(
      f"| {name} | {steps} | {tokens / 1e6:.1f} M | {cost:.3g} | {said} | {secs / 60:.1f} |"
    )
  return lines


def results_table(results: dict[str, list[dict]]) -> list[str]:
  """Returns the lines of a table of the results and of the order they give, in markdown."""
  values = {init: main_metrics(rows) for init, rows in results.items()}
  tasks = list(next(iter(values.values())))
  average = {
    init: statistics.fmean(summary(found[task]).median for task in tasks)
    for init, found in values.items()
  }
  lines = [
    f"| start | paper, GLUE | average | {' | '.join(tasks)} |",
    "|---|---|---|" + "---|" * len(tasks),
  ]
  for init, found in values.items():
    cells = []
    for task in tasks:
      s = summary(found[task])
      collapsed = sum(row["collapsed"] for row in results[init] if row["task"] == task)
      note = f", {collapsed} of {s.n} collapsed" if collapsed else ""
      cells.append(f"{s.median:.1f} ({s.mean:.1f} ± {s.std:.1f}{note})")
    lines.append(f"| {init} | {PAPER.get(init, '')} | {average[init]:.1f} | {' | '.join(cells)} |")
  order = sorted(average, key=average.get, reverse=True)
  paper = sorted((x for x in average if x in PAPER), key=PAPER.get, reverse=True)
  return [
    *lines,
    "",
    "Percent on dev (chunking: test): median over seeds (mean ± standard deviation).",
    f"Order here:  {' > '.join(order)}",
    f"Paper, base: {', '.join(f'{name} {PAPER[name]}' for name in paper)}",
  ]


def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  for name in ("out", "glue", "chunk", "text"):
    p.add_argument(f"--{name}", required=True)
  p.add_argument("--nets", choices=("quickstart", "small"), default="quickstart")
  p.add_argument("--minutes", type=float, default=MINUTES)
  p.add_argument("--steps", type=int, default=100_000)
  p.add_argument("--objectives", nargs="+", choices=PAPER, default=list(PAPER))
  p.add_argument("--at_once", type=int, default=2)
  p.add_argument("--smoke", action="store_true")
  args = p.parse_args()
  if min(args.minutes, args.steps, args.at_once) <= 0:
    p.error("--minutes, --steps and --at_once are above 0")
  objectives = tuple(args.objectives)
  if args.nets == "quickstart":
    setting = quickstart_setting(args.minutes, objectives)
  else:
    setting = small_setting(args.steps, objectives)
  if args.smoke:
    setting = smoke_setting(setting)
  out = Path(args.out)
  out.mkdir(parents=True, exist_ok=True)
  plan = count_steps(setting)
  results = run_all(out, setting, plan, args)
  content = collect(out, setting, plan, results)
  hidden = [args.out, args.glue, args.chunk, args.text]
  machine.save(str(out / "evidence.json"), content, hide=hidden)
  tables = [*pretraining_table(setting, content), "", *results_table(results)]
  (out / "evidence.md").write_text("\n".join(tables) + "\n")
  print("\n".join(tables))


if __name__ == "__main__":
  main()
