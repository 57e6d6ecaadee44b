"""Every kind of layer equals one written out with loops in NumPy, in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import long_except
from test_objectives import keys_of, make_batch

from electra_jax.core import (
  attention,
  encoder,
  flops,
  generators,
  layers,
  masking,
  networks,
  objectives,
)
from electra_jax.core.networks import generator_size
from electra_jax.core.transformer_config import Compute, TransformerConfig
from electra_jax.interop import modernbert

BERT = TransformerConfig(50, 8, 8, 3, 2, 12, 16, layer_norm_eps=1e-5)
MODERN = {k: v for k, v in modernbert.LAYERS.items() if k not in ("head_norm", "direction")}
VARIANTS = {
  "bert": {},
  "pre-norm": {"block": "pre_norm"},
  "embeddings without a norm": {"block": "pre_norm", "embedding_norm": False},
  "first block without its norm": {"block": "pre_norm", "first_norm": False},
  "no biases": {"biases": False},
  "norm without bias": {"norm": "layer_norm_no_bias"},
  "rms norm": {"norm": "rms_norm"},
  "geglu": {"feed_forward": "geglu"},
  "swiglu": {"feed_forward": "swiglu"},
  "rope": {"positions": "rope", "rope_theta": 100.0},
  "norm of queries and keys": {"qk_norm": True},
  "no token types": {"token_types": False},
  "narrow embeddings": {"embedding_size": 6},
  "window, computed with a mask": {"global_every": 2, "window": 8},
  "window, computed in blocks": {"global_every": 2, "window": 4},
  "window of one neighbour": {"global_every": 3, "window": 2},
  "two thetas": {
    **{"positions": "rope", "rope_theta": 900.0, "local_rope_theta": 10.0},
    **{"global_every": 2, "window": 4},
  },
  "modern": {**MODERN, "global_every": 3, "window": 6, "local_rope_theta": 50.0},
  "modern, left to right": {**MODERN, "direction": "ltr", "global_every": 2, "window": 4},
}


SMALL = TransformerConfig(
  *(60, 16, 16, 3, 2, 24, 16), **MODERN, global_every=3, window=4, local_rope_theta=50.0
)


def np_norm(cfg, x, p):
  x = x - (0 if cfg.norm == "rms_norm" else x.mean(-1, keepdims=True))
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.layer_norm_eps)
  return x * p["scale"] + p.get("bias", 0)


def np_dense(x, p):
  return x @ p["kernel"] + p.get("bias", 0)


def np_feed_forward(cfg, x, p):
  gelu = np.vectorize(lambda a: a * 0.5 * (1 + math.erf(a / math.sqrt(2))))
  activation = (lambda a: a / (1 + np.exp(-a))) if cfg.feed_forward == "swiglu" else gelu
  if cfg.feed_forward == "gelu":
    return np_dense(activation(np_dense(x, p["ffn_in"])), p["ffn_output"])
  layer = p["ffn_in"]
  first, second = (x @ layer["kernel"][:, i] + layer.get("bias", np.zeros(2))[i] for i in (0, 1))
  return np_dense(activation(first) * second, p["ffn_output"])


def np_rotate(x, theta):
  """Turns numbers j and j + d / 2 of position i by i theta^(-2 j / d), as a complex number."""
  half = x.shape[-1] // 2
  angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
  turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
  return np.concatenate([turned.real, turned.imag], -1)


def np_attention(cfg, x, p, layer, real):
  local, out = layer % cfg.global_every != 0, 0
  for h in range(cfg.num_heads):
    q, k, v = (
      x @ p["qkv"]["kernel"][:, i, h] + p["qkv"].get("bias", np.zeros((3, 9)))[i, h]
      for i in range(3)
    )
    if cfg.qk_norm:
      q, k = np_norm(cfg, q, p["q_norm"]), np_norm(cfg, k, p["k_norm"])
    if cfg.positions == "rope":
      theta = cfg.local_rope_theta if local else cfg.rope_theta
      q, k = np_rotate(q, theta), np_rotate(k, theta)
    for i in range(len(x)):
      seen = [
        j
        for j in range(len(x))
        if real[j]
        and (not local or abs(i - j) <= cfg.window // 2)
        and (cfg.direction == "both" or j <= i)
      ]
      if seen:  # nothing is asked of padding
        e = np.exp([q[i] @ k[j] / math.sqrt(q.shape[-1]) for j in seen])
        y = np.zeros((len(x), cfg.hidden_size))
        y[i] = (e / e.sum()) @ v[seen] @ p["attention_output"]["kernel"][h]
        out = out + y
  return out + p["attention_output"].get("bias", 0)


def np_encoder(cfg, tables, network, ids, types, mask):
  rows = []
  for row, kinds, real in zip(ids, types, mask, strict=True):
    x = tables["word"][row]
    x = x + (tables["position"][: len(row)] if cfg.positions == "learned" else 0)
    x = x + (tables["token_type"][kinds] if cfg.token_types else 0)
    x = np_norm(cfg, x, tables["layer_norm"]) if cfg.embedding_norm else x
    x = np_dense(x, network["project"]) if "project" in network else x
    for n in range(cfg.num_layers):
      p = jax.tree.map(lambda a, n=n: a[n], network["layers"])
      if cfg.block == "post_norm":
        x = np_norm(cfg, x + np_attention(cfg, x, p, n, real), p["attention_norm"])
        x = np_norm(cfg, x + np_feed_forward(cfg, x, p), p["ffn_norm"])
      else:
        y = x if n == 0 and not cfg.first_norm else np_norm(cfg, x, p["attention_norm"])
        x = x + np_attention(cfg, y, p, n, real)
        x = x + np_feed_forward(cfg, np_norm(cfg, x, p["ffn_norm"]), p)
    rows.append(np_norm(cfg, x, network["final_norm"]) if cfg.block == "pre_norm" else x)
  return np.stack(rows)


def random_weights(cfg, seed=0):
  """Returns tables and encoder, all numbers drawn, so that no bias is 0 and no scale 1."""
  shapes = jax.eval_shape(
    lambda key: (networks.init_embeddings(cfg, key), networks.init_encoder(cfg, key)),
    jax.random.key(0),
  )
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: rng.normal(size=x.shape) * 0.5, shapes)


def inputs(length=16):
  rng = np.random.default_rng(1)
  mask = np.arange(length) < np.array([length, 9, 4])[:, None]
  types = (rng.random((3, length)) < 0.5).astype(np.int32) * mask
  return rng.integers(5, 50, (3, length)).astype(np.int32) * mask, types, mask


def encode(cfg, tables, network, ids, types, mask):
  @jax.jit
  def states(tables, network):
    x = encoder.Embeddings(cfg).apply({"params": tables}, ids, types)
    return encoder.Encoder(cfg).apply({"params": network}, x, mask, None)

  return np.asarray(states(*jax.tree.map(jnp.float32, (tables, network))))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_equals_one_written_out_in_numpy(name):
  cfg = dataclasses.replace(BERT, **VARIANTS[name])
  tables, network = random_weights(cfg)
  ids, types, mask = inputs()
  expected = np_encoder(cfg, tables, network, ids, types, mask)
  # Rounding of float32 through three layers: values up to 20, eps 6e-8, about 50 operations deep.
  np.testing.assert_allclose(
    encode(cfg, tables, network, ids, types, mask)[mask], expected[mask], atol=1e-4
  )


def test_scaled_init_starts_the_outputs_of_a_block_smaller_by_the_root_of_twice_the_layers():
  cfg = dataclasses.replace(BERT, scaled_init=True)
  plain, scaled = (
    layers.block_output(c, "x").kernel_init(jax.random.key(0), (8, 8), jnp.float32)
    for c in (BERT, cfg)
  )
  np.testing.assert_allclose(scaled, plain / math.sqrt(2 * cfg.num_layers), rtol=1e-6)
  inner = layers.dense(cfg, 8, "x").kernel_init(jax.random.key(0), (8, 8), jnp.float32)
  np.testing.assert_array_equal(inner, plain)


def test_a_changed_variant_changes_the_states():
  """What the reference is asked for is in use: no variant gives BERT's states by chance."""
  tables, network = random_weights(BERT)
  bert = encode(BERT, tables, network, *inputs())
  for changes in ({"global_every": 2, "window": 4}, {"direction": "ltr"}):
    other = encode(dataclasses.replace(BERT, **changes), tables, network, *inputs())
    assert np.abs(other - bert).max() > 0.01


