"""Does a reference band find broken runs early, and leave healthy ones alone?

  python benchmarks/bands.py --out DIR [--steps 2600] [--broken_steps 600] [--seeds 5] [--rows FILE]
                             [--band FILE] [--json benchmarks/results/bands.json]
                             [--config configs/quickstart.py] [--fields FIELD=VALUE...]

Trains a configuration with several seeds and, with seed 0, broken in four ways: doubled learning
rates; a generator that does not learn; targets of another row; a vocabulary whose continuation
marks are lost, so that most rare words become [UNK]. Each run has its configuration's schedule and
is stopped by SIGTERM after `--steps`, a broken one after `--broken_steps`. Every seed is judged by
the band of the others, each broken run by the band of all but its own seed. Started again it goes
on where it was; a run whose lines are in the file of rows is not trained again.

The short run of the smallest modern preset:

  python benchmarks/bands.py --out DIR --config configs/modern_short.py --steps 300
      --broken_steps 100 --seeds 4 --band configs/bands/modern_short.json
      --json benchmarks/results/bands_modern_short.json
"""

import argparse
import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import machine
from ml_collections import ConfigDict

from electra_jax.config import compare, files
from electra_jax.experiments import jobs
from electra_jax.monitor import bands, metrics
from electra_jax.report import saved_run

PROGRAM = 'import runpy; runpy.run_module("electra_jax.train", run_name="__main__", alter_sys=True)'
# The labels of the row before, for both networks.
SHUFFLE = """
import jax.numpy as jnp
from electra_jax.core import networks, objectives

nll, detection = networks.nll, objectives.detection_terms
networks.nll = lambda logits, labels: nll(logits, jnp.roll(labels, 1, axis=0))
objectives.detection_terms = lambda name, logits, label, mask, weight: detection(
  name, logits, jnp.roll(label, 1, axis=0), mask, weight
)
"""
# What breaks a run: {name: (fields, code that runs before the program, folder of the shards)}
FAULTS = {
  "": ({}, "", "data"),
  "doubled learning rate": ({}, "", "data"),
  "frozen generator": (
    {"optimizer.separate_optimizers": True, "optimizer.generator_learning_rate": 1e-12}, "", "data"
  ),
  "shuffled targets": ({}, SHUFFLE, "data"),
  "broken tokenizer": ({}, "", "broken"),
}  # fmt: skip


def value(text: str) -> object:
  """Returns the value of a field, which is text if it is no Python literal."""
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def build(args: argparse.Namespace) -> None:
  """Builds the shards, and those of the broken vocabulary."""
  out, own = args.out, {k: v for k, v in args.fields.items() if k.startswith("data.")}
  jobs.build(out, out / "data", args.config, own)
  words = (out / "data" / "vocab.txt").read_text().splitlines()
  lost = out / "lost.txt"
  lost.write_text("".join(word.replace("##", "§§", 1) + "\n" for word in words))
  jobs.build(out, out / "broken", args.config, own | {"data.vocab": lost})


def doubled(config: ConfigDict) -> dict[str, float]:
  """Returns the learning rates of a configuration, doubled."""
  rates = ("learning_rate", "generator_learning_rate")
  return {f"optimizer.{name}": 2 * x for name in rates if (x := config.optimizer[name])}


def train(args: argparse.Namespace, fault: str, seed: int, steps: int) -> list[dict]:
  """Trains a run up to `steps` and returns its lines."""
  out, (fields, code, data) = args.out, FAULTS[fault]
  name = f"{fault or 'healthy'} {seed}".replace(" ", "-")
  folder, output = out / "runs" / name, out / "logs" / f"{name}.log"
  if fault == "doubled learning rate":
    fields = doubled(configured(args))
  fields = args.fields | {"seed": seed, "data.dir": out / data, "log.trackers": ""} | fields
  arguments = [f"--config={args.config}", f"--workdir={folder}", *jobs.assignments(fields)]
  history = folder / metrics.HISTORY_FILE

  whole = steps == configured(args).train.steps

  def done() -> list[dict]:
    lines = metrics.read_history(history)
    at_end = lines and lines[-1]["step"] >= steps and (not whole or lines[-1]["split"] == "heldout")
    return lines if at_end else []

  if not done():
    output.parent.mkdir(exist_ok=True)
    with output.open("a") as log:
      command = [sys.executable, "-c", code + PROGRAM, *arguments]
      process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
      try:
        while process.poll() is None and not done():
          time.sleep(1)
      finally:
        with contextlib.suppress(ProcessLookupError):
          process.send_signal(signal.SIGTERM)
        process.wait()
  if not (lines := done()):
    raise SystemExit(f"{output.read_text()[-3000:]}\n{name} ended early")
  return [line for line in lines if line["step"] <= steps]


