"""The original's Adam and schedule against NumPy; optax's choices against their definitions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import long_except
from test_objectives import fresh

from electra_jax.core import learning_rates, masking, objectives, optimizer, step
from electra_jax.core.networks import generator_size
from electra_jax.core.optimizer import OptimizerConfig
from electra_jax.core.params import JOINED, named, tree_norm
from electra_jax.core.transformer_config import TransformerConfig

PAPER = OptimizerConfig("electra_adam", 5e-4, "product", 10_000, 1, 0.01, 0.9, 0.999, 1e-6, 1)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_product_schedule_is_the_originals(power):
  schedule = learning_rates.make_schedule(dataclasses.replace(PAPER, decay_power=power), 1_000_000)
  for t in (0, 1, 5000, 9999, 10_000, 500_000, 750_000, 1_000_000):
    expected = 5e-4 * (1 - t / 1_000_000) ** power * min(1, t / 10_000)
    assert float(schedule(jnp.int32(t))) == pytest.approx(expected, rel=1e-6, abs=1e-12), t
  assert max(float(schedule(t)) for t in range(9_000, 11_000, 100)) < 5e-4  # never the peak


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_joined_schedule_is_the_one_that_optax_joins(power):
  ours = learning_rates.joined_schedule(1e-3, 6, 57, power)
  rises, decays = optax.linear_schedule(0, 1e-3, 6), optax.polynomial_schedule(1e-3, 0, power, 51)
  optaxs = optax.join_schedules([rises, decays], [6])
  t = np.arange(70)
  np.testing.assert_allclose(ours(t), optaxs(t), atol=1e-9)  # ten ulps of the peak


@pytest.mark.parametrize("steps", [6, 41, 230])
def test_steps_that_are_data_are_divided_by_with_the_bits_of_constants(steps):
  def over(divide):
    # Of scalars, as a step is.
    return jax.jit(lambda t, *n: jax.lax.map(lambda t: divide(t, *n), t))

  t = jnp.arange(steps + 1)
  expected = over(lambda t: t / steps)(t)
  np.testing.assert_array_equal(over(learning_rates._share)(t, steps), expected)
  np.testing.assert_allclose(expected, np.arange(steps + 1) / steps, rtol=2e-7)  # two roundings


@pytest.mark.parametrize("name", ["product", "joined"])
@pytest.mark.parametrize(("steps", "warmup_steps"), [(57, 6), (230, 41), (345, 0), (2, 0)])
def test_a_schedule_is_the_same_whether_its_steps_are_constants_or_data(name, steps, warmup_steps):
  def rates(t, warmup_steps, steps):
    cfg = dataclasses.replace(PAPER, schedule=name, warmup_steps=warmup_steps)
    return learning_rates.make_schedule(cfg, steps)(t)

  t = jnp.arange(steps + 1)
  constant = jax.jit(rates, static_argnums=(1, 2))(t, warmup_steps, steps)
  data = jax.jit(rates)(t, warmup_steps, steps)
  np.testing.assert_allclose(data, constant, atol=5e-4 * 1.2e-7)  # 1 - t / T may be fused or not


def test_schedules_without_warm_up_start_at_the_peak():
  assert float(learning_rates.product_schedule(1.0, 0, 10, 1.0)(0)) == 1.0
  assert float(learning_rates.joined_schedule(1.0, 0, 10, 1.0)(0)) == 1.0


def tree(seed):
  rng = np.random.default_rng(seed)
  return {
    "dense": {"kernel": rng.normal(size=(3, 4)), "bias": rng.normal(size=4)},
    "ffn_norm": {"scale": rng.normal(size=4), "bias": rng.normal(size=4)},
    "word": rng.normal(size=(5, 3)),
  }


def test_electra_adam_equals_numpy_over_several_steps():
  cfg = OptimizerConfig("electra_adam", 0.1, "product", 2, 1.0, 0.01, 0.9, 0.999, 1e-6, 1.0)
  tx = optimizer.make_optimizer(cfg, learning_rates.make_schedule(cfg, 10))
  params = jax.tree.map(jnp.float32, tree(0))
  state = tx.init(params)
  p = jax.tree.map(np.float64, tree(0))
  m, v = (jax.tree.map(np.zeros_like, p) for _ in range(2))
  for t in range(6):
    grads = tree(t + 1)
    updates, state = tx.update(jax.tree.map(jnp.float32, grads), state, params)
    params = optax.apply_updates(params, updates)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    assert norm > 1  # so that clipping is at work
    g = jax.tree.map(lambda g, norm=norm: g / norm, grads)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, v, g)
    lr = 0.1 * (1 - t / 10) * min(1, t / 2)
    decayed = {"dense": {"kernel": 1, "bias": 0}, "ffn_norm": {"scale": 0, "bias": 0}, "word": 1}
    p = jax.tree.map(
      lambda p, m, v, d, lr=lr: p - lr * (m / (np.sqrt(v) + 1e-6) + 0.01 * d * p), p, m, v, decayed
    )
  # Six updates of size lr ~ 0.1 in float32: 6e-8 relative each.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), params, p)
  assert int(adam_of(state).count) == 6


def adam_of(state):
  """Returns the part of an optimizer's state that has the moments."""
  parts = jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "mu"))
  (adam,) = (s for s in parts if hasattr(s, "mu"))
  return adam


