"""Weights in and out: units, vocabularies, heads, others' files, and what is refused in a line."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import test_hf
from conftest import long_except, python, without_activities
from rich.console import Console
from test_hf import SIZES, TEXTS, finetuned_as, needs_torch, random_network, same, write_vocab
from tf1_files import same_embeddings, save_tf1
from tokenizers import BertWordPieceTokenizer

from electra_jax.commands import cli
from electra_jax.data import tokenizer, vocabulary
from electra_jax.export import writer
from electra_jax.finetune import model
from electra_jax.interop import huggingface, initial, sources
from electra_jax.interop.sources import ExchangeError, Network
from electra_jax.interop.vocabularies import difference
from electra_jax.runtime import workdir


def command(program: str, *args, text: str = "", umask: int = 0o022, file_bytes=None, env=()):
  """Returns a program's exit code, its output and its errors."""
  done = python(
    "-m", f"electra_jax.{program}", *args, input=text, umask=umask, file_bytes=file_bytes,
    env={"JAX_NUM_CPU_DEVICES": "1", **dict(env)},
  )  # fmt: skip
  return done.returncode, done.stdout, without_activities(done.stderr)


@pytest.mark.parametrize("umask", [0o022, 0o002])
def test_what_is_written_has_the_umasks_mode(umask, tmp_path):
  from safetensors.numpy import save_file

  before = os.umask(umask)
  try:
    with workdir.new_folder(tmp_path / "out") as new:
      (new / "inside").mkdir()
      save_file({"x": np.zeros(3)}, new / "inside" / "model.safetensors")
      (new / "config.json").write_text("{}")
  finally:
    os.umask(before)
  for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")):
    assert path.stat().st_mode & 0o777 == (0o666 if path.is_file() else 0o777) & ~umask, path


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
  def refuse(*args):
    raise PermissionError(13, "Permission denied", str(args[0]))

  monkeypatch.setattr(os, "mkdir", refuse)
  with pytest.raises(PermissionError) as error, workdir.new_folder(tmp_path / "out"):
    pass
  assert error.value.filename == str(tmp_path / "out")
  monkeypatch.undo()
  with pytest.raises(OSError, match=r"No space left \(.* MB needed") as error:
    with workdir.new_folder(tmp_path / "out", needed=1 << 60):
      pass
  assert error.value.filename == str(tmp_path / "out") and not list(tmp_path.iterdir())
  (tmp_path / "file").write_text("")
  with pytest.raises(NotADirectoryError) as error, workdir.new_folder(tmp_path / "file" / "out"):
    pass
  assert error.value.filename == str(tmp_path / "file")


def a_source(*roles, finetuned=None, vocab=None, positions=12) -> sources.Source:
  """Networks of random weights and 45 tokens."""
  cfg = dataclasses.replace(SIZES["projected"], vocab_size=45, max_positions=positions)
  heads = {"discriminator": None if finetuned else "rtd_head", "generator": "mlm_head"}
  found = {r: Network(cfg, random_network(cfg, heads[r]), heads[r]) for r in roles}
  return sources.Source(found, vocab, {}, finetuned=finetuned)


@pytest.fixture
def words45(tmp_path):
  return write_vocab(tmp_path / "words" / "vocab.txt")


def a_number(vocab) -> sources.Source:
  """A fine-tuned network that answers a number about 8."""
  text, two_layers = TEXTS["regression"] | {"scale": 5.0, "offset": 8.0}, {"layers": "two_layers"}
  finetuned = finetuned_as(SIZES["projected"], "regression", two_layers, text)
  return a_source("discriminator", finetuned=finetuned, vocab=vocab)


@pytest.fixture
def number(words45):
  return a_number(words45)


