"""Parts of a build: the same bytes whoever builds which, nothing done twice, nothing lost."""

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import long_except
from test_build import contents, make_config

from electra_jax.data import build, chunks, duplicates, parts, plan, shards
from electra_jax.data.pretrain_batches import Shards
from electra_jax.data.shards import DataError

FILES = 5


def make_parts(folder: Path, name: str = "shards", count: int = 3, **fields):
  """Returns a configuration whose text is in FILES files, with a folder of its own for shards."""
  config = make_config(folder, **fields)
  text = (folder / "text.txt").read_text().strip().split("\n\n")
  (folder / "many").mkdir(exist_ok=True)
  write_texts(folder, [text[i::FILES] for i in range(FILES)])
  config.data.sources = f"text:{folder}/many/*.txt"
  config.data.parts = count
  config.data.dir = str(folder / name)
  return config


def write_texts(folder: Path, texts: list[list[str]]) -> None:
  """Writes the documents of each of the files that `make_parts` reads."""
  for i, documents in enumerate(texts):
    (folder / "many" / f"{i}.txt").write_text("\n\n".join(documents) + "\n")


def test_a_tfds_dataset_has_the_share_of_an_average_file_in_the_vocabulary(tmp_path):
  config = make_parts(tmp_path)
  for i in range(2):
    (tmp_path / f"{i}.txt").write_bytes(b"x" * 300)
  config.data.sources = f"tfds:x,text:{tmp_path}/0.txt,text:{tmp_path}/1.txt"
  found = plan.make(config, tmp_path / "work", 1)
  assert [found.share(part) for part in range(3)] == pytest.approx([1 / 3] * 3)
  config.data.sources = "tfds:x,tfds:y,tfds:z"
  assert [plan.make(config, tmp_path / "work", 1).share(i) for i in range(3)] == [1 / 3] * 3


def test_no_garbage_is_collected_while_an_engine_builds_a_part(tmp_path, monkeypatch):
  found = []

  def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())

  def engine(work, todo, options):
    for part in todo:
      before = collections()
      work(part)
      found.append(collections() - before)
    assert gc.isenabled()

  monkeypatch.setitem(build.RUNNERS, "mine", engine)
  build.build(make_parts(tmp_path), runner="mine")
  assert len(found) == 3 and max(found) < 3, found


def shard_bytes(config) -> dict[str, bytes]:
  """Returns the files of a build, without the locks."""
  return {k: v for k, v in contents(config.data.dir).items() if not k.startswith(".")}


@pytest.mark.parametrize(
  "fields",
  [
    {"examples": "packed"},
    {"vocab": "wordpiece", "vocab_size": 200, "vocab_train_mb": 0.02},
    {"dedup": "exact"},
  ],
  ids=["packed", "trained vocabulary", "dedup"],
)
def test_parts_in_any_order_make_the_bytes_of_one_local_build(tmp_path, monkeypatch, fields):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 1500)
  config = make_parts(tmp_path, "local", **fields)
  build.build(config)
  wanted = shard_bytes(config)
  config.data.dir = str(tmp_path / "shared")
  for part in (2, 0, 1, 1, 0, 2):
    build.build_part(config, part, 3)
  assert shard_bytes(config) == wanted
  assert not (tmp_path / "shared" / shards.BUILDING).exists()
  assert Shards.open(config.data.dir, verify=True).num_examples > 100


def test_the_number_of_parts_is_in_the_manifest_and_changes_the_bytes(tmp_path):
  one, three = (make_parts(tmp_path, f"d{n}", n) for n in (1, 3))
  manifests = [build.build(config) for config in (one, three)]
  assert [m["build"].get("parts", 1) for m in manifests] == [1, 3]
  assert shard_bytes(one) != shard_bytes(three)
  tokens = [m["splits"]["train"]["tokens"] for m in manifests]
  assert tokens[0] == tokens[1]  # nothing is lost between them
  assert manifests[0]["sources"] == manifests[1]["sources"]
  three.data.parts = 0  # any number
  assert build.build(three) == manifests[1]
  three.data.parts = 2
  with pytest.raises(DataError, match="parts was 3, is 2"):
    build.build(three)


