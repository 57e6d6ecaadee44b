"""Text tasks: what is read, what is refused, what the metrics and the submissions are."""

import csv
import dataclasses
import gzip
import json
import lzma
import math

import numpy as np
import pytest
import zstandard

from electra_jax.finetune import glue_files, tasks
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.glue_files import Example
from electra_jax.finetune.tasks import TASKS

REVIEWS = tasks.own("reviews", text="body", label="stars")


def write(folder, name: str, lines: list[str], end="\n"):
  """Writes lines into a file of a folder, which is made; returns the folder."""
  folder.mkdir(exist_ok=True)
  data = end.join(lines + [""]).encode()
  modules = {".gz": gzip, ".xz": lzma, ".zst": zstandard}
  module = modules.get(name[name.rindex(".") :])
  (folder / name).write_bytes(module.compress(data) if module else data)
  return folder


def labelled(*labels: str):
  """The task of reviews with its labels known."""
  return dataclasses.replace(REVIEWS, labels=labels)


def texts_of(path) -> list[str]:
  """Returns the texts of reviews that are to be predicted."""
  return [example.text for example in glue_files.read_texts(REVIEWS, path)[0]]


def refused(*args, **options) -> str:
  """Returns the message with which `glue_files.read` refuses; it is one line."""
  with pytest.raises(TaskError) as error:
    glue_files.read(*args, **options)
  assert "\n" not in str(error.value)
  return str(error.value)


# What GLUE is.


def test_the_average_is_over_eight_tasks_and_two_train_ten_epochs():
  assert sum(task.average for task in TASKS.values()) == 8 and not TASKS["wnli"].average
  assert {name for name, task in TASKS.items() if task.epochs == 10} == {"rte", "stsb"}
  assert {name for name, task in TASKS.items() if task.doubled} == {"mrpc", "stsb"}
  assert (TASKS["cola"].metrics[0], TASKS["stsb"].metrics[0]) == ("mcc", "spearman")
  files = {name for task in TASKS.values() for name in task.submission.values()}
  assert len(files) == 11 and {"MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv", "STS-B.tsv"} <= files


# Where a split is.


@pytest.mark.parametrize("name", ["SST-2", "sst", "sst2"])
def test_a_task_is_found_under_the_names_its_folder_has_had(tmp_path, name):
  write(tmp_path / name, "dev.tsv", ["sentence\tlabel", "good\t1"])
  for source in (tmp_path, tmp_path / name):
    assert glue_files.find_split(TASKS["sst2"], source, "dev") == tmp_path / name / "dev.tsv"


def test_a_missing_split_is_refused_with_what_there_is(tmp_path):
  write(tmp_path / "MNLI", "train.tsv", ["x"])
  write(tmp_path / "MNLI", "dev_matched.tsv", ["x"])
  message = refused(TASKS["mnli"], tmp_path, "dev_mismatched")
  assert "'dev_mismatched' (found: dev_matched.tsv, train.tsv)" in message
  assert "no split 'dev'; it has train, dev_matched" in refused(TASKS["mnli"], tmp_path, "dev")
  assert "not a folder" in refused(TASKS["mnli"], tmp_path / "nowhere", "train")


def test_two_files_for_one_split_are_refused(tmp_path):
  write(tmp_path, "train.tsv", ["body\tstars"])
  write(tmp_path, "train.jsonl.gz", ["{}"])
  message = refused(labelled("1", "2"), tmp_path, "train")
  assert "train.jsonl.gz or train.tsv for the split" in message


@pytest.mark.parametrize("place", ["MNLI/diagnostic.tsv", "AX/AX.tsv", "diagnostic/diagnostic.tsv"])
def test_the_diagnostic_set_is_found_wherever_glue_has_put_it(tmp_path, place):
  (tmp_path / "MNLI").mkdir()
  folder, name = place.split("/")
  write(tmp_path / folder, name, ["index\tsentence1\tsentence2", "0\tA.\tB."])
  split = glue_files.read(TASKS["mnli"], tmp_path, "diagnostic")
  assert split.examples == [Example("A.", "B.", None, 0)]


