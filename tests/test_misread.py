"""What is read of task files as people have them: each is read as meant, or named in a line."""

import bz2
import gzip
import json
import re
import warnings

import numpy as np
import pytest

from electra_jax.core import task_network
from electra_jax.finetune import (
  files,
  glue_files,
  sentence_pairs,
  squad_files,
  tag_files,
  tagging,
  tasks,
  text_task,
)
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.glue_files import Example
from electra_jax.finetune.task_data import TaskInfo

TWO = [("a, b", "x"), ("c", "y")]


def put(folder, name: str, data: str | bytes):
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(data if isinstance(data, bytes) else data.encode())
  return path


def own(kind: str = "classification", label: str = "label"):
  return tasks.own("mine", text="text", label=label, kind=kind)


def read_own(path, kind="classification"):
  """Returns the task of a training file, and its split."""
  task = glue_files.complete(own(kind), path)
  return task, glue_files.read(task, path, "train")


def json_rows(*rows) -> str:
  return "".join(json.dumps(row) + "\n" for row in rows)


DICTS = [{"text": text, "label": label} for text, label in TWO]


@pytest.mark.parametrize(
  ("name", "data"),
  [
    ("a.csv", 'text,label\n"a, b",x\nc,y\n'),
    ("spaces.csv", 'text, label \n"a, b",x\nc,y\n'),
    ("semicolon.csv", "text;label\na, b;x\nc;y\n"),
    ("commas in the header.csv", 'text;"one, two, three";label\na, b;1;x\nc;2;y\n'),
    ("excel.csv", b"\xef\xbb\xbfsep=;\r\ntext;label\r\na, b;x\r\nc;y\r\n"),
    ("excel tab.csv", '"sep=\t"\ntext\tlabel\na, b\tx\nc\ty\n'),
    ("pipe.csv", "text|label\na, b|x\nc|y\n"),
    ("tab.csv", "text\tlabel\na, b\tx\nc\ty\n"),
    ("macintosh.tsv", "text\tlabel\ra, b\tx\rc\ty\r"),
    ("no ending", json_rows(*DICTS)),
    ("lines.json", json_rows(*DICTS)),
    ("array.json", json.dumps(DICTS)),
    ("pretty.json", json.dumps(DICTS, indent=1)),
    ("data.json", json.dumps({"version": 1, "data": DICTS})),
    ("gzip.csv", gzip.compress(b'text,label\n"a, b",x\nc,y\n', mtime=0)),
    ("a, comma [v2]/a.tsv.bz2", bz2.compress(b"text\tlabel\na, b\tx\nc\ty\n")),
  ],
)
def test_every_form_of_a_table_is_the_same_rows(tmp_path, name, data):
  task, split = read_own(put(tmp_path, name, data))
  assert task.labels == ("x", "y") and not split.bad
  assert split.examples == [Example("a, b", None, 0, 0), Example("c", None, 1, 1)]


@pytest.mark.parametrize(
  ("data", "why"),
  [
    ("text\tlabel\n".encode("utf-16"), r":1: not UTF-8 \(byte 0xff\), probably UTF-16: convert"),
    ("text\tlabel\n".encode("utf-16-le"), ":1: not UTF-8 .*, probably UTF-16: convert"),
    ("text\tlabel\ncafé\t1\n".encode("cp1252"), r":2: .*byte 0xe9\), probably Windows-1252"),
    (b"PK\x03\x04\x14\x00\xff\xfe", "probably ZIP"),
    (b"PAR1\xff\x00", "probably Parquet"),
  ],
)
@pytest.mark.parametrize("name", ["a.tsv", "a.txt", "a.json", "a.conllu"])
def test_bytes_that_are_not_utf8_are_named_with_line_and_likely_kind(tmp_path, name, data, why):
  path = put(tmp_path, name, data)
  read = tagging.read if name.endswith("u") else lambda path: list(files.read_rows(path))
  with pytest.raises(TaskError, match=why) as error:
    read(path)
  assert "\n" not in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.json"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
  path = put(
    tmp_path, name, "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
  )
  with pytest.raises(TaskError, match=f"{name}: a pointer of Git LFS: run git lfs pull"):
    list(files.read_rows(path))


# Labels.


