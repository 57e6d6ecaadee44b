"""A finished build is used again if it is the one that is asked for, and else left alone."""

import json
from pathlib import Path

import pytest
from test_build import contents, make_config

from electra_jax.data import build, shards
from electra_jax.data.pretrain_batches import Shards
from electra_jax.data.shards import DataError


def test_a_finished_build_is_reused_and_a_different_one_is_left_alone(tmp_path, capsys):
  config = make_config(tmp_path)
  manifest = build.build(config)
  before = contents(config.data.dir)
  config.data.workers = 3
  assert build.build(config) == manifest and "built already" in capsys.readouterr().out
  config.data.seq_length = 32
  with pytest.raises(DataError, match="seq_length was 16, is 32.*--overwrite"):
    build.build(config)
  assert contents(config.data.dir) == before
  assert build.build(config, overwrite=True)["seq_length"] == 32


def test_a_finished_build_is_reused_whatever_the_spelling_and_fields_of_no_effect(
  tmp_path, monkeypatch
):
  config = make_config(tmp_path)
  manifest = build.build(config)
  monkeypatch.chdir(tmp_path)
  config.data.update(vocab="./vocab.txt", vocab_size=99, vocab_train_mb=1.0)
  for spelling in ("text.txt", f"{tmp_path}//text.txt@1", "../" + tmp_path.name + "/text.txt"):
    config.data.sources = f"text:{spelling}"
    assert build.build(config) == manifest
  config.data.sources = "text:text.txt@2"
  with pytest.raises(DataError, match="holds another build .sources was"):
    build.build(config)


def test_text_that_was_rewritten_at_equal_length_is_noticed(tmp_path):
  config = make_config(tmp_path)
  manifest, text = build.build(config), tmp_path / "text.txt"
  before = text.read_bytes()
  text.write_bytes(before.swapcase())
  with pytest.raises(DataError, match=f"holds another build .{text} has changed.: choose"):
    build.build(config)
  text.write_bytes(before)  # a copy, of another time
  assert build.build(config) == manifest
  text.write_bytes(before.swapcase())
  (Path(config.data.dir) / ".tags.json").unlink()  # as of an earlier version
  assert build.build(config) == manifest


def test_a_packed_build_is_reused_whatever_is_set_for_segments(tmp_path):
  config = make_config(tmp_path)
  config.data.examples = "packed"
  manifest = build.build(config)
  config.data.update(short_prob=0.5, boundary_prob=0.5, split_lines=not config.data.split_lines)
  assert build.build(config) == manifest
  config.data.examples = "segments"
  with pytest.raises(DataError, match="holds another build .examples was 'packed'"):
    build.build(config)


def test_fields_that_are_the_same_are_not_named_as_differences(tmp_path):
  config = make_config(tmp_path)
  build.build(config)
  config.data.vocab = "wordpiece"  # now vocab_size and vocab_train_mb have an effect
  with pytest.raises(DataError, match=r"build \(vocab was '.*vocab.txt', [^;]*\): choose"):
    build.build(config)


@pytest.mark.parametrize("vocab", ["wordpiece", None])
def test_a_build_of_version_0_1_is_reused_and_its_accents_are_known(tmp_path, capsys, vocab):
  fields = {"vocab": vocab, "vocab_size": 200} if vocab else {}
  config = make_config(tmp_path, strip_accents=True, **fields)
  build.build(config)
  path = Path(config.data.dir) / shards.MANIFEST
  manifest = json.loads(path.read_text())
  del manifest["build"]["strip_accents"], manifest["vocab"]["strip_accents"]
  path.write_text(json.dumps(manifest))
  assert Shards.open(config.data.dir).vocab.strip_accents is True
  for asked in (None, True):
    config.data.strip_accents = asked
    assert build.build(config) == manifest
  assert ("note: its vocabulary is from version 0.1" in capsys.readouterr().out) == bool(vocab)
  config.data.strip_accents = False
  with pytest.raises(DataError, match="strip_accents was True, is False"):
    build.build(config)


@pytest.mark.parametrize("changed", ["text.txt", "vocab.txt"])
def test_a_build_of_files_that_have_changed_is_not_reused(tmp_path, changed):
  config = make_config(tmp_path)
  build.build(config)
  with open(tmp_path / changed, "a", encoding="utf-8") as file:
    file.write("x\n")
  with pytest.raises(DataError, match=changed):
    build.build(config)
  (tmp_path / changed).unlink()  # shards may outlive what they were made of
  build.build(config)


def test_another_vocabulary_is_not_one_that_has_changed(tmp_path):
  config = make_config(tmp_path)
  build.build(config)
  config.data.vocab = str(tmp_path / "other.txt")
  (tmp_path / "other.txt").write_text((tmp_path / "vocab.txt").read_text("utf-8") + "x\n", "utf-8")
  with pytest.raises(DataError, match=r"build .vocab was '.*vocab.txt', is '.*other.txt'.: choose"):
    build.build(config)
