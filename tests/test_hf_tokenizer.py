"""The tokenizer of a Hugging Face folder: that of its vocab.txt, or of its tokenizer.json."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import BertWordPieceTokenizer

from electra_jax.interop import huggingface, sources

GOLDEN = Path(__file__).parent / "golden"


def test_a_folder_that_changes_berts_rules_is_read_by_its_tokenizer_json(tmp_path):
  folder = tmp_path / "model"
  shutil.copytree(GOLDEN / "discriminator", folder)
  vocab, config = folder / "vocab.txt", folder / "tokenizer_config.json"
  pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "übung", "ubung"]
  pieces += [f"x{i}" for i in range(huggingface.read_config(folder)[1].vocab_size - len(pieces))]
  vocab.write_text("".join(f"{x}\n" for x in pieces), encoding="utf-8")

  def ids(text: str) -> list[int]:
    return sources.open_source(folder).tokenizer.encode_batch([text])[0]

  assert ids("Übung") == [6]
  config.write_text('{"do_lower_case": null}')
  assert ids("übung Übung") == [5, 1]
  rules = {"do_lower_case": True, "strip_accents": False}  # as in released German ELECTRAs
  config.write_text(json.dumps(rules))
  assert ids("Übung") == [5]
  config.write_text(json.dumps(rules | {"tokenize_chinese_chars": False}))
  with pytest.raises(huggingface.ExchangeError, match="chars=False changes BERT's rules"):
    ids("Übung")
  engine = BertWordPieceTokenizer(
    str(vocab), lowercase=True, strip_accents=False, handle_chinese_chars=False
  )
  engine.save(str(folder / "tokenizer.json"))
  assert ids("Übung") == [5]
  config.write_text("{")
  with pytest.raises(huggingface.ExchangeError, match="tokenizer_config.json is damaged"):
    ids("Übung")
