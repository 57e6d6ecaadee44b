"""What each objective learns from the same FLOPs: the tables and the picture of docs/evidence.md.

  python benchmarks/evidence.py --out DIR --text 'text:GLOB' --chunk DIR --pairs FILE.jsonl
                                --glue DIR [--rows FILE] [--budgets N] [--only ARM...]
                                [--at_once 2] [--smoke]
  python benchmarks/evidence.py ... --rows FILE --trial FIELD=VALUE... [--rates RATE...] [--seeds N]
  python benchmarks/evidence.py --out DIR [--rows FILE] --report [--write]

--out      what is made. Started again with the same arguments, it goes on where it was.
--text     what to pretrain on, as config.data.sources.
--chunk    folder with CoNLL-2000's train.txt and test.txt.
--pairs    BLiMP's minimal pairs.
--glue     folder with GLUE's folders (SST-2/train.tsv, ...); read from the third budget on.
--rows     where rows are kept (DIR/rows.jsonl); on another machine it goes on after them.
--budgets  how many of the four, from the smallest.
--only     arms that are run now; the others may follow.
--smoke    ten steps of two arms with a smaller network, to see that everything runs.
--trial    fields that a trial changes in the arms of --only, at the largest of --budgets. A trial
           is no contestant: its row has the fields, is in a file of its own, and is not reported.
--rates    of a trial (the three of the search).
--seeds    of a trial, how many (1).
--report   runs nothing; reports the rows that there are.
--write    puts tables and picture into docs/evidence.md.

Question: is one objective of the replaced-token family ahead of `bert` beyond two standard
deviations on minimal pairs and on chunking, at the same FLOPs (generator and heads included)? All
arms (benchmarks/evidence_config.py) have the same main network, data and optimizer, and each gets
the same search of its learning rate, with one seed: three at the smallest budget, then the best and
half of it, which longer runs may need. The two largest budgets are for `bert` and the best arms of
the budget before, at its rates. All choices, the scorer of the pairs too, are
made on data that no table shows: every third paradigm of the pairs, and 2,000 sentences cut from
chunking's training file. Rates are chosen by the latter alone: at the smallest budget the pairs are
at chance.
"""

import argparse
import ast
import functools
import shutil
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import machine
from evidence_config import ARMS, STARTS

from electra_jax.config import files
from electra_jax.core.objectives import OBJECTIVES
from electra_jax.evaluate import scorers
from electra_jax.experiments import jobs

CONFIG = Path(__file__).with_name("evidence_config.py")
REFERENCE, FRESH = "bert", "fresh weights"
RATES, PAIRS, CUT = (1.6e-3, 3.2e-3, 6.4e-3), 6_700, 2_000
FINETUNING = {"data.max_length": 64, "data.buckets": 2, "optimizer.learning_rate": 5e-4}
CHUNKING = {"train.epochs": 2.0, "optimizer.learning_rate": 2e-3}  # the best of four (LOG.md)
GLUE = {  # tasks of one command: its fields
  "sst2": {"train.epochs": 1.0, "data.train_examples": 20_000},
  "cola": {"train.epochs": 1.0},
  "mrpc,stsb": {"train.epochs": 1.0},
  "rte": {"train.epochs": 3.0},
}
HELDOUT = ("mlm_loss", "replace_mlm_loss", "rtd_auc", "unigram_auc")
SMOKE = {"model.hidden_size": 32, "model.ffn_size": 64, "model.num_layers": 1, "model.unroll": 1}
SMOKE |= {"model.embedding_size": 32, "model.num_heads": 2, "data.vocab_size": 300}
SMOKE |= {"eval.max_examples": 64}
DOCS = Path(__file__).parent.parent / "docs"


class Budget(NamedTuple):
  """FLOPs of a run, and who is trained with them."""

  flops: float
  best: int | None  # arms beside the reference: the best of the budget before; None: all
  seeds: int
  rates: tuple[float, ...] = (1.0,)  # of the search, as factors of the best at the budget before
  glue: bool = False


BUDGETS = (
  Budget(5e12, None, 3, rates=RATES),
  Budget(2e13, None, 3, rates=(1.0, 0.5)),
  Budget(8e13, 4, 3, glue=True),
  Budget(2e14, 2, 1, glue=True),
)


