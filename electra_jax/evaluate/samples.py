"""Samples of what a network has learned: words for a [MASK], and replaced words that it found."""

import collections
import contextlib
import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from electra_jax.data.pretrain_batches import Shards
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.evaluate.scorers import continues_word
from electra_jax.interop.weights import ExchangeError
from electra_jax.runtime.workdir import replacing

FILE = "samples.json"  # in a run
ROWS, SENTENCES, SHOWN = 2048, 100, 5  # read, evenly spaced; of each kind counted, and shown
WORDS, TOKENS = 8, 18  # fewest words and most tokens of a sentence
CHOICES, CANDIDATES = 3, 20  # words shown for a mask, of so many tokens
REPLACED_FRAC = 0.15  # of a sentence's words, at least one
FOUND, MISSED, FALSE, SUSPECTED = "found", "missed", "false", "suspected"  # kinds of pieces

_SENTENCE_ENDS = re.compile(r"(?<=[.!?…؟।])\s+|(?<=[。！？])\s*")
_MARKS = frozenset(".!?…؟।。！？,;:、，；：،")  # of readable sentences

Word = tuple[int, int, int]  # its characters [start, end), and its number of tokens


def make(encoder: Any, heldout: Shards) -> dict:
  """Returns samples of held-out sentences, the same sentences for the same shards.

  {"filled": {"right", "count", "sentences": [{"text", "word", "choices": [[word, p]]}]},
   "detected": {"found", "count", "texts", "by_chance", "sentences": [[piece, ...]]}}
  without what no network does; of the sentences those where the network is most certain. A piece is
  {"text"}; a word that was replaced or is suspected has also "kind", "probability" and "was", the
  original. As many words of a sentence are suspected as were replaced.

  Args:
    encoder: of `electra_jax.load`, with the vocabulary of the shards.
  """
  texts = sentences(heldout, encoder.tokenizer, min(TOKENS, encoder.max_length - 2))
  found = {}
  if len(texts) > 1:
    for i, (name, function) in enumerate((("filled", _filled), ("detected", _detected))):
      with contextlib.suppress(ExchangeError):  # no network does it
        found[name] = function(encoder, texts[i::2])
  return found


def of_texts(encoder: Any, texts: Sequence[str]) -> dict:
  """Returns samples of texts, as `make` without counts: words for each [MASK], else suspects.

  Raises:
    ExchangeError: no network predicts words, or none detects.
    ValueError: a text with [MASK] is too long.
  """
  mask = encoder.tokenizer.decode([encoder.tokenizer.vocab.mask])
  masked, whole = [x for x in texts if mask in x], [x for x in texts if mask not in x]
  found = {}
  if masked:
    k, rows = min(CANDIDATES, encoder.tokenizer.vocab.size), []
    for text, fills in zip(masked, encoder.fill_mask(masked, k), strict=True):
      for own in fills if isinstance(fills[0], list) else [fills]:
        rows.append({"text": text, "word": None, "choices": _choices(own)})
    found["filled"] = {"sentences": rows}
  if whole:
    places = [[(a, b, None) for _, (a, b, _) in own] for own in _pool(encoder, whole)]
    detected = zip(whole, places, encoder.detect(whole), strict=True)
    found["detected"] = {"sentences": [pieces(*row) for row in detected]}
  return found


def write(folder: Path, found: dict) -> None:
  """Writes the samples of a run."""
  with replacing(folder / FILE) as temporary:
    temporary.write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")


def read(folder: Path) -> dict:
  """Returns the samples of a run as `make`; {} without any, or if they are not of that form."""
  wrong = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
  with contextlib.suppress(OSError, *wrong):
    found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return {name: _FORMS[name](part) for name, part in found.items()}
  return {}


def _filled_form(part: dict) -> dict:
  rows = [
    {
      "text": str(row["text"]),
      "word": str(row["word"]),
      "choices": [(str(word), float(p)) for word, p in row["choices"]],
    }
    for row in part["sentences"]
  ]
  return {"right": int(part["right"]), "count": int(part["count"]), "sentences": rows}


def _detected_form(part: dict) -> dict:
  marks = {"kind": str, "probability": float, "was": lambda was: was and str(was)}
  rows = [
    [{"text": str(x["text"])} | {k: f(x[k]) for k, f in marks.items() if "kind" in x} for x in row]
    for row in part["sentences"]
  ]
  counts = {name: int(part[name]) for name in ("found", "count", "texts")}
  return {**counts, "by_chance": float(part["by_chance"]), "sentences": rows}


_FORMS = {"filled": _filled_form, "detected": _detected_form}


