"""Reads CoNLL files for sequence tagging, makes windows, decodes tags and scores them.

Entities (chunks, names) are read in IOB1, BIO or BIOES, trained in BIOES as in the original, and
scored and written in BIO. Other tags, such as parts of speech, stay unchanged.
"""

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune import files
from electra_jax.finetune.batches import Feature
from electra_jax.finetune.files import MAX_BAD_FRAC, TaskError

DOCUMENT_START = "-DOCSTART-"  # CoNLL-2003's line between documents
_ENTITY_TAG = re.compile(r"O|[BIES](-.+)?")
OTHER_SCHEMES = ("L-", "U-", "M-", "W-")  # entity prefixes of BILOU and BMEWO


class Sentence(NamedTuple):
  """A sentence of a file."""

  words: tuple[str, ...]
  tags: tuple[str, ...] | None  # one per word, in the file's scheme; None without tags
  place: str  # "file:line" of its first word


class TagWindow(NamedTuple):
  """A sentence, or a window of a long one. Each word of a sentence is tagged in one window.

  The feature's target "tag" [n] int32 is -1 except at the first token of each word in `words`.
  """

  feature: Feature
  words: range  # indices of the words that the window tags
  positions: np.ndarray  # [len(words)] int64, position of each word's first token in the feature
  cut: int  # number of tokens cut from words longer than a window


def read(
  path: str | os.PathLike,
  *,
  word_column: int = 0,
  tag_column: int | None = -1,
  tags_optional: bool = False,
) -> list[Sentence]:
  """Reads a CoNLL file: a word a line, columns at spaces or tabs, blank lines between sentences.

  A row of .jsonl or .parquet is a sentence, and its lists are the columns. Columns count from 0, or
  from the end if negative. The sentences have no tags if `tag_column` is None or the word's column
  (as in a file of one column), or if the file lacks the column and `tags_optional` is set.

  Raises:
    TaskError: the file is missing, damaged, not UTF-8 or has no sentence, the number of columns
      varies, or a column does not exist.
  """
  sentences = list(_sentences(path))
  if not sentences:
    raise TaskError(f"{path}: the file has no sentences")
  first, columns = sentences[0][0]
  width, tag_column = len(columns), word_column if tag_column is None else tag_column
  if tags_optional and not -width <= tag_column < width:
    tag_column = word_column
  for column in (word_column, tag_column):
    if not -width <= column < width:
      raise TaskError(f"{first}: no column {column}, the line has {width} columns")
  for place, columns in itertools.chain(*sentences):
    if len(columns) != width:
      line = first.rpartition(":")[2]
      raise TaskError(f"{place}: {len(columns)} columns, line {line} has {width}")
  is_tagged, found = (tag_column - word_column) % width != 0, []
  for rows in sentences:
    words, tags = (tuple(columns[i] for _, columns in rows) for i in (word_column, tag_column))
    found.append(Sentence(words, tags if is_tagged else None, rows[0][0]))
  return found


def _sentences(path: str | os.PathLike) -> Iterator[list[tuple[str, Sequence[str]]]]:
  """Yields a list of each word's place and columns for each sentence."""
  if files.form_of(path) in (".jsonl", ".parquet"):
    for place, row in itertools.islice(files.read_rows(path), 1, None):
      if isinstance(row, str):
        raise TaskError(f"{place}: {row}")
      lists = [value for value in row.values() if isinstance(value, list)]
      if len({len(values) for values in lists}) > 1:
        raise TaskError(f"{place}: lists of {' and '.join(str(len(x)) for x in lists)} elements")
      if words := [(place, tuple(map(str, columns))) for columns in zip(*lists, strict=True)]:
        yield words
    return
  split = (re.findall(r"[^ \t]+", line) for line in files.read_lines(path))
  lines = ((f"{path}:{number}", columns) for number, columns in enumerate(split, 1))
  for has_words, rows in itertools.groupby(
    lines, lambda row: bool(row[1]) and DOCUMENT_START not in row[1]
  ):
    if has_words:
      yield list(rows)


