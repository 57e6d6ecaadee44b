"""Reads, writes and compares the results of fine-tuning."""

import collections
import contextlib
import json
import zipfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from electra_jax.finetune import statistics
from electra_jax.finetune.prepare import TASK_KINDS
from electra_jax.finetune.task_data import Metrics, TaskInfo
from electra_jax.finetune.tasks import TASKS
from electra_jax.monitor.display import doing
from electra_jax.runtime.foreign import parse_json, read_json
from electra_jax.runtime.workdir import replacing

RESULTS, EXAMPLE_SCORES, CONFIG = "results.jsonl", "units.npz", "config.json"
PICTURE = "results.png"
# The types of a row's fields, of which the last two may be missing.
ROW = {"task": str, "split": str, "seed": int, "metrics": dict, "collapsed": bool}
OPTIONAL = {"fold": int, "majority": dict | None}


def read_results(folder: Path) -> list[dict]:
  """Returns the rows of results in a folder.

  Raises:
    ValueError: the file has other rows; OSError: it cannot be read.
  """
  path, rows, names = folder / RESULTS, [], {}
  for number, line in enumerate(path.read_bytes().splitlines(), 1):
    place, row = f"{path}:{number}", {}
    with contextlib.suppress(ValueError):
      row = parse_json(line, path, dict)
    if not _is_row(row):
      raise ValueError(f"{place}: not a row of results of electra-jax finetune")
    rows.append(row)
    metrics = row["metrics"].keys()
    if names.setdefault((row["task"], row["split"]), metrics) != metrics:
      raise ValueError(f"{place}: other metrics than those of an earlier row")
  return rows


def _is_row(row: dict) -> bool:
  if not all(isinstance(row.get(k), ROW[k]) for k in ROW) or not row["metrics"]:
    return False
  if not all(isinstance(row[k], OPTIONAL[k]) for k in OPTIONAL.keys() & row.keys()):
    return False
  numbers = [*row["metrics"].values(), *(row.get("majority") or {}).values()]
  return all(isinstance(x, int | float) for x in numbers)


def write_results(folder: Path, rows: list[dict]) -> None:
  """Writes rows of results to a folder atomically."""
  with replacing(folder / RESULTS) as temporary:
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def print_average(rows: list[dict], console: Console) -> None:
  """Prints the paper's GLUE average (Table 1) if more than one of its tasks is present."""
  scores = collections.defaultdict(list)
  for row in rows:
    if row["split"] in ("dev", "dev_matched"):
      scores[row["task"]].append(next(iter(row["metrics"].values())))
  names = [task.name for task in TASKS.values() if task.average]  # 8, without WNLI
  medians = {name: float(np.median(scores[name])) for name in names if name in scores}
  if len(medians) > 1:
    absent = ", ".join(name for name in names if name not in medians)
    present = ", ".join(medians) + (f"; without {absent}" if absent else "")
    console.print(
      f"GLUE average of medians over {len(medians)} of {len(names)} tasks:"
      f" {np.mean([*medians.values()]):.2f} ({present})"
    )


def find_tasks(root: Path) -> dict[str, Path]:
  """Returns {task: folder} of the finished tasks in a workdir, or of one task's folder.

  Raises:
    ValueError: there are no results.
  """
  files = [*root.glob(EXAMPLE_SCORES), *sorted(root.glob(f"[!.]*/{EXAMPLE_SCORES}"))]
  found = {p.parent.name: p.parent for p in files}
  if not found:
    raise ValueError(f"{root} holds no results of electra-jax finetune")
  return found


def compare(a: Path, b: Path, console: Console, samples: int = 2000) -> None:
  """Prints the difference A − B on each common task, with a paired bootstrap interval.

  Raises:
    ValueError: no task is in both folders, or the examples or main metrics differ.
  """
  ours, theirs = find_tasks(a), find_tasks(b)
  both = [name for name in ours if name in theirs]
  if not both:
    raise ValueError(f"no common task: {a} has {', '.join(ours)}, {b} has {', '.join(theirs)}")
  table = Table(title=f"A {a} against B {b}: means over seeds")
  for column in ("task", "split", "metric, %", "A", "B", "A − B", "95 % interval", "p"):
    table.add_column(column, justify="left" if column in ("task", "split") else "right")
  for name in both:
    with doing(f"comparing {name}"):
      (config, scores), (other_config, other_scores) = map(read_task, (ours[name], theirs[name]))
      metrics = [_main_metric(saved) for saved in (config, other_config)]
      for split in (s for s in scores if s in other_scores):
        first, second = scores[split], other_scores[split]
        if config["examples"][split] != other_config["examples"][split]:
          raise ValueError(
            f"{name}, {split}: A and B differ in examples, {first.shape[1]} and {second.shape[1]}"
          )
        metric, other = (next(iter(f(x[0]))) for f, x in zip(metrics, (first, second), strict=True))
        if metric != other:
          raise ValueError(f"{name}, {split}: A's metric is {metric}, B's is {other}")
        found = statistics.paired_bootstrap(first, second, metrics, metric, samples=samples)
        means = f"{found.a:.2f}", f"{found.b:.2f}", f"{found.difference:+.2f}"
        interval = f"{found.low:+.2f} to {found.high:+.2f}"
        table.add_row(name, split, metric, *means, interval, f"{found.p:.3f}")
  console.print(table)


def _main_metric(config: dict) -> Metrics:
  info = TaskInfo.from_json(config["facts"])
  kind = TASK_KINDS[info.kind]
  return (kind.main_metric or kind.metrics)(info)


def read_task(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
  """Returns a finished task's config.json and the example scores [S, n, m] of its splits.

  Raises:
    ValueError: a file is missing or damaged.
  """
  try:
    config = read_json(folder / CONFIG)
    with np.load(folder / EXAMPLE_SCORES) as scores:
      found = dict(scores)
    dict(config["config"]), TaskInfo.from_json(config["facts"])
    [config["examples"][split] for split in found]
  except (OSError, ValueError, EOFError, RecursionError, zipfile.BadZipFile) as error:
    raise ValueError(f"{folder} is damaged: {error}") from None
  except (LookupError, TypeError, AttributeError) as error:
    raise ValueError(f"{folder} is damaged: {CONFIG}: {type(error).__name__} {error}") from None
  return config, found
