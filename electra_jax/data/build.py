"""Builds shards of training examples from text.

  python -m electra_jax.data.build --config=configs/quickstart.py --config.data.dir=DIR

Reads `config.data.sources`, trains or loads the vocabulary, makes fixed-length examples on all
cores and writes them to `config.data.dir` (layout: electra_jax.data.shards). A finished build of
the same configuration is reused; one that differs is replaced only with --overwrite. The same input
and configuration give the same bytes on any number of cores.
"""

import collections
import dataclasses
import hashlib
import heapq
import importlib.metadata
import math
import os
import platform
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from electra_jax import __version__
from electra_jax.config import cli
from electra_jax.data import chunks, examples, python_docs, shards, sources, tokenizer, vocabulary
from electra_jax.data.shards import SPLITS, DataError, ShardWriter
from electra_jax.data.sources import SourceStats, TextChunk, TextSource
from electra_jax.data.status import Status, say

# Fields of config.data that do not change the shards.
FREE_FIELDS = ("dir", "tfds_dir", "workers", "max_bad_frac")


def build(config: ConfigDict, *, overwrite: bool = False) -> dict:
  """Builds `config.data.dir` unless it is built already, and returns its manifest.

  Reads `config.data` and `config.seed`. With `overwrite`, a finished build that differs stays
  intact until the new one is complete.

  Raises:
    ValueError: the configuration, a source or the vocabulary is invalid, the folder holds another
      build, or the text gave no example. The message is one line.
    OSError: the folder cannot be written.
  """
  check(config)
  folder = Path(config.data.dir)
  if (folder / shards.MANIFEST).exists() and not overwrite:
    manifest = _finished(config, folder)
    say(f"{folder} is built already: {manifest['splits']['train']['examples']:,} examples")
    return manifest
  with shards.building(folder) as temporary:
    manifest = _build(config, temporary)
    shards.publish(temporary, folder, manifest)
  say(f"wrote {folder / shards.MANIFEST}")
  return manifest


def check(config: ConfigDict) -> None:
  """Raises ValueError if a value of config.data is out of range."""
  data = config.data
  if "model" in config and data.seq_length > config.model.max_positions:
    raise ValueError(
      f"config.data.seq_length {data.seq_length} is above config.model.max_positions"
      f" {config.model.max_positions}: no network of this configuration could read the shards"
    )
  if not data.dir:
    raise ValueError("config.data.dir is not set: the folder to write shards to")
  if "://" in data.dir:
    raise ValueError(f"config.data.dir={data.dir}: shards are written to mounted paths only")
  if data.examples not in ("segments", "packed"):
    raise ValueError(f"config.data.examples={data.examples!r} is neither segments nor packed")
  for field, low, high in (
    ("seq_length", 8, 1 << 15),
    ("short_min_tokens", 4, data.seq_length),
    ("short_prob", 0, 1),
    ("single_segment_prob", 0, 1),
    ("boundary_prob", 0, 1),
    ("holdout_frac", 0, 0.5),
    ("max_bad_frac", 0, 1),
    ("examples_per_shard", 1, math.inf),
    ("workers", 0, 4096),
    ("vocab_size", 8, 1 << 31),
  ):
    if not low <= data[field] <= high:
      raise ValueError(f"config.data.{field}={data[field]} is not between {low} and {high}")


def settings(config: ConfigDict) -> dict:
  """Returns the fields that determine the shards, as {name: value}."""
  data = config.data.to_dict()
  return {"seed": config.seed} | {k: v for k, v in data.items() if k not in FREE_FIELDS}


def _finished(config: ConfigDict, folder: Path) -> dict:
  """Returns the manifest of a finished build. Raises DataError if it is another build."""
  manifest = shards.read_manifest(folder)
  wanted = settings(config)
  built = _settings_of(manifest, wanted)
  differing = [
    f"{name} is {built.get(name)!r} there, {value!r} in this configuration"
    for name, value in wanted.items()
    if built.get(name) != value
  ]
  if config.data.vocab not in vocabulary.KINDS and os.path.isfile(config.data.vocab):
    found = hashlib.sha256(Path(config.data.vocab).read_bytes()).hexdigest()
    if found != manifest["vocab"]["hash"]:
      differing.append(f"{config.data.vocab} has changed")
  if not differing:
    differing = list(_changed_files(manifest, config.data.sources))
  if differing:
    raise DataError(
      f"{folder} holds another build ({'; '.join(differing)}): choose another config.data.dir, or "
      "replace it with --overwrite"
    )
  shards.check_files(folder, manifest)
  return manifest