def is_entities(tags: Iterable[str]) -> bool:
  """Returns whether all tags are IOB1, BIO or BIOES, with or without a type.

  >>> is_entities(["B-NP", "O"]), is_entities(["B-NP", "VBZ"])
  (True, False)
  """
  return all(map(_ENTITY_TAG.fullmatch, tags))


def _entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
  """Returns (type, first, last) of each entity as in conlleval; the type "_" means none."""
  from seqeval.metrics.sequence_labeling import get_entities

  return get_entities(list(tags))


def to_bioes(tags: Sequence[str]) -> list[str]:
  """Converts IOB1, BIO or BIOES to BIOES (E last, S single); keeps other tags.

  >>> to_bioes(["B-NP", "I-NP", "O", "B-VP"])
  ['B-NP', 'E-NP', 'O', 'S-VP']
  """
  return _rewritten(tags, "SBIE")


def to_bio(tags: Sequence[str]) -> list[str]:
  """Converts IOB1, BIO or BIOES to BIO; keeps other tags.

  Inconsistent predictions are read as in conlleval: an entity also begins where the type changes,
  and after an O, an E or an S.

  >>> to_bio(["I-NP", "E-NP", "E-NP", "O", "S-VP"])
  ['B-NP', 'I-NP', 'B-NP', 'O', 'B-VP']
  """
  return _rewritten(tags, "BBII")


def _rewritten(tags: Sequence[str], prefixes: str) -> list[str]:
  """Rewrites entities with the prefixes of a single, the first, an inner and the last word."""
  if not is_entities(tags):
    return list(tags)
  single, begin, inside, end = prefixes
  written = ["O"] * len(tags)
  for kind, first, last in _entities(tags):
    n = last + 1 - first
    pattern = single if n == 1 else begin + inside * (n - 2) + end
    written[first : last + 1] = [c if kind == "_" else f"{c}-{kind}" for c in pattern]
  return written


def labels(sentences: Sequence[Sentence]) -> tuple[str, ...]:
  """Returns the sorted labels of the training split.

  For entities these are O and all of BIES for each type, because other splits may need them. BILOU
  and BMEWO tags are treated as plain labels.

  Raises:
    TaskError: the sentences have no tags, or only some tags are BIO.
  """
  places = {tag: sentence.place for sentence in sentences for tag in _gold(sentence)}
  found = set(places)
  if not is_entities(found):
    odd = sorted(tag for tag in found if not is_entities([tag]))
    mixed = "O" in found and any(tag[:2] in ("B-", "I-") for tag in found)
    if mixed and not all(tag[:2] in OTHER_SCHEMES for tag in odd):
      tag = odd[0]
      raise TaskError(f"{places[tag]}: the tag {tag!r} is not BIO, but the other tags are")
    return tuple(sorted(found))
  types = {tag[1:] for tag in found - {"O"}}
  return tuple(sorted({"O"} | {prefix + kind for prefix in "BIES" for kind in types}))


def unseen(sentences: Sequence[Sentence], labels: Sequence[str]) -> dict[str, int]:
  """Returns {gold tag that is not a label: number of words}, with entities in BIO."""
  counts = Counter(tag for sentence in sentences for tag in _as_scored(_gold(sentence), labels))
  return {tag: count for tag, count in sorted(counts.items()) if tag not in labels}


def check_unseen(sentences: Sequence[Sentence], labels: Sequence[str]) -> list[str]:
  """Returns a list with a note on tags missing in training, or [].

  Raises:
    TaskError: more than MAX_BAD_FRAC of the words have such tags, or the sentences have no tags.
  """
  missing, words = unseen(sentences, labels), sum(len(s.words) for s in sentences)
  if not missing:
    return []
  counted = ", ".join(f"{tag} ({count})" for tag, count in list(missing.items())[:5])
  note = f"tags missing in training, counted as errors: {counted}"
  if sum(missing.values()) > MAX_BAD_FRAC * words:
    file = sentences[0].place.rpartition(":")[0]
    raise TaskError(f"{file}: {note}; above {MAX_BAD_FRAC:.0%} of {words} words")
  return [note]


