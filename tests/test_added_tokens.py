"""Folders that transformers 4 and 5 save after `add_tokens`: every token has its id and its row."""

import dataclasses
import json

import pytest
from rich.console import Console
from test_hf import SIZES, needs_torch, random_network, write_vocab

from electra_jax.export import writer
from electra_jax.interop import huggingface, sources
from electra_jax.interop.vocabularies import engine_of
from electra_jax.interop.weights import ExchangeError

ADDED = {"covid19": 45, "<num>": 46, "[E1]": 47}
TEXTS = ["the covid19 of a", "Covid19", "xcovid19 <num>3", "the [E1]"]
IDS = [[5, 45, 6, 8], [45]]  # of the first two texts


def write_tokens(path, *, slow=True, decoder=False, added=ADDED) -> None:
  """Writes what a slow (of transformers 4) or a fast tokenizer saves."""
  from tokenizers import AddedToken

  tokens = write_vocab(path / "vocab.txt")
  config, special = {"tokenizer_class": "ElectraTokenizer"}, {"additional_special_tokens": ["[E1]"]}
  if not slow:
    engine = engine_of(tokens)
    engine.add_tokens(["covid19", "<num>"])
    engine.add_special_tokens([AddedToken("[E1]", special=True, normalized=False)])
    engine.save(str(path / "tokenizer.json"))
  if decoder:
    config["added_tokens_decoder"] = {
      str(i): {"content": name, "special": name == "[E1]", "normalized": name != "[E1]"}
      for name, i in {"[PAD]": 0, **added}.items()
    }
  else:
    (path / "added_tokens.json").write_text(json.dumps(added), "utf-8")
    (path / "special_tokens_map.json").write_text(json.dumps(special), "utf-8")
  (path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
  cfg = dataclasses.replace(SIZES["equal widths"], vocab_size=48)
  (tmp_path / "source").mkdir()
  huggingface.save(tmp_path / "source", cfg, random_network(cfg, "rtd_head"), "rtd_head", 0)
  return tmp_path / "source"


FORMS = [{"slow": False}, {}, {"decoder": True}]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_added_tokens_are_read_and_kept(folder, tmp_path, form):
  write_tokens(folder, **form)
  source = sources.open_source(folder)
  for kind in ("", "hf", "orbax"):
    if kind:
      writer.write(source, tmp_path / kind, kind, Console(quiet=True))
      source = sources.open_source(tmp_path / kind)
    tokens = source.tokenizer
    assert tokens.vocab.size == 48 and 47 in tokens.vocab.special_ids
    assert tokens.encode_batch(TEXTS[:2]) == IDS
    assert 46 in tokens.encode_batch(TEXTS)[2] and 47 not in tokens.encode_batch(TEXTS)[3]


@needs_torch
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_ids_are_transformers(folder, tmp_path, form):
  from transformers import AutoTokenizer

  write_tokens(folder, **form)
  source = sources.open_source(folder)
  writer.write(source, tmp_path / "out", "hf", Console(quiet=True))
  for place in (folder, tmp_path / "out" / "discriminator"):
    theirs = AutoTokenizer.from_pretrained(place)
    ids = theirs(TEXTS[:3], add_special_tokens=False)["input_ids"]  # [E1] in a text is text here
    assert ids == source.tokenizer.encode_batch(TEXTS[:3])
    assert theirs.convert_tokens_to_ids(list(ADDED)) == list(ADDED.values())


def test_a_vocabulary_as_large_as_the_weights_needs_no_added_tokens(folder):
  write_tokens(folder)
  cfg = dataclasses.replace(SIZES["equal widths"], vocab_size=45)
  huggingface.save(folder, cfg, random_network(cfg, "rtd_head"), "rtd_head", 0)
  assert sources.open_source(folder).tokenizer.vocab.size == 45


@pytest.mark.parametrize(
  "added, told",
  [
    ({"covid19": 46}, "'covid19' cannot have the id 46"),
    ({"the": 45}, "'the' cannot have the id 45"),
    ({"covid19": "x"}, "invalid literal"),
    ({"covid19": None}, "int"),
    ({"": 45}, "'' cannot have the id 45"),
  ],
)
def test_added_tokens_that_cannot_be_are_one_line(folder, added, told):
  write_tokens(folder, added=added)
  with pytest.raises(ExchangeError, match="source: the added tokens of vocab.txt: ") as error:
    sources.open_source(folder)
  assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["strip_accents", "do_lower_case"])
def test_rules_of_a_wrong_type_are_one_line(folder, field):
  write_vocab(folder / "vocab.txt", 48)
  (folder / "tokenizer_config.json").write_text(json.dumps({field: "x"}), "utf-8")
  with pytest.raises(ExchangeError, match=f"source: {field} must be true or false, got 'x'"):
    sources.open_source(folder)
