"""What users of transformers call on an exported folder, and what they get."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import test_hf
import test_modernbert
from rich.console import Console
from safetensors.numpy import load_file
from test_hf import needs_torch, write_vocab

import electra_jax
from electra_jax.commands import cli
from electra_jax.core.task_network import HeadSpec
from electra_jax.export import writer
from electra_jax.finetune.task_data import TaskInfo
from electra_jax.interop import huggingface
from electra_jax.interop.sources import ExchangeError, Finetuned, Network, Source, save_orbax

pytestmark = needs_torch
TEXTS = ["the cat is in a bed", "a b c", "that is it, the end"]
MASKED = "the [MASK] is in a bed"
PREFIX = {"Electra": "electra.", "ModernBert": "model."}  # of the encoder's tensors


def electra_network(cfg, head, seed) -> dict:
  """Returns a network whose norms have scales near 1, not 0, so that its logits differ."""
  network = test_hf.random_network(cfg, head, seed)
  scaled = lambda at, x: x + 1 if at[-1].key == "scale" else x  # noqa: E731
  return jax.tree_util.tree_map_with_path(scaled, network)


NETWORKS = {
  "Electra": (test_hf.SIZES["projected"], electra_network),
  "ModernBert": (test_modernbert.CFG, test_modernbert.random_network),
}
AUTO = {
  "two classes": ("SequenceClassification", {"num_labels": 2}),
  "a number": ("SequenceClassification", {"num_labels": 1}),
  "tags": ("TokenClassification", {"num_labels": 9}),
  "answers": ("QuestionAnswering", {}),
  "choices": ("MultipleChoice", {}),
}


@pytest.fixture(scope="module", params=PREFIX)
def family(request):
  return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
  """An export of a discriminator and a generator."""
  import torch

  torch.set_num_threads(1)  # beside other programs ten steps take 17 s with two threads, else 1
  folder, (cfg, make) = tmp_path_factory.mktemp("calls"), NETWORKS[family]
  cfg = dataclasses.replace(cfg, vocab_size=45)
  heads = {"discriminator": "rtd_head", "generator": "mlm_head"}
  networks = {
    r: Network(cfg, make(cfg, head, seed=i), head) for i, (r, head) in enumerate(heads.items())
  }
  source = Source(networks, write_vocab(folder / "vocab.txt"), {})
  writer.export_hf(source, folder / "out", Console(quiet=True))
  return folder / "out"


@pytest.fixture(scope="module")
def encoder(folder):
  return electra_jax.load(folder)


@pytest.fixture(scope="module")
def exported(folder) -> dict[str, dict]:
  """The tensors of each folder."""
  return {path.parent.name: load_file(path) for path in folder.glob("*/model.safetensors")}


def numpy_of(module) -> dict[str, np.ndarray]:
  return {name: x.detach().numpy() for name, x in module.state_dict().items()}


def assert_on_the_encoder(model, exported, family) -> None:
  """Its encoder is the exported one, and nothing else in it is exported."""
  prefix, found = PREFIX[family], numpy_of(model)
  theirs = {k: x for k, x in exported["discriminator"].items() if k.startswith(prefix)}
  for name, x in theirs.items():
    np.testing.assert_array_equal(found[name], x, err_msg=name)
  head = {name: x for name, x in found.items() if not name.startswith(prefix)}
  assert head and theirs.keys() == {name for name in found if name.startswith(prefix)}
  known = [x for tensors in exported.values() for x in tensors.values()]
  assert not [k for k, x in head.items() if any(np.array_equal(x, y) for y in known)]


@pytest.mark.parametrize("call", AUTO)
def test_an_auto_class_starts_a_new_head_on_the_encoder(call, family, folder, exported):
  import transformers

  kind, fields = AUTO[call]
  auto = getattr(transformers, f"AutoModelFor{kind}")
  model = auto.from_pretrained(folder / "discriminator", **fields)
  assert type(model).__name__ == f"{family}For{kind}"
  assert_on_the_encoder(model, exported, family)
  if "num_labels" in fields:
    assert model.config.num_labels == fields["num_labels"]


def test_auto_model_and_its_pipeline_give_the_states(folder, encoder):
  import torch
  from transformers import AutoModel, AutoTokenizer, pipeline

  path = folder / "discriminator"
  model, tokens = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
  extract = pipeline("feature-extraction", str(path))
  for text in TEXTS:
    ours = encoder.states(text).values
    with torch.no_grad():
      states = model(**tokens(text, return_tensors="pt")).last_hidden_state[0].numpy()
    np.testing.assert_allclose(states, ours, atol=1e-5)
    np.testing.assert_allclose(extract(text)[0], ours, atol=1e-5)


def test_the_generator_fills_in_the_same_words(folder, encoder):
  from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

  path = folder / "generator"
  model, tokens = AutoModelForMaskedLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
  for fill in (pipeline("fill-mask", str(path)), pipeline("fill-mask", model, tokenizer=tokens)):
    theirs, ours = fill(MASKED, top_k=5), encoder.fill_mask(MASKED, k=5)
    assert [x["token_str"] for x in theirs] == [x.token for x in ours]
    np.testing.assert_allclose(
      [x["score"] for x in theirs], [x.probability for x in ours], atol=1e-5
    )


def replaced_by_class(folder) -> list[np.ndarray]:
  import torch
  from transformers import AutoTokenizer, ElectraForPreTraining

  path = folder / "discriminator"
  model, tokens = ElectraForPreTraining.from_pretrained(path), AutoTokenizer.from_pretrained(path)
  with torch.no_grad():
    logits = [model(**tokens(text, return_tensors="pt")).logits[0, 1:-1] for text in TEXTS]
  return [torch.sigmoid(x).numpy() for x in logits]


def replaced_by_pipeline(folder) -> list[np.ndarray]:
  from transformers import pipeline

  found = pipeline("token-classification", str(folder / "detector"))(TEXTS)
  assert {x["entity"] for row in found for x in row} == {"ORIGINAL", "REPLACED"}
  return [
    np.array([x["score"] if x["entity"] == "REPLACED" else 1 - x["score"] for x in row])
    for row in found
  ]


def test_replaced_tokens_have_the_probabilities_of_detect(family, folder, encoder):
  theirs = {"Electra": replaced_by_class, "ModernBert": replaced_by_pipeline}[family](folder)
  ours = [[token.replaced for token in row] for row in encoder.detect(TEXTS)]
  assert np.ptp(np.concatenate(ours)) > 0.1
  for a, b in zip(theirs, ours, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def run_card(folder) -> dict:
  """Runs the Python in a folder's model card, and returns what it names."""
  code, found = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL), {}
  exec(code[1], found)
  return found