def _gold(sentence: Sentence) -> tuple[str, ...]:
  if sentence.tags is None:
    raise TaskError(
      f"{sentence.place}: no column of tags besides the words: set tagging.tag_column and"
      " tagging.word_column"
    )
  return sentence.tags


def _as_scored(tags: Sequence[str], labels: Iterable[str]) -> list[str]:
  return to_bio(tags) if is_entities(labels) else list(tags)


def windows(
  sentences: Sequence[Sentence], tokenizer: Tokenizer, labels: Sequence[str], *, max_length: int
) -> list[TagWindow]:
  """Returns one window per sentence, several if it has more than max_length - 2 tokens.

  Windows overlap by about half. A word is tagged in the window that gives it the most context, in
  tokens to the nearer end. A word without tokens becomes [UNK]. Words are encoded separately, with
  a space before all but the first if the vocabulary keeps spaces. Targets are indices into
  `labels`, -1 for an unknown tag; sentences without tags have no target.

  Raises:
    TaskError: max_length is below 3, or the labels are entities' and a gold tag is not.
  """
  room = max_length - 2
  if room < 1:
    raise TaskError(f"max_length must be at least 3, got {max_length}")
  spaced = [tokenizer.spaced(" ".join(s.words), s.words) for s in sentences]
  words = sorted(set(itertools.chain.from_iterable(spaced)))
  encoded = dict(zip(words, tokenizer.encode_batch(words), strict=True))
  index = {label: i for i, label in enumerate(labels)}
  entities, made = is_entities(labels), []
  for sentence, parts in zip(sentences, spaced, strict=True):
    tokens = [encoded[word] or [tokenizer.vocab.unk] for word in parts]
    targets = None
    if sentence.tags is not None:
      if entities and not is_entities(sentence.tags):
        tag = next(tag for tag in sentence.tags if not is_entities([tag]))
        raise TaskError(f"{sentence.place}: the tag {tag!r} is not BIO, but the labels are")
      tags = to_bioes(sentence.tags) if entities else sentence.tags
      targets = np.array([index.get(tag, -1) for tag in tags], np.int32)
    made += _sentence_windows(tokens, targets, tokenizer, room)
  return made


def _sentence_windows(
  tokens: list[list[int]], targets: np.ndarray | None, tokenizer: Tokenizer, room: int
) -> Iterator[TagWindow]:
  """Yields a sentence's windows from its words' tokens and targets [words]."""
  vocab = tokenizer.vocab
  whole = np.array([len(word) for word in tokens])
  sizes = np.minimum(whole, room)
  starts = np.concatenate([[0], np.cumsum(sizes)])
  bounds = _window_bounds(starts, room)
  for (begin, end), answered in zip(bounds, _answered(starts, bounds), strict=True):
    if not answered:
      continue
    pieces = itertools.chain.from_iterable(word[:room] for word in tokens[begin:end])
    ids = np.array([vocab.cls, *pieces, vocab.sep], np.int32)
    positions = starts[answered] - starts[begin] + 1
    target = {}
    if targets is not None:
      target["tag"] = np.full(len(ids), -1, np.int32)
      target["tag"][positions] = targets[answered]
    cut = int((whole - sizes)[answered].sum())
    yield TagWindow(Feature(ids, len(ids), target), answered, positions, cut)


