"""electra_jax.load and Encoder: what they give is what the networks say, whatever the batches."""

import numpy as np
import pytest
from conftest import no_warnings, python
from test_exchange import a_source, write_vocab
from test_hf import WORDS45, needs_torch

import electra_jax
from electra_jax.core import networks
from electra_jax.core.batch import from_rows
from electra_jax.encoder import Encoder
from electra_jax.interop.sources import ExchangeError

A, B, C = WORDS45[:3]
TEXTS = [f"{A} {B}", A, "", f"{C} {B} {A} {A} {B} {C} {B}", f"{B} {A} {C}"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
  vocab = write_vocab(tmp_path_factory.mktemp("words") / "vocab.txt")
  return Encoder(a_source("discriminator", "generator", vocab=vocab), "here", "auto", "float32")


def direct(encoder, role: str, text: str):
  """Returns the ids of a text alone [n] and a network's states [n, D], unbatched."""
  network, vocab = encoder._source.networks[role], encoder.tokenizer.vocab
  ids = [vocab.cls, *encoder.tokenizer.encode_batch([text])[0], vocab.sep]
  batch = from_rows([ids], (1, len(ids)), 0)
  states = networks.encode(network.cfg, network.weights, batch.ids, batch, None)
  return ids, network, np.asarray(states[0])


def test_importing_the_package_costs_nothing():
  code = """
import sys, time
start = time.perf_counter()
import electra_jax
secs = time.perf_counter() - start
assert "load" in dir(electra_jax) and not {"jax", "numpy"} & sys.modules.keys()
try:
  electra_jax.nothing
except AttributeError as error:
  assert "nothing" in str(error)
"""
  assert python("-c", code).returncode == 0


@pytest.mark.parametrize("pool", ["mean", "cls"])
@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_embeddings_are_those_of_each_text_alone(encoder, pool, batch_size):
  found = encoder.embed(TEXTS, pool=pool, batch_size=batch_size)
  assert found.dtype == np.float32 and found.shape == (len(TEXTS), encoder.width)
  for text, vector in zip(TEXTS, found, strict=True):
    states = direct(encoder, "discriminator", text)[2]
    expected = states.mean(0) if pool == "mean" else states[0]
    # Sums of at most 12 states, in another order and beside padding.
    np.testing.assert_allclose(vector, expected, atol=2e-6)
  np.testing.assert_allclose(encoder.embed(TEXTS[0], pool=pool), found[0], atol=2e-6)
  assert encoder.embed([]).shape == (0, encoder.width)


def test_states_of_texts_and_of_ids_agree_and_name_their_characters(encoder):
  found = encoder.states(TEXTS)
  ids = [direct(encoder, "discriminator", text)[0] for text in TEXTS]
  batch = from_rows(ids, (len(ids), max(map(len, ids))), 0)
  by_ids = encoder.states(ids=batch.ids, mask=batch.padding_mask)
  for i, (text, row) in enumerate(zip(TEXTS, ids, strict=True)):
    values, spans = found[i]
    assert [text[a:b] for a, b in spans[1:-1]] == text.split()
    assert values.shape == (len(row), encoder.width) and spans[0] == spans[-1] == (0, 0)
    np.testing.assert_allclose(values, direct(encoder, "discriminator", text)[2], atol=2e-6)
    np.testing.assert_allclose(by_ids[i, : len(row)], values, atol=2e-6)
    assert not by_ids[i, len(row) :].any()
  assert encoder.states(TEXTS[1]).values.shape == found[1].values.shape


def test_detection_gives_each_token_its_probability(encoder):
  found = encoder.detect(TEXTS)
  for text, tokens in zip(TEXTS, found, strict=True):
    _, network, states = direct(encoder, "discriminator", text)
    logits = networks.token_logits(network.cfg, network.weights, "rtd_head", states[None])[0]
    expected = 1 / (1 + np.exp(-np.asarray(logits)[1:-1]))
    assert [t.text for t in tokens] == [text[t.start : t.end] for t in tokens] == text.split()
    np.testing.assert_allclose([t.replaced for t in tokens], expected, atol=2e-6)
  assert encoder.detect(A)[0].text == A


def test_masks_are_filled_with_the_likeliest_tokens(encoder):
  one, two = f"{A} [MASK] {B}.", f"[MASK] {C} [MASK]"
  found = encoder.fill_mask([one, two], k=3)
  vocab, network = encoder.tokenizer.vocab, encoder._source.networks["generator"]
  before, after = encoder.tokenizer.encode_batch([f"{A} ", f" {B}."])
  ids = [vocab.cls, *before, vocab.mask, *after, vocab.sep]
  batch = from_rows([ids], (1, len(ids)), 0)
  states = networks.encode(network.cfg, network.weights, batch.ids, batch, None)
  logits = np.asarray(networks.vocabulary_logits(network.cfg, network.weights, states))
  logits = logits[0, ids.index(vocab.mask)].astype(np.float64)
  p = np.exp(logits - logits.max())
  p /= p.sum()
  best = np.argsort(-p)[:3]
  assert [f.token for f in found[0]] == [encoder.tokenizer.decode([i]) for i in best]
  np.testing.assert_allclose([f.probability for f in found[0]], p[best], rtol=1e-5)
  for fill in found[0]:  # a piece that continues a word is joined to it
    assert fill.text in (f"{A} {fill.token} {B}.", f"{A}{fill.token[2:]} {B}.")
  assert len(found[1]) == 2
  assert found[1][1][0].text == f"[MASK] {C} {found[1][1][0].token}".replace(" ##", "")
  assert encoder.fill_mask(one, k=3)[0].token == found[0][0].token


def test_a_score_depends_on_its_text_and_the_scorer_alone(encoder):
  found = encoder.score(TEXTS)
  assert found.shape == (len(TEXTS),) and encoder.score(TEXTS[0]) == pytest.approx(found[0])
  by_words = encoder.score(TEXTS, "mlm")
  assert by_words.shape == found.shape and not np.allclose(found, by_words)


def test_a_long_text_is_cut_with_a_warning(encoder):
  long = " ".join([A, B] * 20)
  with pytest.warns(UserWarning, match="1 of 2 texts are truncated to 12 tokens"):
    found = encoder.embed([long, A])
  with no_warnings():
    fits = encoder.embed(" ".join([A, B] * 5))
  np.testing.assert_allclose(found[0], fits, atol=2e-6)


@pytest.mark.parametrize("form", ["hf", "orbax"])
def test_saved_networks_embed_as_before(encoder, form, tmp_path, capsys):
  encoder.save(tmp_path / "out", form)
  again = electra_jax.load(tmp_path / "out")
  np.testing.assert_array_equal(again.embed(TEXTS), encoder.embed(TEXTS))
  assert "discriminator" in repr(again) and again.max_length == encoder.max_length == 12
  with pytest.raises(ValueError, match="exists: choose another name"):
    encoder.save(tmp_path / "out", form)
  half = electra_jax.load(tmp_path / "out", dtype="bfloat16").embed(TEXTS)
  change = np.abs(half - encoder.embed(TEXTS)).max()
  assert half.dtype == np.float32 and 0 < change < 0.1  # states near 1, three layers of 8 bits


@pytest.mark.parametrize(
  ("call", "kind", "text"),
  [
    (lambda e: e.embed([A, 1]), TypeError, r"texts\[1\] is int"),
    (lambda e: e.embed(None), TypeError, "got NoneType"),
    (lambda e: e.embed(A, pool="max"), ValueError, "mean or cls, got 'max'"),
    (lambda e: e.embed(A, batch_size=0), ValueError, "at least 1, got 0"),
    (lambda e: e.states(), ValueError, "give either texts or ids"),
    (lambda e: e.states(A, ids=np.ones((1, 2), int)), ValueError, "give either texts or ids"),
    (lambda e: e.states(ids=np.ones(2, int)), ValueError, r"\[n, L\]"),
    (lambda e: e.states(ids=np.full((1, 2), 45)), ValueError, "below 45"),
    (lambda e: e.states(ids=np.ones((1, 13), int)), ValueError, "13 tokens are more"),
    (lambda e: e.states(ids=np.ones((1, 2), int), mask=[[0, 1]]), ValueError, "then False"),
    (lambda e: e.fill_mask(A), ValueError, r"no \[MASK\] in"),
    (lambda e: e.fill_mask("[MASK]", k=0), ValueError, "from 1 to 45, got 0"),
    (lambda e: e.fill_mask("[MASK] " * 20), ValueError, "22 tokens are more than 12"),
    (lambda e: e.save("/nowhere", "h5"), ValueError, "hf, onnx or orbax, got 'h5'"),
    (lambda e: e.save("/nowhere", "orbax", dtype="bfloat16"), ValueError, "dtype need form='hf'"),
    (lambda e: e.score(A, "nothing"), ValueError, "got 'nothing'"),
    (lambda e: electra_jax.load("/nowhere/at/all"), ExchangeError, "does not exist"),
    (lambda e: Encoder(e._source, "x", "masked_lm", "float32"), ExchangeError, "no masked_lm"),
    (lambda e: Encoder(e._source, "x", "auto", "float16"), ValueError, "got 'float16'"),
  ],
)
def test_what_cannot_be_answered_is_said_in_a_line(encoder, call, kind, text):
  with pytest.raises(kind, match=text) as error:
    call(encoder)
  assert "\n" not in str(error.value)


def test_networks_without_vocabulary_take_ids(tmp_path):
  encoder = Encoder(a_source("discriminator"), "here", "auto", "float32")
  assert encoder.states(ids=np.array([[1, 2, 3]])).shape == (1, 3, encoder.width)
  for method in (encoder.embed, encoder.detect):
    with pytest.raises(ExchangeError, match="no vocabulary"):
      method(A)


@needs_torch
def test_embeddings_are_those_of_transformers(encoder, tmp_path):
  import torch
  from transformers import AutoModel, AutoTokenizer

  encoder.save(tmp_path / "out")
  folder = tmp_path / "out" / "discriminator"
  tokens, network = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
  inputs = tokens(TEXTS, padding=True, return_tensors="pt")
  with torch.no_grad():
    states = network(**inputs).last_hidden_state
  mask = inputs["attention_mask"][..., None]
  expected = (states * mask).sum(1) / mask.sum(1)
  np.testing.assert_allclose(encoder.embed(TEXTS), expected, atol=1e-5)
