"""Modern blocks against the paper's, part by part, at equal FLOPs.

  python benchmarks/modern_ab.py --out DIR --text 'text:GLOB' --chunk DIR --pairs FILE.jsonl
                                 [--rows FILE] [--only NAME...] [--flops 2e13] [--at_once 2]
                                 [--smoke]

Questions: do modern blocks learn more from the same FLOPs (the generator's included) than the
paper's; which of their parts does it; does Muon learn more than AdamW, `gdes` than shared
embeddings, a narrow deep generator than a wide shallow one, packed rows than two-segment examples?
A part that is not better than its absence by more than two standard errors is not credited: the
table has the difference from `modern`, with its standard error.

Each arm of SEARCHED is trained once at each of four learning rates; the rate with the lowest
masked-LM loss on the training text in the last tenth of the steps is taken, which no table shows.
Then every arm is trained with three seeds at the rate of the arm that it changes, scores 6,700 of
the minimal pairs (BLiMP's) by its discriminator and by its generator, and is fine-tuned on
chunking, as are fresh weights of the modern and of the paper's shape. `packed` is evaluated on
packed rows, so only its pairs and its chunking compare. Started again with the same arguments it
goes on where it was, on another machine after the rows of FILE.
Results: DIR/modern_ab.json.
"""

import argparse
import functools
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import machine

from electra_jax.experiments import jobs
from electra_jax.monitor.metrics import read_history

CONFIG, SEEDS, PAIRS = "configs/quickstart.py", (0, 1, 2), 6_700
# What differs from configs/quickstart.py, in every run and the build; AdamW and no windows.
RECIPE = {
  "data.vocab_size": 8192,
  "data.holdout_frac": 0.01,
  "data.vocab_train_mb": 20.0,
  "model.max_positions": 128,
  "train.batch_size": 16,
  "eval.every_steps": 0,
  "eval.max_examples": 2048,
  "log.trackers": "",
  "optimizer.name": "adamw",
  "optimizer.learning_rate": 1.2e-3,  # the ratio to the generator's is kept
  "optimizer.generator_learning_rate": 2e-3,
  "model.global_every": 1,
  "model.local_rope_theta": 10_000.0,
}
# The paper's blocks, where configs/quickstart.py has ModernBERT's.
PAPER_BLOCKS = {
  "model.ffn_size": 512,
  "model.block": "post_norm",
  "model.norm": "layer_norm",
  "model.layer_norm_eps": 1e-12,
  "model.feed_forward": "gelu",
  "model.positions": "learned",
  "model.biases": True,
  "model.token_types": True,
  "model.first_norm": True,
  "model.head_norm": False,
  "model.init_stddev": 0.1,
}
MUON = {"optimizer.name": "muon"}
# The fourth of each was added because the third was the best of three.
RATES = {"modern": (8e-4, 1.6e-3, 3.2e-3, 6.4e-3), "paper": (3.5e-4, 7e-4, 1.4e-3, 2.8e-3)}
# arm: (the arm whose learning rate it takes, what it changes)
ARMS = {
  "modern": ("modern", {}),
  "paper": ("paper", PAPER_BLOCKS),
  "muon": ("muon", MUON),
  "post-norm": ("modern", {"model.block": "post_norm", "model.first_norm": True}),
  "learned positions": ("modern", {"model.positions": "learned"}),
  "no gate": ("modern", {"model.feed_forward": "gelu", "model.ffn_size": 576}),
  "biases": ("modern", {"model.biases": True, "model.norm": "layer_norm"}),
  "windows of 16": (
    "modern",
    {"model.global_every": 3, "model.window": 16, "model.local_rope_theta": 1000.0},
  ),
  "gdes": ("modern", {"generator.tie": "gdes"}),
  "wide shallow generator": (
    "modern",
    {"generator.width_multiplier": 0.5, "generator.depth_multiplier": 0.25},
  ),
  "packed": ("modern", {"data.examples": "packed"}),
}
SEARCHED = {"modern": RATES["modern"], "paper": RATES["paper"], "muon": RATES["modern"]}


def shards(out: Path, examples: str) -> Path:
  """Returns the folder of the shards of a kind of examples."""
  return out / "shards" / examples


def build(out: Path, text: str) -> None:
  """Builds both kinds of shards with one vocabulary."""
  for kind in ("segments", "packed"):
    fields = RECIPE | {"data.examples": kind, "data.sources": text}
    if kind == "packed":
      fields["data.vocab"] = shards(out, "segments") / "vocab.txt"
    jobs.build(out, shards(out, kind), CONFIG, fields)


def train(out: Path, arm: str, rate: float, seed: int, budget: float) -> Path:
  """Trains an arm; returns its workdir."""
  fields = jobs.at_rate(CONFIG, RECIPE | ARMS[arm][1] | {"seed": seed}, rate, budget)
  kind = fields.pop("data.examples", "segments")
  fields |= {"data.dir": shards(out, kind), "data.examples": kind}
  return jobs.train(out, f"{arm.replace(' ', '-')}-{rate:g}-{seed}", CONFIG, fields)


def training_loss(folder: Path) -> float:
  """Returns the mean masked-LM loss over the last tenth of the steps of a run."""
  lines = [x for x in read_history(folder / "metrics.jsonl") if x["split"] == "train"]
  return statistics.mean(x["mlm_loss"] for x in lines if x["step"] > 0.9 * lines[-1]["step"])