def test_a_hidden_label_of_a_test_split_stays_hidden(tmp_path):
  task = glue_files.complete(own(), put(tmp_path, "train.jsonl", json_rows(*DICTS)))
  hidden = [{"text": "new", "label": -1}, {"text": "newer", "label": "-1"}]
  put(tmp_path, "test.jsonl", json_rows(*hidden, {"text": "newest", "label": "x"}))
  found = glue_files.read(task, tmp_path, "test")
  assert [e.label for e in found.examples] == [None, None, 0] and found.unlabelled == 2
  numbers = glue_files.complete(
    own("regression"), put(tmp_path, "n.csv", "text,label\na,1\nb,-1\n")
  )
  put(tmp_path, "test.jsonl", json_rows(*hidden))
  assert [e.label for e in glue_files.read(numbers, tmp_path, "test").examples] == [None, None]
  put(tmp_path, "test.jsonl", json_rows(*hidden, {"text": "a", "label": 2}))
  assert [e.label for e in glue_files.read(numbers, tmp_path, "test").examples] == [-1, -1, 2]


def test_a_rare_minus_one_in_training_is_no_class_and_a_frequent_one_is(tmp_path):
  rows = [{"text": "a", "label": i % 2} for i in range(200)]
  hidden = {"text": "b", "label": -1}
  task, split = read_own(put(tmp_path, "a.jsonl", json_rows(*rows, hidden)))
  assert task.labels == ("0", "1") and split.unlabelled == 1 and len(split.examples) == 200
  dev = put(tmp_path, "dev.jsonl", json_rows(*rows[:2], *[hidden] * 9))
  found = glue_files.read(task, dev, "dev")
  assert len(found.examples) == 2 and found.unlabelled == 9
  with pytest.raises(TaskError, match=r"has only rows without a label \(-1\)"):
    glue_files.read(task, put(tmp_path, "none.jsonl", json_rows(hidden)), "dev")
  task, split = read_own(put(tmp_path, "b.jsonl", json_rows(*rows, *[hidden] * 100)))
  assert task.labels == ("-1", "0", "1") and not split.unlabelled
  with pytest.raises(TaskError, match="fewer than 2 labels: '-1' .-1 means that a label is hidden"):
    read_own(put(tmp_path, "c.jsonl", json_rows(hidden, hidden)))


def test_floats_of_pandas_are_the_classes_they_were(tmp_path):
  task, split = read_own(put(tmp_path, "train.tsv", "text\tlabel\na\t0.0\nb\t1.0\n"))
  assert task.labels == ("0", "1")
  for written in ("0", "0.0", "00.0"):
    dev = put(tmp_path, "dev.tsv", f"text\tlabel\na\t{written}\n")
    assert glue_files.read(task, dev, "dev").examples[0].label == 0


@pytest.mark.parametrize(
  ("row", "why"),
  [
    ({"text": "a", "label": [1]}, r"'label' is \[1\], not a text or a number"),
    ({"text": "a", "label": None}, "'label' is empty"),
    ({"text": "a", "label": " nan "}, "'label' is empty"),
    ({"text": "a", "label": "<NA>"}, "'label' is empty"),
    ({"text": 5, "label": "x"}, "'text' is not a text"),
    ({"text": "text", "label": "label"}, "the header again"),
    ({"text": "a"}, "'label' is empty"),
  ],
)
def test_a_row_that_is_none_has_its_reason(tmp_path, row, why):
  path = put(tmp_path, "a.jsonl", json_rows(*DICTS * 100, row))
  _, split = read_own(path)
  (bad,) = split.bad
  assert re.fullmatch(re.escape(f"{path}:201: ") + why, bad)


def test_a_file_without_any_label_names_the_first_rows_fault(tmp_path):
  path = put(tmp_path, "a.json", json.dumps({"text": {"0": "a"}, "label": {"0": 1}}))
  with pytest.raises(TaskError, match="a.json:1: 'text' is not a text .no row has a label"):
    read_own(path)


def test_amounts_as_classes_come_with_a_hint(tmp_path):
  path = put(tmp_path, "a.tsv", "text\tlabel\n" + "".join(f"a\t{i / 2}\n" for i in range(9)))
  task, split = read_own(path)
  hint = "if these numbers are amounts, set own.kind=regression"
  assert hint in task.label_type.summary(task, [e.label for e in split.examples])
  dev = put(tmp_path, "dev.tsv", "text\tlabel\na\t7.25\n")
  with pytest.raises(TaskError, match=f"labels are not in the training split.*{hint}"):
    glue_files.read(task, dev, "dev")
  task, split = read_own(put(tmp_path, "b.tsv", "text\tlabel\na\t1\nb\t2\n"))
  assert "amounts" not in task.label_type.summary(task, [0, 1])
  for label in ("good", "3,5"):
    words = put(tmp_path, "c.csv", f'text,label\na,"{label}"\n')
    with pytest.raises(TaskError, match=f"no number as a label, e.g. '{label}': write numbers"):
      read_own(words, "regression")


