"""Samples of what a network has learned: which sentences are shown, and what is counted."""

import contextlib
import io
import json
import random
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
from conftest import python
from rich.console import Console
from test_report import GOLDEN

import electra_jax
from electra_jax.commands import cli, show
from electra_jax.config import files
from electra_jax.data import build, tokenizer
from electra_jax.data.pretrain_batches import Shards
from electra_jax.encoder import Fill, Token
from electra_jax.evaluate import samples
from electra_jax.interop.sources import ExchangeError
from electra_jax.runtime import processes

WORDS = "the a old new red cat dog tree house river sees takes gives finds near under over".split()
CODE = "the old cat = sees ( a new dog near the tree ) ."


def sentence(rng: random.Random) -> str:
  return " ".join(rng.choices(WORDS, k=rng.randint(8, 16))) + "."


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  """A text file of sentences and code, and its sentences."""
  rng, path = random.Random(0), tmp_path_factory.mktemp("text") / "text.txt"
  documents = [[sentence(rng) for _ in range(6)] for _ in range(500)]
  path.write_text("\n\n".join("\n".join([*lines, CODE]) for lines in documents))
  return path, {line for lines in documents for line in lines}


@pytest.fixture(scope="module")
def heldout(text, tmp_path_factory):
  config = files.load("base.py")
  config.data.dir = str(tmp_path_factory.mktemp("shards") / "data")
  config.data.update(sources=f"text:{text[0]}", workers=1, seq_length=48, vocab_size=150)
  config.data.update(holdout_frac=0.2, examples="packed")  # rows begin anywhere
  build.build(config)
  return Shards.open(config.data.dir, "heldout")


def test_a_language_without_spaces_has_sentences_and_words(tmp_path):
  rng = random.Random(0)
  lines = ["".join(rng.choices("我们看见红狗在树下新老房子", k=10)) + "。" for _ in range(900)]
  (tmp_path / "text.txt").write_text(
    "\n\n".join("\n".join(lines[i : i + 6]) for i in range(0, 900, 6))
  )
  config = files.load("base.py")
  config.data.update(sources=f"text:{tmp_path}/text.txt", dir=str(tmp_path / "data"), workers=1)
  config.data.update(holdout_frac=0.2, seq_length=48, vocab_size=80)
  build.build(config)
  shards = Shards.open(config.data.dir, "heldout")
  tokens = tokenizer.load_from(shards.folder, shards.vocab)
  found = samples.sentences(shards, tokens)
  assert found and {text.replace(" ", "") for text in found} <= set(lines)
  spans = tokens.encode_offsets(found)[0][1]
  assert len(samples.words(found[0], spans)) == 10  # each character is a word


class Oracle:
  """Answers as an Encoder that knows the sentences; or, `wrong`, as one that errs always."""

  def __init__(self, heldout, known, wrong=False, masked_lm=True):
    self.tokenizer = tokenizer.load_from(heldout.folder, heldout.vocab)
    self.known, self.wrong, self.masked_lm, self.max_length = known, wrong, masked_lm, 48

  def fill_mask(self, texts, k):
    if not self.masked_lm:
      raise ExchangeError("none")
    return [[Fill(self._word(text), 0.9, ""), Fill("##s", 0.05, "")] for text in texts]

  def _word(self, text):
    if self.wrong:
      return "zebra"
    pattern = re.compile(re.escape(text).replace(re.escape("[MASK]"), r"(\w+)"))
    return next(found[1] for found in map(pattern.fullmatch, self.known) if found)

  def detect(self, texts):
    found = []
    for text in texts:
      words = text.rstrip(".").split()
      like = [x.rstrip(".").split() for x in self.known]
      like = [x for x in like if len(x) == len(words)]
      own = min(like, key=lambda x: sum(a != b for a, b in zip(x, words, strict=True)))
      replaced = [(a != b) != self.wrong for a, b in zip(own, words, strict=True)]
      places = [(m.start(), m.end()) for m in re.finditer(r"\w+", text)]
      found.append(
        [Token("", a, b, 0.9 if p else 0.1) for (a, b), p in zip(places, replaced, strict=True)]
      )
    return found


