"""Whole words are masked: all tokens of a word or none, as many tokens as asked for at most."""

import re

import jax
import numpy as np
import pytest
from test_masking import CLS, MASK, PAD, SEP
from test_spm import WORDS, some_text

from electra_jax.core import masking
from electra_jax.core.batch import from_rows
from electra_jax.data import tokenizer, vocabulary
from electra_jax.interop import huggingface

SPECIAL = (PAD, CLS, SEP, MASK)
V = 60


def rates(prob=0.15, parts=None) -> masking.Masking:
  parts = bytes(int(i % 3 == 1 and i > 9) for i in range(V)) if parts is None else parts
  return masking.Masking(prob, 0.85, 1.0, MASK, SPECIAL, word_parts=parts)


def words_of(row, parts) -> list[list[int]]:
  """Positions of each word, by a loop."""
  found = []
  for at, token in enumerate(row):
    if token in SPECIAL:
      found.append(None)
    elif parts[token] == 1 and found and found[-1] and parts[row[found[-1][-1]]] != 2:
      found[-1].append(at)
    else:
      found.append([at])
  return [word for word in found if word]


def rows_of(rng, lengths) -> list[list[int]]:
  return [[CLS, *rng.integers(10, V, n - 2).tolist(), SEP] for n in lengths]


def chosen(rows, m, length, seed=0, step=None) -> list[set[int]]:
  batch = from_rows(rows, (len(rows), length), PAD)
  keys = jax.random.split(jax.random.key(seed), len(rows))
  found = masking.choose(batch, m, keys, step)
  np.testing.assert_array_equal(
    found.labels, np.take_along_axis(np.asarray(batch.ids), np.asarray(found.positions), 1)
  )
  return [
    set(at[weight > 0].tolist())
    for at, weight in zip(np.asarray(found.positions), np.asarray(found.weights), strict=True)
  ]


@pytest.mark.parametrize("length", [8, 33, 128])
def test_each_word_is_masked_as_a_whole_and_no_more_than_asked_for(length):
  rng, m = np.random.default_rng(0), rates()
  rows = rows_of(rng, [max(4, length - 5 * i) for i in range(6)] * 30)
  short = 0
  for row, at in zip(rows, chosen(rows, m, length), strict=True):
    words = words_of(row, m.word_parts)
    wanted = max(1, round(0.15 * len(row)))
    parts = [word for word in words if at & set(word) and not set(word) <= at]
    assert 1 <= len(at) <= wanted and not at - {i for word in words for i in word}
    # The only word may be longer than the number.
    assert not parts or (len(parts) == 1 and len(at) == wanted < len(parts[0]))
    short += wanted - len(at)
  # A third of the tokens continue a word: the last word loses less than a token on average.
  assert short < len(rows)


def test_words_are_drawn_uniformly():
  m = rates(0.3)
  row = [CLS, 12, 13, 14, 15, 16, 18, 20, 21, 24, 27, 30, SEP]  # 13, 16 continue words
  words = words_of(row, m.word_parts)
  assert [2, 2] == [len(word) for word in words if len(word) > 1]
  counts = np.zeros(len(words))
  for at in chosen([row] * 4000, m, len(row)):
    counts += [set(word) <= at for word in words]
  alone = counts[[len(word) == 1 for word in words]]
  assert alone.std() / alone.mean() < 0.06  # 4,000 draws of a probability of 0.3: 2.4 %
  # A word of two tokens is left out more often, where only one token is left.
  assert 0.6 < counts[[len(word) == 2 for word in words]].mean() / alone.mean() < 1


def test_without_words_of_several_tokens_the_positions_are_those_of_tokens():
  rng = np.random.default_rng(1)
  rows = rows_of(rng, [16, 9, 12, 5])
  alone = rates(0.25, parts=bytes(V))
  for step in (None, 3):
    assert chosen(rows, alone, 16, 7, step) == chosen(rows, rates(0.25, b""), 16, 7, step)


@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_the_words_of_a_vocabulary_are_those_of_its_text(kind, tmp_path):
  path = tmp_path / {"wordpiece": "vocab.txt"}.get(kind, "spm.model")
  tokens = vocabulary.train(kind, some_text(), size=90, path=path)
  parts = tokens.word_parts()
  assert len(parts) == tokens.vocab.size
  [ids] = tokens.encode_batch([WORDS])
  pieces = [tokens.pieces()[i].replace("▁", "").replace("##", "") for i in ids]
  found = ["".join(pieces[at] for at in word) for word in words_of(ids, parts)]
  assert [x for x in found if x] == re.findall(r"\w+|[^\w ]", WORDS)
  if kind == "wordpiece":
    folder = tmp_path / "hf"
    folder.mkdir()
    huggingface.save_tokenizer(folder, tokens, 64)
    assert tokenizer.load(folder / "tokenizer.json").word_parts() == parts