def test_a_bad_row_is_of_one_split(tmp_path):
  rows = "".join(f"text {i}\tx\n" for i in range(400))
  path = put(tmp_path, "a.tsv", f"text\tlabel\n{rows}one cell\nbad\ty\t\n")
  task = glue_files.complete(own(), put(tmp_path, "b.tsv", "text\tlabel\na\tx\nb\ty\n"))
  low, high = (
    glue_files.read(task, path, "train", holds=holds)
    for holds in (lambda text: "1" in text, lambda text: "1" not in text)
  )
  assert len(low.examples) + len(high.examples) == 400
  assert len(low.bad) + len(high.bad) == 2
  pairs = put(tmp_path, "p.csv", "a,b\n" + "one,two\n" * 200 + "left,\n")
  counts = [
    sum("left out" in note for note in sentence_pairs.read(str(pairs), "train", holds=f).notes)
    for f in (lambda text: text == "one", lambda text: True)
  ]
  assert counts == [0, 1]


def test_the_index_of_pandas_is_no_text_of_a_pair(tmp_path):
  table = put(tmp_path, "a.csv", ",a,b\n0,the,cat\n")
  assert sentence_pairs.read(str(table), "train").texts == ["the", "cat"]
  with pytest.raises(
    TaskError, match="note:1: not a JSON object .* end its name in one of .tsv, .csv"
  ):
    list(files.read_rows(put(tmp_path, "note", "text\n")))


# Numbers.


@pytest.mark.parametrize("offset", [0.0, 1950.0, -1e6])
def test_targets_do_not_depend_on_the_offset_and_predictions_carry_it(tmp_path, words, offset):
  labels = np.array([0.5, 2.0, 54.0, 7.25])
  rows = "".join(f"the cat\t{label + offset!r}\n" for label in labels.tolist())
  task, split = read_own(put(tmp_path, "a.tsv", "text\tlabel\n" + rows), "regression")
  made = text_task.features(task, split.examples, words, max_length=9)
  targets = np.array([row.target["label"] for row in made])
  assert targets.dtype == np.float32
  np.testing.assert_allclose(targets, (labels - labels.mean()) / labels.std(), rtol=1e-6)
  # Float64 keeps the third decimal beside a million.
  predicted = task.label_type.predictions(task, targets.astype(np.float64))
  np.testing.assert_allclose(predicted, labels + offset, rtol=0, atol=1e-5)
  assert [x["score"] for x in task.label_type.answers(task, targets)] == pytest.approx(predicted)
  written = np.array([float(x) for x in task.label_type.written(task, predicted)])
  np.testing.assert_allclose(written, labels + offset, rtol=0, atol=1e-3)
  info = TaskInfo("text", "x", task_network.HeadSpec("regression", {}), 9, text=task)
  scores = np.stack([labels + offset, np.full(4, offset + 1.0)], 1)
  errors = text_task.KIND.errors(info, made, scores)
  expected = {"rmse": np.sqrt(np.mean((labels - 1) ** 2)), "rmse_of_mean": labels.std()}
  assert errors == pytest.approx(expected, rel=1e-6)
  assert task.label_type.unit(task) == (task.scale, task.offset)


def test_the_mean_is_of_the_rows_that_are_trained_on(tmp_path):
  path = put(tmp_path, "a.tsv", "text\tlabel\na\t1\nb\t3\nheld out\t900\n")
  task = glue_files.complete(own("regression"), path, holds=lambda text: len(text) == 1)
  assert (task.scale, task.offset) == (1.0, 2.0)
  with pytest.raises(TaskError, match="all labels of the training split are 1"):
    glue_files.complete(own("regression"), path, holds=lambda text: text == "a")


def test_numbers_of_earlier_versions_have_no_offset():
  text = {"name": "x", "title": "x", "text": "a", "label": "y", "labels": None, "scale": 40.0}
  head = {"kind": "regression", "arguments": {}}
  saved = {"kind": "text", "name": "x", "head": head, "max_length": 9, "labels": [], "text": text}
  task = TaskInfo.from_json(saved).text
  np.testing.assert_array_equal(task.label_type.predictions(task, np.array([0.5, -1])), [20, -40])


# Tags.


def conllu(*rows: str) -> str:
  return "".join(row + "\t_" * (10 - len(row.split("\t"))) + "\n" for row in rows)


UD = "# text = ab\n" + conllu(
  "1-2\tab", "1\ta\tlemma\tDET", "1.1\tx\t_\tX", "2\t10 000\tlemma\tNUM"
)
TOKENS = {"tokens": ["a", "b"], "tags": ["O", "B-X"]}