def prepare(args: argparse.Namespace) -> None:
  """Builds the shards, and cuts chunking's sentences for choices."""
  config = f"{CONFIG}:{REFERENCE}"
  fields = {"data.sources": args.text} | (SMOKE if args.smoke else {})
  jobs.build(args.out, args.out / "shards", config, fields)
  jobs.write_pairs(args.out, args.pairs, 201 if args.smoke else PAIRS)
  sentences = (args.chunk / "train.txt").read_text().strip().split("\n\n")
  cut = len(sentences) // 3 if args.smoke else CUT
  for name, part in (("train", sentences[:-cut]), ("choices", sentences[-cut:])):
    (args.out / f"chunk-{name}.txt").write_text("\n\n".join(part) + "\n")


def pairs_accuracy(paradigms: dict[str, dict], choices: bool) -> float:
  """Returns the accuracy in percent: on every third paradigm, for choices, or on the others."""
  chosen = [x for i, x in enumerate(paradigms.values()) if (i % 3 == 0) == choices]
  return 100 * sum(x["accuracy"] * x["pairs"] for x in chosen) / sum(x["pairs"] for x in chosen)


def chunking(args: argparse.Namespace, name: str, start: dict) -> dict[str, float]:
  """Fine-tunes on chunking; returns F1 in percent on the sentences for choices and on the test."""
  splits = {"train": args.out / "chunk-train.txt", "dev": args.out / "chunk-choices.txt"}
  splits |= {"test": args.chunk / "test.txt"}
  fields = start | {f"data.{split}": file for split, file in splits.items()}
  fields |= FINETUNING | {"keep": "none", "seeds": 1} | CHUNKING
  fields |= {"data.train_examples": 64} if args.smoke else {}
  rows = jobs.finetune(args.out, f"{name}-chunk", "configs/finetune/tagging.py:chunk", fields)
  found = {row["split"]: jobs.main_metric(row) for row in rows}
  return {"chunk_choices": found["dev"], "chunk": found["test"]}


def glue(args: argparse.Namespace, name: str, start: dict) -> dict[str, list[float]]:
  """Fine-tunes on the tasks of GLUE; returns the main metric of each seed, {task: [3]}."""
  found: dict[str, list[float]] = {}
  for tasks, own in [("rte", {})] if args.smoke else GLUE.items():
    fields = start | {"data.dir": args.glue} | FINETUNING | {"keep": "none", "seeds": 3} | own
    fields |= {"data.train_examples": 64} if args.smoke else {}
    rows = jobs.finetune(
      args.out, f"{name}-{tasks.replace(',', '-')}", f"configs/finetune/glue.py:{tasks}", fields
    )
    for row in rows:
      if row["split"] == "dev":
        found.setdefault(row["task"], []).append(jobs.main_metric(row))
  return found


def scorers_of(arm: str) -> list[str]:
  """Returns the scorers of pairs that the main network of an arm has heads for."""
  objective = files.load(CONFIG, arm).objective.name
  heads = OBJECTIVES[objective].heads
  also = [name for name in ("mlm", "mlm_unmasked") if scorers.SCORERS[name].head in heads]
  return list(dict.fromkeys([scorers.default(objective, heads), *also]))


def train(args: argparse.Namespace, arm: str, budget: Budget, rate: float, seed: int) -> Path:
  """Trains an arm, and before it the one that it starts from; returns its workdir."""
  config, flops = f"{CONFIG}:{arm}", budget.flops
  own = {"seed": seed} | args.trial | (SMOKE if args.smoke else {})
  if start := STARTS.get(arm):
    flops /= 2
    own["init_from"] = str(train(args, start, budget._replace(flops=flops), rate, seed))
  fields = {"data.dir": args.out / "shards"} | jobs.at_rate(config, own, rate, flops)
  name = ",".join([arm, *(f"{field}={value}" for field, value in args.trial.items())])
  return jobs.train(args.out, f"{name}-{budget.flops:g}-{rate:g}-{seed}", config, fields)


