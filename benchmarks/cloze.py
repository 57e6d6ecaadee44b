"""Writes the gaps of `electra-jax evaluate cloze`: held-out words among samples of a trigram model.

Command:  python benchmarks/cloze.py --out=cloze.jsonl [--sources=text:text.txt] [--gaps=20000]
Hardware: one core, two minutes for 150 MB of text.

A gap is one of the `WORDS` most frequent words of the training documents, evenly spaced over the
held-out documents of a build with the same sources and `--holdout`. Its nine other words are drawn
without repetition from that model of the training documents (`SHARES` of trigrams, bigrams and
words), given the two words in front; words that differ only in case are not choices for one gap.
"""

import collections
import json
import re
from collections.abc import Iterator
from pathlib import Path

import machine
import numpy as np

from electra_jax.data import chunks
from electra_jax.data import sources as text_sources
from electra_jax.finetune.batches import subset

WORDS, OTHERS, SHARES = 3_000, 9, (0.5, 0.3, 0.2)
LEFT, RIGHT = 16, 8  # tokens of the regular expression around a gap
_WORD = re.compile(r"\w+(?:['’]\w+)?|[^\w\s]")


def texts(spec: str, holdout: float, heldout: bool) -> Iterator[str]:
  """Yields the lines of the held-out or of the other documents."""
  for source in text_sources.parse(spec):
    for text in text_sources.documents(source, text_sources.SourceStats(source)):
      if not text.repeat and chunks.is_held_out(text.key, holdout) == heldout:
        yield from text.text.split("\n")


def gaps_of(line: str, known: dict[str, int]) -> Iterator[tuple]:
  """Yields (left, right, word, the two words in front) of each known word of a line."""
  found = list(_WORD.finditer(line))
  for i in range(2, len(found)):
    if (word := found[i].group()) in known:
      start, end = found[max(0, i - LEFT)].start(), found[min(len(found) - 1, i + RIGHT)].end()
      at, after = found[i].span()
      yield line[start:at], line[after:end], word, (found[i - 2].group(), found[i - 1].group())


def main(
  out: Path, sources: str = "text:text.txt", gaps: int = 20_000, holdout: float = 0.01
) -> None:
  """
  --out       the file to write
  --sources   the text, as data.sources of the build
  --holdout   data.holdout_frac of the build
  """
  counts = collections.Counter()
  for line in texts(sources, holdout, heldout=False):
    counts.update(_WORD.findall(line))
  frequent = [word for word, _ in counts.most_common() if word[0].isalpha()][:WORDS]
  known = {word: i for i, word in enumerate(frequent)}
  lines = texts(sources, holdout, heldout=True)
  chosen = subset([gap for line in lines for gap in gaps_of(line, known)], gaps)
  bigrams = {front[1]: collections.Counter() for *_, front in chosen}
  trigrams = {front: collections.Counter() for *_, front in chosen}
  for line in texts(sources, holdout, heldout=False):
    words = _WORD.findall(line)
    for front, last, word in zip(words, words[1:], words[2:], strict=False):
      if last in bigrams and word in known:
        bigrams[last][word] += 1
        if (front, last) in trigrams:
          trigrams[front, last][word] += 1
  alone = np.array([counts[word] for word in frequent]) / sum(counts[word] for word in frequent)
  rng, groups = np.random.default_rng(0), [word.casefold() for word in frequent]
  with out.open("w", encoding="utf-8") as file:
    for left, right, own, front in chosen:
      p = SHARES[2] * alone
      for share, found in zip(SHARES, (trigrams[front], bigrams[front[1]]), strict=False):
        if found:
          values = np.array(list(found.values()))
          p[[known[word] for word in found]] += share * values / values.sum()
      words = {own.casefold(): own}
      for i in np.argsort(-(np.log(p) + rng.gumbel(size=len(p)))):  # draws without replacement
        words.setdefault(groups[i], frequent[i])
        if len(words) > OTHERS:
          break
      row = {"left": left, "right": right, "words": list(words.values())}
      file.write(json.dumps(row, ensure_ascii=False) + "\n")
  print(f"{out}: {len(chosen):,} gaps of {WORDS:,} words")


if __name__ == "__main__":
  machine.start(main)
