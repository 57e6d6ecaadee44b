"""Why detection learns later than masked LM: one thing changed at a time, at equal FLOPs.

  python benchmarks/detection.py --out DIR --text 'text:GLOB' [--rows FILE] [--only NAME...]
                                 [--at_once 2] [--smoke]

In earlier trials a discriminator stayed at chance for thousands of steps, while a masked LM left
the unigram entropy within hundreds. The first rows do not show that: every arm so far has left
chance after 1,053 to 1,782 steps (LOG.md, "Why detection learns late, first rows"). Each arm says
what would be seen if one explanation were right:

- weight, optimizer: the detection loss pulls Adam's or the clipped gradient away, or too little:
  `weight 50`, `weight 1`, the same by AdamW and without clipping, `one optimizer`, `slow
  discriminator`, `fast discriminator`.
- embeddings pulled two ways: `gdes` and `own embeddings` would be ahead.
- the generator: too strong to be seen (`generator 1/8` ahead), too weak to learn from (`generator
  1/2` ahead), moving (`frozen generator` ahead: a masked LM of the main network's size).
- no first-order gradient towards the product of token and context: fixed noise (`unigram`) stays at
  chance, with more tokens a step too, and is learned at once by a network that starts from a masked
  LM (`unigram from bert`) or by a head that multiplies them (`slots, product`, at masked slots, of
  which half keep their token; `slots in text` has the same slots and ELECTRA's head). If it is
  noise instead, 4 and 16 times the tokens a step help as much.
- the optimizer: `AdamW` and `unigram, AdamW`, at its rates, would stay at chance.
- depth against width: `deep`, `wide`.

Every arm gets three seeds but those of more FLOPs, which get one; most rows so far are of the
first. The measure is the AUC against
the generator and against fixed noise on held-out documents. Results: DIR/detection.json.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import machine

from electra_jax.experiments import jobs

CONFIG = Path(__file__).with_name("evidence_config.py")
SLOTS = Path(__file__).with_name("detection_config.py")
RATE, FLOPS, SEEDS = 3.2e-3, 1e13, (0, 1, 2)
COLUMNS = ("mlm_loss", "rtd_auc", "unigram_auc")
START = "bert"  # the arm whose run, of the same seed, others start from


class Arm(NamedTuple):
  """A contestant: an argument of a file of configurations and what it changes."""

  config: str
  fields: dict = {}
  rate: float = 1.0  # of the discriminator, times RATE; the generator's stays
  flops: float = 1.0  # times FLOPS
  file: Path = CONFIG


UNIGRAM, ADAMW = {"generator.kind": "unigram"}, {"optimizer.name": "adamw"}
WEIGHT_50, WEIGHT_1 = ({"objective.discriminator_weight": x} for x in (50.0, 1.0))
AT_RATES = ADAMW | {"optimizer.learning_rate": 1.2e-3, "optimizer.generator_learning_rate": 2e-3}
ARMS = {
  START: Arm("bert", {}),
  "tuned": Arm("electra-tuned", {}),
  "weight 50": Arm("electra-tuned", WEIGHT_50),
  "weight 1": Arm("electra-tuned", WEIGHT_1),
  "one optimizer": Arm("electra", {"objective.discriminator_weight": 5.0}),
  "slow discriminator": Arm("electra-tuned", {"optimizer.learning_rate": 1.6e-3}, rate=0.5),
  "fast discriminator": Arm("electra-tuned", {"optimizer.learning_rate": 6.4e-3}, rate=2.0),
  "gdes": Arm("electra-tuned", {"generator.tie": "gdes"}),
  "own embeddings": Arm("electra-tuned", {"generator.tie": "none"}),
  "generator 1/8": Arm("electra-tuned", {"generator.width_multiplier": 1 / 8}),
  "generator 1/2": Arm("electra-tuned", {"generator.width_multiplier": 1 / 2}),
  "AdamW": Arm("electra-tuned", AT_RATES, rate=0.375),
  "AdamW, weight 50": Arm("electra-tuned", AT_RATES | WEIGHT_50, rate=0.375),
  "AdamW, weight 1": Arm("electra-tuned", AT_RATES | WEIGHT_1, rate=0.375),
  "AdamW, weight 50, no clipping": Arm(
    "electra-tuned", AT_RATES | WEIGHT_50 | {"optimizer.clip_norm": 1e9}, rate=0.375
  ),
  "no curriculum": Arm("electra-tuned", {"objective.temperature_schedule": ""}),
  "words too": Arm("electra_mlm-tuned", {}),
  "from bert": Arm("electra-tuned", {"init_from": START}),
  "frozen generator": Arm(
    "electra",
    {"generator.kind": "frozen", "generator.init_from": START, "generator.tie": "none"}
    | {"generator.width_multiplier": 1.0, "objective.discriminator_weight": 5.0},
  ),
  "unigram": Arm("electra", UNIGRAM),
  "unigram, AdamW": Arm("electra", UNIGRAM | ADAMW, rate=0.375),
  "unigram from bert": Arm("electra", UNIGRAM | {"init_from": START}),
  "unigram, 4 x the tokens": Arm("electra", UNIGRAM | {"train.batch_size": 64}, flops=4.0),
  "unigram, 16 x the tokens": Arm("electra", UNIGRAM | {"train.batch_size": 256}, flops=16.0),
  "slots in text": Arm("in_text", file=SLOTS),
  "slots, product": Arm("product", file=SLOTS),
  "deep": Arm(
    "electra-tuned",
    {"model.num_layers": 8, "model.unroll": 8, "model.hidden_size": 96, "model.num_heads": 3}
    | {"model.ffn_size": 256},
  ),
  "wide": Arm(
    "electra-tuned",
    {"model.num_layers": 2, "model.unroll": 2, "model.hidden_size": 192, "model.num_heads": 6}
    | {"model.ffn_size": 512},
  ),
}


def run_name(arm: str, seed: int) -> str:
  """Returns the name of a run's folder."""
  return f"{arm.replace(' ', '-').replace('/', '-').replace(',', '')}-{seed}"


