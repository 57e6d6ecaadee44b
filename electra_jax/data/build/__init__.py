"""Builds shards of training examples from text; see commands/build.py."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from electra_jax.config import schema
from electra_jax.data import (
  parts,
  pool,
  publish,
  shards,
  source_files,
  sources,
  summary,
  tokenizer,
  vocabulary,
)
from electra_jax.data import plan as plans
from electra_jax.data.plan import Plan, settings
from electra_jax.data.runners import RUNNERS, PartWork
from electra_jax.data.shards import DataError
from electra_jax.data.status import print_line
from electra_jax.runtime import storage
from electra_jax.runtime.workdir import LOCK_FILE, remove_unused

VOCABULARY_LOCK, JOINING_LOCK = ".vocabulary.lock", ".joining.lock"


def build(
  config: ConfigDict, *, overwrite: bool = False, runner: str = "local", options: Sequence[str] = ()
) -> dict:
  """Builds `config.data.dir` unless it is built already, and returns its manifest.

  Reads `config.data` and `config.seed`. Continues an interrupted build of the same configuration.
  `overwrite` replaces a different build, once the new one is complete.

  Args:
    runner: the engine that builds the parts, a key of RUNNERS.
    options: command-line options for the engine.

  Raises:
    ValueError: the configuration, a source or the vocabulary is invalid, the folder holds another
      build, or the text gave no examples. The message is one line.
    OSError: the folder cannot be written.
  """
  if storage.is_remote(config.data.dir or ""):
    return _build_at_url(config, overwrite, runner, options)
  with _opened(config, overwrite=overwrite) as (found, plan, work):
    if found:
      parts.finish_rest(work, found)
      return found
    try:
      return _build_all(work, plan, runner, options)
    except Exception:
      if plan.parts == 1:  # with several parts, the finished ones are kept
        shutil.rmtree(work, ignore_errors=True)
      raise


def _build_at_url(config: ConfigDict, overwrite: bool, runner: str, options: Sequence[str]) -> dict:
  """Builds on this host, unless that is done, and publishes the shards; as `build`."""
  check(config)
  url, manifest = config.data.dir.rstrip("/"), None
  if not overwrite and (found := _finished(config, url)):
    return found
  if runner != "local" and not config.data.cache:
    raise ValueError(f"--runner={runner} needs config.data.cache, a folder that all machines share")
  local = config.copy_and_resolve_references()
  folder = publish.work_folder(url, config.data.cache)
  local.data.dir = str(folder)
  with publish.claimed(url) as check_claim:
    if not overwrite and (found := _finished(config, url)):
      return found
    if not overwrite and not folder.exists():
      shards.refuse_files(url, publish.sizes(url))
    try:
      manifest = _finished(local, folder)  # by a process killed during publication
    except DataError:
      overwrite = True
    manifest = manifest or build(local, overwrite=overwrite, runner=runner, options=options)
    publish.publish(folder, url, check_claim)
  shutil.rmtree(folder)
  return manifest


def _build_all(work: Path, plan: Plan, runner: str, options: Sequence[str]) -> dict:
  """Builds the missing parts and joins all; returns the manifest."""

  def run(kind: str) -> None:
    todo = parts.missing(work, plan, kind, range(plan.parts))
    if 0 < len(todo) < plan.parts:
      print_line(f"{plan.parts - len(todo)} of {plan.parts} parts are {parts.STAGES[kind]} already")
    if todo:
      RUNNERS[runner](PartWork(work, plan, kind), todo, options)

  if plan.needs_sample:
    run(parts.SAMPLE)
  parts.write_vocabulary(work, plan)
  run(parts.PART)
  return _join(work, plan)


def build_part(config: ConfigDict, part: int, count: int) -> None:
  """Performs the next stage of one part; any number of processes may run at once.

  The first stage samples the text, if a vocabulary is trained or duplicates are dropped. The next
  writes the records; the last process to finish joins the parts. So each part needs two calls, or
  one if no sample is needed.

  Args:
    part: from 0.
    count: the number of parts, which `data.parts` must equal unless it is 0.

  Raises:
    ValueError: `part` or `count` is out of range, or as `build`.
    OSError: the folder cannot be written.
  """
  if storage.is_remote(config.data.dir or ""):
    raise ValueError(
      f"--part={part}/{count}: set config.data.dir to a folder that all machines mount, and copy"
      f" the finished build to {config.data.dir}, {shards.MANIFEST} last"
    )
  if config.data.parts not in (0, count):
    raise ValueError(f"--part={part}/{count} differs from config.data.parts={config.data.parts}")
  if not 0 <= part < count:
    raise ValueError(f"--part={part}/{count}: part must be between 0 and {count - 1}")
  with _opened(config, count=count) as (found, plan, work):
    if found:
      return
    try:
      _do_part(work, plan, part)
    except (OSError, ValueError):
      if work.exists() or not (work.parent / shards.MANIFEST).exists():
        raise
      print_line(f"part {part}: other processes have built and joined all parts")


def _do_part(work: Path, plan: Plan, part: int) -> None:
  left_of = f"of {plan.parts} parts are left"
  if plan.needs_sample:
    parts.do_stage(parts.SAMPLE, work, plan, [part])
    if left := parts.count_left(work, plan, parts.SAMPLE):
      print_line(f"part {part}: text is read; {left} {left_of}, then run each part again")
      return
  with shards.locked(work.parent / VOCABULARY_LOCK, wait=True):
    parts.write_vocabulary(work, plan)
  parts.do_stage(parts.PART, work, plan, [part])
  if left := parts.count_left(work, plan, parts.PART):
    print_line(f"part {part} is built; {left} {left_of}")
    return
  with shards.locked(work.parent / JOINING_LOCK, wait=True):
    _join(work, plan)


@contextlib.contextmanager
def _opened(
  config: ConfigDict, *, overwrite: bool = False, count: int | None = None
) -> Iterator[tuple[dict | None, Plan | None, Path]]:
  """Locks the folder of a build; yields (manifest of a finished build, plan, work folder).

  If `count` is given, processes share the build of that many parts.
  """
  check(config)
  folder, shared = Path(config.data.dir), count is not None
  work, is_new = folder / shards.BUILDING, not folder.exists()
  found, made = None if overwrite else _finished(config, folder, count), None
  # Wait for a process that joins, so as not to start a finished build again.
  joined = shards.locked(folder / JOINING_LOCK, wait=True) if shared else contextlib.nullcontext()
  with contextlib.ExitStack() as locks:
    if not found:
      plans.check(config, count)
      if config.data.vocab not in vocabulary.KINDS:
        vocabulary.load_given(config)  # raises before the folder is made
      locks.enter_context(shards.locked(folder / LOCK_FILE, shared=shared))
      if is_new and not shared:
        locks.callback(remove_unused, folder)
      with joined:
        found = None if overwrite else _finished(config, folder, count)
        if not found:
          if not overwrite:
            shards.check_unused(folder, config.data.vocab)
          made = plans.make(config, work, config.data.workers or pool.cores(), count, overwrite)
          parts.open_work(work, made, start_over=overwrite, shared=shared)
    yield found, made, work


def _join(work: Path, plan: Plan) -> dict:
  manifest = parts.join(work, plan, work.parent)
  summary.say(work.parent, manifest, plan.config.data)
  print_line(f"wrote {work.parent / shards.MANIFEST}")
  return manifest


def check(config: ConfigDict) -> None:
  """Raises ValueError if a value of config.data is out of range."""
  data = config.data
  if "model" in config and data.seq_length > config.model.max_positions:
    raise ValueError(
      f"config.data.seq_length {data.seq_length} is above config.model.max_positions"
      f" {config.model.max_positions}: lower seq_length or raise max_positions"
    )
  if not data.dir:
    raise ValueError("set config.data.dir to the folder to write shards to")
  if storage.is_remote(data.dir) and not data.dir.startswith(publish.SCHEMES):
    raise ValueError(f"config.data.dir={data.dir} must be a folder, s3:// or gs://")
  vocabulary.check_accents(data.vocab, data.strip_accents)
  if data.dedup not in ("", "exact"):
    raise ValueError(f"config.data.dedup={data.dedup!r} must be exact, or empty to keep duplicates")
  if data.examples not in ("segments", "packed"):
    raise ValueError(f"config.data.examples={data.examples!r} must be segments or packed")
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
    ("parts", 0, 1 << 20),
    ("vocab_size", 8, 1 << 31),
    ("vocab_train_mb", 0.001, 1 << 20),
  ):
    if not low <= data[field] <= high:
      raise ValueError(f"config.data.{field}={data[field]} must be between {low} and {high}")


def _finished(config: ConfigDict, folder: Path | str, count: int | None = None) -> dict | None:
  """Returns the manifest of a finished build, if any. Raises DataError for a different build."""
  if (content := shards.manifest_content(folder)) is None:
    return None
  manifest = shards.parse_manifest(content, f"{folder}/{shards.MANIFEST}")
  wanted = settings(config) | ({"parts": count} if count else {})
  if not wanted["parts"]:
    del wanted["parts"]  # any number
  built = _settings_of(manifest, wanted)
  there, here = _comparable(built), _comparable(wanted)
  differing = [
    f"{name} was {built.get(name)!r}, is {value!r}"
    for name, value in wanted.items()
    if there.get(name) != here.get(name) and built.get(name) != value
  ]
  if config.data.vocab not in vocabulary.KINDS and os.path.isfile(config.data.vocab):
    found = hashlib.sha256(Path(config.data.vocab).read_bytes()).hexdigest()
    if found != manifest["vocab"]["hash"] and there["vocab"] == here["vocab"]:
      differing.append(f"{config.data.vocab} has changed")
  if differing := differing or list(_changed_files(manifest, config.data.sources, folder)):
    raise DataError(
      f"{folder} holds another build ({'; '.join(differing)}): choose another config.data.dir, or "
      + ("delete it" if count else "replace it with --overwrite")
    )
  (publish if storage.is_remote(str(folder)) else shards).check_files(folder, manifest)
  print_line(f"{folder} is built already: {manifest['splits']['train']['examples']:,} examples")
  return manifest


def _comparable(fields: dict) -> dict:
  """Returns the fields that have an effect, with paths normalised."""
  fields = dict(fields)
  of_segments = schema.names(builds=schema.SEGMENTS) if fields["examples"] == "packed" else []
  unused = [name.removeprefix("data.") for name in of_segments]
  if fields["vocab"] not in vocabulary.KINDS:
    fields["vocab"] = os.path.realpath(fields["vocab"])
    unused += ["vocab_size", "vocab_train_mb"]
    unused += [] if fields["vocab"].endswith(".txt") else ["lowercase"]
  fields["sources"] = [
    dataclasses.replace(source, text="", target=os.path.realpath(source.target))
    for source in sources.parse(fields["sources"])
  ]
  return {name: value for name, value in fields.items() if name not in unused}


def _settings_of(manifest: dict, wanted: dict) -> dict:
  """Returns the settings of a finished build, including those implicit in version 0.1."""
  built = plans.EARLIER | manifest["build"]
  if "strip_accents" not in built:
    found = tokenizer.Vocab.from_json(manifest["vocab"]).strip_accents
    asked = wanted["strip_accents"]
    built["strip_accents"] = None if asked is None else found
    if asked is None and found and built["vocab"] in vocabulary.KINDS:
      print_line(
        "note: its vocabulary is from version 0.1 and strips accents; --overwrite to keep accents"
      )
  if wanted["nfc"] is not None:
    built["nfc"] = manifest["vocab"].get("nfc", False)
  return built


def _changed_files(manifest: dict, spec: str, folder: Path | str) -> Iterator[str]:
  """Yields a line for each source whose existing files changed in number, size or tag."""
  tags = {}  # none at a URL or from earlier versions
  with contextlib.suppress(OSError, ValueError):
    tags = json.loads((Path(folder) / parts.FINAL_TAGS).read_bytes())
  for source, built in zip(sources.parse(spec), manifest["sources"], strict=True):
    if source.kind not in sources.READERS:
      continue
    try:
      files = sources.files(source)
    except sources.SourceError:
      continue  # the text may have been deleted after the build
    found = (len(files), sum(file.size for file in files))
    if found != (built["files"], built["file_bytes"]):
      yield (
        f"{source.text} was {built['files']} files of {built['file_bytes']} bytes, "
        f"is now {found[0]} of {found[1]}"
      )
    elif changed := [x for x in files if tags.get(x.url, "") not in ("", source_files.tag_of(x))]:
      yield f"{changed[0].url} has changed"
