"""Fine-tuning prints examples, lost characters and duplicates; prediction warns of lost text."""

import warnings

import numpy as np
import pytest
from test_finetune import CFG, make_config
from test_misread import ROW, json_rows, own, put

from electra_jax.commands import cli
from electra_jax.core import task_network
from electra_jax.finetune import model, overview, prepare, results, tagging_task, text_task
from electra_jax.finetune.task_data import Seen, TaskInfo

# What is shown.


def notes_of(words, tmp_path, kind: str, train: str, dev: str, end: str, **fields) -> list[str]:
  paths = {f"data__{k}": str(put(tmp_path, f"{k}.{end}", x))
           for k, x in (("train", train), ("dev", dev))}  # fmt: skip
  config = make_config(kind, "x", "nowhere", qa__max_query=8, **paths, **fields)
  return prepare.prepare(config, "x", words, CFG).notes


def test_lost_characters_are_counted_by_hand(words):
  info = TaskInfo("text", "x", task_network.HeadSpec("classification", {}), 8, text=own())
  seen = [Seen(("a ΩΩΩ b",), "x"), Seen(("a b c a b c a",), "y")]  # room for 6 tokens
  found = overview.lost(text_task.KIND, info, seen, words)
  assert found == pytest.approx((100 * 3 / 12, 100 * 1 / 12))
  tags = TaskInfo("tagging", "x", task_network.HeadSpec("tagging", {}), 4)
  seen = [Seen(("abc", "Ω"), tags=("O", "B-X"))]  # two tokens a word
  assert overview.lost(tagging_task.KIND, tags, seen, words) == pytest.approx((25, 25))
  accents = [Seen(("e\u0301", "\u200b"))]  # a mark and a format character are not text
  assert overview.lost(text_task.KIND, info, accents, words).unknown == 0


def test_the_notes_show_what_the_network_sees(words, tmp_path):
  train, dev = "text\tlabel\nThe Ω cafe\tx\nabc\ty\n", "text\tlabel\nabc\tx\nthe cafe\tx\n"
  notes = notes_of(words, tmp_path, "own", train, dev, "tsv")
  assert (
    "dev: 2 rows of 4.5 tokens, at most 5; no text lost; 1 also in train, 1 with another label"
    in notes
  )
  assert "train: 9.1 % of the characters are unknown: choose a network of this language" in notes
  assert notes[-2:] == ["example (x): the [UNK:Ω] cafe", "example (y): abc"]
  long = "text\tlabel\n" + " ".join("abc" * 9) + "\tx\n" + "the " * 99 + "\ty\n"
  notes = notes_of(words, tmp_path, "own", long, dev, "tsv", data__max_length=16)
  # 14 tokens fit: of 27 letters 13 are cut, of 297 in 99 words 255.
  assert "train: 83 % of the characters are cut: raise data.max_length" in notes
  assert all(len(f"x: {note}") <= 80 for note in notes if note.startswith("example"))
  assert notes[-2].endswith("b c a b [cut]") and notes[-1].endswith("the the [cut]")


def test_every_kind_of_task_is_shown(words, tmp_path):
  tags = "the O\ncafe B-X\n\nabc I-X\n"
  notes = notes_of(words, tmp_path, "tagging", tags, tags, "txt")
  assert notes[-2:] == ["example: the/O cafe/B-X", "example: abc/I-X"]
  assert "train: tags are BIO with 2 entities: X 2" in notes
  assert any(note.endswith("2 also in train") for note in notes)
  notes = notes_of(words, tmp_path, "squad", json_rows(ROW), json_rows(ROW), "jsonl")
  assert notes[-1] == "example (river): what? [SEP] the river"
  assert "dev: SQuAD 1.1, 1 questions on 1 contexts, 0 impossible" in notes
  table = "a,b,score\nthe,cafe,0.5\nabc,the,1\n"
  columns = {"pairs__train_columns": "a,b"}
  notes = notes_of(words, tmp_path, "pairs", table, table, "csv", **columns)
  assert notes[-2:] == ["example: the [SEP] cafe", "example: abc [SEP] the"]


