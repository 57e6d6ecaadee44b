"""Makes windows for sequence tagging, decodes tags and scores them.

Entities (chunks, names) are read in IOB1 or one of SCHEMES, trained in BIOES as in the original,
and scored and written in BIO. Other tags, such as parts of speech, stay unchanged.
"""

import itertools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune.batches import Feature
from electra_jax.finetune.files import MAX_BAD_FRAC, TaskError
from electra_jax.finetune.tag_files import Sentence, read  # noqa: F401 (here in version 0.1)

# {scheme: prefixes of its tags beside O}; BIO includes IOB1
SCHEMES = {"BIO": "BI", "BIOES": "BIES", "BILOU": "BILU", "BMEWO": "BMEW", "BMES": "BMES"}
_IN_BIOES = {"L": "E", "U": "S", "M": "I", "W": "S"}
_ENTITY_TAG = re.compile(r"O|([BIESLUMW])(-.+)?")
# Tags that were probably meant as entities'.
_PREFIXED = re.compile(r"([BIESLUMWbieslumw]) ?[-_:/.|–—] ?(.+)")
_SUFFIXED = re.compile(r"(.+)[-_:/.|–—]([BIESLUMW])")


class TagWindow(NamedTuple):
  """A sentence, or a window of a long one. Each word of a sentence is tagged in one window.

  The feature's target "tag" [n] int32 is -1 except at the first token of each word in `words`.
  """

  feature: Feature
  words: range  # indices of the words that the window tags
  positions: np.ndarray  # [len(words)] int64, position of each word's first token in the feature


def scheme_of(tags: Collection[str]) -> str | None:
  """Returns the scheme of a file's tags, a key of SCHEMES; None if they are not entities.

  >>> scheme_of({"B-NP", "O"}), scheme_of({"B-NP", "U-NP"}), scheme_of({"B-NP", "VBZ"})
  ('BIO', 'BILOU', None)
  """
  found = [_ENTITY_TAG.fullmatch(tag) for tag in tags]
  if not all(found):
    return None
  letters = {match[1] for match in found} - {None}
  if "B" not in letters and any(m[0] in ("L", "U", "M", "W") for m in found):
    return None  # letters of another meaning
  return next((name for name, x in SCHEMES.items() if letters <= set(x)), None)


def near_miss(tags: Collection[str]) -> tuple[str, str] | None:
  """Returns a tag that is not read as an entity's, and how to write it; None if unlikely.

  >>> near_miss(["O", "B_X", "I_X"]), near_miss(["X-B", "X-I", "O"]), near_miss(["NN", "VB"])
  (('B_X', 'B-X'), ('X-B', 'B-X'), None)
  """
  fixed = {}
  for tag in sorted(tags):
    before, after = _PREFIXED.fullmatch(tag), _SUFFIXED.fullmatch(tag)
    if tag in ("O", "o", "0"):
      fixed[tag] = "O"
    elif before:
      fixed[tag] = f"{before[1].upper()}-{before[2]}"
    elif after:
      fixed[tag] = f"{after[2]}-{after[1]}"
    else:
      fixed[tag] = f"I-{tag}" if "O" in tags and len(tag) > 1 else tag
  other = [(tag, x) for tag, x in fixed.items() if tag != x]
  if not other or scheme_of(fixed.values()) is None:
    return None
  return min(other, key=lambda change: change[1] == "O")


def is_entities(labels: Iterable[str]) -> bool:
  """Returns whether all labels are of BIOES, with or without a type.

  >>> is_entities(["B-NP", "O"]), is_entities(["B-NP", "VBZ"])
  (True, False)
  """
  return all(label[:1] in "BIESO" and _ENTITY_TAG.fullmatch(label) for label in labels)


def _are_entities(tags: Iterable[str]) -> bool:
  """Returns whether all tags of a sentence are of one of SCHEMES."""
  return all(map(_ENTITY_TAG.fullmatch, tags))


def _entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
  """Returns (type, first, last) of each entity as in conlleval; the type "_" means none."""
  from seqeval.metrics.sequence_labeling import get_entities

  return get_entities([_IN_BIOES.get(tag[0], tag[0]) + tag[1:] for tag in tags])


def to_bioes(tags: Sequence[str]) -> list[str]:
  """Converts one of SCHEMES to BIOES (E last, S single); keeps other tags.

  >>> to_bioes(["B-NP", "I-NP", "O", "B-VP"])
  ['B-NP', 'E-NP', 'O', 'S-VP']
  """
  return _rewritten(tags, "SBIE")


def to_bio(tags: Sequence[str]) -> list[str]:
  """Converts one of SCHEMES to BIO; keeps other tags.

  Inconsistent predictions are read as in conlleval: an entity also begins where the type changes,
  and after an O, an E or an S.

  >>> to_bio(["I-NP", "E-NP", "E-NP", "O", "S-VP"])
  ['B-NP', 'I-NP', 'B-NP', 'O', 'B-VP']
  """
  return _rewritten(tags, "BBII")


def _rewritten(tags: Sequence[str], prefixes: str) -> list[str]:
  """Rewrites entities with the prefixes of a single, the first, an inner and the last word."""
  if not _are_entities(tags):
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

  For entities these are O and all of BIES for each type, because other splits may need them.

  Raises:
    TaskError: the sentences have no tags, or only some tags are BIO.
  """
  places = {tag: sentence.place for sentence in sentences for tag in _gold(sentence)}
  found = set(places)
  if scheme_of(found) is None:
    if "O" in found and any(tag[:2] in ("B-", "I-") for tag in found):
      tag = min(tag for tag in found if not is_entities([tag]))
      raise TaskError(f"{places[tag]}: the tag {tag!r} is not BIO, but the other tags are")
    return tuple(sorted(found))
  types = {tag[1:] for tag in found - {"O"}}
  return tuple(sorted({"O"} | {prefix + kind for prefix in "BIES" for kind in types}))


def describe(sentences: Sequence[Sentence]) -> str:
  """Returns the scheme of training sentences with the number of entities, or why it has none."""
  tags = {tag for sentence in sentences for tag in _gold(sentence)}
  if scheme := scheme_of(tags):
    counts = Counter(x[0] for sentence in sentences for x in _entities(_gold(sentence)))
    listed = ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common(5))
    return f"tags are {scheme} with {counts.total():,} entities: {listed}"
  line = "tags not read as entities: accuracy only"
  if miss := near_miss(tags):
    return f"{line}; write {miss[1]} for {miss[0]}"
  is_number = all(tag.isdecimal() for tag in tags)
  return f"{line}; name them by tagging.labels" if is_number else line


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
      if entities and not _are_entities(sentence.tags):
        tag = next(tag for tag in sentence.tags if not _are_entities([tag]))
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
  sizes = np.array([min(len(word), room) for word in tokens])
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
    yield TagWindow(Feature(ids, len(ids), target), answered, positions)


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
