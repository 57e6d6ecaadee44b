"""SentencePiece models for Hugging Face: the same ids, or a copy."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from test_hf import needs_torch
from test_tokenizer import LINES

from electra_jax.data import tokenizer, vocabulary
from electra_jax.interop import huggingface, sentencepiece_model, sources

GOLDEN = Path(__file__).parent / "golden"

WORDS = "the cafe was running, naive and affable; a cab ran by (3.5 times) and 1999 bees hummed!"
ODD = [
  "", " ", "  two  spaces \t\u3000 ", "\ufeffThe", "\x01", "\u0301 the", "CAFE\u0301 \xc9 e\u0301",
  "R\u0304 and q\u0303", "\u2122\ufe0f \ufb01 \uff21\uff76\uff9e", "\u2581the\u2581",
  "\u65e5\u672c \u00df", "a\u200bb \U0001f44d\U0001f3fd", "I\u0307", "\u0391\u0313\u0345", "\u0345",
]  # fmt: skip


def some_text() -> list[str]:
  """Lines of the words above, and of others that are made of a few syllables."""
  rng, syllables = np.random.default_rng(0), ["ba", "ner", "ti", "sh", "o"]
  made = ["".join(rng.choice(syllables, rng.integers(1, 5))) for _ in range(99)]
  return [" ".join(rng.choice(WORDS.split() + made, 12)) for _ in range(200)]


@pytest.fixture(params=[(kind, low) for kind in ("unigram", "bpe") for low in (True, False)])
def sentencepieces(request, tmp_path):
  kind, low = request.param
  return vocabulary.train(kind, some_text(), size=90, path=tmp_path / "spm.model", lowercase=low)


def test_sentencepiece_models_give_hugging_face_their_ids(sentencepieces, tmp_path):
  from sentencepiece import SentencePieceProcessor
  from tokenizers import Tokenizer

  folder = tmp_path / "folder"
  folder.mkdir()
  assert huggingface.save_tokenizer(folder, sentencepieces, 16)
  engine = Tokenizer.from_file(str(folder / "tokenizer.json"))
  rng, vocab = np.random.default_rng(1), sentencepieces.vocab
  texts = ODD + [WORDS, WORDS.upper(), "zebra\u0304s"]
  texts += ["".join(rng.choice(list("acehnrs tbT3."), 30)) for _ in range(100)]
  for text in texts:
    expected = sentencepieces.encode_batch([text])[0]
    assert engine.encode(text).ids == [vocab.cls, *expected, vocab.sep], ascii(text)
  original = SentencePieceProcessor(model_file=str(sentencepieces.path))
  for text in ODD:
    assert engine.normalizer.normalize_str(text) == original.normalize(text), ascii(text)
  ids = sentencepieces.encode_batch([WORDS])[0]
  assert engine.decode(ids) == sentencepieces.decode(ids)
  assert vocab.mask in engine.encode("a <mask> b").ids
  assert vocab.mask not in sentencepieces.encode_batch(["a <mask> b"])[0]
  assert tokenizer.load(folder / "spm.model", nfc=True).vocab == vocab


@pytest.mark.parametrize(("kind", "size"), [("unigram", 83), ("bpe", 115)])
def test_marks_of_other_scripts_are_exported(kind, size, tmp_path):
  from tokenizers import Tokenizer

  texts = [*LINES.values()]
  own = vocabulary.train(kind, texts * 20, size=size, path=tmp_path / "spm.model")
  folder = tmp_path / "folder"
  folder.mkdir()
  assert huggingface.save_tokenizer(folder, own, 16)
  engine = Tokenizer.from_file(str(folder / "tokenizer.json"))
  for text, ids in zip(texts, own.encode_batch(texts), strict=True):
    assert engine.encode(text, add_special_tokens=False).ids == ids
    assert own.vocab.unk not in ids


@needs_torch
def test_auto_tokenizer_loads_a_sentencepiece_model(sentencepieces, tmp_path):
  from transformers import AutoTokenizer

  folder = tmp_path / "folder"
  folder.mkdir()
  huggingface.save_tokenizer(folder, sentencepieces, 16)
  theirs, vocab = AutoTokenizer.from_pretrained(folder), sentencepieces.vocab
  for text in ODD + [WORDS[:40]]:
    expected = [vocab.cls, *sentencepieces.encode_batch([text])[0], vocab.sep]
    assert theirs(text)["input_ids"] == expected, ascii(text)
  roles = ("pad", "unk", "cls", "sep", "mask")
  assert [getattr(theirs, f"{role}_token_id") for role in roles] == [0, 1, 2, 3, vocab.mask]
  assert theirs("a", "b")["token_type_ids"][-1] == 1 and theirs.model_max_length == 16


@pytest.mark.parametrize(
  ("name", "setting", "exact"),
  [
    ("spaces inside pieces", {"split_by_whitespace": False}, True),
    ("no space put before", {"add_dummy_prefix": False}, True),
    ("nothing normalised", {"normalization_rule_name": "identity"}, True),
    ("control pieces", {"control_symbols": ["<mask>", "<2en>"]}, True),
    ("bytes", {"byte_fallback": True, "vocab_size": 340}, True),
    ("bytes of BPE", {"byte_fallback": True, "vocab_size": 340, "model_type": "bpe"}, False),
    ("users' symbols", {"user_defined_symbols": ["cab"]}, False),
    ("spaces kept", {"remove_extra_whitespaces": False}, False),
    ("spaces after words", {"treat_whitespace_as_suffix": True}, False),
    ("words", {"model_type": "word", "vocab_size": 20}, False),
    ("a table of one's own", {"normalization_rule_tsv": "table.tsv"}, False),
  ],
)
def test_other_sentencepiece_models_are_exact_or_copied(
  name, setting, exact, tmp_path, monkeypatch
):
  import sentencepiece

  monkeypatch.chdir(tmp_path)
  Path("table.tsv").write_text("61\t62\n", "utf-8")  # a becomes b
  options = {
    "vocab_size": 80, "model_type": "unigram", "control_symbols": ["<mask>"], "pad_id": 0,
    "unk_id": 1, "bos_id": 2, "eos_id": 3, "minloglevel": 2,
  }  # fmt: skip
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(some_text() + [WORDS] * 50), model_prefix="m",
    **(options | setting),
  )  # fmt: skip
  ours = tokenizer.load(tmp_path / "m.model")
  engine = sentencepiece_model.to_engine(tmp_path / "m.model")
  assert (engine is not None) == exact
  if not exact:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert not huggingface.save_tokenizer(folder, ours, 16) and not list(folder.iterdir())
    return
  for text in (WORDS, WORDS.upper(), "  a cab", ""):
    assert engine.encode(text).ids == ours.encode_batch([text])[0]
  if name == "spaces inside pieces":
    pieces = map(engine.id_to_token, engine.encode(WORDS).ids)
    assert any("\u2581" in piece[1:] for piece in pieces)
  if name == "control pieces":
    assert engine.encode("<2en>").ids == [5]


def test_a_sentencepiece_export_keeps_its_vocabulary(tmp_path):
  lines = [f"the cat number {i} sat on mat {i * 7} and ate fish" for i in range(300)]
  trained = vocabulary.train("unigram", lines, size=50, path=tmp_path / "spm.model")
  shutil.copytree(GOLDEN / "discriminator", tmp_path / "out" / "discriminator")
  assert huggingface.save_tokenizer(tmp_path / "out" / "discriminator", trained, 10)
  assert (tmp_path / "out" / "discriminator" / "tokenizer.json").is_file()
  assert sources.open_source(tmp_path / "out").tokenizer.vocab == trained.vocab
