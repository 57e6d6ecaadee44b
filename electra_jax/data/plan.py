"""The plan of a build: its settings, its input files, and their division into parts.

A part is a range of the input files. Its output depends on the plan alone, not on the machine, the
time or the order, so any number of machines can share a build.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from electra_jax import __version__
from electra_jax.config import schema
from electra_jax.data import python_docs, sources, vocabulary
from electra_jax.data.sources import SourceStats, TextChunk, TextSource
from electra_jax.data.status import Status
from electra_jax.data.tokenizer import VocabError
from electra_jax.runtime.workdir import replacing

PART_BYTES = 256 << 20  # of input files, where the number of parts is not set
HARVEST = "python-docs.txt"
_BUILDS = {f.removeprefix("data."): row for f, row in schema.PRETRAINING.items() if row.builds}
# Fields that earlier versions lacked, with the values that reproduce them; manifests omit them.
EARLIER = {f: row.earlier for f, row in _BUILDS.items() if row.earlier not in (schema.ALWAYS, None)}


def settings(config: ConfigDict) -> dict:
  """Returns the fields that determine the shards, as {name: value}."""
  return {"seed": config.seed} | {name: config.data[name] for name in _BUILDS}


@dataclasses.dataclass(frozen=True)
class Input:
  """The files of one source, in order; a TFDS dataset has none and is read whole."""

  source: TextSource
  paths: tuple[str, ...]
  sizes: tuple[int, ...]  # bytes

  def units(self) -> list[int]:
    """Returns the bytes of each file; parts consist of whole files."""
    return list(self.sizes) or [0]


@dataclasses.dataclass(frozen=True)
class Plan:
  """The definition of a build. Two builds with the same plan write the same bytes."""

  config: ConfigDict
  inputs: tuple[Input, ...]
  settings: dict  # with "parts" as a number above 0
  harvest: str  # the file with the text of the source python-docs

  @property
  def parts(self) -> int:
    return self.settings["parts"]

  @property
  def drops_duplicates(self) -> bool:
    return bool(self.config.data.dedup)

  @property
  def trains_vocab(self) -> bool:
    return self.config.data.vocab in vocabulary.KINDS

  @property
  def needs_sample(self) -> bool:
    """Whether a first pass reads the text, for a vocabulary or for duplicates."""
    return self.trains_vocab or self.drops_duplicates

  @functools.cached_property
  def text(self) -> str:
    """The plan as JSON."""
    files = [[x.source.text, x.source.weight, x.paths, x.sizes] for x in self.inputs]
    vocab = None if self.trains_vocab else hashlib.sha256(Path(self.config.data.vocab).read_bytes())
    content = {"settings": self.settings, "files": files, "versions": versions()}
    return json.dumps(content | {"vocab": vocab and vocab.hexdigest()}, sort_keys=True)

  @functools.cached_property
  def digest(self) -> str:
    """The SHA-256 of the plan."""
    return hashlib.sha256(self.text.encode()).hexdigest()

  @functools.cached_property
  def _bounds(self) -> list[int]:
    return cuts([size for entry in self.inputs for size in entry.units()], self.parts)

  def ranges(self, part: int) -> dict[int, slice]:
    """Returns the files of a part: {place in `inputs`: their range}."""
    first, last = self._bounds[part : part + 2]
    found, start = {}, 0
    for place, entry in enumerate(self.inputs):
      count = len(entry.units())
      chosen = slice(max(first - start, 0), min(last - start, count))
      if chosen.start < chosen.stop:
        found[place] = chosen
      start += count
    return found

  def share(self, part: int) -> float:
    """Returns the share of the input's bytes that a part has, 0 to 1.

    A dataset of TFDS, whose size is not known here, counts as an average file.
    """
    known = [size for entry in self.inputs for size in entry.sizes]
    average = sum(known) / len(known) if known else 1
    sizes = [size for entry in self.inputs for size in entry.sizes or [average]]
    own = sizes[slice(*self._bounds[part : part + 2])]
    return sum(own) / sum(sizes) if sum(sizes) else 1 / self.parts


def versions() -> dict[str, str]:
  """Returns the versions of the programs that shards depend on, as far as they are installed."""
  found = {"electra_jax": __version__, "python": platform.python_version()}
  for name in ("numpy", "sentencepiece", "tokenizers"):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def cuts(sizes: list[int], parts: int) -> list[int]:
  """Returns parts + 1 bounds that cut a list into ranges of about equal size, none empty.

  >>> cuts([5, 5, 5, 5, 100, 5], 3)
  [0, 4, 5, 6]
  """
  ends = list(itertools.accumulate(sizes))
  bounds = [0]
  for part in range(1, parts):
    wanted = bisect_right(ends, ends[-1] * part / parts)  # files that end before
    bounds.append(min(max(wanted, bounds[-1] + 1), len(sizes) - parts + part))
  return [*bounds, len(sizes)]


def check(config: ConfigDict, parts: int | None = None) -> list[tuple[TextSource, list[str]]]:
  """Returns the sources of a configuration with their files; `parts` is as for `make`.

  Raises:
    ValueError: the vocabulary or a source does not exist, or there are more parts than files.
  """
  vocab = config.data.vocab
  if vocab not in vocabulary.KINDS and not Path(vocab).is_file():
    known = ", ".join(vocabulary.KINDS)
    raise VocabError(f"config.data.vocab={vocab!r}: no such vocabulary file, nor one of {known}")
  found = [
    (source, sources.files(source) if source.kind in sources.READERS else [])
    for source in sources.parse(config.data.sources)
  ]
  units = sum(len(paths) or 1 for _, paths in found)
  if (parts := config.data.parts or parts or 1) > units:
    raise ValueError(f"{parts} parts: a part is a file or more, and there are {units}")
  return found


def make(config: ConfigDict, work: Path, workers: int, parts: int | None = None) -> Plan:
  """Returns the plan of a configuration.

  Args:
    work: the folder of the unfinished build, which keeps the text of python-docs.
    parts: replaces a `data.parts` that is 0.

  Raises:
    ValueError: as `check`, before the documentation is collected, which takes a while.
  """
  found = check(config, parts)
  harvest = work / HARVEST
  if any(source.kind == "python-docs" for source, _ in found) and not harvest.exists():
    _write_harvest(harvest, workers)
  inputs = tuple(_input(*entry, harvest) for entry in found)
  units = sum(len(entry.units()) for entry in inputs)
  total = sum(sum(entry.sizes) for entry in inputs)
  parts = config.data.parts or parts or min(units, max(1, math.ceil(total / PART_BYTES)))
  return Plan(config, inputs, settings(config) | {"parts": parts}, str(harvest))


def _input(source: TextSource, paths: list[str], harvest: Path) -> Input:
  if source.kind == "python-docs":
    return Input(source, (harvest.name,), (os.path.getsize(harvest),))
  return Input(source, tuple(paths), tuple(map(os.path.getsize, paths)))


def _write_harvest(path: Path, workers: int) -> None:
  label = "collecting the documentation of the installed Python packages"
  done = [0.0]
  path.parent.mkdir(parents=True, exist_ok=True)
  with (
    Status(label, lambda: done[-1]) as status,
    replacing(path) as temporary,
    open(temporary, "wb") as file,
  ):
    for document in python_docs.harvest(workers, done.append):
      data = document.encode("utf-8")
      file.write(data + b"\n\n")
      status.update(len(data))


class PartReader:
  """Reads the text of one part; `stats` counts it, {place in the plan's inputs: counts}."""

  def __init__(self, plan: Plan, part: int):
    self._plan, self._ranges = plan, plan.ranges(part)
    self.stats: dict[int, SourceStats] = {}
    for place, chosen in self._ranges.items():
      entry = plan.inputs[place]
      self.stats[place] = SourceStats(entry.source, sum(entry.sizes[chosen]))

  def texts(self, duplicates: np.ndarray | None = None) -> Iterator[TextChunk]:
    """Yields the chunks of text of the part without its `duplicates`, bool [documents]."""
    data = self._plan.config.data
    for place, stats in self.stats.items():
      source, paths = stats.source, self._plan.inputs[place].paths[self._ranges[place]]
      if source.kind == "python-docs":
        source, paths = dataclasses.replace(source, kind="text"), (self._plan.harvest,)
      yield from sources.documents(
        source,
        stats,
        paths=paths,
        tfds_dir=data.tfds_dir,
        max_bad_frac=data.max_bad_frac,
        duplicates=duplicates,
      )
      if duplicates is not None:
        duplicates = duplicates[stats.kept :]

  def done(self) -> float:
    """Returns the fraction of the part's text that has been read, 0 to 1."""
    total = sum(stats.total_bytes for stats in self.stats.values())
    done = sum(stats.done_bytes for stats in self.stats.values())
    return min(1.0, done / total) if total else 0.0
