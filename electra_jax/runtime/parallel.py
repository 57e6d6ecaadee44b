"""Data parallelism over devices: the only module that uses pmap.

Since JAX 0.8, `pmap` is `jit` of `shard_map`. With `in_axes=(None, 0)` a replicated state keeps its
ordinary shapes, and only the batch has a leading device axis.
"""

import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from electra_jax.core.batch import Batch
from electra_jax.core.params import AXIS, split_axis


def keep_freed_memory() -> None:
  """Makes glibc's malloc keep freed memory if JAX runs on the CPU; call it before JAX starts.

  XLA allocates a step's temporaries in one block, which glibc would map and zero again at every
  step: 448 ms instead of 380 (four layers of ELECTRA-Small, one core; LOG.md).
  """
  if not _uses_cpu() or platform.libc_ver()[0] != "glibc":
    return
  libc = ctypes.CDLL(None)
  M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD = -8, -4, -1, -2
  settings = {M_ARENA_MAX: 1, M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 2**26}
  for parameter, value in settings.items():
    libc.mallopt(parameter, value)


def _uses_cpu() -> bool:
  """Returns whether JAX will certainly choose the CPU, without starting JAX."""
  if platforms := jax.config.jax_platforms:
    return platforms == "cpu"
  plugins = importlib.metadata.entry_points(group="jax_plugins")
  return not plugins and importlib.util.find_spec("libtpu") is None


def full_precision() -> contextlib.AbstractContextManager:
  """Multiplies float32 in full precision: accelerators round factors to bfloat16 or TF32.

  For comparisons between networks, formats or machines; training uses `model.dtype`.
  """
  return jax.default_matmul_precision("highest")


def check_divisible(batch_size: int, accumulation: int, devices: int | None = None) -> None:
  """Raises ValueError if devices (None: all) x accumulation does not divide a global batch."""
  devices = devices or jax.device_count()
  if batch_size % (devices * accumulation):
    parts = f" x {accumulation} microbatches (train.accumulation)" if accumulation > 1 else ""
    raise ValueError(f"batch size {batch_size} is not divisible by {devices} devices{parts}")


@functools.cache
def _sharding(spec: PartitionSpec, is_local: bool = False) -> NamedSharding:
  """Returns a sharding over the devices of all processes, or of this one."""
  devices = jax.local_devices() if is_local else jax.devices()
  return NamedSharding(Mesh(np.array(devices), AXIS), spec)


@struct.dataclass
class Packed:
  """A tree of small arrays packed into `flat` [n] float32, to be read from the device at once."""

  flat: jax.Array
  structure: jax.tree_util.PyTreeDef = struct.field(pytree_node=False)
  shapes: tuple[tuple[int, ...], ...] = struct.field(pytree_node=False)

  def read(self) -> np.ndarray:
    """Waits for the numbers and returns them as [n] float64 on the host."""
    return np.asarray(self.flat).astype(np.float64)

  def unpack(self, flat: np.ndarray):
    """Returns a tree of this structure with the elements `flat` [n]."""
    parts = np.split(flat, np.cumsum([math.prod(shape) for shape in self.shapes])[:-1])
    parts = [part.reshape(shape)[()] for part, shape in zip(parts, self.shapes, strict=True)]
    return jax.tree.unflatten(self.structure, parts)


def pack(tree) -> Packed:
  """Packs a tree of arrays; call it in the mapped function."""
  leaves, structure = jax.tree.flatten(tree)
  flat = jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in leaves])
  return Packed(flat, structure, tuple(jnp.shape(x) for x in leaves))