@pytest.mark.parametrize("window", long_except(0, 2, of=[4, 6, 8, 10]))
def test_a_window_is_the_same_in_blocks_and_with_a_mask(window):
  """At every length: a row that is cut, or longer by padding, has the same states."""
  cfg = dataclasses.replace(BERT, **MODERN, global_every=4, window=window)
  weights = random_weights(cfg)
  ids, types, mask = inputs()
  whole = encode(cfg, *weights, ids, types, mask)
  for length in (9, 12, 15):
    cut = encode(cfg, *weights, ids[1:, :length], types[1:, :length], mask[1:, :length])
    # The same sums in other orders.
    np.testing.assert_allclose(
      cut[mask[1:, :length]], whole[1:, :length][mask[1:, :length]], atol=1e-5
    )


def test_local_attention_in_blocks_drops_its_probabilities():
  rate, (B, L, H) = 0.25, (16, 40, 2)
  cfg = dataclasses.replace(BERT, attention_dropout=rate, global_every=2, window=4)
  assert attention.local_scores(cfg, L) < L * L  # so that it is computed in blocks
  # Equal scores: an inner query gives 1/5 to each of five keys, whose values are 1.
  zeros, ones, mask = jnp.zeros((B, L, H, 4)), jnp.ones((B, L, H, 4)), jnp.ones((B, L), bool)

  def attend(seeds):
    inputs = attention.Inputs(zeros, zeros, ones, mask, None, seeds)
    return np.asarray(attention.attend(cfg, inputs, local=True))

  np.testing.assert_allclose(attend(None), 1.0, atol=1e-6)
  seeds = jax.random.bits(jax.random.key(0), (B, 2), jnp.uint32)
  dropped = attend(seeds)
  kept = dropped[:, 2:-2, :, 0] * 5 * (1 - rate)
  np.testing.assert_allclose(kept, kept.round(), atol=1e-5)
  # 16 x 36 x 2 queries with five draws each: four standard errors.
  error = (rate / (1 - rate) / (5 * kept.size)) ** 0.5
  assert abs(dropped[:, 2:-2].mean() - 1) < 4 * error and (kept < 5).mean() > 0.5
  np.testing.assert_array_equal(dropped, attend(seeds))


