"""Checkpoints of the original: networks, heads, ties and folders."""

import dataclasses
import json

import numpy as np
import pytest
from conftest import ROOT
from test_exchange import a_source, command, save_hf, write_vocab
from test_hf import WORDS45, random_network, same
from tf1_files import same_embeddings, save_tf1, tf1_tensors, write_tf1

from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.interop import huggingface, sources
from electra_jax.interop.sources import ExchangeError, Network


@pytest.mark.filterwarnings("ignore:.*assumed")
def test_a_checkpoint_of_the_original_is_read_with_and_without_adams_slots(tmp_path):
  d, g = TransformerConfig(40, 8, 64, 2, 1, 256, 512), TransformerConfig(40, 8, 16, 2, 1, 64, 512)
  mine, small = random_network(d, "rtd_head"), random_network(g, "mlm_head", 1)
  small["embeddings"] = mine["embeddings"]
  tensors = tf1_tensors(d, mine, "electra", "discriminator_predictions")
  tensors |= tf1_tensors(g, small, "generator", "generator_predictions")
  tensors["generator_predictions/temperature"] = np.float32(1)
  tensors["global_step"] = np.int64(7)
  (tmp_path / "vocab.txt").write_text(
    "".join(f"{x}\n" for x in ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS45[:35]])
  )
  for adam in (False, True):
    if adam:
      tensors |= {f"{n}/adam_{s}": x for n, x in list(tensors.items())[:-1] for s in "mv"}
    prefix = tmp_path / f"model.ckpt-{adam}"
    write_tf1(prefix, tensors)
    source = sources.open_source(prefix)
    found = source.networks
    assert source.tokenizer.vocab.size == 40 and source.tokenizer.vocab.lowercase
    assert found["discriminator"].cfg == d and found["generator"].cfg == g
    assert same(found["discriminator"].weights, mine)
    assert same(found["generator"].weights, small)
  del tensors["electra/encoder/layer_1/output/dense/bias"]
  tensors["electra/encoder/layer_0/output/dense/bias"] = np.zeros(3, np.float32)
  tensors["generator/encoder/layer_0/gate/kernel"] = np.zeros(3, np.float32)
  write_tf1(tmp_path / "bad", tensors)
  with pytest.raises(huggingface.ExchangeError) as error:
    sources.open_source(tmp_path / "bad")
  assert "layer_1/output/dense/bias is missing" in str(error.value)
  assert "layer_0/output/dense/bias has shape (3,), but must have (64,)" in str(error.value)

  data = next(tmp_path.glob("model.ckpt-True.data*"))
  data.write_bytes(data.read_bytes()[:1000])
  with pytest.raises(huggingface.ExchangeError, match="cannot be read: "):
    sources.open_source(tmp_path / "model.ckpt-True")
  alone = {n: x for n, x in tensors.items() if n.startswith(("electra/", "discriminator"))}
  for i, bias in enumerate(mine["encoder"]["layers"]["ffn_output"]["bias"]):
    alone[f"electra/encoder/layer_{i}/output/dense/bias"] = bias
  alone["generator_ltr/encoder/layer_0/output/dense/bias"] = np.zeros(3, np.float32)
  write_tf1(tmp_path / "electric", alone)
  assert sources.open_source(tmp_path / "electric").left_out == ("the original's generator_ltr",)
  del alone["electra/embeddings/position_embeddings"]
  write_tf1(tmp_path / "no-positions", alone)
  with pytest.raises(
    huggingface.ExchangeError,
    match="the matrix .*position_embeddings', which gives a size, is missing",
  ):
    sources.open_source(tmp_path / "no-positions")


@pytest.fixture
def words(tmp_path):
  return write_vocab(tmp_path / "words" / "vocab.txt")


@pytest.fixture
def eight_heads(words):
  """A discriminator of 8 heads of 16, and a generator of 2 of 16."""
  cfg = TransformerConfig(45, 16, 128, 1, 8, 32, 12)
  small = dataclasses.replace(cfg, hidden_size=32, num_heads=2)
  found = {
    "discriminator": Network(cfg, random_network(cfg, "rtd_head"), "rtd_head"),
    "generator": Network(small, random_network(small, "mlm_head", 1), "mlm_head"),
  }
  return same_embeddings(sources.Source(found, words, {}))


def heads_of(source: sources.Source) -> list[int]:
  return [network.cfg.num_heads for network in source.networks.values()]


def test_the_number_of_heads_is_never_taken_in_silence(eight_heads, tmp_path):
  prefix = save_tf1(tmp_path / "model.ckpt-7", eight_heads)
  with pytest.warns(UserWarning, match="assuming 2 of size 64 for the discriminator") as warned:
    assert heads_of(sources.open_source(prefix)) == [2, 1]
  assert len(warned) == 2 and "assuming 1 of size 32 for the generator" in str(warned[1].message)


@pytest.mark.parametrize("name", ["config.json", "electra_config.json", "bert_config.json"])
@pytest.mark.filterwarnings("error")
def test_the_number_of_heads_is_read_from_a_config_or_the_command(name, eight_heads, tmp_path):
  prefix = save_tf1(tmp_path / "model.ckpt-7", eight_heads)
  assert heads_of(sources.open_source(prefix, (8, 2))) == [8, 2]
  config = {"num_attention_heads": 8, "hidden_size": 128, "layer_norm_eps": 1e-6}
  (tmp_path / name).write_text(json.dumps(config))
  with pytest.warns(UserWarning, match="assuming 1 of size 32 for the generator"):
    source = sources.open_source(prefix)
  assert heads_of(source) == [8, 1]
  assert source.networks["discriminator"].cfg.layer_norm_eps == 1e-6
  got = sources.open_source(tmp_path, (4, 2)).networks  # the folder has a config too
  assert [n.cfg.num_heads for n in got.values()] == [4, 2]
  (tmp_path / name).write_text(json.dumps({**config, "hidden_size": 64}))
  with pytest.raises(
    sources.ExchangeError, match="hidden_size is 64, but in model.ckpt-7 it is 128"
  ):
    sources.open_source(prefix)
  (tmp_path / name).write_text("{")
  with pytest.raises(sources.ExchangeError, match=f"{name} is not JSON"):
    sources.open_source(prefix)


