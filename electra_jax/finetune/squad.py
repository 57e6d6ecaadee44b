"""Makes windows from questions, decodes answers from outputs and computes the official scores.

A long context is split into overlapping windows; a predicted answer is a slice of the context.
"""

import collections
import functools
import itertools
import json
import math
import os
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune.batches import Feature
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.squad_files import Question, Questions, normalize

_CONTEXTS_AT_ONCE = 1024  # bounds the tokenizer's memory


class Window(NamedTuple):
  """An input row: [CLS] question [SEP] part of the context [SEP]."""

  feature: Feature  # with the targets of `qa_head.make_head`; in prediction only "allowed"
  question: int  # index of the question
  spans: np.ndarray  # [n, 2] int32, each token's characters [start, end) in the context, else 0, 0
  max_context: np.ndarray  # [n] bool, whether this window gives the token the most context


class Answer(NamedTuple):
  """A predicted answer, context[start:end]; `probability` is normalised over the n best."""

  text: str
  start: int | None  # None, like `end`, without an answer
  end: int | None
  score: float  # log-probability
  probability: float


class Decoded(NamedTuple):
  """Predictions by question id: the best text ("" without a span), n best answers, null odds."""

  predictions: dict[str, str]
  nbest: dict[str, list[Answer]]
  null_odds: dict[str, float]


def windows(
  questions: Questions,
  tokenizer: Tokenizer,
  *,
  max_length: int,
  stride: int,
  max_query: int,
  train: bool,
) -> list[Window]:
  """Returns the windows of all questions, in order.

  In training, the target is the first answer; a window without all of it is impossible, with target
  [CLS].

  Args:
    max_length, max_query: maximum tokens of a row and of a (truncated) question.
    stride: tokens between the starts of two windows.
    train: whether to add the targets and drop lost questions.

  Raises:
    TaskError: the lengths leave no room for the context, or training questions lack labels.
  """
  if stride < 1 or max_query < 1 or max_length < max_query + 4:
    raise TaskError(
      f"rows of {max_length} tokens (data.max_length or the network's positions) leave no room for"
      f" a context: lower qa.max_query={max_query}, keep qa.stride={stride} above 0"
    )
  if train and not questions.labelled:
    raise TaskError(f"{questions.path} has unlabelled questions: train on a labelled file")
  vocab, items = tokenizer.vocab, questions.items
  contexts = _encode_contexts(tokenizer, dict.fromkeys(q.context for q in items))
  heads = tokenizer.encode_batch([q.question for q in items])
  sep = np.array([vocab.sep], np.int32)
  made = []
  for index, (question, query) in enumerate(zip(items, heads, strict=True)):
    if train and not question.answers and not question.impossible:
      continue
    head = np.array([vocab.cls, *query[:max_query], vocab.sep], np.int32)
    ids, places = contexts[question.context]
    gold = _token_span(question, places) if train else None
    for begin, end, allowed, most in _parts(len(ids), len(head), max_length, stride):
      row = np.concatenate((head, ids[begin:end], sep))
      spans = np.zeros((len(row), 2), np.int32)
      spans[len(head) : -1] = places[begin:end]
      target = {"allowed": allowed}
      if train:
        target |= _targets(gold, begin, end, len(head))
      made.append(Window(Feature(row, len(head), target), index, spans, most))
  return made


def _encode_contexts(tokenizer: Tokenizer, contexts: Iterable[str]) -> dict:
  """Returns {context: (ids [m], characters [m, 2] of each token)}."""
  encoded, left = {}, iter(contexts)
  while texts := list(itertools.islice(left, _CONTEXTS_AT_ONCE)):
    for text, (ids, spans) in zip(texts, tokenizer.encode_offsets(texts), strict=True):
      places = np.array(spans, np.int32).reshape(-1, 2)
      encoded[text] = np.array(ids, np.int32), _with_marks(text, places)
  return encoded


def _with_marks(text: str, spans: np.ndarray) -> np.ndarray:
  """Extends spans [m, 2] by the following combining marks, which BERT's normaliser drops."""
  if text.isascii() or not any(unicodedata.category(char) == "Mn" for char in set(text)):
    return spans
  is_mark = np.array([unicodedata.category(char) == "Mn" for char in text] + [False])
  starts, ends = spans.T
  while (more := is_mark[ends] & (ends > starts)).any():
    ends = ends + more
  return np.stack([starts, ends], 1)