def map_train_step(
  step: Callable, axes=None, devices: Sequence[jax.Device] | None = None, others: int = 0
):
  """Maps (state, batch, *others) -> (state, metrics) over all devices; the state is donated.

  The result returns `Packed` metrics and has pmap's `lower`. For `axes` (None: replicated) and
  `devices` see `StateSharding`. All devices get the same `others`, whose number is an argument.
  """
  # With several processes pmap hashes its out_axes, so it returns the state as a tuple.
  out_axes = axes and tuple(jax.tree.leaves(axes, is_leaf=lambda a: a is None))

  def packed(state, batch, *others):
    state, metrics = step(state, batch, *others)
    return tuple(jax.tree.leaves(state)), pack(metrics)

  mapped = jax.pmap(
    packed,
    axis_name=AXIS,
    in_axes=(axes, 0, *others * (None,)),
    out_axes=(out_axes, None),
    donate_argnums=0,
    devices=devices,
  )

  def run(state, batch, *others):
    leaves, metrics = mapped(state, batch, *others)
    return jax.tree.unflatten(jax.tree.structure(state), leaves), metrics

  run.lower = mapped.lower
  return run


def with_default(step: Callable, numbers) -> Callable:
  """Gives the third argument of a mapped step the default `numbers`, a tree of integers."""
  numbers = jax.tree.map(np.int32, numbers)
  placed = functools.cache(lambda: replicate(numbers))

  def run(state, batch, other=None):
    return step(state, batch, placed() if other is None else other)

  run.lower = lambda state, batch, other=numbers: step.lower(state, batch, other)
  return run


def map_eval_step(step: Callable, devices: Sequence[jax.Device] | None = None) -> Callable:
  """Maps (params, batch) -> metrics over all devices; the result returns them `Packed`."""

  def packed(params, batch):
    return pack(step(params, batch))

  return jax.pmap(packed, axis_name=AXIS, in_axes=(None, 0), out_axes=None, devices=devices)


def map_predict(step: Callable) -> Callable:
  """Maps (params, batch) -> arrays [b, ...] over all devices, returned as NumPy arrays [B, ...]."""
  mapped = jax.pmap(step, axis_name=AXIS, in_axes=(None, 0), out_axes=0)

  def predict(params, batch):
    outputs = jax.device_get(mapped(params, batch))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)

  return predict


def over_seeds(function: Callable, batched: tuple[bool, ...]) -> Callable:
  """Maps a function over seeds in one program; the first axis of results is the seed.

  Accelerators use vmap, a CPU a loop: there vmap takes S times the memory for 1.3 times the speed
  with two layers of 128, and 0.9 times with four of 256 (LOG.md).

  Args:
    batched: for each argument, whether its first axis is the seed.
  """
  if jax.default_backend() != "cpu":
    return jax.vmap(function, in_axes=tuple(0 if mine else None for mine in batched))

  def one_by_one(*args):
    def of_seed(mine):  # {index: argument}
      return function(*(mine.get(i, x) for i, x in enumerate(args)))

    return jax.lax.map(of_seed, {i: args[i] for i, mine in enumerate(batched) if mine})

  return one_by_one


def replicate(tree):
  """Places a tree on every device of this host."""
  return jax.device_put(tree, _sharding(PartitionSpec(), is_local=True))


def split_rows(tree):
  """Places a tree of [B, ...] with its rows divided over the devices of this host."""
  return jax.device_put(tree, _sharding(PartitionSpec(AXIS), is_local=True))