def test_bfloat16_stays_near_float32():
  cfg = dataclasses.replace(BERT, **MODERN, global_every=2, window=4)
  tables, network = random_weights(cfg)
  exact = encode(cfg, tables, network, *inputs())
  coarse = encode(cfg.computed(dtype="bfloat16"), tables, network, *inputs())
  # 8 bits a number; the sum of the blocks stays float32.
  assert np.abs(coarse - exact).max() < 0.1


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_heads": 8, "positions": "rope"}, "head width 1 is odd"),
    ({"window": 1}, "window at least 2, got 1 and 1"),
    ({"first_norm": False}, "first_norm=False needs block=pre_norm"),
    (
      {"block": "pre_norm", "first_norm": False, "embedding_norm": False},
      "first_norm=False needs embedding_norm=True",
    ),
  ],
)
def test_what_cannot_be_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(BERT, **changes)


@pytest.mark.parametrize("name", ["geglu", "swiglu", "no biases", "modern"])
def test_matrix_products_are_those_the_compiler_counts(name):
  # Wide, so that products are nearly all there is to count. Unrolled, because the compiler counts
  # the body of a loop once.
  cfg = TransformerConfig(50, 1024, 1024, 2, 2, 2048, 128, compute=Compute(unroll=2))
  cfg = dataclasses.replace(cfg, **VARIANTS[name] | {"global_every": 1})
  shapes = jax.eval_shape(lambda: networks.init_encoder(cfg, jax.random.key(0)))
  x, mask = jax.ShapeDtypeStruct((4, 128, 1024), jnp.float32), np.ones((4, 128), bool)
  lowered = jax.jit(lambda p, x: encoder.Encoder(cfg).apply({"params": p}, x, mask, None)).lower(
    shapes, x
  )
  counted, ours = lowered.cost_analysis()["flops"], 4 * flops.encoder_flops(cfg, 128)
  # The compiler also counts what is done element by element, 0.2 % here.
  assert 1 < counted / ours < 1.003, (counted, ours)


