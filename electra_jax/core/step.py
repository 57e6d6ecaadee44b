"""The training step and the evaluation step, for any objective and any number of devices.

Each runs on a device's shard of the batch and combines results by `psum` over AXIS.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from electra_jax.core.batch import Batch
from electra_jax.core.objectives import Objective
from electra_jax.core.params import AXIS, make_key, tree_norm

# They replace the step's number in keys. No step has these numbers, so no key is used twice.
EVALUATION, FIRST_WEIGHTS = 2**32 - 1, 2**32 - 2
WHOLE_BATCH = -1  # in place of a row's number


@struct.dataclass
class TrainState:
  """The state of training."""

  step: jax.Array  # [] int32, optimizer steps done
  params: dict  # float32 weights
  opt_state: optax.OptState


def init_state(params: dict, tx: optax.GradientTransformation) -> TrainState:
  """Returns the state before the first step."""
  return TrainState(step=jnp.zeros([], jnp.int32), params=params, opt_state=tx.init(params))


def restarted(state: TrainState) -> TrainState:
  """Returns the state at step 0 with the optimizer's moments, to start another run."""

  def is_schedule(node) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)

  opt_state = jax.tree.map(
    lambda node: jax.tree.map(jnp.zeros_like, node) if is_schedule(node) else node,
    state.opt_state,
    is_leaf=is_schedule,
  )
  return state.replace(step=jnp.zeros_like(state.step), opt_state=opt_state)


def with_moments(opt_state, other) -> tuple[Any, list[str]]:
  """Returns an optimizer state with `other`'s moments of weights of the same path and shape.

  `other` may be of other networks, or of another number of optimizers. An optimizer that takes a
  moment takes its count too. Also returns the modules of these weights, e.g.
  "discriminator/encoder".
  """

  def has_moments(node) -> bool:
    return hasattr(node, "mu")

  def moments(node) -> dict[tuple, jax.Array]:
    """Returns {(name of the moment, key, key, ...): array}."""
    trees = {k: tree for k, tree in node._asdict().items() if isinstance(tree, dict)}
    return {
      (name, *path): x
      for name, tree in trees.items()
      for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }

  known, modules = {}, {}
  for node in filter(has_moments, jax.tree.leaves(other, is_leaf=has_moments)):
    known |= {path: (x, node.count) for path, x in moments(node).items()}

  def merged(node):
    if not has_moments(node):
      return node
    mine = moments(node)
    taken = {k: known[k] for k in mine if k in known and known[k][0].shape == mine[k].shape}
    modules.update(dict.fromkeys("/".join(key.key for key in path[1:3]) for path in taken))
    fields = {
      name: jax.tree_util.tree_map_with_path(
        lambda path, x, name=name: taken.get((name, *path), (x,))[0], getattr(node, name)
      )
      for name in {path[0] for path in taken}
    }
    counts = [count for _, count in taken.values()]
    return node._replace(**fields, count=counts[0]) if counts else node

  return jax.tree.map(merged, opt_state, is_leaf=has_moments), list(modules)


def row_keys(seed: int, step: jax.Array, row: jax.Array) -> jax.Array:
  """Returns typed keys [B, 2] that depend only on (seed, step, global row [B] int32).

  The second key of each row is the same in the whole batch.
  """
  key = jax.random.fold_in(make_key(seed), step)
  rows = jnp.stack([row, jnp.full_like(row, WHOLE_BATCH)], -1)
  return jax.vmap(jax.vmap(lambda r: jax.random.fold_in(key, r)))(rows)


def replicated_update(tx: optax.GradientTransformation) -> Callable:
  """Returns an update with all-reduced gradients and replicated optimizer state.

  It maps (this device's gradient, opt_state, params) to (updates, opt_state, gradient norm).
  """

  def update(grads, opt_state, params):
    grads = jax.lax.psum(grads, AXIS)
    updates, opt_state = tx.update(grads, opt_state, params)
    return updates, opt_state, tree_norm(grads)

  return update


def make_train_step(
  objective: Objective,
  tx: optax.GradientTransformation,
  schedule: optax.Schedule,
  *,
  seed: int,
  accumulation: int = 1,
  make_update: Callable = replicated_update,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
  """Returns the step: (state, this device's batch) -> (new state, metrics).

  The loss is the sum over terms of weight x total / count over the global batch. Counts are summed
  over microbatches and devices before differentiation, so accumulation equals the large batch up to
  rounding, even with uneven microbatches. For `make_update` see `replicated_update`.

  Metrics, replicated:
    terms: {name: (total, count)} over the global batch.
    loss, learning_rate, grad_norm (before clipping), update_norm, param_norm: scalars.
  """
  update = make_update(tx)

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
    parts = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)

    def terms_of(params, part):
      return objective(params, part, row_keys(seed, state.step, part.row), state.step)

    def count(part):
      # Counts do not depend on the network, so XLA drops the rest of the objective.
      terms = terms_of(state.params, part)
      zeros = {k: (jnp.zeros_like(t.total), jnp.zeros_like(t.count)) for k, t in terms.items()}
      return {k: t.count for k, t in terms.items() if t.in_loss}, zeros

    counts, zeros = jax.lax.map(count, parts)
    counts = jax.lax.psum(jax.tree.map(lambda c: c.sum(0), counts), AXIS)

    def loss_of(params, part):
      terms = terms_of(params, part)
      # An empty batch gives a loss of 0, not 0 / 0.
      shares = (
        t.weight * t.total / jnp.maximum(counts[k], 1) for k, t in terms.items() if t.in_loss
      )
      loss = sum(shares, jnp.float32(0))
      return loss, {k: (t.total, t.count) for k, t in terms.items()}

    def add_part(so_far, part):
      sums_and_grads = jax.value_and_grad(loss_of, has_aux=True)(state.params, part)
      return jax.tree.map(jnp.add, so_far, sums_and_grads), None

    zero = jnp.float32(0), jax.tree.map(lambda z: z[0], zeros)
    zero_grads = jax.tree.map(jnp.zeros_like, state.params)
    (sums, grads), _ = jax.lax.scan(add_part, (zero, zero_grads), parts)
    loss, terms = jax.lax.psum(sums, AXIS)

    updates, opt_state, grad_norm = update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
      "terms": terms,
      "loss": loss,
      "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
      "grad_norm": grad_norm,
      "update_norm": tree_norm(updates),
      "param_norm": tree_norm(params),
    }
    return TrainState(state.step + 1, params, opt_state), metrics

  return step


def make_eval_step(objective: Objective, *, seed: int) -> Callable[[dict, Batch], dict]:
  """Returns the evaluation: (params, this device's batch) -> {name: (total, count)}.

  Keys do not depend on the training step, so all evaluations have the same masks and samples.
  """

  def evaluate(params: dict, batch: Batch) -> dict:
    terms = objective(params, batch, row_keys(seed, jnp.uint32(EVALUATION), batch.row), None)
    return jax.lax.psum({k: (t.total, t.count) for k, t in terms.items()}, AXIS)

  return evaluate
