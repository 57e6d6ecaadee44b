"""Converts SentencePiece models to the `tokenizers` library, for Hugging Face.

Unigram pieces keep their scores; BPE pieces become merges in the order of their scores. Both
libraries tokenize by the same rules, with two differences:

- SentencePiece replaces the longest match in its character table. `tokenizers` looks up grapheme
  clusters (a letter with its marks) and loses the marks if the table has only the letter. Here each
  character is looked up alone and NFC recombines letters and marks, in Unicode's canonical order.
  The result differs for 686 of the 226,684 entries of nmt_nfkc_cf (letters of Unicode 16 and
  compatibility letters, such as a circled I, before certain marks), U+0344 and U+FDD0.
- SentencePiece sums unigram scores over a whole text in float32, `tokenizers` over a word in
  float64. If the same pieces occur in different orders ("8" "00" "0" and "8" "0" "00"), the sums
  tie up to rounding, and the results may differ.

On 33,128 paragraphs (4.2 to 4.5 million tokens), vocabularies of 4000 pieces gave different ids in
2 (unigram, lower-cased), 8 (unigram) and 0 (BPE, both) paragraphs, two tokens each, from ties.
"""

from pathlib import Path

from electra_jax.data.tokenizer import MASK, appended_mask

SPACE = "▁"  # a space in a piece
# Normalisations that end in NFC, or are the identity.
NORMALIZATIONS = ("nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity")
# Before a character that joins the previous one: marks, joiners, half-width voicing, skin tones.
_JOINING = "(?=[\\p{M}\u200c\u200d\uff9e\uff9f\U0001f3fb-\U0001f3ff])"
_APART = "\ufdd0"  # a noncharacter, which Unicode reserves for programs


def to_engine(path: Path):
  """Converts a SentencePiece model to a tokenizer of the `tokenizers` library.

  As usual in Hugging Face, a control piece's name in a text becomes the piece; so does the name of
  a byte, "<0x41>". Returns None for models without an exact counterpart: BPE with byte fallback,
  user-defined symbols, spaces kept or placed at the ends of words, custom tables, and models of
  words or characters.
  """
  from sentencepiece import sentencepiece_model_pb2 as proto
  from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

  model = proto.ModelProto.FromString(path.read_bytes())
  if not _is_exact(model):
    return None
  unknown = next(i for i, piece in enumerate(model.pieces) if piece.type == piece.UNKNOWN)
  if model.trainer_spec.model_type == model.trainer_spec.UNIGRAM:
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    bytes_too = model.trainer_spec.byte_fallback
    engine = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=bytes_too))
  else:
    engine = Tokenizer(_bpe(model, model.pieces[unknown].piece))
  engine.normalizer = _normalizer(model.normalizer_spec)
  inside = any(SPACE in piece.piece[1:] for piece in model.pieces)
  engine.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "never", split=not inside)
  engine.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(SPACE)])
  controls = [piece.piece for piece in model.pieces if piece.type == piece.CONTROL]
  controls += [MASK] if appended_mask([piece.piece for piece in model.pieces]) else []
  engine.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in controls])
  return engine


def _is_exact(model) -> bool:
  spec, trainer = model.normalizer_spec, model.trainer_spec
  return (
    trainer.model_type in (trainer.UNIGRAM, trainer.BPE)
    and not trainer.treat_whitespace_as_suffix
    and spec.remove_extra_whitespaces
    and spec.escape_whitespaces
    and spec.name in NORMALIZATIONS
    and all(p.type in (p.NORMAL, p.UNKNOWN, p.CONTROL, p.BYTE) for p in model.pieces)
    and not (trainer.byte_fallback and trainer.model_type == trainer.BPE)
  )


def _bpe(model, unknown: str):
  """Returns the BPE model; its merges are all splits of each piece, in the order of scores."""
  from tokenizers import models

  ids = {piece.piece: i for i, piece in enumerate(model.pieces)}
  scores = {p.piece: p.score for p in model.pieces if p.type == p.NORMAL}
  merges = [
    (piece[:i], piece[i:])
    for piece in sorted(scores, key=scores.get, reverse=True)
    for i in range(1, len(piece))
    if piece[:i] in scores and piece[i:] in scores
  ]
  return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True)


def _normalizer(spec):
  from tokenizers import Regex, normalizers

  steps = []
  if spec.precompiled_charsmap:
    steps += [
      normalizers.NFC(),
      normalizers.Prepend(_APART),  # the library panics if the next step inserts at the start
      normalizers.Replace(Regex(_JOINING), _APART),
      normalizers.Precompiled(spec.precompiled_charsmap),
      normalizers.Replace(_APART, ""),
      normalizers.NFC(),
    ]
  steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" +"), SPACE)]
  if spec.add_dummy_prefix:
    steps.append(normalizers.Prepend(SPACE))
  return normalizers.Sequence(steps)
