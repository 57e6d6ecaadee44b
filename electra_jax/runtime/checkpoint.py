"""Checkpoints: written in the background, whole or not at all, restored onto any devices.

An orbax `CheckpointManager` keeps a folder a step. Each holds the state as plain arrays and, as
JSON, what the run is, with a checksum of every array: orbax gives back a flipped bit without a
word, so damage is found here when a checkpoint is read and not later by a strange loss. The caller
of `save` waits for copies of the arrays only; these are checked while they are written.
"""

import contextlib
import dataclasses
import errno
import json
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from electra_jax.core.params import named

FOLDER = "checkpoints"  # inside a run's folder
DELETING = "deleting"  # inside it: those no longer kept
GRACE_SECS = 20  # for other processes, after a failure
# What tensorstore says where a file cannot be read now, but may be whole.
_NOT_NOW = re.compile("RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAVAILABLE|DEADLINE_EXCEEDED")


class CheckpointError(ValueError):
  """A checkpoint cannot be written, read or used; the message is one line that names it."""


class WriteError(CheckpointError):
  """A checkpoint could not be written; those before it are whole."""


class DamagedError(CheckpointError):
  """A checkpoint is not what was written."""


def _alone(action: Callable[[], Any]) -> Any:
  """Is `processes.run_on_all` of one process: calls a function."""
  return action()


