"""Exchange: golden logits of transformers, bit-exact round trips, and what is refused."""

import dataclasses
import importlib.util
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import SPECIAL, long_except, make_tiny_config
from rich.console import Console
from safetensors.numpy import save_file

from electra_jax.commands import cli
from electra_jax.core.batch import Batch
from electra_jax.core.objectives import OBJECTIVES
from electra_jax.core.task_network import HeadSpec
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data import pretrain_batches, tokenizer, vocabulary
from electra_jax.export import writer
from electra_jax.interop import huggingface, modernbert, sources
from electra_jax.interop.electra import ELECTRA
from electra_jax.interop.sources import Network
from electra_jax.interop.weights import from_hf, network_shapes, to_hf
from electra_jax.monitor import metrics
from electra_jax.pretrain import train
from electra_jax.runtime import workdir

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/outputs.npz"))
HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed: make test-hf")

SIZES = {
  "equal widths": TransformerConfig(40, 16, 16, 2, 2, 32, 12),
  "projected": TransformerConfig(40, 8, 16, 3, 4, 24, 12),
  "one head": TransformerConfig(40, 8, 24, 1, 1, 96, 12),
  "wider embeddings": TransformerConfig(2011, 24, 8, 2, 2, 32, 20),
}
HEADS = list(ELECTRA.pretraining_heads)
WORDS45 = ["the", "of", "and", "a", "to", "in", "is", "##s", "that", "it", ".", ",", "(", ")"]
WORDS45 += [chr(ord("a") + i) for i in range(1, 26)] + ["##e"]


def random_network(cfg, head, seed=0) -> dict:
  rng = np.random.default_rng(seed)
  shapes = network_shapes(cfg, head)
  return jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)


def same(a, b) -> bool:
  return jax.tree.structure(a) == jax.tree.structure(b) and all(
    jax.tree.leaves(jax.tree.map(np.array_equal, a, b))
  )


def write_vocab(path: Path, size: int = 45) -> tokenizer.Tokenizer:
  path.parent.mkdir(parents=True, exist_ok=True)
  pieces = [*SPECIAL, *WORDS45, *(f"x{i}" for i in range(size))][:size]
  path.write_text("".join(f"{x}\n" for x in pieces), "utf-8")
  return tokenizer.load(path)


def some_batch(cfg, B=4) -> Batch:
  rng = np.random.default_rng(1)
  mask = np.arange(cfg.max_positions) < rng.integers(2, cfg.max_positions + 1, B)[:, None]
  ids = np.where(mask, rng.integers(0, cfg.vocab_size, mask.shape), 0).astype(np.int32)
  segments = (rng.random(mask.shape) < 0.5).astype(np.int32)
  return Batch(ids, segments, mask, np.arange(B, dtype=np.int32))


@pytest.mark.parametrize("name", long_except(0, 1, of=FOLDERS))
def test_networks_of_transformers_say_here_what_they_say_there(name):
  cfg, head, weights = huggingface.load(GOLDEN / name)
  outputs = np.load(GOLDEN / name / "outputs.npz")
  batch = Batch(outputs["ids"].astype(np.int32), outputs["segments"], outputs["mask"], np.arange(3))
  got = writer.logits(Network(cfg, weights, head), batch)
  # Logits of up to 10 in float32, summed in another order: a few units in the last place.
  np.testing.assert_allclose(got[outputs["mask"]], outputs["logits"][outputs["mask"]], atol=2e-5)


