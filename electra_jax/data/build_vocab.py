"""The vocabulary of a build: a copy of a file, or one that `vocabulary` trains on a sample."""

import collections
import heapq
import json
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from ml_collections import ConfigDict

from electra_jax.data import sources, tokenizer, vocabulary
from electra_jax.data.sources import TextChunk
from electra_jax.data.status import print_line
from electra_jax.data.tokenizer import Vocab, VocabError
from electra_jax.monitor.display import doing
from electra_jax.runtime.terminal import log_console


def load_given(config: ConfigDict) -> tokenizer.Tokenizer:
  """Loads the file `data.vocab`.

  Raises:
    ValueError: it has entries twice, drops unknown text, or has rules of its own where
      `strip_accents` is set.
  """
  data = config.data
  if data.vocab.endswith(".txt"):
    counts = collections.Counter(tokenizer.read_pieces(Path(data.vocab)))
    if twice := [piece for piece, n in counts.items() if n > 1]:
      raise ValueError(f"{data.vocab} has {len(twice)} entries twice, the first is {twice[0]!r}")
  loaded = tokenizer.load(data.vocab, data.lowercase, data.strip_accents)
  if data.strip_accents is not None and loaded.vocab.kind != "wordpiece":
    raise VocabError(
      f"config.data.strip_accents={data.strip_accents}: {data.vocab} has its own rules, leave it"
    )
  if loaded.vocab.kind == "tokenizer.json" and loaded.encode_batch([tokenizer.UNKNOWN]) == [[]]:
    if json.loads(loaded.engine_json())["model"].get("unk_token", "") is None:
      raise VocabError(
        f"{data.vocab} drops text that it does not know: give its model an unk_token, such as [UNK]"
      )
  return loaded


def given(config: ConfigDict, folder: Path) -> Vocab:
  """Copies the file `data.vocab` to a folder and returns its vocabulary; raises as `load_given`."""
  data, loaded = config.data, load_given(config)
  loaded.save(folder)
  if data.strip_accents is None and loaded.vocab.strip_accents:
    pieces = Path(data.vocab).read_text("utf-8").split("\n")
    if (count := sum(map(_has_accents, pieces))) > 0.01 * len(pieces):
      print_line(
        f"note: {data.vocab} has {count:,} entries with accents, which BERT's rule strips"
        " from text: set config.data.strip_accents=false if they were kept when it was trained"
      )
  return loaded.vocab


def _has_accents(piece: str) -> bool:
  return any(unicodedata.category(c) == "Mn" for c in unicodedata.normalize("NFD", piece))


def trained(config: ConfigDict, texts: list[str], folder: Path) -> Vocab:
  """Trains the vocabulary on texts and writes it to a folder."""
  data = config.data
  kind = "wordpiece" if data.vocab == "wordpiece" else "sentencepiece"
  size = sum(len(text.encode()) for text in texts)
  print_line(f"training a {data.vocab} vocabulary of {data.vocab_size:,} on {size / 1e6:.1f} MB")
  with doing("training the vocabulary", log_console()):
    return vocabulary.train(
      data.vocab,
      (line for text in texts for line in text.split("\n")),
      size=data.vocab_size,
      path=folder / tokenizer.FILES[kind],
      lowercase=data.lowercase,
      strip_accents=bool(data.strip_accents),
    ).vocab


def sample(texts: Iterable[TextChunk], most_bytes: int) -> list[TextChunk]:
  """Returns texts of at most `most_bytes` in total, sampled evenly from the stream.

  Each text gets a number from its hash; the texts with the smallest numbers are kept. If even one
  is too long, it is the beginning of that one.
  """
  heap: list[tuple[float, int, TextChunk]] = []  # the largest draw on top
  size = 0
  for i, text in enumerate(texts):
    draw = sources.fraction(text.key + i.to_bytes(8, "little"), "vocab")
    heapq.heappush(heap, (-draw, i, text))
    size += text.size
    while size > most_bytes and len(heap) > 1:
      size -= heapq.heappop(heap)[2].size
  found = [text for _, _, text in sorted(heap, key=lambda entry: entry[1])]
  if size > most_bytes:
    beginning = found[0].text.encode()[:most_bytes].decode(errors="ignore")
    return [found[0]._replace(text=beginning, size=len(beginning.encode()))]
  return found
