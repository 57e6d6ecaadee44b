"""Networks of ModernBERT's shape, to and from transformers, whose logits are ours."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from rich.console import Console
from test_hf import needs_torch

import electra_jax
from electra_jax.config import files
from electra_jax.core.batch import Batch
from electra_jax.core.encoder import Encoder
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.export import writer
from electra_jax.interop import huggingface, modernbert, sources
from electra_jax.interop.sources import Network
from electra_jax.interop.weights import ExchangeError, network_shapes
from electra_jax.pretrain import train

CFG = TransformerConfig(
  *(40, 16, 16, 5, 2, 24, 64),
  **{**modernbert.LAYERS, "layer_norm_eps": 1e-5, "global_every": 3, "window": 8},
  **{"scaled_init": True, "rope_theta": 500.0, "local_rope_theta": 50.0},
  **{"embedding_dropout": 0.0, "ffn_dropout": 0.0},
)
BERT = TransformerConfig(40, 8, 16, 2, 2, 24, 12)
SHAPES = {
  "windows": CFG,
  "windows in blocks": dataclasses.replace(CFG, window=6),
  "no windows": dataclasses.replace(CFG, global_every=1),
  "every second": dataclasses.replace(CFG, global_every=2, num_layers=4),
  "one head": dataclasses.replace(CFG, num_heads=1, ffn_size=40),
}
HEADS = ["rtd_head", "mlm_head", None]
YARN = {kind: {"rope_type": "yarn"} for kind in (modernbert.LOCAL, modernbert.GLOBAL)}


def random_network(cfg, head, seed=0) -> dict:
  """Returns a network; the first layer has no norm, which is 1 here."""
  rng = np.random.default_rng(seed)
  shapes = network_shapes(cfg, head)
  network = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)
  network["encoder"]["layers"]["attention_norm"]["scale"][0] = 1
  return network


def a_batch(length=24) -> Batch:
  rng = np.random.default_rng(1)
  mask = np.arange(length) < np.array([length, 15, 6])[:, None]
  ids = np.where(mask, rng.integers(5, 40, (3, length)), 0).astype(np.int32)
  return Batch(ids, np.zeros_like(ids), mask, np.arange(3, dtype=np.int32))


@pytest.mark.parametrize("unroll", [8, 1])
def test_no_layer_chooses_its_kind_of_attention_when_it_runs(unroll):
  cfg = dataclasses.replace(CFG, num_layers=8, window=6).computed(unroll=unroll)  # in blocks
  network = random_network(cfg, None)
  mask = a_batch().padding_mask

  def loss(weights, x):
    return Encoder(cfg).apply({"params": weights}, x, mask, None).sum()

  x = np.ones((*mask.shape, cfg.hidden_size), np.float32)
  text = jax.jit(jax.grad(loss)).lower(network["encoder"], x).compile().as_text()
  assert (" while(" in text) == (unroll == 1)
  assert " conditional(" not in text


def test_a_generator_that_modernbert_cannot_hold_is_reported_as_left_out(tmp_path, capsys):
  narrow = dataclasses.replace(CFG, hidden_size=8, num_heads=1)
  networks = {
    "discriminator": Network(CFG, random_network(CFG, "rtd_head"), "rtd_head"),
    "generator": Network(narrow, random_network(narrow, "mlm_head"), "mlm_head"),
  }
  source = sources.Source(networks, None, {})
  writer.export_hf(source, tmp_path / "out", Console(width=200))
  assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["detector", "discriminator"]
  output = capsys.readouterr().out
  assert "not exported: the generator: Hugging Face's ModernBERT does not support embed" in output
  del networks["discriminator"]
  with pytest.raises(ExchangeError, match="does not support embedding_size=16 at hidden_size=8"):
    writer.export_hf(sources.Source(networks, None, {}), tmp_path / "none", Console(quiet=True))


@pytest.mark.parametrize("head", HEADS)
def test_weights_come_back_as_they_went(tmp_path, head):
  network = random_network(CFG, head)
  huggingface.save(tmp_path, CFG, network, head, 0)
  cfg, found_head, found = huggingface.load(tmp_path)
  assert (cfg, found_head) == (CFG, head)
  assert sources.open_source(tmp_path).left_out == ()
  assert jax.tree.all(jax.tree.map(np.array_equal, found, network))


@pytest.mark.parametrize(
  ("of", "changes"),
  [
    (CFG, {"embedding_dropout": None, "ffn_dropout": None}),  # as `dropout`, whatever it becomes
    (CFG, {"dropout": 0.0, "ffn_dropout": None, "scaled_init": False}),
    (BERT, {"scaled_init": True}),
    (BERT, {"embedding_dropout": 0.1, "ffn_dropout": 0.1}),  # `dropout`, its class's only rate
  ],
)
def test_fields_that_no_class_of_transformers_has_come_back(tmp_path, of, changes):
  cfg = dataclasses.replace(of, **changes)
  network = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), network_shapes(cfg, None))
  huggingface.save(tmp_path, cfg, network, None, 0)
  assert huggingface.read_config(tmp_path)[1] == cfg
  content = json.loads((tmp_path / "config.json").read_text())
  rates = {content.get(name, 0.1) for name in ("embedding_dropout", "mlp_dropout")}
  assert rates <= {0.0, 0.1}  # numbers, for transformers


def assert_logits(network: Network, batch: Batch, theirs) -> None:
  with jax.default_matmul_precision("highest"):
    ours = writer.logits(network, batch)
  # Rounding of float32: five layers of about 20 operations, values up to 10, eps 6e-8.
  np.testing.assert_allclose(ours[batch.padding_mask], theirs[batch.padding_mask], atol=1e-5)


@needs_torch
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_transformers(tmp_path, name, head):
  """With padding, and with windows shorter than the text."""
  cfg, batch = SHAPES[name], a_batch()
  network = random_network(cfg, head)
  huggingface.save(tmp_path, cfg, network, head, 0)
  theirs = huggingface.torch_outputs(tmp_path, head, batch)
  assert_logits(Network(cfg, network, head), batch, theirs)


@needs_torch
@pytest.mark.parametrize("name", ["windows", "windows in blocks", "no windows"])
def test_packed_rows_are_those_of_transformers_with_masks_of_four_dimensions(tmp_path, name):
  import torch
  import transformers

  cfg = SHAPES[name]
  network = random_network(cfg, "rtd_head")
  huggingface.save(tmp_path, cfg, network, "rtd_head", 0)
  batch = a_batch()
  documents = np.where(batch.padding_mask, 1 + (np.arange(24) > 4) + (np.arange(24) > 13), 0)
  batch = batch._replace(document_ids=documents.astype(np.int32))
  at = np.arange(24)
  within = documents[:, :, None] == documents[:, None, :]
  near = np.abs(at[:, None] - at) <= cfg.window // 2
  masks = {"full_attention": within, "sliding_attention": within & near}
  position = at - np.where(at > 13, 14, np.where(at > 4, 5, 0))
  model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
  with torch.no_grad():
    theirs = model(
      input_ids=torch.tensor(batch.ids).long(),
      attention_mask={k: torch.tensor(v)[:, None] for k, v in masks.items()},
      position_ids=torch.tensor(position)[None].expand(3, -1),
    ).logits[..., 1]
  assert_logits(Network(cfg, network, "rtd_head"), batch, theirs)


@needs_torch
@pytest.mark.parametrize("head", HEADS[:2])
def test_every_class_loads_without_a_missing_or_unknown_tensor(tmp_path, head):
  import transformers

  huggingface.save(tmp_path, CFG, random_network(CFG, head), head, 0)
  auto = {"rtd_head": "AutoModelForTokenClassification", "mlm_head": "AutoModelForMaskedLM"}[head]
  for name in (auto, "AutoModel"):
    _, report = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"], (name, report)
    if name == auto:
      assert not report["unexpected_keys"], report


@needs_torch
def test_a_folder_of_transformers_is_read(tmp_path):
  """As a released ModernBERT is: with its own initial weights and spelling of fields."""
  import torch
  import transformers

  torch.manual_seed(0)
  config = transformers.ModernBertConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
    num_attention_heads=2, max_position_embeddings=64, local_attention=8, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
  )  # fmt: skip
  transformers.ModernBertForMaskedLM(config).save_pretrained(tmp_path)
  source = sources.open_source(tmp_path)
  network = source.networks["generator"]
  assert (network.head, network.cfg.global_every, network.cfg.window) == ("mlm_head", 3, 8)
  assert (network.cfg.rope_theta, network.cfg.local_rope_theta) == (160_000.0, 10_000.0)
  batch = a_batch()
  assert_logits(network, batch, huggingface.torch_outputs(tmp_path, "mlm_head", batch))


def test_old_and_new_spellings_of_a_config_are_one(tmp_path):
  huggingface.save(tmp_path, CFG, random_network(CFG, None), None, 0)
  path = tmp_path / "config.json"
  content = json.loads(path.read_text())
  old = {k: v for k, v in content.items() if k not in ("layer_types", "rope_parameters")}
  new = {k: v for k, v in content.items() if "theta" not in k and not k.startswith("global")}
  for written in (old, new):
    path.write_text(json.dumps(written))
    assert huggingface.read_config(tmp_path)[1] == CFG
  path.write_text(json.dumps({**old, "local_rope_theta": None}))  # as of all layers
  read = huggingface.read_config(tmp_path)[1]
  assert read.local_rope_theta == read.rope_theta == CFG.rope_theta


def test_a_norm_that_only_the_detection_head_has_does_not_matter_without_it(tmp_path):
  cfg = dataclasses.replace(CFG, head_norm=not CFG.head_norm)
  for head in (None, "mlm_head"):
    assert huggingface.config_json(cfg, head, 0) == huggingface.config_json(CFG, head, 0)
  with pytest.raises(ExchangeError, match="does not support head_norm"):
    huggingface.config_json(cfg, "rtd_head", 0)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"norm": "rms_norm"}, "ModernBERT does not support norm='rms_norm'"),
    ({"biases": True, "qk_norm": True}, "does not support biases=True, qk_norm=True"),
    ({"embedding_size": 8}, "embedding_size=8 at hidden_size=16"),
    (
      {"embedding_norm": False, "first_norm": True},
      "support embedding_norm=False, first_norm=True",
    ),
    ({"block": "post_norm", "first_norm": True}, "ELECTRA does not support norm="),
    (vars(BERT) | {"embedding_norm": False}, "ELECTRA does not support embedding_norm=False"),
    (vars(BERT) | {"ffn_dropout": 0.2}, "ELECTRA does not support ffn_dropout=0.2"),
  ],
)
def test_what_it_cannot_express_is_refused(tmp_path, changes, message):
  cfg = dataclasses.replace(CFG, **changes)
  with pytest.raises(ExchangeError, match=message):
    huggingface.save(tmp_path, cfg, random_network(CFG, None), None, 0)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"norm_bias": True}, "norm_bias must be False, got True"),
    (
      {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
      "must have one global",
    ),
    ({"model_type": "eurobert"}, "'eurobert' must be electra or modernbert"),
    (
      {"num_attention_heads": 3},
      "config.json: not a config of .* 3 heads do not divide the hidden size 16",
    ),
    (
      {"num_attention_heads": 0},
      "config.json: not a config of .* num_heads must be above 0, got 0",
    ),
    ({"num_attention_heads": 2.0}, "not a config of .* num_heads is 2.0, not of type int"),
    ({"norm_eps": "1e-5"}, "not a config of .* layer_norm_eps is '1e-5', not of type float"),
    (
      {"norm_eps": None},
      "config.json: not a config of .* layer_norm_eps is None, not of type float",
    ),
    ({"vocab_size": -2}, "config.json: not a config of .* vocab_size must be above 0, got -2"),
    ({"attention_dropout": 5}, "not a config of .*_dropout must be at least 0 and below 1, got 5"),
    ({"rope_parameters": YARN}, "rope_type must be default, got .*yarn"),
  ],
)
def test_other_variants_are_refused_in_a_line(tmp_path, changes, message):
  huggingface.save(tmp_path, CFG, random_network(CFG, None), None, 0)
  path = tmp_path / "config.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
  with pytest.raises(ExchangeError, match=message) as error:
    huggingface.load(tmp_path)
  assert "\n" not in str(error.value)


# A released one goes on by replaced-token detection.


@needs_torch
@pytest.mark.long
def test_a_released_modernbert_goes_on_with_a_fresh_shallow_generator(tmp_path, capsys):
  """With its own tokenizer, a byte-level BPE whose special tokens stand at the end."""
  import tokenizers
  import transformers
  from tokenizers import models, pre_tokenizers, trainers

  words = tokenizers.Tokenizer(models.BPE())
  words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  text = "\n\n".join(
    f"Document {i} of many.\nIt says {i * i} things, {i} twice." for i in range(300)
  )
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
  words.train_from_iterator(text.split("\n"), trainer)
  names = ["unk", "cls", "sep", "pad", "mask"]
  words.add_special_tokens([f"[{name.upper()}]" for name in names] + ["[unused0]"])
  roles = {f"{name}_token": f"[{name.upper()}]" for name in names}
  fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **roles)
  fast.save_pretrained(tmp_path / "released")
  ids = {f"{name}_token_id": words.token_to_id(f"[{name.upper()}]") for name in names[1:4]}
  ids |= {"bos_token_id": ids["cls_token_id"], "eos_token_id": ids["sep_token_id"]}
  sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6}
  shape = {**sizes, "num_attention_heads": 2, "local_attention": 16, **ids}
  config = transformers.ModernBertConfig(vocab_size=len(fast), **shape)
  transformers.ModernBertForMaskedLM(config).save_pretrained(tmp_path / "released")

  (tmp_path / "text.txt").write_text(text)
  c = files.load("modern.py", "17m")
  c.update_from_flattened_dict({
    "model.hidden_size": 32, "model.num_layers": 6, "model.num_heads": 2, "model.ffn_size": 48,
    "model.embedding_size": 32, "model.window": 16, "model.rope_theta": 160_000.0,
    "generator.depth_multiplier": 1 / 3, "data.dir": str(tmp_path / "data"),
    "data.sources": f"text:{tmp_path / 'text.txt'}", "data.seq_length": 32, "data.workers": 1,
    "data.holdout_frac": 0.1,
    "train.batch_size": 8, "train.steps": 1, "optimizer.warmup_steps": 0,
    "optimizer.decay_steps": 0, "optimizer.learning_rate": 1e-30, "eval.max_examples": 8,
    "eval.batch_size": 8, "log.trackers": "", "init_from": str(tmp_path / "released"),
  })  # fmt: skip
  electra_jax.build(c)
  assert train.train(c, tmp_path / "run").step == 1
  output = capsys.readouterr().out
  assert "discriminator/encoder" in output.partition("newly initialised")[0]
  fresh = output.partition("newly initialised: ")[2].partition("\n")[0]
  assert set(fresh.split(", ")) >= {"generator/encoder", "discriminator/rtd_head"}
  assert "warning" not in output
  # After a step of no learning the export's encoder is the released one's, bit for bit.
  writer.export_hf(sources.open_source(tmp_path / "run"), tmp_path / "out", Console(quiet=True))
  ours, theirs = (
    transformers.AutoModel.from_pretrained(folder).state_dict()
    for folder in (tmp_path / "out" / "discriminator", tmp_path / "released")
  )
  assert ours.keys() == theirs.keys()
  assert all(bool((ours[name] == theirs[name]).all()) for name in ours)

  c.model.rope_theta = 20_000.0
  train.train(c, tmp_path / "other")
  assert "warning: model.rope_theta is 20000.0, was 160000.0" in capsys.readouterr().out

  # Frozen, the generator is the whole released network.
  c.model.rope_theta, c.generator.kind, c.generator.tie = 160_000.0, "frozen", "none"
  c.generator.init_from = c.init_from
  train.train(c, tmp_path / "frozen")
  output = capsys.readouterr().out
  assert "frozen generator: the masked language model of" in output
  assert "generator" not in output.partition("newly initialised: ")[2].partition("\n")[0]
  ours = sources.open_source(tmp_path / "frozen").networks["generator"]
  theirs = sources.open_source(tmp_path / "released").networks["generator"]
  assert ours.cfg.num_layers == 6 and ours.head == theirs.head == "mlm_head"
  assert jax.tree.all(jax.tree.map(np.array_equal, ours.weights, theirs.weights))