@pytest.mark.parametrize("name", FOLDERS)
def test_from_hugging_face_and_back_is_bit_exact(name, tmp_path):
  from safetensors.numpy import load_file

  cfg, head, weights = huggingface.load(GOLDEN / name)
  huggingface.save(tmp_path, cfg, weights, head, 0)
  ours, theirs = (load_file(p / "model.safetensors") for p in (tmp_path, GOLDEN / name))
  assert ours.keys() == theirs.keys()
  assert all(np.array_equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("head", HEADS)
def test_to_hugging_face_and_back_is_bit_exact(size, head, tmp_path):
  cfg, weights = SIZES[size], random_network(SIZES[size], head)
  huggingface.save(tmp_path, cfg, weights, head, 0)
  assert huggingface.load(tmp_path)[:2] == (cfg, head)
  assert same(huggingface.load(tmp_path)[2], weights)


@needs_torch
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("head", HEADS)
def test_transformers_computes_the_same_from_what_is_exported(size, head, tmp_path):
  cfg, weights = SIZES[size], random_network(SIZES[size], head)
  huggingface.save(tmp_path, cfg, weights, head, 0)
  batch = some_batch(cfg)
  ours = writer.logits(Network(cfg, weights, head), batch)
  writer.check_parity(tmp_path, head, batch, ours)
  other = writer.logits(Network(cfg, random_network(cfg, head, seed=1), head), batch)
  with pytest.raises(sources.ExchangeError, match="differ from transformers by"):
    writer.check_parity(tmp_path, head, batch, other)


def test_missing_extra_and_misshapen_tensors_are_named():
  cfg = SIZES["projected"]
  good = to_hf(ELECTRA, cfg, random_network(cfg, "rtd_head"))
  bias = "electra.encoder.layer.2.output.dense.bias"
  for change, wrong in (
    (lambda t: t.pop(bias), f"{bias} is missing"),
    (lambda t: t.update({bias: np.zeros(3)}), rf"{bias} has shape \(3,\), but must have \(16,\)"),
    (lambda t: t.update({"electra.gate": np.zeros(3)}), "unknown tensors: electra.gate"),
    (lambda t: t.update({ELECTRA.tied: np.zeros((40, 8))}), "lm_head.weight must equal the word"),
  ):
    tensors = dict(good)
    change(tensors)
    with pytest.raises(huggingface.ExchangeError, match=wrong):
      from_hf(ELECTRA, cfg, "rtd_head", tensors)
  constants = {name: np.arange(3) for name in ELECTRA.ignored}
  assert same(from_hf(ELECTRA, cfg, "rtd_head", good | constants), random_network(cfg, "rtd_head"))
  for name in ("classifier.out_proj", "qa_outputs", "sequence_summary.summary"):
    tensors = to_hf(ELECTRA, cfg, random_network(cfg, None)) | {f"{name}.weight": np.zeros((2, 3))}
    assert same(from_hf(ELECTRA, cfg, None, tensors), random_network(cfg, None))


def change_config(folder: Path, **fields) -> None:
  """Writes other fields into a folder's config.json."""
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


DAMAGES = {
  "is damaged": lambda folder: os.truncate(folder / "model.safetensors", 1000),
  "model.safetensors is missing": lambda folder: (folder / "model.safetensors").unlink(),
  "not a config of electra": lambda folder: (folder / "config.json").write_text("{"),
  "'bert' must be electra": lambda folder: change_config(folder, model_type="bert"),
  "hidden_act must be 'gelu', got 'relu'": lambda folder: change_config(folder, hidden_act="relu"),
  "is_decoder must be False, got True": lambda folder: change_config(folder, is_decoder=True),
  "cross_attention must be False, got True": lambda folder: change_config(
    folder, add_cross_attention=True
  ),
}


@pytest.mark.parametrize("why", DAMAGES)
def test_a_folder_that_is_damaged_or_another_model_is_refused(why, tmp_path):
  folder = shutil.copytree(GOLDEN / "discriminator", tmp_path / "model")
  DAMAGES[why](folder)
  with pytest.raises(huggingface.ExchangeError, match=why):
    sources.open_source(folder)


def test_two_labels_are_no_reason_to_refuse_a_discriminator(tmp_path):
  cfg = SIZES["projected"]
  huggingface.save(tmp_path, cfg, random_network(cfg, "rtd_head"), "rtd_head", 0)
  # The default, which some versions write.
  change_config(tmp_path, id2label={"0": "LABEL_0", "1": "LABEL_1"})
  assert huggingface.load(tmp_path)[1] == "rtd_head"


def test_a_tokenizer_json_comes_back_with_its_own_bytes(tmp_path):
  cfg = dataclasses.replace(SIZES["projected"], vocab_size=45)
  write_vocab(tmp_path / "vocab.txt")._engine.save(str(tmp_path / "tokenizer.json"))
  own = tokenizer.load(tmp_path / "tokenizer.json")
  network = Network(cfg, random_network(cfg, "rtd_head"), "rtd_head")
  source = sources.Source({"discriminator": network}, own, {})
  writer.export_hf(source, tmp_path / "out", Console(quiet=True))
  assert sources.open_source(tmp_path / "out").tokenizer.vocab == own.vocab
  head = {"classifier.dense.kernel": np.zeros(3, np.float32)}
  folder = tmp_path / "out" / "discriminator"
  change_config(folder, architectures=["Other"])
  save_file(to_hf(ELECTRA, cfg, random_network(cfg, None)) | head, folder / "model.safetensors")
  left_out = sources.open_source(tmp_path / "out").left_out
  assert left_out == ("discriminator's classifier.dense.kernel",)


@pytest.mark.parametrize("strip_accents", [True, False])
@pytest.mark.parametrize("lowercase", [True, False])
def test_an_export_keeps_its_vocabularys_rule_for_accents(tmp_path, lowercase, strip_accents):
  from tokenizers import BertWordPieceTokenizer, Tokenizer

  texts = ["अच्छा है।", "Tiếng Việt", "今天很好。", "CAFÉ cafe\u0301"]
  path = tmp_path / "vocab.txt"
  vocabulary.train("wordpiece", texts, size=200, path=path, lowercase=False)
  own = tokenizer.load(path, lowercase, strip_accents)
  cfg = dataclasses.replace(SIZES["projected"], vocab_size=own.vocab.size)
  source = sources.Source({"discriminator": Network(cfg, random_network(cfg, None), None)}, own, {})
  writer.export_hf(source, tmp_path / "hf", Console(quiet=True))
  with workdir.new_folder(tmp_path / "orbax") as folder:
    sources.save_orbax(folder, source)
  folder = next((tmp_path / "hf").rglob("tokenizer.json")).parent
  theirs = [
    Tokenizer.from_file(str(folder / "tokenizer.json")),
    BertWordPieceTokenizer(str(path), lowercase=lowercase, strip_accents=strip_accents),
  ]
  again = [sources.open_source(tmp_path / form).tokenizer for form in ("hf", "orbax")]
  assert [x.vocab for x in again] == [own.vocab] * 2
  for text, ids in zip(texts, own.encode_batch(texts), strict=True):
    assert all(x.encode(text, add_special_tokens=False).ids == ids for x in theirs)
    assert all(x.encode_batch([text]) == [ids] for x in again)
  written = json.loads((folder / "tokenizer_config.json").read_text())
  # BERT's rule is not spelled out: exports of before have the same bytes.
  assert written.get("strip_accents", lowercase) == strip_accents
  assert ("strip_accents" in written) == (lowercase != strip_accents)


@needs_torch
@pytest.mark.parametrize("kind", vocabulary.KINDS)
def test_auto_tokenizer_reads_both_forms_of_text_also_after_saving_it_again(tmp_path, kind):
  import unicodedata

  from transformers import AutoTokenizer

  texts = ["Tiếng Việt có dấu.", "Bạn có khỏe không?", "ç ü ñ ệ"] * 9
  size = {"wordpiece": 120, "unigram": 33, "bpe": 60}[kind]
  path = tmp_path / ("own.txt" if kind == "wordpiece" else "own.model")
  own = vocabulary.train(kind, texts, size=size, path=path)
  assert huggingface.save_tokenizer(tmp_path, own, 64)
  (tmp_path / "config.json").write_text('{"model_type": "electra"}')
  AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
  (tmp_path / "again" / "config.json").write_text('{"model_type": "electra"}')
  for theirs in map(AutoTokenizer.from_pretrained, (tmp_path, tmp_path / "again")):
    for text in texts[:3]:
      expected = [own.vocab.cls, *own.encode_batch([text])[0], own.vocab.sep]
      for form in ("NFC", "NFD"):
        assert theirs(unicodedata.normalize(form, text))["input_ids"] == expected


KINDS = ["embeddings", "gdes", "none", "electra_mlm"]


@pytest.fixture(scope="module", params=long_except(0, of=KINDS))
def run(request, tiny_shards, tmp_path_factory):
  """The workdir of a short run of each kind of tying, or of an objective of two heads."""
  config = make_tiny_config(tiny_shards)
  config.train.steps = 2
  if request.param in OBJECTIVES:
    config.objective.name = request.param
  else:
    config.generator.tie = request.param
  workdir = tmp_path_factory.mktemp(request.param)
  train.train(config, workdir)
  return workdir


def export(*args) -> None:
  cli.call("export", [*map(str, args)])


def test_a_runs_exports_are_the_run(run, tmp_path, capsys):
  export(run, tmp_path / "hf", "--to", "hf")
  export(run, tmp_path / "orbax", "--to", "orbax")
  export(tmp_path / "orbax", tmp_path / "again", "--to", "hf")
  direct, there, through = map(sources.open_source, (run, tmp_path / "hf", tmp_path / "orbax"))
  assert there.networks.keys() == direct.networks.keys()
  for role, network in direct.networks.items():
    got = there.networks[role]
    assert same(got.weights, dict(network.weights)) and got.head == network.head
    config = json.loads((tmp_path / "hf" / role / "config.json").read_text())
    assert config["hidden_size"] == network.cfg.hidden_size
    assert config["num_attention_heads"] == network.cfg.num_heads
  assert same(through.networks["discriminator"].weights, there.networks["discriminator"].weights)
  a, b = (tmp_path / x / "discriminator" / "model.safetensors" for x in ("hf", "again"))
  assert a.read_bytes() == b.read_bytes()
  card = (tmp_path / "hf" / "discriminator" / "README.md").read_text()
  assert "2 steps of 8 sequences of 16 tokens" in card and "| rtd_loss | " in card
  assert "\nlicense: unknown\n" in card and "- this run: 256 tokens, " in card
  compared = "logits within " if HAS_TORCH else "not compared with transformers"
  assert compared in capsys.readouterr().out

  before = (tmp_path / "orbax" / sources.EXPORT_FILE).read_bytes()
  with pytest.raises(huggingface.ExchangeError, match="exists: choose another name"):
    export(run, tmp_path / "orbax", "--to", "hf")
  assert (tmp_path / "orbax" / sources.EXPORT_FILE).read_bytes() == before
  assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "hf", "orbax"]