def test_the_sentences_are_whole_readable_and_held_out(text, heldout):
  tokens = tokenizer.load_from(heldout.folder, heldout.vocab)
  found = samples.sentences(heldout, tokens)
  assert len(found) == 2 * samples.SENTENCES == len(set(found)) and set(found) <= text[1]
  assert found == samples.sentences(heldout, tokens)
  train = tokens.decode(Shards.open(heldout.folder).read(range(50)).ids.ravel().tolist())
  assert not [x for x in found if x in train]
  assert not samples.sentences(heldout, tokens, longest=6)


def test_what_is_right_found_and_missed_is_counted(text, heldout):
  for wrong in (False, True):
    found = samples.make(Oracle(heldout, text[1], wrong), heldout)
    filled, detected = found["filled"], found["detected"]
    assert (filled["right"], filled["count"]) == (0 if wrong else 100, 100)
    assert detected["found"] == (0 if wrong else detected["count"])
    # By hand: of 8 to 16 words, one (up to 9, and of 10) or two are replaced, 0.15 each.
    assert 100 <= detected["count"] <= 200 and detected["texts"] == 100
    for row in filled["sentences"]:
      assert row["text"].replace("[MASK]", row["word"]) in text[1]
      assert row["choices"] == [("zebra" if wrong else row["word"], 0.9)]  # ##s is no word
    for row in detected["sentences"]:
      assert "".join(x.get("was") or x["text"] for x in row) in text[1]
      kinds = [x["kind"] for x in row if "kind" in x]
      assert set(kinds) == ({"missed", "false"} if wrong else {"found"})
      assert not wrong or kinds.count("missed") == kinds.count("false")
  only = samples.make(Oracle(heldout, text[1], masked_lm=False), heldout)
  assert only.keys() == {"detected"}


def test_guessing_finds_the_expected_number():
  # A word of n, guessed among n, is hit with probability 1 / n; two of n by two, 4 / n.
  rng, hits, count = random.Random(0), 0, 4000
  for _ in range(count):
    hits += len(set(rng.sample(range(13), 2)) & set(rng.sample(range(13), 2)))
  assert samples.num_replaced(13) == 2
  assert hits / count == pytest.approx(4 / 13, abs=0.03)  # four standard deviations


def test_a_word_is_as_suspect_as_its_most_suspect_token():
  tokens = [Token("", 0, 2, 0.1), Token("", 2, 6, 0.7), Token("", 7, 9, 0.6), Token("", 9, 10, 0.9)]
  found = samples.pieces("unseen ok.", [(0, 6, None), (7, 9, None)], tokens)
  marks = {"kind": "suspected", "probability": 0.7, "was": None}
  assert found == [{"text": ""}, {"text": "unseen", **marks}, {"text": " ok."}]


def test_without_colours_brackets_show_what_was_found():
  row = [{"text": "the "}, {"text": "on", "kind": "found", "probability": 0.931, "was": "cat"}]
  row += [{"text": " "}, {"text": "is", "kind": "missed", "probability": 0.2, "was": "sees"}]
  row += [{"text": " "}, {"text": "me", "kind": "false", "probability": 0.3, "was": None}]
  found = {"detected": {"found": 1, "count": 2, "texts": 1, "by_chance": 0.7, "sentences": [row]}}
  choices = [["cat", 0.4], ["dog", 0.2]]
  rows = [{"text": "a [MASK]", "word": x, "choices": choices} for x in ("dog", "tree")]
  found["filled"] = {"right": 0, "count": 2, "sentences": rows}
  console = Console(width=80, file=(out := SimpleNamespace(text="", flush=lambda: None)))
  out.write = lambda text: setattr(out, "text", out.text + text)
  show.print_samples(found, console)
  printed = out.text
  assert "  the [on 93 %] (is 20 %) {me 30 %}\n      on was cat, is was sees\n" in printed
  assert "cat 40 %, [dog 20 %]\n" in printed and "dog 20 %; it was: tree\n" in printed
  assert "found 1 of 2 replaced words" in printed and "random guesses find 1." in printed
  assert max(map(len, printed.splitlines())) <= 80


