"""Data of one's own: formats read alike, one file is split by its texts, training may stop."""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import re

import numpy as np
import pytest
import zstandard
from conftest import parse_fields
from rich.console import Console
from test_finetune import CFG, both, make_config, refused, run, sentence, source  # noqa: F401

from electra_jax.data import tokenizer
from electra_jax.finetune import (
  files,
  glue_files,
  loop,
  model,
  prepare,
  results,
  squad_files,
  statistics,
  tagging,
  task_data,
  tasks,
)
from electra_jax.finetune import train as program
from electra_jax.finetune.files import TaskError

COMPRESS = {
  "": bytes,
  ".gz": gzip.compress,
  ".xz": lzma.compress,
  ".zst": zstandard.compress,
  ".bz2": bz2.compress,
}
ROWS = [
  {"text": "a, b; c", "label": "x"},
  {"text": 'said "no"', "label": "y"},
  {"text": "ä", "label": "x"},
]


def write(path, rows: list[dict]):
  """Writes rows as pandas and pyarrow would, in the format and compression of the name."""
  form, name = files.form_of(path), str(path)
  if form == ".parquet":
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), written)
    data = written.getvalue()
  elif form == ".jsonl":
    data = "\n\n".join(json.dumps(row) for row in rows).encode()
  elif form == ".txt":
    data = "\r\n".join([*(row["text"] for row in rows), ""]).encode()
  else:
    text = io.StringIO(newline="")
    mark = "\t" if form == ".tsv" else ";" if "semicolons" in name else ","
    writer = csv.writer(text, delimiter=mark)
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    data = ("\ufeff" + text.getvalue()).encode()
  end = next((end for end in COMPRESS if end and name.endswith(end)), "")
  path.write_bytes(COMPRESS[end](data))
  return path


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("name", ["a.csv", "semicolons.csv", "a.tsv", "a.JSONL", "a.parquet"])
def test_the_same_rows_are_read_from_every_format(tmp_path, name, end):
  path = write(tmp_path / f"{name}{end}", ROWS)
  (_, columns), *rows = files.read_rows(path)
  assert columns == ["text", "label"] and [row for _, row in rows] == ROWS
  assert all(place.startswith(f"{path}:") for place, _ in rows)


@pytest.mark.parametrize("end", COMPRESS)
def test_lines_of_text_are_predicted_as_the_column_of_the_task(tmp_path, end):
  path = write(tmp_path / f"new.txt{end}", [*ROWS, {"text": ""}])
  task = tasks.own("mine", text="body", label="stars")
  found, _ = glue_files.read_texts(task, path)
  assert [example.text for example in found] == [*(row["text"] for row in ROWS), ""]
  with pytest.raises(TaskError, match=r"new.txt\S* has no column 'other' \(columns: body\)"):
    glue_files.read_texts(tasks.own("mine", text="body", pair="other", label="stars"), path)


def test_a_text_above_the_limit_of_pythons_reader_is_read(tmp_path):
  path = write(tmp_path / "long.csv", [{"text": "a " * 99_999, "label": "x"}])
  assert len([*files.read_rows(path)][1][1]["text"]) == 199_998


@pytest.mark.parametrize(
  ("name", "content", "why"),
  [
    ("a.csv", "Text,label\nx,a\n", r"a.csv:1 has no column 'text' .*; did you mean 'Text'\?$"),
    ("a.csv", "body,label\nx,a\n", r"a.csv:1 has no column 'text' \(columns: body, label\)$"),
    ("a.parquet", "PAR1", "a.parquet: cannot be read as parquet"),
    ("a.csv.bz2", "text,label\n", "a.csv.bz2: cannot be read"),
    ("a.txt", "one\n", r"a.txt has no column 'label' \(columns: text\)"),
  ],
)
def test_a_file_that_lacks_what_a_task_needs_is_refused(source, tmp_path, name, content, why):  # noqa: F811
  (tmp_path / name).write_text(content)
  config = make_config("own", "x", source, data__train=str(tmp_path / name), own__split=0.5)
  refused(config, tmp_path / "results", why)
  assert not list((tmp_path / "results").glob("*/*"))