@pytest.mark.parametrize("length", [100, 128, 300])
def test_products_of_local_attention_are_those_the_compiler_counts(length):
  cfg = TransformerConfig(50, 2048, 2048, 2, 2, 256, 512, global_every=2, window=64)
  q = jax.ShapeDtypeStruct((4, length, 2, 1024), jnp.float32)
  mask = np.ones((4, length), bool)

  def attend(q):
    return attention.attend(cfg, attention.Inputs(q, q, q, mask, None, None), local=True)

  lowered = jax.jit(attend).lower(q)
  ours = 4 * 2 * 2 * attention.local_scores(cfg, length) * 2048
  assert 1 < lowered.cost_analysis()["flops"] / ours < 1.003  # 0.2 % is not products


@pytest.mark.parametrize("num_layers", [3, 4])  # layers 0 and 3 attend to all tokens
def test_local_attention_has_fewer_products(num_layers):
  """Three blocks of 64 keys a query instead of 1,024, in two layers."""
  cfg = TransformerConfig(50, 128, 128, num_layers, 2, 256, 1024, global_every=3, window=128)
  everywhere = dataclasses.replace(cfg, global_every=1)
  saved = flops.encoder_flops(everywhere, 1024) - flops.encoder_flops(cfg, 1024)
  assert saved == 2 * 2 * 2 * 1024 * (1024 - 3 * 64) * 128
  assert flops.encoder_flops(cfg, 192) == flops.encoder_flops(everywhere, 192)


SPEC = networks.PretrainSpec(
  generator_size(SMALL, 0.5, 1.0), SMALL,
  masking.Masking(0.25, 0.85, 1.0, 4, (0, 2, 3, 4)), frequencies=(1.0,) * 60, contrast_group=4,
)  # fmt: skip
COMBINATIONS = {
  **{
    name: {
      "objective": name,
      "generator_kind": next(k for k, g in generators.GENERATORS.items() if o.accepts(g)),
    }
    for name, o in objectives.OBJECTIVES.items()
  },
  **{kind: {"generator_kind": kind, "tying": "none"} for kind in generators.GENERATORS},
  **{tie: {"tying": tie} for tie in networks.TIES},
}


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=[] if n == "bert" else [pytest.mark.long]) for n in COMBINATIONS]
)
def test_every_objective_generator_and_tie_trains_modern_blocks(name):
  """The gradient of the loss is finite and reaches every layer of the discriminator."""
  spec = dataclasses.replace(SPEC, **COMBINATIONS[name])
  if networks.TIES[spec.tying].shares_encoder:
    spec = dataclasses.replace(spec, generator=spec.discriminator)
  batch = make_batch()
  params = jax.jit(lambda: objectives.init_params(spec, jax.random.key(0)))()

  def loss(params):
    terms = objectives.make(spec)(params, batch, keys_of(batch), jnp.int32(0))
    return sum(t.weight * t.total for t in terms.values() if t.in_loss)

  gradient = jax.jit(jax.grad(loss))(params)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
  layers = gradient["discriminator"]["encoder"]["layers"]
  assert np.all(layers.pop("attention_norm")["scale"][1:])  # the first layer has none
  for x in jax.tree.leaves(layers):
    assert np.abs(x).reshape(len(x), -1).max(-1).min() > 0