def measure(args: argparse.Namespace, arm: str, budget: Budget, rate: float, seed: int) -> dict:
  """Trains an arm, scores the pairs and fine-tunes it; returns its results."""
  folder = train(args, arm, budget, rate, seed)
  name, last = folder.name, jobs.heldout(folder)[-1]
  row = {"steps": last["step"]}
  row |= {key: last[key] for key in HELDOUT if last.get(key) is not None}
  for scorer in scorers_of(arm):
    paradigms = jobs.score_pairs(args.out, folder, scorer)["paradigms"]
    row[f"pairs_{scorer}_choices"] = pairs_accuracy(paradigms, choices=True)
    row[f"pairs_{scorer}"] = pairs_accuracy(paradigms, choices=False)
  row |= chunking(args, name, {"init": folder})
  if budget.glue and seed == 0:
    row["glue"] = glue(args, name, {"init": folder})
  return row


def controls(args: argparse.Namespace, budgets: list[Budget], rate: float) -> list[tuple]:
  """Returns what is fine-tuned from fresh weights: (key of the row, function that makes it)."""

  def start() -> dict:  # on another machine the run whose shape they have may be missing
    return {"init": "random", "like": train(args, REFERENCE, budgets[0], rate, 0)}

  def chunk(seed: int) -> dict:
    return chunking(args, f"fresh-{seed}", start() | {"seed": seed})

  key, seeds = {"arm": FRESH, "flops": 0.0}, range(budgets[0].seeds)
  found = [(key | {"seed": seed}, functools.partial(chunk, seed)) for seed in seeds]
  if budgets[-1].glue:
    found.append((key | {"of": "glue"}, lambda: {"glue": glue(args, "fresh", start())}))
  return found


def scorer_of(rows: list[dict]) -> str:
  """Returns the scorer of an arm's rows that is best on the pairs for choices.

  Rows made before a scorer was added do not have it.
  """
  names = set.intersection(*map(set, rows))
  names = (key for key in names if key.startswith("pairs_") and key.endswith("_choices"))
  best = max(sorted(names), key=lambda key: statistics.fmean(row[key] for row in rows))
  return best.removesuffix("_choices")


def for_choices(rows: list[dict]) -> float:
  """Returns the mean of pairs and chunking of an arm's rows, on the data for choices."""
  pairs = f"{scorer_of(rows)}_choices"
  return statistics.fmean((row[pairs] + row["chunk_choices"]) / 2 for row in rows)


def of_arm(rows: Iterable[dict], arm: str, flops: float) -> list[dict]:
  """Returns the rows of an arm at a budget."""
  return [row for row in rows if row["arm"] == arm and row["flops"] == flops]


def best_rates(rows: list[dict], flops: float) -> dict[str, float]:
  """Returns the best learning rate of each arm at a budget, by its first seed."""
  best: dict[str, dict] = {}
  for row in rows:
    if row["flops"] == flops and row["seed"] == 0:
      arm = row["arm"]
      best[arm] = max(best.get(arm, row), row, key=lambda found: found["chunk_choices"])
  return {arm: row["rate"] for arm, row in best.items()}


def at_best(rows: list[dict]) -> list[dict]:
  """Returns the rows at each arm's best learning rate at their budget, without the controls."""
  runs = [row for row in rows if row["arm"] != FRESH]
  best = {flops: best_rates(runs, flops) for flops in {row["flops"] for row in runs}}
  return [row for row in runs if row["rate"] == best[row["flops"]].get(row["arm"])]


def next_arms(rows: list[dict], before: Budget, budget: Budget, arms: list[str]) -> list[str]:
  """Returns the arms of a budget: the reference and the best of those of the budget before."""
  if budget.best is None:
    return arms
  others = [arm for arm in arms if arm != REFERENCE]
  others.sort(key=lambda arm: for_choices(of_arm(rows, arm, before.flops)), reverse=True)
  return [REFERENCE, *others[: budget.best]]