def test_a_small_gradient_is_not_clipped():
  tx = optimizer.make_optimizer(PAPER, lambda _: 1.0)
  small = jax.tree.map(lambda x: jnp.float32(x) * 1e-3, tree(0))
  _, state = tx.update(small, tx.init(small), small)
  mu = adam_of(state).mu
  jax.tree.map(lambda m, g: np.testing.assert_allclose(m, 0.1 * g, rtol=1e-6), mu, small)


def test_decay_spares_biases_and_layer_norms_of_the_real_networks():
  cfg = TransformerConfig(50, 6, 8, 2, 2, 16, 12)
  spec = objectives.PretrainSpec(cfg, cfg, masking.Masking(0.15, 0.85, 1.0, 4, ()))
  shapes = jax.eval_shape(lambda: objectives.init_params(spec, jax.random.key(0)))
  mask = optimizer.decay_mask(shapes)
  for path, decays in jax.tree_util.tree_leaves_with_path(mask):
    name = jax.tree_util.keystr(path)
    assert decays == (not ("bias" in name or "norm" in name)), name
  assert mask["embeddings"] == {
    "word": True, "position": True, "token_type": True,
    "layer_norm": {"scale": False, "bias": False},
  }  # fmt: skip


def test_adamw_is_optaxs_with_bias_correction():
  cfg = OptimizerConfig("adamw", 0.1, "joined", 0, 1.0, 0.0, 0.9, 0.999, 1e-6, 1e9)
  tx = optimizer.make_optimizer(cfg, lambda _: 0.1)
  p = {"kernel": jnp.array([1.0])}
  updates, _ = tx.update({"kernel": jnp.array([0.5])}, tx.init(p), p)
  # With the correction the first step is lr whatever the gradient; without, lr x 0.1 / sqrt(0.001).
  assert float(updates["kernel"][0]) == pytest.approx(-0.1, rel=1e-4)


@pytest.mark.parametrize("name", ["electra_adam", "adamw", "muon"])
@pytest.mark.parametrize("apart", [False, True])
def test_with_another_runs_moments_the_next_update_is_that_runs(name, apart):
  """From one optimizer of one network to one or two of two networks."""
  cfg = OptimizerConfig(name, 0.1, "joined", 0, 1.0, 0.01, 0.9, 0.999, 1e-6, 1e9)
  both = dataclasses.replace(cfg, separate_optimizers=apart)
  params = {"discriminator": {"encoder": tree(0)}}
  more = {"generator": {"encoder": tree(1)}, "discriminator": {**params["discriminator"]}}
  more["discriminator"]["rtd_head"] = tree(2)

  def groups(params):
    return {k: jax.tree.map(lambda _, k=k: k, v) for k, v in params.items()}

  tx, other = (
    optimizer.make_optimizer(c, lambda _: 0.1, groups if c.separate_optimizers else None)
    for c in (cfg, both)
  )
  params, more = jax.tree.map(jnp.float32, (params, more))
  state = tx.init(params)
  for t in range(3):
    _, state = tx.update({"discriminator": {"encoder": tree(t + 3)}}, state, params)
  taken, modules = step.with_moments(other.init(more), state)
  assert modules == ["discriminator/encoder"]
  grads = jax.tree.map(jnp.float32, {"encoder": tree(7)})
  expected, _ = tx.update({"discriminator": grads}, state, params)
  new = {"generator": {"encoder": tree(8)}, "discriminator": {**grads, "rtd_head": tree(9)}}
  found, _ = other.update(jax.tree.map(jnp.float32, new), taken, more)
  # The same operations, in another program.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8),
    found["discriminator"]["encoder"], expected["discriminator"]["encoder"],
  )  # fmt: skip


