"""DeBERTaV3 to and from transformers and Microsoft's files: logits, weights, what is refused."""

import dataclasses
import json
import shutil

import deberta_release
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import python
from rich.console import Console
from safetensors.numpy import load_file, save_file
from test_hf import needs_torch, same
from test_spm import ODD, some_text

import electra_jax
from electra_jax.core import networks
from electra_jax.core.batch import Batch, from_rows
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data import tokenizer
from electra_jax.evaluate import likelihoods
from electra_jax.export import writer
from electra_jax.interop import huggingface, initial, sources
from electra_jax.interop.deberta import DEBERTA, LAYERS
from electra_jax.interop.weights import ExchangeError, Network, network_shapes

CFG = TransformerConfig(
  *(50, 16, 16, 3, 2, 24, 512), **LAYERS, position_buckets=8, layer_norm_eps=1e-7
)
# {name: (config, lengths of the rows)}: beyond the rows of single distances, and all 512 positions.
SHAPES = {
  "a token": (CFG, (1,)),
  "two tokens": (CFG, (2, 1)),
  "single distances": (CFG, (5, 3)),
  "shared distances": (CFG, (30, 11, 2)),
  "the release's buckets": (dataclasses.replace(CFG, position_buckets=256), (140, 131)),
  "all positions": (dataclasses.replace(CFG, position_buckets=256), (512, 300)),
  "few positions": (dataclasses.replace(CFG, max_positions=40), (40, 39)),
  "odd buckets": (dataclasses.replace(CFG, position_buckets=9), (33,)),
  "320 buckets": (dataclasses.replace(CFG, position_buckets=320, num_layers=1), (512,)),
  "one head": (dataclasses.replace(CFG, num_heads=1, ffn_size=40), (17, 17)),
  "one layer": (dataclasses.replace(CFG, num_layers=1), (7,)),
  "heads of one": (dataclasses.replace(CFG, num_heads=16), (19, 4)),
  "another epsilon": (dataclasses.replace(CFG, layer_norm_eps=1e-5), (9, 8)),
}
HEADS = ["mlm_head", "text_head", "token_head", "span_head", None]
# Rounding of float32 through three layers: values up to 5, eps 6e-8, some 20 operations a layer.
ATOL = 1e-5


def random_network(cfg, head, seed=0, decodes=False) -> dict:
  """Weights of a standard deviation of 0.05, scales near 1: larger ones amplify rounding."""
  rng = np.random.default_rng(seed)
  if head in ("text_head", "token_head", "span_head"):
    shapes = network_shapes(cfg)
    layers = {
      "text_head": {"dense": (16, 16), "out_proj": (16, 3)},
      "token_head": {"classifier": (16, 3)},
      "span_head": {"qa_outputs": (16, 2)},
    }[head]
    shapes[head] = {
      name: {"kernel": jnp.zeros(shape), "bias": jnp.zeros(shape[1])}
      for name, shape in layers.items()
    }
  else:
    shapes = network_shapes(cfg, head, decodes=decodes)
  network = jax.tree.map(lambda x: rng.normal(0, 0.05, x.shape).astype(np.float32), shapes)
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x + np.float32(path[-1].key == "scale"), network
  )


def a_batch(lengths, vocab_size=50) -> Batch:
  rng = np.random.default_rng(1)
  rows = [rng.integers(5, vocab_size, n).tolist() for n in lengths]
  return from_rows(rows, (len(rows), max(lengths)), 0)


def labels(head) -> dict:
  return {"num_labels": 3} if head in ("text_head", "token_head") else {}


@needs_torch
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_transformers(name, head, tmp_path):
  import transformers

  cfg, lengths = SHAPES[name]
  network, batch = random_network(cfg, head), a_batch(lengths)
  huggingface.save(tmp_path, cfg, network, head, 0, labels(head))
  ours = writer.logits(Network(cfg, network, head), batch)
  theirs = huggingface.torch_outputs(tmp_path, head, batch)
  difference = writer.without_padding(ours - theirs, head, batch)
  np.testing.assert_allclose(difference, 0, atol=ATOL)
  kind = getattr(transformers, DEBERTA.classes[head])
  loading = kind.from_pretrained(tmp_path, output_loading_info=True)[1]
  assert not any(loading.values())  # each tensor is read, none is new