@pytest.mark.parametrize(
  ("name", "data", "options"),
  [
    ("a.jsonl", json_rows(TOKENS), {}),
    ("order.jsonl", json_rows({"ner_tags": ["O", "B-X"], "tokens": ["a", "b"]}), {}),
    ("array.json", json.dumps([TOKENS], indent=1), {}),
    ("lines.txt", json_rows(TOKENS), {}),
    ("ids.jsonl", json_rows({"tokens": ["a", "b"], "ner_tags": [0, 1]}), {"labels": "O, B-X"}),
    ("floats.json", json_rows({"words": ["a", "b"], "tags": [0.0, 1.0]}), {"labels": "O,B-X"}),
    ("tfds.json", json_rows({"chunks": [3, 4], "ner": [0, 1], "pos": [1, 2], "tokens": ["a", "b"]}),
     {"labels": "O,B-X"}),
    ("header.tsv", "Word\tTag\na\tO\nb\tB-X\n", {}),
    ("multiconer.txt", "# id 12\tdomain=en\na _ _ O\nb _ _ B-X\n", {}),
    ("2012.txt", "#begin document (x); part 000\na O\nb B-X\n\n#end document\n", {}),
  ],
)  # fmt: skip
def test_sentences_of_every_form_are_the_same(tmp_path, name, data, options):
  (found,) = tagging.read(put(tmp_path, name, data), **options)
  assert (found.words, found.tags) == (("a", "b"), ("O", "B-X"))


def test_conllu_is_words_without_comments_ranges_and_empty_nodes(tmp_path):
  path = put(tmp_path, "a.conllu", UD + "\n" + UD)
  for options in ({}, {"word_column": 1, "tag_column": 3}):
    found = tagging.read(path, **options)
    assert [(s.words, s.tags) for s in found] == [(("a", "10 000"), ("DET", "NUM"))] * 2
  assert tagging.read(path, word_column=1, tag_column=2)[0].tags == ("lemma", "lemma")
  (found, _) = tagging.read(put(tmp_path, "b.txt", "# O\n1 B-X\n\n# SYM\n"))
  assert found.words == ("#", "1")  # a word


