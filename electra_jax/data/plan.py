"""The plan of a build: its settings, its input files, and their division into parts.

A part is a range of the input files. Its output depends on the plan alone, so machines can share a
build.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from electra_jax import __version__
from electra_jax.config import schema
from electra_jax.data import python_docs, source_files, sources, vocabulary
from electra_jax.data.sources import SourceStats, TextChunk, TextSource
from electra_jax.data.status import Status
from electra_jax.data.tokenizer import VocabError
from electra_jax.runtime.storage import Object
from electra_jax.runtime.workdir import replacing

PART_BYTES = 256 << 20  # of input files per part, if data.parts is not set
PLAN, TAGS, HARVEST = "plan.json", "tags.json", "python-docs.txt"
TAG_THREADS = 16  # a read from a mounted bucket takes milliseconds
_BUILDS = {f.removeprefix("data."): row for f, row in schema.PRETRAINING.items() if row.builds}
# Fields that earlier versions lacked, with the values that reproduce them; manifests omit them.
EARLIER = {f: row.earlier for f, row in _BUILDS.items() if row.earlier not in (schema.ALWAYS, None)}


def settings(config: ConfigDict) -> dict:
  """Returns the fields that determine the shards, as {name: value}."""
  return {"seed": config.seed} | {name: config.data[name] for name in _BUILDS}


@dataclasses.dataclass(frozen=True)
class Input:
  """The files of one source, in order; empty for a TFDS dataset, which is read whole."""

  source: TextSource
  files: tuple[Object, ...]

  @property
  def sizes(self) -> list[int]:
    """The bytes of each file."""
    return [file.size for file in self.files]

  def units(self) -> list[int]:
    """Returns the bytes of each unit that parts consist of: each file, or a whole dataset."""
    return self.sizes or [0]


@dataclasses.dataclass(frozen=True)
class Plan:
  """The definition of a build. Two builds with the same plan write the same bytes."""

  config: ConfigDict
  inputs: tuple[Input, ...]
  settings: dict  # with "parts" as a number above 0
  harvest: str  # the file with the text of python-docs

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
    """Whether a first pass over the text is needed, for the vocabulary or for duplicates."""
    return self.trains_vocab or self.drops_duplicates

  @functools.cached_property
  def text(self) -> str:
    """The plan as JSON, without the tags of its files, which earlier versions lacked."""
    files = [
      [x.source.text, x.source.weight, [file.url for file in x.files], x.sizes] for x in self.inputs
    ]
    vocab = None if self.trains_vocab else hashlib.sha256(Path(self.config.data.vocab).read_bytes())
    content = {"settings": self.settings, "files": files, "versions": versions()}
    return json.dumps(content | {"vocab": vocab and vocab.hexdigest()}, sort_keys=True)

  @property
  def tags(self) -> dict[str, str]:
    """The tag of each file."""
    return {file.url: file.tag for x in self.inputs for file in x.files}

  def tagged(self, known: dict[str, str]) -> "Plan":
    """Returns the plan with the known tags; computes those of other local files."""

    def add(file: Object) -> Object:
      if found := known.get(file.url):
        return dataclasses.replace(file, tag=found)
      if file.url == HARVEST:
        return file
      return dataclasses.replace(file, tag=source_files.tag_of(file))

    with ThreadPoolExecutor(TAG_THREADS) as pool:
      inputs = [dataclasses.replace(x, files=tuple(pool.map(add, x.files))) for x in self.inputs]
    return dataclasses.replace(self, inputs=tuple(inputs))

  @functools.cached_property
  def digest(self) -> str:
    """The SHA-256 of the plan."""
    return hashlib.sha256(self.text.encode()).hexdigest()

  @functools.cached_property
  def _bounds(self) -> list[int]:
    return cuts([size for entry in self.inputs for size in entry.units()], self.parts)

  def ranges(self, part: int) -> dict[int, slice]:
    """Returns the files of a part: {index in `inputs`: slice of its files}."""
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
    """Returns a part's share of the input bytes, 0 to 1.

    A TFDS dataset, whose size is unknown here, counts as an average file.
    """
    known = [size for entry in self.inputs for size in entry.sizes]
    average = sum(known) / len(known) if known else 1
    sizes = [size for entry in self.inputs for size in entry.sizes or [average]]
    of_part = sizes[slice(*self._bounds[part : part + 2])]
    return sum(of_part) / sum(sizes) if sum(sizes) else 1 / self.parts


def versions() -> dict[str, str]:
  """Returns the versions of the installed packages that the shards depend on."""
  found = {"electra_jax": __version__, "python": platform.python_version()}
  for name in ("numpy", "sentencepiece", "tokenizers"):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def cuts(sizes: list[int], parts: int) -> list[int]:
  """Returns parts + 1 bounds that cut a list into non-empty ranges of about equal total size.

  >>> cuts([5, 5, 5, 5, 100, 5], 3)
  [0, 4, 5, 6]
  """
  ends = list(itertools.accumulate(sizes))
  bounds = [0]
  for part in range(1, parts):
    wanted = bisect_right(ends, ends[-1] * part / parts)  # files that end before
    bounds.append(min(max(wanted, bounds[-1] + 1), len(sizes) - parts + part))
  return [*bounds, len(sizes)]


def check(config: ConfigDict, parts: int | None = None) -> list[tuple[TextSource, list[Object]]]:
  """Returns the sources of a configuration with their files; `parts` as in `make`.

  Raises:
    ValueError: the vocabulary or a source does not exist, or there are fewer files than parts.
  """
  vocab = config.data.vocab
  if vocab not in vocabulary.KINDS and not Path(vocab).is_file():
    known = ", ".join(vocabulary.KINDS)
    raise VocabError(f"config.data.vocab={vocab!r} is neither a file nor one of {known}")
  found = [
    (source, sources.files(source) if source.kind in sources.READERS else [])
    for source in sources.parse(config.data.sources)
  ]
  units = sum(len(files) or 1 for _, files in found)
  if (parts := config.data.parts or parts or 1) > units:
    raise ValueError(f"{parts} parts need at least {parts} files, but there are {units}")
  return found


def make(
  config: ConfigDict, work: Path, workers: int, parts: int | None = None, start_over: bool = False
) -> Plan:
  """Returns the plan of a configuration.

  A build that has begun keeps the Hub commits that it began with.

  Args:
    work: the folder of the unfinished build, which keeps the text of python-docs.
    parts: replaces data.parts=0. If given, processes share the build, and files keep the tags from
      its beginning.
    start_over: whether to ignore a build that has begun.

  Raises:
    ValueError: as `check`, before the docstrings are collected, which takes a while.
  """
  found = check(config, parts)
  harvest = work / HARVEST
  if any(source.kind == "python-docs" for source, _ in found) and not harvest.exists():
    _write_harvest(harvest, workers)
  before, tags = (None, None) if start_over else begun(work)
  inputs = tuple(_input(*entry, harvest, before, tags) for entry in found)
  units = sum(len(entry.units()) for entry in inputs)
  total = sum(sum(entry.sizes) for entry in inputs)
  count = config.data.parts or parts or min(units, max(1, math.ceil(total / PART_BYTES)))
  made = Plan(config, inputs, settings(config) | {"parts": count}, str(harvest))
  return made.tagged(tags or {} if parts and before == made.text else {})


def begun(work: Path) -> tuple[str | None, dict[str, str] | None]:
  """Returns the plan's text and the tags of a build that has begun; None for a missing file."""
  text = tags = None
  with contextlib.suppress(FileNotFoundError):
    text = (work / PLAN).read_text("utf-8")
    with contextlib.suppress(ValueError):
      tags = json.loads((work / TAGS).read_bytes())
  return text, tags