class StateSharding:
  """The sharding of a state: which arrays are sharded over devices and which are replicated.

  Between steps a sharded array has a leading device axis, [D, ...]; in a checkpoint it has its
  ordinary shape, so checkpoints do not depend on sharding or on the number of devices.

  Args:
    shapes: the state's ordinary shapes, a tree of ShapeDtypeStruct.
    sharded: a boolean tree prefix; True leaves are sharded along `params.split_axis`, if any.
    devices: None for all; may be described devices, to compile for them.

  Fields:
    axes: for `map_train_step`, a tree of 0 (sharded) and None (replicated), or None for all.
  """

  def __init__(self, shapes, sharded, devices: Sequence[jax.Device] | None = None):
    D = len(devices or jax.devices())
    self._shapes = shapes

    def axis_of(is_sharded, x) -> int:  # -1 if replicated, because None is not a leaf
      axis = split_axis(x.shape, D) if is_sharded else None
      return -1 if axis is None else axis

    split_axes = jax.tree.map(axis_of, jax.tree.broadcast(sharded, shapes), shapes)
    self.axes = None
    if any(a >= 0 for a in jax.tree.leaves(split_axes)):
      self.axes = jax.tree.map(lambda a: None if a < 0 else 0, split_axes)

    def spec(axis, before) -> PartitionSpec:
      return PartitionSpec() if axis < 0 else PartitionSpec(*[None] * before, AXIS)

    self._step_specs = jax.tree.map(lambda a: spec(a, 0), split_axes)
    self._specs = jax.tree.map(lambda a: spec(a, a), split_axes)

    def split(x, axis):
      if axis < 0:
        return x
      shape = (*x.shape[:axis], D, x.shape[axis] // D, *x.shape[axis + 1 :])
      return jnp.moveaxis(x.reshape(shape), axis, 0)

    def join(x, axis, like):
      return x if axis < 0 else jnp.moveaxis(x, 0, axis).reshape(like.shape)

    self._split = lambda state: jax.tree.map(split, state, split_axes)
    self._splitting = _jit(self._split, self._step_specs)
    self._joining = _jit(lambda state: jax.tree.map(join, state, split_axes, shapes), self._specs)

  def shapes(self):
    """Returns the state's shapes and sharding in a checkpoint."""

    def shape(x, spec) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(spec))

    return jax.tree.map(shape, self._shapes, self._specs)

  def bytes_per_device(self) -> int:
    """Returns the bytes of the state on each device."""
    arrays = jax.tree.leaves(self.shapes())
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)

  def step_shapes(self):
    """Returns the state's shapes between steps."""
    return jax.eval_shape(self._split, self._shapes)

  def to_global(self, state):
    """Turns a state between steps into a global state, as checkpoints store it."""
    state = _to_global(state, self._step_specs)
    return state if self.axes is None else self._joining(state)

  def to_local(self, state):
    """The inverse of `to_global`."""
    return _to_local(state if self.axes is None else self._splitting(state), self._step_specs)

  def init_state(self, function: Callable) -> Callable:
    """Maps (replicated tree) -> function(tree), sharded; no device holds the result in full."""
    made, replicated = _jit(lambda x: self._split(function(x)), self._step_specs), PartitionSpec()
    return lambda tree: _to_local(made(_to_global(tree, replicated)), self._step_specs)


def _jit(function: Callable, specs) -> Callable:
  """Compiles a function whose results are sharded over the devices of all processes."""
  return jax.jit(function, out_shardings=jax.tree.map(_sharding, specs))


def _converted(convert: Callable, tree, specs):
  """Converts process-local arrays to global ones or back, without copying."""
  if jax.process_count() == 1:
    return tree
  return convert(tree, _sharding(PartitionSpec()).mesh, specs)


_to_global = functools.partial(_converted, multihost_utils.host_local_array_to_global_array)
_to_local = functools.partial(_converted, multihost_utils.global_array_to_host_local_array)


def shard(batch: Batch) -> Batch:
  """Shards this host's rows over its devices: [b, ...] numpy to [D, b / D, ...] on devices."""
  D = jax.local_device_count()
  return split_rows(jax.tree.map(lambda x: x.reshape(D, -1, *x.shape[1:]), batch))


def prefetch(batches: Iterable[Batch], ahead: int = 1) -> Iterator[Batch]:
  """Yields batches on the devices; a thread places the next `ahead`."""
  placed, end = map(shard, batches), object()
  with concurrent.futures.ThreadPoolExecutor(1, "prefetch") as thread:
    queue = collections.deque(thread.submit(next, placed, end) for _ in range(ahead + 1))
    while (batch := queue.popleft().result()) is not end:
      yield batch
      queue.append(thread.submit(next, placed, end))