# Where the dev split is.


@pytest.mark.parametrize("name", ["dev.csv", "validation.parquet", "val.jsonl.gz"])
def test_the_dev_split_has_any_of_its_names_and_only_one(tmp_path, name):
  task = tasks.own("mine", text="text", label="label")
  path = write(tmp_path / name, ROWS)
  assert glue_files.find_split(task, tmp_path, "dev") == path
  write(tmp_path / "dev.tsv", ROWS)
  with pytest.raises(TaskError, match="keep .* or .* for the split 'dev'"):
    glue_files.find_split(task, tmp_path, "dev")
  write(tmp_path / "validation_matched.tsv", ROWS)
  found = glue_files.find_split(tasks.TASKS["mnli"], tmp_path, "dev_matched")
  assert found.name == "validation_matched.tsv"


@pytest.mark.parametrize(
  ("name", "split"),
  [
    ("validation.json", "dev"),
    ("validation-00000-of-00001.parquet", "dev"),
    ("Val.CSV", "dev"),
    ("test.txt", "test"),
    ("test-00000-of-00001.jsonl.gz", "test"),
  ],
)
def test_the_files_of_a_folder_have_the_names_of_datasets(tmp_path, name, split):
  task = tasks.own("mine", text="text", label="label")
  (tmp_path / name).touch()
  assert glue_files.find_split(task, tmp_path, split).name == name
  (tmp_path / "dev.txt").touch()  # lines have no label
  assert glue_files.find_split(task, tmp_path, split).name == name


def config_of(kind: str, **fields):
  own = {name.replace("__", "."): value for name, value in fields.items()}
  config = make_config(kind, "x", "nowhere")
  config.update_from_flattened_dict(own)
  return config


def test_the_parts_of_a_file_depend_on_each_text_alone_and_are_as_large_as_asked():
  texts = [f"text {i}" for i in range(4000)]
  parts = task_data.find_parts(config_of("own", data__train="a.csv", own__split=0.1))
  held = {text for text in texts if parts["dev"].holds(text)}
  assert held == {text for text in texts if not parts["train"].holds(text)}
  # 4000 draws of a tenth have a standard deviation of 19.
  assert abs(len(held) - 400) < 4 * 19
  assert all(parts["dev"].holds(f" {text}\n") for text in held)  # as it is tokenized
  hashed = {text: int(hashlib.sha256(text.encode()).hexdigest(), 16) for text in texts}
  assert held == {text for text in texts if hashed[text] / 2**256 < 0.1}  # on every machine
  folds = [
    task_data.find_parts(config_of("own", data__train="a.csv", own__folds=3, own__fold=i))
    for i in range(3)
  ]
  for text in texts:
    assert sum(fold["dev"].holds(text) for fold in folds) == 1
    assert sum(fold["train"].holds(text) for fold in folds) == 2


@pytest.mark.parametrize(
  ("fields", "why"),
  [
    ("own.folds=1", "config.own.folds must be at least 2"),
    ("own.folds=3 own.fold=3", "above own.fold.*: got 3, 3 and 0.0"),
    ("own.folds=3 own.split=0.1", "not combined with own.split"),
    ("own.split=1.0", "own.split must be at least 0 and below 1"),
    ("own.split=0.1 data.dev=a.csv", "config.data.dev=a.csv cannot be combined with own.split"),
    ("own.split=1e-9", "the split 'dev' in .* has no rows"),
    ("data.train=None own.split=0.1", "one training file and no dev file, .* has a.csv, b.csv"),
    ("eval.every_steps=3", "eval.every_steps needs config.train.patience"),
    ("train.patience=0", "train.patience must be above 0"),
  ],
)
def test_what_does_not_divide_a_file_is_refused(source, tmp_path, fields, why):  # noqa: F811
  for name in "ab":
    write(tmp_path / f"{name}.csv", ROWS)
  where = {"data__train": str(tmp_path / "a.csv"), "data__dir": str(tmp_path)}
  config = make_config("own", "x", source, **where)
  config.update_from_flattened_dict(parse_fields(fields))
  refused(config, tmp_path / "results", why)