def test_a_lone_masked_language_model_starts_the_main_network(words45, tmp_path):
  """As of an export of `electra_mlm` of which only that folder was kept."""
  cfg = dataclasses.replace(SIZES["projected"], vocab_size=45)
  weights = random_network(cfg, "mlm_head")
  (tmp_path / "masked_lm").mkdir()
  huggingface.save(tmp_path / "masked_lm", cfg, weights, "mlm_head", 0)
  params, main, _ = initial.read_params(tmp_path, words45, "embeddings")
  assert main.hidden_size == cfg.hidden_size and set(params) == {"embeddings", "discriminator"}
  assert same(params["discriminator"]["encoder"], weights["encoder"])


def test_a_number_goes_out_in_the_unit_of_its_labels(number, tmp_path):
  from safetensors.numpy import load_file

  out = io.StringIO()
  writer.export_hf(number, tmp_path / "out", Console(file=out, soft_wrap=True))
  folder = tmp_path / "out" / "discriminator"
  tensors = load_file(folder / "model.safetensors")
  head = number.finetuned.head["out_proj"]
  # By 5, which is rounded once; the bias twice.
  np.testing.assert_allclose(tensors["classifier.out_proj.weight"].T, head["kernel"] * 5, rtol=1e-7)
  np.testing.assert_allclose(tensors["classifier.out_proj.bias"], head["bias"] * 5 + 8, rtol=2e-7)
  assert json.loads((folder / "config.json").read_text())["problem_type"] == "regression"
  assert ("in the unit of the labels" in out.getvalue()) == test_hf.HAS_TORCH


@needs_torch
def test_transformers_answers_the_number_that_is_answered_here(number, tmp_path):
  from transformers import pipeline

  texts = ["the cat is in a bed", "a b c", "of"]
  save_hf(tmp_path / "out", number)
  ours = [x["score"] for x in model.from_source(number, "x")(texts)]
  theirs = pipeline("text-classification", str(tmp_path / "out" / "discriminator"))(texts)
  assert np.ptp(ours) > 1e-3
  np.testing.assert_allclose([x["score"] for x in theirs], ours, atol=1e-5)


@needs_torch
def test_parity_is_that_of_the_number_here(number, tmp_path, monkeypatch):
  monkeypatch.setattr(writer, "in_unit", lambda network, unit: network)
  with pytest.raises(ExchangeError, match="differ from transformers by"):
    writer.export_hf(number, tmp_path / "out", Console(quiet=True))
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("by", [0.5, 60])  # of that, LAST_BITS x the last bit may be half
@pytest.mark.parametrize("role", ["discriminator", "generator"])
@pytest.mark.parametrize("length", [12, 128, 600])
def test_a_network_with_other_logits_there_is_not_exported(
  length, role, by, words45, tmp_path, monkeypatch
):
  source = a_source(role, vocab=words45, positions=12 if length == 12 else 700)
  monkeypatch.setattr(writer.importlib.util, "find_spec", lambda name: True)

  def theirs(folder, head, batch):
    """In the place of transformers."""
    ours = writer.logits(source.networks[role], batch)
    x = ours[batch.padding_mask]
    spread, floor = 5e-5 * np.std(x), 1e-5 * np.abs(x).max()
    assert (spread > floor) == (role == "generator")  # the discriminator's are nearly the same
    allowed = max(spread, floor)
    other = np.full(ours.shape, by * allowed * (batch.ids.shape[1] == length))
    other[~batch.padding_mask] = 1
    return ours + other

  monkeypatch.setattr(huggingface, "torch_outputs", theirs)
  refused = pytest.raises(
    ExchangeError, match=f"nothing exported: .*differ .* on {length} tokens, "
  )
  with contextlib.nullcontext() if by < 1 else refused:
    save_hf(tmp_path / "out", source)
  assert (tmp_path / "out").exists() == (by < 1)


def test_what_is_written_is_shown(tmp_path, monkeypatch):
  shown = []
  monkeypatch.setattr(writer, "doing", lambda what: shown.append(what) or contextlib.nullcontext())
  writer.export_hf(a_source("discriminator", "generator"), tmp_path / "out", Console(quiet=True))
  assert shown == ["writing the discriminator", "writing the generator"]


