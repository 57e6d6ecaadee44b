"""DeBERTa's disentangled attention, against gathers in float64 and against figures of the paper."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import long_except
from scipy import special

from electra_jax.core import (
  attention,
  encoder,
  flops,
  heads,
  layers,
  networks,
  optimizer,
  positions,
)
from electra_jax.core.batch import Batch
from electra_jax.core.step import row_keys
from electra_jax.core.transformer_config import TransformerConfig

CFG = TransformerConfig(
  *(99, 16, 16, 2, 2, 24, 40), positions="disentangled", position_buckets=8, layer_norm_eps=1e-7
)


def weights(cfg=CFG):
  """Returns an encoder's weights, also biases and scales different from 0 and 1."""
  params = networks.init_encoder(cfg, jax.random.key(0))
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(0)
  return jax.tree.unflatten(tree, [x + 0.1 * rng.normal(size=x.shape) for x in leaves])


def inputs(length, rows=2):
  x = np.random.default_rng(1).normal(size=(rows, length, 16)).astype(np.float32)
  padding_mask = np.arange(length) < np.array([[length]] + [[max(2, length - 3)]] * (rows - 1))
  return x, padding_mask


def states(params, x, padding_mask, seeds=None, documents=None, cfg=CFG):
  apply = encoder.Encoder(cfg).apply
  return apply({"params": params}, x, padding_mask, seeds, documents)


def bucket(distance, buckets, max_positions):
  """The formula of the paper's code, in float32."""
  half = buckets // 2
  if abs(distance) <= half:
    return distance
  f = np.float32
  steps = np.log(f(abs(distance)) / f(half)) / f(np.log((max_positions - 1) / half)) * f(half - 1)
  return int(np.sign(distance) * (np.ceil(steps) + half))


def by_gathers(params, x, seen, cfg=CFG, np=np, erf=special.erf, keys=None):
  """The encoder with a table of L x L rows; `np` may be jax.numpy, `keys` replace x as the keys."""
  L, d, s = x.shape[1], cfg.head_size, cfg.position_buckets
  row = [[bucket(i - j, s, cfg.max_positions) + s for j in range(L)] for i in range(L)]
  row = np.clip(np.array(row), 0, 2 * s - 1)

  def norm(x, weights):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.layer_norm_eps)
    return x * weights["scale"] + weights["bias"]

  table = norm(params["distances"]["table"], params["distances"]["norm"])
  for n in range(len(params["layers"]["qkv"]["kernel"])):
    w = jax.tree.map(lambda a, n=n: a[n], params["layers"])

    def project(x, w=w):
      y = np.einsum("...d,dthe->...the", x, w["qkv"]["kernel"]) + w["qkv"]["bias"]
      return y[..., 0, :, :], y[..., 1, :, :], y[..., 2, :, :]

    (q, _, _), (Q, K, _) = project(x), project(table)
    _, k, v = project(x if keys is None else keys)
    scores = np.einsum("bihe,bjhe->bhij", q, k)
    scores = scores + np.einsum("bihe,ijhe->bhij", q, K[row])
    scores = scores + np.einsum("bjhe,ijhe->bhij", k, Q[row])
    scores = np.where(seen[:, None], scores / (3 * d) ** 0.5, -1e9)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("bhij,bjhe->bihe", e / e.sum(-1, keepdims=True), v)
    out = w["attention_output"]
    x = norm(x + np.einsum("bihe,hed->bid", y, out["kernel"]) + out["bias"], w["attention_norm"])
    y = x @ w["ffn_in"]["kernel"] + w["ffn_in"]["bias"]
    y = 0.5 * y * (1 + erf(y / 2**0.5))
    x = norm(x + y @ w["ffn_output"]["kernel"] + w["ffn_output"]["bias"], w["ffn_norm"])
  return x


@pytest.mark.parametrize("length", [1, 5, 9, 40])  # 5: the last with a row for each distance
def test_states_are_those_of_gathers_in_float64(length):
  params, (x, padding_mask) = weights(), inputs(length)
  exact = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
  expected = by_gathers(exact, x.astype(np.float64), padding_mask[:, None, :])
  found = np.asarray(states(params, x, padding_mask))
  # Rounding of float32 through two layers, of values up to 4.
  np.testing.assert_allclose(found[padding_mask], expected[padding_mask], atol=2e-5)


@pytest.mark.parametrize("length", long_except(0, of=[5, 40]))
def test_gradients_are_those_of_gathers(length):
  params, (x, padding_mask) = weights(), inputs(length)
  towards = np.random.default_rng(2).normal(size=x.shape) * padding_mask[..., None]

  def ours(params, x):
    return (states(params, x, padding_mask) * towards).sum()

  def theirs(params, x):
    seen = padding_mask[:, None, :]
    return (by_gathers(params, x, seen, np=jnp, erf=jax.lax.erf) * towards).sum()

  found, expected = (jax.grad(f, (0, 1))(params, x) for f in (ours, theirs))
  # Sums of about a hundred terms in another order, relative to the largest of an array.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max())),
    found,
    expected,
  )


