"""The fine-tuning program: from files to results, what it keeps, and what it refuses."""

import contextlib
import csv
import dataclasses
import io
import json
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import parse_fields
from rich.console import Console

from electra_jax.config import files
from electra_jax.core import task_network
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data import tokenizer
from electra_jax.export import writer
from electra_jax.finetune import from_config, model, prepare, results
from electra_jax.finetune import train as program
from electra_jax.interop import sources
from electra_jax.interop.sources import Network, Source
from electra_jax.interop.weights import network_shapes
from electra_jax.runtime import workdir

CFG = TransformerConfig(60, 8, 16, 2, 2, 32, 32, init_stddev=0.2)
WORDS = [f"w{i}" for i in range(30)]
RNG = random.Random(0)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
  """An orbax export of a random discriminator with a vocabulary of its own."""
  folder = tmp_path_factory.mktemp("source")
  pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghij", *"0123456789"]
  (folder / "vocab.txt").write_text("".join(f"{p}\n" for p in [*pieces, ".", ",", "?", "x", "y"]))
  words = tokenizer.load(folder / "vocab.txt")
  assert words.vocab.size == CFG.vocab_size
  backbone = jax.jit(lambda: task_network.init_backbone(CFG, jax.random.key(0)))()
  rng = np.random.default_rng(0)
  head = network_shapes(CFG, "rtd_head")["rtd_head"]
  head = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), head)
  weights = {**jax.tree.map(np.asarray, backbone), "rtd_head": head}
  with workdir.new_folder(folder / "export") as target:
    network = Network(CFG, weights, "rtd_head")
    sources.save_orbax(target, Source({"discriminator": network}, words, {}))
  return folder / "export"


def sentence(n: int = 6) -> list[str]:
  return RNG.choices(WORDS[2:], k=n)


def write_glue(folder: Path) -> Path:
  """CoLA: whether a word of two occurs. RTE: which of two words does."""
  (folder / "CoLA").mkdir(parents=True)
  (folder / "RTE").mkdir()
  for split, n in (("train", 64), ("dev", 25), ("test", 5)):
    cola, rte = [], []
    for i in range(n):
      text, label = sentence(RNG.randint(3, 9)), i % 2
      text[0] = WORDS[label]
      hidden = split == "test"
      cola.append(f"{i}\t{' '.join(text)}" if hidden else f"x\t{label}\t\t{' '.join(text)}")
      kind = "" if hidden else "\t" + ("entailment", "not_entailment")[label]
      rte.append(f"{i}\t{' '.join(sentence())}\t{' '.join(text)}{kind}")
    header = ["index\tsentence"] if split == "test" else []
    (folder / "CoLA" / f"{split}.tsv").write_text("\n".join([*header, *cola]) + "\n")
    header = "index\tsentence1\tsentence2" + ("" if split == "test" else "\tlabel")
    (folder / "RTE" / f"{split}.tsv").write_text("\n".join([header, *rte]) + "\n")
  return folder


def make_config(file: str, arg: str | None, source: Path, **fields):
  config = files.load(f"finetune/{file}.py", arg)
  small = parse_fields(
    "seeds=2 data.max_length=32 data.buckets=1 model.dropout=0.0 model.attention_dropout=0.0"
    " optimizer.name=adamw optimizer.learning_rate=1e-2 optimizer.layer_decay=1.0"
    " train.batch_size=8 train.epochs=6.0 eval.batch_size=8 log.every_steps=8"
  )
  own = {name.replace("__", "."): value for name, value in fields.items()}
  config.update_from_flattened_dict({"init": str(source), **small, **own})
  return config


def refused(config, workdir: Path, why: str) -> None:
  """Asserts that a configuration is refused in one line."""
  with pytest.raises(ValueError, match=why) as error:
    program.fine_tune(config, workdir, Console(quiet=True))
  assert "\n" not in str(error.value)


def both(folder: Path, ending: str) -> dict:
  """Returns the fields of a training and a development file in a folder."""
  return {f"data__{split}": str(folder / f"{split}.{ending}") for split in ("train", "dev")}