# The vocabulary and its network.


def save_hf(folder: Path, source: sources.Source) -> Path:
  writer.export_hf(source, folder, Console(quiet=True))
  return folder


@pytest.mark.parametrize("form", ["hf", "tf1", "orbax"])
@pytest.mark.parametrize("size", [40, 50])
def test_a_vocabulary_of_another_size_is_refused_before_anything_is_written(
  form, size, words45, tmp_path
):
  source = same_embeddings(a_source("discriminator", "generator", vocab=words45))
  if form == "tf1":
    at = vocab = save_tf1(tmp_path / "in" / "model.ckpt-7", source).parent
    (at / "config.json").write_text('{"num_attention_heads": 4}')
  elif form == "hf":
    at = save_hf(tmp_path / "in", source)
    vocab = at / "discriminator"
    for role in ("discriminator", "generator"):
      (at / role / "tokenizer.json").unlink()  # another claim: test_hf
      write_vocab(at / role / "vocab.txt", size)
  else:
    at = vocab = tmp_path / "in"
    at.mkdir()
    wrong = write_vocab(tmp_path / "wrong" / "vocab.txt", size)
    sources.save_orbax(at, dataclasses.replace(source, tokenizer=wrong))
  write_vocab(vocab / "vocab.txt", size)
  told = rf"vocab.txt has {size} entries, the discriminator of .* has 45"
  with pytest.raises(ExchangeError, match=told):
    cli.call("export", [str(at), str(tmp_path / "out"), "--to", "hf"])
  assert sorted(p.name for p in tmp_path.iterdir() if p.name != "wrong") == ["in", "words"]


def test_an_orbax_export_names_what_it_leaves_out(words45, tmp_path):
  at = save_hf(tmp_path / "in", a_source("discriminator", "generator", vocab=words45))
  out = io.StringIO()
  writer.run(str(at), tmp_path / "out", "orbax", Console(file=out, width=200))
  assert out.getvalue() == f"not exported: the generator\nexported to {tmp_path / 'out'}\n"


def test_networks_of_two_vocabularies_are_refused(words45, tmp_path):
  at = save_hf(tmp_path / "in", a_source("discriminator", "generator", vocab=words45))
  for role, words in (("discriminator", 1), ("generator", -1)):
    (at / role / "tokenizer.json").unlink()
    lines = (at / role / "vocab.txt").read_text().splitlines()
    (at / role / "vocab.txt").write_text("\n".join(lines[:-2] + lines[-2:][::words]) + "\n")
  with pytest.raises(ExchangeError, match="discriminator/vocab.txt and .*generator.* diff"):
    sources.open_source(at)


@pytest.mark.parametrize("to", long_except(0, of=["orbax", "hf"]))
def test_a_disk_that_fills_while_an_export_writes_ends_with_one_line(to, words45, tmp_path):
  at = save_hf(tmp_path / "in", a_source("discriminator", vocab=words45))
  code, _, errors = command("export", at, tmp_path / "out", "--to", to, file_bytes=5_000)
  assert code == 1 and errors.count("\n") == 1 and "cannot be written: " in errors
  assert "File too large" in errors and str(tmp_path) in errors
  assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "words"]


# Folders of Hugging Face.


