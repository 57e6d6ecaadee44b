"""Composes text (NFC), and counts its characters that become unknown tokens."""

import collections
import functools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

compose = functools.partial(unicodedata.normalize, "NFC")

# Counted characters: all except spaces; then those of unknown tokens, by the reason: in words above
# the model's limit, known once composed, others.
ALL = "characters"
LONG, DECOMPOSED, MISSING = LOST = ("unknown_long", "unknown_decomposed", "unknown_missing")
REASONS = {
  LONG: "in words that are too long for WordPiece",
  DECOMPOSED: "in decomposed form (NFD), which the vocabulary lacks",
  MISSING: "in words that the vocabulary cannot spell",
}
CACHED_WORDS, CACHED_CHARS = 1 << 16, 40  # number of words with cached counts, and their length
NOTED = 0.05  # share of a text's characters from which their loss is noted


def checked(encode: Callable, texts: Sequence[str]) -> list:
  """Returns encode(texts); raises ValueError for a lone surrogate, which is half a character."""
  try:
    return encode(texts)
  except (TypeError, UnicodeEncodeError):
    for text in texts:
      if half := re.search("[\ud800-\udfff]", text):
        place = f"U+{ord(half[0]):04X} at character {half.start()} of {text[:40]!a}"
        raise ValueError(f"{place} is half a character (a lone surrogate): remove it") from None
    raise


def moved(spans: Sequence[tuple[int, int]], text: str) -> list[tuple[int, int]]:
  r"""Returns the spans in a text of spans in its composed form.

  >>> moved([(0, 1), (1, 2)], "e\u0301a")
  [(0, 2), (2, 3)]
  """
  starts, begin = [], 0  # of the composed characters; of characters that may compose
  for end in range(1, len(text) + 1):
    own, following = compose(text[begin:end]), text[end : end + 1]
    apart = own + compose(following) == compose(text[begin : end + 1])
    if apart and not (following and unicodedata.combining(following)):
      starts += [min(begin + i, end - 1) for i in range(len(own))]
      begin = end
  starts.append(len(text))
  return [(starts[a], starts[b]) for a, b in spans]


def trimmed(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
  """Returns spans in a text without their outer spaces."""
  starts = [end - len(text[start:end].lstrip()) for start, end in spans]
  return [(i, i + len(text[i:end].rstrip())) for i, (_, end) in zip(starts, spans, strict=True)]


def note(counts: collections.Counter[str]) -> str:
  """Returns a line about counts of `Losses`, or "" if little is unknown."""
  lost = sum(counts[reason] for reason in LOST)
  if lost <= NOTED * counts[ALL]:
    return ""
  most = REASONS[max(LOST, key=counts.__getitem__)]
  return f"note: {lost / counts[ALL]:.1%} of the characters are unknown, most of them {most}"


class Losses:
  """The characters of texts, and how many of them a tokenizer makes unknown, in `counts`."""

  def __init__(self, tokenizer):
    self.counts: collections.Counter[str] = collections.Counter()
    self._tokenizer = tokenizer
    self._cache: dict[str, dict[str, int]] = {}  # of words

  def add(self, texts: Sequence[str], suspects: Iterable[str]) -> None:
    """Counts texts, of which the words `suspects` may have unknown tokens."""
    self.counts[ALL] += sum(len(text) - text.count(" ") for text in texts)
    words = collections.Counter(suspects)
    if len(self._cache) > CACHED_WORDS:
      self._cache.clear()
    new = list(words.keys() - self._cache)
    self._cache.update(zip(new, self._lost(new), strict=True))
    for word, count in words.items():
      for reason, size in self._cache[word].items():
        self.counts[reason] += count * size
    for word in new:
      if len(word) > CACHED_CHARS:
        del self._cache[word]

  def _lost(self, words: list[str]) -> Iterator[dict[str, int]]:
    """Yields the characters that each word loses, by the reason."""
    sizes_of, longest = self._tokenizer.unknown_sizes, self._tokenizer.longest_word
    for word, sizes in zip(words, sizes_of(words), strict=True):
      if not sizes:
        yield {}
        continue
      long = sum(size for size in sizes if size > longest)
      left, composed = sum(sizes) - long, compose(word)
      others = sizes if composed == word else sizes_of([composed])[0]
      gained = min(max(sum(sizes) - sum(others), 0), left)
      yield {LONG: long, DECOMPOSED: gained, MISSING: left - gained}