@needs_torch
@pytest.mark.parametrize("name", SHAPES)
def test_a_detector_is_its_states_in_transformers_with_microsofts_head(name, tmp_path):
  import torch
  from torch.nn import functional as F

  cfg, lengths = SHAPES[name]
  network, batch = random_network(cfg, "rtd_head"), a_batch(lengths)
  huggingface.save(tmp_path, cfg, network, "rtd_head", 0)
  tensors = {k: torch.tensor(x) for k, x in load_file(tmp_path / "model.safetensors").items()}
  x = torch.tensor(huggingface.torch_outputs(tmp_path, None, batch))
  norm, dense, last = (
    [tensors[f"mask_predictions.{x}.{y}"] for y in ("weight", "bias")]
    for x in ("LayerNorm", "dense", "classifier")
  )
  x = F.layer_norm(x + x[:, :1], x.shape[-1:], *norm, eps=cfg.layer_norm_eps)
  expected = F.linear(F.gelu(F.linear(x, *dense)), *last)[..., 0].numpy()
  ours = writer.logits(Network(cfg, network, "rtd_head"), batch)
  np.testing.assert_allclose(ours[batch.padding_mask], expected[batch.padding_mask], atol=ATOL)


@needs_torch
@pytest.mark.parametrize("name", SHAPES)
def test_a_generator_is_the_last_layer_of_transformers_twice(name, tmp_path):
  """The enhanced mask decoder, from the modules of transformers as Microsoft's code calls them."""
  import torch

  cfg, lengths = SHAPES[name]
  network, batch = random_network(cfg, "mlm_head", decodes=True), a_batch(lengths)
  huggingface.save(tmp_path, cfg, network, "mlm_head", 0)
  assert same(huggingface.load(tmp_path)[2], network)
  theirs = huggingface.torch_network(tmp_path, "mlm_head")
  table = load_file(tmp_path / "model.safetensors")["deberta.embeddings.position_embeddings.weight"]
  with torch.no_grad():
    ids, mask = (torch.tensor(x).long() for x in (batch.ids, batch.padding_mask))
    encoder = theirs.deberta.encoder
    states = theirs.deberta(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    h = states[-2]
    y = h + torch.tensor(table)[: ids.shape[1]]
    for _ in range(2):
      y = encoder.layer[-1](
        h,
        encoder.get_attention_mask(mask),
        query_states=y,
        relative_pos=encoder.get_rel_pos(h),
        rel_embeddings=encoder.get_rel_embedding(),
      )[0]
    expected = theirs.lm_predictions(y, theirs.deberta.embeddings.word_embeddings).numpy()
  B, L = batch.ids.shape
  at = np.broadcast_to(np.arange(L, dtype=np.int32), (B, L))[:, ::-1]
  found = networks.states_to_predict(cfg, network, batch.ids, batch, None, at)
  ours = np.asarray(networks.vocabulary_logits(cfg, network, found))[:, ::-1]
  np.testing.assert_allclose(ours[batch.padding_mask], expected[batch.padding_mask], atol=ATOL)
  plain = writer.logits(Network(cfg, network, "mlm_head"), batch)  # what transformers computes
  assert np.abs(plain - ours)[batch.padding_mask].max() > 100 * ATOL


@pytest.mark.parametrize("head", ["rtd_head", "mlm_head", None])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_come_back_as_they_went(head, dtype, tmp_path):
  network = random_network(CFG, head)
  huggingface.save(tmp_path, CFG, network, head, 0, storage=huggingface.Storage(dtype))
  cfg, found_head, found = huggingface.load(tmp_path)
  assert (cfg, found_head) == (CFG, head)
  assert same(found, writer.rounded(Network(CFG, network, head), dtype).weights)
  assert sources.open_source(tmp_path).left_out == ()


@needs_torch
@pytest.mark.parametrize("legacy", [False, True])
def test_a_masked_lm_of_either_form_of_transformers_is_read(legacy, tmp_path):
  import torch
  from transformers import DebertaV2Config, DebertaV2ForMaskedLM

  torch.manual_seed(0)
  content = {**deberta_release.CONFIG, "vocab_size": 50}
  network = DebertaV2ForMaskedLM(DebertaV2Config(**content, legacy=legacy)).eval()
  with torch.no_grad():
    for weight in network.parameters():
      weight.add_(0.05 * torch.randn_like(weight))
  network.save_pretrained(tmp_path)
  cfg, head, weights = huggingface.load(tmp_path)
  batch = a_batch((20, 9))
  ours = writer.logits(Network(cfg, weights, head), batch)
  theirs = huggingface.torch_outputs(tmp_path, head, batch)
  np.testing.assert_allclose(ours[batch.padding_mask], theirs[batch.padding_mask], atol=ATOL)


# A release.


@pytest.fixture(scope="module")
def release(tmp_path_factory):
  return deberta_release.write(tmp_path_factory.mktemp("release") / "xsmall", some_text())


def state_dict(path) -> dict:
  import torch

  return {k: x.float().numpy() for k, x in torch.load(path, weights_only=True).items()}


@needs_torch
def test_a_release_is_read_whole(release):
  source = sources.open_source(release)
  d, g = source.networks["discriminator"], source.networks["generator"]
  assert (d.head, g.head, d.decodes, g.decodes) == ("rtd_head", "mlm_head", False, True)
  assert (d.cfg.num_layers, g.cfg.num_layers) == (4, 2)
  assert dataclasses.replace(g.cfg, num_layers=4) == d.cfg
  size = source.tokenizer.vocab.size
  assert d.cfg.vocab_size == size == source.tokenizer.vocab.mask + 1
  words = "deberta.embeddings.word_embeddings.weight"
  for network, file in ((d, "pytorch_model.bin"), (g, "pytorch_model.generator.bin")):
    tensors = state_dict(release / file)
    assert len(tensors[words]) == size + deberta_release.SPARE
    np.testing.assert_array_equal(network.weights["embeddings"]["word"], tensors[words][:size])
    query = tensors["deberta.encoder.layer.1.attention.self.query_proj.weight"]
    found = network.weights["encoder"]["layers"]["qkv"]["kernel"][1][:, 0]
    np.testing.assert_array_equal(found.reshape(query.shape).T, query)
  assert source.left_out == (
    "xsmall's lm_predictions",
    f"the discriminator's {deberta_release.SPARE} rows of words beyond the vocabulary",
    f"the generator's {deberta_release.SPARE} rows of words beyond the vocabulary",
  )


@needs_torch
def test_continuing_a_release_adds_the_difference_of_the_words(release):
  """GDES: delta = D - G, not `_weight`, which released base and large lack."""
  tokens = tokenizer.load(release / "spm.model")
  params, cfg, _ = initial.read_params(release, tokens, "gdes_tables")
  d, g = (sources.open_source(release).networks[x] for x in ("discriminator", "generator"))
  word, delta = params["embeddings"]["word"], params["discriminator"]["embedding_delta"]["word"]
  np.testing.assert_array_equal(word, g.weights["embeddings"]["word"])
  # G + (D - G) in float32, of numbers with 11 bits: the last bit of the larger one.
  expected = d.weights["embeddings"]["word"]
  np.testing.assert_allclose(word + delta, expected, atol=1e-7)
  assert np.abs(delta).max() > 0.01
  own = params["discriminator"]["embeddings"]["layer_norm"]
  assert same(own, d.weights["embeddings"]["layer_norm"])
  assert same(params["embeddings"]["layer_norm"], g.weights["embeddings"]["layer_norm"])
  assert same(params["generator"]["mask_decoder"], g.weights["mask_decoder"])
  assert cfg == d.cfg


@needs_torch
def test_pairs_are_scored_by_the_mask_decoder(release, tmp_path):
  """As by `electra-jax score`, which takes the generator's own way to a word's probability."""
  for name in ("config.json", "spm.model", "pytorch_model.generator.bin"):
    shutil.copy(release / name, tmp_path)
  (tmp_path / "pytorch_model.generator.bin").rename(tmp_path / "pytorch_model.bin")
  shutil.copy(release / "generator_config.json", tmp_path / "config.json")
  texts = [text[:50] for text in some_text()[:3]]
  expected = [score for score, _ in likelihoods.Scorer(tmp_path)(texts)]
  found = electra_jax.load(tmp_path).score(texts, "mlm")
  np.testing.assert_allclose(found, expected, rtol=1e-5)


@needs_torch
def test_a_generator_without_its_config_has_the_layers_of_its_file(release, tmp_path):
  folder = shutil.copytree(release, tmp_path / "there")
  (folder / "generator_config.json").unlink()
  found, expected = (sources.open_source(x).networks["generator"] for x in (folder, release))
  assert found.cfg == expected.cfg and same(found.weights, expected.weights)


@needs_torch
def test_the_commands_take_a_release_from_text_to_an_export(release, tmp_path):
  """Build, train, fine-tune and export, each as a user starts it."""
  text = tmp_path / "text.txt"
  text.write_text("\n\n".join(some_text()), "utf-8")

  def run(*args):
    done = python("-m", "electra_jax", *args, env={"JAX_NUM_CPU_DEVICES": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout

  data, run_folder = f"--config.data.dir={tmp_path / 'shards'}", tmp_path / "run"
  base = ("--config=configs/base.py", f"--config.init_from={release}", data)
  run("build", *base, f"--config.data.sources=text:{text}", "--config.data.seq_length=32")
  few = ("train.steps=2", "train.batch_size=4", "data.seq_length=32")
  said = run("train", *base, f"--workdir={run_folder}", *(f"--config.{x}" for x in few))
  assert "newly initialised" not in said and "generator/mask_decoder" in said
  saved = json.loads((run_folder / "config.json").read_text())["generator"]
  assert (saved["kind"], saved["tie"]) == ("enhanced_mask_decoder", "gdes_tables")
  said = run("export", f"--model={run_folder}", "--to=hf", f"--out={tmp_path / 'out'}")
  assert "generator: transformers does not compute its mask decoder" in said
  again = sources.open_source(tmp_path / "out").networks
  of_run = sources.open_source(run_folder).networks
  assert all(same(again[x].weights, of_run[x].weights) for x in ("discriminator", "generator"))


# The tokenizer.


def test_ids_are_those_of_sentencepiece_with_mask_after_its_pieces(tmp_path):
  from sentencepiece import SentencePieceProcessor
  from tokenizers import Tokenizer

  path = tmp_path / "spm.model"
  pieces = deberta_release.write_spm(path, some_text())
  tokens, model = tokenizer.load(path), SentencePieceProcessor(model_file=str(path))
  assert (tokens.vocab.mask, tokens.vocab.size) == (pieces, pieces + 1)
  assert tokens.vocab.special_ids == (0, 1, 2, pieces) and tokens.vocab.unk == 3
  texts = [*ODD, "日本語テキスト", "naïve café", "ﬁne ＡＢＣ", "👍🏽", "a\x00b", "the [MASK] cab"]
  found = tokens.encode_batch(texts)
  for text, ids in zip(texts, found, strict=True):
    assert ids == model.encode(text) and tokens.vocab.unk not in ids, ascii(text)
  folder = tmp_path / "folder"
  folder.mkdir()
  assert huggingface.save_tokenizer(folder, tokens, 64)
  engine = Tokenizer.from_file(str(folder / "tokenizer.json"))
  for text, ids in zip(texts[:-1], found, strict=False):
    assert engine.encode(text, add_special_tokens=False).ids == ids, ascii(text)
  assert engine.encode("a [MASK] b").ids.count(pieces) == 1
  assert tokenizer.load(folder / "spm.model").vocab == tokens.vocab
  ids = found[texts.index("日本語テキスト")]
  assert tokens.decode(ids) == engine.decode(ids) == "日本語テキスト"
  assert tokens.decode([1, *ids, pieces, 2]) == "[CLS] 日本語テキスト [MASK] [SEP]"


# What is refused, with one line each.


def change(folder, **fields):
  content = json.loads((folder / "config.json").read_text()) | fields
  (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"conv_kernel_size": 3}, "conv_kernel_size must be 0, got 3: of DeBERTa's networks, only V3"),
    ({"share_att_key": False}, "share_att_key must be True, got False: of"),
    ({"norm_rel_ebd": "none"}, "norm_rel_ebd must be 'layer_norm', got 'none'"),
    ({"position_biased_input": True}, "position_biased_input must be False"),
    ({"pos_att_type": "c2p"}, "pos_att_type must be .'c2p', 'p2c'., got .'c2p'."),
    ({"pos_att_type": ["c2p", "p2c", "p2p"]}, "pos_att_type must be"),
    ({"hidden_act": "relu"}, "hidden_act must be 'gelu'"),
    ({"embedding_size": 8}, "embedding_size must be 16, got 8"),
    ({"max_relative_positions": 100}, "max_relative_positions must be -1, got 100"),
    ({"position_buckets": -1}, "position_buckets must be above 0"),
    ({"hidden_size": None}, "hidden_size"),
  ],
)
def test_other_networks_of_the_same_model_type_are_refused(fields, message, tmp_path):
  huggingface.save(tmp_path, CFG, random_network(CFG, None), None, 0)
  change(tmp_path, **fields)
  with pytest.raises(ExchangeError, match=message) as error:
    huggingface.load(tmp_path)
  assert "config.json" in str(error.value) and "\n" not in str(error.value)