def tune(out: Path, name: str, start: dict, chunk: str, smoke: bool) -> float:
  """Fine-tunes on chunking from the fields `start`; returns F1."""
  fields = start | {"data.train": f"{chunk}/train.txt", "data.dev": f"{chunk}/test.txt"}
  fields |= {"seeds": 1, "train.epochs": 2.0, "data.max_length": 64, "data.buckets": 2}
  fields |= {"optimizer.learning_rate": 5e-4, "keep": "none"}
  fields |= {"data.train_examples": 64} if smoke else {}
  rows = jobs.finetune(out, name, "configs/finetune/tagging.py:chunk", fields)
  (row,) = (row for row in rows if row["split"] == "dev")
  return jobs.main_metric(row)


def measured(arm: str, rate: float, seed: int, args: argparse.Namespace) -> dict:
  """Trains, scores and fine-tunes an arm; returns its results."""
  folder = train(args.out, arm, rate, seed, args.flops)
  last = jobs.heldout(folder)[-1]
  row = {name: last[name] for name in ("mlm_loss", "rtd_auc", "unigram_auc")}
  for scorer in ("rtd", "mlm"):
    row[f"pairs_{scorer}"] = 100 * jobs.score_pairs(args.out, folder, scorer)["all"]["accuracy"]
  f1 = tune(args.out, folder.name, {"init": folder}, args.chunk, args.smoke)
  return {"steps": last["step"]} | row | {"chunk_f1": f1}


def fresh(arm: str, rate: float, seed: int, args: argparse.Namespace) -> dict:
  """Fine-tunes fresh weights of an arm's shape; returns its result."""
  like = train(args.out, arm, rate, SEEDS[0], args.flops)
  start = {"init": "random", "like": like, "seed": seed}
  return {"chunk_f1": tune(args.out, f"fresh-{arm}-{seed}", start, args.chunk, args.smoke)}


def table(rows: list[dict]) -> list[str]:
  """Returns the table in markdown: means and standard deviations over seeds."""
  columns = ("mlm_loss", "rtd_auc", "unigram_auc", "pairs_rtd", "pairs_mlm", "chunk_f1")
  lines = ["| arm | rate | steps | " + " | ".join(columns) + " |", "|---" * 9 + "|"]
  for arm in dict.fromkeys(row["arm"] for row in rows):
    mine = [row for row in rows if row["arm"] == arm]
    cells = [arm, f"{mine[0]['rate']:g}", f"{mine[0]['steps']:,}"]
    theirs = [row for row in rows if row["arm"] == "modern" != arm]
    for name in columns:
      cells.append(jobs.compared([row[name] for row in mine], [row[name] for row in theirs]))
    lines.append(f"| {' | '.join(cells)} |")
  return lines


def search(rows: jobs.Rows, pool: ThreadPoolExecutor, args: argparse.Namespace) -> dict:
  """Returns the best learning rate of each arm of SEARCHED that is needed."""

  def searched(arm: str, rate: float) -> dict:
    key = {"search": arm, "flops": args.flops, "rate": rate}
    folder = functools.partial(train, args.out, arm, rate, SEEDS[0], args.flops)
    return rows.once(key, lambda: {"training_loss": training_loss(folder())})

  needed = {ARMS[arm][0] for arm in args.only}
  places = [(arm, rate) for arm, rates in SEARCHED.items() if arm in needed for rate in rates]
  found = jobs.finish([pool.submit(searched, *place) for place in places])
  return {
    arm: min((r for r in found if r["search"] == arm), key=lambda r: r["training_loss"])["rate"]
    for arm in needed
  }


def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--out", type=Path, required=True)
  p.add_argument("--text", required=True)
  p.add_argument("--chunk", required=True)
  p.add_argument("--pairs", required=True, type=Path)
  p.add_argument("--rows", type=Path, help="where rows are kept (DIR/rows.jsonl)")
  p.add_argument("--only", nargs="*", choices=ARMS, default=list(ARMS))
  p.add_argument("--flops", type=float, default=2e13)
  p.add_argument("--at_once", type=int, default=2)
  p.add_argument("--smoke", action="store_true", help="a few steps of each, to see that all runs")
  args = p.parse_args()
  if args.smoke:
    args.flops, RECIPE["eval.max_examples"] = 1e11, 64
  build(args.out, args.text)
  jobs.write_pairs(args.out, args.pairs, 100 if args.smoke else PAIRS)
  rows = jobs.Rows(args.rows or args.out / "rows.jsonl")
  with jobs.workers(args.at_once) as pool:
    rates = search(rows, pool, args)

    def once(arm: str, seed: int) -> dict:
      rate = rates[ARMS[arm][0]]
      key = {"arm": arm, "flops": args.flops, "rate": rate, "seed": seed}
      return rows.once(key, lambda: measured(arm, rate, seed, args))

    def once_fresh(arm: str, seed: int) -> dict:
      key = {"fresh": arm, "flops": args.flops, "seed": seed}
      return rows.once(key, lambda: fresh(arm, rates[arm], seed, args))

    places = [(arm, seed) for seed in SEEDS for arm in args.only]
    found = jobs.finish([pool.submit(once, *place) for place in places])
    shapes = [arm for arm in ("modern", "paper") if arm in args.only]
    places = [(arm, seed) for arm in shapes for seed in SEEDS]
    controls = jobs.finish([pool.submit(once_fresh, *place) for place in places])
  print("\n".join(table(found)))
  for arm in shapes:
    scores = [row["chunk_f1"] for row in controls if row["fresh"] == arm]
    print(f"fresh weights, as {arm}: chunk_f1 {jobs.compared(scores, [])}")
  searched = [row for row in rows.read() if "search" in row and row["flops"] == args.flops]
  content = {"flops": args.flops, "search": searched, "rows": found, "fresh": controls}
  hidden = [args.out, args.chunk, args.text, args.pairs]
  machine.save(str(args.out / "modern_ab.json"), content, hide=hidden)


if __name__ == "__main__":
  main()