class Checkpoints:
  """The checkpoints of one run; left with an error as a context, it is abandoned, else closed.

  Args:
    workdir: the run's folder.
    keep: how many of the newest are kept.
    keep_every_steps: those at multiples of this are kept for ever; 0 for none.
    to_global: turns a state of this process into one over all processes, of ordinary shapes.
  """

  def __init__(
    self,
    workdir: str | Path,
    *,
    keep: int,
    keep_every_steps: int,
    to_global: Callable = lambda tree: tree,
  ):
    self.folder = Path(workdir).resolve() / FOLDER
    self._to_global = to_global
    kept = [policies.LatestN(keep)]
    if keep_every_steps:
      kept.append(policies.EveryNSteps(keep_every_steps))
    self._kept = policies.AnyPreservationPolicy(kept)
    self._open()

  def _open(self) -> None:
    self._manager = ocp.CheckpointManager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        save_decision_policy=policies.FixedIntervalPolicy(1),  # whoever calls `save` decides
        preservation_policy=self._kept,
        todelete_subdir=DELETING,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=True,
      ),
      item_handlers={"state": _CheckedState()},
    )
    self._delete(DELETING)

  def _delete(self, what: str) -> None:
    # Those that are not kept are moved first: a run that is killed while it deletes would leave
    # half a checkpoint among the whole ones. What cannot be deleted now is tried again.
    if jax.process_index() == 0:
      for path in self.folder.glob(what):
        shutil.rmtree(path, ignore_errors=True)

  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint, None where there is none."""
    return self._manager.latest_step()

  def save(self, step: int, state, meta: Mapping[str, Any], run_on_all: Callable = _alone) -> None:
    """Saves in the background; raises here if the save before this one failed.

    A step that is there already is left alone. The state may be given away once this returns.

    Args:
      run_on_all: calls a function, and raises on all processes what it raises on one.

    Raises:
      WriteError: the save before this one failed, or there is no room. The next may succeed.
      CheckpointError: the state of the save before this one is not finite; nothing was saved.
    """
    if step == self.latest_step():
      return
    state, meta = self._to_global(state), json.loads(json.dumps({**meta, "step": step}))
    self._delete(f"{DELETING}/*")  # not the folder, the save under way may just be using it
    run_on_all(lambda: self._refuse_full_disk(state))
    arrays = _on_host(state)  # all processes together, where it is in parts

    def describe() -> dict[str, Any]:
      known, bad = _inspect(arrays)
      _refuse_not_finite(bad)
      described = {**meta, "arrays": known}
      return {**described, "crc32": _digest(described)}

    items = ocp.args.Composite(state=_CheckedSave(state, describe))
    self._guarded(lambda: self._manager.save(step, args=items))

  def _refuse_full_disk(self, state) -> None:
    # Before anything is written: a disk that fills up halfway fails many writes, each noisily.
    needed = sum(x.nbytes for x in jax.tree.leaves(state))
    free = shutil.disk_usage(self.folder).free
    if free < needed:
      raise WriteError(
        f"no space for a checkpoint in {self.folder}: it needs {needed / 1e6:,.1f} MB, "
        f"{free / 1e6:,.1f} MB are free; {self._what_is_left()}"
      )

  def wait(self) -> None:
    """Waits until what was saved is on disk, and deletes what is not kept; raises as `save`."""
    self._guarded(self._manager.wait_until_finished)
    self._delete(DELETING)

  def __enter__(self):
    return self

  def __exit__(self, error, *unused) -> None:
    if error:
      self.abandon()
    else:
      self.close()

  def close(self) -> None:
    """Waits, and lets the folder go."""
    self.wait()
    self._manager.close()

  def abandon(self) -> bool:
    """Lets the folder go after a failure; what is being saved may still be finished.

    With several processes that takes all of them, so it is waited for `GRACE_SECS` only.

    Returns:
      Whether nothing is left that waits for others.
    """

    def close() -> None:
      with contextlib.suppress(Exception):  # a manager that has failed once repeats its error
        self._manager.close()

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(GRACE_SECS if jax.process_count() > 1 else None)
    return not thread.is_alive()

  def set_aside(self, step: int) -> Path:
    """Moves a checkpoint out of the way, from process 0, and returns where it is then."""
    place, again = self.folder.parent / "damaged" / str(step), 0
    if jax.process_index() == 0:
      while place.exists():  # what was set aside before may be the better one
        place, again = place.with_name(f"{step}.{again + 1}"), again + 1
      place.parent.mkdir(exist_ok=True)
      (self.folder / str(step)).rename(place)
    return place

  def reopen(self, run_on_all: Callable = _alone) -> None:
    """Starts anew with what is there; after a failed save too, which it lets go.

    Args:
      run_on_all: as of `save`.

    Raises:
      WriteError: processes wait for each other to finish a save that failed on one of them.
    """

    def let_go() -> None:
      if not self.abandon():
        raise WriteError("the save before it could not be finished by all processes")

    run_on_all(let_go)
    self._open()

  def _guarded(self, action: Callable[[], Any]) -> None:
    try:
      action()
    except Exception as error:
      for unfinished in self.folder.glob("*.orbax-checkpoint-tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)
      if isinstance(error, CheckpointError):
        raise
      raise WriteError(
        f"could not write a checkpoint to {self.folder} ({_cause(error)}); {self._what_is_left()}"
      ) from error

  def _what_is_left(self) -> str:
    steps = steps_on_disk(self.folder)
    return f"the one of step {steps[-1]} is whole" if steps else "there is none before it"

  def restore(self, step: int, shapes, run_on_all: Callable = _alone) -> tuple[Any, dict[str, Any]]:
    """Returns the state of a step, on whatever devices `shapes` names, and what is beside it.

    Args:
      shapes: a tree of ShapeDtypeStruct with the sharding to restore to.
      run_on_all: as of `save`.

    Raises:
      DamagedError: it is damaged.
      CheckpointError: it holds other arrays than `shapes`, or cannot be read now.
    """

    def read() -> tuple[Any, dict[str, Any]]:
      meta = _read_meta(self.folder, step)
      _refuse_other_arrays(meta["arrays"], shapes, f"the checkpoint {self.folder / str(step)}")
      return _read_state(self.folder, step, shapes), meta

    state, meta = run_on_all(read)
    found, bad = _inspect(_on_host(state))  # all processes together, where it is in parts
    run_on_all(lambda: _compare(self.folder, step, found, bad, meta["arrays"]))
    return state, meta


def restore_params(workdir: str | Path, shapes) -> tuple[Any, int]:
  """Returns the parameters of another run's newest checkpoint, and its step.

  Args:
    workdir: the other run's folder; nothing in it is changed.
    shapes: a tree of ShapeDtypeStruct with the sharding to restore to.

  Raises:
    CheckpointError: there is no checkpoint, it is damaged, or parameters are missing or have
      another shape; they are listed.
  """
  folder = Path(workdir).resolve() / FOLDER
  steps = steps_on_disk(folder)
  if not steps:
    raise CheckpointError(f"init_from: {folder} holds no checkpoint")
  wanted, step = {"params": shapes}, steps[-1]
  arrays = _read_meta(folder, step)["arrays"]
  arrays = {name: facts for name, facts in arrays.items() if name.startswith("params/")}
  _refuse_other_arrays(arrays, wanted, f"init_from: the checkpoint {folder / str(step)}")
  params = _read_state(folder, step, wanted, partial_restore=True)
  _compare(folder, step, *_inspect(_on_host(params)), arrays)
  return params["params"], step


# Reading, by each process alone: orbax's manager would have them wait for each other.


def _read_meta(folder: Path, step: int) -> dict[str, Any]:
  """Returns what was saved beside the state of a step."""
  with _reading(folder, step):
    meta = dict(ocp.JsonCheckpointHandler().restore(folder / str(step) / "meta"))
    digest = meta.pop("crc32", None)  # older checkpoints have none
    if digest is not None and digest != _digest(meta):
      raise ValueError("what is saved beside the arrays does not match its checksum")
    if meta["step"] != step or "step" not in meta["arrays"]:
      raise ValueError(f"it says that it is of step {meta['step']}")
  return meta


def _read_state(folder: Path, step: int, shapes, **kwargs):
  """Returns the arrays of a step, as `shapes` has them."""
  restore_args = ocp.checkpoint_utils.construct_restore_args(shapes)
  args = ocp.args.PyTreeRestore(item=shapes, restore_args=restore_args, **kwargs)
  with _reading(folder, step):
    return _state_handler().restore(folder / str(step) / "state", args=args)


@contextlib.contextmanager
def _reading(folder: Path, step: int) -> Iterator[None]:
  """Says of which checkpoint an error is; damage is only what will be there tomorrow."""
  try:
    yield
  except Exception as error:
    system = isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EIO, None)
    if system or isinstance(error, MemoryError) or _NOT_NOW.search(str(error)):
      reason = f"the checkpoint {folder / str(step)} cannot be read now ({_cause(error)})"
      raise CheckpointError(reason) from error
    raise _damaged(folder, step, error) from error


def _state_handler() -> ocp.PyTreeCheckpointHandler:
  # One replica is written whole. Writing a slice from each device would compile a slice for every
  # shape on every device, which took 5 s at the first save on 8 devices, for a model of no size.
  arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
  return ocp.PyTreeCheckpointHandler(
    type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
  )


class _CheckedState(ocp.AsyncCheckpointHandler):
  """Writes a state and, beside it, what is found out about it meanwhile."""

  save = restore = None  # it is read by `_read_state`

  def __init__(self):
    self._arrays = _state_handler()
    self.finalize = self._arrays.finalize

  async def async_save(self, directory, args: "_CheckedSave") -> list[ocp.future.Future]:
    written = await self._arrays.async_save(directory, args=ocp.args.PyTreeSave(args.state))

    async def describe() -> None:
      meta = args.describe()
      if jax.process_index() == 0:
        (directory.parent / "meta").mkdir()
        (directory.parent / "meta" / "metadata").write_text(json.dumps(meta))

    # Waited for as the last: where it fails, nothing is being written any more.
    return [*written, ocp.future.CommitFutureAwaitingContractedSignals(describe())]


@ocp.args.register_with_handler(_CheckedState, for_save=True, for_restore=True)
@dataclasses.dataclass
class _CheckedSave(ocp.args.CheckpointArgs):
  """A state, and what returns, in a thread, the JSON beside it, or raises to save neither."""

  state: Any
  describe: Callable[[], dict[str, Any]]


def steps_on_disk(folder: Path) -> list[int]:
  """Returns the steps that have a folder, in order; unfinished ones have another name."""
  if not folder.is_dir():
    return []
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


# Arrays by name.


def _on_host(state) -> dict[str, np.ndarray]:
  """Returns {name: array} of a state on this host; they stay when the state is given away.

  Without a copy on a CPU where they are whole on every device: a step does not overwrite what NumPy
  has a view of. From a GPU to pinned memory, as orbax's own copies: 1.3 GB take 25 ms from an H100,
  and a second to memory of the ordinary kind.
  """

  def start(x: jax.Array) -> jax.Array | np.ndarray:
    if not x.is_fully_replicated:  # its parts may be on other hosts
      return x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
    whole = x.addressable_data(0)
    if jax.default_backend() != "gpu":
      return whole
    pinned = jax.sharding.SingleDeviceSharding(whole.device, memory_kind="pinned_host")
    return jax.device_put(whole, pinned)

  started = {name: start(x) for name, x in named(state).items()}
  return {name: np.asarray(x) for name, x in started.items()}


def _inspect(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, dict], list[str]]:
  """Returns {name: {shape, dtype, crc32}} of arrays, and the names of what is not finite."""

  def facts(x: np.ndarray) -> tuple[dict, bool]:
    finite = not x.size or bool(np.isfinite(x.min()) and np.isfinite(x.max()))
    crc = zlib.crc32(np.ascontiguousarray(x))
    return {"shape": list(x.shape), "dtype": str(x.dtype), "crc32": crc}, finite

  with ThreadPoolExecutor() as pool:  # both passes release the GIL
    results = dict(zip(arrays, pool.map(facts, arrays.values()), strict=True))
  bad = [name for name, (_, finite) in results.items() if not finite]
  return {name: known for name, (known, _) in results.items()}, bad


def _digest(meta: Mapping[str, Any]) -> int:
  """Returns the CRC-32 of what is saved beside the state; the same once it went through JSON."""
  return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _refuse_not_finite(bad: list[str]) -> None:
  if bad:
    more = f" and {len(bad) - 1} more arrays are" if len(bad) > 1 else " is"
    raise CheckpointError(f"nothing was saved: {bad[0]}{more} not finite")


def _compare(folder: Path, step: int, found: dict, bad: list[str], arrays: Mapping) -> None:
  """Refuses arrays that are not the ones that were saved."""
  if wrong := [name for name in found if found[name]["crc32"] != arrays[name]["crc32"]]:
    text = f"{len(wrong)} arrays do not match their checksums, {wrong[0]} among them"
    raise _damaged(folder, step, ValueError(text))
  if bad:
    raise _damaged(folder, step, ValueError(f"{bad[0]} is not finite"))


def _refuse_other_arrays(arrays: Mapping[str, dict], shapes, where: str) -> None:
  """Refuses a checkpoint whose arrays have other names or shapes than the model's."""
  wanted = named(shapes)
  problems = [f"{name} is missing" for name in wanted if name not in arrays]
  problems += [f"{name} is unknown here" for name in arrays if name not in wanted]
  for name, x in wanted.items():
    if name in arrays and tuple(arrays[name]["shape"]) != x.shape:
      problems.append(f"{name} is {tuple(arrays[name]['shape'])}, the model's is {x.shape}")
  if problems:
    listed = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" * (len(problems) > 8))
    raise CheckpointError(f"{where} does not fit the model: {listed}")


def _damaged(folder: Path, step: int, error: Exception) -> DamagedError:
  older = [s for s in steps_on_disk(folder) if s < step]
  then = f"resume from step {older[-1]}" if older else "start from the beginning"
  return DamagedError(
    f"the checkpoint {folder / str(step)} is damaged ({_cause(error)});"
    f" delete that folder to {then}"
  )


def _cause(error: BaseException) -> str:
  """Returns what the system said, else the first line of an error, shortened."""
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  # tensorstore ends with it, before details whose order varies.
  if match := re.search(r": ([^:\[]*) \[(?:os_error_code|tensorstore_spec)=", str(error)):
    return match[1]
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return (lines[0] if lines else type(error).__name__)[:200]
