"""Loads subword vocabularies; encodes and decodes text.

WordPiece uses `tokenizers` with BERT's normaliser and splitting; unigram and BPE use
`sentencepiece`; `vocabulary` trains them. Text never produces a special id: a literal "[MASK]" in a
document is encoded as punctuation and a word.
"""

import abc
import contextlib
import functools
import hashlib
import itertools
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from electra_jax.core.word_parts import ALONE, CONTINUES, STARTS
from electra_jax.data.characters import Losses, checked, compose, moved, trimmed
from electra_jax.data.vocab_metadata import FILES, SPECIAL_NAMES, Vocab, VocabError

MASK = SPECIAL_NAMES["mask"][0]
UNKNOWN = "\U00010380"  # an Ugaritic letter, which hardly any vocabulary has
MAX_WORD_CHARS = 100  # as in Hugging Face's BERT; 200 in the original
CACHE_ENTRIES = 1 << 16  # units with cached ids, about 10 MB
CACHE_CHARS = 40  # of the longest cached unit
SPARE_IDS = 1024  # that a file's numbering may leave out beside as many ids as it has entries
# A unit: one ASCII punctuation character, or a run of other characters except spaces.
_UNITS = re.compile(r"[^ !-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")


Spans = tuple[list[int], list[tuple[int, int]]]  # ids, and the characters [start, end) of each


def load(
  path: str | os.PathLike,
  lowercase: bool = True,
  strip_accents: bool | None = None,
  nfc: bool = False,
) -> "Tokenizer":
  """Loads the tokenizer of a vocab.txt, a tokenizer.json or a SentencePiece .model.

  `lowercase` and `strip_accents` (None: as `lowercase`, BERT's rule) apply to a vocab.txt only;
  `nfc`, whether to compose text first, to all but a tokenizer.json, which says so itself.

  Raises:
    VocabError: the file cannot be read, has another format, or lacks a special token.
  """
  path = Path(path)
  if not path.is_file():
    raise VocabError(f"{path}: no such vocabulary file")
  if path.suffix == ".txt":
    strips = lowercase if strip_accents is None else strip_accents
    return _load_pieces(path, lowercase, strips, nfc)
  if path.suffix == ".json":
    return _load_json(path)
  if path.suffix == ".model":
    return SentencePiece(path, nfc)
  raise VocabError(f"{path}: the vocabulary must be a .txt, .json or .model file")


def load_from(folder: str | os.PathLike, vocab: Vocab) -> "Tokenizer":
  """Loads the tokenizer in a folder of shards; raises VocabError if it does not match `vocab`."""
  path = Path(folder) / vocab.file
  tokenizer = load(path, bool(vocab.lowercase), vocab.strip_accents, vocab.nfc)
  if tokenizer.vocab != vocab:
    raise VocabError(
      f"{path}: SHA-256 {tokenizer.vocab.hash[:12]}, {tokenizer.vocab.size} "
      f"entries, but the shards were built with {vocab.hash[:12]}, {vocab.size} entries"
    )
  return tokenizer