def test_a_task_of_glue_has_its_own_files(source, tmp_path):  # noqa: F811
  config = make_config("glue", "cola", source, data__dir=str(tmp_path), own__split=0.1)
  refused(config, tmp_path / "results", "own.split and own.folds need own.text")


def labelled(n: int) -> list[dict]:
  """Rows whose label is their first word; every fourth text is there twice."""
  rows = [{"text": " ".join([f"w{i % 2}", *sentence()]), "label": f"is{i % 2}"} for i in range(n)]
  return [*rows, *rows[::4]]


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("kind", ["own", "pairs", "tagging", "squad"])
def test_every_kind_of_task_divides_its_one_file(source, tmp_path, kind, form):  # noqa: F811
  rows = [row | {"n": f"{i}"} for i, row in enumerate(labelled(40))]
  path, key = write(tmp_path / f"all.{form}", rows), "text"
  if kind == "tagging":
    key, path = "words", tmp_path / f"all.{'jsonl' if form == 'csv' else form}"
    rows = [{"id": i, "words": r["text"].split(), "tags": ["B-A"] * 7} for i, r in enumerate(rows)]
    rows[0]["tags"] = ["O"] * 7
  elif kind == "squad":
    key, path = "context", tmp_path / f"all.{'jsonl' if form == 'csv' else form}"
    answers = {"text": ["w1"], "answer_start": [0]}
    rows = [{"context": f"w1 {r['text']}", "question": "w0", "answers": answers} for r in rows]
  write(path, rows)
  fields = {"own__split": 0.3, "pairs__train_columns": "text,n", "pairs__dev_columns": "text,n"}
  config = make_config(kind, "x", source, data__train=str(path), qa__max_query=8, **fields)
  task = prepare.prepare(config, "x", tokenizer.load(source / "vocab.txt"), CFG)
  texts = [" ".join(x) if isinstance(x := row[key], list) else x for row in rows]
  held = [text for text in texts if task_data.share(text) < 0.3]
  dev = task.splits["dev"].examples
  found = {
    "own": lambda: [example.text for example in dev],
    "pairs": lambda: [dev.texts[first] for first, _ in dev.rows],
    "tagging": lambda: [" ".join(s.words) for s in dev],
    "squad": lambda: [question.context for question in dev.items],
  }[kind]()
  assert found == held and 0 < len(held) < 25
  assert len(task.train) == len(rows) - len(held)


def test_words_and_questions_of_rows_are_those_of_the_published_formats(tmp_path):
  (tmp_path / "a.conll").write_text("He O\nleft B-V\n\nGo B-V\n")
  rows = [{"words": ["He", "left"], "tags": ["O", "B-V"]}, {"words": ["Go"], "tags": ["B-V"]}]
  expected = [s._replace(place="") for s in tagging.read(tmp_path / "a.conll")]
  for name in ("a.parquet", "a.jsonl.gz"):
    found = tagging.read(write(tmp_path / name, rows))
    assert [s._replace(place="") for s in found] == expected
  with pytest.raises(TaskError, match="b.jsonl:1: lists of 2 and 1 elements"):
    tagging.read(write(tmp_path / "b.jsonl", [{"words": ["He", "left"], "tags": ["O"]}]))

  qas = [
    {"id": "1", "question": "Who?", "is_impossible": False,
     "answers": [{"text": "He", "answer_start": 0}]},
    {"id": "2", "question": "Why?", "is_impossible": True, "answers": []},
  ]  # fmt: skip
  whole = {"version": "v2.0", "data": [{"paragraphs": [{"context": "He left.", "qas": qas}]}]}
  (tmp_path / "squad.json").write_text(json.dumps(whole))
  flat = [
    {
      "id": qa["id"],
      "question": qa["question"],
      "context": "He left.",
      "answers": {name: [x[name] for x in qa["answers"]] for name in ("text", "answer_start")},
    }
    for qa in qas
  ]
  for name in ("q.parquet", "q.jsonl.xz"):
    found = squad_files.read(write(tmp_path / name, flat))
    assert found.items == squad_files.read(tmp_path / "squad.json").items
    assert found.form == "SQuAD 2.0" and found.labelled
  without = [{key: row[key] for key in ("question", "context")} for row in flat]
  assert not squad_files.read(write(tmp_path / "new.jsonl", without)).labelled
  flat[0]["answers"]["text"] = []
  with pytest.raises(TaskError, match="odd.jsonl:1: 0 texts but 1 answer starts"):
    squad_files.read(write(tmp_path / "odd.jsonl", flat))


