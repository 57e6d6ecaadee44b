"""Objectives at equal FLOPs: an experiment, and its page.

  electra-jax experiment benchmarks/evidence.py:DATA[,FIELD=VALUE...] --out=DIR --at-once=2
      --rows=benchmarks/results/evidence_rows.jsonl [--only=ARM,...]
  python benchmarks/evidence.py [--rows FILE] [--write]     # tables and picture

DATA has text.txt to pretrain on, chunk/train.txt and chunk/test.txt of CoNLL-2000, pairs.jsonl (of
BLiMP) and glue/ with GLUE's folders. FIELD=VALUE sets a field in all arms, for a trial with a
separate folder and file of rows.

Question: is one objective of the replaced-token family ahead of `bert` by more than two standard
deviations on minimal pairs and on chunking, at the same FLOPs (generator and heads included)? All
arms (benchmarks/evidence_config.py) have the same main network, data and optimizer, and the same
search for the learning rate, with one seed: three rates at the smallest budget, then the best and
half of it, which longer runs may need. The two largest budgets are for `bert` and the best arms of
the previous budget, at its rates. All choices, including the scorer of the pairs, use data that no
table shows: every third paradigm of the pairs, and 2,000 sentences of chunking's training file.
Rates are chosen on the sentences alone, because at the smallest budget the pairs are at chance.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import machine
from evidence_config import ARMS, STARTS

from electra_jax.commands import cli
from electra_jax.config import compare
from electra_jax.core.objectives import OBJECTIVES
from electra_jax.evaluate import scorers
from electra_jax.experiments import jobs, plan
from electra_jax.experiments.definition import Arm, Budget, Experiment, Pairs, Task, number
from electra_jax.monitor import curves

HERE = Path(__file__).resolve().parent
PAGE, PICTURE = HERE / "results" / "evidence.md", machine.ROOT / "docs" / "evidence.png"
ROWS, CONFIG = HERE / "results" / "evidence_rows.jsonl", HERE / "evidence_config.py"
HEAD = (
  "# The evidence: every arm",
  "",
  "Means over seeds ± their standard deviation, differences from `bert` ± their standard error, and"
  " the scorer of the pairs. [Method and conclusions](../../docs/evidence.md).",
)
REFERENCE, FRESH = "bert", "fresh weights"
SPLITS = {"train": "fitting", "dev": "choices", "test": "test"}
RATES, CUT = (1.6e-3, 3.2e-3, 6.4e-3), 2_000
FINETUNING = {
  "data.max_length": 64, "data.buckets": 2, "optimizer.learning_rate": 5e-4, "model.head": "linear"
}  # fmt: skip
CHUNKING = {"train.epochs": 2.0, "optimizer.learning_rate": 2e-3}  # the best of four (LOG.md)
GLUE = {
  "sst2": {"train.epochs": 1.0, "data.train_examples": 20_000},
  "cola": {"train.epochs": 1.0},
  "mrpc": {"train.epochs": 1.0},
  "stsb": {"train.epochs": 1.0},
  "rte": {"train.epochs": 3.0},
}
HELDOUT = ("mlm_loss", "replace_mlm_loss", "rtd_auc", "unigram_auc")
BUDGETS = (
  Budget(5e12, without=tuple(GLUE)),
  Budget(2e13, without=tuple(GLUE), factors=(1.0, 0.5)),
  Budget(8e13, best=4, factors=(1.0,)),
  Budget(2e14, best=2, factors=(1.0,), seeds=1),
)


def get_experiment(arg: str = "data") -> Experiment:
  """Returns the experiment; `arg` is the folder of the data, then fields of a trial."""
  folder, *trial = arg.split(",")
  data = Path(folder)
  cut_chunking(data / "chunk")
  words = [f"--config.{text}" for text in trial]
  config, names, _ = cli.configured(f"{CONFIG}:{REFERENCE}", words)
  changed = {name: compare.flatten(config)[name] for name in names}
  fields = {"data.dir": str(data / "shards"), "data.sources": f"text:{data / 'text.txt'}"}
  arms = {
    name: Arm(f"{CONFIG}:{name}", changed, RATES, after=STARTS.get(name), same_rate=name in STARTS)
    for name in ARMS
  }
  arms[FRESH] = Arm(untrained=REFERENCE)
  chunking = {f"data.{k}": data / "chunk" / f"{v}.txt" for k, v in SPLITS.items()}
  tasks = {
    name: Task(
      f"finetune/glue:{name}",
      {"data.dir": data / "glue", **FINETUNING, **own},
      seeds=3,
      first_seed=True,
    )
    for name, own in GLUE.items()
  }
  tasks["chunk"] = Task(
    "finetune/tagging:chunk",
    chunking | FINETUNING | CHUNKING,
    splits={"chunk_choices": "dev", "chunk": "test"},
  )
  return Experiment(
    arms=arms,
    budgets=BUDGETS,
    control=REFERENCE,
    fields=fields,
    choose="chunk_choices",
    rank=for_choices,
    heldout=HELDOUT,
    pairs=Pairs(str(data / "pairs.jsonl"), 6_700, scorers_of, every=3),
    tasks=tasks,
  )


def cut_chunking(folder: Path, count: int = CUT) -> None:
  """Takes `count` sentences for choices from chunking's training file, unless that is done."""
  if (folder / "train.txt").exists() and not (folder / "choices.txt").exists():
    sentences = (folder / "train.txt").read_text("utf-8").strip().split("\n\n")
    for name, part in (("fitting", sentences[:-count]), ("choices", sentences[-count:])):
      (folder / f"{name}.txt").write_text("\n\n".join(part) + "\n", "utf-8")