@pytest.mark.parametrize(
  ("file", "field", "value"),
  [
    ("tokenizer_config.json", "tokenizer_class", "BertJapaneseTokenizer"),
    ("config.json", "tokenizer_class", "BertJapaneseTokenizer"),
    ("tokenizer_config.json", "do_basic_tokenize", False),
    ("tokenizer_config.json", "never_split", ["a"]),
  ],
)
def test_a_vocab_txt_of_another_tokenizer_is_refused(file, field, value, tmp_path):
  (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
  known = {"tokenizer_class": "ElectraTokenizer"} if file == "config.json" else {}
  content = {"tokenizer_config.json": {}, "config.json": known} | {file: {field: value}}
  for name, fields in content.items():
    (tmp_path / name).write_text(json.dumps(fields))
  with pytest.raises(ExchangeError, match=re.escape(f"{field}={value!r} changes BERT's")):
    huggingface.load_tokenizer(tmp_path)


def test_a_vocab_txt_and_a_tokenizer_json_must_agree(tmp_path):
  path = tmp_path / "vocab.txt"
  path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
  for lowercase in (True, False):
    engine = BertWordPieceTokenizer(str(path), lowercase=lowercase)
    engine.save(str(tmp_path / "tokenizer.json"))
    if lowercase:
      assert huggingface.load_tokenizer(tmp_path).vocab.kind == "wordpiece"
  message = "vocab.txt differs from tokenizer.json: normalizer.lowercase is True, not False; delete"
  with pytest.raises(ExchangeError, match=message):
    huggingface.load_tokenizer(tmp_path)


def test_a_folder_that_changes_berts_rules_is_read_by_its_tokenizer_json(tmp_path):
  folder = shutil.copytree(test_hf.GOLDEN / "discriminator", tmp_path / "model")
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
  with pytest.raises(ExchangeError, match="chars=False changes BERT's rules"):
    ids("Übung")
  BertWordPieceTokenizer(
    str(vocab), lowercase=True, strip_accents=False, handle_chinese_chars=False
  ).save(str(folder / "tokenizer.json"))
  assert ids("Übung") == [5]
  config.write_text("{")
  with pytest.raises(ExchangeError, match="tokenizer_config.json is not JSON"):
    ids("Übung")


@needs_torch
@pytest.mark.parametrize("new", [True, False])
def test_pytorchs_own_files_are_read(new, words45, tmp_path):
  import torch
  from safetensors.torch import load_file

  source = a_source("discriminator", vocab=words45)
  folder = save_hf(tmp_path / "hf", source) / "discriminator"
  tensors, file = load_file(folder / "model.safetensors"), folder / "pytorch_model.bin"
  torch.save(tensors, file, _use_new_zipfile_serialization=new)
  (folder / "model.safetensors").unlink()
  read = sources.open_source(tmp_path / "hf").networks["discriminator"]
  assert same(read.weights, source.networks["discriminator"].weights)
  file.write_bytes(file.read_bytes()[:-2000])
  with pytest.raises(ExchangeError, match="pytorch_model.bin is damaged: ") as error:
    sources.open_source(tmp_path / "hf")
  assert "\n" not in str(error.value)


@needs_torch
def test_pytorchs_files_with_an_index_are_read(words45, tmp_path):
  import torch
  from safetensors.torch import load_file

  source = a_source("discriminator", vocab=words45)
  folder = save_hf(tmp_path / "hf", source) / "discriminator"
  tensors = load_file(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  names, places = sorted(tensors), {}
  for i, part in enumerate((names[:5], names[5:]), 1):
    places |= dict.fromkeys(part, file := f"pytorch_model-0000{i}-of-00002.bin")
    torch.save({name: tensors[name] for name in part}, folder / file)
  index = {"metadata": {}, "weight_map": places}
  (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
  read = sources.open_source(tmp_path / "hf").networks["discriminator"]
  assert same(read.weights, source.networks["discriminator"].weights)


# Two vocabularies.


def saved_again(folder: Path, words: tokenizer.Tokenizer) -> tokenizer.Tokenizer:
  """The tokenizer.json alone, as transformers leaves a folder that it has loaded and saved."""
  folder.mkdir()
  huggingface.save_tokenizer(folder, words, 12)
  (folder / words.vocab.file).unlink()
  return tokenizer.load(folder / "tokenizer.json")


def test_a_vocabulary_that_was_saved_again_is_the_same(words45, tmp_path):
  again = saved_again(tmp_path / "again", words45)
  assert again.vocab.hash != words45.vocab.hash and again.vocab.kind != words45.vocab.kind
  assert difference(words45, again) is None and difference(again, words45) is None
  source = a_source("discriminator", vocab=again)
  folder = tmp_path / "orbax"
  folder.mkdir()
  sources.save_orbax(folder, source)
  assert initial.read_params(folder, words45, "embeddings")[0].keys() == {
    "embeddings",
    "discriminator",
  }
  text = [f"the cat number {i} sat on mat {i * 7} and ate fish" for i in range(300)]
  for kind in ("unigram", "bpe"):
    (tmp_path / kind).mkdir()
    pieces = vocabulary.train(kind, text, size=50, path=tmp_path / kind / "spm.model")
    assert difference(pieces, saved_again(tmp_path / f"{kind} again", pieces)) is None


def changed(folder: Path, words, part: str, **fields) -> tokenizer.Tokenizer:
  """Its tokenizer.json with other fields."""
  again = saved_again(folder, words)
  content = json.loads(again.path.read_text())
  content[part] |= fields
  again.path.write_text(json.dumps(content))
  return tokenizer.load(again.path)


def test_a_vocabulary_with_other_rules_or_entries_is_another(words45, tmp_path):
  cased = tokenizer.load(words45.path, lowercase=False)
  assert cased.vocab.hash == words45.vocab.hash
  assert difference(cased, words45) == "normalizer.lowercase is False, not True"
  with_accents = changed(tmp_path / "1", words45, "normalizer", strip_accents=False)
  assert difference(with_accents, words45) == "normalizer.strip_accents is False, not True"
  (tmp_path / "source").mkdir()
  sources.save_orbax(tmp_path / "source", a_source("discriminator", vocab=with_accents))
  with pytest.raises(ExchangeError, match="with --config.data.strip_accents=false$"):
    initial.read_params(tmp_path / "source", words45, "embeddings")
  lower = changed(tmp_path / "2", words45, "normalizer", strip_accents=True)
  assert difference(lower, words45) is None  # BERT's default, spelled out
  assert difference(write_vocab(tmp_path / "50.txt", 50), words45) == "50 entries, not 45"
  pieces = words45.path.read_text().replace("\nthat\n", "\nthis\n")
  (tmp_path / "other.txt").write_text(pieces)
  other = tokenizer.load(tmp_path / "other.txt")
  assert difference(other, words45) == "entry 13 is 'this', not 'that'"
  short = changed(tmp_path / "3", words45, "model", max_input_chars_per_word=7)
  assert difference(words45, short) == "model.max_input_chars_per_word is 100, not 7"
  unigram = vocabulary.train("unigram", ["a b"] * 300, size=9, path=tmp_path / "spm.model")
  assert difference(unigram, words45) == "a Unigram model, not WordPiece"


def test_training_from_a_source_of_other_rules_is_refused(words45, tmp_path):
  (tmp_path / "orbax").mkdir()
  sources.save_orbax(tmp_path / "orbax", a_source("discriminator", vocab=words45))
  cased = tokenizer.load(words45.path, lowercase=False)
  with pytest.raises(
    ExchangeError, match="and the shards have different vocabularies: normalizer.lowercase is True"
  ):
    initial.read_params(tmp_path / "orbax", cased, "embeddings")


@needs_torch
def test_a_folder_that_transformers_saved_again_is_read(words45, tmp_path):
  from transformers import AutoTokenizer, ElectraForPreTraining

  old = save_hf(tmp_path / "hf", a_source("discriminator", vocab=words45)) / "discriminator"
  ElectraForPreTraining.from_pretrained(old).save_pretrained(tmp_path / "new")
  AutoTokenizer.from_pretrained(old).save_pretrained(tmp_path / "new")
  assert not (tmp_path / "new" / "vocab.txt").exists()
  assert initial.read_params(tmp_path / "new", words45, "embeddings")[0].keys() == {
    "embeddings",
    "discriminator",
  }