def _input(
  source: TextSource, files: list[Object], harvest: Path, before: str | None, tags: dict | None
) -> Input:
  if source.kind == "python-docs":
    files = [Object(harvest.name, os.path.getsize(harvest), "")]
  if before and tags and source.target.startswith("hf://"):  # the branch may have moved
    for text, _, paths, sizes in json.loads(before)["files"]:
      if text == source.text and tags.keys() >= {*paths}:
        files = [Object(x, size, tags[x]) for x, size in zip(paths, sizes, strict=True)]
  return Input(source, tuple(files))


def _write_harvest(path: Path, workers: int) -> None:
  label = "collecting docstrings of the installed Python packages"
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
  """Reads the text of one part; `stats` is {index in the plan's inputs: counts}."""

  def __init__(self, plan: Plan, part: int):
    self._plan, self._ranges = plan, plan.ranges(part)
    self.stats: dict[int, SourceStats] = {}
    for place, chosen in self._ranges.items():
      entry = plan.inputs[place]
      self.stats[place] = SourceStats(entry.source, sum(entry.sizes[chosen]))

  def texts(self, duplicates: np.ndarray | None = None) -> Iterator[TextChunk]:
    """Yields the part's text in chunks, without `duplicates`, bool [documents]."""
    data = self._plan.config.data
    for place, stats in self.stats.items():
      source, found = stats.source, self._plan.inputs[place].files[self._ranges[place]]
      if source.kind == "python-docs":
        source = dataclasses.replace(source, kind="text")
        found = [Object(self._plan.harvest, found[0].size, "")]
      yield from sources.documents(
        source,
        stats,
        found=found,
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