@functools.lru_cache(maxsize=1 << 14)
def _parts(tokens: int, head: int, max_length: int, stride: int) -> list[tuple]:
  """Returns the windows of a context of `tokens` tokens after `head` other tokens.

  A window is (begin, end, mask "allowed", `Window.max_context`), with tokens [begin, end) of the
  context.

  As in BERT, a token has the most context in the window with the largest min(distance to either
  end) + 0.01 x window length; ties go to the first window.
  """
  room, begins = max_length - head - 1, [0]
  while begins[-1] + room < tokens:
    begins.append(begins[-1] + min(room, stride))
  bounds = [(begin, min(begin + room, tokens)) for begin in begins]
  context = np.full((len(bounds), tokens), -1.0)
  for row, (begin, end) in zip(context, bounds, strict=True):
    before = np.arange(end - begin)
    row[begin:end] = np.minimum(before, before[::-1]) + 0.01 * (end - begin)
  best = context.argmax(0)
  parts = []
  for i, (begin, end) in enumerate(bounds):
    allowed, most = np.zeros((2, head + end - begin + 1), bool)
    allowed[0] = allowed[head:-1] = True
    most[head:-1] = best[begin:end] == i
    allowed.flags.writeable = most.flags.writeable = False  # many windows share them
    parts.append((begin, end, allowed, most))
  return parts


def _token_span(question: Question, places: np.ndarray) -> tuple[int, int] | None:
  """Returns the context's first and last token that overlap the first answer, or None."""
  if question.impossible or not question.answers:
    return None
  text, start = question.answers[0]
  first = int(np.searchsorted(places[:, 1], start, side="right"))
  last = int(np.searchsorted(places[:, 0], start + len(text), side="left")) - 1
  return (first, last) if first <= last else None


def _targets(gold: tuple[int, int] | None, begin: int, end: int, head: int) -> dict:
  # Differs from the original, which labels windows without the answer as answerable, so that the
  # classifier learns from the question alone.
  inside = gold is not None and begin <= gold[0] and gold[1] < end
  first, last = (place - begin + head for place in gold) if inside else (0, 0)
  return {"start": np.int32(first), "end": np.int32(last), "impossible": np.float32(not inside)}


def decode(
  questions: Questions,
  windows: Sequence[Window],
  outputs: dict[str, np.ndarray],
  *,
  n_best: int,
  max_answer_length: int,
) -> Decoded:
  """Returns the answers of all questions, with at most `n_best` distinct texts for each.

  A span is valid if it is in the context, starts at a token with the most context in its window,
  does not end before it starts, and has at most `max_answer_length` tokens.

  Args:
    outputs: of `qa_head.make_head`, [rows, ...] in the order of `windows`.

  Raises:
    ValueError: the numbers of windows and of rows of outputs differ.
  """
  if len(windows) != len(outputs["null"]):
    raise ValueError(f"got {len(outputs['null'])} rows of outputs for {len(windows)} windows")
  found: list[list] = [[] for _ in questions.items]
  for i, window in enumerate(windows):
    one = {name: values[i] for name, values in outputs.items()}
    found[window.question].append((*_candidates(window, one, max_answer_length), one["null"]))
  decoded = Decoded({}, {}, {})
  for question, of_windows in zip(questions.items, found, strict=True):
    scores, spans, odds = zip(*of_windows, strict=True)
    best = _best(question.context, np.concatenate(scores), np.concatenate(spans), n_best)
    decoded.nbest[question.id] = best
    decoded.predictions[question.id] = best[0].text if best else ""
    decoded.null_odds[question.id] = float(min(odds))
  return decoded