def _settings_of(manifest: dict, wanted: dict) -> dict:
  """Returns the fields of a finished build; those that version 0.1 lacked as it computed."""
  built = dict(manifest["build"])
  if "strip_accents" not in built:
    found = tokenizer.Vocab.from_json(manifest["vocab"]).strip_accents
    asked = wanted["strip_accents"]
    built["strip_accents"] = None if asked is None else found
    if asked is None and found and built["vocab"] in vocabulary.KINDS:
      say("note: its vocabulary is of version 0.1 and strips accents; --overwrite to keep them")
  return built


def _changed_files(manifest: dict, spec: str) -> Iterator[str]:
  """Yields a line for each source whose files still exist but changed in number or size."""
  for source, built in zip(sources.parse(spec), manifest["sources"], strict=True):
    if source.kind not in sources.READERS:
      continue
    try:
      paths = sources.files(source)
    except sources.SourceError:
      continue  # the text may have been deleted after the build
    found = (len(paths), sum(map(os.path.getsize, paths)))
    if found != (built["files"], built["file_bytes"]):
      yield (
        f"{source.text} was {built['files']} files of {built['file_bytes']} bytes, "
        f"is now {found[0]} of {found[1]}"
      )


def _build(config: ConfigDict, temporary: Path) -> dict:
  """Writes vocabulary and shards into `temporary`; returns the manifest."""
  data = config.data
  if data.vocab not in vocabulary.KINDS and not Path(data.vocab).is_file():
    raise tokenizer.VocabError(
      f"config.data.vocab={data.vocab!r}: no such vocabulary file, nor one of"
      f" {', '.join(vocabulary.KINDS)}"
    )
  workers = data.workers or _cores()
  reader = _Reader(config, temporary, workers)
  vocab = _vocabulary(config, reader, temporary)
  spec = examples.ExampleSpec(
    **{
      field.name: data[field.name]
      for field in dataclasses.fields(examples.ExampleSpec)
      if field.name in data
    },
    cls=vocab.cls,
    sep=vocab.sep,
    pad=vocab.pad,
  )
  work = chunks.WorkerSpec(str(temporary), vocab, spec, config.seed)
  packed = data.examples == "packed"
  dtype = examples.record_dtype(data.seq_length, vocab.size, starts=packed)
  writers = {
    split: ShardWriter(temporary, split, dtype, data.examples_per_shard, vocab.size)
    for split in SPLITS
  }
  counts = {split: {"tokens": 0, "discarded": 0} for split in SPLITS}
  rest = {split: np.zeros(0, dtype["ids"].base) for split in SPLITS}
  items = chunks.chunks(reader.pieces(), data.holdout_frac)
  with Status("building", reader.done) as status:
    for size, parts in chunks.process(work, items, workers):
      for split, part in parts.items():
        counts[split]["tokens"] += part.tokens
        counts[split]["discarded"] += part.discarded
        records = part.data
        if packed:
          joined = np.concatenate([rest[split], part.data])
          records, rest[split] = examples.pack(joined, spec, dtype)
        writers[split].append(records)
      status.update(size, sum(part.tokens for part in parts.values()))
  if packed:
    for split in SPLITS:
      writers[split].append(examples.pack(rest[split], spec, dtype, last=True)[0])
  return _manifest(config, reader, vocab, writers, counts, dtype)