def two_networks(cfg, weight):
  """One update of a generator and a discriminator whose gradient is `weight` times larger."""
  params = {"generator": {"w": jnp.ones(3)}, "discriminator": {"w": jnp.ones(3)}}
  grads = {"generator": {"w": jnp.arange(3.0)}, "discriminator": {"w": weight * jnp.ones(3)}}
  groups = {name: {"w": name} for name in params}
  find_groups = (lambda _: groups) if cfg.separate_optimizers else None
  tx = optimizer.make_optimizer(cfg, lambda _: 0.1, find_groups)
  return tx.update(grads, tx.init(params), params)[0]


def test_with_separate_optimizers_the_loss_weight_leaks_through_no_global_clip():
  plain = dataclasses.replace(PAPER, clip_norm=1.0)
  apart = dataclasses.replace(plain, separate_optimizers=True)
  small, large = two_networks(apart, 1.0), two_networks(apart, 50.0)
  np.testing.assert_array_equal(small["generator"]["w"], large["generator"]["w"])
  # With one clip for both the generator's gradient shrinks as the other's grows.
  small, large = two_networks(plain, 1.0), two_networks(plain, 50.0)
  assert np.abs(small["generator"]["w"] - large["generator"]["w"]).max() > 1e-4


def test_with_separate_optimizers_each_network_has_its_own_rate_decay_and_clip():
  own = dict(generator_learning_rate=1e-3, generator_weight_decay=0.0, generator_clip_norm=0.25)
  cfg = dataclasses.replace(PAPER, separate_optimizers=True, **own)
  got = two_networks(cfg, 2.0)
  g = np.arange(3.0) * 0.25 / np.sqrt(5)
  rate = 0.1 * 1e-3 / PAPER.learning_rate
  expected = -rate * (0.1 * g) / (np.sqrt(0.001 * g * g) + 1e-6)
  np.testing.assert_allclose(got["generator"]["w"], expected, rtol=1e-5)
  d = np.full(3, 1 / np.sqrt(3))
  expected = -0.1 * ((0.1 * d) / (np.sqrt(0.001 * d * d) + 1e-6) + 0.01)
  np.testing.assert_allclose(got["discriminator"]["w"], expected, rtol=1e-5)


@pytest.mark.parametrize("separate", [False, True])
def test_what_is_frozen_does_not_move_and_has_no_optimizer_state(separate):
  cfg = dataclasses.replace(PAPER, separate_optimizers=separate)
  params = {"generator": jnp.ones(3), "discriminator": jnp.ones(3)}
  groups = {"generator": "frozen", "discriminator": "discriminator"}
  tx = optimizer.make_optimizer(cfg, lambda _: 0.1, lambda _: groups)
  state = tx.init(params)
  updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
  assert not updates["generator"].any() and updates["discriminator"].all()
  assert sum(x.size for x in jax.tree.leaves(state) if x.ndim) == 2 * 3


@pytest.mark.parametrize("name", sorted(optimizer.OPTIMIZERS))
def test_without_a_gradient_only_kernels_and_embeddings_shrink(name):
  cfg = dataclasses.replace(PAPER, name=name, weight_decay=0.25)
  tx, params = optimizer.make_optimizer(cfg, lambda _: 0.5), modern_params()
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates = named(jax.jit(tx.update)(zeros, tx.init(params), params)[0])
  for path, x in named(params).items():
    decay = 0 if "bias" in path or "norm" in path else 0.5 * 0.25
    np.testing.assert_allclose(updates[path], -decay * x, rtol=1e-6, err_msg=path)


