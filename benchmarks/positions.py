"""Positions and objective, told apart: RoPE or disentangled x masked LM or detection.

  electra-jax experiment benchmarks/positions.py:DATA --out=DIR
      --rows=benchmarks/results/positions_rows.jsonl [--at-once=2]
  python benchmarks/positions.py [--rows FILE] [--write]      # the effects; docs/positions.png

Data:     DATA has text.txt to pretrain on, chunk/train.txt and chunk/test.txt of CoNLL-2000,
          ner/train.txt and ner/test.txt of WNUT-17, and pairs.jsonl of BLiMP.
Hardware: two CPU cores; a run and its measures take five minutes at 5e12, 14 at 2e13, on one.

Question: encoders like ModernBERT (RoPE, masked LM) lag behind DeBERTaV3 (disentangled positions,
detection) in tagging named entities. Do the positions or the objective make the difference?
Design: one body, four pre-norm layers of width 64 without windows; each arm changes positions,
objective or neither. The same matrix products (generator and heads included), text and seeds; the
learning rate of each arm is the best of three at the smaller budget, by chunking on 2,000 sentences
that no table shows.
Measures: F1 of chunking after fine-tuning on 100, 300, 1,000 and 6,936 sentences and their mean, F1
of named entities, and accuracy on 6,700 minimal pairs.
Rule, decided before the rows: an effect is the mean over the seeds of the difference that a factor
makes, averaged over the other factor. It counts if it is beyond two standard errors over three
paired seeds and has the same sign at both budgets.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import machine
from evidence import CHUNKING, FINETUNING, cut_chunking

from electra_jax.experiments import jobs, plan
from electra_jax.experiments.definition import Arm, Budget, Experiment, Pairs, Task, number
from electra_jax.monitor import curves

HERE = Path(__file__).resolve().parent
ROWS, PICTURE = HERE / "results" / "positions_rows.jsonl", machine.ROOT / "docs" / "positions.png"
BUDGETS, RATES = (5e12, 2e13), (3.2e-3, 6.4e-3, 1.28e-2)
POSITIONS = {
  "rope": {"model.positions": "rope"},
  # 64 positions; distances up to 16 have rows of their own
  "disentangled": {"model.positions": "disentangled", "model.position_buckets": 32},
}
OBJECTIVES = {"mlm": "bert:quickstart", "detection": "electra:quickstart"}
WORDING = {"mlm": "masked LM", "detection": "detection"}
BODY = {
  "model.hidden_size": 64,
  "model.embedding_size": 64,
  "model.num_heads": 2,
  "model.ffn_size": 192,
  "model.global_every": 1,  # windows are not defined for disentangled positions
  "generator.width_multiplier": 0.5,
  "generator.depth_multiplier": 1.0,
  "data.vocab_size": 8192,
  "data.lowercase": False,  # capitals name entities
  "data.holdout_frac": 0.01,
  "data.vocab_train_mb": 20.0,
  "eval.every_steps": 0,
  "eval.max_examples": 2048,
  "log.trackers": "",
}
# {training sentences: epochs}
SIZES = {100: 30.0, 300: 15.0, 1000: 6.0, 6936: 2.0}
SHOWN = {"chunk": "chunking, F1", "ner": "named entities, F1", "pairs": "minimal pairs, %"}
FACTORS = {
  "disentangled instead of RoPE": [(f"disentangled-{x}", f"rope-{x}") for x in OBJECTIVES],
  "detection instead of masked LM": [(f"{x}-detection", f"{x}-mlm") for x in POSITIONS],
}


def tasks_of(data: Path) -> dict[str, Task]:
  """Returns chunking at each size, of which the largest also has choices, and named entities."""
  cut_chunking(data / "chunk")
  tasks = {}
  for size, epochs in SIZES.items():
    last = size == max(SIZES)
    own = {"data.train_examples": size, "train.epochs": epochs}
    own |= {"data.dev": data / "chunk" / ("choices.txt" if last else "test.txt")}
    own |= {"data.test": data / "chunk" / "test.txt"} if last else {}
    tasks[f"chunk_{size}"] = Task(
      "finetune/tagging:chunk",
      {"data.train": data / "chunk" / "fitting.txt"} | FINETUNING | CHUNKING | own,
      splits={"chunk_choices": "dev", f"chunk_{size}": "test"} if last else {},
      seeds=3 if size == 100 else 1,
    )
  entities = {
    f"data.{k}": data / "ner" / f"{v}.txt" for k, v in (("train", "train"), ("dev", "test"))
  }
  own = {"train.epochs": 5.0}
  tasks["ner"] = Task("finetune/tagging:ner", entities | FINETUNING | CHUNKING | own)
  return tasks


def get_experiment(arg: str = "data") -> Experiment:
  """Returns the experiment; `arg` is the folder of the data."""
  data = Path(arg)
  return Experiment(
    arms={
      f"{positions}-{objective}": Arm(config, fields, RATES)
      for positions, fields in POSITIONS.items()
      for objective, config in OBJECTIVES.items()
    },
    budgets=(BUDGETS[0], Budget(BUDGETS[1], factors=(1.0,))),
    control="rope-mlm",
    fields=BODY | {"data.dir": str(data / "shards"), "data.sources": f"text:{data / 'text.txt'}"},
    choose="chunk_choices",
    heldout=("mlm_loss", "rtd_auc", "unigram_auc"),
    pairs=Pairs(str(data / "pairs.jsonl"), 6_700),
    tasks=tasks_of(data),
  )


def measured(row: Mapping) -> dict[str, float]:
  """Returns a row's measures; chunking's is the mean over the training sizes."""
  sizes = [number(row[f"chunk_{size}"]) for size in SIZES]
  each = {f"chunk_{size}": score for size, score in zip(SIZES, sizes, strict=True)}
  return {
    **each,
    "chunk": statistics.fmean(sizes),
    "ner": number(row["ner"]),
    "pairs": row["pairs"],
  }


class Effect(NamedTuple):
  """A factor's effect on a measure at a budget."""

  factor: str
  budget: float
  measure: str
  mean: float  # over paired seeds
  error: float  # standard error of the mean; NaN with one seed
  seeds: int