def test_the_calls_of_a_model_card_work(folder, monkeypatch):
  monkeypatch.chdir(folder)
  for path in folder.iterdir():
    found = run_card(path)
    assert found["encoder"].config.hidden_size == 16
    if predict := found.get("predict"):
      assert predict(MASKED)


def test_ten_steps_of_a_trainer_fit_the_texts(folder, tmp_path):
  import transformers

  path = folder / "discriminator"
  transformers.set_seed(0)
  tokens = transformers.AutoTokenizer.from_pretrained(path)
  auto = transformers.AutoModelForSequenceClassification
  model = auto.from_pretrained(path, num_labels=2)
  rows = [{**tokens(text), "labels": int(text in TEXTS[1:])} for text in TEXTS * 2]
  settings = transformers.TrainingArguments(
    tmp_path, max_steps=10, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True,
    disable_tqdm=True,
  )  # fmt: skip
  trainer = transformers.Trainer(model, settings, train_dataset=rows, processing_class=tokens)
  before = trainer.evaluate(rows)["eval_loss"]
  assert trainer.train().global_step == 10
  assert trainer.evaluate(rows)["eval_loss"] < before - 0.05


def test_sentence_transformers_embed_any_export_with_the_mean(folder, encoder):
  from sentence_transformers import SentenceTransformer

  found = SentenceTransformer(str(folder / "discriminator")).encode(TEXTS)
  np.testing.assert_allclose(found, encoder.embed(TEXTS, pool="mean"), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_export_with_pooling_embeds_in_sentence_transformers(
  pooling, folder, encoder, tmp_path, monkeypatch
):
  from sentence_transformers import SentenceTransformer

  cli.call("export", [str(folder), str(tmp_path / "out"), "--to=hf", f"--pooling={pooling}"])
  monkeypatch.chdir(tmp_path / "out")
  model, ours = run_card(Path("discriminator"))["embedder"], encoder.embed(TEXTS, pool=pooling)
  assert model.max_seq_length == encoder.max_length
  assert [path.parent.name for path in Path().glob("*/modules.json")] == ["discriminator"]
  np.testing.assert_allclose(model.encode(TEXTS), ours, atol=1e-5)
  huggingface.save_sentence_transformer(Path("discriminator"), 16, pooling, normalize=True)
  ours /= np.linalg.norm(ours, axis=1, keepdims=True)
  np.testing.assert_allclose(SentenceTransformer("discriminator").encode(TEXTS), ours, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_network_trained_on_pairs_embeds_as_it_was_trained(pooling, encoder, tmp_path):
  from sentence_transformers import SentenceTransformer

  head = HeadSpec("embedding", {"pooling": pooling, "temperature": 0.05, "texts": 2})
  info = dataclasses.asdict(TaskInfo("pairs", "mine", head, encoder.max_length))
  networks = {"discriminator": encoder._source.networks["discriminator"].without_head()}
  source = Source(networks, encoder.tokenizer, {}, finetuned=Finetuned(info, {}))
  (tmp_path / "model").mkdir()
  save_orbax(tmp_path / "model", source)
  cli.call("export", [str(tmp_path / "model"), str(tmp_path / "out"), "--to=hf"])
  found = SentenceTransformer(str(tmp_path / "out" / "discriminator")).encode(TEXTS)
  np.testing.assert_allclose(found, electra_jax.load_task(tmp_path / "model")(TEXTS), atol=1e-5)
  wrong = {"mean": "cls", "cls": "mean"}[pooling]
  with pytest.raises(ExchangeError, match=f"pooling={wrong} differs from training: leave it out"):
    writer.write(source, tmp_path / "other", "hf", Console(quiet=True), pooling=wrong)


def test_a_pooling_that_is_unknown_or_has_no_tokenizer_is_refused(family, encoder, tmp_path):
  with pytest.raises(ValueError, match="pooling must be mean or cls, got 'max'"):
    encoder.save(tmp_path / "out", pooling="max")
  source = dataclasses.replace(encoder._source, tokenizer=None)
  with pytest.raises(ExchangeError, match="leave out pooling: AutoTokenizer"):
    writer.write(source, tmp_path / "out", "hf", Console(quiet=True), pooling="mean")
  assert not list(tmp_path.iterdir())
