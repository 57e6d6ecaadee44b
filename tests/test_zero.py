"""ZeRO-1: a sharded optimizer is the same optimizer, with the same checkpoints."""

import dataclasses
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_step import make_batch, make_spec
from test_train import STEPS, assert_close, interrupt_at, programs_of, saved

from electra_jax.core import optimizer, params, step, zero
from electra_jax.pretrain import train
from electra_jax.pretrain.run import make_train_fns
from electra_jax.runtime import parallel
from electra_jax.runtime.checkpoint import Checkpoints

PLAIN = optimizer.OptimizerConfig("adamw", 1e-3, "joined", 1, 1, 0.01, 0.9, 0.999, 1e-6, 0.5)
APART = optimizer.OptimizerConfig(
  "electra_adam", 1e-3, "product", 0, 1, 0.01, 0.9, 0.999, 1e-6, 0.5, True, 2e-3, 0.0, 0.2
)


def run(cfg, sharded: bool, steps: int = 3):
  spec = make_spec(0.0)
  if not cfg.separate_optimizers:  # one network, which compiles in half the time
    spec = dataclasses.replace(spec, objective="bert")
  programs = make_train_fns(spec, dataclasses.replace(cfg, sharded=sharded), 50, 7, 1)
  state = programs.init_state(parallel.replicate(programs.init_params()))
  held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(state.opt_state))
  norms = []
  for t in range(steps):
    state, metrics = programs.train_step(state, next(parallel.prefetch([make_batch(t)])))
    values = metrics.unpack(metrics.read())
    norms.append([values[name] for name in ("grad_norm", "update_norm", "param_norm")])
  return jax.device_get(programs.sharding.to_global(state)), np.array(norms), held


@pytest.mark.parametrize(
  "cfg",
  [
    pytest.param(PLAIN, id="one norm", marks=pytest.mark.long),
    pytest.param(APART, id="a norm each", marks=pytest.mark.long),
  ],
)
def test_an_optimizer_sharded_over_eight_devices_is_the_replicated_one_to_rounding(cfg):
  (whole, norms, all_held), (parts, same_norms, held) = run(cfg, False), run(cfg, True)
  assert held < all_held / 6  # an eighth, and the few vectors that eight does not divide
  np.testing.assert_allclose(same_norms, norms, rtol=1e-5)
  assert jax.tree.map(jnp.shape, parts) == jax.tree.map(jnp.shape, whole)
  # The gradient is added up in another order, 1e-7 of it; three steps of 1e-3 to 2e-3 move a weight
  # by no more than 1e-2, and Adam turns a gradient that is all rounding into steps near eps.
  weights = parts.params, whole.params
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), *weights)
  assert float(jnp.abs(whole.params["embeddings"]["word"]).max()) > 0.01
  states = parts.opt_state, whole.opt_state
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), *states)


def test_the_norm_of_sharded_arrays_is_numpys():
  rng = np.random.default_rng(0)
  tree = {"a": rng.normal(size=(3, 16)), "b": rng.normal(size=5), "c": {"d": rng.normal(size=8)}}
  tree = jax.tree.map(np.float32, tree)
  measure = zero.norm(tree, 8)

  def norms(tree, row):
    own = {"b": tree["b"], "a": jax.lax.dynamic_slice_in_dim(tree["a"], row * 2, 2, 1)}
    own["c"] = {"d": jax.lax.dynamic_slice_in_dim(tree["c"]["d"], row, 1)}
    return measure(own), measure({"b": tree["b"]})  # all of it, and one network's

  found = jax.pmap(norms, parallel.AXIS, in_axes=(None, 0), out_axes=None)(tree, np.arange(8))
  flat = np.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
  np.testing.assert_allclose(found, [np.linalg.norm(flat), np.linalg.norm(tree["b"])], rtol=1e-6)


def test_a_part_of_the_weights_can_be_clipped_by_itself():
  grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.3])}
  clipped, _ = optimizer.clip_by_norm(1.0, optax.tree.norm).update(grads, optax.EmptyState())
  expected, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
  jax.tree.map(np.testing.assert_array_equal, clipped, expected)


@pytest.mark.long
@pytest.mark.parametrize("first", [False, True], ids=["whole, then parts", "parts, then whole"])
def test_checkpoints_interchange(straight, tiny_config, tmp_path, monkeypatch, first):
  tiny_config.optimizer.sharded = first
  interrupt_at(monkeypatch, 5, lambda: signal.raise_signal(signal.SIGTERM))
  assert train.train(tiny_config, tmp_path).step == 5
  at_stop = saved(tmp_path, 5)
  tiny_config.optimizer.sharded = not first
  programs = programs_of(tiny_config)
  checkpoints = Checkpoints(tmp_path, keep=5, keep_every_steps=0)
  state, _ = checkpoints.restore(5, programs.sharding.shapes())  # checks every array's sum
  again = programs.sharding.to_global(programs.sharding.to_local(state))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(state))
  checkpoints.close()
  assert train.train(tiny_config, tmp_path).step == STEPS
  ends = saved(tmp_path)
  assert {k: v["shape"] for k, v in ends.items()} == {k: v["shape"] for k, v in at_stop.items()}
  assert_close(tmp_path, straight)


@pytest.mark.parametrize("first", [False, True], ids=["replicated", "sharded"])
def test_a_checkpoint_is_the_same_of_a_sharded_and_a_replicated_optimizer(tmp_path, first):
  numbers = np.arange(48, dtype=np.float32)
  state = step.TrainState(
    np.int32(1), {"w": numbers}, {"m": numbers.reshape(3, 16), "few": numbers[:3]}
  )
  shapes = jax.eval_shape(lambda: state)
  one, other = (
    parallel.StateSharding(shapes, step.TrainState(step=False, params=False, opt_state=sharded))
    for sharded in (first, not first)
  )
  checkpoints = Checkpoints(tmp_path, keep=1, keep_every_steps=0)
  made = one.init_state(lambda params: jax.tree.map(jnp.asarray, state))
  checkpoints.save(1, one.to_global(made(parallel.replicate(state.params))), {})
  checkpoints.wait()
  restored, _ = checkpoints.restore(1, other.shapes())
  checkpoints.close()
  local = other.to_local(restored)
  assert local.opt_state["m"].shape == ((3, 16) if first else (8, 3, 2))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.to_global(local)), state)


def test_a_mapped_step_donates_and_keeps_replicated_and_sharded_arrays():
  state = step.TrainState(jnp.int32(0), {"w": jnp.ones(16)}, {"m": jnp.zeros((16, 2))})
  shapes = jax.eval_shape(lambda: state)
  sharding = parallel.StateSharding(
    shapes, step.TrainState(step=False, params=False, opt_state=True)
  )

  def add(state, batch):
    part = jax.tree.map(lambda m: m + batch.sum(), state.opt_state)
    return state.replace(step=state.step + 1, opt_state=part), {"sum": batch.sum()}

  old = sharding.init_state(lambda params: state.replace(params=params))(
    parallel.replicate(state.params)
  )
  new, _ = parallel.map_train_step(add, sharding.axes)(old, jnp.ones((8, 3)))
  assert old.params["w"].is_deleted() and old.opt_state["m"].is_deleted()
  assert (int(new.step), new.opt_state["m"].shape) == (1, (8, 2, 2))
  assert new.params["w"].shape == (16,) and new.params["w"].sharding.is_fully_replicated


def test_an_array_of_no_numbers_is_split_along_its_other_axis_or_not_at_all():
  assert params.split_axis((0, 16), 8) == 1
  assert params.split_axis((0, 3), 8) is None
