"""SentencePiece models as tokenizers of the `tokenizers` library, for Hugging Face.

A unigram model's pieces keep their scores, a BPE model's become merges in the order of theirs. Both
libraries cut a text into ids by the same rules. Two things differ:

- SentencePiece replaces the longest match in its table of characters. `tokenizers` looks up what a
  reader sees as one character, a letter with its marks, and loses the marks where the table has the
  letter alone. Here each character is looked up alone and NFC puts letters and marks together,
  which gives the same for 225,998 of the 226,684 entries of nmt_nfkc_cf (the others are letters of
  Unicode 16 and of compatibility, such as a circled I, before a mark of their own) and for every
  single character between two letters but U+0344 and U+FDD0, which no text should have. Marks out
  of Unicode's canonical order are put into it.
- SentencePiece adds up a unigram model's scores over a whole text in float32, `tokenizers` over a
  word in float64. Where the same pieces have the same sum in another order ("8" "00" "0" and "8"
  "0" "00"), rounding decides there, and the two may differ.

Of 33,128 paragraphs (4.2 to 4.5 million tokens), vocabularies of 4000 pieces gave other ids in 2
(unigram, lower-cased), 8 (unigram) and 0 (BPE, both), all by such ties, two tokens in each.
"""

from pathlib import Path

SPACE = "▁"  # how pieces write a space
# Normalisations that end in NFC, or that do nothing.
NORMALIZATIONS = ("nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity")
# Before a character that joins the one before it: marks, joiners, half-width voicing, skin tones.
_JOINING = "(?=[\\p{M}\u200c\u200d\uff9e\uff9f\U0001f3fb-\U0001f3ff])"
_APART = "\ufdd0"  # in no text: Unicode keeps it free for programs


def to_engine(path: Path):
  """Returns the tokenizer of a SentencePiece model in the `tokenizers` library, or None.

  Names of control pieces in a text become those pieces, as Hugging Face has it.

  None is for models that work in a way with no exact counterpart: byte fallback, pieces that are
  users' symbols, spaces that are kept or stand at the ends of words, tables of one's own, and
  models of words or characters.
  """
  from sentencepiece import sentencepiece_model_pb2 as proto
  from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

  model = proto.ModelProto.FromString(path.read_bytes())
  if not _is_exact(model, proto):
    return None
  is_unigram = model.trainer_spec.model_type == proto.TrainerSpec.UNIGRAM
  engine = Tokenizer(_unigram(model) if is_unigram else _bpe(model, proto))
  engine.normalizer = _normalizer(model.normalizer_spec)
  inside = any(SPACE in piece.piece[1:] for piece in model.pieces)
  engine.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "never", split=not inside)
  engine.decoder = decoders.Metaspace(SPACE)
  controls = [piece.piece for piece in model.pieces if piece.type == piece.CONTROL]
  engine.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in controls])
  return engine


def _is_exact(model, proto) -> bool:
  spec, trainer, piece = model.normalizer_spec, model.trainer_spec, proto.ModelProto.SentencePiece
  return (
    trainer.model_type in (proto.TrainerSpec.UNIGRAM, proto.TrainerSpec.BPE)
    and not trainer.treat_whitespace_as_suffix
    and spec.remove_extra_whitespaces
    and spec.escape_whitespaces
    and spec.name in NORMALIZATIONS
    and {p.type for p in model.pieces} <= {piece.NORMAL, piece.UNKNOWN, piece.CONTROL}
  )


def _unigram(model):
  from tokenizers import models

  pieces = [(piece.piece, piece.score) for piece in model.pieces]
  return models.Unigram(pieces, unk_id=_unknown(model), byte_fallback=False)


def _bpe(model, proto):
  """Returns the model of merges: each way to put a piece together, the best-scored piece first."""
  from tokenizers import models

  ids = {piece.piece: i for i, piece in enumerate(model.pieces)}
  normal = proto.ModelProto.SentencePiece.NORMAL
  scores = {piece.piece: piece.score for piece in model.pieces if piece.type == normal}
  merges = [
    (piece[:i], piece[i:])
    for piece in sorted(scores, key=scores.get, reverse=True)
    for i in range(1, len(piece))
    if piece[:i] in scores and piece[i:] in scores
  ]
  unknown = model.pieces[_unknown(model)].piece
  return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True)


def _unknown(model) -> int:
  return next(i for i, piece in enumerate(model.pieces) if piece.type == piece.UNKNOWN)


def _normalizer(spec):
  from tokenizers import Regex, normalizers

  steps = []
  if spec.precompiled_charsmap:
    steps += [
      normalizers.NFC(),
      normalizers.Prepend(_APART),  # the library panics where the next step puts it at the start
      normalizers.Replace(Regex(_JOINING), _APART),
      normalizers.Precompiled(spec.precompiled_charsmap),
      normalizers.Replace(_APART, ""),
      normalizers.NFC(),
    ]
  steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" +"), SPACE)]
  if spec.add_dummy_prefix:
    steps.append(normalizers.Prepend(SPACE))
  return normalizers.Sequence(steps)