class Tokenizer(abc.ABC):
  """Encodes text (ValueError for a lone surrogate) and decodes ids; `vocab` is the metadata."""

  vocab: Vocab
  path: Path
  longest_word: float = math.inf  # characters; a longer word is unknown
  switched_off: Sequence[str] = ()  # settings of the file that would cut text or draw at random
  _composes: bool = False  # whether text is composed (NFC) before it is encoded
  _marks_parts: bool = False  # whether "##" marks parts of words, instead of a mark for spaces
  _counts: bool = False

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text, without special tokens."""
    if self._composes:
      texts = list(map(compose, texts))
    found = checked(self._encode, texts)
    for i in self._named(texts, found, self._suspects):
      found[i] = self._cut(texts[i])[0]
    return found

  def encode_offsets(self, texts: Sequence[str]) -> list[Spans]:
    """Returns the ids of each text and their character spans [start, end), without outer spaces."""
    given = texts
    if self._composes:
      texts = list(map(compose, texts))
    found = checked(self._encode_offsets, texts)
    for i in self._named(texts, [ids for ids, _ in found], Tokenizer._suspects):
      found[i] = self._cut(texts[i])
    return [
      spans if text == before else (spans[0], moved(spans[1], before))
      for text, before, spans in zip(texts, given, found, strict=True)
    ]

  def _named(self, texts: Sequence[str], found: Sequence, suspects: Callable) -> list[int]:
    """Returns the indices of texts with special ids; counts the texts while `counting`."""
    special = set(self.vocab.special_ids)
    watched = special | {self.vocab.unk}
    places = [i for i, ids in enumerate(found) if not watched.isdisjoint(ids)]
    if self._counts:
      self._counts = False  # the words below are encoded, too
      self._losses.add(texts, suspects(texts[i] for i in places))
      self._counts = True
    return [i for i in places if not special.isdisjoint(found[i])]

  @functools.cached_property
  def _losses(self) -> Losses:
    return Losses(self)

  @contextlib.contextmanager
  def counting(self) -> Iterator[Counter[str]]:
    """Yields the counts of characters and unknown ones (`Losses`) of texts encoded meanwhile."""
    self._losses.counts = counts = Counter()
    self._counts = True
    try:
      yield counts
    finally:
      self._counts = False

  @staticmethod
  def _suspects(texts: Iterable[str]) -> Iterator[str]:
    """Yields the words of texts, just encoded, that may have unknown tokens."""
    return itertools.chain.from_iterable(map(str.split, texts))

  def unknown_sizes(self, words: Sequence[str]) -> list[list[int]]:
    """Returns the number of characters of each unknown token of each word."""
    unk, found = self.vocab.unk, self.encode_offsets(words)
    return [[b - a for i, (a, b) in zip(*spans, strict=True) if i == unk] for spans in found]

  @functools.cached_property
  def keeps_spaces(self) -> bool:
    """Whether the space before a word changes its ids, as in byte-level BPE."""
    alone, after_space = self.encode_batch(["a", " a"])
    return alone != after_space

  def spaced(self, text: str, parts: Sequence[str]) -> Sequence[str]:
    """Prepares consecutive parts of a text for encoding one by one.

    If the vocabulary keeps spaces, a part after white space gets a leading space.
    """
    if not self.keeps_spaces:
      return parts
    found, end = [], 0
    for part in parts:
      start = text.index(part, end)
      follows = text[max(start - 1, 0) : start].isspace() and not part[:1].isspace()
      found.append(" " + part if follows and part else part)
      end = start + len(part)
    return found

  @abc.abstractmethod
  def _encode(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts; the name of a special token may become its id."""

  @abc.abstractmethod
  def _encode_offsets(self, texts: Sequence[str]) -> list[Spans]:
    """Encodes texts with spans; the name of a special token may become its id."""

  def _cut(self, text: str) -> Spans:
    """Encodes a text after cutting each name of a special token behind its first character."""
    special, [(ids, spans)] = set(self.vocab.special_ids), self._encode_offsets([text])
    named = [span for i, span in zip(ids, spans, strict=True) if i in special]
    cuts = sorted({start + 1 for start, end in named if end - start > 1})
    if not cuts:  # a one-character name cannot be cut
      return [self.vocab.unk if i in special else i for i in ids], spans
    result = [], []
    for begin, end in itertools.pairwise([0, *cuts, len(text)]):
      ids, spans = self._cut(text[begin:end])
      result[0].extend(ids)
      result[1].extend((begin + i, begin + j) for i, j in spans)
    return result

  @abc.abstractmethod
  def pieces(self) -> list[str]:
    """Returns the entries of the vocabulary by id, "" for unused ids."""

  def word_parts(self) -> bytes:
    """Returns the part of a word that each id is, as in `masking.Masking`.

    Words go on with "##" (WordPiece) or begin with a mark for a space (SentencePiece, byte BPE).
    Entries without a letter or a digit stand alone, such as punctuation, but not a mark.
    """
    apart = {*self.vocab.special_ids, self.vocab.unk}

    def part(i: int, piece: str) -> int:
      marked = piece.startswith("##" if self._marks_parts else ("▁", "Ġ"))
      if i in apart or not (any(map(str.isalnum, piece)) or piece in ("▁", "Ġ")):
        return ALONE
      return CONTINUES if marked == self._marks_parts else STARTS

    return bytes(part(i, piece) for i, piece in enumerate(self.pieces()))

  @abc.abstractmethod
  def decode(self, ids: Sequence[int]) -> str:
    """Returns readable text, with the names of special tokens."""

  def save(self, folder: str | os.PathLike) -> None:
    """Copies the vocabulary file, byte for byte, into `folder` under its standard name."""
    shutil.copyfile(self.path, Path(folder) / self.vocab.file)


