"""Does a reference band detect broken runs early, without false alarms?

  python benchmarks/bands.py --out DIR [--steps 2600] [--broken_steps 600] [--seeds 5] [--rows FILE]
                             [--band FILE] [--json benchmarks/results/bands.json]
                             [--config configs/quickstart.py] [--fields FIELD=VALUE...]

Trains a configuration with several seeds and, with seed 0, broken in four ways: doubled learning
rates; a generator that does not learn; targets of another row; a vocabulary without continuation
marks, so that most rare words become [UNK]. Runs have the schedule of the configuration and are
stopped by SIGTERM after `--steps`, broken runs after `--broken_steps`. Each seed is judged by the
band of the other seeds, each broken run by the band of all seeds but its own. Started again, the
script continues, and skips runs in the file of rows.

The short run of the smallest modern preset:

  python benchmarks/bands.py --out DIR --config configs/modern_short.py --steps 300
      --broken_steps 100 --seeds 4 --band configs/bands/modern_short.json
      --json benchmarks/results/bands_modern_short.json
"""

import argparse
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

from electra_jax.commands import cli
from electra_jax.config import compare
from electra_jax.experiments import jobs
from electra_jax.monitor import bands, metrics
from electra_jax.report import saved_run

CONFIG = "configs/quickstart.py"
PROGRAM = 'import runpy; runpy.run_module("electra_jax.train", run_name="__main__", alter_sys=True)'
# Gives both networks the labels of the previous row.
SHUFFLE = """
import jax.numpy as jnp
from electra_jax.core import networks, objectives

nll, detection = networks.nll, objectives.detection_terms
networks.nll = lambda logits, labels, *unseen: nll(logits, jnp.roll(labels, 1, axis=0), *unseen)
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


def build(o: argparse.Namespace) -> None:
  """Builds the shards with the intact and the broken vocabulary."""
  own = {k: v for k, v in o.fields.items() if k.startswith("data.")}
  jobs.build(o.out, o.out / "data", o.config, own)
  words = (o.out / "data" / "vocab.txt").read_text("utf-8").splitlines()
  lost = o.out / "lost.txt"
  lost.write_text("".join(word.replace("##", "§§", 1) + "\n" for word in words), "utf-8")
  jobs.build(o.out, o.out / "broken", o.config, own | {"data.vocab": lost})


def doubled(config: ConfigDict) -> dict[str, float]:
  """Returns the learning rates of a configuration, doubled."""
  rates = ("learning_rate", "generator_learning_rate")
  return {f"optimizer.{name}": 2 * x for name in rates if (x := config.optimizer[name])}


def train(o: argparse.Namespace, config: ConfigDict, fault: str, seed: int, steps: int) -> dict:
  """Trains a run up to `steps` and returns its lines."""
  fields, code, data = FAULTS[fault]
  name = f"{fault or 'healthy'} {seed}".replace(" ", "-")
  folder, output = o.out / "runs" / name, o.out / "logs" / f"{name}.log"
  if fault == "doubled learning rate":
    fields = doubled(config)
  fields = o.fields | {"seed": seed, "data.dir": o.out / data, "log.trackers": ""} | fields
  arguments = [f"--config={o.config}", f"--workdir={folder}", *jobs.assignments(fields)]
  whole = steps == config.train.steps

  def done() -> list[dict]:
    lines = metrics.read_history(folder / metrics.HISTORY_FILE)
    at_end = lines and lines[-1]["step"] >= steps and (not whole or lines[-1]["split"] == "heldout")
    return lines if at_end else []

  if not done():
    output.parent.mkdir(exist_ok=True)
    with output.open("a", encoding="utf-8") as log:
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
    raise SystemExit(f"{output.read_text('utf-8')[-3000:]}\n{name} ended early")
  return {"lines": [line for line in lines if line["step"] <= steps]}


def main(
  out: Path,
  rows: Path | None = None,
  steps: int = 2600,
  broken_steps: int = 600,
  seeds: int = 5,
  band: Path | None = None,
  config: str = CONFIG,
  fields: list[str] = (),
) -> dict:
  """
  --rows    file of rows (OUT/rows.jsonl)
  --band    file for the band of all healthy seeds
  --fields  FIELD=VALUE for all runs
  """
  changed, names, _ = cli.configured(config, [f"--config.{field}" for field in fields])
  flat = compare.flatten(changed)
  own = {name: flat[name] for name in names}
  o = argparse.Namespace(out=out, config=config, fields=own)
  os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
  build(o)
  kept = jobs.Rows(rows or out / "rows.jsonl")
  plan = [("", seed) for seed in range(seeds)] + [(fault, 0) for fault in FAULTS if fault]
  found = {}
  for fault, seed in plan:
    last = broken_steps if fault else steps
    key = {"fault": fault, "seed": seed, "steps": last}
    key |= ({"config": config} if config != CONFIG else {}) | ({"fields": own} if own else {})
    run = (o, changed, fault, seed, last)
    found[fault, seed] = kept.once(key, lambda run=run: train(*run))["lines"]
  manifest = json.loads((out / "data" / "manifest.json").read_text("utf-8"))
  recipe = compare.recipe(flat | {"data.vocab_hash": manifest["vocab"]["hash"]})
  healthy = {seed: lines for (fault, seed), lines in found.items() if not fault}

  def band_of(without: int | None = None) -> bands.Band:
    others = [lines for seed, lines in healthy.items() if seed != without]
    return bands.make(others, changed.log.every_steps, recipe)

  judged = [
    {
      "fault": fault,
      "seed": seed,
      "minutes": round(saved_run.elapsed(lines) / 60, 1),
      **judge(band_of(without=seed), lines),
      "lines": rounded(lines),
    }
    for (fault, seed), lines in found.items()
  ]
  if band:
    bands.write(band, band_of())
  sizes = {"steps": steps, "broken_steps": broken_steps, "seeds": seeds}
  return {"config": config, "fields": own, **sizes, "judged": judged}


def rounded(lines: list[dict]) -> list[dict]:
  """Returns the lines without timings, with five-digit numbers."""
  return [
    {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in line.items()
     if k not in metrics.TIMING}
    for line in lines
  ]  # fmt: skip


def judge(band: bands.Band, lines: list[dict]) -> dict:
  """Returns where a run leaves a band, with and without its learning rate, and the causes."""
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
  machine.start(main)
