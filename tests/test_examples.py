"""Examples: the two-segment algorithm against hand-worked and plain ones."""

import dataclasses
import random

import numpy as np
import pytest

from electra_jax.data import examples
from electra_jax.data.examples import ExampleSpec

SPEC = ExampleSpec(
  seq_length=16, examples="segments", split_lines=True, short_prob=0.0, short_min_tokens=5,
  single_segment_prob=0.0, boundary_prob=0.0, cls=101, sep=102, pad=0,
)  # fmt: skip


def test_two_segments_of_a_hand_worked_example():
  # Target 16: the three sentences reach it with 17 tokens. The first segment aims at
  # (16 - 3) // 2 = 6 tokens: the first sentence opens it, 4 + 7 is not below 6, so the second one
  # goes to the second segment; 4 + 6 is not below 6 either. Then 16 - 4 - 3 = 9 of 13 tokens fit.
  document = [[1] * 4, [2] * 7, [3] * 6, [4] * 2]
  made = list(examples.two_segment([document], SPEC, random.Random(0)))
  assert made == [([1] * 4, [2] * 7 + [3] * 2, 4), ([4] * 2, [], 0)]
  dtype = examples.record_dtype(16, 30522)
  records, discarded = examples.to_records(made, SPEC, dtype)
  assert records["ids"].tolist() == [
    [101, 1, 1, 1, 1, 102, 2, 2, 2, 2, 2, 2, 2, 3, 3, 102],
    [101, 4, 4, 102] + [0] * 12,
  ]
  assert (records["length"].tolist(), records["first"].tolist()) == ([16, 4], [6, 4])
  assert discarded == 4


def test_a_short_sentence_returns_to_the_first_segment_as_in_the_original():
  document = [[1] * 3, [2] * 9, [3] * 2, [4] * 2]
  made = list(examples.two_segment([document], SPEC, random.Random(0)))
  assert made == [([1] * 3 + [3] * 2, [2] * 8, 3)]


def plain_examples(document: list[list[int]], length: int, single: bool, boundary: bool):
  """The algorithm once more, for probabilities of 0 and 1: decisions sentence by sentence."""
  made = []
  while document:
    taken = 1
    while taken < len(document) and sum(map(len, document[:taken])) < length:
      taken += 1
    sentences, document = document[:taken], document[taken:]
    goal = 100_000 if single else (length - 3) // 2
    a: list[int] = []
    b: list[int] = []
    for s in sentences:
      fits = len(a) + len(s) < goal
      at_boundary = not b and len(a) < goal and boundary
      (a if not a or fits or at_boundary else b).extend(s)
    a = a[: length - 2]
    made.append((a, b[: max(0, length - len(a) - 3)]))
  return made


@pytest.mark.parametrize("single", [0.0, 1.0])
@pytest.mark.parametrize("boundary", [0.0, 1.0])
def test_two_segments_equal_a_plain_implementation(single, boundary):
  spec = dataclasses.replace(SPEC, single_segment_prob=single, boundary_prob=boundary)
  rng = random.Random(0)
  for _ in range(200):
    document = [[rng.randrange(99)] * rng.randint(1, 12) for _ in range(rng.randint(1, 20))]
    made = list(examples.two_segment([document], spec, rng))
    assert [(a, b) for a, b, _ in made] == plain_examples(document, 16, single == 1, boundary == 1)
    kept = sum(len(a) + len(b) for a, b, _ in made)
    assert kept + sum(lost for _, _, lost in made) == sum(map(len, document))


def test_the_probabilities_of_the_paper_come_out():
  odds = {"short_prob": 0.05, "single_segment_prob": 0.1, "boundary_prob": 0.5}
  spec = dataclasses.replace(SPEC, seq_length=128, **odds)
  document = [[7]] * 1_000_000
  made = list(examples.two_segment([document], spec, random.Random(0)))
  sizes = np.array([len(a) + len(b) + lost for a, b, lost in made])
  assert np.mean(sizes < 128) == pytest.approx(0.05 * 123 / 124, abs=0.008)
  short = sizes[:-1][sizes[:-1] < 128]
  assert 5 <= short.min() < 12 and short.mean() == pytest.approx((5 + 127) / 2, abs=6)
  whole = [(a, b) for (a, b, _), size in zip(made, sizes, strict=True) if size == 128]
  assert np.mean([not b for a, b in whole]) == pytest.approx(0.1, abs=0.012)
  # Sentences of one token: all of them fit until the last free place, where a coin decides.
  firsts = np.array([len(a) for a, b in whole if b])
  assert set(firsts) == {61, 62} and np.mean(firsts == 62) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
  "line, expected",
  [
    ("It rains. Does it? Yes!", ["It rains.", "Does it?", "Yes!"]),
    ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
    ("About 3.5 mm, e.g. here.", ["About 3.5 mm, e.g. here."]),
    ("Ends.  (Another one.) 4 more.", ["Ends.", "(Another one.)", "4 more."]),
    ("Étienne dort. École.", ["Étienne dort.", "École."]),
    ("no end", ["no end"]),
    ("今天很好。我们走吧！好吗？好", ["今天很好。", "我们走吧！", "好吗？", "好"]),
    ("他说：“走吧。”她走了。（完。）是", ["他说：“走吧。”", "她走了。", "（完。）", "是"]),
    ("「行くの！？」と彼は言った｡ はい。", ["「行くの！？」", "と彼は言った｡", "はい。"]),
    ("“你好！”，他说。　然后", ["“你好！”，他说。", "然后"]),
    ("３．５です．そう", ["３．５です．", "そう"]),
    ("यह अच्छा है। क्या? नहीं॥ ठीक", ["यह अच्छा है।", "क्या?", "नहीं॥", "ठीक"]),
    ("هل أنت بخير؟ نعم. شكرا۔ نعم", ["هل أنت بخير؟", "نعم.", "شكرا۔", "نعم"]),
    ("ሰላም። እንዴት ነህ፧ ደህና", ["ሰላም።", "እንዴት ነህ፧", "ደህና"]),
    ("Tốt. Đi đâu? Ừ.", ["Tốt.", "Đi đâu?", "Ừ."]),
    ("v’là. “Oui.” Non…", ["v’là.", "“Oui.”", "Non…"]),
    ("", [""]),
    ("。", ["。"]),
  ],
)
def test_sentences_end_at_punctuation(line, expected):
  assert examples.sentences(line) == expected


def test_no_character_is_lost_between_sentences():
  rng = random.Random(0)
  for _ in range(2000):
    line = "".join(rng.choices('ab。！？।.!?"”」（ \u3000，３Z', k=rng.randrange(12)))
    parts = examples.sentences(line)
    assert "".join("".join(parts).split()) == "".join(line.split())
    assert parts == [""] or all(part.strip() for part in parts) or line.strip() == "", ascii(line)


def test_a_long_sentence_is_cut_into_parts_that_fit_a_segment():
  parts = list(examples.cut(list(range(20)), SPEC))
  assert [len(part) for part in parts] == [6, 6, 6, 2] and sum(parts, []) == list(range(20))
