"""Without gradients written by hand, JAX differentiates networks forwards and twice, too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import long_except
from test_objectives import RATES, D, keys_of, make_batch

from electra_jax.core import networks, objectives
from electra_jax.core.gradients import plain_gradients

MODERN = {
  "block": "pre_norm", "norm": "layer_norm_no_bias", "feed_forward": "geglu", "positions": "rope",
  "biases": False, "token_types": False, "head_norm": True,
}  # fmt: skip


def make(kinds):
  cfg = dataclasses.replace(D, **kinds)
  spec = objectives.PretrainSpec(networks.generator_size(cfg, 0.5, 1.0), cfg, RATES)
  return spec, jax.jit(lambda: objectives.init_params(spec, jax.random.key(1)))()


@pytest.mark.parametrize("kinds", long_except(0, of=[{}, MODERN]), ids=["bert", "modern"])
def test_the_slope_of_the_loss_along_a_direction_is_that_of_the_gradient(kinds):
  spec, params = make(kinds)
  batch, objective = make_batch(), objectives.make(spec)

  def loss(params):
    terms = objective(params, batch, keys_of(batch), None).values()
    return sum(jnp.sum(term.total / term.count) for term in terms if term.in_loss)

  def slope_of(params, direction):
    return jax.jvp(loss, (params,), (direction,))[1]

  rng = np.random.default_rng(2)
  direction = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
  with pytest.raises(TypeError, match="forward-mode"):
    jax.jit(slope_of).lower(params, direction)
  gradient = jax.jit(jax.grad(loss))(params)
  with plain_gradients():
    plain = jax.jit(jax.grad(loss))(params)
    slope = jax.jit(lambda *x: slope_of(*x))(params, direction)  # traced anew
  products = jax.tree.map(lambda x, y: np.vdot(np.float64(x), np.float64(y)), gradient, direction)
  # Sums of some thousand float32 products in another order.
  assert float(slope) == pytest.approx(sum(jax.tree.leaves(products)), rel=1e-4)
  for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_the_hessian_of_an_encoder_is_the_change_of_its_gradient():
  spec, params = make({})
  batch, rng = make_batch(B=2), np.random.default_rng(0)
  target = jnp.float32(rng.normal(size=(2, 16, 16)))
  project = params["discriminator"]["encoder"]["project"]

  def loss(bias):
    own = {**params["discriminator"]["encoder"], "project": {**project, "bias": bias}}
    changed = {**params, "discriminator": {**params["discriminator"], "encoder": own}}
    states = networks.main_states(spec, changed, batch.ids, batch, None)
    return ((states - target) ** 2).mean()

  with plain_gradients():
    hessian = np.asarray(jax.jit(jax.hessian(loss))(project["bias"]))
  np.testing.assert_allclose(hessian, hessian.T, atol=1e-5)
  v, step = jnp.float32(rng.normal(size=16)), 1e-2
  gradient = jax.jit(jax.grad(loss))
  change = gradient(project["bias"] + step * v) - gradient(project["bias"] - step * v)
  # The third derivative times the step squared, and float32's rounding over the step.
  np.testing.assert_allclose(hessian @ v, change / (2 * step), atol=2e-3 * np.abs(hessian).max())