def effects(rows: Sequence[Mapping], names: Iterable[str] = SHOWN) -> list[Effect]:
  """Returns each factor's effect on each measure, at the budgets with a seed of all arms."""
  found = {(row["arm"], row["budget"], row["seed"]): measured(row) for row in rows}
  lines = []
  for factor, budget in itertools.product(FACTORS, BUDGETS):
    comparisons = FACTORS[factor]
    needed = [arm for both in comparisons for arm in both]
    seeds = [
      s for s in sorted({s for _, _, s in found}) if all((a, budget, s) in found for a in needed)
    ]
    for name in names if seeds else ():
      each = [
        statistics.fmean(
          found[a, budget, s][name] - found[b, budget, s][name] for a, b in comparisons
        )
        for s in seeds
      ]
      error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else float("nan")
      lines.append(Effect(factor, budget, name, statistics.fmean(each), error, len(each)))
  return lines


def table(found: Sequence[Effect], titles: Mapping[str, str] = SHOWN) -> list[str]:
  """Returns a markdown table of effects ± standard errors."""
  lines = [f"| effect | FLOPs | seeds | {' | '.join(titles.values())} |"]
  lines.append("|---" * (3 + len(titles)) + "|")
  for (factor, budget), group in itertools.groupby(found, lambda x: (x.factor, x.budget)):
    effects = list(group)
    cells = [f"{x.mean:+.2f} ± {x.error:.2f}" for x in effects]
    lines.append(f"| {factor} | {budget:.0e} | {effects[0].seeds} | {' | '.join(cells)} |")
  return lines


def draw(path: Path, rows: Sequence[Mapping], found: Sequence[Effect]) -> None:
  """Draws chunking against training sentences for each arm, and the effects with their errors."""
  budget = max(x.budget for x in found)
  figure = curves.new_figure(10, 3.8, layout="constrained")
  left, right = figure.subplots(1, 2)
  for positions, line in zip(POSITIONS, ("--", "-"), strict=True):
    for objective, colour in zip(OBJECTIVES, curves.COLOURS, strict=False):
      arm = f"{positions}-{objective}"
      mine = [row for row in rows if (row["arm"], row["budget"]) == (arm, budget)]
      scores = [[number(row[f"chunk_{size}"]) for row in mine] for size in SIZES]
      means = list(map(statistics.fmean, scores))
      label = f"{positions}, {WORDING[objective]}"
      left.plot(list(SIZES), means, line, color=colour, label=label, marker="o", markersize=4)
  left.set_xscale("log")
  left.minorticks_off()
  left.set_xticks(list(SIZES), [f"{size:,}" for size in SIZES])
  left.set(xlabel="sentences to fine-tune on", ylabel="chunking, F1")
  left.set_title(f"{budget:.0e} FLOPs, mean of seeds", fontsize=9)
  left.legend(fontsize=8, frameon=False)
  names = []
  for factor, colour in zip(FACTORS, curves.COLOURS[2:], strict=False):
    for measure, title in SHOWN.items():
      for spend, mark in zip(BUDGETS, ("o", "s"), strict=True):
        of = [x for x in found if (x.factor, x.measure, x.budget) == (factor, measure, spend)]
        for x in of:
          right.errorbar(x.mean, len(names), xerr=2 * x.error, fmt=mark, color=colour, capsize=3)
          names.append(f"{title.partition(',')[0]}, {spend:.0e}")
    names.append("")
  right.set_yticks(range(len(names)), names, fontsize=7)
  right.invert_yaxis()
  right.axvline(0, color="#666666", linestyle="--", linewidth=1)
  right.set_title("effect, points ± 2 standard errors", fontsize=9)
  for factor, colour in zip(FACTORS, curves.COLOURS[2:], strict=False):
    right.plot([], [], "o", color=colour, label=factor)
  right.legend(fontsize=8, frameon=False, loc="lower right")
  for axis in (left, right):
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
  curves.save_figure(path, figure)


def main(rows: Path = ROWS, write: bool = False) -> None:
  """
  --rows   the rows of the experiment
  --write  draw docs/positions.png
  """
  shown = plan.reported(get_experiment(), jobs.Rows(rows).read())
  found = effects(shown)
  print("\n".join(table(found)))
  sizes = {f"chunk_{size}": f"chunking from {size:,}" for size in SIZES}
  print("\n".join(["", *table(effects(shown, sizes), sizes)]))
  if write:
    draw(PICTURE, shown, found)


if __name__ == "__main__":
  machine.start(main)
