"""Pieces of an unfinished build that are damaged or of another build are named; nothing is lost."""

import json
import os
import shutil
from pathlib import Path

import pytest
from test_parts import make_parts

from electra_jax.data import build, parts, plan, shards, source_files
from electra_jax.data.pretrain_batches import Shards
from electra_jax.data.shards import DataError

TRAINED = {"vocab": "wordpiece", "vocab_size": 200, "vocab_train_mb": 0.02, "dedup": "exact"}


def cut(path: Path) -> None:
  path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
  """Changes a byte; a zip archive has a checksum of its files, and JSON has no such byte."""
  whole = bytearray(path.read_bytes())
  whole[len(whole) // 2] ^= 255
  path.write_bytes(whole)


DAMAGES = (cut, flip, Path.unlink)


def build_parts(config, *numbers: int) -> Path:
  """Builds parts of three; returns the folder of the unfinished build."""
  for part in numbers:
    build.build_part(config, part, 3)
  return Path(config.data.dir) / shards.BUILDING


@pytest.mark.parametrize(
  "name, damage",
  [
    ("train-00000", cut),
    *((parts.FREQUENCIES, x) for x in DAMAGES),
    (parts.DONE, Path.unlink),
    (parts.DONE, cut),
    ("another plan", None),
  ],
)
def test_a_part_that_is_wrong_is_named_and_nothing_is_lost(tmp_path, name, damage):
  config = make_parts(tmp_path)
  folder = build_parts(config, 0, 1) / "part-00001"
  if damage:
    damage(next(folder.glob(f"{name}*")))
  else:
    mark = folder / parts.DONE
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"plan": "0" * 64}))
  reason = "is damaged" if damage else "belongs to another build"
  with pytest.raises(DataError, match=f"part-00001 {reason}: delete it") as error:
    build.build_part(config, 2, 3)
  assert "\n" not in str(error.value) and not (folder.parent.parent / shards.MANIFEST).exists()
  shutil.rmtree(folder)
  build.build(config)
  assert Shards.open(config.data.dir, verify=True).num_examples > 100


def test_a_part_that_is_missing_is_named(tmp_path):
  config = make_parts(tmp_path)
  work = build_parts(config, 0, 1)
  with pytest.raises(DataError, match="part-00002 is missing"):
    parts.join(work, plan.make(config, work, 1), Path(config.data.dir))


@pytest.mark.parametrize(
  "name, damage",
  [
    *((f"sample-00001/{name}", x) for name in (parts.TEXTS, parts.DIGESTS) for x in DAMAGES),
    (f"{parts.VOCABULARY}/vocab.txt", cut),
  ],
)
def test_a_sample_or_a_vocabulary_that_is_damaged_is_named(tmp_path, name, damage):
  config, of_samples = make_parts(tmp_path, **TRAINED), name.startswith("sample")
  path = build_parts(config, *((0, 1) if of_samples else (0, 1, 2, 0))) / name
  damage(path)
  with pytest.raises(DataError, match=f"{path.parent.name} is damaged: delete it"):
    build.build(config) if of_samples else build.build_part(config, 1, 3)
  shutil.rmtree(path.parent)
  assert build.build(config)["splits"]["train"]["examples"] > 100


def test_finished_parts_of_another_build_are_not_deleted(tmp_path, monkeypatch):
  config = make_parts(tmp_path)
  build.build_part(config, 0, 3)
  config.data.short_prob = 1.0
  for go_on in (build.build, lambda config: build.build_part(config, 1, 3)):
    with pytest.raises(DataError, match=r"parts of another build \(short_prob differ\)"):
      go_on(config)
  config.data.short_prob = 0.05
  (tmp_path / "many" / "0.txt").write_text("new text\n")
  with pytest.raises(DataError, match=r"parts of another build \(input files differ\)"):
    build.build_part(config, 1, 3)
  found = plan.versions() | {"numpy": "0"}
  monkeypatch.setattr(plan, "versions", lambda: found)
  with pytest.raises(DataError, match=r"\(input files, versions of numpy differ\)"):
    build.build_part(config, 1, 3)
  assert build.build(config, overwrite=True)["splits"]["train"]["examples"] > 100


def test_samples_of_another_configuration_are_not_deleted(tmp_path):
  config = make_parts(tmp_path, **TRAINED)
  work = build_parts(config, 0, 1)
  config.data.parts = 1
  with pytest.raises(DataError, match=r"parts of another build \(parts differ\)"):
    build.build(config)
  assert len(list(work.glob(f"{parts.SAMPLE}-*"))) == 2
  shutil.rmtree(work / "sample-00001")  # one alone is soon read again
  assert build.build(config)["splits"]["train"]["examples"] > 100


def test_another_number_of_parts_of_a_finished_build_is_refused(tmp_path):
  config = make_parts(tmp_path)
  build.build(config)
  config.data.parts = 0
  build.build_part(config, 0, 3)
  with pytest.raises(DataError, match="parts was 3, is 4.*or delete it"):
    build.build_part(config, 0, 4)


def rewrite(path: Path) -> None:
  """Replaces a file by another text of the same length."""
  path.write_text(path.read_text("utf-8").translate({ord("a"): "b", ord("b"): "a"}), "utf-8")


def test_a_file_rewritten_at_equal_length_is_not_mixed_into_a_build(tmp_path):
  config = make_parts(tmp_path)
  build.build_part(config, 0, 3)
  rewrite(tmp_path / "many" / "4.txt")
  with pytest.raises(ValueError, match=r"many/4.txt: cannot be read \(it has changed since"):
    build.build_part(config, 2, 3)
  config.data.parts = 3
  with pytest.raises(DataError, match=r"parts of another build \(.*many/4.txt has changed\)"):
    build.build(config)
  rewrite(tmp_path / "many" / "4.txt")
  assert build.build(config)["splits"]["train"]["examples"] > 100


def test_a_build_goes_on_with_a_copy_of_its_text_and_without_tags(tmp_path):
  config = make_parts(tmp_path, count=3)
  build.build_part(config, 0, 3)
  work = Path(config.data.dir) / shards.BUILDING
  done = (work / "part-00000" / parts.DONE).stat().st_ino
  for path in (tmp_path / "many").iterdir():
    os.utime(path, (1, 1))
  build.build_part(config, 1, 3)
  (work / plan.TAGS).unlink()  # as of a build that an earlier version began
  made = plan.make(config, work, 1)
  assert (work / "part-00000" / parts.DONE).stat().st_ino == done
  assert parts.missing(work, made, parts.PART, range(3)) == [2]
  assert build.build(config)["splits"]["train"]["examples"] > 100


def test_the_ends_and_the_middle_of_a_large_file_tell_its_versions_apart(tmp_path):
  path, size = tmp_path / "large", 3 * source_files.WHOLE_BYTES
  found = set()
  for at in (None, 0, size // 2, size - 1):
    data = bytearray(size)
    if at is not None:
      data[at] = 1
    path.write_bytes(data)
    with path.open("rb") as file:
      found.add(source_files.tag(file))
  assert len(found) == 4