def _cores() -> int:
  """Returns the number of cores available to this process."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _manifest(config, reader: "_Reader", vocab, writers, counts, dtype: np.dtype) -> dict:
  """Closes the shards and returns their manifest."""
  reader.close()
  if not writers["train"].examples:
    raise DataError(f"config.data.sources={config.data.sources!r} gave no training example")
  splits = {}
  for split, writer in writers.items():
    writer.frequencies[list(vocab.special_ids)] = 0
    splits[split] = {
      "examples": writer.examples,
      "tokens": counts[split]["tokens"],
      "kept": counts[split]["tokens"] - counts[split]["discarded"],
      "discarded": counts[split]["discarded"],
      "padded": writer.examples * config.data.seq_length - writer.length,
      "shards": writer.finish(),
      "frequencies": writer.frequencies.tolist(),
    }
  _say_counts(splits, config.data)
  packages = ("numpy", "sentencepiece", "tokenizers")
  return {
    "format": shards.FORMAT,
    "version": shards.FORMAT_VERSION,
    "vocab": dataclasses.asdict(vocab) | {"special_ids": list(vocab.special_ids)},
    "seq_length": config.data.seq_length,
    "record_bytes": dtype.itemsize,
    "document_starts": "starts" in dtype.names,
    "splits": splits,
    "sources": [
      {
        "source": stats.source.text,
        "weight": stats.source.weight,
        "files": stats.files,
        "file_bytes": stats.file_bytes,
        "documents": stats.documents,
        "undecodable": stats.undecodable,
        "text_bytes": stats.text_bytes,
      }
      for stats in reader.stats
    ],
    "build": settings(config),
    "versions": {"electra_jax": __version__, "python": platform.python_version()}
    | {name: importlib.metadata.version(name) for name in packages},
  }


class _Reader:
  """Reads all sources, repeatedly if needed; `stats` counts the latest pass."""

  def __init__(self, config: ConfigDict, temporary: Path, workers: int):
    self._data = config.data
    self._sources = sources.parse(config.data.sources)
    self._harvest = temporary / "python-docs.txt"
    for source in self._sources:
      if source.kind in sources.READERS:
        sources.files(source)  # raises if no file matches, before any source is read
    if any(source.kind == "python-docs" for source in self._sources):
      self._write_harvest(workers)
    self._start()

  def _write_harvest(self, workers: int) -> None:
    label = "collecting the documentation of the installed Python packages"
    done = [0.0]
    with Status(label, lambda: done[-1]) as status, open(self._harvest, "wb") as file:
      for document in python_docs.harvest(workers, done.append):
        data = document.encode("utf-8")
        file.write(data + b"\n\n")
        status.update(len(data))

  def _start(self) -> None:
    self.stats = [SourceStats(source) for source in self._sources]
    for stats in self.stats:
      if stats.source.kind != "tfds":
        paths = sources.files(self._as_file(stats.source))
        stats.file_bytes = sum(map(os.path.getsize, paths))

  def _as_file(self, source: TextSource) -> TextSource:
    """Replaces a python-docs source by the file of harvested text."""
    if source.kind != "python-docs":
      return source
    return dataclasses.replace(source, kind="text", target=str(self._harvest))

  def pieces(self) -> Iterator[TextChunk]:
    """Yields the chunks of all sources from the start."""
    self._start()
    for stats in self.stats:
      yield from sources.documents(
        self._as_file(stats.source),
        stats,
        tfds_dir=self._data.tfds_dir,
        max_bad_frac=self._data.max_bad_frac,
      )

  def done(self) -> float | None:
    """Returns the fraction of the text read so far, 0 to 1, or None if unknown."""
    if not all(stats.file_bytes for stats in self.stats):
      return None
    total = sum(stats.total_bytes for stats in self.stats)
    return min(1.0, sum(stats.done_bytes for stats in self.stats) / total)

  def close(self) -> None:
    """Deletes the harvested text."""
    self._harvest.unlink(missing_ok=True)


def _vocabulary(config: ConfigDict, reader: _Reader, temporary: Path) -> tokenizer.Vocab:
  """Writes the vocabulary file to `temporary`: a copy of the given file, or a newly trained one."""
  data = config.data
  if data.vocab not in vocabulary.KINDS:
    if data.vocab.endswith(".txt"):
      counts = collections.Counter(tokenizer.read_pieces(Path(data.vocab)))
      if twice := [piece for piece, n in counts.items() if n > 1]:
        raise ValueError(f"{data.vocab} has {len(twice)} entries twice, the first is {twice[0]!r}")
    loaded = tokenizer.load(data.vocab, data.lowercase, data.strip_accents)
    if data.strip_accents is not None and loaded.vocab.kind != "wordpiece":
      raise tokenizer.VocabError(
        f"config.data.strip_accents={data.strip_accents}: {data.vocab} has its own rules, leave it"
      )
    loaded.save(temporary)
    if data.strip_accents is None and loaded.vocab.strip_accents:
      pieces = Path(data.vocab).read_text("utf-8").split("\n")
      if (count := sum(map(_has_accents, pieces))) > 0.01 * len(pieces):
        say(
          f"note: {data.vocab} has {count:,} entries with accents, which BERT's rule strips"
          " from text: set config.data.strip_accents=false if they were kept when it was trained"
        )
    return loaded.vocab
  kind = "wordpiece" if data.vocab == "wordpiece" else "sentencepiece"
  with Status("reading text for the vocabulary", reader.done) as status:
    train_only = _train_pieces(reader.pieces(), data.holdout_frac, status)
    texts = sample(train_only, int(data.vocab_train_mb * 1e6))
  size = sum(len(text.encode()) for text in texts)
  say(f"training a {data.vocab} vocabulary of {data.vocab_size:,} on {size / 1e6:.1f} MB")
  trained = vocabulary.train(
    data.vocab,
    (line for text in texts for line in text.split("\n")),
    size=data.vocab_size,
    path=temporary / tokenizer.FILES[kind],
    lowercase=data.lowercase,
    strip_accents=bool(data.strip_accents),
  )
  return trained.vocab


def _has_accents(piece: str) -> bool:
  return any(unicodedata.category(c) == "Mn" for c in unicodedata.normalize("NFD", piece))


def _train_pieces(pieces: Iterable[TextChunk], holdout_frac: float, status) -> Iterator[TextChunk]:
  for piece in pieces:
    status.update(piece.size)
    if not piece.repeat and not chunks.is_held_out(piece.key, holdout_frac):
      yield piece


def sample(pieces: Iterable[TextChunk], most_bytes: int) -> list[str]:
  """Returns texts of at most `most_bytes` in total, sampled evenly from the stream.

  Each text gets a number from its hash; the texts with the smallest numbers are kept.
  """
  heap: list[tuple[float, int, int, str]] = []  # the largest draw on top
  size = 0
  for i, piece in enumerate(pieces):
    draw = sources.fraction(piece.key + i.to_bytes(8, "little"), "vocab")
    heapq.heappush(heap, (-draw, i, piece.size, piece.text))
    size += piece.size
    while size > most_bytes and len(heap) > 1:
      size -= heapq.heappop(heap)[2]
  return [text for _, _, _, text in sorted(heap, key=lambda entry: entry[1])]


def _say_counts(splits: dict, data: ConfigDict) -> None:
  table = Table(title=f"examples of {data.seq_length} tokens ({data.examples})")
  for column in ("split", "examples", "tokens", "kept", "discarded", "padding"):
    table.add_column(column, justify="right")
  for split, counts in splits.items():
    lost = counts["discarded"] / max(counts["tokens"], 1)
    padding = counts["padded"] / max(counts["examples"] * data.seq_length, 1)
    table.add_row(
      split,
      f"{counts['examples']:,}",
      f"{counts['tokens']:,}",
      f"{counts['kept']:,}",
      f"{counts['discarded']:,} ({lost:.1%})",
      f"{counts['padded']:,} ({padding:.1%})",
    )
  Console(file=sys.stdout, width=100 if not sys.stdout.isatty() else None).print(table)
  if data.holdout_frac and not splits["heldout"]["examples"]:
    say(f"note: the held-out {data.holdout_frac:.2%} got no document; evaluation is off")


def main(_: list[str]) -> None:
  """Runs from the command line."""
  build(_CONFIG.value, overwrite=_OVERWRITE.value)


if __name__ == "__main__":
  _CONFIG = cli.define_config_flag()
  _OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "replace a finished build of another configuration"
  )
  cli.run(main)
