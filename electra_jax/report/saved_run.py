"""Reads saved runs for a report, and groups runs that differ only in their seed."""

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from electra_jax.config import compare, schema, specs
from electra_jax.core import flops, generators, objectives
from electra_jax.data import shards
from electra_jax.data.tokenizer import Vocab
from electra_jax.interop import sources
from electra_jax.monitor import journal, metrics, thinned
from electra_jax.monitor.baselines import Baselines
from electra_jax.runtime import checkpoint
from electra_jax.runtime.workdir import read_config, read_run_config


class JustBegunError(ValueError):
  """A run has no line of metrics yet."""


@dataclasses.dataclass(frozen=True)
class SavedRun:
  """A run, read from its folder."""

  name: str  # unique in a report
  folder: Path
  config: ConfigDict
  history: list[dict]  # the lines of metrics.jsonl, thinned
  events: list[dict]  # of the journal
  checkpoints: dict[int, int]  # {step: bytes}
  manifest: dict  # of the shards
  baselines: Baselines
  parameters: dict[str, int]  # of "discriminator", "generator" and all that are "trained"
  flops_per_step: int  # in matrix products

  @property
  def done(self) -> int:
    """The last step of the log, or of a checkpoint: a stop saves between two lines, too."""
    return max([*self.checkpoints, *(line["step"] for line in self.history)], default=0)

  @property
  def steps(self) -> int | None:
    """The steps of the whole run; None if it is by the clock and has not decided them."""
    if not self.config.train.minutes:
      return self.config.train.steps
    return next((e["steps"] for e in reversed(self.events) if e["event"] == "horizon"), None)

  @property
  def finished(self) -> bool:
    """Whether the last step is done."""
    return self.steps is not None and self.done >= self.steps

  @property
  def start(self) -> dict[str, Any]:
    """The event of the last start; {} for a run of an earlier version."""
    return next((e for e in reversed(self.events) if e["event"] == "start"), {})

  @property
  def warnings(self) -> list[str]:
    """The warnings since the last start from scratch, each once."""
    begun = [i for i, e in enumerate(self.events) if e["event"] == "start" and e.get("step") == 0]
    events = self.events[begun[-1] :] if begun else self.events
    return list(dict.fromkeys(e["text"] for e in events if e["event"] == "warning"))

  @property
  def secs(self) -> dict[str, float]:
    """Seconds by activity; for an earlier version's run only its lines' seconds, as "all"."""
    found = journal.seconds(self.events)
    return found or {"all": elapsed(self.history)}

  @property
  def device_hours(self) -> float:
    """Hours over all starts and their devices; one device where none were recorded."""
    found = journal.starts(self.events)
    if not any(secs for _, secs in found):
      found = [(self.start, self.secs)]
    return sum(start.get("devices", 1) * sum(secs.values()) for start, secs in found) / 3600

  def last(self, split: str) -> dict:
    """Returns the last line of "train" or "heldout", {} without one."""
    return next((x for x in reversed(self.history) if x["split"] == split), {})


class Arm(NamedTuple):
  """Runs of one recipe with different seeds; often a single run."""

  name: str
  runs: tuple[SavedRun, ...]


def arms(runs: Sequence[SavedRun]) -> list[Arm]:
  """Groups runs whose defining fields are equal but for the seed, in the order of the runs.

  Runs with the same seed stay apart, and so do runs that start from different recipes.
  """
  found: dict[str, list[SavedRun]] = {}
  for run in runs:
    saved = compare.flatten(read_run_config(run.folder))  # only this has the hashes of its data
    hashes = [saved.get(name) for name in schema.HASHES]
    found.setdefault(str((recipe(run.config.to_dict()), hashes)), []).append(run)
  grouped = []
  for mine in found.values():
    if len({run.config.seed for run in mine}) == len(mine) > 1:
      stem = re.match(r"(.*[-_. /])?", os.path.commonprefix([run.name for run in mine]))[0]
      name = f"{stem.rstrip('-_. /') or mine[0].name} ({len(mine)} seeds)"
      taken = {arm.name for arm in grouped}
      grouped.append(Arm(f"{mine[0].name} and others" if name in taken else name, tuple(mine)))
    else:
      grouped += [Arm(run.name, (run,)) for run in mine]
  return grouped


def recipe(config: dict) -> dict[str, Any]:
  """Returns the fields that all seeds of a recipe share; a starting run's path is its recipe."""
  fields = compare.recipe(compare.flatten(config))
  for name in schema.names(is_path=True):
    start = Path(fields.get(name) or "")
    if fields.get(name) and start.is_dir() and (saved := read_config(start)):
      fields[name] = recipe(saved)
  return fields


def elapsed(history: list[dict]) -> float:
  """Returns the seconds of the lines: each start counts from 0.

  >>> elapsed([{"elapsed_secs": x} for x in (10.0, 20.0, 5.0)])
  25.0
  """
  values = [x["elapsed_secs"] for x in history if x.get("elapsed_secs") is not None]
  return sum(a for a, b in itertools.pairwise([*values, -math.inf]) if b < a)


def read(folder: Path, name: str) -> SavedRun:
  """Reads a run; raises ValueError if the folder holds none, JustBegunError if it has no line."""
  saved = read_run_config(folder)
  history = thinned.read(folder / metrics.HISTORY_FILE)
  if not history:
    raise JustBegunError(f"{folder / metrics.HISTORY_FILE} has no line yet: the run has just begun")
  config = specs.saved_config(saved)
  manifest = shards.read_manifest(sources.data_folder(folder))
  spec = specs.read_spec(folder, Vocab.from_json(manifest["vocab"]))
  places = folder / checkpoint.FOLDER
  return SavedRun(
    name=name,
    folder=folder,
    config=config,
    history=history,
    events=journal.read(folder),
    checkpoints={step: size(places / str(step)) for step in checkpoint.steps_on_disk(places)},
    manifest=manifest,
    baselines=Baselines.of(
      manifest["splits"]["heldout"]["frequencies"],
      config.objective.contrast_group,
      config.objective.mask_token_prob,
    ),
    parameters=generators.count_networks(spec, objectives.param_shapes(spec)),
    flops_per_step=flops.step_flops(spec, config.train.batch_size, manifest["seq_length"]),
  )


def size(folder: Path) -> int:
  """Returns the bytes of the files in a folder, 0 if it is being deleted."""
  try:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
  except FileNotFoundError:
    return 0


def names(folders: list[Path]) -> list[str]:
  """Returns a short name for each folder, the whole path where two folders have the same.

  >>> names([Path("runs/a"), Path("runs/b")]), names([Path("x/a"), Path("y/a")])
  (['a', 'b'], ['x/a', 'y/a'])
  """
  short = [folder.absolute().name for folder in folders]
  return short if len(set(short)) == len(short) else [str(folder) for folder in folders]
