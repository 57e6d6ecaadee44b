"""Question answering data: exact characters, BERT's windows, the official scores by hand."""

import json
import random

import numpy as np
import pytest
from conftest import LETTERS, PIECES

from electra_jax.data import tokenizer, vocabulary
from electra_jax.finetune import squad
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.squad_files import Question, Questions, normalize

TEXTS = [
  "The café, the Café (über) 中国!",
  "Cafe\u0301 u\u0308ber: naïve",  # NFD
  "  two  spaces\tand\u00a0more\n",
  "😀😀 emoji 👨‍👩‍👧 ☀️ done",
  "ﬁne ½ ＡＢＣ",
  "it's 3.5 % [MASK] of $7",
  "a\u200bb \x00 c",
  "",
]


@pytest.fixture(scope="module")
def tokenizers_of_all_kinds(words, tmp_path_factory):
  from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

  folder = tmp_path_factory.mktemp("kinds")
  text = [text for text in TEXTS[:6] for _ in range(20)] + ["some other words to split"] * 20
  made = {"uncased": words, "cased": tokenizer.load(words.path, lowercase=False)}
  for kind in ("unigram", "bpe"):
    made[kind] = vocabulary.train(kind, text, size=64, path=folder / f"{kind}.model")
  engine = Tokenizer(models.BPE())
  engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, trim_offsets=False)
  special = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
  engine.train_from_iterator(text, trainers.BpeTrainer(vocab_size=300, **options))
  engine.save(str(folder / "bytes.json"))
  made["bytes"] = tokenizer.load(folder / "bytes.json")
  engine = Tokenizer(models.WordPiece({p: i for i, p in enumerate(PIECES)}, unk_token="[UNK]"))
  engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
  engine.pre_tokenizer = pre_tokenizers.Whitespace()
  engine.save(str(folder / "nfkc.json"))
  made["nfkc"] = tokenizer.load(folder / "nfkc.json")
  return made


def make_windows(questions, words, **options):
  lengths = {"max_length": 512, "stride": 128, "max_query": 64}
  return squad.windows(questions, words, **lengths | options)


def decode(questions, windows, outputs, **options):
  lengths = {"n_best": 20, "max_answer_length": 30}
  return squad.decode(questions, windows, outputs, **lengths | options)


KINDS = ["uncased", "cased", "unigram", "bpe", "bytes", "nfkc"]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_with_offsets_are_the_ids_without(tokenizers_of_all_kinds, kind):
  tok = tokenizers_of_all_kinds[kind]
  assert [ids for ids, _ in tok.encode_offsets(TEXTS)] == tok.encode_batch(TEXTS)


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_go_up_have_no_spaces_at_the_ends_and_leave_no_letter_out(
  tokenizers_of_all_kinds, kind
):
  for text, (ids, spans) in zip(
    TEXTS, tokenizers_of_all_kinds[kind].encode_offsets(TEXTS), strict=True
  ):
    assert len(ids) == len(spans)
    assert spans == sorted(spans) and all(0 <= i <= j <= len(text) for i, j in spans)
    assert all(text[i:j] == text[i:j].strip() for i, j in spans)
    covered = {at for i, j in spans for at in range(i, j)}
    assert all(i in covered for i, char in enumerate(text) if char.isalnum())


def test_offsets_are_characters_of_the_text_as_it_was(words, tokenizers_of_all_kinds):
  text = "The  Café, 中国 😀"
  (_, spans), *_ = words.encode_offsets([text])
  assert [text[i:j] for i, j in spans] == ["The", "Café", ",", "中", "国", "😀"]
  (_, spans), *_ = tokenizers_of_all_kinds["unigram"].encode_offsets(["two  Café"])
  assert "".join("two  Café"[i:j] for i, j in spans) == "twoCafé"


def questions_of(*items: tuple, form: str = "SQuAD 1.1") -> Questions:
  """(context, question, [answers], ...) to questions; an answer is where it first occurs."""
  made = []
  for i, (context, question, answers) in enumerate(items):
    placed = tuple((text, context.index(text)) for text in answers)
    made.append(Question(f"q{i}", question, context, placed, tuple(answers), not answers))
  return Questions("here.json", form, tuple(made), True)


def no_outputs(n, width):
  """Outputs of n windows that give no span any probability."""
  return {
    "start": np.zeros((n, width), np.int32),
    "start_logp": np.full((n, width), -1000.0, np.float32),
    "end": np.zeros((n, width, width), np.int32),
    "end_logp": np.full((n, width, width), -1000.0, np.float32),
    "null": np.zeros(n, np.float32),
  }


