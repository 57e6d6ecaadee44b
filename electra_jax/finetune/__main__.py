"""Fine-tunes on tasks, compares results, predicts.

  python -m electra_jax.finetune --config=configs/finetune/glue.py:mrpc --config.init=RUN_OR_EXPORT
                                 --config.data.dir=GLUE --workdir=DIR
  python -m electra_jax.finetune --compare DIR_A DIR_B
  python -m electra_jax.finetune --predict FILE --model=DIR [--out=FILE]

The first trains several seeds and writes into DIR: results.jsonl, results.png, and of each task a
folder with the kept networks, predictions and what is needed to compare. A task that is finished is
not trained again.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console

from electra_jax.config import cli, compare
from electra_jax.finetune import loop, prepare, results, statistics
from electra_jax.finetune.from_config import Tower, check, make_settings, open_tower
from electra_jax.finetune.prepare import Problem
from electra_jax.finetune.results import CONFIG, RESULTS, UNITS, read_results
from electra_jax.interop import sources
from electra_jax.interop.sources import Finetuned, Network, Source
from electra_jax.runtime import parallel, workdir

# One task.


def run_task(
  config: ConfigDict, name: str, tower: Tower, folder: Path, console: Console
) -> list[dict]:
  """Trains and measures a task, fills its folder, and returns its results."""
  cfg = tower.cfg
  problem = prepare.prepare(config, name, tower.tokenizer, cfg.max_positions)
  for line in problem.said:
    console.print(f"{problem.title}: {line}")
  settings = make_settings(config, tower, problem.epochs)
  head = problem.facts.head.make()
  started = time.perf_counter()

  def log(done: int, steps: int, values: dict) -> None:
    shown = " ".join(f"{x:.3f}" for x in values["loss"])
    rate = values["examples_per_sec"]
    console.print(
      f"{problem.title}: step {done}/{steps} | loss {shown} | {rate:,.1f} examples/s", style="dim"
    )

  weights = loop.train(cfg, head, tower.weights, problem.train, settings, log)
  trained = time.perf_counter()
  predict = loop.make_predictor(
    cfg,
    head,
    batch_size=settings.eval_batch_size,
    buckets=settings.buckets,
    pad=settings.pad,
  )
  said = {split: predict(weights, parts.features) for split, parts in problem.splits.items()}
  rows, units = score(problem, settings.seeds, said)
  best = choose(rows)
  facts = dataclasses.asdict(problem.facts)
  content = {
    "config": config.to_dict(),
    "facts": facts,
    "examples": {split: parts.examples for split, parts in problem.splits.items()},
    "best_seed": settings.seeds[best],
  }
  (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
  (folder / RESULTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
  np.savez_compressed(folder / UNITS, **units)
  (folder / "predictions").mkdir()
  for split, parts in problem.splits.items():
    parts.write(folder / "predictions", said[split][best])
  kept = {"best": {best: "model"}, "none": {}}.get(
    config.keep, {place: f"model-seed{seed}" for place, seed in enumerate(settings.seeds)}
  )
  for place, model in kept.items():
    mine = jax.device_get(jax.tree.map(lambda x, at=place: x[at], weights))
    card = {"metrics": [row for row in rows if row["seed"] == settings.seeds[place]]}
    save(folder / model, tower, facts, mine, card)
  spent = f"training {trained - started:.0f} s, prediction {time.perf_counter() - trained:.0f} s"
  console.print(f"{problem.title}: {len(settings.seeds)} seeds, {spent}")
  return rows


def score(problem: Problem, seeds: tuple[int, ...], said: dict) -> tuple[list[dict], dict]:
  """Returns a row of results a split and seed, and the units [S, n, m] of each split."""
  measure, rows, units = problem.facts.measure, [], {}
  for split, parts in problem.splits.items():
    if parts.units is None:
      continue
    units[split] = np.stack([parts.units(outputs) for outputs in said[split]])
    for seed, mine in zip(seeds, units[split], strict=True):
      rows.append(
        {
          "task": problem.facts.name,
          "split": split,
          "seed": seed,
          "metrics": measure(mine),
          "collapsed": bool(problem.collapsed(mine)),
        }
      )
  return rows, units


def choose(rows: list[dict]) -> int:
  """Returns the place of the seed whose main metric is best on the first split; 0 without any."""
  values = [next(iter(r["metrics"].values())) for r in rows if r["split"] == rows[0]["split"]]
  return int(np.argmax(values)) if values else 0


def save(folder: Path, tower: Tower, facts: dict, weights: dict, card: dict) -> None:
  """Writes one seed's network as an orbax export."""
  encoder = {name: weights[name] for name in ("embeddings", "encoder")}
  network = Network(sources.plain(tower.cfg), encoder, None)
  folder.mkdir()
  finetuned = Finetuned(facts, weights["head"])
  source = Source({"discriminator": network}, tower.tokenizer, card, finetuned=finetuned)
  sources.save_orbax(folder, source)