def train(args: argparse.Namespace, arm: str, seed: int, budget: float) -> Path:
  """Trains an arm; returns its workdir."""
  config, changed, rate, _, file = ARMS[arm]
  start = str(args.out / "runs" / run_name(START, seed))
  own = {k: start if v == START else v for k, v in changed.items()} | {"seed": seed}
  own |= {"eval.max_examples": 64} if args.smoke else {}
  source = f"{file}:{config}"
  fields = {"data.dir": args.out / "shards"} | jobs.at_rate(source, own, rate * RATE, budget)
  return jobs.train(args.out, run_name(arm, seed), source, fields)


def key_of(args: argparse.Namespace, arm: str, seed: int) -> dict:
  """Returns what identifies the row of a run."""
  budget = ARMS[arm].flops * (FLOPS / 100 if args.smoke else FLOPS)
  return {"arm": arm, "seed": seed, "flops": budget}


def measure(rows: jobs.Rows, args: argparse.Namespace, arm: str, seed: int) -> dict:
  """Returns the row of an arm, which is trained unless it has one."""
  key = key_of(args, arm, seed)

  def measured() -> dict:
    last = jobs.heldout(train(args, arm, seed, key["flops"]))[-1]
    row = {name: last[name] for name in COLUMNS if last.get(name) is not None}
    return {"steps": last["step"]} | row

  return rows.once(key, measured)


def table(rows: list[dict]) -> list[str]:
  """Returns the table in markdown, with differences from `tuned`."""
  lines = [f"| arm | steps | {' | '.join(COLUMNS)} |", "|---" * (2 + len(COLUMNS)) + "|"]
  for arm in dict.fromkeys(row["arm"] for row in rows):
    mine = [row for row in rows if row["arm"] == arm]
    cells = [arm, f"{mine[0]['steps']:,}"]
    for name in COLUMNS:
      values = [row[name] for row in mine if name in row]
      theirs = [row[name] for row in rows if row["arm"] == "tuned" != arm]
      cells.append(jobs.compared(values, theirs) if values else "")
    lines.append(f"| {' | '.join(cells)} |")
  return lines


def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--out", type=Path, required=True)
  p.add_argument("--text", required=True, help="what to pretrain on, as config.data.sources")
  p.add_argument("--rows", type=Path, help="where rows are kept (DIR/rows.jsonl)")
  p.add_argument("--only", nargs="*", choices=ARMS, default=list(ARMS))
  p.add_argument("--at_once", type=int, default=2)
  p.add_argument("--smoke", action="store_true", help="a few steps of each, to see that all runs")
  args = p.parse_args()
  jobs.build(args.out, args.out / "shards", f"{CONFIG}:{START}", {"data.sources": args.text})
  rows = jobs.Rows(args.rows or args.out / "rows.jsonl")
  places = [(a, seed) for seed in SEEDS for a in args.only if ARMS[a].flops == 1 or seed == 0]
  missing = [place for place in places if not rows.find(key_of(args, *place))]
  # On another machine a row is not enough for those that start from its run.
  starts = {seed for arm, seed in missing if START in ARMS[arm].fields.values()}
  with jobs.workers(args.at_once) as pool:
    flops = key_of(args, START, 0)["flops"]
    jobs.finish([pool.submit(train, args, START, seed, flops) for seed in sorted(starts)])
    found = jobs.finish([pool.submit(measure, rows, args, *place) for place in places])
  print("\n".join(table(found)))
  machine.save(str(args.out / "detection.json"), {"rows": found}, hide=[args.out, args.text])


if __name__ == "__main__":
  main()