class HuggingFace(Tokenizer):
  """A tokenizer whose `engine` is from the `tokenizers` library."""

  def __init__(self, path: Path, engine, kind: str, special_ids: Iterable[int] = (), **rules):
    self.path, self._engine = path, engine
    self._cache: dict[str, tuple[int, ...]] = {}
    self._unknown: set[str] = set()  # units with unknown tokens
    # Under BERT's rules, units can be encoded one by one: the normaliser works on single
    # characters (NFC: of composed text), the pre-tokenizer always splits at a space and around
    # punctuation, and the model (unlike BPE, which may drop a word) gives each word an id.
    added = engine.get_added_tokens_decoder().values()
    several = type(engine.normalizer).__name__ == "Sequence"
    steps = engine.normalizer if several else [engine.normalizer]
    normalizers = [type(step).__name__ for step in steps]
    self._by_word = (
      type(engine.model).__name__ == "WordPiece"
      and type(engine.pre_tokenizer).__name__ == "BertPreTokenizer"
      and normalizers in (["BertNormalizer"], ["NFC", "BertNormalizer"])
      and all(token.special for token in added)  # others may contain spaces
    )
    ids = engine.get_vocab(with_added_tokens=True)
    last = max(ids, key=ids.get, default="")
    if (size := ids.get(last, -1) + 1) > 2 * len(ids) + SPARE_IDS:
      raise VocabError(
        f"{path}: {last!r:.40} has id {size - 1}, but the file has {len(ids)} entries:"
        " number them from 0"
      )
    self.vocab = _vocab(path, kind, size, ids.get, special_ids, **rules)
    # NFC composes "<" and U+0338, which are two units.
    self._composes = self.vocab.nfc or (self._by_word and normalizers[0] == "NFC")
    self._marks_parts = type(engine.model).__name__ == "WordPiece"
    self.longest_word = getattr(engine.model, "max_input_chars_per_word", math.inf)

  def _encode(self, texts: Sequence[str]) -> list[list[int]]:
    if not self._by_word:
      return self._encode_texts(texts)
    cache = self._cache  # most words repeat: the cache makes encoding three times faster
    if len(cache) > CACHE_ENTRIES:
      cache.clear()
      self._unknown.clear()
    self._unknown -= {unit for unit in self._unknown if len(unit) > CACHE_CHARS}
    split = list(map(_UNITS.findall, texts))
    flatten = itertools.chain.from_iterable
    new = sorted(set(flatten(split)).difference(cache))
    cache.update(zip(new, map(tuple, self._encode_texts(new)), strict=True))
    self._unknown.update(unit for unit in new if self.vocab.unk in cache[unit])
    result = [list(flatten(map(cache.__getitem__, units))) for units in split]
    for unit in new:
      if len(unit) > CACHE_CHARS:
        del cache[unit]
    return result

  def _suspects(self, texts: Iterable[str]) -> Iterator[str]:
    if not self._by_word:
      return super()._suspects(texts)
    units = itertools.chain.from_iterable(map(_UNITS.findall, texts))
    return filter(self._unknown.__contains__, units)

  def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
    encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in encodings]

  def _encode_offsets(self, texts: Sequence[str]) -> list[Spans]:
    found = self._engine.encode_batch(list(texts), add_special_tokens=False)
    if self._by_word:  # no token contains a space
      return [(e.ids, e.offsets) for e in found]
    return [(e.ids, trimmed(text, e.offsets)) for text, e in zip(texts, found, strict=True)]

  def decode(self, ids: Sequence[int]) -> str:
    return self._engine.decode(list(ids), skip_special_tokens=False)

  def pieces(self) -> list[str]:
    return [self._engine.id_to_token(i) or "" for i in range(self.vocab.size)]

  def engine_json(self) -> str:
    """Returns the content of a tokenizer.json."""
    return self._engine.to_str()