# What is read.


def test_quotes_are_text_and_a_byte_order_mark_is_not(tmp_path):
  lines = [
    "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    '1\t1\t2\t" He said\tShe "said"',
    '0\t3\t4\tone "\ttwo\x85and\u2028three',
  ]
  source = write(tmp_path / "MRPC", "dev.tsv", lines, end="\r\n")
  split = glue_files.read(TASKS["mrpc"], source, "dev")
  assert split.bad == []
  assert split.examples == [
    Example('" He said', 'She "said"', 1, 0),
    Example('one "', "two\x85and\u2028three", 0, 1),
  ]


TEXTS = ["tab\there", 'a "b" c', '"', "two\nlines", '"whole"', "", "it's plain", '"a" or "b"']


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("columns", [["id", "body"], ["body", "id"], ["body"]])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_with_csv_quotes_is_read_as_what_was_written(tmp_path, quoting, columns, end):
  with open(tmp_path / "new.tsv", "w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file, delimiter="\t", quoting=quoting, lineterminator=end)
    writer.writerow(columns)
    writer.writerows([{"id": i, "body": text}[c] for c in columns] for i, text in enumerate(TEXTS))
  assert texts_of(tmp_path / "new.tsv") == TEXTS


@pytest.mark.parametrize(
  "texts",
  [
    ['" He said', 'a ""b"" c"'],
    ['"A sentence in quotes."', 'one " more'],
    ['"A sentence in quotes."', "none"],
    ['"opened', "plain", 'closed"'],
    ['"twice ""so"""', 'and "once"'],
  ],
)
def test_quotes_that_no_csv_writer_places_are_text(tmp_path, texts):
  write(tmp_path, "new.tsv", ["body\tid", *(f"{text}\t{i}" for i, text in enumerate(texts))])
  assert texts_of(tmp_path / "new.tsv") == texts


def test_lines_are_counted_through_quoted_cells(tmp_path):
  write(tmp_path, "new.tsv", ["body\tid", '"one', 'two"\t1', "three"])
  with pytest.raises(TaskError, match="new.tsv:4: 1 columns instead of 2"):
    texts_of(tmp_path / "new.tsv")


def test_quotes_in_the_files_of_a_glue_task_are_text_even_where_they_could_be_csvs(tmp_path):
  # QQP's files have such cells; their quotes have always been read as text.
  lines = ["question1\tquestion2\tis_duplicate", 'x\t"Why ""y""?"\t0']
  source = write(tmp_path / "QQP", "dev.tsv", lines)
  (example,) = glue_files.read(TASKS["qqp"], source, "dev").examples
  assert example.pair == '"Why ""y""?"'


def test_cola_has_a_header_in_its_test_split_only(tmp_path):
  source = write(tmp_path / "CoLA", "dev.tsv", ["gj04\t0\t*\tBad is this."])
  write(source, "test.tsv", ["index\tsentence", "0\tWho knows.", "1\t"])
  dev, test = (glue_files.read(TASKS["cola"], source, x).examples for x in ("dev", "test"))
  assert dev == [Example("Bad is this.", None, 0, 0)]
  # An empty text is kept: the submission needs its row.
  assert test == [Example("Who knows.", None, None, 0), Example("", None, None, 1)]


def test_columns_are_found_by_their_names_and_labels_by_the_order_of_the_task(tmp_path):
  lines = ["index\tlabel1\tsentence2\tsentence1\tgold_label", "7\tneutral\tB\tA\tcontradiction"]
  source = write(tmp_path / "MNLI", "dev_matched.tsv", [*lines, "8\tx\tD\tC\tneutral"])
  split = glue_files.read(TASKS["mnli"], source, "dev_matched")
  assert split.examples == [Example("A", "B", 0, 0), Example("C", "D", 2, 1)]


# task, file, lines, a part of the message
REFUSED = [
  ("rte", "RTE/dev.tsv", ["index\tsentence1\tlabel", "0\tA\tentailment"], (
    "dev.tsv:1 has no column 'sentence2' (columns: index, sentence1"
  )),
  ("sst2", "SST-2/dev.tsv", ["sentence\tlabel\tsentence", "a\t1\tb"], "two columns 'sentence'"),
  ("qnli", "QNLI/dev.tsv", ["question\tsentence\tlabel", "A\tB\tEntailment"], (
    "dev.tsv:2: the label is 'Entailment', not one of entailment, not_entailment"
  )),
  # What is predicted must be whole.
  ("sst2", "SST-2/test.tsv", ["index\tsentence", *(f"{i}\tFine." for i in range(500)), "500"], (
    "test.tsv:502: 1 columns instead of 2 (1 of 501 rows"
  )),
  ("cola", "CoLA/train.tsv", ["gj04\t1\t\tFine here.", "gj04\t1\tshort", *97 * ["a\t1\t\tb"]], (
    "train.tsv:2: 3 columns instead of 4 (1 of 99 rows are bad, above 1%)"
  )),
]  # fmt: skip


@pytest.mark.parametrize(("task", "file", "lines", "why"), REFUSED)
def test_headers_and_rows_that_a_task_does_not_have_are_refused(tmp_path, task, file, lines, why):
  folder, _, name = file.partition("/")
  source = write(tmp_path / folder, name, lines)
  message = refused(TASKS[task], source, name.removesuffix(".tsv"))
  assert why in message and str(source / name) in message


def test_bad_rows_are_left_out_and_counted_up_to_one_percent(tmp_path):
  rows = ["gj04\t1\t\tFine here."] * 99
  source = write(tmp_path / "CoLA", "train.tsv", [*rows[:1], "gj04\t1\tshort", *rows[1:]])
  split = glue_files.read(TASKS["cola"], source, "train")
  assert len(split.examples) == 99
  assert split.bad == [f"{tmp_path}/CoLA/train.tsv:2: 3 columns instead of 4"]
  assert [e.place for e in split.examples[:3]] == [0, 2, 3]


@pytest.mark.parametrize(
  ("row", "why"),
  [
    ("0\tA\tB\t2\textra", "5 columns instead of 4"),
    ("0\tA\tB", "3 columns instead of 4"),
    ("0\tA\t \t2", "'sentence2' is empty"),
    ("0\tA\tB\t", "'score' is empty"),
    ("0\tA\tB\tmany", "the label is 'many', not a number from 0 to 5"),
    ("0\tA\tB\tnan", "'score' is empty"),
    ("0\tA\tB\t5.1", "the label is '5.1', not a number from 0 to 5"),
    ("", "1 columns instead of 4"),
  ],
)
def test_each_kind_of_bad_row_has_its_reason(tmp_path, row, why):
  rows = ["index\tsentence1\tsentence2\tscore", row, *["0\tA\tB\t2.500"] * 200]
  split = glue_files.read(TASKS["stsb"], write(tmp_path / "STS-B", "train.tsv", rows), "train")
  assert split.bad == [f"{tmp_path}/STS-B/train.tsv:2: {why}"]
  assert set(split.examples) == {Example("A", "B", 2.5, i) for i in range(1, 201)}


def test_empty_texts_at_the_end_of_a_file_to_predict_are_kept(tmp_path):
  write(tmp_path, "new.tsv", ["body", "a", "", ""])
  assert texts_of(tmp_path / "new.tsv") == ["a", "", ""]
  write(tmp_path, "pairs.tsv", ["id\tbody", "1\ta", "", ""])  # an editor's last lines
  assert texts_of(tmp_path / "pairs.tsv") == ["a"]
  write(tmp_path, "none.tsv", ["body"])
  with pytest.raises(TaskError, match="the file has no rows"):
    texts_of(tmp_path / "none.tsv")


def test_damaged_files_are_one_line_errors(tmp_path):
  folder = write(tmp_path / "CoLA", "train.tsv", ["gj04\t1\t\tFine."])
  (folder / "dev.tsv").write_bytes(b"gj04\t1\t\tFine.\ngj04\t1\t\tna\xefve\n")
  assert "dev.tsv:2: not UTF-8 (byte 0xef)" in refused(TASKS["cola"], folder, "dev")
  (folder / "dev.tsv").write_bytes(b"\n")
  assert "dev.tsv: the file is empty" in refused(TASKS["cola"], folder, "dev")
  (folder / "dev.tsv").rename(folder / "dev.tsv.gz")
  assert "dev.tsv.gz: cannot be read" in refused(TASKS["cola"], folder, "dev")
  (folder / "dev.tsv.gz").write_bytes(gzip.compress(b"gj04\t1\t\tFine.\n" * 99)[:-9])
  assert "dev.tsv.gz: cannot be read" in refused(TASKS["cola"], folder, "dev")
  write(folder, "test.tsv", ["index\tsentence"])
  assert "'test' in" in refused(TASKS["cola"], folder, "test")


# One's own tasks.


def own_files(tmp_path, suffix: str):
  """The same three splits as TSV, as CSV or as JSON lines."""
  splits = {
    "train": [("fine", "10"), ("poor", "9"), ("bad", "1")],
    "dev": [("so so", "9")],
    "test": [("who knows", None)],
  }
  for split, rows in splits.items():
    if not suffix.startswith(".jsonl"):
      between = "\t" if suffix.startswith(".tsv") else ","
      table = [("id", "body", "stars" if split != "test" else None), *(("x", *row) for row in rows)]
      lines = [between.join(filter(None, row)) for row in table]
    else:
      values = [{"body": body} | ({"stars": int(stars)} if stars else {}) for body, stars in rows]
      lines = [json.dumps(value) for value in values]
    write(tmp_path, split + suffix, lines)
  return tmp_path


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz", ".csv", ".csv.zst", ".jsonl", ".jsonl.xz"])
def test_own_labels_are_found_in_the_training_split_and_sorted_as_numbers(tmp_path, suffix):
  source = own_files(tmp_path, suffix)
  task = glue_files.complete(REVIEWS, source)
  assert task.labels == ("1", "9", "10") and task.label_type.head == "classification"
  assert glue_files.read(task, source, "dev").examples == [Example("so so", None, 1, 0)]
  assert glue_files.read(task, source, "test").examples == [Example("who knows", None, None, 0)]
  read, _ = glue_files.read_texts(task, source / f"dev{suffix}")
  assert read == [Example("so so", None, None, 0)]


def test_a_csv_is_read_as_pythons_writer_wrote_it(tmp_path):
  texts = ["a, b", 'said "no"', "two\nlines", "\ttab", "plain"]
  with open(tmp_path / "in.csv", "w", encoding="utf-8-sig", newline="") as file:
    csv.writer(file).writerows([["body"], *([text] for text in texts)])
  assert texts_of(tmp_path / "in.csv") == texts
  write(tmp_path, "in.csv", ["body,n", '"a', 'b",1', "", "c,1,2"])
  with pytest.raises(TaskError, match=r"in.csv:5: 3 columns instead of 2$"):
    texts_of(tmp_path / "in.csv")
  write(tmp_path, "in.csv", ["body,n", "a,1", '"b"c,1'])
  with pytest.raises(TaskError, match=r"in.csv:3: not CSV \(.*\): double the quotes in a cell$"):
    texts_of(tmp_path / "in.csv")


def test_1_and_1_point_0_are_one_label(tmp_path):
  rows = [{"body": "a", "stars": stars} for stars in (1, 1.0, "1", 2.0, 2.5)]
  write(tmp_path / "json", "train.jsonl", list(map(json.dumps, rows)))
  assert glue_files.complete(REVIEWS, tmp_path / "json").labels == ("1", "2", "2.5")
  write(tmp_path / "tsv", "train.tsv", ["body\tstars", "a\t1", "b\t1.0", "c\t2"])
  assert glue_files.complete(REVIEWS, tmp_path / "tsv").labels == ("1", "2")
  write(tmp_path / "halves", "train.tsv", ["body\tstars", "a\t1.0", "b\t1.5", "b\t2.0"])
  task = glue_files.complete(REVIEWS, tmp_path / "halves")
  assert task.labels == ("1.0", "1.5", "2.0")
  write(tmp_path / "halves", "dev.tsv", ["body\tstars", "a\t1", "b\t1.50", "c\t2.0"])
  assert [e.label for e in glue_files.read(task, tmp_path / "halves", "dev").examples] == [0, 1, 2]
  write(tmp_path / "codes", "train.tsv", ["body\tstars", "a\t1", "b\t01"])
  assert glue_files.complete(REVIEWS, tmp_path / "codes").labels == ("01", "1")


def test_nan_is_a_missing_label_and_no_class(tmp_path):
  rows = [{"body": "a", "stars": float(i % 2)} for i in range(200)]
  write(tmp_path, "train.jsonl", list(map(json.dumps, [*rows, {"body": "b", "stars": math.nan}])))
  task = glue_files.complete(REVIEWS, tmp_path)
  assert task.labels == ("0", "1")
  (bad,) = glue_files.read(task, tmp_path, "train").bad
  assert bad == f"{tmp_path}/train.jsonl:201: 'stars' is empty"
  assert glue_files._tfds_label(REVIEWS, np.float32("nan"), None) == ""


def test_an_own_test_split_may_have_labels(tmp_path):
  write(tmp_path, "test.tsv", ["body\tstars", "good\tb"])
  task = labelled("a", "b")
  assert glue_files.read(task, tmp_path, "test").examples == [Example("good", None, 1, 0)]


def test_labels_that_training_never_saw_are_refused_with_their_rows(tmp_path):
  rows = ["body\tstars", *["good\ta"] * 500, "odd\tz", "odder\ty"]
  write(tmp_path, "dev.tsv", rows)
  message = refused(labelled("a", "b"), tmp_path, "dev")
  assert "2 labels are not in the training split: 'z' (" in message
  assert "dev.tsv:502), 'y' (" in message and "it has a, b" in message


def test_an_own_regression_is_standardized_by_its_training_labels(tmp_path):
  task = tasks.own("heat", text="a", pair="b", label="y", kind="regression")
  lines = [json.dumps({"a": "x", "b": "y", "y": y}) for y in (-40, 2.5, "12")]
  source = write(tmp_path, "train.jsonl", lines)
  task = glue_files.complete(task, source)
  labels = [-40.0, 2.5, 12.0]
  np.testing.assert_allclose((task.scale, task.offset), (np.std(labels), np.mean(labels)))
  np.testing.assert_allclose(
    task.label_type.predictions(task, np.array([-1.0, 0, 2])),
    np.mean(labels) + np.std(labels) * np.array([-1, 0, 2]),
  )
  assert [e.label for e in glue_files.read(task, source, "train").examples] == [-40.0, 2.5, 12.0]


def test_bad_json_is_a_bad_row(tmp_path):
  good = json.dumps({"body": "fine", "stars": True})
  bad = ["{not json", "[1]", '{"body": 3, "stars": true}', '{"body": "\\ud800", "stars": true}']
  write(tmp_path, "train.jsonl", [good] * 400 + bad)
  task = labelled("true", "false")
  split = glue_files.read(task, tmp_path, "train")
  found = [line.partition("train.jsonl:")[2].partition(": ") for line in split.bad]
  assert [int(number) for number, _, _ in found] == [401, 402, 403]
  assert split.examples[-1].text == "\ufffd"  # half of an emoji
  told = [*2 * ["not a JSON object"], "'body' is not a text"]
  assert [why for _, _, why in found] == told
  write(tmp_path, "dev.jsonl", ['{"text": "fine", "stars": true}'])
  assert "dev.jsonl:1 has no column 'body' (columns: text, stars)" in refused(task, tmp_path, "dev")


def test_impossible_own_tasks_are_refused(tmp_path):
  for options in (
    {"name": "rte"},
    {"kind": "ranking"},
    {"metrics": ("pearson",)},
    {"kind": "regression", "metrics": ("accuracy",)},
    {"pair": "body"},
  ):
    with pytest.raises(TaskError):
      tasks.own(**{"name": "reviews", "text": "body", "label": "stars"} | options)
  write(tmp_path, "train.tsv", ["body\tstars", "fine\t1", "good\t1"])
  with pytest.raises(TaskError, match="fewer than 2 labels: '1'"):
    glue_files.complete(REVIEWS, tmp_path)
  with pytest.raises(TaskError, match="no number as a label, e.g. 'many': write numbers as 1234.5"):
    write(tmp_path, "train.tsv", ["body\tstars", "fine\tmany"])
    task = dataclasses.replace(REVIEWS, label_kind="regression", labels=None, scale=None)
    glue_files.complete(task, tmp_path)
  assert "has no labels: call glue_files.complete" in refused(REVIEWS, tmp_path, "train")


def test_tensorflow_datasets_are_read_in_the_order_of_glue(tmp_path):
  tfds = pytest.importorskip("tensorflow_datasets")

  class TinyInference(tfds.core.GeneratorBasedBuilder):
    """MNLI's features and splits."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      names = ["entailment", "neutral", "contradiction"]
      features = {
        "premise": tfds.features.Text(),
        "hypothesis": tfds.features.Text(),
        "label": tfds.features.ClassLabel(names=names),
        "idx": np.int32,
      }
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
      splits = {"train": (0, 1, 2), "validation_matched": (2, 1), "test_matched": (-1,) * 20}
      return {split: self._generate_examples(labels) for split, labels in splits.items()}

    def _generate_examples(self, labels):
      for i, label in enumerate(labels):
        yield f"{i}", {"premise": f"P{i} ä", "hypothesis": f"H{i}", "label": label, "idx": i}

  TinyInference(data_dir=tmp_path).download_and_prepare()
  mnli, options = TASKS["mnli"], {"data_dir": str(tmp_path)}
  dev = glue_files.read(mnli, "tfds:tiny_inference", "dev_matched", **options)
  assert dev.examples == [Example("P0 ä", "H0", 0, 0), Example("P1 ä", "H1", 2, 1)]
  test = glue_files.read(mnli, "tfds:tiny_inference", "test_matched", **options)
  assert test.examples == [Example(f"P{i} ä", f"H{i}", None, i) for i in range(20)]
  with pytest.raises(glue_files.MissingSplit, match="test_mismatched"):
    glue_files.read(mnli, "tfds:tiny_inference", "test_mismatched", **options)
  with pytest.raises(TaskError, match="dev_mismatched|validation_mismatched") as error:
    glue_files.read(mnli, "tfds:tiny_inference", "dev_mismatched", **options)
  assert not isinstance(error.value, glue_files.MissingSplit)
  message = refused(labelled("a", "b"), "tfds:tiny_inference", "train", **options)
  assert "no column 'body'" in message
  # Numbers are labels as in files.
  for value, text in ((np.float32(2.0), "2"), (np.int64(3), "3"), (np.float64(2.5), "2.5")):
    assert glue_files._tfds_label(REVIEWS, value, None) == text