def scorers_of(config: Mapping) -> list[str]:
  """Returns the pair scorers for which an arm's main network has heads."""
  objective = config.objective.name
  heads = OBJECTIVES[objective].heads
  also = [name for name in ("mlm", "mlm_unmasked") if scorers.SCORERS[name].head in heads]
  return list(dict.fromkeys([scorers.default(objective, heads), *also]))


def scorer_of(rows: Sequence[Mapping]) -> str:
  """Returns the scorer of an arm's rows that is best on the pairs for choices.

  Rows made before a scorer was added do not have it.
  """
  names = set.intersection(*map(set, rows))
  names = (key for key in names if key.startswith("pairs_") and key.endswith("_choices"))
  best = max(sorted(names), key=lambda key: statistics.fmean(row[key] for row in rows))
  return best.removesuffix("_choices")


def for_choices(rows: Sequence[Mapping]) -> float:
  """Returns the mean of pairs and chunking of an arm's rows, on the data for choices."""
  pairs = f"{scorer_of(rows)}_choices"
  return statistics.fmean((row[pairs] + row["chunk_choices"]) / 2 for row in rows)


def of_arm(rows: Sequence[Mapping], arm: str, budget: float) -> list[Mapping]:
  """Returns the rows of an arm at a budget."""
  return [row for row in rows if row["arm"] == arm and row["budget"] == budget]


def table(rows: Sequence[Mapping], budget: float) -> list[str]:
  """Returns the lines of the table of a budget, in markdown."""
  lines = [
    "| arm | rate | steps | held out | minimal pairs, % | chunking, F1 |",
    "|---|---|---|---|---|---|",
  ]
  for arm in ARMS:
    mine = of_arm(rows, arm, budget)
    if not mine:
      continue
    theirs = [] if arm == REFERENCE else of_arm(rows, REFERENCE, budget)
    first, scorer = mine[0], scorer_of(mine)
    of_theirs = [row[scorer_of(theirs)] for row in theirs]
    held = (f"{k} {statistics.fmean(r[k] for r in mine):.3f}" for k in HELDOUT if first.get(k))
    pairs = jobs.compared([row[scorer] for row in mine], of_theirs, 1)
    chunk = jobs.compared([row["chunk"] for row in mine], [row["chunk"] for row in theirs], 2)
    cells = [arm, f"{first['rate']:g}", f"{first['steps']:,}", ", ".join(held)]
    cells += [f"{pairs}, {scorer.removeprefix('pairs_')}", chunk]
    lines.append(f"| {' | '.join(cells)} |")
  return lines


def glue_table(rows: Sequence[Mapping]) -> list[str]:
  """Returns the lines of the table of GLUE's tasks, in markdown."""
  rows = [row for row in rows if row.keys() >= GLUE.keys()]
  if not rows:
    return []
  lines = [f"| arm | FLOPs | {' | '.join(GLUE)} |", "|---" * (len(GLUE) + 2) + "|"]
  for row in rows:
    cells = [jobs.compared(row[task], [], 1) for task in GLUE]
    lines.append(f"| {row['arm']} | {row['budget']:.0e} | {' | '.join(cells)} |")
  return lines


def draw(rows: Sequence[Mapping], fresh: list[float], path: Path) -> None:
  """Plots the scores against FLOPs, one line per arm, and writes a PNG.

  Args:
    fresh: chunking's F1 from random weights, for each seed.
  """
  from matplotlib import colormaps

  figure = curves.new_figure(11, 4.6, layout="constrained")
  for axis, name in zip(figure.subplots(1, 2), ("minimal pairs, %", "chunking, F1"), strict=True):
    for i, arm in enumerate(ARMS):
      if not (budgets := sorted({row["budget"] for row in rows if row["arm"] == arm})):
        continue
      found = [of_arm(rows, arm, budget) for budget in budgets]
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
    axis.set_xticks(marks := sorted({row["budget"] for row in rows}), [f"{x:g}" for x in marks])
    axis.minorticks_off()
    axis.grid(alpha=0.25)
  figure.axes[1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
  curves.save_figure(path, figure)


def report(path: Path) -> tuple[str, list[Mapping], list[float]]:
  """Returns the tables of a file of rows, the rows that they show, and F1 of fresh weights."""
  rows = plan.reported(get_experiment(), jobs.Rows(path).read())
  control = [row for row in rows if row["arm"] == FRESH]
  best = [row for row in rows if row["arm"] != FRESH]
  fresh = [number(row["chunk"]) for row in control]
  lines = [*HEAD, ""]
  for budget in sorted({row["budget"] for row in best}):
    lines += [f"## {budget:.0e} FLOPs", "", *table(best, budget), ""]
  if fresh:
    lines += [f"Fresh weights: chunking F1 {jobs.compared(fresh, [], 2)}.", ""]
  return "\n".join([*lines, *glue_table([*best, *control])]).strip() + "\n", best, fresh


def main(rows: Path = ROWS, write: bool = False) -> None:
  """
  --write  write benchmarks/results/evidence.md and docs/evidence.png
  """
  text, best, fresh = report(rows)
  print(text, end="")
  if write:
    PAGE.write_text(text, "utf-8")
    draw(best, fresh, PICTURE)


if __name__ == "__main__":
  machine.start(main)