def run(config, workdir: Path) -> list[dict]:
  program.fine_tune(config, workdir, Console(quiet=True))
  return results.read_results(workdir)


@pytest.fixture(scope="module")
def cola(source, tmp_path_factory) -> tuple[Path, Path, list[dict]]:
  """Folders of GLUE and of the results of CoLA, and these."""
  folder = tmp_path_factory.mktemp("cola")
  glue = write_glue(folder / "glue")
  config = make_config("glue", "cola", source, data__dir=str(glue))
  return glue, folder / "results", run(config, folder / "results")


def test_a_task_is_learned_and_every_seed_has_a_row(cola):
  _, folder, rows = cola
  found = [(r["task"], r["split"], r["seed"]) for r in rows]
  assert found == [("cola", "dev", 0), ("cola", "dev", 1)]
  assert all(set(r["metrics"]) == {"mcc", "accuracy"} for r in rows)
  assert max(r["metrics"]["mcc"] for r in rows) > 80
  assert (folder / "results.png").stat().st_size > 5000
  submission = (folder / "cola" / "predictions" / "CoLA.tsv").read_text().splitlines()
  assert submission[0] == "index\tprediction" and len(submission) == 6


MODERN = dataclasses.replace(CFG, block="pre_norm")


@pytest.mark.parametrize(
  ("kind", "cfg", "fields", "head", "exported"),
  [
    ("own", CFG, {}, "two_layers", "ElectraForSequenceClassification"),
    ("own", MODERN, {}, "modernbert", "ModernBertForSequenceClassification"),
    ("own", MODERN, {"model__head": "linear"}, "linear", None),
    ("tagging", CFG, {}, "linear", "ElectraForTokenClassification"),
    ("tagging", MODERN, {}, "modernbert", "ModernBertForTokenClassification"),
    ("squad", CFG, {}, "linear", "ElectraForQuestionAnswering"),
    ("squad", MODERN, {}, "modernbert", "ModernBertForQuestionAnswering"),
    ("squad", MODERN, {"model__head": "linear"}, "linear", None),
    ("squad", MODERN, {"qa__joint": True}, "linear", None),
    ("squad", CFG, {"qa__answerable_weight": 0.5}, "linear", None),
  ],
)
def test_a_head_is_that_of_transformers_unless_the_papers_is_asked_for(
  source, tmp_path, kind, cfg, fields, head, exported
):
  for split in ("train", "dev"):
    squad_file(tmp_path / f"{split}.json", 2)
    (tmp_path / f"{split}.txt").write_text("w2 B-A\nw3 O\n")
    (tmp_path / f"{split}.tsv").write_text("text\tlabel\nw1 w2\tyes\nw3 w4\tno\n")
  ending = {"tagging": "txt", "squad": "json", "own": "tsv"}[kind]
  files = {"data__dir": str(tmp_path)} if kind == "own" else both(tmp_path, ending)
  config = make_config(kind, "x", source, qa__max_query=8, **files, **fields)
  task = prepare.prepare(config, "x", tokenizer.load(source / "vocab.txt"), cfg)
  arguments = task.info.head.arguments
  assert arguments["layers"] == head
  noted = f"exported as {exported}" if exported else "not exported: transformers lacks it"
  assert any(noted in note for note in task.notes)
  if kind == "squad":
    joint = not exported and "qa__answerable_weight" not in fields
    assert arguments["joint"] == joint
    assert arguments["answerable_weight"] == (0.0 if exported else 0.5)
    assert task.info.options["threshold"] == (0.0 if exported else -2.75)


def test_a_task_that_is_named_twice_is_one():
  config = files.load("finetune/glue.py", "rte, cola,rte")
  assert prepare.task_names(config) == ["rte", "cola"]


@pytest.mark.parametrize(("most", "note"), [(2, "2 of 4 examples: neg 100.0 %"), (4, ": 4 ex")])
def test_the_labels_of_the_examples_that_are_trained_on_are_counted(source, tmp_path, most, note):
  for split in ("train", "dev"):
    rows = ["text\tlabel", *("w1\tneg", "w2\tpos") * 2]
    (tmp_path / f"{split}.tsv").write_text("\n".join(rows) + "\n")
  words = tokenizer.load(source / "vocab.txt")
  config = make_config("own", "x", source, data__dir=str(tmp_path), data__train_examples=most)
  assert note in prepare.prepare(config, "x", words, CFG).notes[0]