@pytest.mark.parametrize(("buckets", "most"), [(256, 512), (320, 512), (32, 128), (7, 40)])
def test_rows_of_distances_are_those_of_the_papers_code(buckets, most):
  rows = positions.distance_rows(most, buckets, most)
  at = range(most - 1, -most, -1)
  expected = [min(max(bucket(r, buckets, most) + buckets, 0), 2 * buckets - 1) for r in at]
  assert rows.tolist() == expected
  if buckets == 256:  # figures of Microsoft's function
    found = {r: int(rows[most - 1 - r]) - 256 for r in (130, 131, 132, 200, 300, 510, 511)}
    assert found == {130: 130, 131: 131, 132: 131, 200: 169, 300: 207, 510: 255, 511: 255}


def test_a_document_in_a_packed_row_has_the_states_that_it_has_alone():
  params, (x, _) = weights(), inputs(12, rows=1)
  documents = np.array([[1] * 5 + [2] * 7])
  packed = states(params, x, documents > 0, documents=documents)
  for part in (slice(0, 5), slice(5, 12)):
    alone = states(params, x[:, part], np.ones((1, part.stop - part.start), bool))
    np.testing.assert_allclose(packed[:, part], alone, atol=1e-5)


def test_short_rows_compute_without_gathers_in_either_pass():
  params, (x, padding_mask) = weights(), inputs(5)
  loss = lambda params: states(params, x, padding_mask).sum()  # noqa: E731
  text = str(jax.make_jaxpr(jax.grad(loss))(params))
  assert "gather" not in text and "scatter" not in text.replace("dynamic", "")


def test_the_table_has_one_dropout_mask_in_the_whole_batch_on_any_devices():
  cfg = dataclasses.replace(CFG, dropout=0.5, attention_dropout=0.0)
  params, (x, padding_mask) = weights(cfg), inputs(9, rows=4)
  rows, t = np.arange(4, dtype=np.int32), jnp.int32(3)

  def trained(part, seed=7):
    seeds = layers.make_dropout_seeds(row_keys(seed, t, rows[part]), cfg.num_layers)
    return np.asarray(states(params, x[part], padding_mask[part], seeds, cfg=cfg))

  whole = trained(slice(0, 4))
  np.testing.assert_array_equal(whole, np.concatenate([trained(slice(0, 2)), trained(slice(2, 4))]))
  seeds = layers.make_dropout_seeds(row_keys(7, t, rows), cfg.num_layers)[1]
  shared = np.asarray(seeds[:, :, 3])
  assert (shared == shared[:, :1]).all() and len(np.unique(shared[:, 0], axis=0)) == cfg.num_layers
  # The table is dropped: another mask of it alone gives other states.
  embeddings, of_layers = layers.make_dropout_seeds(row_keys(7, t, rows), cfg.num_layers)
  other = embeddings, of_layers.at[:, :, 3].add(1)
  assert np.abs(whole - states(params, x, padding_mask, other, cfg=cfg)).max() > 0.1


def test_flops_count_each_query_and_key_times_the_rows_that_are_used():
  learned = dataclasses.replace(CFG, positions="learned")
  more = flops.encoder_flops(CFG, 5) - flops.encoder_flops(learned, 5)
  assert more == CFG.num_layers * 2 * (2 * 5 * 9 * CFG.hidden_size)  # 9 distances of 5 tokens
  more = flops.encoder_flops(CFG, 40) - flops.encoder_flops(learned, 40)
  assert more == CFG.num_layers * 2 * (2 * 40 * 15 * CFG.hidden_size)  # rows 1 to 15 of 16


def test_the_table_decays_and_learns_at_the_embeddings_rate():
  mask = optimizer.decay_mask(weights())["distances"]
  assert mask == {"table": True, "norm": {"scale": False, "bias": False}}
  rates = optimizer.layer_rates({"encoder": weights()}, CFG.num_layers, 0.5)["encoder"]
  assert set(jax.tree.leaves(rates["distances"])) == {0.5 ** (CFG.num_layers + 1)}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"global_every": 2}, "disentangled positions have no windows"),
    ({"position_buckets": 3}, "position_buckets must be at least 4"),
  ],
)
def test_what_it_lacks_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CFG, **changes)


@pytest.mark.parametrize("kind", ["cudnn", "splash"])
def test_attention_without_a_bias_is_refused_by_name(kind):
  x, padding_mask = inputs(9)
  cfg = dataclasses.replace(CFG, attention_dropout=0.0).computed(attention=kind)
  with pytest.raises(ValueError, match=f"{kind} attention has no disentangled positions"):
    states(weights(), x, padding_mask, cfg=cfg)
  assert not attention.ATTENTION[kind].bias