@needs_torch
def test_auto_classes_load_a_run_and_make_its_ids(run, tmp_path):
  from transformers import AutoModel, AutoTokenizer

  export(run, tmp_path / "hf", "--to", "hf")
  source = sources.open_source(run)
  for role in source.networks:
    network = AutoModel.from_pretrained(tmp_path / "hf" / role)
    assert network.config.hidden_size == source.networks[role].cfg.hidden_size
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf" / role)
    for text in ("abc def. gh?", "héllo", "", "a" * 200):
      vocab = source.tokenizer.vocab
      expected = [vocab.cls, *source.tokenizer.encode_batch([text])[0], vocab.sep]
      assert theirs(text)["input_ids"] == expected
    pair = theirs("ab", "cd")
    assert pair["token_type_ids"][-1] == 1 and pair["token_type_ids"][0] == 0


@pytest.mark.parametrize("to", long_except(0, of=["hf", "orbax"]))
def test_training_starts_from_an_export(run, to, tiny_shards, tmp_path, capsys):
  export(run, tmp_path / "export", "--to", to)
  config = make_tiny_config(tiny_shards)
  config.init_from, config.train.steps = str(tmp_path / "export"), 2
  if run.name.startswith("electra_mlm"):
    config.objective.name = "electra_mlm"
  train.train(config, tmp_path / "new")
  new = [line for line in capsys.readouterr().out.splitlines() if "newly initialised: " in line]
  named = [("generator/encoder" in line, "discriminator" in line) for line in new]
  assert named == ([(True, False)] if to == "orbax" else [])
  first = metrics.read_history(tmp_path / "new" / "metrics.jsonl")[0]
  last = metrics.read_history(run / "metrics.jsonl")[-1]
  if to == "hf":  # the same networks, to the bit
    assert {**first, "step": 0} == {**last, "step": 0}
  assert pretrain_batches.Shards.open(tiny_shards).vocab == sources.open_source(run).tokenizer.vocab


