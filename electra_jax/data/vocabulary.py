"""Trains subword vocabularies: WordPiece by `tokenizers`, unigram and BPE by `sentencepiece`."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from electra_jax.data.tokenizer import (
  SPECIAL_NAMES,
  Tokenizer,
  VocabError,
  bert_engine,
  first_line,
  load,
)
from electra_jax.runtime.workdir import replacing

KINDS = ("wordpiece", "unigram", "bpe")
COVERAGE = 0.9995  # of the text by the characters that a trained vocabulary knows
# Of WordPiece at least these many (BERT's has about 1000 characters, in two forms).
MAX_ALPHABET = 1000
MIN_ALPHABET = 64
MAX_REPEATS = 10_000  # of a word in one text for the trainer of WordPiece
MAX_LINE_CHARS = 1000  # of a line for SentencePiece's trainer


def train(
  kind: str, texts: Iterable[str], *, size: int, path: Path, lowercase=True, strip_accents=False
) -> Tokenizer:
  """Trains a vocabulary of at most `size` ids, writes it to `path`, returns its tokenizer.

  The same texts in the same order give the same bytes on any number of cores.

  Args:
    kind: 'wordpiece' (merges by count, as `tokenizers` does), 'unigram' or 'bpe' (SentencePiece).
    texts: lines. WordPiece keeps the distinct words in memory; SentencePiece keeps all text.
    size: ids, special tokens included. SentencePiece reaches it exactly or raises.
    path: the file, named as in `tokenizer.FILES`.
    lowercase: lower-cases (wordpiece) or folds case with NFKC (unigram, bpe).
    strip_accents: wordpiece alone: removes all nonspacing marks, the vowels of Hindi among them.

  Raises:
    VocabError: the kind is unknown or keeps accents, or there is too little text for the size.
  """
  check_accents(kind, strip_accents)
  if kind == "wordpiece":
    _train_wordpiece(texts, size, path, bert_engine({}, "[UNK]", lowercase, strip_accents))
  elif kind in KINDS:
    _train_sentencepiece(kind, texts, size, path, lowercase)
  else:
    raise VocabError(f"data.vocab={kind!r} is neither a file nor one of {', '.join(KINDS)}")
  return load(path, lowercase, strip_accents)


def check_accents(kind: str, strip_accents: bool | None) -> None:
  """Raises VocabError if a kind of vocabulary to train cannot strip accents, and is asked to."""
  if kind in KINDS[1:] and strip_accents:
    raise VocabError(f"data.strip_accents=True is for wordpiece: SentencePiece keeps them ({kind})")


def _train_wordpiece(texts: Iterable[str], size: int, path: Path, engine):
  from tokenizers import trainers

  names = [aliases[0] for aliases in SPECIAL_NAMES.values()]
  words: Counter[str] = Counter()
  for text in texts:
    words.update(text.split(" "))
  alphabet = _alphabet(words, engine, size)
  inner = [f"##{char}" for char in alphabet if _is_inside_words(char, engine)]
  if size < len(names) + len(alphabet) + len(inner):
    raise VocabError(
      f"data.vocab_size={size} is too small for {len(names)} special tokens and {len(alphabet)} "
      f"characters with their {len(inner)} word-internal forms"
    )
  # The trainer numbers word-internal characters in the order of a randomly seeded hash map, and
  # breaks ties between merges by number. Listing them makes training deterministic.
  trainer = trainers.WordPieceTrainer(
    vocab_size=size,
    special_tokens=names + inner,
    initial_alphabet=alphabet,
    limit_alphabet=len(alphabet),
    show_progress=False,
  )
  # Only the counts of words matter, so each word is repeated by its count.
  repeated = (" ".join(itertools.repeat(word, count)) for word, count in _split_counts(words))
  engine.train_from_iterator(repeated, trainer)
  ids = engine.get_vocab(with_added_tokens=True)
  path.write_text("".join(f"{piece}\n" for piece in sorted(ids, key=ids.get)), encoding="utf-8")


def _split_counts(words: Counter[str]) -> Iterator[tuple[str, int]]:
  """Yields (word, count) with counts of at most MAX_REPEATS, to limit the joined text."""
  for word in sorted(words):
    for start in range(0, words[word], MAX_REPEATS):
      yield word, min(MAX_REPEATS, words[word] - start)


def _alphabet(words: Counter[str], engine, size: int) -> list[str]:
  """Returns the most frequent characters of the normalised words, in code point order.

  An eighth of the `size`, or up to a third where COVERAGE needs more, as in Chinese.
  """
  counts: Counter[str] = Counter()
  for word, count in words.items():
    for char in engine.normalizer.normalize_str(word):
      counts[char] += count
  counts.pop(" ", None)
  ranked = sorted(counts, key=lambda char: (-counts[char], char))
  covered = itertools.accumulate(counts[char] for char in ranked)
  needed = 1 + sum(count < COVERAGE * counts.total() for count in covered)
  least = min(MAX_ALPHABET, max(MIN_ALPHABET, size // 8))
  return sorted(ranked[: max(least, min(needed, size // 3))])


def _is_inside_words(char: str, engine) -> bool:
  """Returns True if BERT's splitting can leave `char` inside a word."""
  text = engine.normalizer.normalize_str(f"a{char}a")
  return len(engine.pre_tokenizer.pre_tokenize_str(text)) == 1


def _train_sentencepiece(kind: str, texts: Iterable[str], size: int, path: Path, lowercase: bool):
  import sentencepiece

  try:
    with replacing(path) as temporary, temporary.open("wb") as model:
      sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(part for text in texts for part in _bounded(text)),
        model_writer=model,
        model_type=kind,
        vocab_size=size,
        normalization_rule_name="nmt_nfkc_cf" if lowercase else "nmt_nfkc",
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        pad_piece="<pad>",
        unk_piece="<unk>",
        bos_piece="<s>",
        eos_piece="</s>",
        control_symbols=["<mask>"],  # control: the text "<mask>" never becomes the token
        character_coverage=COVERAGE,
        num_threads=4,  # fixed: rounding depends on the number of threads
        minloglevel=2,
      )
  except (RuntimeError, OSError) as error:
    if isinstance(error, OSError) and error.errno is not None:
      raise
    raise VocabError(
      f"training a {kind} vocabulary of data.vocab_size={size} failed: {first_line(error)}"
    ) from None


def _bounded(text: str) -> Iterator[str]:
  """Splits `text` at spaces: the trainer drops lines above 4192 bytes."""
  while len(text) > MAX_LINE_CHARS:
    cut = text.rfind(" ", 1, MAX_LINE_CHARS)
    cut = MAX_LINE_CHARS if cut < 0 else cut
    yield text[:cut]
    text = text[cut:].lstrip(" ")
  if text:
    yield text