def parser() -> argparse.ArgumentParser:
  p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  p.add_argument("--out", type=Path, required=True)
  p.add_argument("--rows", type=Path, help="default: OUT/rows.jsonl")
  p.add_argument("--steps", type=int, default=2600)
  p.add_argument("--broken_steps", type=int, default=600)
  p.add_argument("--seeds", type=int, default=5)
  p.add_argument("--band", type=Path, help="writes the band of all healthy seeds")
  p.add_argument("--json")
  p.add_argument("--config", default="configs/quickstart.py")
  p.add_argument("--fields", nargs="*", default=[], metavar="FIELD=VALUE", help="of all runs")
  return p


def configured(args: argparse.Namespace) -> ConfigDict:
  """Returns the configuration of the healthy runs."""
  config = files.load_named(args.config)
  config.update_from_flattened_dict(args.fields)
  return config


def main() -> None:
  """Runs from the command line."""
  p = parser()
  args = p.parse_args()
  args.fields = {name: value(x) for name, _, x in (field.partition("=") for field in args.fields)}
  os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
  build(args)
  rows = jobs.Rows(args.rows or args.out / "rows.jsonl")
  plan = [("", seed) for seed in range(args.seeds)] + [(fault, 0) for fault in FAULTS if fault]
  found = {}
  for fault, seed in plan:
    steps = args.broken_steps if fault else args.steps
    key = {"fault": fault, "seed": seed, "steps": steps}
    own = {"config": args.config, "fields": args.fields}
    key |= {k: x for k, x in own.items() if x != p.get_default(k)}
    row = rows.once(key, lambda of=(fault, seed, steps): {"lines": train(args, *of)})
    found[fault, seed] = row["lines"]
  config = configured(args)
  manifest = json.loads((args.out / "data" / "manifest.json").read_text())
  flat = compare.flatten(config) | {"data.vocab_hash": manifest["vocab"]["hash"]}
  fields = compare.recipe(flat)
  healthy = {seed: lines for (fault, seed), lines in found.items() if not fault}

  def without(seed: int) -> bands.Band:
    others = [lines for other, lines in healthy.items() if other != seed]
    return bands.make(others, config.log.every_steps, fields)

  judged = [
    {
      "fault": fault,
      "seed": seed,
      "minutes": round(saved_run.elapsed(lines) / 60, 1),
      **judge(without(seed), lines),
      "lines": rounded(lines),
    }
    for (fault, seed), lines in found.items()
  ]
  for row in judged:
    print(f"{row['fault'] or 'healthy'}, seed {row['seed']}: {row['warning'] or 'stays'}")
  if args.band:
    bands.write(args.band, bands.make(list(healthy.values()), config.log.every_steps, fields))
  sizes = {name: getattr(args, name) for name in ("steps", "broken_steps", "seeds")}
  content = {"config": args.config, "fields": args.fields, **sizes, "judged": judged}
  machine.save(args.json, content, hide=[args.out, args.rows])


def rounded(lines: list[dict]) -> list[dict]:
  """Returns the lines without timings, numbers with five digits."""
  return [
    {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in line.items()
     if k not in metrics.TIMING}
    for line in lines
  ]  # fmt: skip


def judge(band: bands.Band, lines: list[dict]) -> dict:
  """Returns where a run leaves a band, with and without its learning rate, and why."""
  first = {}
  for name, hidden in (("step", ()), ("step_without_learning_rate", ("learning_rate",))):
    follow, warned = bands.BandMonitor(band, "of the other seeds"), []
    for line in lines:
      values = {k: v for k, v in line.items() if k not in ("step", "split", *hidden)}
      for text in follow.check(line["split"], line["step"], values):
        warned.append((line["step"], text))
    first[name] = warned[0][0] if warned else None
    if not hidden:
      first["warning"] = f"step {warned[0][0]}: {warned[0][1]}" if warned else None
  distances = [
    abs(x)
    for line in lines
    for x in band.distances(line["split"], line["step"], line).values()
  ]  # fmt: skip
  return first | {"largest_distance": round(max(distances), 2), "numbers": len(distances)}


if __name__ == "__main__":
  main()