def read_pieces(path: Path) -> list[str]:
  """Returns the lines of a vocab.txt; raises VocabError if it is empty or not text."""
  try:
    # Not `splitlines`, as in BERT: a piece may be a character that Unicode treats as a line end.
    pieces = path.read_bytes().decode("utf-8-sig").split("\n")
  except UnicodeDecodeError as error:
    raise VocabError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
  pieces = [piece.removesuffix("\r") for piece in pieces]
  if pieces[-1] == "":
    pieces.pop()
  if not pieces:
    raise VocabError(f"{path}: the vocabulary is empty")
  return pieces


def _load_pieces(path: Path, lowercase: bool, strip_accents: bool, nfc: bool) -> HuggingFace:
  """Loads BERT's tokenizer from a vocab.txt: one piece per line, with the line number as id."""
  ids = {piece: i for i, piece in enumerate(read_pieces(path))}
  unk = next((name for name in SPECIAL_NAMES["unk"] if name in ids), "[UNK]")
  rules = {"lowercase": lowercase, "strip_accents": strip_accents, "nfc": nfc}
  return HuggingFace(path, bert_engine(ids, unk, **rules), "wordpiece", **rules)


def _load_json(path: Path) -> HuggingFace:
  """Loads a tokenizer.json of the `tokenizers` library; the file defines the normalisation."""
  from tokenizers import Tokenizer as Engine

  try:
    engine = Engine.from_file(str(path))
  except Exception as error:  # the library raises plain Exception
    raise VocabError(f"{path}: not a tokenizer.json ({first_line(error)})") from None
  dropout, cut = getattr(engine.model, "dropout", None), engine.truncation
  off = [f"BPE dropout {dropout:g}"] if dropout else []
  off += [f"truncation to {cut['max_length']} tokens"] if cut else []
  off += ["padding"] if engine.padding else []
  if dropout is not None:
    engine.model.dropout = None
  engine.no_padding()
  engine.no_truncation()
  engine.encode_special_tokens = True  # a special token's name in a text is plain text
  try:
    engine.encode(UNKNOWN)
  except Exception as error:
    raise VocabError(f"{path}: cannot encode unknown text ({first_line(error)})") from None
  special = [i for i, token in engine.get_added_tokens_decoder().items() if token.special]
  loaded = HuggingFace(path, engine, "tokenizer.json", special)
  loaded.switched_off = off
  return loaded


