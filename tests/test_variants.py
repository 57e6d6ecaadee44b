"""Every kind of layer equals one written out with loops in NumPy, in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import long_except
from test_model import encode, inputs, np_encoder, random_weights
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
  "blocks in pairs": {"compute": Compute(unroll=2)},
  "blocks computed again": {"compute": Compute(remat=True)},
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


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_equals_one_written_out_in_numpy(name):
  cfg = dataclasses.replace(BERT, **VARIANTS[name])
  tables, network = random_weights(cfg)
  ids, types, mask = inputs()
  expected, found = (f(cfg, tables, network, ids, types, mask) for f in (np_encoder, encode))
  # Rounding of float32 through three layers: values up to 20, eps 6e-8, about 50 operations deep.
  np.testing.assert_allclose(found[mask], expected[mask], atol=1e-4)


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


@pytest.mark.parametrize("changes", [{}, {**MODERN, "global_every": 2, "window": 4}])
def test_bfloat16_stays_near_float32(changes):
  cfg = dataclasses.replace(BERT, **changes)
  tables, network = random_weights(cfg)
  exact = encode(cfg, tables, network, *inputs())
  coarse = encode(cfg.computed(dtype="bfloat16"), tables, network, *inputs())
  # 8 bits a number, added up over three layers; the sum of the blocks stays float32.
  assert 0 < np.abs(coarse - exact).max() < 0.1


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_heads": 8, "positions": "rope"}, "even head size, got 1"),
    ({"window": 1}, "window must be at least 2, got 1"),
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


# Each has code of its own in the network.
APART = "bert", "coco_lm", "electric", "two_tower", "frozen", "gdes"


@pytest.mark.parametrize(
  "name",
  long_except(
    list(COMBINATIONS).index("bert"),
    of=list(COMBINATIONS),
    nightly=[i for i, name in enumerate(COMBINATIONS) if name not in APART],
  ),
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