TEXT = {"name": "x", "title": "x", "text": "a", "label": "b"}
QA = {"beam_size": 4, "joint": True, "answerable_weight": 0.5, "hidden": 8, "max_answer_length": 5}
SPANS = {**QA, "joint": False, "answerable_weight": 0.0}
TEXTS = {"classification": TEXT | {"labels": ["no", "yes"]}, "regression": TEXT | {"labels": None}}
OPTIONS = {"tagging": {"outputs": 3}, "classification": {"outputs": 2}, "qa": SPANS, "joint qa": QA}
# kind, layers; the class of Hugging Face that it goes out as
TASK_HEADS = {
  "tagging": ("tagging", None, "ElectraForTokenClassification"),
  "classes": ("classification", "two_layers", "ElectraForSequenceClassification"),
  "number": ("regression", "two_layers", "ElectraForSequenceClassification"),
  "spans": ("qa", None, "ElectraForQuestionAnswering"),
  "the paper's classifier": ("classification", "linear", "ElectraModel"),
  "the paper's answers": ("joint qa", None, "ElectraModel"),
  "modern tagging": ("tagging", "modernbert", "ModernBertForTokenClassification"),
  "modern classes": ("classification", "modernbert", "ModernBertForSequenceClassification"),
  "modern mean": ("classification", "modernbert_mean", "ModernBertForSequenceClassification"),
  "modern number": ("regression", "modernbert", "ModernBertForSequenceClassification"),
  "modern spans": ("qa", "modernbert", "ModernBertForQuestionAnswering"),
  "ELECTRA's tagging of modern blocks": ("tagging", None, "ModernBertModel"),
  "modern layers on ELECTRA": ("classification", "modernbert", "ElectraModel"),
}
BLOCKS = {"Electra": {}, "ModernBert": {**modernbert.LAYERS, "embedding_size": 16}}


