"""Fine-tunes on tasks and predicts files; see commands/finetune.py."""

import dataclasses
import json
import operator
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from electra_jax.config import compare, schema
from electra_jax.data import characters
from electra_jax.finetune import from_config, loop, model, prepare, results, statistics, task_data
from electra_jax.finetune.from_config import PretrainedEncoder
from electra_jax.finetune.results import CONFIG, EXAMPLE_SCORES, PICTURE, RESULTS
from electra_jax.finetune.task_data import EvalSplit, TaskData
from electra_jax.interop import sources
from electra_jax.interop.sources import Finetuned, Network, Source
from electra_jax.monitor.display import doing
from electra_jax.monitor.trackers import dropping
from electra_jax.runtime import jax_flags, terminal
from electra_jax.runtime.terminal import duration
from electra_jax.runtime.workdir import claim, new_folder


def run_task(
  config: ConfigDict, name: str, pretrained: PretrainedEncoder, folder: Path, console: Console
) -> list[dict]:
  """Trains and evaluates a task, writes its folder and returns its rows of results."""
  cfg = pretrained.cfg
  with doing(f"{name}: reading", console):
    task = prepare.prepare(config, name, pretrained.tokenizer, cfg)
  for note in task.notes:
    console.print(f"{task.title}: {note}")
  settings = from_config.make_settings(config, pretrained, task.epochs)
  info, kind, head = task.info, prepare.TASK_KINDS[task.info.kind], task.info.head.make()
  lengths = {name: getattr(settings, name) for name in ("buckets", "pad", "max_length")}
  outputs = loop.make_predictor(cfg, head, batch_size=settings.eval_batch_size, **lengths)

  def predict(weights: dict, split: EvalSplit) -> list:
    of_seeds = outputs(weights, split.features)
    return [kind.decode(info, split.examples, split.windows, found) for found in of_seeds]

  started = time.perf_counter()
  weights, steps = train_seeds(task, pretrained, settings, predict, console)
  trained = time.perf_counter()
  with doing(f"{task.title}: predicting", console):
    predictions = {name: predict(weights, split) for name, split in task.splits.items()}
  with doing(f"{task.title}: writing", console):
    rows, scores = score_seeds(task, settings.seeds, predictions)
    for row in rows:
      if "errors" in row:
        shown = "RMSE {rmse:.4g}; always the training mean: {rmse_of_mean:.4g}"
        line = f"{row['split']}, seed {row['seed']}: {shown.format(**row['errors'])}"
        console.print(f"{task.title}: {line}")
    fold = {} if config.own.fold is None else {"fold": config.own.fold}
    rows = [row | fold | steps[row["seed"]] for row in rows]
    best = choose(rows)
    content = {
      "config": config.to_dict(),
      "facts": dataclasses.asdict(info),
      "examples": {name: split.examples_hash for name, split in task.splits.items()},
      "best_seed": settings.seeds[best],
      "origin": pretrained.origin,
      compare.FLAGS: jax_flags.record(),
    }
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    results.write_results(folder, rows)
    np.savez_compressed(folder / EXAMPLE_SCORES, **scores)
    (folder / "predictions").mkdir()
    for name, split in task.splits.items():
      file = folder / "predictions" / split.file
      kind.write(info, file, split.examples, predictions[name][best])
    kept = {
      "best": {best: "model"},
      "all": {place: f"model-seed{seed}" for place, seed in enumerate(settings.seeds)},
      "none": {},
    }
    for place, model_name in kept[config.keep].items():
      of_seed = jax.device_get(jax.tree.map(operator.itemgetter(place), weights))
      card = {"metrics": [row for row in rows if row["seed"] == settings.seeds[place]]}
      card |= {"origin": pretrained.origin} if pretrained.origin else {}
      save(folder / model_name, pretrained, content["facts"], of_seed, card)
  took = duration(trained - started), duration(time.perf_counter() - trained)
  spent = f"training {took[0]}, prediction {took[1]}"
  console.print(f"{task.title}: {len(settings.seeds)} seeds, {spent}")
  return rows