# Folds.


@pytest.fixture(scope="module")
def folds(source, tmp_path_factory):  # noqa: F811
  folder = tmp_path_factory.mktemp("folds")
  rows = labelled(60)
  path = write(folder / "all.csv", rows)
  fields = {"data__train": str(path), "own__folds": 3, "train__epochs": 2.0}
  config = make_config("own", "x", source, **fields)
  return config, folder, rows, run(config, folder / "results")


def test_each_row_is_measured_once_by_networks_that_have_not_seen_it(folds, tmp_path):
  config, folder, rows, found = folds
  assert [(r["fold"], r["seed"]) for r in found] == [(i, j) for i in range(3) for j in range(2)]
  content, scores = results.read_task(folder / "results" / "x")
  golds = np.concatenate(
    [
      [int(r["label"][2:]) for r in rows if int(3 * task_data.share(r["text"])) == i]
      for i in range(3)
    ]
  )
  assert scores["dev"].shape == (2, len(rows), 2)
  np.testing.assert_array_equal(scores["dev"][:, :, 0], [golds, golds])
  assert content["config"]["own"]["fold"] is None
  asked = model.load(folder / "results" / "x" / "fold1")
  dev = [r for r in rows if int(3 * task_data.share(r["text"])) == 1]
  right = [
    a["label"] == r["label"] for a, r in zip(asked([r["text"] for r in dev]), dev, strict=True)
  ]
  best = max(r["metrics"]["accuracy"] for r in found if r["fold"] == 1)
  assert 100 * np.mean(right) == pytest.approx(best)
  with pytest.raises(ValueError, match="holds 3 fine-tuned networks: name one of .*fold0/model"):
    model.load(folder / "results")
  assert run(config, folder / "results") == found  # finished
  results.compare(folder / "results", folder / "results", Console(quiet=True), samples=10)


def test_texts_of_any_format_are_predicted_alike(folds, tmp_path):
  _, folder, rows, _ = folds
  asked, found = model.load(folder / "results" / "x" / "fold0"), set()
  for name in ("new.csv", "new.tsv.bz2", "new.jsonl", "new.parquet", "new.txt"):
    out = tmp_path / f"{name}.tsv"
    asked.predict_file(write(tmp_path / name, rows), out)
    found.add(out.read_text())
  (text,) = found
  probabilities = [line.split("\t")[2] for line in text.splitlines()[1:]]
  assert len(probabilities) == len(rows) and len(set(probabilities)) > len(rows) // 2


def test_a_fold_alone_is_what_it_is_among_all(folds, tmp_path):
  config, _, _, found = folds
  one = config.copy_and_resolve_references()
  one.own.fold = 2
  assert run(one, tmp_path / "one") == [row for row in found if row["fold"] == 2]


def test_the_deviation_is_over_folds_of_means_over_seeds():
  values = {(0, 0): 60.0, (0, 1): 70.0, (1, 0): 80.0, (1, 1): 90.0}
  rows = [
    {"task": "x", "split": "dev", "fold": fold, "seed": seed, "metrics": {"f1": value},
     "collapsed": value == 60.0}
    for (fold, seed), value in values.items()
  ]  # fmt: skip
  (group,) = statistics.grouped(rows).values()
  assert {fold: row["metrics"]["f1"] for fold, row in group.items()} == {0: 65.0, 1: 85.0}
  assert [row["collapsed"] for row in group.values()] == [True, False]
  console = Console(record=True, width=120, file=io.StringIO())
  console.print(statistics.table(rows))
  text = console.export_text()
  assert "fold 0 1" in text
  assert "75.00 │ 14.14 │ 65.00* 85.00" in text  # 20 / sqrt(2)


