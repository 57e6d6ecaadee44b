"""ZeRO-1: optimizer state and updates sharded over devices (Rajbhandari et al. 2020).

A device reduce-scatters the gradient, updates its shard and all-gathers the updates. Arrays without
an axis that the devices divide (`params.split_axis`) stay replicated. For use in a mapped step.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from electra_jax.core.params import AXIS, split_axis, sum_of_squares


def zero1_update(tx: optax.GradientTransformation, devices: int) -> Callable:
  """Returns the equivalent of `step.replicated_update` for this device's shard of the optimizer.

  `tx` must be elementwise, except for norms, which must be this module's `norm`.
  """

  def own(x: jax.Array) -> jax.Array:
    along = split_axis(x.shape, devices)
    if along is None:
      return x
    size = x.shape[along] // devices
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * size, size, along)

  def scatter(grad: jax.Array) -> jax.Array:
    along = split_axis(grad.shape, devices)
    if along is None:
      return jax.lax.psum(grad, AXIS)
    return jax.lax.psum_scatter(grad, AXIS, scatter_dimension=along, tiled=True)

  def gather(part: jax.Array, like: jax.Array) -> jax.Array:
    along = split_axis(like.shape, devices)
    return part if along is None else jax.lax.all_gather(part, AXIS, axis=along, tiled=True)

  def update(grads, opt_state, params):
    global_norm = norm(params, devices)
    grads = jax.tree.map(scatter, grads)
    updates, opt_state = tx.update(grads, opt_state, jax.tree.map(own, params))
    return jax.tree.map(gather, updates, params), opt_state, global_norm(grads)

  return update


def norm(whole: dict, devices: int) -> Callable:
  """Returns a function from a tree of sharded arrays to its global norm.

  Args:
    whole: the full tree of weights or shapes, of which the trees may be subtrees.
  """
  leaves = jax.tree_util.tree_leaves_with_path(whole)
  split = {path: split_axis(x.shape, devices) is not None for path, x in leaves}

  def global_norm(tree) -> jax.Array:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    shards, copies = ([x for path, x in leaves if split[path] is kind] for kind in (True, False))
    return jnp.sqrt(jax.lax.psum(sum_of_squares(shards), AXIS) + sum_of_squares(copies))

  return global_norm