def test_a_build_of_one_part_has_the_manifest_of_earlier_versions(tmp_path):
  """Its digest is part of a run: built again, its shards are those of the run."""
  config = make_parts(tmp_path, count=1)
  built, wanted = build.build(config)["build"], plan.settings(config)
  assert wanted.pop("parts") == 1 and wanted.pop("dedup") == "" and wanted["strip_accents"] is None
  assert list(built.items()) == list(wanted.items())


def test_packed_rows_end_at_the_edge_of_a_part(tmp_path):
  config = make_parts(tmp_path, "together", FILES, examples="packed", holdout_frac=0.0)
  build.build(config)
  together = b"".join(
    (tmp_path / "together" / f).read_bytes() for f in sorted(os.listdir(tmp_path / "together"))
    if f.endswith(".bin")
  )  # fmt: skip
  alone = b""
  for i in range(FILES):
    one = make_parts(tmp_path, f"alone{i}", 1, examples="packed", holdout_frac=0.0)
    one.data.sources = f"text:{tmp_path}/many/{i}.txt"
    build.build(one)
    alone += (tmp_path / f"alone{i}" / "train-00000-of-00001.bin").read_bytes()
  assert together == alone


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_parts
from electra_jax.data import parts
write, calls = parts.PartWriter.finish, 0
def finish(self):
  global calls
  calls += 1
  if calls == 3:
    os.kill(os.getpid(), signal.SIGKILL)
  return write(self)