# Stopping.


def test_a_seed_ends_by_its_own_evaluations_and_keeps_its_best_weights():
  scores = iter([(1, 5), (3, 4), (2, 4), (2, 9), (9, 9)])
  best, ended = loop.Best(lambda step, weights: next(scores), patience=2), []
  for step in range(1, 5):
    weights = {"w": np.full((2, 3), step, np.float32) * np.array([[1], [10]])}
    ended.append(best(10 * step, weights))
  # The second seed had ended after two evaluations below 5: its 9 does not count.
  assert ended == [False, False, False, True]
  assert best.steps.tolist() == [20, 10]
  np.testing.assert_array_equal(best.weights["w"], [[2] * 3, [10] * 3])


@pytest.fixture(scope="module")
def stopped(source, tmp_path_factory):  # noqa: F811
  """A run that is too fast to stay good, what it printed, and its fields."""
  folder = tmp_path_factory.mktemp("stopped")
  write(folder / "train.csv", labelled(48))
  rows = labelled(60)
  for row in rows[::5]:  # some labels are wrong: the score goes up and down
    row["label"] = "is0"
  write(folder / "dev.csv", rows)
  fields = {**both(folder, "csv"), "train__epochs": 30.0, "eval__every_steps": 2, "keep": "all"}
  config = make_config("own", "x", source, train__patience=3, **fields)
  console = Console(record=True, width=200, file=io.StringIO())
  program.fine_tune(config, folder / "results", console)
  return config, folder, rows, console.export_text()


def evaluations(text: str) -> dict[int, list[float]]:
  """Returns the printed scores of each seed after each evaluated step."""
  found = re.findall(r"step (\d+) \| dev accuracy ([\d. ]+)", text)
  return {int(step): [float(x) for x in values.split()] for step, values in found}


def test_the_network_that_is_kept_is_that_of_the_best_evaluation(stopped):
  _, folder, rows, text = stopped
  history, saved = evaluations(text), results.read_results(folder / "results")
  assert list(history) == list(range(2, max(history) + 1, 2))
  stops = []
  for row in saved:
    values = [scores[row["seed"]] for scores in history.values()]
    stop = next(
      i for i in range(3, len(values)) if max(values[i - 2 : i + 1]) <= max(values[: i - 2])
    )
    best = int(np.argmax(values[: stop + 1]))
    stops.append(stop)
    assert row["step"] == 2 * (best + 1)
    assert row["metrics"]["accuracy"] == pytest.approx(values[best], abs=0.005)  # as printed
    asked = model.load(folder / "results" / "x" / f"model-seed{row['seed']}")
    answers = asked([r["text"] for r in rows])
    right = np.mean([a["label"] == r["label"] for a, r in zip(answers, rows, strict=True)])
    assert 100 * right == pytest.approx(row["metrics"]["accuracy"])
  assert len(history) == max(stops) + 1 and max(history) < 240  # the last seed's end is the run's


@pytest.mark.long
def test_a_seed_stops_alone_where_it_stops_among_others(stopped, tmp_path):
  config, folder, _, text = stopped
  one = config.copy_and_resolve_references()
  one.seed, one.seeds = 1, 1
  (row,) = run(one, tmp_path / "one")
  assert row == next(r for r in results.read_results(folder / "results") if r["seed"] == 1)


def test_patience_changes_nothing_but_the_end_and_which_weights_are_kept(stopped, tmp_path):
  """The last evaluation of a run is of what the run without patience returns."""
  config, _, _, _ = stopped
  last = config.copy_and_resolve_references()
  last.train.epochs, last.train.patience, last.eval.every_steps = 1.0, None, None
  plain = run(last, tmp_path / "plain")
  assert all("step" not in row for row in plain)
  last.train.patience = 99
  console = Console(record=True, width=200, file=io.StringIO())
  program.fine_tune(last, tmp_path / "best", console)
  (scores,) = evaluations(console.export_text()).values()
  assert scores == pytest.approx([r["metrics"]["accuracy"] for r in plain], abs=0.005)
