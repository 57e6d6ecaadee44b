"""Tagging: files, schemes, windows, and scores against seqeval's own and hand counts."""

import gzip

import numpy as np
import pytest
import zstandard
from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities

from electra_jax.config import files
from electra_jax.core import task_heads
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data import tokenizer
from electra_jax.finetune import tagging, tagging_task
from electra_jax.finetune.batches import Plan, collate
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.tagging import Sentence

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "##x", "."]
A, B, C, X = 5, 6, 7, 8


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
  path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
  path.write_text("".join(f"{window}\n" for window in PIECES))
  return tokenizer.load(path)


def sentence(words: str, tags: str | None = None) -> Sentence:
  return Sentence(tuple(words.split(" ")), tags and tuple(tags.split(" ")), "file:1")


def random_tags(rng, scheme: str, n: int) -> list[str]:
  """Entities of types A and B in a scheme, laid out one by one, or tags that fit no scheme."""
  if scheme == "inconsistent":
    return rng.choice(["O", *(f"{p}-{t}" for p in "BIES" for t in "AB")], n).tolist()
  tags: list[str] = []
  before = None
  while len(tags) < n:
    kind, size = rng.choice(["A", "B", "O"]), int(rng.integers(1, 4))
    if kind == "O":
      tags.append("O")
    elif scheme == "BIOES":
      middle = [f"I-{kind}"] * (size - 2)
      tags += [f"S-{kind}"] if size == 1 else [f"B-{kind}", *middle, f"E-{kind}"]
    else:
      begins = scheme == "BIO" or before == kind
      tags += [f"B-{kind}" if begins else f"I-{kind}"] + [f"I-{kind}"] * (size - 1)
    before = kind
  return tags


# Files.

CONLL_2000 = "Confidence NN B-NP\nin IN B-PP\n\n\nHe PRP B-NP\n"
CONLL_2003 = "-DOCSTART- -X- -X- O\n\nU.N. NNP I-NP I-ORG\nofficial NN I-NP O\n"