class SentencePiece(Tokenizer):
  """A SentencePiece model, unigram or BPE.

  DeBERTaV3's has no mask token: "[MASK]" gets the id after its pieces, as in Microsoft's code.
  """

  def __init__(self, path: Path, nfc: bool = False):
    import sentencepiece

    self.path, self._composes = path, nfc
    self._is_unknown: dict[str, bool] = {}  # of characters
    try:
      self._engine = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except Exception as error:  # RuntimeError or OSError, depending on the damage
      raise VocabError(f"{path}: not a SentencePiece model ({first_line(error)})") from None
    engine, size = self._engine, self._engine.get_piece_size()
    names = {engine.id_to_piece(i): i for i in range(size)}
    special = [i for i in range(size) if engine.is_control(i)]
    if appended_mask(names):
      names[MASK] = size
      size += 1
    self.vocab = _vocab(path, "sentencepiece", size, names.get, special, nfc=nfc)

  def _encode(self, texts: Sequence[str]) -> list[list[int]]:
    return self._engine.encode(list(texts), num_threads=1)

  def _encode_offsets(self, texts: Sequence[str]) -> list[Spans]:
    found = self._engine.encode(list(texts), num_threads=1, return_type="offset_mapping")
    return [(e["ids"], trimmed(t, e["offsets"])) for t, e in zip(texts, found, strict=True)]

  def unknown_sizes(self, words: Sequence[str]) -> list[list[int]]:
    # By characters, because spans take as long as five encodings.
    words = list(map(compose, words))  # as the library does, with few exceptions
    new = [char for char in {*"".join(words)} if char not in self._is_unknown]
    for char, ids in zip(new, self._encode(new), strict=True):
      self._is_unknown[char] = self.vocab.unk in ids
    unknown = {char for char, is_unknown in self._is_unknown.items() if is_unknown}
    return [
      [] if unknown.isdisjoint(word) else [sum(char in unknown for char in word)] for word in words
    ]

  def pieces(self) -> list[str]:
    size = self._engine.get_piece_size()
    found = [self._engine.id_to_piece(i) for i in range(size)]
    return found + [MASK] * (self.vocab.size - size)

  def decode(self, ids: Sequence[int]) -> str:
    # The library drops control tokens, so their names are put between the runs of text.
    special, parts = {*self.vocab.special_ids, self.vocab.unk}, []
    pieces = self._engine.get_piece_size()
    for is_special, run in itertools.groupby(map(int, ids), special.__contains__):
      if is_special:
        parts.extend(MASK if i == pieces else self._engine.id_to_piece(i) for i in run)
      else:
        parts.append(self._engine.decode(list(run)))
    return " ".join(parts)


def appended_mask(names: Collection[str]) -> bool:
  """Returns whether [MASK] follows the pieces `names`, which have all other special tokens."""
  own = {role: set(known) & set(names) for role, known in SPECIAL_NAMES.items()}
  return not own.pop("mask") and all("[" in "".join(found) for found in own.values())


def bert_engine(
  ids: dict[str, int], unk: str, lowercase: bool, strip_accents: bool, nfc: bool = False
):
  """Returns BERT's tokenizer with the vocabulary `ids`; `nfc` composes text first."""
  from tokenizers import Tokenizer as Engine
  from tokenizers import decoders, models, normalizers, pre_tokenizers

  engine = Engine(
    models.WordPiece(vocab=ids, unk_token=unk, max_input_chars_per_word=MAX_WORD_CHARS)
  )
  strips = None if strip_accents == lowercase else strip_accents  # None: BERT's rule
  rules = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strips)
  engine.normalizer = normalizers.Sequence([normalizers.NFC(), rules]) if nfc else rules
  engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  engine.decoder = decoders.WordPiece()
  return engine


def _vocab(path: Path, kind: str, size: int, find, special_ids, **rules) -> Vocab:
  """Returns the metadata; `find` maps a name to its id. Raises VocabError for a missing token."""
  special = {}
  for role, names in SPECIAL_NAMES.items():
    found = [i for i in map(find, names) if i is not None]
    if not found:
      raise VocabError(f"{path}: the vocabulary has no {' or '.join(names)}")
    special[role] = found[0]
  never_text = {i for role, i in special.items() if role != "unk"} | set(special_ids)
  return Vocab(
    kind=kind,
    file=FILES[kind],
    size=size,
    hash=hashlib.sha256(path.read_bytes()).hexdigest(),
    special_ids=tuple(sorted(never_text - {special["unk"]})),
    **special,
    **{"lowercase": None, "strip_accents": None, **rules},
  )


def first_line(error: Exception) -> str:
  """Returns the first line of an error's message."""
  return str(error).strip().split("\n")[0] or type(error).__name__