def run_all(args: argparse.Namespace, budgets: list[Budget], rows: jobs.Rows) -> None:
  """Runs the search, the budgets and the control; adds a row for each run as it ends."""
  arms = [REFERENCE, "electra_mlm-from-bert"] if args.smoke else args.only
  with jobs.workers(args.at_once) as pool:

    def once(arm: str, budget: Budget, rate: float, seed: int) -> dict:
      key = {"arm": arm, "flops": budget.flops, "rate": rate, "seed": seed}
      key |= {"fields": args.trial} if args.trial else {}
      return rows.once(key, lambda: measure(args, arm, budget, rate, seed))

    def measured(places: list[tuple]) -> None:
      jobs.finish([pool.submit(once, *place) for place in places])

    if args.trial:
      seeds, rates = range(args.seeds), args.rates
      return measured([(a, budgets[-1], r, seed) for seed in seeds for r in rates for a in arms])
    best, queued = dict.fromkeys(arms, 1.0), []
    for before, budget in zip([None, *budgets], budgets, strict=False):
      if before:
        arms = next_arms(at_best(rows.read()), before, budget, arms)
      measured([(arm, budget, best[arm] * x, 0) for x in budget.rates for arm in arms])
      best = best_rates(rows.read(), budget.flops)
      if not before:
        fresh = controls(args, budgets, best[REFERENCE])
        queued = [pool.submit(rows.once, *control) for control in fresh]
      measured([(arm, budget, best[arm], seed) for seed in range(1, budget.seeds) for arm in arms])
    jobs.finish(queued)


def columns(rows: list[dict], reference: list[dict]) -> list[str]:
  """Returns the cells of an arm: minimal pairs and chunking, beside the reference's if any."""
  scorer, theirs = scorer_of(rows), scorer_of(reference or rows)
  pairs = jobs.compared([row[scorer] for row in rows], [row[theirs] for row in reference], 1)
  chunk = jobs.compared([row["chunk"] for row in rows], [row["chunk"] for row in reference], 2)
  return [f"{pairs}, {scorer.removeprefix('pairs_')}", chunk]


def table(rows: list[dict], flops: float) -> list[str]:
  """Returns the lines of the table of a budget, in markdown."""
  lines = [
    "| arm | rate | steps | held out | minimal pairs, % | chunking, F1 |",
    "|---|---|---|---|---|---|",
  ]
  reference = of_arm(rows, REFERENCE, flops)
  for arm in ARMS:
    if mine := of_arm(rows, arm, flops):
      first = mine[0]
      found = (
        f"{key} {statistics.fmean(r[key] for r in mine):.3f}" for key in HELDOUT if key in first
      )
      cells = [arm, f"{first['rate']:g}", f"{first['steps']:,}", ", ".join(found)]
      lines.append(
        f"| {' | '.join(cells + columns(mine, [] if arm == REFERENCE else reference))} |"
      )
  return lines


def glue_table(rows: list[dict]) -> list[str]:
  """Returns the lines of the table of GLUE's tasks, in markdown."""
  rows = [row for row in rows if "glue" in row]
  if not rows:
    return []
  tasks = list(rows[0]["glue"])
  lines = [f"| arm | FLOPs | {' | '.join(tasks)} |", "|---" * (len(tasks) + 2) + "|"]
  for row in rows:
    cells = [jobs.compared(row["glue"][task], [], 1) for task in tasks]
    lines.append(f"| {row['arm']} | {row['flops']:.0e} | {' | '.join(cells)} |")
  return lines