def test_rows_longer_than_the_positions_are_refused():
  x, padding_mask = inputs(41)
  with pytest.raises(ValueError, match=r"41 tokens exceed model\.max_positions=40"):
    states(weights(), x, padding_mask)


DECODED = dataclasses.replace(CFG, num_layers=3)


def decode(params, x, padding_mask, at, vectors, documents=None, cfg=DECODED):
  apply = jax.jit(encoder.Encoder(cfg).apply)
  queries = encoder.Queries(jnp.asarray(vectors)[at], at)
  return apply({"params": params}, x, padding_mask, None, documents, queries)


@pytest.mark.parametrize("count", [1, 3])
def test_the_mask_decoder_is_the_last_layer_with_other_queries_twice(count):
  cfg = dataclasses.replace(CFG, num_layers=count)
  params, (x, padding_mask) = weights(cfg), inputs(9)
  vectors = np.random.default_rng(4).normal(size=(9, 16)).astype(np.float32)
  at = np.array([[0, 4, 8], [5, 2, 1]], np.int32)
  found = decode(params, x, padding_mask, at, vectors, cfg=cfg)

  exact = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
  layers = exact["layers"]
  but_last = {**exact, "layers": jax.tree.map(lambda a: a[:-1], layers)}
  seen = padding_mask[:, None, :]
  h = by_gathers(but_last, x.astype(np.float64), seen)
  last = {**exact, "layers": jax.tree.map(lambda a: a[-1:], layers)}
  y = h + vectors
  for _ in range(2):
    y = by_gathers(last, y, seen, keys=h)
  expected = np.take_along_axis(y, at[..., None], 1)
  # Rounding of float32 through four layers.
  np.testing.assert_allclose(found, expected, atol=3e-5)


def test_the_mask_decoder_does_not_depend_on_the_other_positions_that_are_asked_for():
  params, (x, padding_mask) = weights(DECODED), inputs(12)
  vectors = np.random.default_rng(4).normal(size=(12, 16)).astype(np.float32)
  documents = np.where(padding_mask, 1 + (np.arange(12) > 6), 0)
  every = np.tile(np.arange(12, dtype=np.int32), (2, 1))
  at = np.array([[11, 3], [0, 8]], np.int32)
  for ids in (None, documents):
    whole = decode(params, x, padding_mask, every, vectors, ids)
    part = decode(params, x, padding_mask, at, vectors, ids)
    np.testing.assert_allclose(part, np.take_along_axis(whole, at[..., None], 1), atol=1e-5)


def test_documents_of_a_row_are_decoded_as_alone():
  params, (x, _) = weights(DECODED), inputs(10)
  batch = Batch(np.zeros((2, 10), np.int32), None, np.ones((2, 10), bool), np.arange(2, dtype=int))
  cfg = dataclasses.replace(DECODED, vocab_size=10, token_types=False)
  network = {
    "embeddings": networks.init_embeddings(cfg, jax.random.key(1)),
    "encoder": params,
    "mask_decoder": networks.init_mask_decoder(cfg, jax.random.key(2)),
  }
  ids = np.random.default_rng(0).integers(0, 10, (2, 10)).astype(np.int32)

  def states(ids, documents, at):
    mask = np.ones(ids.shape, bool)
    of = batch._replace(ids=ids, padding_mask=mask, document_ids=documents)
    return networks.states_to_predict(cfg, network, ids, of, None, np.array(at, np.int32))

  packed = states(ids, np.array([[1] * 6 + [2] * 4] * 2, np.int32), [[7, 2], [9, 6]])
  alone = states(ids[:, 6:], None, [[1], [3]])
  np.testing.assert_allclose(packed[:, :1], alone, atol=1e-5)
  head = heads.RtdHead(dataclasses.replace(cfg, head_first_token=True))
  weights_ = head.init(jax.random.key(0), x)
  logits = head.apply(weights_, x, np.array([[1] * 6 + [2] * 4] * 2, np.int32))
  np.testing.assert_allclose(logits[:, 6:], head.apply(weights_, x[:, 6:]), atol=1e-5)


def test_the_first_tokens_state_is_added_in_the_detection_head():
  cfg = dataclasses.replace(CFG, head_first_token=True)
  x = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
  p = heads.RtdHead(cfg).init(jax.random.key(0), x)["params"]
  y = x + x[:, :1]
  y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-7)
  y = y @ p["dense"]["kernel"]
  y = 0.5 * y * (1 + special.erf(y / 2**0.5))
  expected = (y @ p["logit"]["kernel"])[..., 0]
  np.testing.assert_allclose(heads.RtdHead(cfg).apply({"params": p}, x), expected, atol=1e-5)
