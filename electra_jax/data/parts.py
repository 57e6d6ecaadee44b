"""Builds the parts of a plan in any number of processes, each part once, and joins them.

The folder of an unfinished build, DIR/.building, has one folder for each finished piece of work. A
piece is written under a temporary name and renamed, so every piece has a `done.json`:

plan.json         the plan
tags.json         the versions of the input files
sample-00003/     of part 3: text for the vocabulary, and digests of the documents
vocabulary/       the vocabulary, and which documents are duplicates
part-00003/       the records of part 3

All functions may run on several machines at once and reuse the pieces of other processes.
"""

import collections
import contextlib
import dataclasses
import json
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from electra_jax.core.transformer_config import take_fields
from electra_jax.data import characters, chunks, duplicates, examples, pool, shards, vocabulary
from electra_jax.data.examples import ExampleSpec
from electra_jax.data.plan import EARLIER, PLAN, TAGS, PartReader, Plan, begun, versions
from electra_jax.data.shards import SPLITS, DataError, ShardWriter
from electra_jax.data.sources import SourceStats, TextChunk, check_undecodable
from electra_jax.data.status import Status, print_line
from electra_jax.data.tokenizer import Vocab
from electra_jax.runtime.foreign import inside
from electra_jax.runtime.workdir import LOCK_FILE, naming, replacing, sweep, temporary

DONE, TEXTS, DIGESTS = "done.json", "texts.json", "digests.npz"
FREQUENCIES = "frequencies.npz"
FINAL_TAGS = f".{TAGS}"  # in the folder of the shards, where `plan.begun` does not look
SAMPLE, PART, DUPLICATES, VOCABULARY = "sample", "part", "duplicates", "vocabulary"
COUNTS = ("documents", "undecodable", "text_bytes")
TEXT_COUNTS = ("lines", characters.ALL, *characters.LOST)  # parts of earlier versions lack them


def name_of(kind: str, part: int) -> str:
  """Returns the name of a part's folder."""
  return f"{kind}-{part:05d}"


def open_work(work: Path, plan: Plan, start_over: bool = False, shared: bool = False) -> None:
  """Prepares the folder of an unfinished build, which continues a build of the same plan.

  If the plan or the files changed, deletes the earlier work with `start_over` or if at most one
  sample is done; otherwise, and if other processes share the build, raises DataError.
  """
  found, tags = begun(work)
  changed = [url for url, tag in plan.tags.items() if (tags or {}).get(url, tag) != tag]
  if found not in (None, plan.text) or changed:
    written, read = (list(work.glob(f"{kind}-*/{DONE}")) for kind in (PART, SAMPLE))
    if shared or (not start_over and (written or len(read) > 1)):
      reason = f"{changed[0]} has changed" if found == plan.text else _difference(found, plan)
      raise DataError(
        f"{work} holds parts of another build ({reason}): use its configuration or delete it"
      )
    for old in [*work.glob(f"{PART}-*"), *work.glob(f"{SAMPLE}-*"), work / VOCABULARY]:
      shutil.rmtree(old, ignore_errors=True)
  work.mkdir(parents=True, exist_ok=True)
  for name, text in ((TAGS, json.dumps(plan.tags)), (PLAN, plan.text)):
    with replacing(work / name) as draft:
      draft.write_text(text, "utf-8")


def check_plan(work: Path, plan: Plan) -> None:
  """Raises DataError if this process's plan differs from the plan of the build."""
  path = work / PLAN
  found = path.read_text("utf-8") if path.exists() else "nothing"
  if found != plan.text:
    raise DataError(f"{path} differs from this process's plan: {_difference(found, plan)}")


def _difference(found: str, plan: Plan) -> str:
  try:
    before, now = json.loads(found), json.loads(plan.text)
    others = {"input files": "files", "vocabulary": "vocab"}
    names = [k for k, v in now["settings"].items() if before["settings"].get(k) != v]
    names += [name for name, key in others.items() if before[key] != now[key]]
    old = before["versions"]
    names += [f"versions of {k}" for k, v in now["versions"].items() if old.get(k) != v]
  except (ValueError, LookupError, TypeError, AttributeError):
    names = []
  return f"{', '.join(names)} differ" if names else "the plan.json is damaged"


@contextlib.contextmanager
def piece(work: Path, plan: Plan, name: str) -> Iterator[tuple[Path, dict]]:
  """Yields a temporary folder for a piece of work and a dict for its metadata.

  On success the folder is renamed atomically, unless another process has finished the piece first.
  """
  with temporary(work / name, folder=True) as draft:
    content = {"plan": plan.digest}
    yield draft, content
    content["bytes"] = {path.name: path.stat().st_size for path in draft.iterdir()}
    with open(draft / DONE, "w", encoding="utf-8") as file:
      json.dump(content, file)
      file.flush()
      os.fsync(file.fileno())
    try:
      os.rename(draft, work / name)
    except OSError:
      if not (work / name / DONE).exists():
        raise