parts.PartWriter.finish = finish
test_parts.build.build(test_parts.make_parts(Path({folder!r}), count=4))
"""


def test_a_killed_build_goes_on_with_the_parts_that_are_left(tmp_path, monkeypatch, capsys):
  program = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
  ended = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, check=False, timeout=300
  )
  assert ended.returncode == -signal.SIGKILL, ended.stderr
  read = []
  texts = plan.PartReader.texts
  monkeypatch.setattr(
    plan.PartReader, "texts", lambda self, *a: read.append(list(self.stats)) or texts(self, *a)
  )
  config = make_parts(tmp_path, count=4)
  build.build(config)
  assert len(read) == 2 and "2 of 4 parts are built already" in capsys.readouterr().out
  again = shard_bytes(config)
  config.data.dir = str(tmp_path / "whole")
  build.build(config)
  assert again == shard_bytes(config)


def test_two_processes_on_one_part_are_one(tmp_path):
  config = make_parts(tmp_path, "alone", 2, vocab="wordpiece", vocab_size=200)
  build.build(config)
  fields = {k: v for k, v in plan.settings(config).items() if k != "seed" and v is not None}
  flags = [f"--config.data.{k}={v}" for k, v in fields.items()]
  flags += [f"--config.data.dir={tmp_path}/shared", "--config.data.workers=1"]
  for _ in range(2):
    asked = [
      [sys.executable, "-m", "electra_jax.data.build", "--config=configs/base.py", *flags, part]
      for part in ("--part=0/2", "--part=0/2", "--part=1/2")
    ]
    running = [subprocess.Popen(x, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for x in asked]
    for process in running:
      out, err = process.communicate(timeout=300)
      assert process.returncode == 0, (out, err)
  wanted = shard_bytes(config)
  config.data.dir = f"{tmp_path}/shared"
  assert shard_bytes(config) == wanted


def test_a_process_that_comes_too_late_finds_the_build_done(tmp_path, monkeypatch, capsys):
  config = make_parts(tmp_path, count=1)
  write = parts.PartWriter.finish

  def overtaken(self):
    monkeypatch.setattr(parts.PartWriter, "finish", write)
    build.build_part(config, 0, 1)
    return write(self)

  monkeypatch.setattr(parts.PartWriter, "finish", overtaken)
  build.build_part(config, 0, 1)
  assert "other processes have built and joined all parts" in capsys.readouterr().out
  assert Shards.open(config.data.dir, verify=True).num_examples > 100
  assert not (tmp_path / "shards" / shards.BUILDING).exists()


def overtake(monkeypatch, module, name: str, at: int, other) -> list:
  """Calls `other`, as another process would, before call `at` of a function; returns the calls."""
  calls, function = [], getattr(module, name)

  def overtaken(*args, **kwargs):
    calls.append(args)
    if len(calls) == at + 1:
      with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        other()
    return function(*args, **kwargs)

  monkeypatch.setattr(module, name, overtaken)
  return calls


def test_processes_that_open_a_build_at_once_without_locks_share_it(tmp_path, monkeypatch):
  config = make_parts(tmp_path)
  work = Path(config.data.dir) / shards.BUILDING
  made = plan.make(config, work, 1)
  overtake(monkeypatch, os, "replace", 0, lambda: parts.open_work(work, made, shared=True))
  parts.open_work(work, made, shared=True)
  parts.check_plan(work, made)


@pytest.mark.parametrize(
  "module, name, at",
  [(os, "link", 1), (shards, "publish", 0), (os, "replace", 2), (os, "replace", 5)],
  ids=["linking", "linked", "naming", "manifest"],
)
def test_processes_that_join_at_once_without_locks_leave_whole_shards(
  tmp_path, monkeypatch, module, name, at
):
  config = make_parts(tmp_path, "wanted", count=2)
  build.build(config)
  wanted = shard_bytes(config)
  folder = tmp_path / "shards"
  config.data.dir, work = str(folder), folder / shards.BUILDING
  made = plan.make(config, work, 1)
  parts.open_work(work, made)
  parts.write_vocabulary(work, made)
  parts.write_parts(work, made, [0, 1], 1)
  calls = overtake(monkeypatch, module, name, at, lambda: parts.join(work, made, folder))
  with contextlib.suppress(OSError, DataError):
    parts.join(work, made, folder)
  assert len(calls) > at and shard_bytes(config) == wanted and not work.exists()
  assert Shards.open(folder, verify=True).num_examples > 100


def test_a_build_that_others_join_while_a_process_opens_it_stays_joined(tmp_path, monkeypatch):
  config = make_parts(tmp_path, count=2)
  locked = shards.locked

  def overtaken(*args, **kwargs):
    monkeypatch.setattr(shards, "locked", locked)
    for part in (0, 1, 0, 1):
      build.build_part(config, part, 2)
    return locked(*args, **kwargs)

  monkeypatch.setattr(shards, "locked", overtaken)
  build.build_part(config, 0, 2)
  assert not (tmp_path / "shards" / shards.BUILDING).exists()
  assert Shards.open(config.data.dir, verify=True).num_examples > 100


@pytest.mark.parametrize(
  "fields, asked, message",
  [
    ({"parts": 2}, (0, 3), "--part=0/3 differs from config.data.parts=2"),
    ({"parts": 0}, (3, 3), "--part=3/3: part must be between 0 and 2"),
    ({"parts": 0}, (0, 9), "9 parts need at least 9 files, but there are 5"),
    ({"parts": 3, "dedup": "fuzzy"}, (0, 3), "dedup='fuzzy' must be exact"),
  ],
)
def test_parts_that_cannot_be_are_refused(tmp_path, fields, asked, message):
  config = make_parts(tmp_path)
  config.data.update(fields)
  with pytest.raises(ValueError, match=message):
    build.build_part(config, *asked)


def test_a_message_of_an_engine_is_no_finished_part(tmp_path):
  config = make_parts(tmp_path)
  build.build_part(config, 0, 3)
  work = Path(config.data.dir) / shards.BUILDING
  (work / "part-00001.error").write_text("no space")
  assert parts.count_left(work, plan.make(config, work, 1), parts.PART) == 2


def test_parts_share_one_sample_for_the_vocabulary(tmp_path):
  config = make_parts(tmp_path, vocab="wordpiece", vocab_size=200, vocab_train_mb=0.03)
  work = Path(config.data.dir) / shards.BUILDING
  made = plan.make(config, work, 1)
  parts.open_work(work, made)
  parts.do_stage(parts.SAMPLE, work, made, range(3))
  texts = [json.loads((work / f"sample-0000{i}" / parts.TEXTS).read_text()) for i in range(3)]
  sizes = [sum(len(text.encode()) for _, text in found) for found in texts]
  shares = [made.share(part) for part in range(3)]
  assert sum(shares) == pytest.approx(1)
  for size, share in zip(sizes, shares, strict=True):
    assert 0.9 * 30_000 * share < size <= 30_000 * share


def test_cuts_are_ranges_of_about_equal_size_and_none_is_empty():
  rng = random.Random(0)
  for _ in range(200):
    sizes = [rng.choice((0, 1, 10, 1000)) for _ in range(rng.randint(1, 30))]
    count = rng.randint(1, len(sizes))
    bounds = plan.cuts(sizes, count)
    assert len(bounds) == count + 1 and bounds[0] == 0 and bounds[-1] == len(sizes)
    assert all(a < b for a, b in zip(bounds, bounds[1:], strict=False))
  assert plan.cuts([10] * 12, 4) == [0, 3, 6, 9, 12]


def test_undecodable_documents_are_counted_over_all_parts(tmp_path):
  config = make_parts(tmp_path, count=FILES, max_bad_frac=0.1)
  (tmp_path / "many" / "0.txt").write_bytes(b"good text here\n\n" * 3 + b"\xff\xff")  # a quarter
  assert build.build(config)["sources"][0]["undecodable"] == 1
  config = make_parts(tmp_path, "strict", FILES, max_bad_frac=0.001)
  (tmp_path / "many" / "0.txt").write_bytes(b"good text here\n\n" * 3 + b"\xff\xff")
  with pytest.raises(ValueError, match="1 of .* documents are null or undecodable"):
    build.build(config)


@pytest.mark.parametrize("count", long_except(1, of=[1, 3, FILES]))
def test_duplicates_are_left_out_the_same_ones_whatever_the_parts(tmp_path, count):
  config = make_parts(tmp_path, f"d{count}", count, examples="packed", holdout_frac=0.0)
  config.data.dedup = "exact"
  long = "the quick brown fox jumps over the lazy dog " * 30_000  # two chunks of text
  texts = [["one two", "three  four", long], ["ONE two", "five six"], ["Three four", "one two"]]
  texts += [[long.replace("dog", "cat"), "five  six"], [f"{long}end", long, "seven"]]
  write_texts(tmp_path, texts)
  kept = [["one two", "three  four", long], ["five six"], [], [long.replace("dog", "cat")]]
  kept += [[f"{long}end", "seven"]]
  found = build.build(config)
  wanted = make_parts(tmp_path, "wanted", 1, examples="packed", holdout_frac=0.0)
  write_texts(tmp_path, kept)
  expected = build.build(wanted)
  for key in ("tokens", "frequencies"):
    assert found["splits"]["train"][key] == expected["splits"]["train"][key]


@pytest.mark.parametrize("weight", [0.5, 1.5, 2])
def test_duplicates_of_a_weighted_source_are_left_out_of_what_is_kept(tmp_path, weight):
  config = make_parts(tmp_path, count=1, dedup="exact", holdout_frac=0.0, examples="packed")
  words = [f"w{i % 40} x{i % 40}" for i in range(120)]  # each document three times
  (tmp_path / "a.txt").write_text("\n\n".join(words) + "\n")
  config.data.sources = f"text:{tmp_path}/a.txt@{weight}"
  found = build.build(config)["splits"]["train"]
  (tmp_path / "a.txt").write_text("\n\n".join(words[:40]) + "\n")
  config.data.dir, config.data.dedup = str(tmp_path / "b"), ""
  assert build.build(config)["splits"]["train"]["frequencies"] == found["frequencies"]


def test_a_vocabulary_is_trained_on_what_is_no_duplicate(tmp_path):
  fields = {"vocab": "wordpiece", "vocab_size": 60, "holdout_frac": 0.0, "dedup": "exact"}
  config = make_parts(tmp_path, **fields)
  first = ["quick quack", "lorem lark", "vivid vole"]
  copies = [[*first, "quick quack"], ["Vivid  vole"] * 9 + ["zebra"], ["quick quack"] * 50]
  copies += [["lorem lark", "jolly jay"], ["zebra"] * 20]
  kept = [first, ["zebra"], [], ["jolly jay"], []]
  found = []
  for name, texts in (("shards", copies), ("kept", kept)):
    write_texts(tmp_path, texts)
    config.data.dir = str(tmp_path / name)
    build.build(config)
    found.append((tmp_path / name / "vocab.txt").read_text())
  assert found[0] == found[1]


def test_repeated_digests_are_those_seen_before():
  rng = np.random.default_rng(0)
  values = rng.integers(0, 50, 400)
  digests = np.array([bytes([v]) * 16 for v in values], duplicates.DTYPE)
  seen, wanted = set(), []
  for value in values:
    wanted.append(value in seen)
    seen.add(value)
  np.testing.assert_array_equal(duplicates.repeated(digests), wanted)
