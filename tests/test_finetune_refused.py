"""What fine-tuning refuses, in one line, before it makes anything."""

import json

import jax
import numpy as np
import pytest
from conftest import no_warnings
from test_finetune import CFG, both, make_config, refused, source, squad_file  # noqa: F401

from electra_jax.config import files
from electra_jax.finetune import from_config, prepare
from electra_jax.interop import huggingface
from electra_jax.interop.weights import network_shapes


@pytest.mark.parametrize(
  ("field", "value", "why"),
  [
    ("task", "colla", "the tasks of kind=text are cola"),
    ("task", "", "the tasks of kind=text are"),
    ("seeds", 0, "config.seeds must be above 0, got 0"),
    ("keep", "some", "config.keep must be one of best, all, none"),
    ("model.head", "three", "model.head must be one of auto, linear, two_layers, modernbert"),
    ("optimizer.warmup_frac", 1.0, "at least 0 and below 1"),
    ("train.batch_size", 12, "12 is not divisible by 8 devices"),
    ("data.dir", None, "config.data.dir is not set"),
    ("data.dir", "nowhere", "nowhere is not a folder"),
    ("data.max_length", 4, "at least 8, got 4"),
    ("data.train_examples", 0, "config.data.train_examples must be above 0, got 0"),
    ("init", None, "config.init is not set"),
    ("init", "random", "config.init=random needs config.like"),
    ("init", "nowhere", "nowhere does not exist"),
    ("like", "x", "config.like needs config.init=random"),
  ],
)
def test_a_wrong_field_is_refused_before_anything_is_made(source, tmp_path, field, value, why):  # noqa: F811
  config = make_config("glue", "cola", source, data__dir=str(tmp_path))
  config.update_from_flattened_dict({field: value})
  refused(config, tmp_path / "results", why)
  assert not list((tmp_path / "results").glob("*/*"))


@pytest.mark.parametrize("name", ["data/reviews", "../x", ".hidden"])
def test_a_task_whose_results_would_not_be_found_again_is_refused(name):
  with pytest.raises(ValueError, match="config.task must be a valid folder name"):
    prepare.task_names(files.load("finetune/own.py", name))


def test_an_unknown_task_is_refused_with_the_names_of_its_kind(monkeypatch):
  mine = prepare.TASK_KINDS["text"]._replace(known_names=lambda config: ("parsing", "chunks"))
  monkeypatch.setitem(prepare.TASK_KINDS, "mine", mine)
  config = files.load("finetune/glue.py", "parse")
  config.kind = "mine"
  with pytest.raises(ValueError, match="'parse': the tasks of kind=mine are parsing, chunks;"):
    prepare.task_names(config)


def test_another_vocabulary_than_the_models_is_refused(source, tmp_path):  # noqa: F811
  pieces = (source / "vocab.txt").read_text().splitlines()
  config = make_config("glue", "cola", source, data__vocab=str(tmp_path / "vocab.txt"))
  (tmp_path / "vocab.txt").write_text("\n".join([*pieces[:-1], "other"]) + "\n")
  told = "is not the vocabulary of .*: entry 59 is 'other', not 'y'"
  refused(config, tmp_path / "results", told)
  # Its own again: what the source says of upper case stays.
  (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
  config.data.lowercase = False
  assert from_config.load_pretrained(config).tokenizer.vocab.lowercase


def test_a_masked_language_model_alone_is_fine_tuned_with_a_warning(source, tmp_path):  # noqa: F811
  weights = jax.tree.map(lambda x: np.ones(x.shape, np.float32), network_shapes(CFG, "mlm_head"))
  (tmp_path / "mlm").mkdir()
  huggingface.save(tmp_path / "mlm", CFG, weights, "mlm_head", 0)
  vocab = str(source / "vocab.txt")
  config = make_config("glue", "cola", tmp_path / "mlm", data__vocab=vocab)
  with pytest.warns(UserWarning, match="mlm has no discriminator: fine-tuning its masked language"):
    found = from_config.load_pretrained(config)
  jax.tree.map(np.testing.assert_array_equal, found.weights["encoder"], weights["encoder"])
  assert found.weights.keys() == {"embeddings", "encoder"}


@pytest.mark.parametrize(("joint", "head"), [(True, "modernbert"), (False, "two_layers")])
def test_layers_that_questions_do_not_have_are_refused(source, tmp_path, joint, head):  # noqa: F811
  squad_file(tmp_path / "questions.json", 8)
  files = {f"data__{split}": str(tmp_path / "questions.json") for split in ("train", "dev")}
  fields = {"model__head": head, "qa__joint": joint, "qa__max_query": 8}
  config = make_config("squad", None, source, **fields, **files)
  refused(config, tmp_path / "results", f"for questions with qa.joint={joint}, got '{head}'")


@pytest.mark.parametrize("kind", ["tagging", "squad"])
def test_a_dev_file_without_labels_or_without_anything_is_refused(source, tmp_path, kind):  # noqa: F811
  squad_file(tmp_path / "train.json", 8)
  (tmp_path / "train.txt").write_text("w2 B-A\nw3 O\n")
  ending = {"tagging": "txt", "squad": "json"}[kind]
  config = make_config(kind, None, source, qa__max_query=8, **both(tmp_path, ending))
  (tmp_path / "dev.txt").write_text("w2\n")
  paragraphs = [{"context": "w1 w2", "qas": [{"id": "1", "question": "w0 ?"}]}]
  (tmp_path / "dev.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
  refused(config, tmp_path / "results", f"config.data.dev=.*dev.{ending} has no labels")
  (tmp_path / f"dev.{ending}").write_text("\n")
  refused(config, tmp_path / "results", f"dev.{ending}: the file (is empty|has no sentences)")


def test_a_folder_that_is_no_result_is_left_alone(source, tmp_path):  # noqa: F811
  (tmp_path / "results" / "cola").mkdir(parents=True)
  (tmp_path / "results" / "cola" / "mine.txt").write_text("mine")
  config = make_config("glue", "cola", source, data__dir=str(tmp_path))
  refused(config, tmp_path / "results", "has no readable results")
  assert (tmp_path / "results" / "cola" / "mine.txt").read_text() == "mine"


def test_overrides_of_another_kind_of_task_are_a_warning():
  config = files.load("finetune/glue.py", "mrpc")
  with no_warnings():
    prepare.warn_of_unread_overrides(config, ["data.dir", "data.train_examples", "own.text"])
  with pytest.warns(UserWarning, match="kind=text does not read qa.stride, pairs.pooling$"):
    prepare.warn_of_unread_overrides(config, ["qa.stride", "data.dir", "pairs.pooling"])
  config.kind = "qa"
  fields = ["qa.stride", "data.dir", "data.train", "own.split", "own.text"]
  with pytest.warns(UserWarning, match="kind=qa does not read data.dir, own.text$"):
    prepare.warn_of_unread_overrides(config, fields)