def read_piece(work: Path, plan: Plan, name: str) -> dict | None:
  """Returns a piece's metadata, None if not done; DataError if damaged or of another plan."""
  folder = work / name
  if not folder.exists():
    return None
  try:
    content = json.loads((folder / DONE).read_bytes())
    sizes = content.get("bytes", {}).items()  # earlier versions had none
    whole = all((folder / file).stat().st_size == size for file, size in sizes)
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    whole = False
  if not whole:
    raise _damaged(folder)
  if content["plan"] != plan.digest:
    raise DataError(f"{folder} belongs to another build: delete it and build it again")
  return content


def _needed(work: Path, plan: Plan, name: str) -> dict:
  if (content := read_piece(work, plan, name)) is None:
    raise DataError(f"{work / name} is missing: build it first")
  return content


def _needed_of_all(work: Path, plan: Plan, kind: str) -> list[dict]:
  return [_needed(work, plan, name_of(kind, part)) for part in range(plan.parts)]


def _damaged(folder: Path) -> DataError:
  return DataError(f"{folder} is damaged: delete it and build it again")


def _read(path: Path) -> list | dict[str, np.ndarray]:
  """Returns the content of a piece's JSON file, or the arrays of another file."""
  try:
    if path.suffix == ".json":
      return json.loads(path.read_text("utf-8"))
    with np.load(path) as found:
      return dict(found)
  except (OSError, ValueError, zipfile.BadZipFile) as error:
    raise _damaged(path.parent) from error


def missing(work: Path, plan: Plan, kind: str, parts: Iterable[int]) -> list[int]:
  """Returns those of `parts` whose piece of a kind is not done."""
  return [part for part in parts if read_piece(work, plan, name_of(kind, part)) is None]


def count_left(work: Path, plan: Plan, kind: str) -> int:
  """Counts the parts whose piece of a kind is not done, by folder names."""
  names = set(os.listdir(work))
  return sum(name_of(kind, part) not in names for part in range(plan.parts))


def take_sample(work: Path, plan: Plan, part: int) -> None:
  """Samples a part in this process: text for the vocabulary, and digests of the documents."""
  data, reader = plan.config.data, PartReader(plan, part)
  digests = duplicates.Digests()

  def read() -> Iterator[TextChunk]:
    for text in reader.texts():
      status.update(text.size)
      if text.repeat:
        continue
      if plan.drops_duplicates:
        digests.add(text)
      if plan.trains_vocab and not chunks.is_held_out(text.key, data.holdout_frac):
        yield text._replace(document=len(digests) - 1)

  label = f"reading text for {'the vocabulary' if plan.trains_vocab else 'duplicates'}"
  with naming(work, keep=True), piece(work, plan, name_of(SAMPLE, part)) as (folder, content):
    with Status(f"{label}{_of_part(plan, part)}", reader.done) as status:
      found = vocabulary.sample(read(), int(data.vocab_train_mb * 1e6 * plan.share(part)))
    np.savez(folder / DIGESTS, digests.array())
    (folder / TEXTS).write_text(json.dumps([(x.document, x.text) for x in found]), "utf-8")
    content["sources"] = _counts(reader)


def _of_part(plan: Plan, part: int) -> str:
  return f", part {part} of {plan.parts}" if plan.parts > 1 else ""


def _counts(reader: PartReader) -> dict[str, dict[str, int | str]]:
  found = reader.stats.items()
  keys = (*COUNTS, "bad", "note")
  return {str(place): {key: getattr(stats, key) for key in keys} for place, stats in found}


def write_vocabulary(work: Path, plan: Plan) -> None:
  """Writes the vocabulary, trained on the samples or copied, and finds the duplicates."""
  if read_piece(work, plan, VOCABULARY) is not None:
    return
  if plan.needs_sample:
    check_sources(plan, _needed_of_all(work, plan, SAMPLE))
  with naming(work, keep=True), piece(work, plan, VOCABULARY) as (folder, content):
    left_out = _write_duplicates(work, plan, folder) if plan.drops_duplicates else None
    if plan.trains_vocab:
      texts = []
      for part in range(plan.parts):
        found = _read(work / name_of(SAMPLE, part) / TEXTS)
        texts += [text for i, text in found if left_out is None or not left_out[part][i]]
      vocab = vocabulary.trained(plan.config, texts, folder)
    else:
      vocab = vocabulary.given(plan.config, folder)
    content["vocab"] = dataclasses.asdict(vocab)


