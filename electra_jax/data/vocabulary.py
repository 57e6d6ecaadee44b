"""The vocabulary of a build: copied from a file, or trained on a sample of the text.

`tokenizers` trains WordPiece; `sentencepiece` trains unigram and BPE.
"""

import contextlib
import hashlib
import heapq
import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from ml_collections import ConfigDict

from electra_jax.data import shards, sources, tokenizer
from electra_jax.data.characters import compose
from electra_jax.data.sources import TextChunk
from electra_jax.data.status import print_line
from electra_jax.data.tokenizer import SPECIAL_NAMES, Tokenizer, Vocab, VocabError, first_line
from electra_jax.monitor.display import doing
from electra_jax.runtime.terminal import log_console
from electra_jax.runtime.workdir import replacing

KINDS = ("wordpiece", "unigram", "bpe")
WITHOUT_RULES = ("wordpiece", "sentencepiece")  # kinds of files that data.nfc applies to
COVERAGE = 0.9995  # share of the text's characters that a trained vocabulary covers
# Limits of a WordPiece alphabet (BERT's has about 1000 characters, in two forms).
MAX_ALPHABET = 1000
MIN_ALPHABET = 64
MAX_REPEATS = 10_000  # maximum, of a word in one text for the WordPiece trainer
MAX_LINE_CHARS = 1000  # maximum, for the SentencePiece trainer


def load_given(config: ConfigDict) -> tokenizer.Tokenizer:
  """Loads the file `data.vocab`.

  Raises ValueError if it has duplicate entries or drops unknown text, or if `strip_accents` is set
  for a file that defines its normalisation.
  """
  data = config.data
  if data.vocab.endswith(".txt"):
    counts = Counter(tokenizer.read_pieces(Path(data.vocab)))
    if twice := [piece for piece, n in counts.items() if n > 1]:
      raise ValueError(f"{data.vocab} has {len(twice)} duplicate entries, first {twice[0]!r}")
  nfc = _composes(Path(data.vocab)) if data.nfc is None else data.nfc
  loaded = tokenizer.load(data.vocab, data.lowercase, data.strip_accents, nfc)
  for field, kinds in (("strip_accents", WITHOUT_RULES[:1]), ("nfc", WITHOUT_RULES)):
    if data[field] is not None and loaded.vocab.kind not in kinds:
      raise VocabError(f"leave config.data.{field} unset: {data.vocab} defines its normalisation")
  if loaded.vocab.kind == "tokenizer.json" and loaded.encode_batch([tokenizer.UNKNOWN]) == [[]]:
    if json.loads(loaded.engine_json())["model"].get("unk_token", "") is None:
      raise VocabError(
        f"{data.vocab} drops unknown text: give its model an unk_token, such as [UNK]"
      )
  return loaded


def _composes(path: Path) -> bool:
  """Returns whether a vocabulary was trained on composed text, by the manifest beside it."""
  with contextlib.suppress(shards.DataError):
    vocab = Vocab.from_json(shards.read_manifest(path.parent)["vocab"])
    return vocab.nfc and vocab.hash == hashlib.sha256(path.read_bytes()).hexdigest()
  return False


