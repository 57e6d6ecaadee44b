"""The tables of a report: rows of texts, the first row the heads, a column for each arm."""

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from electra_jax.config import compare
from electra_jax.evaluate import pairs
from electra_jax.finetune import results, statistics
from electra_jax.monitor import goodput, quantities
from electra_jax.report import verdict
from electra_jax.report.saved_run import Arm, SavedRun
from electra_jax.runtime import checkpoint
from electra_jax.runtime.foreign import read_json

Table = list[list[str]]
LEFT_OUT = ("step", "split", "loss")


def _joined(texts: Iterable[str]) -> str:
  """Returns what the runs of an arm have in common, or what each has."""
  return " / ".join(dict.fromkeys(texts))


def overview(arms: Sequence[Arm], price: float | None) -> Table:
  """An overview of arms. `price` is the price of a device-hour."""
  rows = {
    "objective": lambda r: f"{r.config.objective.name}, {r.config.generator.kind} generator",
    "code": lambda r: r.start.get("code", "not recorded"),
    "devices": _devices,
    "data": lambda r: str(r.config.data.dir),
    "training text": _text,
    "vocabulary": lambda r: "{size:,} {kind} entries".format(**r.manifest["vocab"]),
    "parameters": lambda r: ", ".join(f"{k} {v / 1e6:,.2f} M" for k, v in r.parameters.items()),
    "seen": _seen,
    "FLOPs in matrix products": lambda r: f"{r.flops_per_step * r.done:.3g}",
    "hours": lambda r: f"{sum(r.secs.values()) / 3600:,.2f}",
  }
  if price is not None:
    rows["cost"] = lambda r: f"{r.device_hours * price:,.2f}"
  return [
    ["", *(arm.name for arm in arms)],
    *([k, *(_joined(map(f, arm.runs)) for arm in arms)] for k, f in rows.items()),
  ]


def _devices(run: SavedRun) -> str:
  known = "{devices} x {device_kind}, jax {jax}"
  return known.format(**run.start) if run.start else "not recorded"


def _text(run: SavedRun) -> str:
  train, heldout = (run.manifest["splits"][split]["examples"] for split in ("train", "heldout"))
  return f"{train:,} sequences of {run.manifest['seq_length']} tokens, {heldout:,} held out"


def _seen(run: SavedRun) -> str:
  sequences = run.done * run.config.train.batch_size
  epochs = sequences / run.manifest["splits"]["train"]["examples"]
  return f"{sequences * run.manifest['seq_length']:,} tokens, {epochs:.2f} epochs"


def fields(arms: Sequence[Arm]) -> Table:
  """The fields that an arm changed from configs/base.py."""
  found = {run.name: compare.changed_from_base(run.config) for arm in arms for run in arm.runs}
  every = {field: old for one in found.values() for field, (old, _) in one.items()}

  def own(field: str, old: object, arm: Arm) -> str:
    values = [found[run.name].get(field, (old, old))[1] for run in arm.runs]
    return "" if all(x == old for x in values) else _joined(map(repr, values))

  return [
    ["field", "base.py", *(arm.name for arm in arms)],
    *([field, repr(old), *(own(field, old, arm) for arm in arms)] for field, old in every.items()),
  ]


def evaluations(arms: Sequence[Arm]) -> Table:
  """The last evaluation of each arm and the trivial baselines; minimal pairs with intervals.

  Seeds have their mean ± standard deviation.
  """
  runs = [run for arm in arms for run in arm.runs]
  names = dict.fromkeys(k for run in runs for k in run.last("heldout") if k not in LEFT_OUT)
  if not names:
    return []
  steps = (_joined(f"{run.last('heldout').get('step', 0):,}" for run in arm.runs) for arm in arms)
  heads = (f"{arm.name}, step {step}" for arm, step in zip(arms, steps, strict=True))
  return [
    ["held-out", *heads, "trivial baseline"],
    *(
      [quantities.label(name), *(_values(arm, name) for arm in arms), _baseline(arms, name)]
      for name in names
    ),
  ]


def _values(arm: Arm, name: str) -> str:
  found = [run.last("heldout").get(name) for run in arm.runs]
  if len(arm.runs) == 1 or None in found:
    return _joined(_value(*x, name) for x in zip(arm.runs, found, strict=True))
  mean, deviation = np.mean(found), np.std(found, ddof=1)
  return f"{quantities.shown(name, mean)} ± {quantities.shown(name, deviation)}"


def _baseline(arms: Sequence[Arm], name: str) -> str:
  """Returns the trivial baseline of a metric; one for each arm where they differ."""
  lines = [(arm.runs[0], arm.runs[0].last("heldout")) for arm in arms]
  found = [run.baselines.level(name, line) if name in line else None for run, line in lines]
  if not any(found):
    return ""
  texts = [quantities.shown(name, level and level[1]) for level in found]
  known = dict.fromkeys(text for text, level in zip(texts, found, strict=True) if level)
  return f"{' / '.join(known if len(known) == 1 else texts)} ({next(filter(None, found))[0]})"


