"""The networks: sizes, initial weights, padding, dropout, and an encoder written out in NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from electra_jax.core import (
  attention,
  encoder,
  generators,
  heads,
  layers,
  masking,
  networks,
  objectives,
)
from electra_jax.core.networks import generator_size
from electra_jax.core.transformer_config import TransformerConfig

TINY = TransformerConfig(
  vocab_size=50, embedding_size=6, hidden_size=8, num_layers=2, num_heads=2, ffn_size=16,
  max_positions=12, dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
RATES = masking.Masking(0.15, 0.85, 1.0, 4, (0, 2, 3, 4))


def paper_spec(embedding, width, layers, multiplier):
  cfg = TransformerConfig(30522, embedding, width, layers, width // 64, 4 * width, 512)
  return objectives.PretrainSpec(generator_size(cfg, multiplier, 1.0), cfg, RATES)


@pytest.mark.parametrize(
  ("sizes", "discriminator", "generator"),
  [
    ((128, 256, 12, 1 / 4), 13_549_057, 647_162),
    ((768, 768, 12, 1 / 3), 109_483_009, 9_903_418),
    ((1024, 1024, 24, 1 / 4), 335_142_913, 19_512_378),
  ],
)
def test_small_base_and_large_have_the_papers_parameters(sizes, discriminator, generator):
  # The paper says 14M, 110M and 335M; jointly trained 14.20M, 119.4M and 354.7M.
  spec = paper_spec(*sizes)
  shapes = jax.eval_shape(lambda: objectives.init_params(spec, jax.random.key(0)))
  counts = {"discriminator": discriminator, "generator": generator}
  counts["trained"] = discriminator + generator
  assert generators.count_networks(spec, shapes) == counts


def test_generators_keep_heads_of_64_and_at_least_one():
  small = paper_spec(128, 256, 12, 1 / 4).generator
  assert (small.hidden_size, small.num_heads, small.ffn_size, small.num_layers) == (64, 1, 256, 12)
  narrow = generator_size(TINY, 0.5, 0.5)
  assert (narrow.hidden_size, narrow.num_heads, narrow.num_layers) == (4, 1, 1)
  with pytest.raises(ValueError, match="0 layers .*generator.depth_multiplier=0.1 .of 2 layers"):
    generator_size(TINY, 1.0, 0.1)


def test_a_generator_whose_heads_do_not_fit_is_refused_by_the_field_that_sets_its_width():
  base = TransformerConfig(100, 8, 768, 2, 12, 8, 8)
  told = "^generator.width_multiplier=0.3: 3 heads .* 230; set it to 0.3125, for a width of 240$"
  with pytest.raises(ValueError, match=told):
    generator_size(base, 0.3, 1.0)
  with pytest.raises(
    ValueError, match="^generator.width_multiplier=0.625: RoPE .* head size, got 5"
  ):
    generator_size(dataclasses.replace(TINY, positions="rope"), 0.625, 1.0)


@pytest.fixture(scope="module")
def weights():
  spec = objectives.PretrainSpec(generator_size(TINY, 0.5, 1.0), TINY, RATES)
  return jax.jit(lambda: objectives.init_params(spec, jax.random.key(1)))()


@pytest.mark.slow
def test_initial_weights_are_truncated_normal_except_where_the_original_uses_glorot():
  spec = paper_spec(128, 256, 2, 1 / 4)
  w = jax.jit(lambda: objectives.init_params(spec, jax.random.key(0)))()
  normal = [
    w["embeddings"]["word"],
    w["discriminator"]["encoder"]["layers"]["ffn_in"]["kernel"],
    w["discriminator"]["encoder"]["layers"]["qkv"]["kernel"],
    w["generator"]["mlm_head"]["dense"]["kernel"],
    w["discriminator"]["rtd_head"]["dense"]["kernel"],
  ]
  for kernel in normal:
    # Cut at two standard deviations, not rescaled: the spread is 0.8796 of 0.02.
    assert np.abs(kernel).max() <= 0.04
    assert np.std(kernel) == pytest.approx(0.8796 * 0.02, rel=0.03)
  for kernel in (
    w["discriminator"]["encoder"]["project"]["kernel"],
    w["generator"]["encoder"]["project"]["kernel"],
    w["discriminator"]["rtd_head"]["logit"]["kernel"],
  ):
    limit = math.sqrt(6 / sum(kernel.shape))
    assert 0.9 * limit < np.abs(kernel).max() <= limit
  layers = w["discriminator"]["encoder"]["layers"]["ffn_in"]["kernel"]
  assert not np.array_equal(layers[0], layers[1])


# Every kind of encoder, written out with loops in float64.


def np_gelu(x):
  return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def np_norm(cfg, x, p):
  x = x - (0 if cfg.norm == "rms_norm" else x.mean(-1, keepdims=True))
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.layer_norm_eps)
  return x * p["scale"] + p.get("bias", 0)


def np_dense(x, p):
  return x @ p["kernel"] + p.get("bias", 0)


def np_feed_forward(cfg, x, p):
  activation = (lambda a: a / (1 + np.exp(-a))) if cfg.feed_forward == "swiglu" else np_gelu
  if cfg.feed_forward == "gelu":
    return np_dense(np_gelu(np_dense(x, p["ffn_in"])), p["ffn_output"])
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


def test_blocks_that_are_computed_again_leave_less_memory_to_the_gradient():
  cfg = dataclasses.replace(TINY, num_layers=8, max_positions=64)
  x, mask = jnp.ones((4, 64, cfg.hidden_size)), jnp.ones((4, 64), bool)
  weights = encoder.Encoder(cfg).init(jax.random.key(0), x, mask, None)

  def lowered(**how):
    network = encoder.Encoder(cfg.computed(**how))
    return jax.jit(jax.grad(lambda w: network.apply(w, x, mask, None).sum())).lower(weights)

  def temporary_bytes(**how) -> int:
    return lowered(**how).compile().memory_analysis().temp_size_in_bytes

  assert temporary_bytes(unroll=1, remat=True) < 0.5 * temporary_bytes(unroll=1)
  # In a row only a barrier around a block keeps XLA from computing it once after all. GPUs and TPUs
  # respect it, CPUs do not. Dense layers have barriers of their own.
  barriers = [lowered(unroll=8, remat=r).as_text().count("optimization_barrier") for r in (0, 1)]
  assert barriers[1] > barriers[0]


def test_heads_equal_ones_written_out_in_numpy(weights):
  w = jax.tree.map(lambda a: np.asarray(a, np.float64) * 8, weights)
  small = jax.tree.map(jnp.float32, w)
  x = np.random.default_rng(0).normal(size=(2, 5, 8))
  head = w["discriminator"]["rtd_head"]
  expected = np_dense(np_gelu(np_dense(x, head["dense"])), head["logit"])[..., 0]
  got = jax.jit(heads.RtdHead(TINY).apply)(
    {"params": small["discriminator"]["rtd_head"]}, jnp.float32(x)
  )
  np.testing.assert_allclose(got, expected, atol=1e-5)

  cfg, x = generator_size(TINY, 0.5, 1.0), x[..., :4]
  head = w["generator"]["mlm_head"] | {"bias": np.arange(50.0)}
  hidden = np_norm(cfg, np_gelu(np_dense(x, head["dense"])), head["layer_norm"])
  expected = hidden @ w["embeddings"]["word"].T + head["bias"]
  got = jax.jit(heads.MlmHead(cfg).apply)(
    {"params": jax.tree.map(jnp.float32, head)}, jnp.float32(x), small["embeddings"]["word"]
  )
  np.testing.assert_allclose(got, expected, atol=1e-4)  # the bias reaches 49: eps 6e-8 x 49 x 30


def test_padding_never_changes_the_logits_of_real_tokens(weights):
  ids, segments, mask = inputs(12)
  tower, noise = weights["discriminator"], np.random.default_rng(1).integers(0, 50, ids.shape)
  of_noise = np.where(mask, ids, noise), np.where(mask, segments, 1)
  states = [
    encode(TINY, weights["embeddings"], tower["encoder"], *tokens, mask)
    for tokens in ((ids, segments), of_noise)
  ]
  a, b = (heads.RtdHead(TINY).apply({"params": tower["rtd_head"]}, x) for x in states)
  np.testing.assert_array_equal(a[mask], b[mask])
  assert np.isfinite(a).all()


# Dropout.

make_dropout_seeds = jax.jit(layers.make_dropout_seeds, static_argnums=1)


def test_dropout_drops_the_rate_and_keeps_the_mean():
  seeds, _ = make_dropout_seeds(jax.random.split(jax.random.key(0), (64, 2)), 1)
  x = jnp.ones((64, 100, 100))
  for rate in (0.1, 0.5):
    y = np.asarray(layers.dropout(x, rate, seeds))
    n = y.size
    # Five standard deviations of a binomial share.
    assert abs((y == 0).mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / n)
    assert set(np.unique(y)) == {0.0, np.float32(1 / (1 - rate))}


def test_dropout_sites_rows_layers_and_neighbours_are_independent():
  keys = jax.random.split(jax.random.key(3), (8, 2))
  first, others = make_dropout_seeds(keys, 2)
  own = others[:, :, : layers.SITES_PER_LAYER]  # the last site's seeds are equal in all rows
  dropout_seeds = [first, *own[0].swapaxes(0, 1), *own[1].swapaxes(0, 1)]
  kept = np.stack(
    [np.asarray(layers.dropout(jnp.ones((8, 64, 256)), 0.5, s)) > 0 for s in dropout_seeds]
  )
  streams = kept.reshape(len(dropout_seeds) * 8, -1) * 2.0 - 1
  n = streams.shape[1]
  correlation = streams @ streams.T / n - np.eye(len(streams))
  # 56 x 55 / 2 pairs of independent streams: beyond 5.5 sigma once in 17,000 tests of this size.
  assert np.abs(correlation).max() < 5.5 / math.sqrt(n)
  for lag in (1, 2, 64, 255, 256, 257):
    along = (streams[:, lag:] * streams[:, :-lag]).mean()
    assert abs(along) < 5 / math.sqrt(streams.size - lag * len(streams)), lag


def test_dropout_depends_on_the_row_key_and_on_nothing_else_in_the_batch():
  keys = jax.random.split(jax.random.key(0), (4, 2))
  x = jax.random.normal(jax.random.key(1), (4, 6, 8))
  whole, _ = make_dropout_seeds(keys, 3)
  alone, _ = make_dropout_seeds(keys[2:3], 3)
  found = layers.dropout(x, 0.3, whole)[2:3]
  np.testing.assert_array_equal(found, layers.dropout(x[2:3], 0.3, alone))


def test_dropout_of_zero_costs_nothing():
  seeds, _ = layers.make_dropout_seeds(jax.random.split(jax.random.key(0), (2, 2)), 1)
  program = jax.make_jaxpr(lambda x: layers.dropout(x, 0.0, seeds))(jnp.ones((2, 3)))
  assert not program.eqns


def test_cudnn_attention_refuses_dropout_that_it_cannot_do():
  cfg = dataclasses.replace(TINY, attention_dropout=0.1).computed(attention="cudnn")
  q = jnp.zeros((1, 2, 2, 4))
  with pytest.raises(ValueError, match="no dropout"):
    seeds = jnp.zeros((1, 2), jnp.uint32)
    attention.attend(cfg, attention.Inputs(q, q, q, jnp.ones((1, 2), bool), None, seeds))


def test_the_four_sites_of_dropout_are_where_numpy_puts_them():
  """The embeddings before their projection, the probabilities, and what two residuals add."""
  cfg = dataclasses.replace(TINY, num_layers=1, dropout=0.3, attention_dropout=0.4)
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: networks.init_encoder(cfg, jax.random.key(0)))
  p = jax.tree.map(lambda a: rng.normal(0, 0.3, a.shape), shapes)
  x = rng.normal(size=(2, 12, 6))

  @jax.jit
  def run(p, x):
    dropout_seeds = layers.make_dropout_seeds(jax.random.split(jax.random.key(5), (2, 2)), 1)

    def kept(shape, rate, seeds):
      return layers.dropout(jnp.ones((2, *shape)), rate, seeds)

    first, later = dropout_seeds[0], dropout_seeds[1][0].swapaxes(0, 1)
    masks = (
      kept((12, 6), 0.3, first),
      kept((2, 12, 12), 0.4, later[0]),
      kept((12, 8), 0.3, later[1]),
      kept((12, 8), 0.3, later[2]),
    )
    args = {"params": p}, x, jnp.ones((2, 12), bool), dropout_seeds
    return encoder.Encoder(cfg).apply(*args), masks

  got, masks = jax.tree.map(np.asarray, run(jax.tree.map(jnp.float32, p), jnp.float32(x)))

  def np_softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

  layer = jax.tree.map(lambda a: a[0], p["layers"])
  states = np_dense(x * masks[0], p["project"])
  qkv = np.einsum("bld,dihk->ibhlk", states, layer["qkv"]["kernel"])
  q, k, v = qkv + layer["qkv"]["bias"][:, None, :, None]
  shown = np_softmax(q @ k.swapaxes(-1, -2) / math.sqrt(4)) * masks[1]
  y = np.einsum("bhlk,hkd->bld", shown @ v, layer["attention_output"]["kernel"])
  y = (y + layer["attention_output"]["bias"]) * masks[2]
  states = np_norm(cfg, states + y, layer["attention_norm"])
  y = np_dense(np_gelu(np_dense(states, layer["ffn_in"])), layer["ffn_output"])
  states = np_norm(cfg, states + y * masks[3], layer["ffn_norm"])
  # Rounding of float32 as in the test without dropout; another mask changes states by about 1.
  np.testing.assert_allclose(got, states, atol=2e-4)