def given(config: ConfigDict, folder: Path) -> Vocab:
  """Copies the file `data.vocab` to a folder and returns its metadata; raises as `load_given`."""
  data, loaded = config.data, load_given(config)
  loaded.save(folder)
  if loaded.switched_off:
    print_line(f"note: switched off {', '.join(loaded.switched_off)} of {data.vocab}")
  if data.strip_accents is None and loaded.vocab.strip_accents:
    pieces = Path(data.vocab).read_text("utf-8").split("\n")
    if (count := sum(map(_has_accents, pieces))) > 0.01 * len(pieces):
      print_line(
        f"note: {data.vocab} has {count:,} entries with accents, which BERT's rule strips"
        " from text; set config.data.strip_accents=false if it was trained with accents"
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
    return train(
      data.vocab,
      (line for text in texts for line in text.split("\n")),
      size=data.vocab_size,
      path=folder / tokenizer.FILES[kind],
      lowercase=data.lowercase,
      strip_accents=bool(data.strip_accents),
      nfc=data.nfc is not False,
    ).vocab


def sample(texts: Iterable[TextChunk], most_bytes: int) -> list[TextChunk]:
  """Returns texts of at most `most_bytes` in total, sampled uniformly from the stream by hash.

  If even one text is too long, returns its beginning.
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
    return [found[0]._replace(text=beginning)]
  return found


def train(
  kind: str,
  texts: Iterable[str],
  *,
  size: int,
  path: Path,
  lowercase: bool = True,
  strip_accents: bool = False,
  nfc: bool = True,
) -> Tokenizer:
  """Trains a vocabulary of at most `size` ids, writes it to `path` and returns its tokenizer.

  The same texts in the same order give the same bytes on any number of cores.

  Args:
    kind: 'wordpiece' (merges by count, as `tokenizers` does), 'unigram' or 'bpe' (SentencePiece).
    texts: lines. WordPiece keeps the distinct words in memory; SentencePiece keeps all text.
    size: number of ids, special tokens included. SentencePiece reaches it exactly or raises.
    lowercase: lower-cases (wordpiece) or folds case with NFKC (unigram, bpe).
    strip_accents: removes all nonspacing marks, including the vowels of Hindi; wordpiece only.
    nfc: composes text (NFC), so that composed and decomposed characters give the same ids.

  Raises:
    VocabError: the kind is unknown or cannot strip accents, or there is too little text.
  """
  check_accents(kind, strip_accents)
  if kind == "wordpiece":
    engine = tokenizer.bert_engine({}, "[UNK]", lowercase, strip_accents, nfc)
    _train_wordpiece(texts, size, path, engine)
  elif kind in KINDS:
    _train_sentencepiece(kind, map(compose, texts) if nfc else texts, size, path, lowercase)
  else:
    raise VocabError(f"data.vocab={kind!r} is neither a file nor one of {', '.join(KINDS)}")
  return tokenizer.load(path, lowercase, strip_accents, nfc)


def check_accents(kind: str, strip_accents: bool | None) -> None:
  """Raises VocabError if accents are to be stripped but a kind of vocabulary cannot."""
  if kind in KINDS[1:] and strip_accents:
    raise VocabError(f"data.strip_accents=True needs data.vocab=wordpiece, not {kind}")


def _train_wordpiece(texts: Iterable[str], size: int, path: Path, engine):
  from tokenizers import trainers

  names = [aliases[0] for aliases in SPECIAL_NAMES.values()]
  words: Counter[str] = Counter()
  for text in texts:
    words.update(text.split(" "))
  alphabet = _alphabet(words, engine, size)
  _leave_out_long(words, engine)
  inner = [f"##{char}" for char in alphabet if _is_inside_words(char, engine)]
  if size < len(names) + len(alphabet) + len(inner):
    raise VocabError(
      f"data.vocab_size={size} is too small for {len(names)} special tokens and {len(alphabet)} "
      f"characters with their {len(inner)} word-internal forms"
    )
  # The trainer numbers word-internal characters in the order of a randomly seeded hash map and
  # breaks ties between merges by number. Listing these characters makes training deterministic.
  trainer = trainers.WordPieceTrainer(
    vocab_size=size,
    special_tokens=names + inner,
    initial_alphabet=alphabet,
    limit_alphabet=len(alphabet),
    show_progress=False,
  )
  engine.train_from_iterator(_repeated(words), trainer)  # only word counts matter
  ids = engine.get_vocab(with_added_tokens=True)
  path.write_text("".join(f"{piece}\n" for piece in sorted(ids, key=ids.get)), encoding="utf-8")


def _leave_out_long(words: Counter[str], engine) -> None:
  """Removes and reports the words that tokenizers read as unknown because of their length."""
  left_out = Counter()
  for text in [word for word in words if len(word) > tokenizer.MAX_WORD_CHARS]:
    count, normalised = words.pop(text), engine.normalizer.normalize_str(text)
    for word, _ in engine.pre_tokenizer.pre_tokenize_str(normalised):
      counts = words if len(word) <= tokenizer.MAX_WORD_CHARS else left_out
      counts[word] += count
  if left_out:
    size = sum(len(word) * count for word, count in left_out.items())
    print_line(
      f"{left_out.total():,} words above {tokenizer.MAX_WORD_CHARS} characters, {size:,} characters"
      " in all, are not trained on: they become unknown (data.vocab=unigram splits them)"
    )


def _repeated(words: Counter[str]) -> Iterator[str]:
  """Yields texts that repeat each word as often as it occurs, at most MAX_REPEATS per text."""
  for word in sorted(words):
    for start in range(0, words[word], MAX_REPEATS):
      yield " ".join([word] * min(MAX_REPEATS, words[word] - start))


def _alphabet(words: Counter[str], engine, size: int) -> list[str]:
  """Returns the most frequent characters of the normalised words, in code point order.

  The alphabet has size / 8 characters, or up to size / 3 if COVERAGE needs more, as for Chinese.
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
  """Returns whether BERT's pre-tokenizer can leave `char` inside a word."""
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
  """Splits `text` at spaces, because the trainer drops lines above 4192 bytes."""
  while len(text) > MAX_LINE_CHARS:
    cut = text.rfind(" ", 1, MAX_LINE_CHARS)
    cut = MAX_LINE_CHARS if cut < 0 else cut
    yield text[:cut]
    text = text[cut:].lstrip(" ")
  if text:
    yield text
