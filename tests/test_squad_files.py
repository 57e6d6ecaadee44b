"""Files of questions: SQuAD and MRQA read alike, repaired, counted and refused; predictions."""

import collections
import gzip
import json
import random

import numpy as np
import pytest
from test_squad import beam, make_windows, questions_of

from electra_jax.config import files
from electra_jax.core.task_network import HeadSpec
from electra_jax.finetune import qa_task, squad, squad_files
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.squad_files import Question, normalize
from electra_jax.finetune.task_data import TaskInfo

PARAGRAPH = {
  "context": "Berlin is the capital; Berlin is big.",
  "qas": [
    {"id": "a", "question": "What?", "answers": [{"text": "capital", "answer_start": 14}]},
    {"id": "b", "question": "Where?", "answers": [{"text": "Berlin", "answer_start": 23}]},
  ],
}
CAPITAL = {"text": "capital", "char_spans": [[14, 20]]}
BERLIN = {"text": "berlin", "char_spans": [[23, 28], [0, 5]]}
MRQA = {
  "context": "Berlin is the capital; Berlin is big.",
  "qas": [
    {"qid": "a", "question": "What?", "answers": ["capital"], "detected_answers": [CAPITAL]},
    {"qid": "b", "question": "Where?", "answers": ["Berlin"], "detected_answers": [BERLIN]},
  ],
}

LENGTHS = {"max_length": 512, "stride": 128, "max_query": 64}


def squad_file(folder, *paragraphs, name="squad.json"):
  path = folder / name
  path.write_text(json.dumps({"version": "x", "data": [{"title": "t", "paragraphs": paragraphs}]}))
  return path


def changed(**fields):
  """PARAGRAPH with its second question changed."""
  return {**PARAGRAPH, "qas": [PARAGRAPH["qas"][0], {**PARAGRAPH["qas"][1], **fields}]}