def run_folds(
  config: ConfigDict, name: str, pretrained: PretrainedEncoder, folder: Path, console: Console
) -> list[dict]:
  """Runs a task as `run_task`; with own.folds once for each fold, in a subfolder.

  The example scores of the folds' dev splits are concatenated: each row is in one of them.
  """
  if not config.own.folds or config.own.fold is not None:
    return run_task(config, name, pretrained, folder, console)
  rows, saved = [], []
  for fold in range(config.own.folds):
    place, of_fold = folder / f"fold{fold}", config.copy_and_resolve_references()
    place.mkdir()
    of_fold.own.fold = fold
    console.print(f"{name}: fold {fold} of {config.own.folds}")
    rows += run_task(of_fold, name, pretrained, place, console)
    saved.append(results.read_task(place))
  first, examples = saved[0][0], [content["examples"] for content, _ in saved]
  content = {
    "config": config.to_dict(),
    "facts": first["facts"],
    compare.FLAGS: first[compare.FLAGS],
    "examples": first["examples"] | {"dev": task_data.digest(x["dev"] for x in examples)},
  }
  scores = {  # on the same test split, a fold counts as another seed
    split: np.concatenate([found[split] for _, found in saved], 1 if split == "dev" else 0)
    for split in saved[0][1]
  }
  (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
  results.write_results(folder, rows)
  np.savez_compressed(folder / EXAMPLE_SCORES, **scores)
  return rows


def train_seeds(
  task: TaskData,
  pretrained: PretrainedEncoder,
  settings: loop.Settings,
  predict: Callable[[dict, EvalSplit], list],
  console: Console,
) -> tuple[dict, dict[int, dict]]:
  """Returns the weights [S, ...] and, with patience, {"step"} of each seed's best evaluation."""
  info, kind = task.info, prepare.TASK_KINDS[task.info.kind]

  def log(done: int, steps: int, losses: list[float], rate: float) -> None:
    shown = " ".join(f"{loss:.3f}" for loss in losses)
    line = f"{task.title}: step {done}/{steps} | loss {shown} | {rate:,.1f} examples/s"
    display.print_line(line, style="dim")

  def evaluate(done: int, weights: dict) -> list[float]:
    name, split = next(iter(task.splits.items()))
    metrics = (kind.main_metric or kind.metrics)(info)
    found = [metrics(kind.scores(info, split.examples, x)) for x in predict(weights, split)]
    metric, values = next(iter(found[0])), [next(iter(x.values())) for x in found]
    shown = " ".join(f"{value:.2f}" for value in values)
    display.print_line(f"{task.title}: step {done} | {name} {metric} {shown}", style="dim")
    return values

  best = loop.Best(evaluate, settings.patience) if settings.patience else None
  with doing(f"{task.title}: training", console) as display:
    weights = loop.train(
      pretrained.cfg, task.info.head.make(), pretrained.weights, task.train, settings, log, best
    )
  if best is None:
    return weights, {seed: {} for seed in settings.seeds}
  steps = zip(settings.seeds, best.steps.tolist(), strict=True)
  return best.weights, {seed: {"step": step} for seed, step in steps}


def score_seeds(task: TaskData, seeds: tuple[int, ...], predictions: dict) -> tuple[list, dict]:
  """Returns a row of results for each split and seed, and each split's example scores [S, n, m]."""
  info, kind = task.info, prepare.TASK_KINDS[task.info.kind]
  metrics = kind.metrics(info)
  rows, scores = [], {}
  for name, split in task.splits.items():
    if not split.labelled:
      continue
    of_seeds = [kind.scores(info, split.examples, found) for found in predictions[name]]
    scores[name] = np.stack(of_seeds)
    majority = kind.majority(info, scores[name][0])
    rows += [
      {
        "task": info.name,
        "split": name,
        "seed": seed,
        "metrics": metrics(of_seed),
        "collapsed": bool(kind.collapsed(info, of_seed)),
        "majority": majority,
      }
      | ({"errors": errors} if (errors := kind.errors(info, task.train, of_seed)) else {})
      for seed, of_seed in zip(seeds, scores[name], strict=True)
    ]
  return rows, scores


def choose(rows: list[dict]) -> int:
  """Returns the index of the seed with the best main metric on the first split; 0 without rows."""
  values = [next(iter(r["metrics"].values())) for r in rows if r["split"] == rows[0]["split"]]
  return int(np.argmax(values)) if values else 0


def save(
  folder: Path, pretrained: PretrainedEncoder, info: dict, weights: dict, card: dict
) -> None:
  """Writes one seed's network as an orbax export."""
  encoder = {name: weights[name] for name in ("embeddings", "encoder")}
  network = Network(sources.plain(pretrained.cfg), encoder, None)
  folder.mkdir()
  finetuned = Finetuned(info, weights["head"])
  source = Source({"discriminator": network}, pretrained.tokenizer, card, finetuned=finetuned)
  sources.save_orbax(folder, source)


def finished(config: ConfigDict, folder: Path) -> list[dict] | None:
  """Returns the saved results of a task with this configuration; None without a folder.

  Raises:
    ValueError: the folder has no results, or results of another configuration.
  """
  if not folder.exists():
    return None
  try:
    saved, scores = results.read_task(folder)
    rows = results.read_results(folder)
    if missing := scores.keys() - {row["split"] for row in rows}:
      raise ValueError(f"{folder / RESULTS} has no row for the split {min(missing)}")
  except (OSError, ValueError) as error:
    raise ValueError(f"{folder} has no readable results: use another --workdir ({error})") from None
  old = compare.upgrade(compare.flatten(saved["config"]), schema.FINE_TUNING)
  new = compare.flatten(config.to_dict())
  free = ("task", "log.every_steps")
  changed = [k for k in new if k not in free and old.get(k) != new[k]]
  before, now = compare.flags(saved), compare.flags({compare.FLAGS: jax_flags.record()})
  changed += [k for k in now if k in before and before[k] != now[k]]
  if changed:
    old, new = old | before, new | now
    listed = ", ".join(f"{k} was {old.get(k)!r}, is {new[k]!r}" for k in changed)
    raise ValueError(f"{folder} has another configuration: {listed}; use another --workdir")
  return rows


def check_root(root: Path, names: list[str]) -> None:
  """Raises ValueError if a workdir has other results, or a task has the name of a file in it."""
  if taken := {RESULTS, PICTURE} & set(names):
    raise ValueError(f"config.task={min(taken)!r} is a file in the workdir: choose another name")
  if (root / RESULTS).exists():
    results.read_results(root)
  elif (root / PICTURE).exists():
    raise ValueError(f"{root} has {PICTURE} but no {RESULTS}: use another --workdir")


@jax_flags.pinned()
def fine_tune(
  config: ConfigDict, workdir: str | Path, console: Console | None = None
) -> list[dict]:
  """Trains and evaluates all unfinished tasks of a configuration.

  Returns:
    a row for each task, split and seed: {"task", "split", "seed", "metrics": {name: value}, ...}.

  Raises:
    ValueError: the configuration or a file is invalid; finished tasks are kept.
  """
  root, console = Path(workdir), console or terminal.log_console()
  from_config.check(config)
  names = prepare.task_names(config)
  with claim(root):
    check_root(root, names)
    pretrained, rows = None, []
    others = [p for p in sorted(root.glob(f"[!.]*/{RESULTS}")) if p.parent.name not in names]
    before = [row for path in others for row in results.read_results(path.parent)]
    for name in names:
      done = finished(config, root / name)
      if done is None:
        if pretrained is None:
          with doing("reading the network", console):
            pretrained = from_config.load_pretrained(config)
          for part in pretrained.left_out:
            console.print(f"not used: {part}")
        with new_folder(root / name) as folder:
          done = run_folds(config, name, pretrained, folder, console)
      else:
        console.print(f"{name}: already finished, see {root / name}")
      rows += done
      results.write_results(root, [*before, *rows])
      if before or rows:
        with dropping(PICTURE, lambda text: console.print(f"warning: {text}")):
          statistics.picture(root / PICTURE, [*before, *rows])
  if rows:
    console.print(statistics.table(rows))
    results.print_average(rows, console)
  console.print(f"results: {root / RESULTS}")
  return rows


def predict(
  path: Path, folder: Path, out: Path | None, columns: list[str], console: Console
) -> None:
  """Predicts a file with the fine-tuned network in a folder; with `out` None, writes beside it."""
  network = model.load(folder)
  out = out or path.with_name(f"{path.name}.predictions{network.kind.file_ending}")
  with doing(f"predicting {path}"), network.tokenizer.counting() as counts:
    count = network.predict_file(path, out, columns)
  console.print(f"{count:,} rows predicted: {out}")
  if note := characters.note(counts):
    console.print(note)