def oracle(windows, score=-0.5):
  """Outputs that say the targets, and nothing else with any probability."""
  outputs = no_outputs(len(windows), 3)
  for i, window in enumerate(windows):
    outputs["start"][i, 0] = window.feature.target["start"]
    outputs["end"][i, 0, 0] = window.feature.target["end"]
    outputs["start_logp"][i, 0] = outputs["end_logp"][i, 0, 0] = score
    outputs["null"][i] = 8 * window.feature.target["impossible"] - 4
  return outputs


# Windows.


def names(window):
  return " ".join(PIECES[i] for i in window.feature.ids)


def test_a_row_is_cls_question_sep_context_sep(words):
  found = questions_of(("The café, Berlin.", "Berlin?", ["Berlin"]))
  (window,) = make_windows(found, words, train=True)
  assert names(window) == "[CLS] berlin ? [SEP] the cafe , berlin . [SEP]"
  feature = window.feature
  assert feature.second == 4 and feature.ids.dtype == np.int32
  assert feature.target["allowed"].tolist() == [True, *[False] * 3, *[True] * 5, False]
  assert (feature.target["start"], feature.target["end"]) == (7, 7)
  assert feature.target["impossible"] == 0
  assert window.spans.tolist()[3:9] == [[0, 0], [0, 3], [4, 8], [8, 9], [10, 16], [16, 17]]
  assert not window.spans[9].any()
  assert window.max_context.tolist() == [False] * 4 + [True] * 5 + [False]


def test_windows_begin_every_stride_and_each_token_has_its_best_one(words):
  # 11 tokens; 6 fit beside [CLS] a [SEP] [SEP]: windows 0-5, 3-8, 6-10.
  found = questions_of(("b c d e f g h i j k l", "a", ["e f"]))
  made = make_windows(found, words, max_length=10, stride=3, max_query=6, train=True)
  assert [names(w)[14:-6] for w in made] == ["b c d e f g", "e f g h i j", "h i j k l"]
  # By hand, min(left, right) of tokens 3-5: 2 1 0 against 0 1 2; of 6-8: 2 1 0 against 0 1 2. Where
  # both are alike (4, 7) a longer window wins, then the first.
  best = [np.flatnonzero(w.max_context[3:-1]).tolist() for w in made]
  assert best == [[0, 1, 2, 3, 4], [2, 3, 4], [2, 3, 4]]
  targets = [(w.feature.target["start"], w.feature.target["end"]) for w in made]
  assert targets == [(6, 7), (3, 4), (0, 0)]
  assert [float(w.feature.target["impossible"]) for w in made] == [0, 0, 1]
  found = questions_of(("b c d e f g h i j k l", "a", ["g h"]))  # it ends just after the first
  made = make_windows(found, words, max_length=10, stride=3, max_query=6, train=True)
  targets = [(w.feature.target["start"], w.feature.target["end"]) for w in made]
  assert targets == [(0, 0), (5, 6), (0, 0)]