def draw(rows: list[dict], fresh: list[float], path: Path) -> None:
  """Draws score against FLOPs, a line an arm, and writes a PNG.

  Args:
    fresh: chunking's F1 from fresh weights, of each seed.
  """
  from matplotlib import colormaps
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
  FigureCanvasAgg(figure)
  for axis, name in zip(figure.subplots(1, 2), ("minimal pairs, %", "chunking, F1"), strict=True):
    for i, arm in enumerate(ARMS):
      if not (budgets := sorted({row["flops"] for row in rows if row["arm"] == arm})):
        continue
      found = [of_arm(rows, arm, flops) for flops in budgets]
      keys = [scorer_of(mine) if "pairs" in name else "chunk" for mine in found]
      values = [[r[key] for r in mine] for mine, key in zip(found, keys, strict=True)]
      axis.errorbar(
        budgets, [statistics.fmean(v) for v in values],
        [statistics.stdev(v) if len(v) > 1 else 0 for v in values],
        color=colormaps["tab20"].colors[i], marker="os^v"[i % 4], markersize=5, capsize=2,
        label=arm, linewidth=2.5 if arm == REFERENCE else 1.3,
      )  # fmt: skip
    level = 50 if "pairs" in name else fresh and statistics.fmean(fresh)
    if level:
      axis.axhline(level, color="#666666", linestyle="--", linewidth=1)
    axis.set(
      xscale="log", xlabel="FLOPs of pretraining (dashed: chance, fresh weights)", title=name
    )
    axis.set_xticks(marks := sorted({row["flops"] for row in rows}), [f"{x:g}" for x in marks])
    axis.minorticks_off()
    axis.grid(alpha=0.25)
  figure.axes[1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
  figure.savefig(path, format="png")


def report(args: argparse.Namespace, rows: list[dict]) -> None:
  """Writes evidence.md, evidence.png and evidence.json, and with --write docs/evidence.md."""
  control, best = [row for row in rows if row["arm"] == FRESH], at_best(rows)
  fresh = [row["chunk"] for row in control if "chunk" in row]
  lines = []
  for flops in sorted({row["flops"] for row in best}):
    lines += [f"## {flops:.0e} FLOPs", "", *table(best, flops), ""]
  if fresh:
    lines += [f"Fresh weights: chunking F1 {jobs.compared(fresh, [], 2)}.", ""]
  text = "\n".join([*lines, *glue_table([*best, *control])]).strip() + "\n"
  (args.out / "evidence.md").write_text(text)
  print(text)
  draw(best, fresh, args.out / "evidence.png")
  if args.write:
    machine.write_between(DOCS / "evidence.md", "evidence", text)
    shutil.copy(args.out / "evidence.png", DOCS)
  hidden = [args.out, args.chunk, args.text, args.pairs, args.glue]
  machine.save(str(args.out / "evidence.json"), {"rows": rows}, hide=hidden)


def field(text: str) -> tuple[str, object]:
  """Returns name and value of a FIELD=VALUE."""
  name, given, value = text.partition("=")
  if not given:
    raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
  try:
    return name, ast.literal_eval(value)
  except (SyntaxError, ValueError):
    return name, value


def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--out", type=Path, required=True)
  p.add_argument("--text")
  p.add_argument("--chunk", type=Path)
  p.add_argument("--pairs", type=Path)
  p.add_argument("--glue")
  p.add_argument("--rows", type=Path)
  p.add_argument("--budgets", type=int, choices=range(1, 5), default=4)
  p.add_argument("--only", nargs="*", choices=ARMS, default=list(ARMS), metavar="ARM")
  p.add_argument("--at_once", type=int, default=2)
  p.add_argument("--smoke", action="store_true")
  p.add_argument("--trial", nargs="+", type=field, default=[], metavar="FIELD=VALUE")
  p.add_argument("--rates", nargs="+", type=float, default=RATES, metavar="RATE")
  p.add_argument("--seeds", type=int, default=1, metavar="N")
  p.add_argument("--report", action="store_true")
  p.add_argument("--write", action="store_true")
  args = p.parse_args()
  args.trial = dict(args.trial)
  rows = jobs.Rows(args.rows or args.out / "rows.jsonl")
  budgets = BUDGETS[: args.budgets]
  if args.smoke:
    small, glue_too = (b._replace(flops=b.flops / 1e6, seeds=1) for b in BUDGETS[1:3])
    budgets = [small._replace(rates=RATES[:1]), glue_too]
  known = {row["arm"] for row in rows.read()}
  if not (args.report or args.trial or REFERENCE in {*args.only, *known}):
    p.error(f"--only: {REFERENCE} has no row yet, and the others are compared with it")
  if args.trial and not args.rows:
    p.error("--trial needs --rows, a file of trials")
  if not args.report:
    if missing := [name for name in ("text", "chunk", "pairs", "glue") if not getattr(args, name)]:
      p.error(f"--{missing[0]} is needed")
    args.out.mkdir(parents=True, exist_ok=True)
    prepare(args)
    run_all(args, budgets, rows)
    if args.trial:
      return
  report(args, rows.read())


if __name__ == "__main__":
  main()
