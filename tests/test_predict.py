"""A fine-tuned network's task: what it is asked with, checked before anything is computed."""

import dataclasses
import json

import pytest

from electra_jax.commands import cli
from electra_jax.core import task_network
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.finetune import model
from electra_jax.finetune.task_data import TaskInfo

CFG = TransformerConfig(60, 8, 16, 2, 2, 32, 32)


def test_task_info_survives_json():
  head = task_network.HeadSpec("tagging", {"outputs": 3})
  info = TaskInfo("tagging", "x", head, 16, ("B-A", "I-A", "O"))
  content = json.loads(json.dumps(dataclasses.asdict(info)))
  assert TaskInfo.from_json(content) == info


@pytest.mark.parametrize(
  ("kind", "items", "why"),
  [
    ("tagging", "He left", "x expects sequences of words, got 'He left'"),
    ("tagging", ["He left"], "x expects sequences of words, got 'He left'"),
    ("tagging", iter(["He left"]), "x expects sequences of words, got 'He left'"),
    ("tagging", 5, "give a list of items, got 5"),
    ("qa", "who?", r"x expects pairs of a question and a context, got 'who\?'"),
    ("qa", ("who?", "He left."), r"x expects pairs of a question and a context, got 'who\?'"),
  ],
)
def test_a_text_is_never_read_as_its_characters(kind, items, why):
  info = TaskInfo(kind, "x", task_network.HeadSpec(kind, {}), 16)
  with pytest.raises(ValueError, match=why):
    model.Model(info, CFG, None, {})(items)


def test_sentences_without_words_have_no_tags(words):
  options = task_network.HeadSpec("tagging", {"outputs": 2, "layers": "linear"})
  info = TaskInfo("tagging", "x", options, 16, ("A", "B"))
  assert model.Model(info, CFG, words, {})([[], ()]) == [{"tags": []}, {"tags": []}]


@pytest.mark.parametrize("kind", ["tagging", "qa"])
def test_only_predictions_of_texts_carry_columns(tmp_path, kind):
  info = TaskInfo(kind, "x", task_network.HeadSpec(kind, {}), 16)
  with pytest.raises(ValueError, match="--columns is for text tasks"):
    model.Model(info, CFG, None, {}).predict_file(tmp_path / "a", tmp_path / "b", columns=("id",))


@pytest.mark.parametrize("out", ["here.tsv", "nowhere/new.tsv", "here.tsv/new.tsv"])
def test_a_place_for_predictions_is_checked_before_the_network_is_loaded(
  tmp_path, monkeypatch, capsys, out
):
  (tmp_path / "here.tsv").write_text("mine")
  monkeypatch.setattr(model, "load", lambda path: pytest.fail("loaded"))
  args = ["--predict", "in.tsv", "--model", "runs", "--out", str(tmp_path / out)]
  with pytest.raises((ValueError, OSError), match=f"{tmp_path / out}"):
    cli.call("finetune", args)
  assert [p.name for p in tmp_path.iterdir()] == ["here.tsv"]
