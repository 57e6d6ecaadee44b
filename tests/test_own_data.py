"""Data of one's own: formats read alike, one file is split by its texts, training may stop."""

import bz2
import csv
import gzip
import io
import json
import lzma
import re

import numpy as np
import pytest
import zstandard
from rich.console import Console
from test_finetune import CFG, both, make_config, refused, run, sentence, source  # noqa: F401

from electra_jax.finetune import (
  files,
  glue_files,
  loop,
  model,
  results,
  squad_files,
  tagging,
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


# Where the dev split is.


@pytest.mark.parametrize("name", ["dev.csv", "validation.parquet", "val.jsonl.gz"])
def test_the_dev_split_has_any_of_its_names_and_only_one(tmp_path, name):
  task = tasks.own("mine", text="text", label="label")
  path = write(tmp_path / name, ROWS)
  assert glue_files.find_split(task, tmp_path, "dev") == path
  write(tmp_path / "dev.tsv", ROWS)
  with pytest.raises(TaskError, match="are both the split 'dev'"):
    glue_files.find_split(task, tmp_path, "dev")
  write(tmp_path / "validation_matched.tsv", ROWS)
  found = glue_files.find_split(tasks.TASKS["mnli"], tmp_path, "dev_matched")
  assert found.name == "validation_matched.tsv"


def labelled(n: int) -> list[dict]:
  """Rows whose label is their first word; every fourth text is there twice."""
  rows = [{"text": " ".join([f"w{i % 2}", *sentence()]), "label": f"is{i % 2}"} for i in range(n)]
  return [*rows, *rows[::4]]


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
  with pytest.raises(TaskError, match="odd.jsonl:1: 0 answers at 1 places"):
    squad_files.read(write(tmp_path / "odd.jsonl", flat))


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
  fields["data__dir"] = str(folder)
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