def finetuned_as(cfg, kind: str, arguments: dict, text: dict | None) -> sources.Finetuned:
  """Returns a head of random weights and what is saved of its task, whose texts are `text`."""
  facts = {
    "kind": "text" if text else kind, "name": "x", "head": {"kind": kind, "arguments": arguments},
    "max_length": 12, "labels": ["B-A", "I-A", "O"] if kind == "tagging" else [], "text": text,
    "options": {},
  }  # fmt: skip
  head = HeadSpec(kind, arguments).make().init(cfg, jax.random.key(3))
  return sources.Finetuned(facts, jax.tree.map(lambda x: np.asarray(x) + 0.1, head))


@pytest.mark.parametrize("name", long_except(0, 1, 2, 3, 5, 6, of=TASK_HEADS))
def test_a_fine_tuned_network_goes_out_with_its_head_if_it_has_one(name, tmp_path, capsys):
  kind, layers, theirs = TASK_HEADS[name]
  arguments = OPTIONS.get(kind, {}) | ({"layers": layers} if layers else {})
  kind = kind.removeprefix("joint ")
  (blocks,) = (blocks for family, blocks in BLOCKS.items() if theirs.startswith(family))
  cfg = dataclasses.replace(SIZES["projected"], vocab_size=45, **blocks)
  network = random_network(cfg, None)
  if blocks:  # the first layer has no norm, which is 1 here
    network["encoder"]["layers"]["attention_norm"]["scale"][0] = 1
  networks = {"discriminator": Network(cfg, network, None)}
  finetuned = finetuned_as(cfg, kind, arguments, TEXTS.get(kind))
  words = write_vocab(tmp_path / "vocab.txt")
  source = sources.Source(networks, words, {}, finetuned=finetuned)
  (tmp_path / "model").mkdir()
  sources.save_orbax(tmp_path / "model", source)
  export(tmp_path / "model", tmp_path / "out", "--to", "hf")
  printed = capsys.readouterr().out
  config = json.loads((tmp_path / "out" / "discriminator" / "config.json").read_text())
  assert config["architectures"] == [theirs]
  assert ("exported only the encoder: Hugging Face has no head" in printed) == theirs.endswith(
    "Model"
  )
  assert ("logits within " in printed) == HAS_TORCH
  assert ("on real text of 12 tokens" in printed) == HAS_TORCH
  back = sources.open_source(tmp_path / "out").networks["discriminator"]
  assert same(back.weights, network)


def test_fields_that_the_network_does_not_read_do_not_prevent_an_export():
  def content(**changes):
    return huggingface.config_json(dataclasses.replace(SIZES["projected"], **changes), None, 0)

  assert content(window=64, rope_theta=5.0, local_rope_theta=6.0) == content()
  for read in ({"window": 64, "global_every": 2}, {"rope_theta": 5.0, "positions": "rope"}):
    with pytest.raises(huggingface.ExchangeError, match="does not support"):
      content(**read)


def test_a_network_that_electra_cannot_express_is_refused_not_written_as_one(tmp_path):
  cfg = dataclasses.replace(SIZES["projected"], direction="ltr")
  with pytest.raises(huggingface.ExchangeError, match="does not support direction='ltr'"):
    huggingface.save(tmp_path, cfg, random_network(cfg, None), None, 0)
  assert not list(tmp_path.iterdir())