def _value(run: SavedRun, value: float | None, name: str) -> str:
  text = quantities.shown(name, value)
  count = run.start.get("pairs")  # earlier versions did not record it
  if value is None or name != "pairs_accuracy" or not count:
    return text
  found = pairs.accuracy(np.arange(count) < round(value * count))
  return f"{text} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def minimal_pairs(folders: Sequence[Path]) -> Table:
  """The results of `evaluate pairs --out`, with Wilson's intervals; ValueError without any."""
  rows = [["model", "scorer", "category", "pairs", "accuracy %", "95 % interval"]]
  for folder in folders:
    path = folder / "pairs.json" if folder.is_dir() else folder
    try:
      content = read_json(path)
      named = pairs.rows(content["all"], content["categories"])
      for place, (name, a) in enumerate(named):
        first = ("", "") if place else (Path(content["model"]).name, content["scorer"])
        interval = f"{100 * a['low']:.1f} to {100 * a['high']:.1f}"
        rows.append([*first, name, f"{a['pairs']:,}", f"{100 * a['accuracy']:.2f}", interval])
    except (
      ArithmeticError,
      AttributeError,
      FileNotFoundError,
      LookupError,
      TypeError,
      ValueError,
    ) as error:
      raise ValueError(f"{path} is not a result of electra-jax evaluate pairs: {error}") from None
  return rows


def finetuning(folders: Sequence[Path]) -> Table:
  """The results of fine-tuning over seeds, with Student's interval; ValueError without any."""
  heads = ["results", "task", "split", "metric", "median", "mean", "95 % interval", "seeds"]
  rows = [[*heads, "most frequent class"]]
  for folder in folders:
    if not (folder / results.RESULTS).is_file():
      raise ValueError(f"{folder} holds no results of electra-jax finetune")
    groups = statistics.grouped(results.read_results(folder))
    for (task, split), of_seeds in groups.items():
      first = next(iter(of_seeds.values()))
      for metric in first["metrics"]:
        found = statistics.summary([row["metrics"][metric] for row in of_seeds.values()])
        level = (first.get("majority") or {}).get(metric)
        rows.append(
          [folder.name, task, split, statistics.TITLES.get(metric, metric)]
          + [f"{found.median:.2f}", f"{found.mean:.2f}", interval(found)]
          + [str(found.n), "" if level is None else f"{level:.2f}"]
        )
  return rows


def interval(found: statistics.Summary) -> str:
  """Returns Student's interval of 95 % of a mean over seeds; a single seed has none.

  >>> interval(statistics.summary([61.0, 64.0, 63.0]))
  '58.87 to 66.46'
  """
  if found.n < 2:
    return "one seed"
  error = found.std / math.sqrt(found.n)
  return "{:.2f} to {:.2f}".format(*stats.t.interval(0.95, found.n - 1, found.mean, error))


def time(arms: Sequence[Arm]) -> Table:
  """The share of the time by activity, of all runs of an arm, and the speed of their last lines."""
  secs = [sum((Counter(run.secs) for run in arm.runs), Counter()) for arm in arms]
  rows = [["", *(arm.name for arm in arms)]]
  for activity in goodput.ordered(dict.fromkeys(k for of_arm in secs for k in of_arm)):
    rows.append([activity, *(_share(of_arm, activity) for of_arm in secs)])
  for name in ("tokens_per_sec", "mfu"):
    speeds = ([run.last("train").get(name) for run in arm.runs] for arm in arms)
    shown = (_joined(quantities.shown(name, x) for x in of_arm) for of_arm in speeds)
    rows.append([quantities.label(name), *shown])
  return rows


def _share(secs: dict[str, float], activity: str) -> str:
  total = sum(secs.values())
  if activity not in secs or not total:
    return "-"
  return f"{quantities.shown('secs', secs[activity])} ({100 * secs[activity] / total:.1f} %)"


def checkpoints(runs: Sequence[SavedRun]) -> Table:
  """The checkpoints in the folders of the runs."""
  rows = [["run", "steps", "MB each", "folder"]]
  for run in (run for run in runs if run.checkpoints):
    steps, sizes = zip(*run.checkpoints.items(), strict=True)
    listed = ", ".join(f"{step:,}" for step in steps)
    rows.append([run.name, listed, f"{max(sizes) / 1e6:,.1f}", str(run.folder / checkpoint.FOLDER)])
  return rows


def portable(command: str) -> str:
  """Returns a recorded command without the paths of its environment.

  >>> portable("/home/me/.venv/bin/python -m electra_jax.train --workdir=/runs/a")
  'electra-jax train --workdir=/runs/a'
  """
  return re.sub(r"^python\S* -m electra_jax[. ]", "electra-jax ", re.sub(r"^\S*/", "", command))


def commands(run: SavedRun) -> dict[str, str]:
  """Returns suggested commands: {purpose: command}."""
  folder = shlex.quote(str(run.folder))
  known = f"electra-jax train --config=CONFIG --workdir={folder}"
  known = portable(run.start.get("command") or known)
  more = {"continue training": known}
  if run.finished and verdict.judge(run).word == verdict.BAD:
    more = {}  # docs/healthy.md has what to change
  elif run.finished:
    kept = re.sub(r" --?(workdir|config\.(train\.steps|allow_config_change))[= ]\S+", "", known)
    changed = f"--config.train.steps=STEPS --workdir={folder}-longer"
    more = {"train longer, from the start: the learning rate has ended": f"{kept} {changed}"}
  return {
    **({} if run.finished and run.config.train.minutes else more),
    "see what it has learned": f"electra-jax show --model={folder}",
    "export to Hugging Face": f"electra-jax export {folder} {folder}-hf --to hf",
    "fine-tune": "electra-jax finetune --config=configs/finetune/glue.py:cola,sst2,mrpc"
    f" --config.init={folder} --config.data.dir=GLUE --workdir={folder}-glue",
    "score minimal pairs": f"electra-jax evaluate pairs --model={folder}"
    f" --data=blimp.jsonl --out={folder}-pairs",
  }