def _candidates(window: Window, one: dict, longest: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the scores [m] and characters [m, 2] of a window's valid spans."""
  n = len(window.spans)
  start = np.broadcast_to(one["start"][:, None], one["end"].shape)
  end, score = one["end"], one["start_logp"][:, None] + one["end_logp"]
  keep = (start > 0) & (start <= end) & (end < np.minimum(start + longest, n))
  start, end, score = start[keep], end[keep], score[keep]
  keep = window.max_context[start]  # False outside the context; an end outside gives ""
  start, end = start[keep], end[keep]
  return score[keep], np.stack([window.spans[start, 0], window.spans[end, 1]], 1)


def _best(context: str, scores: np.ndarray, spans: np.ndarray, n_best: int) -> list[Answer]:
  """Returns the n best distinct texts with their normalised probabilities."""
  scores = scores.astype(np.float64)
  kept: dict[str, tuple[int, int, float]] = {}
  for i in np.argsort(-scores, kind="stable"):
    first, last = spans[i].tolist()
    text = context[first:last]
    if text and text not in kept:
      kept[text] = (first, last, float(scores[i]))
      if len(kept) == n_best:
        break
  shares = np.exp([score - scores.max() for *_, score in kept.values()])
  return [
    Answer(text, *place, float(share))
    for (text, place), share in zip(kept.items(), shares / shares.sum(), strict=True)
  ]


def write(folder: str | os.PathLike, decoded: Decoded, threshold: float = math.inf) -> None:
  """Writes predictions.json and null_odds.json for the official scripts, and nbest.json.

  A prediction with null odds above `threshold` becomes "". raw_predictions.json keeps all, to find
  the best thresholds; it is not written for an infinite threshold, as in SQuAD 1.1.
  """
  raw, odds = decoded.predictions, decoded.null_odds
  contents: dict[str, dict] = {
    "predictions": {k: "" if odds[k] > threshold else raw[k] for k in raw},
    "nbest": {name: [a._asdict() for a in answers] for name, answers in decoded.nbest.items()},
    "null_odds": odds,
  }
  if threshold < math.inf:
    contents["raw_predictions"] = raw
  Path(folder).mkdir(parents=True, exist_ok=True)
  for file, content in contents.items():
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (Path(folder) / f"{file}.json").write_text(text + "\n", encoding="utf-8")


def token_f1(predicted: str, gold: str, empty_counts: bool) -> float:
  """Returns the F1 of two normalised answers as bags of words.

  With `empty_counts`, as in SQuAD 2.0, two empty answers agree.
  """
  ours, theirs = predicted.split(), gold.split()
  if not ours or not theirs:
    return float(empty_counts and ours == theirs)
  same = sum((collections.Counter(ours) & collections.Counter(theirs)).values())
  precision, recall = same / len(ours), same / len(theirs)
  return 2 * precision * recall / (precision + recall) if same else 0.0


def example_scores(questions: Questions, decoded: Decoded) -> np.ndarray:
  """Returns a row per question for `compute_metrics`: [n, 2] exact match and F1, from 0 to 1.

  For SQuAD 2.0 it is [n, 5], with whether there is an answer, the null odds, and whether the
  predicted text is not empty. Exact match and F1 then ignore the null odds.

  Raises:
    TaskError: the file has no labels.
  """
  if not questions.labelled:
    raise TaskError(f"{questions.path} has unlabelled questions: score a labelled file")
  rows, version_2 = [], questions.may_be_impossible
  for question in questions.items:
    text = decoded.predictions[question.id]
    predicted, golds = normalize(text), [normalize(gold) for gold in question.golds]
    golds = [gold for gold in golds if gold or not version_2] or [""]
    row = [predicted in golds, max(token_f1(predicted, gold, version_2) for gold in golds)]
    if version_2:
      row += [bool(question.golds), decoded.null_odds[question.id], text != ""]
    rows.append(row)
  return np.array(rows, np.float64)


def compute_metrics(scores: np.ndarray, threshold: float) -> dict[str, float]:
  """Returns {official name: percent, or null odds in best_*_thresh}, the main metric first.

  `scores` are from `example_scores`. For SQuAD 2.0, null odds above `threshold` mean "no answer";
  best_* use the best thresholds for these questions. HasAns_* and NoAns_* are over questions with
  and without an answer and, as in the official script, missing if there are none.
  """
  if scores.shape[1] == 2:
    exact, f1 = 100 * scores.mean(0)
    return {"exact_match": float(exact), "f1": float(f1)}
  raw, has_answer, odds = scores[:, :2], scores[:, 2] > 0, scores[:, 3]
  decided = np.where((odds > threshold)[:, None], ~has_answer[:, None], raw)
  found = dict(zip(("exact", "f1"), (100 * decided.mean(0)).tolist(), strict=True))
  for name, rows in (("HasAns", has_answer), ("NoAns", ~has_answer)):
    if rows.any():
      exact, f1 = 100 * decided[rows].mean(0)
      found |= {f"{name}_exact": float(exact), f"{name}_f1": float(f1)}
  # At the lowest threshold no question is answered; raising it answers them in order of their odds.
  order = np.argsort(odds, kind="stable")
  for i, name in enumerate(("exact", "f1")):
    change = np.where(has_answer, raw[:, i], -scores[:, 4])[order]
    sums = np.cumsum([(~has_answer).sum(), *change])  # in the official order, for equal bits
    best = int(sums.argmax())
    found[f"best_{name}"] = float(100 * sums[best] / len(scores))
    found[f"best_{name}_thresh"] = float(odds[order[best - 1]]) if best else 0.0
  return found