def test_texts_of_ones_own_are_filled_or_checked(tmp_path, capsys):
  shutil.copytree(GOLDEN / "run", tmp_path / "run")
  config = json.loads((tmp_path / "run" / "config.json").read_text())
  config["data"]["dir"] = str(GOLDEN / "data")
  (tmp_path / "run" / "config.json").write_text(json.dumps(config))
  model = f"--model={tmp_path / 'run'}"
  cli.call("show", [model, "abc [MASK] def [MASK]", "abc def"])
  printed = capsys.readouterr().out
  assert printed.count("abc [MASK] def [MASK]") == 2 and " %]" in printed
  assert all(line.strip() for line in printed.splitlines())
  with pytest.raises(cli.UsageError, match="--data cannot be combined"):
    cli.call("show", [model, "--data=x", "abc"])
  with pytest.raises(cli.UsageError, match="a TEXT is empty"):
    cli.call("show", [model, "abc", " "])
  with pytest.raises(ExchangeError, match="nowhere does not exist"):
    cli.call("show", ["--model=nowhere"])
  with pytest.raises(cli.UsageError, match="--workdir=DIR must name a folder"):
    cli.call("quickstart", ["--workdir="])
  cli.call("export", [model, "--to=orbax", f"--out={tmp_path / 'export'}"])
  with pytest.raises(cli.UsageError, match="is not a run of this machine: give --data"):
    cli.call("show", [f"--model={tmp_path / 'export'}"])


@pytest.fixture(scope="module")
def mine(text, tmp_path_factory):
  """A quickstart on the text, run again here: its folder and what it printed the second time."""
  folder = tmp_path_factory.mktemp("mine")
  fields = {"data.sources": f"text:{text[0]}", "data.vocab_size": 150, "train.steps": 4}
  fields |= {"data.holdout_frac": 0.2, "data.split_lines": False, "eval.max_examples": 16}
  fields |= {"model.num_layers": 2, "model.hidden_size": 32, "model.embedding_size": 32}
  given = [f"--config.{name}={value}" for name, value in fields.items()]
  done = python("-m", "electra_jax", "quickstart", "--workdir=runs/mine", *given, cwd=folder)
  assert done.returncode == 0, done.stderr
  before = signal.getsignal(signal.SIGUSR2)
  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
    patch.chdir(folder)
    patch.setattr(processes, "initialize", lambda *args: None)  # JAX has been started here
    cli.call("quickstart", ["--workdir=runs/mine", *given])
  signal.signal(signal.SIGUSR2, before)
  return folder, printed.getvalue()


@pytest.mark.long
def test_the_quickstart_goes_from_text_to_samples_and_a_report(mine):
  folder, printed = mine
  found = samples.read(folder / "runs" / "mine")
  assert found["filled"]["count"] == found["detected"]["texts"] == samples.SENTENCES
  assert "already at step 4" in printed and "runs/mine/data is built already" in printed
  assert printed.endswith(" show --model=runs/mine 'The name of the [MASK].'\n")
  report = (folder / "runs" / "mine" / "report.html").read_text()
  assert found["filled"]["sentences"][0]["text"] in report


@pytest.mark.long
def test_the_probabilities_are_those_of_the_encoder(mine):
  run = mine[0] / "runs" / "mine"
  encoder, found = electra_jax.load(run), samples.read(run)
  for row in found["filled"]["sentences"]:
    fills = {x.token: x.probability for x in encoder.fill_mask(row["text"], k=20)}
    assert all(fills[word] == pytest.approx(p, abs=1e-4) for word, p in row["choices"])
  for row in found["detected"]["sentences"]:
    tokens, end = encoder.detect("".join(piece["text"] for piece in row)), 0
    for piece in row:
      start, end = end, end + len(piece["text"])
      own = [x.replaced for x in tokens if start <= x.start and x.end <= end]
      assert "kind" not in piece or max(own) == pytest.approx(piece["probability"], abs=1e-4)


@pytest.mark.parametrize(
  "text",
  [
    '{"filled": {"right"',
    "[]",
    '{"filled": 3}',
    '{"mine": {}}',
    '{"filled": {"right": 1, "count": 2}}',
    '{"filled": {"right": 1, "count": 2, "sentences": [1]}}',
    '{"filled": {"right": 1, "count": 2, "sentences": [{"text": "a", "word": "b"}]}}',
    "[" * 100_000,
  ],
)
def test_a_file_that_holds_no_samples_is_none(tmp_path, text):
  assert samples.read(tmp_path) == {}
  (tmp_path / samples.FILE).write_text(text)
  assert samples.read(tmp_path) == {}