def test_what_the_class_cannot_hold_is_refused_by_name(tmp_path):
  for fields, message in (
    ({"embedding_size": 8}, "DeBERTaV3 does not support embedding_size=8 at hidden_size=16"),
    ({"ffn_dropout": 0.2}, "does not support ffn_dropout=0.2"),
    ({"head_first_token": False}, "does not support head_first_token=False"),
  ):
    cfg = dataclasses.replace(CFG, **fields)
    with pytest.raises(ExchangeError, match=message):
      huggingface.config_json(cfg, "rtd_head", 0)
  learned = TransformerConfig(50, 16, 16, 2, 2, 24, 12)
  with pytest.raises(ExchangeError, match="Hugging Face's ELECTRA has no enhanced mask decoder"):
    huggingface.check_form(learned, "mlm_head", decodes=True)


def test_weights_beyond_float16_are_refused(tmp_path):
  network = random_network(CFG, None)
  network["encoder"]["distances"]["table"][3, 4] = 7e4
  float16 = huggingface.Storage("float16")
  with pytest.raises(ExchangeError, match=r"rel_embeddings.weight has 7e\+04, beyond float16: use"):
    huggingface.save(tmp_path, CFG, network, None, 0, storage=float16)
  huggingface.save(tmp_path, CFG, network, None, 0)
  path = tmp_path / "model.safetensors"
  with np.errstate(over="ignore"):
    save_file({k: x.astype(np.float16) for k, x in load_file(path).items()}, path)
  with pytest.raises(ExchangeError, match="rel_embeddings.weight has infinities or NaN, as of"):
    huggingface.load(tmp_path)


