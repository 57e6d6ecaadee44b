"""Learning rates for the speedrun, from networks of two smaller widths on a CPU.

  python benchmarks/speedrun_rates.py --text 'text:GLOB' --out DIR [--only ARM...]

Question: which rate do configs/speedrun.py:electra and :bert want at 512, where no rate can be
tried here? Muon's updates have the root mean square of AdamW's whatever the width, so the best rate
should not depend on it. Two layers of 128 train for 300 steps of 32 x 128 tokens at 1e-3 and its
doubles, until the loss rises; bert at the best rate and its neighbours for 900 steps too, and at
lower ones until the loss rises, since the best rate falls in longer runs; and two layers of 256 for
300 steps at the best rate and its neighbours. Schedule, optimizer and the decay's share are the
speedrun's. The measure is the main network's loss on held-out text: of words (bert), or of words +
5 x detection, as in training (electra). Rule: if 256 prefers the rate of 128 or a neighbour, width
does not matter. What three times the steps lower the best rate by is a power of the steps, by which
the speedrun's steps lower it further. Rows are kept as they come.
"""

import argparse
from pathlib import Path

from electra_jax.experiments import jobs

ROWS = Path(__file__).parent / "results" / "speedrun_rates.jsonl"
RATES, WIDTHS = tuple(1e-3 * 2**i for i in range(7)), (128, 256)
STEPS, LONGER = 300, 900
ARMS = ("electra", "bert")
SMALLER = {
  "model.num_layers": 2,
  "model.unroll": 2,
  "train.batch_size": 32,
  "train.accumulation": 4,
  "train.minutes": None,
  "data.vocab_size": 8192,
  "data.vocab_train_mb": 20.0,
  "data.holdout_frac": 0.01,
  "eval.every_steps": 0,
  "eval.batch_size": 32,
  "eval.max_examples": 1024,
}


def fields(arm: str, width: int, rate: float, steps: int) -> dict:
  """Returns what a network of a width changes in the speedrun's configuration."""
  shape = {
    "model.hidden_size": width,
    "model.embedding_size": width,
    "model.num_heads": width // 64,
    "model.ffn_size": width * 3 // 2,
  }
  if arm == "electra":
    shape["generator.depth_multiplier"] = 1 / 2  # of two layers
  times = {"train.steps": steps, "optimizer.warmup_steps": steps // 10}
  return SMALLER | shape | times | {"optimizer.learning_rate": rate}


def loss_of(line: dict) -> float:
  """Returns the main network's loss of an evaluation."""
  if "rtd_loss" in line:
    return line["replace_mlm_loss"] + 5 * line["rtd_loss"]
  return line["mlm_loss"]


def measure(out: Path, rows: jobs.Rows, arm: str, width: int, steps: int, rate: float) -> float:
  """Returns the loss of a run, which is trained unless it has a row."""

  def trained() -> dict:
    changed = fields(arm, width, rate, steps) | {"data.dir": out / "shards"}
    name = f"{arm}-{width}-{steps}-{rate:g}"
    last = jobs.heldout(jobs.train(out, name, f"configs/speedrun.py:{arm}", changed))[-1]
    kept = {k: v for k, v in last.items() if k.endswith(("_loss", "_auc"))}
    return {"loss": loss_of(last), **kept}

  key = {"arm": arm, "width": width, "steps": steps, "rate": rate}
  return rows.once(key, trained)["loss"]


def search(out: Path, rows: jobs.Rows, arm: str) -> None:
  """Trains an arm: up the rates at the first width, then around the best one."""
  losses: list[float] = []
  for rate in RATES:
    losses.append(measure(out, rows, arm, WIDTHS[0], STEPS, rate))
    if losses[-1] > min(losses):
      break
  best = losses.index(min(losses))
  around = RATES[max(best - 1, 0) : best + 2]
  if arm == "bert":
    longer = {rate: measure(out, rows, arm, WIDTHS[0], LONGER, rate) for rate in around}
    for rate in reversed(RATES[: max(best - 1, 0)]):
      if min(longer, key=longer.get) > min(longer):
        break
      longer[rate] = measure(out, rows, arm, WIDTHS[0], LONGER, rate)
  for rate in around:
    measure(out, rows, arm, WIDTHS[1], STEPS, rate)


def table(rows: list[dict]) -> list[str]:
  """Returns the losses as a table in markdown."""
  rates = sorted({row["rate"] for row in rows})
  lines = ["| arm, width, steps | " + " | ".join(f"{rate:g}" for rate in rates) + " |"]
  lines.append("|---" * (1 + len(rates)) + "|")
  runs = {}
  for row in rows:
    runs.setdefault((row["arm"], row["width"], row["steps"]), {})[row["rate"]] = row["loss"]
  for run, losses in sorted(runs.items()):
    best = min(losses.values())
    cells = (losses.get(rate) for rate in rates)
    texts = ("" if x is None else f"**{x:.3f}**" if x == best else f"{x:.3f}" for x in cells)
    lines.append(f"| {', '.join(map(str, run))} | {' | '.join(texts)} |")
  return lines


def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--text", required=True, help="what to pretrain on, as config.data.sources")
  p.add_argument("--out", type=Path, required=True)
  p.add_argument("--rows", type=Path, default=ROWS)
  p.add_argument("--only", nargs="*", choices=ARMS, default=ARMS)
  args = p.parse_args()
  build = {k: v for k, v in SMALLER.items() if k.startswith("data.")} | {"data.sources": args.text}
  jobs.build(args.out, args.out / "shards", "configs/speedrun.py", build)
  rows = jobs.Rows(args.rows)
  with jobs.workers(len(ARMS)) as pool:
    jobs.finish([pool.submit(search, args.out, rows, arm) for arm in args.only])
  print("\n".join(table(rows.read())))


if __name__ == "__main__":
  main()