# All tasks.


def finished(config: ConfigDict, folder: Path) -> list[dict] | None:
  """Returns the results of a task that this configuration has finished there; None if not begun.

  Raises:
    ValueError: the folder holds something else.
  """
  if not folder.exists():
    return None
  try:
    saved = json.loads((folder / CONFIG).read_text())["config"]
    rows = read_results(folder)
  except (OSError, ValueError, KeyError):
    raise ValueError(f"{folder} is no result: use another --workdir") from None
  old, new = compare.upgrade(compare.flatten(saved)), compare.flatten(config.to_dict())
  free = ("task", "log.every_steps")
  changed = [k for k in new if k not in free and old.get(k) != new[k]]
  if changed:
    listed = ", ".join(f"{k} was {old.get(k)!r}, is {new[k]!r}" for k in changed)
    raise ValueError(f"{folder} holds other results: {listed}; use another --workdir")
  return rows


def run(config: ConfigDict, root: Path, console: Console) -> None:
  """Trains and measures all tasks of a configuration that are not finished in a folder.

  Raises:
    ValueError: something is not in order; what was finished stays.
  """
  check(config)
  names = prepare.problems(config)
  parallel.keep_freed_memory()
  with workdir.claim(root):
    tower, rows = None, []
    others = [p for p in sorted(root.glob(f"[!.]*/{RESULTS}")) if p.parent.name not in names]
    before = [row for path in others for row in read_results(path.parent)]
    for name in names:
      done = finished(config, root / name)
      if done is None:
        if tower is None:
          tower = open_tower(config)
          for what in tower.left_out:
            console.print(f"left out: {what}")
        with workdir.new_folder(root / name) as folder:
          done = run_task(config, name, tower, folder, console)
      else:
        console.print(f"{name}: finished before, {root / name}")
      rows += done
      write_summary(root, [*before, *rows])
  if rows:
    console.print(statistics.table(rows))
    tell_average(rows, console)
  console.print(f"results: {root / RESULTS}")


def main(argv: list[str]) -> int:
  """Runs from the command line."""
  del argv
  config, where = flags.FLAGS.config, flags.FLAGS.workdir
  if config is None or where is None:
    raise flags.Error("--config=configs/finetune/glue.py:TASK and --workdir=DIR are needed")
  run(config, Path(where), Console(highlight=False, soft_wrap=True))
  return 0


def write_summary(root: Path, rows: list[dict]) -> None:
  """Writes the results of all tasks in the folder, and their picture."""
  temporary = root / "results.tmp"
  temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
  os.replace(temporary, root / RESULTS)
  if rows:
    statistics.picture(root / "results.png", rows)


def tell_average(rows: list[dict], console: Console) -> None:
  """Prints the paper's average over GLUE, if more than one of its tasks is there."""
  medians: dict[str, list[float]] = {}
  for row in rows:
    if row["split"] in ("dev", "dev_matched"):
      medians.setdefault(row["task"], []).append(next(iter(row["metrics"].values())))
  found = statistics.glue_average({k: float(np.median(v)) for k, v in medians.items()})
  if len(found.present) > 1:
    missing = f"; without {', '.join(found.missing)}" if found.missing else ""
    console.print(
      f"GLUE average of medians over {len(found.present)} of 8 tasks: {found.value:.2f}"
      f" ({', '.join(found.present)}{missing})"
    )


if __name__ == "__main__":
  if set(sys.argv[1:]) & {"--compare", "--predict"} or any(
    arg.startswith(("--compare=", "--predict=")) for arg in sys.argv
  ):
    cli.report(results.main)
  else:
    cli.define_config_flag()
    flags.DEFINE_string("workdir", None, "folder of the results")
    cli.run(main)