def sentences(heldout: Shards, tokenizer: Tokenizer, longest: int = TOKENS) -> list[str]:
  """Returns evenly spaced readable sentences of at most `longest` tokens, 2 x SENTENCES at most."""
  special, found = np.array(heldout.vocab.special_ids), {}
  count = min(ROWS, heldout.num_examples)
  for ids in heldout.read(np.arange(count) * heldout.num_examples // count).ids:
    cuts = np.flatnonzero(np.isin(ids, special))
    for run in (part[1:] for part in np.split(ids, cuts) if len(part) > 1):
      first, *whole = _SENTENCE_ENDS.split(tokenizer.decode(run.tolist()).strip())
      found |= dict.fromkeys(whole or [first])  # the first of several often lacks its beginning
  texts = [text for text in found if text and text[-1] in _MARKS and all(map(_readable, text))]
  encoded = tokenizer.encode_offsets(texts)
  texts = [
    text
    for text, (ids, spans) in zip(texts, encoded, strict=True)
    if len(ids) <= longest and len(words(text, spans)) >= WORDS
  ]
  count = min(2 * SENTENCES, len(texts))
  return [texts[i * len(texts) // count] for i in range(count)]


def _readable(character: str) -> bool:
  return character in _MARKS or character.isspace() or unicodedata.category(character)[0] in "LM"


def words(text: str, spans: Sequence[tuple[int, int]]) -> list[Word]:
  """Returns the words of a text, without punctuation.

  >>> words("unseen, ok", [(0, 2), (2, 6), (6, 7), (8, 10)])
  [(0, 6, 2), (8, 10, 1)]
  """
  found = []
  for (start, end), continues in zip(spans, continues_word(text, spans), strict=True):
    first, _, tokens = found.pop() if continues and found else (start, start, 0)
    found.append((first, end, tokens + 1))
  return [word for word in found if _is_word(text[word[0] : word[1]])]


def _is_word(text: str) -> bool:
  return bool(text) and all(unicodedata.category(c)[0] in "LMN" for c in text)


def _pool(encoder: Any, texts: list[str]) -> list[list[tuple[str, Word]]]:
  """Returns the words of each text, with their places."""
  encoded = encoder.tokenizer.encode_offsets(texts)
  return [
    [(text[word[0] : word[1]], word) for word in words(text, spans)]
    for text, (_, spans) in zip(texts, encoded, strict=True)
  ]


def _filled(encoder: Any, texts: list[str]) -> dict:
  """Masks a word of each sentence: of the longest third of its words the most frequent."""
  mask, asked = encoder.tokenizer.decode([encoder.tokenizer.vocab.mask]), []
  found = _pool(encoder, texts)
  counts = collections.Counter(word for own in found for word, _ in own)
  for text, own in zip(texts, found, strict=True):
    single = sorted((x for x in own if x[1][2] == 1), key=lambda x: -len(x[0]))
    if longest := single[: -(-len(single) // 3)]:
      word, (start, end, _) = max(longest, key=lambda x: counts[x[0]])
      asked.append({"text": text[:start] + mask + text[end:], "word": word})
  k = min(CANDIDATES, encoder.tokenizer.vocab.size)
  filled = encoder.fill_mask([row["text"] for row in asked], k)
  rows = [row | {"choices": _choices(own)} for row, own in zip(asked, filled, strict=True)]
  right = sum(row["choices"][0][0] == row["word"] for row in rows if row["choices"])
  rows.sort(key=lambda row: -max((p for _, p in row["choices"]), default=0.0))
  return {"right": right, "count": len(rows), "sentences": rows[:SHOWN]}


def _choices(fills: Sequence) -> list[tuple[str, float]]:
  """Returns the likeliest of a mask's fills that are words, with their probabilities."""
  return [(fill.token, round(fill.probability, 4)) for fill in fills if _is_word(fill.token)][
    :CHOICES
  ]


def _detected(encoder: Any, texts: list[str]) -> dict:
  """Replaces words of each sentence by words of all sentences, and asks which were replaced."""
  found, random = _pool(encoder, texts), np.random.default_rng(0)
  drawn, changed = [word for own in found for word, _ in own], []
  for text, own in zip(texts, found, strict=True):
    chosen = random.choice(len(own), num_replaced(len(own)), replace=False)
    out, end, places = "", 0, []
    for i, (word, (start, stop, _)) in enumerate(own):
      others = [x for x in drawn if x != word] if i in chosen else [word]
      put = others[random.integers(len(others))]
      out += text[end:start]
      places.append((len(out), len(out) + len(put), word if i in chosen else None))
      out, end = out + put, stop
    changed.append((out + text[end:], places))
  rows = [
    pieces(text, places, tokens)
    for (text, places), tokens in zip(changed, encoder.detect([x for x, _ in changed]), strict=True)
  ]
  kinds = collections.Counter(piece.get("kind") for row in rows for piece in row)
  chance = sum(num_replaced(len(own)) ** 2 / len(own) for own in found)
  counts = {"found": kinds[FOUND], "count": kinds[FOUND] + kinds[MISSED], "texts": len(rows)}
  rows.sort(key=lambda row: -max(piece.get("probability", 0.0) for piece in row))
  return {**counts, "by_chance": round(chance, 1), "sentences": rows[:SHOWN]}


def num_replaced(count: int) -> int:
  """Returns how many of a sentence's words are replaced, and how many are suspected."""
  return max(1, round(REPLACED_FRAC * count))


def pieces(
  text: str, places: Sequence[tuple[int, int, str | None]], tokens: Sequence
) -> list[dict]:
  """Cuts a text into pieces as in `make`, marking the words that were or seem to be replaced.

  Args:
    places: of its words: characters [start, end), and the original if it was replaced.
    tokens: of `Encoder.detect`; a word is as suspect as the most suspect of its tokens.
  """
  inside = ([x.replaced for x in tokens if a <= x.start and x.end <= b] for a, b, _ in places)
  levels, asked = [max(own, default=0.0) for own in inside], any(was for *_, was in places)
  suspects = sorted(range(len(places)), key=lambda i: -levels[i])[: num_replaced(len(places))]
  cut, end = [], 0
  for i, (start, stop, was) in enumerate(places):
    kind = FOUND if was else FALSE if asked else SUSPECTED
    if i in suspects or was:
      kind = kind if i in suspects else MISSED
      mark = {"kind": kind, "probability": round(levels[i], 4), "was": was}
      cut += [{"text": text[end:start]}, {"text": text[start:stop], **mark}]
      end = stop
  return [*cut, {"text": text[end:]}]