def test_the_vocabulary_of_the_source_may_be_named_also_if_it_keeps_accents(source, tmp_path):
  found = sources.open_source(source)
  kept = tokenizer.load(source / "vocab.txt", True, strip_accents=False)
  with workdir.new_folder(tmp_path / "kept") as folder:
    sources.save_orbax(folder, dataclasses.replace(found, tokenizer=kept))
  config = make_config("glue", "cola", tmp_path / "kept", data__vocab=str(source / "vocab.txt"))
  assert from_config.load_pretrained(config).tokenizer.vocab == kept.vocab


def test_the_kept_network_predicts_what_was_measured(cola):
  glue, folder, rows = cola
  asked = model.load(folder)
  dev = [line.split("\t") for line in (glue / "CoLA" / "dev.tsv").read_text().splitlines()]
  answers = asked([text for _, _, _, text in dev])
  right = [s["label"] == label for s, (_, label, _, _) in zip(answers, dev, strict=True)]
  saved = json.loads((folder / "cola" / "config.json").read_text())
  (best,) = [r for r in rows if r["seed"] == saved["best_seed"]]
  assert 100 * np.mean(right) == pytest.approx(best["metrics"]["accuracy"])
  assert all(0.5 <= s["probability"] <= 1 for s in answers)
  assert asked([]) == []
  assert asked("w0 w9") == asked(["w0 w9"]) and len(asked("")) == 1
  with pytest.raises(ValueError, match="expects texts"):
    asked([("a", "b")])


def test_a_finished_task_is_not_trained_again_and_another_config_is_refused(cola, source):
  glue, folder, rows = cola
  config = make_config("glue", "cola", source, data__dir=str(glue))
  before = (folder / "cola" / "units.npz").stat().st_mtime_ns
  assert run(config, folder) == rows
  assert (folder / "cola" / "units.npz").stat().st_mtime_ns == before
  config.optimizer.learning_rate = 1e-3
  with pytest.raises(ValueError, match="optimizer.learning_rate was 0.01, is 0.001"):
    run(config, folder)


def test_results_are_compared_on_the_same_examples_in_one_table(
  cola, source, tmp_path, monkeypatch
):
  glue, folder, rows = cola
  shutil.copytree(folder, tmp_path / "copy")
  shown = []
  with monkeypatch.context() as patch:
    patch.setattr(results, "doing", lambda what: shown.append(what) or contextlib.nullcontext())
    results.compare(folder, tmp_path / "copy", Console(quiet=True), samples=10)
  assert shown == ["comparing cola"]  # resampling takes long
  config = json.loads((tmp_path / "copy" / "cola" / "config.json").read_text())
  config["examples"]["dev"] = "other"
  (tmp_path / "copy" / "cola" / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match="cola, dev: A and B differ in examples, 25 and 25"):
    results.compare(folder, tmp_path / "copy", Console(quiet=True))
  (tmp_path / "copy" / "cola" / "units.npz").write_bytes(b"PK")
  with pytest.raises(ValueError, match="copy/cola is damaged"):
    results.compare(folder, tmp_path / "copy", Console(quiet=True))
  for level in (folder / "cola", folder):  # one export needs no name
    assert sources.open_source(level).card == sources.open_source(folder / "cola" / "model").card
  (tmp_path / "copy" / "cola").rename(tmp_path / "copy" / "rte")
  (tmp_path / "copy" / "rte" / "results.jsonl").write_text(
    "".join(json.dumps(row | {"task": "rte"}) + "\n" for row in rows)
  )
  shutil.copytree(folder / "cola", tmp_path / "copy" / "cola")
  config = make_config("glue", "cola", source, data__dir=str(glue))
  assert [r["task"] for r in run(config, tmp_path / "copy")] == ["rte", "rte", "cola", "cola"]