def test_a_width_that_is_no_multiple_of_64_needs_the_number_of_heads(tmp_path):
  cfg = TransformerConfig(45, 16, 96, 1, 6, 32, 12)
  one = {"discriminator": Network(cfg, random_network(cfg, "rtd_head"), "rtd_head")}
  prefix = save_tf1(tmp_path / "model.ckpt-7", sources.Source(one, None, {}))
  with pytest.raises(sources.ExchangeError, match="96 is not a multiple of 64: set num_attention"):
    sources.open_source(prefix)
  assert heads_of(sources.open_source(prefix, [6])) == [6]
  with pytest.raises(ValueError, match="5 heads do not divide the hidden size 96"):
    sources.open_source(prefix, [5])
  (tmp_path / "config.json").write_text('{"num_attention_heads": "6"}')
  with pytest.raises(sources.ExchangeError, match="ckpt-7: the discriminator: "):
    sources.open_source(prefix)
  (tmp_path / "config.json").unlink()
  with pytest.raises(sources.ExchangeError, match="holds 1 network, but got heads for 2"):
    sources.open_source(prefix, [6, 6])


@pytest.mark.long
def test_the_command_warns_of_the_heads_it_assumed_in_a_line(eight_heads, tmp_path):
  prefix = save_tf1(tmp_path / "model.ckpt-7", eight_heads)
  with_tensorflow = {"PYTHONPATH": str(ROOT)}
  code, out, errors = command(
    "export", prefix, tmp_path / "out", "--to", "orbax", env=with_tensorflow
  )
  assert code == 0 and "exported to" in out
  told = [line for line in errors.splitlines() if line.startswith("warning: ")]
  assert len(told) == 2 and all("of size" in line for line in told)
  with pytest.raises(sources.ExchangeError, match="is not a TF1 checkpoint"):
    sources.open_source(tmp_path / "out", [8])


@pytest.mark.filterwarnings("ignore:.*assumed")
def test_the_originals_bert_and_fully_tied_checkpoints_are_read(words, tmp_path, monkeypatch):
  both = same_embeddings(a_source("discriminator", "generator", vocab=words), encoder=True)
  heads = [n.cfg.num_heads for n in both.networks.values()]
  prefix = save_tf1(tmp_path / "tied" / "model.ckpt-7", both, tied=True)
  read = sources.open_source(prefix, heads[:1])  # of the encoder that both have
  for role, network in both.networks.items():
    assert read.networks[role].cfg == network.cfg and read.networks[role].head == network.head
    assert same(read.networks[role].weights, network.weights)
  bert = dataclasses.replace(both, networks={"generator": both.networks["generator"]})
  prefix = save_tf1(tmp_path / "bert" / "model.ckpt-7", bert, tied=True)
  read = sources.open_source(prefix, heads[:1])
  assert list(read.networks) == ["discriminator"] and read.left_out == ()
  assert read.networks["discriminator"].head == "mlm_head"
  assert same(read.networks["discriminator"].weights, both.networks["generator"].weights)
  out = save_hf(tmp_path / "out", read)
  assert sources.open_source(out).networks["discriminator"].head == "mlm_head"


@pytest.mark.filterwarnings("ignore:.*assumed")
def test_a_checkpoint_that_moved_is_found_beside_its_note_and_nowhere_else(eight_heads, tmp_path):
  there = save_tf1(tmp_path / "there" / "model.ckpt-7", eight_heads)
  (tmp_path / "here").mkdir()
  for path in there.parent.glob("model.ckpt*"):
    (tmp_path / "here" / path.name).write_bytes(path.read_bytes())
  note = tmp_path / "here" / "checkpoint"
  note.write_text(f'model_checkpoint_path: "{there}"\nall_model_checkpoint_paths: "{there}"\n')
  for path in there.parent.iterdir():
    path.unlink()
  at = sources.open_source(tmp_path / "here", (8, 2))
  assert same(at.networks["generator"].weights, eight_heads.networks["generator"].weights)
  index = tmp_path / "here" / "model.ckpt-7.index"
  assert sources.open_source(index).networks.keys() == at.networks.keys()
  save_tf1(there, eight_heads)
  index.rename(tmp_path / "here" / "model.ckpt-8.index")
  message = "names model.ckpt-7, which is missing; the folder has model.ckpt-8"
  with pytest.raises(sources.ExchangeError, match=message):
    sources.open_source(tmp_path / "here")
  note.write_text("")
  with pytest.raises(sources.ExchangeError, match="checkpoint names no checkpoint"):
    sources.open_source(tmp_path / "here")


def test_a_matrix_of_another_rank_is_not_said_to_be_missing(tmp_path):
  cfg = TransformerConfig(40, 8, 64, 1, 1, 256, 512)
  tensors = tf1_tensors(
    cfg, random_network(cfg, "rtd_head"), "electra", "discriminator_predictions"
  )
  tensors["electra/embeddings/word_embeddings"] = np.zeros((40, 8, 1), np.float32)
  write_tf1(tmp_path / "model.ckpt", tensors)
  with pytest.raises(ExchangeError, match=r"word_embeddings', .* has shape \(40, 8, 1\)$"):
    sources.open_source(tmp_path / "model.ckpt")
