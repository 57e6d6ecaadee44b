"""The metadata of a vocabulary, which shards, runs and exports keep."""

import dataclasses
from collections.abc import Mapping

# Names of the five tokens that pretraining needs, BERT's first.
SPECIAL_NAMES = {
  "pad": ("[PAD]", "<pad>"),
  "unk": ("[UNK]", "<unk>"),
  "cls": ("[CLS]", "<s>", "<cls>"),
  "sep": ("[SEP]", "</s>", "<sep>"),
  "mask": ("[MASK]", "<mask>"),
}
FILES = {"wordpiece": "vocab.txt", "tokenizer.json": "tokenizer.json", "sentencepiece": "spm.model"}


class VocabError(ValueError):
  """A vocabulary cannot be used; the message is one line that names the file."""


@dataclasses.dataclass(frozen=True)
class Vocab:
  """The metadata of a vocabulary; `dataclasses.asdict(vocab)` is JSON.

  `special_ids` are pad, cls, sep, mask and all others that the file marks as special, sorted. Text
  never produces them, and they are never masked. They exclude [UNK], which stands for text.
  """

  kind: str  # 'wordpiece' (vocab.txt), 'tokenizer.json' or 'sentencepiece'
  file: str  # its name in the folder of shards
  lowercase: bool | None  # None: defined by the file, for kinds other than wordpiece
  strip_accents: bool | None  # whether nonspacing marks are removed; None as above
  size: int  # number of ids; every id is below it
  hash: str  # SHA-256 of the file, hexadecimal
  pad: int
  unk: int
  cls: int
  sep: int
  mask: int
  special_ids: tuple[int, ...]
  nfc: bool = False  # whether text is composed (NFC) before the rules of the file

  @classmethod
  def from_json(cls, content: Mapping) -> "Vocab":
    """Returns the vocabulary from the JSON of its `dataclasses.asdict`.

    Raises:
      VocabError: a value is of another type or out of range; KeyError, TypeError: it is missing.
    """
    earlier = {"strip_accents": content.get("lowercase")}  # 0.1 had one rule for both
    vocab = cls(**earlier | content | {"special_ids": tuple(content["special_ids"])})
    kinds = {x.name: x.type for x in dataclasses.fields(cls) if x.name != "special_ids"}
    for name, kind in kinds.items():
      if not isinstance(value := getattr(vocab, name), kind):
        raise VocabError(f"{value!r:.40} is not of type {getattr(kind, '__name__', kind)}")
    for i in (*vocab.special_ids, *(getattr(vocab, role) for role in SPECIAL_NAMES)):
      if i not in range(vocab.size):
        raise VocabError(f"the special id {i!r:.40} must be below the size {vocab.size}")
    if vocab.file != FILES.get(vocab.kind):  # also keeps the name inside its folder
      raise VocabError(f"{vocab.file!r:.80} is not the file of a {vocab.kind:.40} vocabulary")
    return vocab