def _window_bounds(starts: np.ndarray, room: int) -> list[tuple[int, int]]:
  """Returns (first word, end) of windows of at most `room` tokens that cover a sentence.

  `starts` [words + 1] are the first tokens of the words, which have at most `room` tokens, and the
  end of the last word.
  """
  last = len(starts) - 1
  bounds, begin = [], 0
  while True:
    end = int(np.searchsorted(starts, starts[begin] + room, "right")) - 1
    if end == last:  # the last window is extended backwards to its full size
      bounds.append((int(np.searchsorted(starts, starts[last] - room)), last))
      return bounds
    bounds.append((begin, end))
    half = int(np.searchsorted(starts, starts[begin] + room // 2, "right")) - 1
    begin = max(half, begin + 1)


def _answered(starts: np.ndarray, bounds: list[tuple[int, int]]) -> list[range]:
  """Returns the words that each window tags.

  The later of two windows gives a word more context if its middle is after the overlap's middle.
  """
  middles = starts[:-1] + starts[1:]
  overlaps = [starts[a[1]] + starts[b[0]] for a, b in itertools.pairwise(bounds)]
  ends = np.searchsorted(middles, overlaps, "right").tolist()
  return [range(a, b) for a, b in itertools.pairwise([0, *ends, len(middles)])]


def decode(
  sentences: Sequence[Sentence],
  windows: Sequence[TagWindow],
  labels: Sequence[str],
  outputs: dict[str, Sequence[np.ndarray]],
) -> list[list[str]]:
  """Returns the most likely tag of each word from the logits of each window, entities in BIO."""
  of_words = [x[w.positions] for w, x in zip(windows, outputs["logits"], strict=True)]
  return split_tags(sentences, labels, np.argmax(np.concatenate(of_words), -1))


def split_tags(
  sentences: Sequence[Sentence], labels: Sequence[str], predicted: np.ndarray
) -> list[list[str]]:
  """Returns each sentence's tags, entities in BIO, from the label indices of all words [words]."""
  ends = np.cumsum([len(sentence.words) for sentence in sentences])
  tags = np.split(np.array(labels, object)[predicted], ends[:-1])
  return [_as_scored(of_sentence.tolist(), labels) for of_sentence in tags]


def example_scores(
  sentences: Sequence[Sentence], predicted: Sequence[Sequence[str]], labels: Sequence[str]
) -> np.ndarray:
  """Returns the counts of each sentence, [sentences, 5] float64, or [sentences, 2].

  The columns are correct, predicted and gold entities, correct words (in BIO) and words; only the
  last two for labels other than entities. An entity is correct if its words and its type are.

  Raises:
    TaskError: a sentence has no gold tags.
  """
  pairs = [(_gold(sentence), tags) for sentence, tags in zip(sentences, predicted, strict=True)]
  if not is_entities(labels):
    return np.array([_right(gold, tags) for gold, tags in pairs], np.float64).reshape(-1, 2)
  rows = []
  for gold, tags in pairs:
    true, found = set(_entities(gold)), set(_entities(tags))
    rows.append((len(true & found), len(found), len(true), *_right(to_bio(gold), to_bio(tags))))
  return np.array(rows, np.float64).reshape(-1, 5)


def _right(gold: Sequence[str], predicted: Sequence[str]) -> tuple[int, int]:
  return sum(a == b for a, b in zip(gold, predicted, strict=True)), len(gold)


def compute_metrics(scores: np.ndarray) -> dict[str, float]:
  """Returns {metric: percent} over all sentences from the rows of `example_scores`.

  F1, precision and recall are micro-averaged over entities; accuracy is over words, and the only
  metric of other tags. A ratio with denominator 0 is 0.

  >>> compute_metrics(np.array([[1.0, 2, 1, 5, 8], [1, 2, 1, 2, 2]]))
  {'f1': 66.66666666666667, 'precision': 50.0, 'recall': 100.0, 'accuracy': 70.0}
  """
  *entities, right, words = scores.sum(0).tolist()
  ratios = {"accuracy": (right, words)}
  if entities:
    found, predicted, true = entities
    of_entities = {"f1": (2 * found, predicted + true), "precision": (found, predicted)}
    ratios = {**of_entities, "recall": (found, true), **ratios}
  return {name: 100 * part / whole if whole else 0.0 for name, (part, whole) in ratios.items()}


def write(
  path: str | os.PathLike,
  sentences: Sequence[Sentence],
  predicted: Sequence[Sequence[str]],
  labels: Sequence[str],
) -> None:
  """Writes lines of word, gold tag if known and predicted tag, for conlleval; entities in BIO."""
  with open(path, "w", encoding="utf-8", newline="\n") as file:
    for sentence, tags in zip(sentences, predicted, strict=True):
      columns: list[Sequence[str]] = [sentence.words]
      if sentence.tags is not None:
        columns.append(_as_scored(sentence.tags, labels))
      for row in zip(*columns, tags, strict=True):
        file.write(" ".join(row) + "\n")
      file.write("\n")