def test_parquet_of_datasets_has_the_names_of_its_tags(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  features = {"tokens": {"feature": {"dtype": "string"}}, "ner_tags": {
    "feature": {"names": ["O", "B-X"], "_type": "ClassLabel"}, "_type": "Sequence"}}  # fmt: skip
  table = pyarrow.table({"tokens": [["a", "b"]], "ner_tags": [[0, 1]]})
  for saved in ({"info": {"features": features}}, {"info": 5}, []):
    metadata = {"huggingface": json.dumps(saved)}
    parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    named = tagging.read(tmp_path / "a.parquet")[0].tags
    assert named == (("O", "B-X") if isinstance(saved, dict) and saved["info"] != 5 else ("0", "1"))


@pytest.mark.parametrize(
  ("name", "data", "why"),
  [
    ("a.txt", "apple/O stone/B-X\n", "a.txt:1: 'apple/O' is a word with its tag: write each word"),
    ("a.txt", "the_DT cat_NN\nI_PRP ran_VBD\n", "'the_DT' is a word with its tag"),
    ("a.csv", "word,tag\na,O\n", "a.csv: tags are read from columns at spaces or tabs, or from"),
    ("a.jsonl", json_rows({"tokens": ["a"], "tags": [None]}), "a.jsonl:1: None is not a word or a"),
    ("a.jsonl", json_rows({"tokens": ["a"], "tags": [["O"]]}), r"\['O'\] is not a word or a tag"),
    (
      "a.jsonl",
      json_rows({"tokens": "a b", "tags": "O O"}),
      "no list of words .columns: tokens, t",
    ),
    ("a.jsonl", '{"tokens":' + "[" * 99_999, "a.jsonl:1: not a JSON object"),
  ],
)
def test_a_file_that_is_no_sentences_is_named(tmp_path, name, data, why):
  with pytest.raises(TaskError, match=why) as error:
    tagging.read(put(tmp_path, name, data))
  assert "\n" not in str(error.value)
  with pytest.raises(TaskError, match="the tag 5 is not in tagging.labels, which has 2 names"):
    tagging.read(
      put(tmp_path, "ids.jsonl", json_rows({"tokens": ["a"], "tags": [5]})), labels="O,B-X"
    )


@pytest.mark.parametrize(
  ("tags", "note"),
  [
    ("B-X L-X O U-Y", "BILOU with 2 entities: X 1, Y 1"),
    ("B-X I-X L-X U-X", "BILOU with 2 entities: X 2"),
    ("B-X M-X E-X W-X", "BMEWO with 2 entities: X 2"),
    ("B-X E-X O S-X", "BIOES with 2 entities: X 2"),
    ("B M E S", "BMES with 2 entities: _ 2"),
    ("I-X O I-X I-X", "BIO with 2 entities: X 2"),
    ("o b-x i-x o", "not read as entities: accuracy only; write B-x for b-x"),
    ("O B_X I_X O", "not read as entities: accuracy only; write B-X for B_X"),
    ("O X-B X-I O", "not read as entities: accuracy only; write B-X for X-B"),
    ("O PER PER O", "not read as entities: accuracy only; write I-PER for PER"),
    ("0 B-X I-X 0", "not read as entities: accuracy only; write O for 0"),
    ("0 1 2 0", "not read as entities: accuracy only; name them by tagging.labels"),
    ("M W O M", "not read as entities: accuracy only$"),
    ("DT NN VB NN", "not read as entities: accuracy only$"),
  ],
)
def test_the_scheme_that_is_read_is_said(tags, note):
  sentence = tag_files.Sentence(tuple("abcd"), tuple(tags.split()), "file:1")
  assert re.search(note, tagging.describe([sentence]))
  is_read = "with" in note
  assert tagging.is_entities(tagging.labels([sentence])) == is_read
  if is_read:  # the same spans as from seqeval's reading of BIOES
    from seqeval.metrics.sequence_labeling import get_entities

    swapped = str.maketrans("LUMW", "ESIS")
    bioes = [tag[0].translate(swapped) + tag[1:] for tag in sentence.tags]
    assert get_entities(tagging.to_bio(sentence.tags)) == get_entities(bioes)


def is_tag(text: str) -> bool:
  return text in ("O", "B-X")


@pytest.mark.parametrize(
  ("data", "words"),
  [
    ("the cat sat\nmy mat is red .\n", [("the", "cat", "sat"), ("my", "mat", "is", "red", ".")]),
    ("I left\nHe stayed\n", [("I", "left"), ("He", "stayed")]),
    ("I O\nleft B-X\n", [("I", "left")]),
    ("I PRP\nleft VB\n\nHe PRP\nran VB\n", [("I", "left"), ("He", "ran")]),
    ("I\nleft\n\nHe\n", [("I", "left"), ("He",)]),
  ],
)
def test_texts_to_predict_are_lines_and_columns_are_columns(tmp_path, data, words):
  path = put(tmp_path, "new.txt", data)
  with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    found = tagging.read(path, tags_optional=True, is_tag=is_tag)
  assert [s.words for s in found] == words
  assert len(told) == ("the" in data or "stayed" in data)
  assert all("is read as one text a line" in str(x.message) for x in told)


# Questions.


ROW = {"id": "1", "title": "t", "context": "the river", "question": "what ?",
       "answers": {"text": ["river"], "answer_start": [4]}}  # fmt: skip


@pytest.mark.parametrize(
  ("name", "data"),
  [
    ("lines.json", json_rows(ROW, ROW | {"id": "2"})),
    ("array.json", json.dumps([ROW, ROW | {"id": 2}])),
    ("pretty.json", json.dumps([ROW, ROW | {"id": "2"}], indent=2)),
    ("data.json", json.dumps({"version": "x", "data": [ROW, ROW | {"id": "2"}]})),
    ("lists.jsonl", json_rows(ROW | {"answers": [{"text": "river", "answer_start": 4}]},
                              ROW | {"id": "2"})),
    ("a.csv", 'id,context,question,answers\n1,the river,what ?,"{""text"": [""river""],'
     ' ""answer_start"": [4]}"\n2,the river,what ?,"[{""text"": ""river"", ""answer_start"": 4}]"'
     "\n"),
  ],
)  # fmt: skip
def test_rows_of_questions_are_read_in_every_form(tmp_path, name, data):
  found = squad_files.read(put(tmp_path, name, data))
  assert [q[:4] for q in found.items] == [(i, "what ?", "the river", (("river", 4),)) for i in "12"]
  assert found.labelled and found.form == "SQuAD 1.1"
  for answers in ({"text": [], "answer_start": []}, []):
    empty = put(tmp_path, "empty.jsonl", json_rows(ROW | {"answers": answers}))
    assert squad_files.read(empty).items[0].impossible


@pytest.mark.parametrize("data", ["[" * 99_999, '{"data":' + "[" * 99_999, '{"data": [5]}', "[5]"])
def test_other_json_is_one_line(tmp_path, data):
  with pytest.raises(TaskError, match="a.json") as error:
    squad_files.read(put(tmp_path, "a.json", data))
  assert "\n" not in str(error.value)
