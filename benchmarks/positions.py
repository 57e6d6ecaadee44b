"""Positions and objective, told apart: RoPE or disentangled x masked LM or detection.

  electra-jax experiment benchmarks/positions.py:DATA --out=DIR
      --rows=benchmarks/results/positions_rows.jsonl [--at-once=2]
  python benchmarks/positions.py [--rows FILE]      # the effects

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

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import machine
from evidence import CHUNKING, FINETUNING, cut_chunking

from electra_jax.experiments import jobs, plan
from electra_jax.experiments.definition import Arm, Budget, Experiment, Pairs, Task, number

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results" / "positions_rows.jsonl"
BUDGETS, RATES = (5e12, 2e13), (3.2e-3, 6.4e-3, 1.28e-2)
POSITIONS = {
  "rope": {"model.positions": "rope"},
  # 64 positions; distances up to 16 have rows of their own
  "disentangled": {"model.positions": "disentangled", "model.position_buckets": 32},
}
OBJECTIVES = {"mlm": "bert:quickstart", "detection": "electra:quickstart"}
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
  "disentangled - rope": [(f"disentangled-{x}", f"rope-{x}") for x in OBJECTIVES],
  "detection - mlm": [(f"{x}-detection", f"{x}-mlm") for x in POSITIONS],
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
  return {"chunk": statistics.fmean(sizes), "ner": number(row["ner"]), "pairs": row["pairs"]}


def effects(rows: Sequence[Mapping]) -> list[str]:
  """Returns a markdown table of each factor's effect ± its standard error over paired seeds."""
  lines = [f"| effect | FLOPs | seeds | {' | '.join(SHOWN.values())} |", "|---" * 6 + "|"]
  found = {(row["arm"], row["budget"], row["seed"]): measured(row) for row in rows}
  for factor, comparisons in FACTORS.items():
    for budget in BUDGETS:
      needed = [arm for both in comparisons for arm in both]
      seeds = [
        s for s in sorted({s for _, _, s in found}) if all((a, budget, s) in found for a in needed)
      ]
      cells = []
      for name in SHOWN if seeds else ():
        each = [
          statistics.fmean(
            found[a, budget, s][name] - found[b, budget, s][name] for a, b in comparisons
          )
          for s in seeds
        ]
        error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else float("nan")
        cells.append(f"{statistics.fmean(each):+.2f} ± {error:.2f}")
      if cells:
        lines.append(f"| {factor} | {budget:.0e} | {len(seeds)} | {' | '.join(cells)} |")
  return lines


def main(rows: Path = ROWS) -> None:
  """
  --rows  the rows of the experiment
  """
  print("\n".join(effects(plan.reported(get_experiment(), jobs.Rows(rows).read()))))


if __name__ == "__main__":
  machine.start(main)
