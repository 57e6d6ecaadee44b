"""The step: devices, microbatches and order change nothing; keys are functions of the row alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import long_except

from electra_jax.core import learning_rates, masking, objectives, optimizer, step, terms
from electra_jax.core.batch import Batch
from electra_jax.core.networks import generator_size
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.runtime import parallel

STEPS, B, L = 3, 16, 16


def make_spec(dropout):
  d = TransformerConfig(60, 8, 16, 2, 2, 32, L, dropout=dropout, attention_dropout=dropout)
  rates = masking.Masking(0.25, 0.85, 1.0, 4, (0, 2, 3, 4))
  return objectives.PretrainSpec(generator_size(d, 0.5, 1.0), d, rates)


def make_batch(t):
  # Very uneven rows: some devices get eight times the tokens of others.
  rng = np.random.default_rng(t)
  lengths = np.where(np.arange(B) < B // 2, L, rng.integers(2, 5, B))
  mask = np.arange(L) < lengths[:, None]
  ids = np.where(mask, rng.integers(5, 60, (B, L)), 0).astype(np.int32)
  ids[:, 0] = 2
  return Batch(ids, np.zeros_like(ids), mask, np.arange(B, dtype=np.int32))


@functools.cache
def first_params():
  """The same with any dropout."""
  return jax.jit(lambda: objectives.init_params(make_spec(0.0), jax.random.key(1)))()


@functools.cache
def program(devices, accumulation, dropout):
  cfg = optimizer.OptimizerConfig("electra_adam", 1e-2, "product", 0, 1, 0.01, 0.9, 0.999, 1e-6, 1)
  schedule = learning_rates.make_schedule(cfg, 100)
  tx = optimizer.make_optimizer(cfg, schedule)
  objective = objectives.make(make_spec(dropout))
  one = step.make_train_step(objective, tx, schedule, seed=7, accumulation=accumulation)
  mapped = jax.pmap(
    one, axis_name="data", in_axes=(None, 0), out_axes=(None, None),
    devices=jax.devices()[:devices],
  )  # fmt: skip
  return mapped, tx


def train(devices, accumulation=1, dropout=0.0, order=None):
  mapped, tx = program(devices, accumulation, dropout)
  state = step.init_state(first_params(), tx)
  history = []
  for t in range(STEPS):
    batch = make_batch(t)
    if order is not None:
      batch = jax.tree.map(lambda x: x[order], batch)
    batch = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), batch)
    state, metrics = mapped(state, batch)
    history.append(jax.device_get(metrics))
  return jax.device_get(state), history


@pytest.fixture(scope="module")
def reference():
  return train(1)


def same(a, b):
  state, history = a
  expected, expected_history = b
  for got, want in zip(history, expected_history, strict=True):
    for name, (total, count) in want["terms"].items():
      # Counts are whole numbers: the masks and samples are the very same.
      assert np.array_equal(got["terms"][name][1], count), name
      np.testing.assert_allclose(got["terms"][name][0], total, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(got["grad_norm"], want["grad_norm"], rtol=1e-4)
  # Adam divides by the root of the squared gradient, so that a gradient that is all rounding still
  # moves a weight: 3 steps x lr 1e-2 x (no bias correction: up to 3.2) x 1e-4 relative rounding.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), state.params, expected.params
  )


@pytest.mark.slow
@pytest.mark.parametrize("devices", long_except(1, of=[2, 8]))
def test_devices_with_uneven_counts_equal_one_device(reference, devices):
  same(train(devices), reference)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "accumulation"), long_except(of=[(1, 4), (2, 2)]))
def test_uneven_microbatches_equal_the_large_batch(reference, devices, accumulation):
  same(train(devices, accumulation), reference)


@pytest.mark.long
def test_the_order_of_rows_changes_nothing(reference):
  same(train(2, order=np.random.default_rng(0).permutation(B)), reference)


@pytest.mark.long
def test_dropout_too_is_the_same_on_any_devices_and_microbatches():
  same(train(8, dropout=0.1), train(1, accumulation=2, dropout=0.1))


@pytest.mark.slow
def test_gradient_is_that_of_totals_over_global_counts(reference):
  # By hand, without psum, scan or pmap.
  spec, batch = make_spec(0.0), make_batch(0)
  params = first_params()
  keys = step.row_keys(7, jnp.int32(0), batch.row)

  def loss(params):
    t = objectives.make(spec)(params, batch, keys, jnp.int32(0))
    mlm, rtd = t["mlm_loss"], t["rtd_loss"]
    return mlm.total / mlm.count + 50 * rtd.total / rtd.count

  value, grads = jax.jit(jax.value_and_grad(loss))(params)
  metrics = reference[1][0]
  assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
  assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)


@pytest.mark.slow
def test_a_batch_of_padding_only_leaves_finite_parameters():
  spec = make_spec(0.0)
  tx = optax.sgd(1.0)
  one = step.make_train_step(objectives.make(spec), tx, lambda _: 1.0, seed=0)
  params = first_params()
  empty = jax.tree.map(np.zeros_like, make_batch(0))
  state, metrics = on_one_device(one)(step.init_state(params, tx), empty)
  assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
  jax.tree.map(np.testing.assert_array_equal, state.params, params)


def test_keys_differ_by_seed_step_and_row_and_by_nothing_else():
  def words(seed, t, rows):
    return jax.random.key_data(step.row_keys(seed, jnp.int32(t), jnp.array(rows))).tolist()

  assert words(0, 5, [3, 4]) == [*words(0, 5, [3]), *words(0, 5, [4])]
  seen = [words(s, t, [r])[0] for s in (0, 1) for t in (0, 1, 2) for r in (0, 1, 2)]
  assert len({tuple(own) for own, _ in seen}) == len(seen)
  shared = {tuple(words(s, t, [r])[0][1]) for s in (0, 1) for t in (0, 1, 2) for r in (0, 1, 2)}
  assert len(shared) == 6 and not shared & {tuple(own) for own, _ in seen}


@pytest.mark.slow
def test_evaluation_is_the_same_at_every_step_and_on_any_devices():
  spec = make_spec(0.1)
  params = first_params()
  evaluate = step.make_eval_step(objectives.make(spec), seed=7)
  batch, results = make_batch(0), []
  for devices in (1, 4):
    mapped = jax.pmap(
      evaluate, axis_name="data", in_axes=(None, 0), out_axes=None, devices=jax.devices()[:devices]
    )
    parts = jax.tree.map(lambda x, n=devices: x.reshape(n, -1, *x.shape[1:]), batch)
    results.append(jax.device_get(mapped(params, parts)))
  for name, (total, count) in results[0].items():
    np.testing.assert_allclose(results[1][name][0], total, rtol=1e-5, err_msg=name)
    assert np.array_equal(results[1][name][1], count), name


def on_one_device(function):
  """Maps over an axis of one device without `pmap`, which compiles for longer."""
  mapped = jax.jit(jax.vmap(function, in_axes=(None, 0), axis_name="data"))

  def call(x, batch):
    return jax.tree.map(lambda y: y[0], mapped(x, jax.tree.map(lambda y: y[None], batch)))

  return call


def test_what_a_step_reports_is_numpys_of_its_place_in_time():
  """The rate and the keys that it used, the norms of the gradient, the update, the new weights."""
  target = np.array([3.0, -1.0, 2.0])

  def objective(params, batch, keys, step):
    loss = 0.5 * jnp.sum((params["w"] - target) ** 2) * batch.padding_mask.sum()
    words = jax.random.key_data(keys)
    return {"loss": terms.Term(loss, batch.padding_mask.sum(), 2.0), "keys": terms.Term(words, 1)}

  def schedule(t):
    return 0.1 / (1 + t)

  tx = optax.sgd(schedule)
  one = on_one_device(step.make_train_step(objective, tx, schedule, seed=0))
  state = step.init_state({"w": jnp.zeros(3)}, tx)
  w = np.zeros(3)
  for t in range(3):
    state, found = one(state, make_batch(0))
    gradient, before = 2 * (w - target), w
    w = w - schedule(t) * gradient
    expected = {
      "loss": ((before - target) ** 2).sum(),
      "learning_rate": schedule(t),
      "grad_norm": np.linalg.norm(gradient),
      "update_norm": np.linalg.norm(w - before),
      "param_norm": np.linalg.norm(w),
    }
    for name, value in expected.items():
      assert float(found[name]) == pytest.approx(value, rel=1e-5), (t, name)  # some float32 sums
    keys = jax.random.key_data(step.row_keys(0, jnp.int32(t), np.arange(B, dtype=np.int32)))
    np.testing.assert_array_equal(found["terms"]["keys"][0], keys)
    assert int(state.step) == t + 1


@pytest.mark.parametrize("name", optimizer.OPTIMIZERS)
def test_a_restarted_state_counts_from_0_for_its_schedules_and_keeps_all_else(name):
  cfg = optimizer.OptimizerConfig(name, 0.1, "joined", 2, 1.0, 0.01, 0.9, 0.99, 1e-6, 1.0)
  tx = optimizer.make_optimizer(cfg, learning_rates.make_schedule(cfg, 10))
  state = step.init_state({"ffn_in": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}, tx)
  for _ in range(3):
    _, opt_state = tx.update(state.params, state.opt_state, state.params)
    state = state.replace(step=state.step + 1, opt_state=opt_state)
  new, schedules = step.restarted(state), 0
  before = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_schedule)
  for (path, old), x in zip(before, jax.tree.leaves(new, is_leaf=is_schedule), strict=True):
    if is_schedule(old):
      schedules += 1
      assert (int(old.count), int(x.count)) == (3, 0), path
    elif path[0].name != "step":
      np.testing.assert_array_equal(x, old, err_msg=str(path))
  assert schedules and (int(state.step), int(new.step)) == (3, 0)


def is_schedule(node) -> bool:
  return isinstance(node, optax.ScaleByScheduleState)


def test_evaluation_shares_no_key_with_training_or_with_the_first_weights():
  def objective(params, batch, keys, step):
    assert step is None
    return {"keys": terms.Term(jax.random.key_data(keys), jnp.float32(1))}

  rows = make_batch(0)._replace(row=np.arange(B, dtype=np.int32))
  found = on_one_device(step.make_eval_step(objective, seed=7))({}, rows)
  ours = {tuple(x) for x in np.asarray(found["keys"][0])[:, 0].tolist()}
  assert len(ours) == B
  steps = jnp.array([*range(1000), 2**31 - 1])  # the last that an int32 counts to
  trained = jax.vmap(lambda t: step.row_keys(7, t, rows.row))(steps)
  theirs = np.asarray(jax.random.key_data(trained)).reshape(-1, 2).tolist()
  first = jax.random.fold_in(jax.random.key(7), step.FIRST_WEIGHTS)
  assert not ours & {*map(tuple, theirs), tuple(jax.random.key_data(first).tolist())}


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_as_many_batches_wait_on_the_devices_as_asked_for(ahead):
  taken = []

  def batches():
    for i in range(9):
      taken.append(i)
      yield np.full((8, 1), i)

  found = parallel.prefetch(batches(), ahead)
  first = next(found)
  found.close()  # waits for the thread
  assert np.asarray(first).ravel().tolist() == [0] * 8 and taken == list(range(1 + ahead))
  again = [int(np.asarray(x).max()) for x in parallel.prefetch(batches(), ahead)]
  assert again == list(range(9))