def _write_duplicates(work: Path, plan: Plan, folder: Path) -> list[np.ndarray]:
  """Writes and returns which documents of each part are duplicates, bool [documents] a part."""
  digests, ends = bytearray(), []  # one buffer, so that they are in memory only once
  for part in range(plan.parts):
    for array in _read(work / name_of(SAMPLE, part) / DIGESTS).values():
      digests += array.tobytes()
    ends.append(len(digests) // duplicates.DTYPE.itemsize)
  repeated = duplicates.repeated(np.frombuffer(digests, duplicates.DTYPE))
  of_parts = np.split(repeated, ends[:-1])
  for part, found in enumerate(of_parts):
    np.savez(folder / f"{name_of(DUPLICATES, part)}.npz", found)
  print_line(f"{int(repeated.sum()):,} of {len(repeated):,} documents are dropped as duplicates")
  return of_parts


def write_parts(work: Path, plan: Plan, todo: list[int], workers: int) -> None:
  """Writes the records of parts with one pool of processes."""
  data, vocab = plan.config.data, Vocab.from_json(_needed(work, plan, VOCABULARY)["vocab"])
  spec = take_fields(ExampleSpec, data, cls=vocab.cls, sep=vocab.sep, pad=vocab.pad)
  settings = chunks.WorkerSpec(str(work / VOCABULARY), vocab, spec, plan.config.seed)
  readers = {part: PartReader(plan, part) for part in todo}
  handed_out = collections.deque()  # the reader's progress at each pending chunk

  def items() -> Iterator[chunks.Chunk]:
    for part, reader in readers.items():
      repeated = None
      if plan.drops_duplicates:
        found = _read(work / VOCABULARY / f"{name_of(DUPLICATES, part)}.npz")
        repeated = np.concatenate([*found.values()])  # earlier builds: one array per source
      for chunk in chunks.chunks(reader.texts(repeated), data.holdout_frac, part):
        handed_out.append(reader.done())
        yield chunk

  with contextlib.closing(chunks.process(settings, items(), workers)) as encoded:
    for part, reader in readers.items():
      with naming(work, keep=True), piece(work, plan, name_of(PART, part)) as (folder, content):
        writer = PartWriter(folder, plan, spec, vocab)
        with Status(f"building{_of_part(plan, part)}", lambda: handed_out[0]) as status:
          for chunk in encoded:
            writer.append(chunk)
            status.update(chunk.size, sum(split.tokens for split in chunk.splits.values()))
            handed_out.popleft()
            if chunk.last:
              break
        content |= {"splits": writer.finish(), "sources": _counts(reader)}


# The stages of a build, with one piece of work for each part: {kind: past participle}.
STAGES = {SAMPLE: "read", PART: "built"}


def do_stage(
  kind: str, work: Path, plan: Plan, parts: Iterable[int], workers: int | None = None
) -> None:
  """Does the missing pieces of a kind for some parts; workers=None means data.workers."""
  todo = missing(work, plan, kind, parts)
  if kind == PART:
    write_parts(work, plan, todo, workers or plan.config.data.workers or pool.cores())
    return
  for part in todo:
    take_sample(work, plan, part)


class PartWriter:
  """Writes the records of one part."""

  def __init__(self, folder: Path, plan: Plan, spec: ExampleSpec, vocab: Vocab):
    self._folder, self._spec, self._dtype = folder, spec, record_layout(plan, vocab)
    per_shard = plan.config.data.examples_per_shard
    self._writers = {
      split: ShardWriter(folder, split, self._dtype, per_shard, vocab.size) for split in SPLITS
    }
    self._rest = {split: np.zeros(0, self._dtype["ids"].base) for split in SPLITS}

  def append(self, chunk: chunks.EncodedChunk) -> None:
    """Adds the records of a chunk; the last chunk closes the open packed row."""
    for split, found in chunk.splits.items():
      records, writer = found.data, self._writers[split]
      if self._spec.examples == "packed":
        stream = np.concatenate([self._rest[split], records])
        records, self._rest[split] = examples.pack(stream, self._spec, self._dtype, chunk.last)
      writer.append(records)
      writer.counts.update(found.text, tokens=found.tokens, discarded=found.discarded)

  def finish(self) -> dict[str, dict]:
    """Closes the files and returns their counts by split."""
    frequencies = {split: writer.frequencies for split, writer in self._writers.items()}
    np.savez_compressed(self._folder / FREQUENCIES, **frequencies)
    return {
      split: dict(writer.counts) | {"shards": writer.finish()}
      for split, writer in self._writers.items()
    }


def record_layout(plan: Plan, vocab: Vocab) -> np.dtype:
  """Returns the layout of a plan's records."""
  data = plan.config.data
  return examples.record_dtype(data.seq_length, vocab.size, starts=data.examples == "packed")


def join(work: Path, plan: Plan, folder: Path) -> dict:
  """Joins the parts into a folder of shards, deletes the work folder and returns the manifest.

  If locks do not work, several processes may join at once: the shards are valid, but all processes
  except the first to end raise an OSError or a DataError.

  Raises:
    DataError: a part is missing, or no part has a training example.
    SourceError: too many documents are undecodable.
  """
  with temporary(work / "joined", folder=True) as final:
    return _join_in(final, work, plan, folder)


def _join_in(final: Path, work: Path, plan: Plan, folder: Path) -> dict:
  done = _needed_of_all(work, plan, PART)
  counts = check_sources(plan, done)
  vocab = Vocab.from_json(_needed(work, plan, VOCABULARY)["vocab"])
  splits = {split: _join_split(work, final, split, done, plan, vocab) for split in SPLITS}
  if not splits["train"]["examples"]:
    _delete(work)
    raise DataError(f"config.data.sources={plan.config.data.sources!r} gave no training examples")
  shutil.copyfile(work / VOCABULARY / vocab.file, final / vocab.file)
  dtype = record_layout(plan, vocab)
  manifest = {
    "format": shards.FORMAT,
    "version": shards.FORMAT_VERSION,
    "vocab": dataclasses.asdict(vocab) | {"special_ids": list(vocab.special_ids)},
    "seq_length": plan.config.data.seq_length,
    "record_bytes": dtype.itemsize,
    "document_starts": "starts" in dtype.names,
    "splits": splits,
    "sources": counts,
    "build": {k: v for k, v in plan.settings.items() if (k, v) not in EARLIER.items()},
    "versions": versions(),
  }
  shards.publish(final, folder, manifest)
  shards.check_files(folder, manifest)
  _finish(work)
  return manifest


def _finish(work: Path) -> None:
  with replacing(work.parent / FINAL_TAGS) as draft:
    shutil.copyfile(work / TAGS, draft)
  _delete(work)


def _delete(work: Path) -> None:
  """Deletes a work folder, atomically for other processes."""
  with temporary(work, folder=True) as gone:
    os.rename(work, gone)


def finish_rest(work: Path, manifest: dict) -> None:
  """Does the rest of a finished build that was killed, unless another process builds."""
  sweep(work.parent)
  text, _ = begun(work)
  with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
    if text and EARLIER | manifest["build"] == EARLIER | json.loads(text)["settings"]:
      with shards.locked(work.parent / LOCK_FILE):
        _finish(work)


def check_sources(plan: Plan, pieces: list[dict]) -> list[dict]:
  """Returns each source's counts over all parts. Raises SourceError if too much is undecodable."""
  counts = []
  for place, entry in enumerate(plan.inputs):
    parts = [found["sources"][str(place)] for found in pieces if str(place) in found["sources"]]
    totals = {key: sum(counted[key] for counted in parts) for key in COUNTS}
    # Parts of earlier versions lack what is not a count.
    bad, note = (next(filter(None, (x.get(k) for x in parts)), "") for k in ("bad", "note"))
    check_undecodable(SourceStats(entry.source, **totals, bad=bad), plan.config.data.max_bad_frac)
    if note and "splits" in pieces[0]:  # once, at the end
      print_line(f"note: source {entry.source.text!r}: {note}")
    counts.append(
      {"source": entry.source.text, "weight": entry.source.weight}
      | {"files": len(entry.sizes), "file_bytes": sum(entry.sizes)}
      | ({"commit": entry.files[0].tag} if entry.source.target.startswith("hf://") else {})
      | totals
    )
  return counts


def _join_split(work: Path, final: Path, split: str, done: list[dict], plan: Plan, vocab) -> dict:
  """Gives the files of a split their final names and returns the split's manifest entry."""
  files, total, frequencies = [], collections.Counter(), np.zeros(vocab.size, np.int64)
  for part, found in enumerate(done):
    folder, counts = work / name_of(PART, part), dict(found["splits"][split])
    files += [(inside(folder, shard["file"]), shard) for shard in counts.pop("shards")]
    total.update(counts)
    frequencies += _read(folder / FREQUENCIES)[split]
  frequencies[list(vocab.special_ids)] = 0
  entries = []
  for i, (path, shard) in enumerate(files):
    name = f"{split}-{i:05d}-of-{len(files):05d}.bin"
    try:
      os.link(path, final / name)  # the part keeps its file, too
    except OSError:  # this file system has no hard links
      shutil.copyfile(path, final / name)
    entries.append(shard | {"file": name})
  return {
    "examples": total["examples"],
    "tokens": total["tokens"],
    "kept": total["tokens"] - total["discarded"],
    "discarded": total["discarded"],
    "padded": total["examples"] * plan.config.data.seq_length - total["length"],
    **{key: total[key] for key in TEXT_COUNTS},
    "shards": entries,
    "frequencies": frequencies.tolist(),
  }
