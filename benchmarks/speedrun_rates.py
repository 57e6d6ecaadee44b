"""Learning rates for the speedrun, from networks of two smaller widths on a CPU.

  python benchmarks/speedrun_rates.py --text 'text:GLOB' --out DIR [--at_once 2] [--only ARM...]

Question: which rate do configs/speedrun.py:electra and :bert want at 512, where no rate can be
tried here? Muon's updates have the root mean square of AdamW's whatever the width, so the best rate
should not depend on it. Each arm trains four layers of 128 and of 256 for the same steps and
tokens, at each of RATES; schedule, optimizer and the decay's share are the speedrun's. The measure
is the main network's loss on held-out text: of words (bert), or of words + 5 x detection, as in
training (electra). Rule: if both widths of an arm prefer the same rate, or neighbours, 512 takes
that of 256; else the lower. Rows are kept as they come.
"""

import argparse
from pathlib import Path

import jobs

ROWS = Path(__file__).parent / "results" / "speedrun_rates.jsonl"
RATES, WIDTHS, STEPS = (1e-3, 2e-3, 4e-3, 8e-3), (128, 256), 600
SMALLER = {
  "model.num_layers": 4,
  "model.unroll": 4,
  "train.batch_size": 32,
  "train.accumulation": 4,
  "train.minutes": None,
  "train.steps": STEPS,
  "optimizer.warmup_steps": 60,
  "data.vocab_size": 8192,
  "data.vocab_train_mb": 20.0,
  "data.holdout_frac": 0.01,
  "eval.every_steps": 0,
  "eval.batch_size": 32,
  "eval.max_examples": 1024,
}


def fields(width: int, rate: float) -> dict:
  """Returns what a network of a width changes in the speedrun's configuration."""
  shape = {
    "model.hidden_size": width,
    "model.embedding_size": width,
    "model.num_heads": width // 64,
    "model.ffn_size": width * 3 // 2,
  }
  return SMALLER | shape | {"optimizer.learning_rate": rate}


def loss_of(line: dict) -> float:
  """Returns the main network's loss of an evaluation."""
  if "rtd_loss" in line:
    return line["replace_mlm_loss"] + 5 * line["rtd_loss"]
  return line["mlm_loss"]


def measure(args: argparse.Namespace, rows: jobs.Rows, arm: str, width: int, rate: float) -> dict:
  """Returns the row of a run, which is trained unless it has one."""

  def trained() -> dict:
    config = f"configs/speedrun.py:{arm}"
    changed = fields(width, rate) | {"data.dir": args.out / "shards"}
    last = jobs.heldout(jobs.train(args.out, f"{arm}-{width}-{rate:g}", config, changed))[-1]
    kept = {k: v for k, v in last.items() if k.endswith(("_loss", "_auc"))}
    return {"steps": last["step"], "loss": loss_of(last), **kept}

  return rows.once({"arm": arm, "width": width, "rate": rate}, trained)


def table(rows: list[dict]) -> list[str]:
  """Returns the losses as a table in markdown."""
  lines = ["| arm, width | " + " | ".join(f"{rate:g}" for rate in RATES) + " |"]
  lines.append("|---" * (1 + len(RATES)) + "|")
  for arm, width in dict.fromkeys((row["arm"], row["width"]) for row in rows):
    found = {row["rate"]: row["loss"] for row in rows if (row["arm"], row["width"]) == (arm, width)}
    best = min(found.values())
    cells = (found.get(rate) for rate in RATES)
    texts = ("" if x is None else f"**{x:.3f}**" if x == best else f"{x:.3f}" for x in cells)
    lines.append(f"| {arm}, {width} | {' | '.join(texts)} |")
  return lines


def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--text", required=True, help="what to pretrain on, as config.data.sources")
  p.add_argument("--out", type=Path, required=True)
  p.add_argument("--rows", type=Path, default=ROWS)
  p.add_argument("--only", nargs="*", choices=("electra", "bert"), default=("electra", "bert"))
  p.add_argument("--at_once", type=int, default=2)
  args = p.parse_args()
  build = {k: v for k, v in SMALLER.items() if k.startswith("data.")} | {"data.sources": args.text}
  jobs.build(args.out, args.out / "shards", "configs/speedrun.py", build)
  rows = jobs.Rows(args.rows)
  with jobs.workers(args.at_once) as pool:
    places = [(arm, width, rate) for width in WIDTHS for rate in RATES for arm in args.only]
    jobs.finish([pool.submit(measure, args, rows, *place) for place in places])
  print("\n".join(table(rows.read())))


if __name__ == "__main__":
  main()
