"""Data of one's own: formats read alike."""

import bz2
import csv
import gzip
import io
import json
import lzma

import pytest
import zstandard
from test_finetune import CFG, both, make_config, refused, run, sentence, source  # noqa: F401

from electra_jax.finetune import files, glue_files, squad_files, tagging, tasks
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