def modern_params(kind="geglu"):
  cfg = TransformerConfig(
    **{"vocab_size": 40, "embedding_size": 12, "hidden_size": 16, "num_layers": 3, "num_heads": 2},
    **{"ffn_size": 24, "max_positions": 8, "feed_forward": kind, "block": "pre_norm"},
    **{"positions": "rope", "qk_norm": True, "head_norm": True},
  )
  rates = masking.Masking(0.25, 0.85, 1.0, 4, (0, 2, 3, 4))
  spec = objectives.PretrainSpec(generator_size(cfg, 1.0, 1 / 3), cfg, rates, tying="gdes")
  return fresh(spec)


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_except(1, of=["gelu", "geglu"]))
def test_muon_takes_the_matrices_of_hidden_layers_and_nothing_else(kind):
  params = modern_params(kind)
  taken = matrices(params)
  assert {name.split("/")[-2] for name in taken} == set(optimizer.MATRICES)
  for name, x in named(params).items():
    others = x.ndim < 2 or "embedding" in name or "norm" in name or "bias" in name
    assert (name in taken) != (others or "logit" in name), name


def matrices(params) -> set[str]:
  axes = jax.tree.map(lambda _, axes: axes is not None, params, optimizer.matrix_axes(params))
  return {name for name, is_matrix in named(axes).items() if is_matrix}


def orthogonalized(matrix):
  """Newton-Schulz in float64, as in Jordan 2024."""
  x = matrix.astype(np.float64) / np.linalg.norm(matrix)
  x = x.T if x.shape[0] > x.shape[1] else x
  for _ in range(5):
    square = x @ x.T
    x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
  return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.slow
def test_muons_first_update_is_each_matrix_orthogonalized_by_itself():
  params, rng = modern_params(), np.random.default_rng(0)
  grads = jax.tree.map(lambda x: jnp.float32(rng.normal(size=x.shape)), params)
  cfg = OptimizerConfig("muon", 0.1, "wsd", 0, 1, 0.0, 0.9, 0.98, 1e-6, 1e9)
  updates = {}
  for name in ("muon", "adamw"):
    tx = optimizer.OPTIMIZERS[name].make(cfg, lambda step: 0.1)
    updates[name] = jax.jit(tx.update)(grads, tx.init(params), params)[0]
  layer, of = updates["muon"]["discriminator"]["encoder"]["layers"], 2
  grad = jax.tree.map(lambda g: np.asarray(g[of]), grads["discriminator"]["encoder"]["layers"])
  found, given = np.asarray(layer["qkv"]["kernel"][of]), grad["qkv"]["kernel"]
  for part in range(3):  # q, k and v, each [16, 2, 8]
    expected = orthogonalized(given[:, part].reshape(16, 16)) * -0.1 * 0.2 * 4
    # Five products of float32 in a row.
    np.testing.assert_allclose(found[:, part].reshape(16, 16), expected, atol=1e-5)
  found, given = np.asarray(layer["ffn_in"]["kernel"][of]), grad["ffn_in"]["kernel"]
  for part in range(2):  # what is activated and its gate
    expected = orthogonalized(given[:, part]) * -0.1 * 0.2 * 24**0.5
    np.testing.assert_allclose(found[:, part], expected, atol=1e-5)
  found, given = layer["attention_output"]["kernel"][of], grad["attention_output"]["kernel"]
  expected = orthogonalized(given.reshape(16, 16)) * -0.1 * 0.2 * 4
  np.testing.assert_allclose(np.asarray(found).reshape(16, 16), expected, atol=1e-5)
  both = named(updates["muon"]), named(updates["adamw"])
  for name in both[0].keys() - matrices(params):
    np.testing.assert_array_equal(both[0][name], both[1][name], err_msg=name)


def test_wsd_does_not_depend_on_the_steps_before_its_decay():
  short, long = (learning_rates.wsd_schedule(2.0, 5, steps, 20) for steps in (60, 100))
  for t in range(40):
    assert short(t) == long(t)
  # 1 - sqrt: a quarter of the way down after a sixteenth of the decay.
  assert float(short(40 + 20 / 16)) == pytest.approx(2.0 * 0.75)
  assert float(short(60)) == float(long(100)) == 0


def test_the_norm_of_a_tree_of_large_and_small_arrays_is_numpys():
  rng = np.random.default_rng(0)
  shapes = {"large": (2, JOINED), "limit": (JOINED,), "small": (3, 4), "one": ()}
  tree = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
  for names in (shapes, ["large"], ["small", "one"], []):
    part = {name: tree[name] for name in names}
    flat = np.concatenate([np.zeros(0), *(x.ravel() for x in part.values())])
    # Sums of float32 squares: the largest has 260,000.
    np.testing.assert_allclose(tree_norm(part), np.linalg.norm(flat), rtol=1e-6)