def test_squad_and_mrqa_files_say_the_same_plain_or_compressed(tmp_path):
  lines = "\n".join(map(json.dumps, [{"header": {"dataset": "x"}}, MRQA])) + "\n"
  (tmp_path / "mrqa.jsonl").write_text(lines)
  (tmp_path / "mrqa.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
  (tmp_path / "headless.jsonl").write_text(json.dumps(MRQA))
  pretty = json.dumps(json.loads(squad_file(tmp_path, PARAGRAPH).read_text()), indent=2)
  (tmp_path / "pretty.json.gz").write_bytes(gzip.compress(pretty.encode()))
  context = PARAGRAPH["context"]
  expected = (
    Question("a", "What?", context, (("capital", 14),), ("capital",), False),
    Question("b", "Where?", context, (("Berlin", 23),), ("Berlin",), False),
  )
  for file in ("squad.json", "pretty.json.gz"):
    found = squad_files.read(tmp_path / file)
    assert (found.form, found.items, found.labelled) == ("SQuAD 1.1", expected, True)
  for file in ("mrqa.jsonl", "mrqa.jsonl.gz", "headless.jsonl"):
    found = squad_files.read(tmp_path / file)
    assert (found.form, found.items, found.repaired) == ("MRQA", expected, 0)


def test_impossible_questions_make_it_squad_2(tmp_path):
  found = squad_files.read(squad_file(tmp_path, changed(is_impossible=True, answers=[])))
  assert found.form == "SQuAD 2.0"
  assert [q.impossible for q in found.items] == [False, True]
  assert "2 questions on 1 contexts, 1 impossible" in found.summary()


@pytest.mark.parametrize(
  ("weight", "threshold", "impossible", "warned"),
  [(0.0, -2.75, True, True), (0.0, 0.0, True, False), (0.5, -2.75, True, False)]
  + [(0.0, -2.75, False, False)],
)
def test_the_threshold_of_a_classifier_that_there_is_not_is_warned_of(
  tmp_path, words, weight, threshold, impossible, warned
):
  config = files.load("finetune/squad.py", "2.0")
  config.qa.update(answerable_weight=weight, threshold=threshold, joint=False)
  paragraph = changed(is_impossible=True, answers=[]) if impossible else PARAGRAPH
  config.data.train = config.data.dev = str(squad_file(tmp_path, paragraph))
  task = qa_task.KIND.prepare(config, "squad", words, 100)
  assert any("qa.threshold=-2.75 applies to BERT's null" in note for note in task.notes) == warned


def test_where_all_training_questions_have_answers_none_is_withheld(tmp_path, words):
  # GermanQuAD: ids are numbers, and every question says that it is not impossible.
  qas = [{**qa, "id": i, "is_impossible": False} for i, qa in enumerate(PARAGRAPH["qas"])]
  withheld = changed(answers=[], is_impossible=True)
  for paragraph, impossible in ((PARAGRAPH | {"qas": qas}, False), (withheld, True)):
    config = files.load("finetune/squad.py", "2.0")
    config.qa.threshold = -2.75
    config.data.train = config.data.dev = str(squad_file(tmp_path, paragraph))
    found = squad_files.read(config.data.dev)
    assert found.form == "SQuAD 2.0" and {type(q.id) for q in found.items} == {str}
    info = qa_task.KIND.prepare(config, "squad", words, 100).info
    assert info.options["impossible"] == impossible
    scores = np.array([[1, 1, 1, -1, 1], [1, 1, 1, -4, 1.0]])  # right, at two odds of no answer
    assert qa_task.KIND.metrics(info)(scores)["exact"] == (50 if impossible else 100)


@pytest.mark.parametrize("answers", [{}, {"answers": []}])
def test_a_file_to_predict_has_no_lists_or_empty_ones(tmp_path, answers):
  paragraph = {"context": "Berlin.", "qas": [{"id": "a", "question": "Where?", **answers}]}
  path = squad_file(tmp_path, paragraph)
  found = squad_files.read(path)
  assert (found.form, found.labelled, found.items[0].impossible) == ("SQuAD 1.1", False, False)
  path.write_text(path.read_text().replace('"version": "x"', '"version": "v2.0"'))
  found = squad_files.read(path)
  assert (found.form, found.labelled) == ("SQuAD 2.0", False)
  mrqa = {"context": "Berlin.", "qas": [{"qid": "a", "question": "Where?", **answers}]}
  (tmp_path / "mrqa.jsonl").write_text(json.dumps(mrqa))
  assert not squad_files.read(tmp_path / "mrqa.jsonl").labelled


def test_questions_without_answers_are_read_but_neither_trained_on_nor_scored(tmp_path, words):
  paragraph = {"context": "Berlin.", "qas": [{"id": "a", "question": "Where?"}]}
  found = squad_files.read(squad_file(tmp_path, paragraph))
  assert not found.labelled and not found.items[0].impossible
  made = squad.windows(found, words, **LENGTHS, train=False)
  assert len(made) == 1 and list(made[0].feature.target) == ["allowed"]
  with pytest.raises(TaskError, match="unlabelled questions: train on a labelled file"):
    squad.windows(found, words, **LENGTHS, train=True)
  with pytest.raises(TaskError, match="unlabelled questions: score a labelled file"):
    squad.example_scores(found, squad.Decoded({"a": "Berlin"}, {}, {}))


def test_an_answer_at_the_wrong_place_is_moved_to_the_nearest_occurrence(tmp_path):
  places = [("Berlin ", 20), ("Berlin", 2), ("big.", -4), ("is the", 99)]
  answers = [{"text": text, "answer_start": start} for text, start in places]
  found = squad_files.read(squad_file(tmp_path, changed(answers=answers)))
  assert found.items[1].answers == (("Berlin", 23), ("Berlin", 0), ("big.", 33), ("is the", 7))
  assert (found.repaired, found.lost) == (4, 0)
  assert found.items[1].golds == ("Berlin ", "Berlin", "big.", "is the")


def test_answers_that_are_nowhere_are_counted_and_stop_training_above_one_percent(tmp_path, words):
  def paragraph(good):
    qas = [{**PARAGRAPH["qas"][0], "id": str(i)} for i in range(good)]
    bad = {"id": "z", "question": "?", "answers": [{"text": "Rome", "answer_start": 0}]}
    return {"context": PARAGRAPH["context"], "qas": [*qas, bad]}

  found = squad_files.read(squad_file(tmp_path, paragraph(99)))
  assert found.lost == 1 and found.items[-1].answers == () and found.items[-1].golds == ("Rome",)
  assert squad_files.read(squad_file(tmp_path, paragraph(98))).lost == 1  # to predict or to score
  config = files.load("finetune/squad.py", "1.1")
  config.data.train = config.data.dev = str(squad_file(tmp_path, paragraph(98)))
  with pytest.raises(TaskError, match="1 of 99 questions have no answer .* more than 1%"):
    qa_task.KIND.prepare(config, "squad", words, 100)


def test_blank_texts_and_repeated_ids_are_counted(tmp_path, words):
  repeated = changed(id="a")
  blank = {"context": " ", "qas": [{"id": "c", "question": "", "answers": []}]}
  found = squad_files.read(squad_file(tmp_path, repeated, blank))
  assert [q.id for q in found.items] == ["a", "c"]
  assert (found.duplicates, found.empty) == (1, 1)
  # A blank context still has a row, so that the question gets a prediction.
  row = squad.windows(found, words, **LENGTHS, train=False)[1]
  assert row.feature.ids.tolist() == [2, 3, 3] and row.feature.second == 2


def test_characters_that_utf_8_cannot_hold_do_not_reach_the_tokenizer(tmp_path, words):
  paragraph = {"context": "Berlin \ud83d.", "qas": [{"id": "\udc00", "question": "a\ud83d?"}]}
  found = squad_files.read(squad_file(tmp_path, paragraph))
  assert found.items[0].context == "Berlin \ufffd." and found.items[0].id == "\ufffd"
  assert squad.windows(found, words, **LENGTHS, train=False)


BAD = {
  "empty": b"",
  "half": b'{"data": [',
  "other": b'{"rows": []}',
  "list": b"[1, 2]",
  "nothing": b'{"data": []}',
  "bytes": b'\xff\xfe{"data": []}',
  "gzip": gzip.compress(b'{"data": []}')[:-9],
  "article": b'{"data": [3]}',
  "context": b'{"data": [{"paragraphs": [{"qas": []}]}]}',
  "start": b'{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": "1", "question": "b",'
  b' "answers": [{"text": "a", "answer_start": "0"}]}]}]}]}',
  "line": b'{"header": 1}\n{"context": "a", "qas"',
  "span": b'{"context": "a", "qas": [{"qid": "1", "question": "b", "detected_answers":'
  b' [{"text": "a", "char_spans": [[0]]}]}]}',
  "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", BAD)
def test_an_unusable_file_is_an_error_of_one_line_with_its_name(tmp_path, name):
  path = tmp_path / "file.json"
  path.write_bytes(BAD[name])
  with pytest.raises(TaskError) as caught:
    squad_files.read(path)
  assert "file.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_or_a_folder_is_an_error(tmp_path):
  with pytest.raises(TaskError, match="none.json: no such file"):
    squad_files.read(tmp_path / "none.json")
  with pytest.raises(TaskError, match="cannot be read"):
    squad_files.read(tmp_path)


def test_a_wrong_line_of_mrqa_is_named_by_its_number(tmp_path):
  (tmp_path / "x.jsonl").write_text('{"header": 1}\n' + json.dumps(MRQA) + "\n{oh\n")
  with pytest.raises(TaskError, match=r"x.jsonl:3 is not JSON"):
    squad_files.read(tmp_path / "x.jsonl")


# Files of predictions.


def info_of(**options) -> TaskInfo:
  return TaskInfo("qa", "squad", HeadSpec("qa", {}), 100, options=options)


def official(dataset, predictions, odds, threshold):
  """The rules of SQuAD's evaluate-v2.0.py, with --na-prob-file and --na-prob-thresh.

  Returns its exact, f1, best_exact and best_f1, with their thresholds.
  """

  def f1(gold, predicted):
    golds, words = normalize(gold).split(), normalize(predicted).split()
    same = sum((collections.Counter(golds) & collections.Counter(words)).values())
    if not golds or not words:
      return float(golds == words)
    precision, recall = same / len(words), same / len(golds)
    return 2 * precision * recall / (precision + recall) if same else 0.0

  qas = [qa for article in dataset["data"] for p in article["paragraphs"] for qa in p["qas"]]
  found = {}
  for name, score in (("exact", lambda a, b: float(normalize(a) == normalize(b))), ("f1", f1)):
    raw = {}
    for qa in qas:
      golds = [a["text"] for a in qa["answers"] if normalize(a["text"])] or [""]
      raw[qa["id"]] = max(score(gold, predictions[qa["id"]]) for gold in golds)
    has = {qa["id"]: bool(qa["answers"]) for qa in qas}
    kept = {i: float(not has[i]) if odds[i] > threshold else raw[i] for i in raw}
    found[name] = 100 * sum(kept.values()) / len(kept)
    now = best = sum(not x for x in has.values())
    best_threshold = 0.0
    for i in sorted(odds, key=odds.get):
      now += raw[i] if has[i] else -1 if predictions[i] else 0
      if now > best:
        best, best_threshold = now, odds[i]
    found[f"best_{name}"] = 100 * best / len(raw)
    found[f"best_{name}_thresh"] = best_threshold
  return found


# The best thresholds are about -4.4 and -3.5: below the first of these, above the second.
@pytest.mark.parametrize("threshold", [-2.75, -5.0, np.inf])
def test_reported_scores_are_those_of_the_official_rules_on_the_files_written(
  words, tmp_path, threshold
):
  impossible = threshold < np.inf
  rng = random.Random(3)
  qas = []
  for i in range(60):
    text = " ".join(rng.choices("b c d e f".split(), k=2))
    answers = [{"text": text, "answer_start": 0}] if rng.random() < 0.6 else []
    qas.append((text + " g h i j", {"id": f"q{i}", "question": "a", "answers": answers}))
    qas[-1][1]["is_impossible"] = not answers
  dataset = {"data": [{"paragraphs": [{"context": c, "qas": [qa]} for c, qa in qas]}]}
  (tmp_path / "dev.json").write_text(json.dumps(dataset))
  found = squad_files.read(tmp_path / "dev.json")
  made = make_windows(found, words, train=False)
  spans = [(start, min(start + rng.randint(0, 2), 8), -1) for start in rng.choices((3, 4), k=60)]
  parts = [beam(span) for span in spans]
  outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
  outputs["null"] = np.array([rng.gauss(-2, 2) for _ in qas], np.float32)
  lengths = {"stride": 64, "max_query": 64, "n_best": 20, "max_answer_length": 30}
  options = {**lengths, "threshold": threshold, "impossible": impossible}
  info = info_of(**options)
  decoded = qa_task.KIND.decode(info, found, made, outputs)
  reported = qa_task.KIND.metrics(info)(qa_task.KIND.scores(info, found, decoded))
  qa_task.KIND.write(info, tmp_path / "dev", found, decoded)
  predicted, odds, raw = (
    json.loads((tmp_path / "dev" / f"{name}.json").read_text())
    for name in ("predictions", "null_odds", "raw_predictions" if impossible else "predictions")
  )
  # The final predictions need no odds; the best thresholds are of what is predicted without one.
  for name, value in official(dataset, predicted, odds, np.inf).items():
    assert name.startswith("best") or reported[name] == pytest.approx(value, rel=1e-12), name
  for name, value in official(dataset, raw, odds, threshold).items():
    assert reported[name] == pytest.approx(value, rel=1e-12), name
  assert reported["best_exact"] > reported["exact"] > 0


def test_an_answer_to_every_question_is_written_where_all_have_one(words, tmp_path):
  found = questions_of(("b c d", "a", ["b"]))
  made = make_windows(found, words, train=False)
  info = info_of(n_best=1, max_answer_length=9, threshold=-2.75, impossible=True)
  decoded = qa_task.KIND.decode(info, found, made, beam((3, 3, -1)))  # null odds of 0
  qa_task.KIND.write(info, tmp_path / "dev", found, decoded)
  assert json.loads((tmp_path / "dev" / "predictions.json").read_text()) == {"q0": "b"}
  scores = qa_task.KIND.scores(info, found, decoded)
  assert qa_task.KIND.metrics(info)(scores)["exact_match"] == 100


def test_a_question_model_that_never_answers_has_collapsed():
  for impossible, null, collapsed in ((True, 0, True), (True, -3, False), (False, 0, False)):
    info = info_of(threshold=-2.75, impossible=impossible)
    right = np.array([[1, 1, 1, null, 1], [0, 0, 0, 9, 1]], float)
    assert qa_task._collapsed(info, right) == collapsed
  assert qa_task._collapsed(info, np.array([[0, 0, 1, -9, 0], [1, 1, 0, -9, 0]], float))
  assert not qa_task._collapsed(info, np.array([[1, 1, 0, 9, 1.0]]))  # none has an answer
  assert qa_task._collapsed(info, np.zeros((3, 2)))