def test_max_context_is_berts_rule_written_plainly(words):
  letters = random.Random(0).choices(LETTERS[:26], k=290)
  sizes = [(12, 1, 37), (15, 4, 37), (16, 50, 37), (64, 8, 37), (220, 200, 290)]
  for length, stride, size in sizes:
    context = " ".join(letters[:size])
    found = questions_of((context, "a", [context[:1]]))
    made = make_windows(found, words, max_length=length, stride=stride, max_query=1, train=False)
    bounds = [(int(w.spans[3, 0]) // 2, len(w.spans) - 4) for w in made]
    for token in range(size):
      scores = [
        (min(token - begin, begin + n - 1 - token) + 0.01 * n, -i)
        for i, (begin, n) in enumerate(bounds)
        if begin <= token < begin + n
      ]
      best = -max(scores)[1]
      marked = [i for i, (b, n) in enumerate(bounds) if 0 <= token - b < n
                and made[i].max_context[3 + token - b]]  # fmt: skip
      assert marked == [best]


def test_a_long_question_is_cut_and_the_context_gets_the_rest(words):
  found = questions_of(("b c d", "a " * 30, ["d"]))
  (window,) = make_windows(found, words, max_length=12, max_query=5, train=True)
  assert names(window) == "[CLS] a a a a a [SEP] b c d [SEP]"


def test_an_answer_longer_than_the_window_makes_all_of_its_windows_impossible(words):
  found = questions_of(("b c d e f g h", "a", ["c d e f g"]))
  made = make_windows(found, words, max_length=8, stride=2, max_query=1, train=True)
  assert len(made) > 1 and all(w.feature.target["impossible"] == 1 for w in made)
  assert all(w.feature.target["start"] == w.feature.target["end"] == 0 for w in made)


def test_impossible_and_lost_questions_in_training(words):
  found = questions_of(("Berlin.", "a", []), ("Berlin.", "a", []), form="SQuAD 2.0")
  lost = found.items[1]._replace(impossible=False, golds=("Rome",))
  found = Questions(**{**vars(found), "items": (found.items[0], lost)})
  assert [w.question for w in make_windows(found, words, train=True)] == [0]
  assert [w.question for w in make_windows(found, words, train=False)] == [0, 1]


def test_each_context_is_tokenized_once(words, monkeypatch):
  seen = []
  encode = type(words).encode_offsets
  monkeypatch.setattr(
    type(words), "encode_offsets", lambda self, texts: seen.extend(texts) or encode(self, texts)
  )
  monkeypatch.setattr(squad, "_CONTEXTS_AT_ONCE", 2)
  items = [(f"b c {i % 3}", f"{i}", ["b"]) for i in range(10)]
  assert len(make_windows(questions_of(*items), words, train=True)) == 10
  assert seen == ["b c 0", "b c 1", "b c 2"]


@pytest.mark.parametrize("wrong", [{"max_length": 67}, {"stride": 0}, {"max_query": 0}])
def test_lengths_that_leave_no_room_are_refused(words, wrong):
  with pytest.raises(
    TaskError, match=r"data.max_length.* leave no room for a context: lower qa.max_query=\d"
  ):
    make_windows(questions_of(("a", "b", ["a"])), words, train=True, **wrong)


# Predictions.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
  ("context", "answer"),
  [
    ("We saw the Café  Über, in 中国.", "Café  Über"),
    ("A cafe\u0301 u\u0308ber alles", "cafe\u0301"),
    ("A cafe\u0301 u\u0308ber alles", "u\u0308ber"),
    ("so 😀😀 happy ☀️ day", "☀️"),
    ("so 😀😀 happy ☀️ day", "😀😀"),
    ("the 国 of 中国", "中国"),
    ("  cost: $3.5 (net)", "$3.5"),
    ("  cost: $3.5 (net)", "net"),
    ("one two one two one", "one two one"),
  ],
)
def test_gold_positions_come_back_as_the_contexts_own_characters(
  tokenizers_of_all_kinds, kind, context, answer
):
  found = questions_of((context, "what?", [answer]))
  made = make_windows(found, tokenizers_of_all_kinds[kind], train=True)
  decoded = decode(found, made, oracle(made), max_answer_length=99)
  text = decoded.predictions["q0"]
  # Where a piece of this vocabulary joins the answer to what follows, that comes along.
  assert text == answer if kind in ("uncased", "cased", "bytes") else answer in text
  (best,) = decoded.nbest["q0"]
  assert context[best.start : best.end] == text and best.probability == 1
  assert best.score == pytest.approx(-1)


def test_the_second_of_two_same_answers_is_found_where_it_is(words):
  context = "red or blue or red or green"
  question = Question("x", "a", context, (("red", 15),), ("red",), False)
  found = Questions("here", "SQuAD 1.1", (question,), True)
  made = make_windows(found, words, max_length=100, train=True)
  (best,) = decode(found, made, oracle(made)).nbest["x"]
  assert (best.text, best.start, best.end) == ("red", 15, 18)


def beam(*spans):
  """Outputs of one window that give spans (start, end, score), and nothing else."""
  outputs = no_outputs(1, 4)
  outputs["start_logp"][:] = 0
  for i, (start, end, score) in enumerate(spans):
    outputs["start"][0, i], outputs["end"][0, i, 0] = start, end
    outputs["end_logp"][0, i, 0] = score
  return outputs


def test_only_short_forward_spans_of_the_context_count(words):
  found = questions_of(("b c d e f", "a", ["b"]))
  made = make_windows(found, words, train=False)  # [CLS] a [SEP] b c d e f [SEP]

  def answers(*spans, **kwargs):
    return [a.text for a in decode(found, made, beam(*spans), **kwargs).nbest["q0"]]

  assert answers((0, 0, -1), (1, 3, -1), (7, 8, -1), (4, 3, -1)) == []
  assert answers((7, 11, -1), (3, 4, -2)) == ["b c"]
  assert answers((3, 6, -1), (3, 5, -2), (4, 4, -3), max_answer_length=3) == ["b c d", "c"]
  assert decode(found, made, beam((0, 0, 0))).predictions == {"q0": ""}
  made = [made[0]._replace(max_context=np.arange(9) == 3)]
  assert answers((4, 5, -1), (3, 4, -2)) == ["b c"]


def test_the_n_best_are_different_texts_and_share_the_probability(words):
  found = questions_of(("b b c", "a", ["b"]))
  made = make_windows(found, words, train=False)
  outputs = beam((3, 3, -2.0), (4, 4, -1.0), (5, 5, -3.0), (3, 5, -4.0))
  best = decode(found, made, outputs, n_best=2).nbest["q0"]
  assert [(a.text, a.start, a.score) for a in best] == [("b", 2, -1.0), ("c", 4, -3.0)]
  share = 1 / (1 + np.exp(-2.0))
  assert [a.probability for a in best] == pytest.approx([share, 1 - share])


def test_the_best_window_answers_and_the_smallest_null_odds_count(words):
  found = questions_of(("b c d e f g h i j k l", "a", ["e f"]))
  made = make_windows(found, words, max_length=10, stride=3, max_query=6, train=False)
  parts = [beam((3, 3, -3.0)), beam((6, 6, -1.0)), beam((5, 5, -2.0))]
  outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
  outputs["null"] = np.array([0.5, 2.0, -1.5], np.float32)
  decoded = decode(found, made, outputs)
  assert [a.text for a in decoded.nbest["q0"]] == ["h", "j", "b"]
  assert decoded.null_odds == {"q0": -1.5}
  with pytest.raises(ValueError, match="got 3 rows of outputs for 2 windows"):
    decode(found, made[:2], outputs)


def test_an_oracle_scores_100_on_text_in_many_windows(words):
  rng = random.Random(1)
  items = []
  for i in range(60):
    size = rng.randint(5, 300)
    tokens = ["".join(rng.choices(LETTERS, k=rng.randint(1, 6))) for _ in range(size)]
    context = "".join(t + rng.choice([" ", "  ", ", ", " (", ". "]) for t in tokens)
    bounds = [context.index(tokens[0])]
    for token in tokens[1:]:
      bounds.append(context.index(token, bounds[-1] + 1))
    first = rng.randrange(size)
    last = min(size - 1, first + rng.randint(0, 3))
    start, end = bounds[first], bounds[last] + len(tokens[last])
    answers = () if i % 4 == 0 else ((context[start:end], start),)
    golds = tuple(text for text, _ in answers)
    items.append(Question(f"q{i}", "where is it?", context, answers, golds, not answers))
  found = Questions("here", "SQuAD 2.0", tuple(items), True)
  made = make_windows(found, words, max_length=128, stride=32, max_query=16, train=True)
  assert len(made) > 5 * len(items)
  outputs = oracle(made)
  decoded = decode(found, made, outputs)
  scores = squad.compute_metrics(squad.example_scores(found, decoded), -2.75)
  assert scores["exact"] == scores["f1"] == scores["best_f1"] == scores["NoAns_exact"] == 100


def test_files_are_those_that_the_official_scripts_read(tmp_path):
  answer = squad.Answer("Über 😀", 3, 9, -1.5, 1.0)
  decoded = squad.Decoded({"a": "Über 😀", "b": "no"}, {"a": [answer], "b": []}, {"a": -4, "b": 3})
  squad.write(tmp_path / "new", decoded, threshold=-2.75)
  answers = {
    name: json.loads((tmp_path / "new" / f"{name}.json").read_text("utf-8"))
    for name in ("predictions", "nbest", "null_odds")
  }
  assert answers["predictions"] == {"a": "Über 😀", "b": ""}
  assert answers["null_odds"] == {"a": -4, "b": 3}
  assert answers["nbest"]["a"][0] == answer._asdict()
  squad.write(tmp_path / "new", decoded)
  assert json.loads((tmp_path / "new" / "predictions.json").read_text("utf-8"))["b"] == "no"


# Scores.


def scored(form, *rows, threshold=-2.75):
  """Measures (prediction, golds, null odds)."""
  items = [
    Question(f"q{i}", "a", "b", (), tuple(golds), not golds) for i, (_, golds, _) in enumerate(rows)
  ]
  found = Questions("here", form, tuple(items), True)
  answers = {f"q{i}": row[0] for i, row in enumerate(rows)}
  odds = {f"q{i}": row[2] for i, row in enumerate(rows)}
  scores = squad.example_scores(found, squad.Decoded(answers, {}, odds))
  return squad.compute_metrics(scores, threshold)


def test_case_punctuation_articles_and_spaces_are_ignored_and_nothing_else():
  assert normalize(" The   U.S. Army's an 'A'  theme—a ") == "us armys theme—"
  assert normalize("Café") != normalize("Cafe")


def test_squad_1_scores_worked_by_hand():
  scores = scored(
    "SQuAD 1.1",
    ("the Denver  Broncos!", ["Denver Broncos", "Broncos"], 0),  # 1, 1
    ("the Denver Broncos team", ["Denver Broncos", "Carolina"], 0),  # 0, 2 x 2 / (3 + 2)
    ("b b c", ["b c c d"], 0),  # 0, 2 x 2 / (3 + 4)
    ("", ["x"], 99),  # 0, 0: null odds play no part
  )
  assert list(scores) == ["exact_match", "f1"]
  assert scores["exact_match"] == 25
  assert scores["f1"] == pytest.approx(25 * (1 + 0.8 + 4 / 7))


def test_an_article_for_an_answer_is_exact_but_has_f1_in_squad_2_only():
  assert scored("SQuAD 1.1", ("the", ["a"], 0)) == {"exact_match": 100, "f1": 0}
  assert scored("SQuAD 2.0", ("the", ["a"], -9))["f1"] == 100
  # Beside another answer an article is none.
  assert scored("SQuAD 2.0", ("the", ["a", "x"], -9))["f1"] == 0


ROWS = [
  ("x y", ["x y"], -5.0),  # right
  ("x y", ["x"], -3.0),  # F1 2/3
  ("x", ["x"], 1.0),  # right, but held for impossible
  ("x", [], -4.0),  # wrong: it is impossible
  ("x", [], 2.0),  # right by its odds
]


def test_squad_2_scores_worked_by_hand():
  scores = scored("SQuAD 2.0", *ROWS)
  # At -2.75: 1, 0 (2/3), 0, 0, 1.
  assert next(iter(scores)) == "exact" and scores["exact"] == pytest.approx(40)
  assert scores["f1"] == pytest.approx(20 * (1 + 2 / 3 + 1))
  assert scores["HasAns_exact"] == pytest.approx(100 / 3)
  assert scores["HasAns_f1"] == pytest.approx(100 * (5 / 3) / 3)
  assert scores["NoAns_exact"] == scores["NoAns_f1"] == 50
  # All impossible: 2; then in order of odds +1, -1, +0 (+2/3), +1, -1: exact 3, 2, 2, 3, 2.
  assert scores["best_exact"] == 60 and scores["best_exact_thresh"] == -5
  assert scores["best_f1"] == pytest.approx(20 * (2 + 1 - 1 + 2 / 3 + 1))
  assert scores["best_f1_thresh"] == 1
  assert scored("SQuAD 2.0", *ROWS, threshold=1.0)["exact"] == pytest.approx(60)


def test_the_best_threshold_is_the_best_of_all_thresholds():
  rng = np.random.default_rng(0)
  rows = [
    (str(rng.integers(3)), [str(rng.integers(3))] if rng.random() < 0.6 else [], float(odds))
    for odds in rng.permutation(40)
  ]
  best = scored("SQuAD 2.0", *rows)
  every = [scored("SQuAD 2.0", *rows, threshold=t)["exact"] for t in np.arange(-1.0, 40.0)]
  assert best["best_exact"] == pytest.approx(max(every))
  at = scored("SQuAD 2.0", *rows, threshold=best["best_exact_thresh"])
  assert at["exact"] == pytest.approx(best["best_exact"])


def test_a_question_that_is_rightly_left_unanswered_is_right_at_every_threshold():
  scores = scored("SQuAD 2.0", ("", [], -9.0), ("x", ["x"], -8.0))
  assert (scores["best_exact"], scores["best_exact_thresh"]) == (100, -8)


def test_where_nothing_is_better_than_no_answer_the_threshold_is_0():
  scores = scored("SQuAD 2.0", ("x", [], -3.0), ("x", ["y"], -2.0))
  assert (scores["best_exact"], scores["best_exact_thresh"]) == (50, 0)
  assert not {"HasAns_exact", "HasAns_f1"} & scored("SQuAD 2.0", ("x", [], -3.0)).keys()