def test_predicting_a_file_writes_its_rows_in_order(cola, tmp_path):
  _, folder, _ = cola
  rows = "".join(f"w{i % 2} w9\t{i}\n" for i in range(9))
  (tmp_path / "in.tsv").write_text(f"sentence\tid\n{rows}")
  asked = model.load(folder / "cola" / "model")
  assert asked.predict_file(tmp_path / "in.tsv", tmp_path / "out.tsv") == 9
  lines = [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()]
  assert lines[0] == ["index", "prediction", "probability"]
  assert [line[0] for line in lines[1:]] == [str(i) for i in range(9)]
  assert len({line[1] for line in lines[1::2]}) == 1 and lines[1][1] != lines[2][1]
  (tmp_path / "in.jsonl").write_text('{"sentence": "w0 w9"}\n')
  asked.predict_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
  row = json.loads((tmp_path / "out.jsonl").read_text())
  assert list(row) == lines[0] and row["prediction"] == lines[1][1]
  with pytest.raises(ValueError, match="exists: choose another name"):
    asked.predict_file(tmp_path / "in.tsv", tmp_path / "out.tsv")


def test_predictions_carry_the_columns_that_are_asked_for(cola, tmp_path):
  asked = model.load(cola[1] / "cola" / "model")
  texts = ['w0 "w9"', "w1\tw9", "w2\rw9"]
  with open(tmp_path / "in.tsv", "w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file, delimiter="\t", lineterminator="\r\n")
    writer.writerows([("id", "sentence"), *zip(("a-7", "b", "c"), texts, strict=True)])
  rows = ({"sentence": text, "id": i + 7, "x": "\ud800"} for i, text in enumerate(texts))
  (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  asked.predict_file(tmp_path / "in.jsonl", tmp_path / "x.jsonl", columns=("x",))  # not UTF-8
  assert json.loads((tmp_path / "x.jsonl").read_text().splitlines()[0])["x"] == "\ud800"
  for kind in ("tsv", "jsonl"):
    out = tmp_path / f"out.{kind}"
    asked.predict_file(tmp_path / f"in.{kind}", out, columns=("sentence", "id"))
    if kind == "tsv":
      with open(out, newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file, delimiter="\t"))
    else:
      found = [json.loads(line) for line in out.read_text().splitlines()]
    assert list(found[0]) == ["index", "sentence", "id", "prediction", "probability"]
    assert [row["sentence"] for row in found] == texts
    assert [row["id"] for row in found] == {"tsv": ["a-7", "b", "c"], "jsonl": [7, 8, 9]}[kind]
  (tmp_path / "ids.jsonl").write_text('{"sentence": "w0", "id": 12345678.5}\n')
  asked.predict_file(tmp_path / "ids.jsonl", tmp_path / "ids.tsv", columns=("id",))
  assert (tmp_path / "ids.tsv").read_text().splitlines()[1].split("\t")[1] == "12345678.5"
  for column, why in (("key", "in.tsv:1 has no column 'key'"), ("prediction", "'prediction' is")):
    with pytest.raises(ValueError, match=why):
      asked.predict_file(tmp_path / "in.tsv", tmp_path / "new.tsv", columns=(column,))
  assert not (tmp_path / "new.tsv").exists()


@pytest.mark.long
def test_several_tasks_the_random_control_and_their_comparison(cola, source, tmp_path):
  glue, folder, _ = cola
  fields = {"data__dir": str(glue), "train__epochs": 1.0, "keep": "none"}
  config = make_config("glue", "cola,rte", source, **fields)
  config.init, config.like = "random", str(source)
  console = Console(record=True, width=200, quiet=False, file=io.StringIO())
  program.fine_tune(config, tmp_path / "control", console)
  text = console.export_text()
  assert "GLUE average of medians over 2 of 8 tasks" in text and "(cola, rte; without" in text
  assert not (tmp_path / "control" / "cola" / "model").exists()
  console = Console(record=True, width=200, file=io.StringIO())
  results.compare(folder, tmp_path / "control", console, samples=100)
  (line,) = [x for x in console.export_text().splitlines() if "cola" in x and "dev" in x]
  assert "mcc" in line
  scores = [np.load(f / "cola" / "units.npz")["dev"] for f in (folder, tmp_path / "control")]
  assert scores[0].shape == scores[1].shape == (2, 25, 2)
  results.compare(folder / "cola", tmp_path / "control" / "cola", console, samples=100)
  assert console.export_text().count("mcc") == 1
  with pytest.raises(ValueError, match="holds no results of electra-jax finetune"):
    results.compare(folder, glue, console)


def write_conll(path: Path, n: int) -> None:
  lines = []
  for _ in range(n):
    for word in sentence(RNG.randint(3, 12)):
      lines.append(f"{word} X {'B-A' if word in WORDS[2:12] else 'O'}")
    lines.append("")
  path.write_text("\n".join(lines) + "\n", "utf-8")


@pytest.mark.long
def test_tagging_is_learned_with_windows_and_goes_both_ways_with_hugging_face(source, tmp_path):
  for split, n in (("train", 60), ("dev", 20)):
    write_conll(tmp_path / f"{split}.txt", n)
  files = both(tmp_path, "txt")
  config = make_config("tagging", "words", source, seeds=1, data__max_length=10, **files)
  (row,) = run(config, tmp_path / "results")
  assert row["metrics"]["f1"] > 90 and not row["collapsed"]
  asked = model.load(tmp_path / "results")
  assert asked([["w3", "w20"]]) == [{"tags": ["B-A", "O"]}]
  asked.predict_file(tmp_path / "dev.txt", tmp_path / "predicted.txt")
  columns = [line.split() for line in (tmp_path / "predicted.txt").read_text().splitlines() if line]
  assert np.mean([gold == answers for _, gold, answers in columns]) > 0.9
  again = sources.open_source(model.find(tmp_path / "results"))
  console = Console(quiet=True)
  writer.export_hf(again, tmp_path / "hf", console)
  written = json.loads((tmp_path / "hf" / "discriminator" / "config.json").read_text())
  assert written["architectures"] == ["ElectraForTokenClassification"]
  assert list(written["id2label"].values()) == list(asked.info.labels)
  back = sources.open_source(tmp_path / "hf").networks["discriminator"].weights
  ours = again.networks["discriminator"].weights
  assert jax.tree.all(jax.tree.map(np.array_equal, dict(back), dict(ours)))


def squad_file(path: Path, n: int) -> None:
  paragraphs = []
  for i in range(n):
    words = sentence(8)
    place = RNG.randrange(1, 8)
    words[place - 1], words[place] = "w0", RNG.choice(WORDS[2:])
    start = len(" ".join(words[:place])) + 1
    answers = [{"text": words[place], "answer_start": start}]
    qa = {"id": str(i), "question": "w0 ?", "answers": answers}
    paragraphs.append({"context": " ".join(words), "qas": [qa]})
  path.write_text(
    json.dumps({"version": "1.1", "data": [{"title": "", "paragraphs": paragraphs}]}), "utf-8"
  )


@pytest.mark.long
def test_questions_are_answered_from_their_context(source, tmp_path):
  for split, n in (("train", 64), ("dev", 16)):
    squad_file(tmp_path / f"{split}.json", n)
  small = {"seeds": 1, "qa__beam_size": 3, "qa__hidden": 16, "qa__max_query": 8}
  config = make_config("squad", None, source, **small, **both(tmp_path, "json"))
  (row,) = run(config, tmp_path / "results")
  assert set(row["metrics"]) == {"exact_match", "f1"}
  written = tmp_path / "results" / "squad" / "predictions" / "dev"
  predictions = json.loads((written / "predictions.json").read_text())
  asked = model.load(tmp_path / "results")
  data = json.loads((tmp_path / "dev.json").read_text())["data"][0]["paragraphs"]
  texts = [("w0 ?", p["context"]) for p in data]
  answers = asked(texts)
  assert [s["answer"] for s in answers] == list(predictions.values())
  # Had there been questions without an answer in training, the null odds would decide.
  odds = float(np.median([s["null_odds"] for s in answers]))
  options = {**asked.info.options, "impossible": True, "threshold": odds}
  doubting = dataclasses.replace(asked, info=dataclasses.replace(asked.info, options=options))
  assert [s["answer"] != "" for s in doubting(texts)] == [s["null_odds"] <= odds for s in answers]
  for one, p in zip(answers, data, strict=True):
    assert p["context"][one["start"] : one["end"]] == one["answer"]
  golds = [p["qas"][0]["answers"][0]["text"] for p in data]
  right = np.mean([s["answer"] == gold for s, gold in zip(answers, golds, strict=True)])
  assert 100 * right == pytest.approx(row["metrics"]["exact_match"])


# What is refused, in one line.


def test_a_missing_split_and_a_span_outside_of_its_context_are_named(source, tmp_path, cola):
  glue = tmp_path / "glue"
  shutil.copytree(cola[0], glue)
  (glue / "RTE" / "dev.tsv").unlink()
  config = make_config("glue", "rte", source, data__dir=str(glue))
  refused(config, tmp_path / "results", "no file for the split 'dev'")
  for split in ("train", "dev"):
    squad_file(tmp_path / f"{split}.json", 20)
  text = (tmp_path / "train.json").read_text().replace('"text": "w', '"text": "q')
  (tmp_path / "train.json").write_text(text)
  config = make_config("squad", None, source, **both(tmp_path, "json"))
  refused(config, tmp_path / "qa", "train.json")
  (tmp_path / "train.txt").write_text("w2 B-A\nw3 O\n")
  (tmp_path / "dev.txt").write_text("w2 B-C\nw3 O\n")
  config = make_config("tagging", None, source, **both(tmp_path, "txt"))
  refused(config, tmp_path / "t", r"dev.txt: .* missing in .*: B-C \(1\); above 1% of 2 words")


@pytest.mark.parametrize(
  ("old", "new"), [('"kind": "text"', '"kind": "txet"'), ('"text": {', '"words": {')]
)
def test_a_network_of_an_unknown_task_is_refused(cola, tmp_path, old, new):
  shutil.copytree(cola[1] / "cola" / "model", tmp_path / "model")
  content = (tmp_path / "model" / "export.json").read_text()
  assert content.count(old) == 1
  (tmp_path / "model" / "export.json").write_text(content.replace(old, new))
  with pytest.raises(ValueError, match="model has a task unknown to this version"):
    model.load(tmp_path / "model")


def test_the_kept_seed_is_the_best_by_the_main_metric_of_the_first_split():
  def row(split, seed, main, other):
    return {"split": split, "seed": seed, "metrics": {"mcc": main, "accuracy": other}}

  rows = [row("dev", 0, 10.0, 99.0), row("dev", 1, 30.0, 50.0), row("dev", 2, 20.0, 70.0)]
  assert program.choose([*rows, row("other", 0, 90.0, 90.0)]) == 1
  assert program.choose([]) == 0


@pytest.mark.parametrize(
  ("width", "rate", "decay"),
  [(128, 1e-3, 0.8), (130, 3e-4, 0.8), (256, 3e-4, 0.8), (768, 1e-4, 0.8), (1024, 5e-5, 0.9)],
)
def test_rates_that_are_not_set_are_those_for_the_width(source, width, rate, decay):
  """Clark et al. 2020, Appendix B: of Small, Base and Large."""
  config = make_config("glue", "cola", source)
  config.optimizer.learning_rate = config.optimizer.layer_decay = None
  words = tokenizer.load(source / "vocab.txt")
  cfg = dataclasses.replace(CFG, hidden_size=width)
  tower = from_config.PretrainedEncoder(cfg, None, words, ())
  settings = from_config.make_settings(config, tower, 3.0)
  assert (settings.optimizer.learning_rate, settings.layer_decay) == (rate, decay)
  config.optimizer.learning_rate, config.optimizer.layer_decay = 0.25, 0.5
  settings = from_config.make_settings(config, tower, 3.0)
  assert (settings.optimizer.learning_rate, settings.layer_decay) == (0.25, 0.5)