def test_numbers_are_shown_with_the_error_of_their_mean(words, tmp_path):
  table = "text\tlabel\nthe\t1950\nabc\t2000\n"
  notes = notes_of(words, tmp_path, "own", table, table, "tsv", own__kind="regression")
  assert "train: 2 examples, labels 1950 to 2000; mean 1975 has RMSE 25" in notes


def test_a_dev_split_without_labels_names_the_file_it_is_from(words, tmp_path):
  rows = [{"context": f"the {x}", "question": "abc"} for x in "abcdefgh"]
  rows = [x | ({"answers": ROW["answers"]} if i % 2 else {}) for i, x in enumerate(rows)]
  path = put(tmp_path, "all.jsonl", json_rows(*rows))
  where = {"data__train": str(path), "own__split": 0.5, "qa__max_query": 8}
  config = make_config("squad", "x", "nowhere", **where)
  with pytest.raises(ValueError, match="all.jsonl.* (unlabelled|no labels|no answer)") as error:
    prepare.prepare(config, "x", words, CFG)
  assert "None" not in str(error.value)


# Predictions.


def tagger(words):
  """A network that tags every word O."""
  options = {"word_column": 0, "tag_column": -1}
  head = task_network.HeadSpec("tagging", {"outputs": 2, "layers": "linear"})
  info = TaskInfo("tagging", "x", head, 8, ("O", "S-X"), options=options)
  asked = model.Model(info, CFG, words, {})
  asked.__dict__["_outputs"] = lambda weights, features: [  # in the place of a compiled program
    {"logits": [np.tile([1.0, 0.0], (len(row.ids), 1)) for row in features]}
  ]
  return asked


def test_lines_are_tagged_as_lines(words, tmp_path):
  asked = tagger(words)
  path = put(tmp_path, "new.txt", "the cafe\nthe abcabcab Ω\n")
  with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert asked.predict_file(path, tmp_path / "out.txt") == 2
  assert [str(x.message).removeprefix(f"{path} ") for x in told] == [
    "is read as one text a line, with words between spaces",
    "5.3 % of the characters are unknown to the vocabulary: expect errors",
    "11 % of the characters are cut, as by data.max_length in fine-tuning",
  ]
  sentences = (tmp_path / "out.txt").read_text(encoding="utf-8").strip().split("\n\n")
  assert [[line.split()[0] for line in x.split("\n")] for x in sentences] == [
    ["the", "cafe"], ["the", "abcabcab", "Ω"]]  # fmt: skip


# Results of others.


@pytest.mark.parametrize(
  "change",
  [{"task": 5}, {"split": None}, {"seed": "0"}, {"metrics": []}, {"metrics": {}},
   {"metrics": {"f1": "5"}}, {"metrics": {"f1": None}}, {"collapsed": "x"}, {"fold": "x"},
   {"majority": {"f1": []}}, {"majority": 3}],
)  # fmt: skip
def test_rows_of_other_types_are_not_results(tmp_path, change):
  row = {"task": "x", "split": "dev", "seed": 0, "metrics": {"f1": 5}, "collapsed": False}
  put(tmp_path, results.RESULTS, json_rows(row | {"majority": None, "errors": {"rmse": 1.0}}))
  assert len(results.read_results(tmp_path)) == 1
  put(tmp_path, results.RESULTS, json_rows(row, row | change))
  with pytest.raises(ValueError, match="results.jsonl:2: not a row of results"):
    results.read_results(tmp_path)


def test_what_is_missing_from_the_command_is_what_is_named():
  for args, why in (
    (["--config=configs/finetune/tagging.py"], "^--workdir=DIR is needed"),
    (["--workdir=x"], "^--config is needed, e.g. configs/finetune/own.py"),
  ):
    with pytest.raises(cli.UsageError, match=why):
      cli.call("finetune", args)