@needs_torch
def test_files_that_do_not_belong_together_are_refused(release, tmp_path):
  sizes = {"hidden_size": 64, "pooler_hidden_size": 64, "num_attention_heads": 1}
  wide = deberta_release.write(tmp_path / "base", some_text(), **sizes, intermediate_size=256)
  mixed = shutil.copytree(release, tmp_path / "mixed")
  for name in ("pytorch_model.generator.bin", "generator_config.json"):
    shutil.copyfile(wide / name, mixed / name)
  with pytest.raises(ExchangeError, match="has width 64, the discriminator 128: they are of"):
    sources.open_source(mixed)
  bare = shutil.copytree(release, tmp_path / "bare")
  (bare / "spm.model").unlink()
  assert sources.open_source(bare).tokenizer is None
  lower = shutil.copytree(release, tmp_path / "lower")
  (lower / "tokenizer_config.json").write_text('{"do_lower_case": true}')
  with pytest.raises(ExchangeError, match="do_lower_case=true"):
    sources.open_source(lower)


@needs_torch
def test_a_frozen_generator_needs_the_kind_that_its_file_has(release):
  tokens = tokenizer.load(release / "spm.model")
  found = initial.masked_language_model(release, tokens, "frozen_mask_decoder")
  assert found.decodes
  with pytest.raises(ExchangeError, match="set generator.kind=frozen_mask_decoder, not frozen,"):
    initial.masked_language_model(release, tokens, "frozen")


@needs_torch
def test_an_export_says_what_transformers_lacks(release, tmp_path, capsys):
  writer.export_hf(sources.open_source(release), tmp_path / "out", Console(width=200))
  said = capsys.readouterr().out
  assert "discriminator: transformers does not compute its rtd_head, which is in the file" in said
  assert "generator: transformers does not compute its mask decoder: other words for [MASK]" in said
  assert sorted(x.name for x in (tmp_path / "out").iterdir()) == ["discriminator", "generator"]