@pytest.mark.parametrize("separator", [" ", "\t", " \t "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_words_are_in_the_first_column_and_tags_in_the_last(separator, end, tmp_path):
  path = tmp_path / "a.txt"
  path.write_bytes(CONLL_2000.replace(" ", separator).replace("\n", end).encode())
  assert tagging.read(path) == [
    Sentence(("Confidence", "in"), ("B-NP", "B-PP"), f"{path}:1"),
    Sentence(("He",), ("B-NP",), f"{path}:5"),
  ]
  assert tagging.read(path, tag_column=1)[0].tags == ("NN", "IN")
  assert tagging.read(path, word_column=1, tag_column=0)[1][:2] == (("PRP",), ("He",))
  assert tagging.read(path, tag_column=None)[0].tags is None


@pytest.mark.parametrize("end, module", [("gz", gzip), ("zst", zstandard)])
def test_lines_between_documents_are_no_words(tmp_path, end, module):
  path = tmp_path / f"a.txt.{end}"
  path.write_bytes(module.compress(CONLL_2003.encode()))
  assert tagging.read(path) == [Sentence(("U.N.", "official"), ("I-ORG", "O"), f"{path}:3")]


def test_a_file_to_predict_needs_no_column_of_tags(tmp_path):
  (tmp_path / "a.txt").write_text("a x\nb y\n")
  assert tagging.read(tmp_path / "a.txt", tag_column=1, tags_optional=True)[0].tags == ("x", "y")
  assert tagging.read(tmp_path / "a.txt", tag_column=3, tags_optional=True)[0].tags is None
  with pytest.raises(TaskError, match="no column 3, the line has 2 columns"):
    tagging.read(tmp_path / "a.txt", tag_column=3)
  with pytest.raises(TaskError, match="no column 4, the line has 2 columns"):
    tagging.read(tmp_path / "a.txt", word_column=4, tags_optional=True)


def test_a_file_of_one_column_has_words_and_no_tags(tmp_path):
  path = tmp_path / "a.txt"
  path.write_text("a\nb\n\nc", encoding="utf-8-sig")
  assert [s[:2] for s in tagging.read(path)] == [(("a", "b"), None), (("c",), None)]
  path.write_text("a NN\n")
  for untagged in (tagging.read(path, tag_column=0), tagging.read(path, word_column=-1)):
    with pytest.raises(TaskError, match=r"a.txt:1: no column of tags .*tag_column"):
      tagging.labels(untagged)


@pytest.mark.parametrize(
  ("data", "message"),
  [
    (b"a B-X\n\nb\n", r"a.txt:3: 1 columns, line 1 has 2$"),
    (b"a\nb\n\nc O\n", r"a.txt:4: 2 columns, line 1 has 1$"),
    (b"a O\nb\xff O\n", r"a.txt:2: not UTF-8 \(byte 0xff\)"),
    (b"", r"a.txt: the file has no sentences$"),
    (b"-DOCSTART- O\n \t\n", r"a.txt: the file has no sentences$"),
  ],
)
def test_a_file_that_is_no_table_of_words_is_refused_in_one_line(data, message, tmp_path):
  (tmp_path / "a.txt").write_bytes(data)
  with pytest.raises(TaskError, match=message) as error:
    tagging.read(tmp_path / "a.txt")
  assert "\n" not in str(error.value)


def test_files_and_columns_that_are_not_there_are_named(tmp_path):
  (tmp_path / "a.txt").write_text("\na O\n")
  for column in (2, -3):
    with pytest.raises(TaskError, match=f"a.txt:2: no column {column}, the line has 2 columns"):
      tagging.read(tmp_path / "a.txt", tag_column=column)
  with pytest.raises(TaskError, match="b.txt: no such file"):
    tagging.read(tmp_path / "b.txt")
  for data in (b"a O\n", gzip.compress(b"a O\n" * 99)[:-9]):
    (tmp_path / "c.gz").write_bytes(data)
    with pytest.raises(TaskError, match=r"c.gz: cannot be read \("):
      tagging.read(tmp_path / "c.gz")


# Schemes.


@pytest.mark.parametrize(
  ("tags", "bioes", "bio"),
  [
    ("I-A I-A O I-A", "B-A E-A O S-A", "B-A I-A O B-A"),  # IOB1
    ("I-A B-A I-A I-B", "S-A B-A E-A S-B", "B-A B-A I-A B-B"),  # IOB1, B only between two
    ("B-A I-A I-A B-B O", "B-A I-A E-A S-B O", "B-A I-A I-A B-B O"),  # BIO
    ("B-A E-A S-A O", "B-A E-A S-A O", "B-A I-A B-A O"),  # BIOES
    ("B I O B", "B E O S", "B I O B"),  # without types
    ("B-a-b I-a-b", "B-a-b E-a-b", "B-a-b I-a-b"),  # a type with a hyphen
    ("O I-A I-B E-B", "O S-A B-B E-B", "O B-A B-B I-B"),  # inconsistent
    ("NN B-A VB", "NN B-A VB", "NN B-A VB"),  # none of these
  ],
)
def test_schemes_are_rewritten_as_worked_by_hand(tags, bioes, bio):
  assert tagging.to_bioes(tags.split()) == bioes.split()
  assert tagging.to_bio(tags.split()) == bio.split()


@pytest.mark.parametrize("scheme", ["IOB1", "BIO", "BIOES", "inconsistent"])
def test_the_entities_that_seqeval_finds_survive_every_scheme(scheme):
  rng = np.random.default_rng(0)
  for _ in range(500):
    tags = random_tags(rng, scheme, 12)
    bioes = tagging.to_bioes(tags)
    assert get_entities(bioes) == get_entities(tags) == get_entities(tagging.to_bio(tags))
    assert tagging.to_bioes(bioes) == bioes and tagging.to_bio(bioes) == tagging.to_bio(tags)
    assert tags == {"BIOES": bioes, "BIO": tagging.to_bio(tags)}.get(scheme, tags)


def test_labels_are_sorted_and_know_every_position_of_a_type():
  train = [sentence("a b", "I-X I-X"), sentence("c", "O")]
  labels = tagging.labels(train)
  assert labels == ("B-X", "E-X", "I-X", "O", "S-X")
  dev = [sentence("a b c", "B-X O B-Y"), sentence("a b", "B-Y I-Y")]
  assert tagging.unseen(dev, labels) == {"B-Y": 2, "I-Y": 1}
  assert tagging.labels([sentence("a b", "VB O")]) == ("O", "VB")
  assert tagging.unseen([sentence("a b", "VB NN")], ("O", "VB")) == {"NN": 1}


def test_an_odd_tag_among_entities_is_refused_by_its_line():
  odd = Sentence(("c",), ("b-x",), "file:7")
  with pytest.raises(TaskError, match="file:7: the tag 'b-x' is not BIO, but the other tags are"):
    tagging.labels([sentence("a b", "B-X O"), odd])
  with pytest.raises(TaskError, match="the tag 'L-X' is not BIO"):  # of two schemes
    tagging.labels([sentence("a b c d", "B-X L-X S-Y O")])


def test_the_training_labels_alone_say_whether_tags_are_entities(tmp_path):
  labels = ("B", "I", "NN")  # parts of speech, whatever another file has of them
  gold = [sentence("a b", "I I")]
  for predicted in ([["B", "I"]], [["NN", "I"]]):
    assert tagging.example_scores(gold, predicted, labels).tolist() == [[1, 2]]
  tagging.write(tmp_path / "p.txt", gold, [["I", "I"]], labels)
  assert (tmp_path / "p.txt").read_text() == "a I I\nb I I\n\n"


# Features.


def test_the_first_token_of_a_word_carries_its_label(tok):
  s = sentence("ax b z cxx", "B-X I-X O B-X")  # the vocabulary has no z
  (window,) = tagging.windows([s], tok, tagging.labels([s]), max_length=16)
  assert window.feature.ids.tolist() == [2, A, X, B, tok.vocab.unk, C, X, X, 3]
  assert window.feature.ids.dtype == window.feature.target["tag"].dtype == np.int32
  assert window.feature.target["tag"].tolist() == [-1, 0, -1, 1, 3, 4, -1, -1, -1]  # B E O S
  assert window.positions.tolist() == [1, 3, 4, 5]
  assert (window.feature.second, window.words) == (9, range(4))


def test_a_word_of_no_token_becomes_unknown(tok):
  s = sentence("a \u200b b")
  assert tok.encode_batch(["\u200b"]) == [[]]
  (window,) = tagging.windows([s], tok, ("O",), max_length=256)
  assert window.feature.ids.tolist() == [2, A, tok.vocab.unk, B, 3]
  assert window.feature.target == {}


def test_windows_of_a_hand_worked_sentence(tok):
  # Ten words of a token each and room for six: 0-5, half a window on 3-8, then the last six 4-9.
  # Overlaps 3-5 and 4-8: the middle word of either has as much context in both and stays in the
  # earlier window, so the windows answer for 0-4, 5-6 and 7-9.
  s = sentence(" ".join("abcabcabca"), " ".join(["O"] * 10))
  windows = tagging.windows([s], tok, ("O",), max_length=8)
  assert [p.feature.ids[1:-1].tolist() for p in windows] == [
    [A, B, C, A, B, C], [A, B, C, A, B, C], [B, C, A, B, C, A],
  ]  # fmt: skip
  assert [p.words for p in windows] == [range(5), range(5, 7), range(7, 10)]
  assert [p.feature.target["tag"].tolist() for p in windows] == [
    [-1, 0, 0, 0, 0, 0, -1, -1], [-1, -1, -1, 0, 0, -1, -1, -1], [-1, -1, -1, -1, 0, 0, 0, -1],
  ]  # fmt: skip


@pytest.mark.parametrize("max_length", [3, 4, 5, 7, 8, 13, 20, 64])
def test_each_word_has_one_window_and_it_shows_the_most_context(tok, max_length):
  rng = np.random.default_rng(0)
  words = [["a" + "x" * rng.integers(5) for _ in range(n)] for n in rng.integers(1, 50, 40)]
  sentences = [sentence(" ".join(w), " ".join(rng.choice(["O", "T"], len(w)))) for w in words]
  windows = tagging.windows(sentences, tok, ("O", "T"), max_length=max_length)
  room = max_length - 2
  best: dict[tuple[int, int], int] = {}
  answered, number = {}, -1
  for window in windows:
    number += window.words.start == 0  # the next sentence begins
    n = len(window.feature.ids)
    assert n <= max_length
    # The words of a window are found here by the tokens that begin a word.
    begins = np.flatnonzero(window.feature.ids == A)
    shift = window.words.start - begins.tolist().index(window.positions[0])
    ends = np.append(begins[1:], n - 1)
    for word, (begin, end) in enumerate(zip(begins, ends, strict=True), shift):
      at = number, word
      assert end - begin == min(len(words[at[0]][word]), room)
      context = min(begin - 1, n - 1 - end)
      best[at] = max(best.get(at, -1), context)
      if word in window.words:
        assert at not in answered
        assert begin == window.positions[word - window.words.start]
        tag = ("O", "T").index(sentences[at[0]].tags[word])
        assert window.feature.target["tag"][begin] == tag
        answered[at] = context
    assert (window.feature.target["tag"] >= 0).sum() == len(window.words)
  assert answered == best
  assert len(answered) == sum(map(len, words))


def test_notes_count_the_rows_added_by_windows_and_name_the_limit(words, tmp_path):
  (tmp_path / "train.txt").write_text("a X\n\nabcdefghijkl X\nb Y\n")  # 12 tokens, 6 of them fit
  config = files.load("finetune/tagging.py")
  config.data.train = config.data.dev = str(tmp_path / "train.txt")
  task = tagging_task.KIND.prepare(config, "x", words, 8)
  assert "train: 1 rows added by splitting sentences above 6 tokens" in task.notes


def test_what_cannot_be_made_into_features_is_refused(tok):
  with pytest.raises(TaskError, match="max_length must be at least 3, got 2"):
    tagging.windows([sentence("a")], tok, ("O",), max_length=2)
  with pytest.raises(TaskError, match="file:1: the tag 'NN' is not BIO"):
    tagging.windows([sentence("a b", "O NN")], tok, ("B-X", "O"), max_length=256)


# Predictions and scores.


@pytest.mark.parametrize("scheme", ["IOB1", "BIO", "BIOES"])
@pytest.mark.parametrize("max_length", [5, 9, 64])
def test_an_oracle_scores_100_and_a_wrong_tag_does_not(tok, scheme, max_length):
  rng = np.random.default_rng(1)
  tags = [random_tags(rng, scheme, n) for n in (1, 2, 7, 30)]
  sentences = [Sentence(("ax",) * len(t), tuple(t), "file:1") for t in tags]
  labels = tagging.labels(sentences)
  windows = tagging.windows(sentences, tok, labels, max_length=max_length)
  logits = [np.eye(len(labels))[p.feature.target["tag"]] for p in windows]
  predicted = tagging.decode(sentences, windows, labels, {"logits": logits})
  assert predicted == [tagging.to_bio(t) for t in tags]
  perfect = tagging.compute_metrics(tagging.example_scores(sentences, predicted, labels))
  assert perfect == {"f1": 100, "precision": 100, "recall": 100, "accuracy": 100}
  predicted[-1][0] = "O" if predicted[-1][0] != "O" else "B-A"
  assert tagging.compute_metrics(tagging.example_scores(sentences, predicted, labels))["f1"] < 100


def test_counts_of_hand_made_cases():
  gold = sentence("a b c d e f", "B-X I-X O B-Y B-Y O")
  labels = tagging.labels([gold])
  for predicted, counts in (
    ("B-X I-X O B-Y B-Y O", (3, 3, 3, 6, 6)),
    ("B-X O O B-Y B-Y O", (2, 3, 3, 5, 6)),  # a shorter entity is not the entity
    ("B-X I-X O B-Y I-Y O", (1, 2, 3, 5, 6)),  # two run into one
    ("B-Y I-Y O B-Y B-Y O", (2, 3, 3, 4, 6)),  # another type
    ("I-X I-X O I-Y B-Y O", (3, 3, 3, 6, 6)),  # IOB1 says the same
    ("O O O O O O", (0, 0, 3, 2, 6)),
  ):
    assert tagging.example_scores([gold], [predicted.split()], labels).tolist() == [list(counts)]
  nothing = tagging.compute_metrics(tagging.example_scores([gold], [["O"] * 6], labels))
  assert nothing == {"f1": 0, "precision": 0, "recall": 0, "accuracy": 100 / 3}


def test_scores_equal_seqevals_own():
  rng = np.random.default_rng(2)
  gold = [random_tags(rng, "BIO", n) for n in rng.integers(1, 20, 60)]
  predicted = [
    tagging.to_bio([tag if rng.random() < 0.8 else rng.choice(["O", "I-A", "B-B"]) for tag in tags])
    for tags in gold
  ]
  sentences = [Sentence(("w",) * len(tags), tuple(tags), "file:1") for tags in gold]
  scores = tagging.example_scores(sentences, predicted, tagging.labels(sentences))
  assert scores.shape == (60, 5) and scores.dtype == np.float64
  got = tagging.compute_metrics(scores)
  assert list(got) == ["f1", "precision", "recall", "accuracy"] and 20 < got["f1"] < 90
  theirs = {
    "f1": f1_score(gold, predicted), "precision": precision_score(gold, predicted),
    "recall": recall_score(gold, predicted), "accuracy": accuracy_score(gold, predicted),
  }  # fmt: skip
  assert got == pytest.approx({name: 100 * x for name, x in theirs.items()}, rel=1e-12)


def test_other_tags_are_scored_by_accuracy_alone(tok):
  sentences = [sentence("a b c", "DT NN ."), sentence("a", "O")]
  labels = tagging.labels(sentences)
  windows = tagging.windows(sentences, tok, labels, max_length=256)
  logits = [np.zeros((len(p.feature.ids), 4)) for p in windows]
  logits[0][1, 2] = logits[0][2, 2] = 1  # NN, NN, and the first label of all, "."
  predicted = tagging.decode(sentences, windows, labels, {"logits": logits})
  assert predicted == [["NN", "NN", "."], ["."]]
  scores = tagging.example_scores(sentences, predicted, tagging.labels(sentences))
  assert scores.tolist() == [[2, 3], [0, 1]]
  assert tagging.compute_metrics(scores) == {"accuracy": 50}


def test_what_is_written_is_read_again(tmp_path):
  sentences = [sentence("a b", "I-X I-X"), sentence("c", "O")]
  predicted, labels = [["B-X", "O"], ["B-X"]], tagging.labels(sentences)
  tagging.write(tmp_path / "p.txt", sentences, predicted, labels)
  text = (tmp_path / "p.txt").read_text()
  assert text == "a B-X B-X\nb I-X O\n\nc O B-X\n\n"
  again = tagging.read(tmp_path / "p.txt")
  assert [list(s.tags) for s in again] == predicted
  tagging.write(tmp_path / "p.txt", [s._replace(tags=None) for s in sentences], predicted, labels)
  assert (tmp_path / "p.txt").read_text() == "a B-X\nb O\n\nc B-X\n\n"


def test_the_loss_counts_each_word_once_whatever_the_windows(tok):
  cfg = TransformerConfig(len(PIECES), 8, 8, 1, 1, 16, 32)
  s = sentence(" ".join(["ax"] * 11), " ".join(["T", "O"] * 5 + ["T"]))
  head = task_heads.tagging(2)
  weights = {"classifier": {"kernel": np.zeros((8, 2)), "bias": np.array([0.0, 1.0])}}  # always T
  for max_length in (7, 32):
    features = [p.feature for p in tagging.windows([s], tok, ("O", "T"), max_length=max_length)]
    batch = collate(features, Plan(np.arange(len(features)), 32), 16, tok.vocab.pad)
    states = np.zeros((16, 32, 8), np.float32)
    terms = head.loss(cfg, weights, states, batch, None)
    assert terms["loss"].count == 11
    assert terms["accuracy"].total == 6
