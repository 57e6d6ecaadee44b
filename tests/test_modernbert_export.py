"""What an export in ModernBERT's shape holds: the encoder, its detector, and how both are read."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file
from test_hf import change_config, needs_torch
from test_modernbert import CFG, random_network

import electra_jax
from electra_jax.config import files
from electra_jax.core.batch import Batch
from electra_jax.export import writer
from electra_jax.finetune import from_config
from electra_jax.interop import huggingface, sources
from electra_jax.interop.sources import Network
from electra_jax.interop.weights import ExchangeError


@pytest.fixture
def detector(words):
  cfg = dataclasses.replace(CFG, vocab_size=words.vocab.size)
  return Network(cfg, random_network(cfg, "rtd_head"), "rtd_head")


@pytest.fixture
def exported(tmp_path, words, detector):
  source = sources.Source({"discriminator": detector}, words, {})
  writer.export_hf(source, tmp_path / "out", Console(quiet=True))
  return tmp_path / "out"


def the_discriminator(path) -> Network:
  (network,) = sources.open_source(path).networks.values()
  return network


def same(a: Network, b: Network) -> bool:
  equal = (a.cfg, a.head) == (b.cfg, b.head) and jax.tree.map(np.array_equal, a.weights, b.weights)
  return jax.tree.all(equal)


def test_a_detector_comes_back_and_its_encoder_alone_has_no_head(exported, detector):
  for path in (exported, exported / "detector"):
    assert same(the_discriminator(path), detector)
  assert same(the_discriminator(exported / "discriminator"), detector.without_head())
  with pytest.raises(ExchangeError, match=f"needs; {exported / 'detector'} has one$"):
    electra_jax.load(exported / "discriminator").detect("a word")
  (exported / "discriminator").rename(exported / "kept")
  assert same(the_discriminator(exported), detector)


def test_a_detector_that_was_trained_on_is_the_difference_of_its_logits(exported, detector):
  path = exported / "detector" / "model.safetensors"
  tensors = load_file(path)
  tensors["classifier.bias"] += np.float32([0.5, 0.75])
  save_file(tensors, path)
  bias = the_discriminator(exported).weights["rtd_head"]["logit"]["bias"]
  np.testing.assert_allclose(bias, detector.weights["rtd_head"]["logit"]["bias"] + 0.25, atol=1e-6)


def test_a_detector_of_earlier_exports_is_read(exported, detector):
  shutil.rmtree(exported / "discriminator")
  folder = (exported / "detector").rename(exported / "discriminator")
  tensors = load_file(folder / "model.safetensors")
  last = {name: x[1:] for name, x in tensors.items() if name.startswith("classifier.")}
  assert last["classifier.weight"].shape == (1, 16)
  save_file(tensors | last, folder / "model.safetensors")
  change_config(folder, num_labels=1, id2label={"0": "REPLACED"})
  assert same(the_discriminator(exported), detector)


def test_an_encoder_and_another_ones_detector_are_refused(exported, detector):
  tensors = load_file(exported / "detector" / "model.safetensors")
  tensors["model.final_norm.weight"][3] += 1e-7
  save_file(tensors, exported / "detector" / "model.safetensors")
  message = "out: discriminator and detector have different encoders; delete the wrong folder$"
  with pytest.raises(ExchangeError, match=message):
    sources.open_source(exported)
  save_file(tensors, exported / "discriminator" / "model.safetensors")
  change_config(exported / "discriminator", local_attention=4)
  with pytest.raises(ExchangeError, match=message):
    sources.open_source(exported)


@needs_torch
def test_fine_tuning_of_transformers_makes_no_detector(exported):
  """With its default labels of a new head on the encoder."""
  from transformers import AutoModelForTokenClassification as Tags

  for count in (1, 2):
    tags = Tags.from_pretrained(exported / "discriminator", num_labels=count)
    if count == 1:
      tags.config.id2label = {0: "NN"}
    tags.save_pretrained(exported / f"tags {count}")
    assert the_discriminator(exported / f"tags {count}").head is None


def test_an_exported_tokenizer_gives_what_the_network_takes(exported, words):
  folder, ids = exported / "discriminator", words.vocab
  tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
  assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]
  # transformers' own defaults are the released models' ids, beyond a smaller vocabulary.
  fields = {"cls": ids.cls, "bos": ids.cls, "sep": ids.sep, "eos": ids.sep, "pad": ids.pad}
  config = json.loads((folder / "config.json").read_text())
  assert {name: config.get(f"{name}_token_id") for name in fields} == fields


def test_fine_tuning_keeps_a_sources_own_dropout_rates_unless_they_are_set(exported):
  config = files.load("finetune/own.py")
  config.init = str(exported)
  config.model.dropout = 0.2
  for ours, wanted in (((None, None), (0.0, 0.0)), ((0.3, 0.4), (0.3, 0.4))):
    config.model.embedding_dropout, config.model.ffn_dropout = ours
    found = from_config.load_pretrained(config).cfg
    assert (found.embedding_dropout, found.ffn_dropout) == wanted
    assert (found.dropout, found.attention_dropout) == (0.2, 0.1)


def test_a_token_classifier_of_two_labels_or_of_a_tag_is_another_tasks(tmp_path):
  huggingface.save(tmp_path, CFG, random_network(CFG, None), None, 0)
  path, tensors = tmp_path / "config.json", load_file(tmp_path / "model.safetensors")
  tensors |= {"classifier.weight": np.zeros((2, 16), np.float32)}
  save_file(tensors, tmp_path / "model.safetensors")
  content = json.loads(path.read_text()) | {"architectures": ["ModernBertForTokenClassification"]}
  for labels in ({"id2label": {"0": "a", "1": "b"}}, {"id2label": {"0": "NN"}}, {}):  # {}: two
    path.write_text(json.dumps(content | labels))
    assert huggingface.load(tmp_path)[1] is None
  for name in ("REPLACED", "LABEL_0"):
    path.write_text(json.dumps(content | {"id2label": {"0": name}}))
    assert huggingface.read_config(tmp_path)[2] == "rtd_head"


def scaled(scale: float, head: str = "mlm_head") -> Network:
  """Five layers with windows of 8 tokens, for 600, whose matrices have a standard deviation."""
  cfg = dataclasses.replace(CFG, max_positions=600)
  weights = jax.tree.map(
    lambda x: x * np.float32(scale / 0.3) if x.ndim > 1 else x, random_network(cfg, head)
  )
  return Network(cfg, weights, head)


def some_ids(length: int) -> Batch:
  ids = np.random.default_rng(0).integers(5, CFG.vocab_size, (2, length)).astype(np.int32)
  mask = np.arange(length) < np.array([[length], [length - 7]])
  return Batch(ids, np.zeros_like(ids), mask, np.arange(2, dtype=np.int32))


@needs_torch
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("length", [24, 600])
def test_weights_of_any_scale_are_exported_and_a_wrong_one_is_not(tmp_path, scale, length):
  network, batch = scaled(scale), some_ids(length)
  huggingface.save(tmp_path, network.cfg, network.weights, network.head, 0)
  ours = writer.logits(network, batch)
  writer.check_parity(tmp_path, network.head, batch, ours, network=network)
  if scale == 0.1:  # the wrong GELU changes logits by 8e-4 of their spread
    allowed = writer.LAST_BITS * writer.last_bit(network, batch)
    assert allowed < 2e-4 * writer.without_padding(ours, network.head, batch).std()
  path = tmp_path / "model.safetensors"
  tensors = load_file(path)
  tensors["model.layers.2.attn.Wo.weight"][3] *= -1  # a row of one matrix
  save_file(tensors, path)
  with pytest.raises(ExchangeError, match=f"differ from transformers by .* on {length} tokens"):
    writer.check_parity(tmp_path, network.head, batch, ours, network=network)
