"""Asynchronous, atomic checkpoints that restore onto any devices.

An orbax `CheckpointManager` keeps one folder per step with the state's arrays and JSON metadata,
which has a checksum per array, because orbax does not detect bit flips. `save` blocks only to copy
the arrays to the host; checks run in the background.
"""

import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint.options import AtomicityMode, AtomicityOptions

from electra_jax.core.params import named
from electra_jax.runtime import checksums, processes, storage
from electra_jax.runtime.bucket import DAMAGED, Bucket
from electra_jax.runtime.claims import ClaimError
from electra_jax.runtime.save_barrier import SaveBarrier, started
from electra_jax.runtime.workdir import BUCKET_FILE, check_name, delete_unfinished, free_name
from electra_jax.runtime.workdir import CHECKPOINTS as FOLDER

DELETING = "deleting"  # in FOLDER: checkpoints to be deleted
GRACE_SECS = 20  # to wait for other processes after a failure
# tensorstore's codes of content that was not written like this; others are failures to read.
_DAMAGE = "DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE"


class CheckpointError(ValueError):
  """A checkpoint cannot be written, read or used; the message is one line that names it."""


class WriteError(CheckpointError):
  """A checkpoint could not be written; earlier ones are intact."""


class DamagedError(CheckpointError):
  """A checkpoint's content differs from what was saved."""


class _Manager(ocp.CheckpointManager):
  def reached_preemption(self, step: int) -> bool:
    """Skips JAX's sync, which would count these calls with those of `StopSignals`."""
    return False


class Checkpoints:
  """The checkpoints of one run; a context that closes them, or abandons them after an error.

  All processes of the run call `save`, `reopen` and `restore` together; if one fails, all raise.

  Args:
    keep: number of the newest checkpoints to keep.
    keep_every_steps: keep multiples of this forever; 0 for none.
    to_global: turns a process-local state into a global one of unsharded shapes.
    bucket: on process 0, uploads the workdir's files before each save.
  """

  def __init__(
    self,
    workdir: str | Path,
    *,
    keep: int,
    keep_every_steps: int,
    to_global: Callable = lambda tree: tree,
    bucket: Bucket | None = None,
  ):
    self.folder = folder_of(workdir)
    self._in_bucket = storage.is_remote(str(self.folder))
    self._to_global, self._bucket, self._uploading = to_global, bucket, None
    self._keep, self._keep_every = keep, keep_every_steps
    self._is_lost = False  # whether the upload before orbax's save failed
    always = [policies.EveryNSteps(keep_every_steps)] if keep_every_steps else []
    self._kept = policies.AnyPreservationPolicy([policies.LatestN(keep), *always])
    self._open()

  def _open(self) -> None:
    self._barrier = SaveBarrier(cause)
    self._manager = _Manager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        save_decision_policy=policies.FixedIntervalPolicy(1),  # the caller of `save` decides
        preservation_policy=self._kept,
        # orbax's default may depend on the mount, and earlier runs have no commit files.
        atomicity_options=AtomicityOptions(
          AtomicityMode.COMMIT_FILE if self._in_bucket else AtomicityMode.ATOMIC_RENAME
        ),
        todelete_subdir=DELETING,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=True,
        async_options=ocp.AsyncOptions(barrier_sync_fn=self._barrier),
      ),
      item_handlers={"state": _CheckedState()},
    )
    self._delete(DELETING)

  def _delete(self, what: str) -> None:
    # Checkpoints are moved to DELETING first, so that a run killed while deleting leaves no partial
    # checkpoint. Failed deletions are retried later. In a bucket orbax deletes.
    if jax.process_index() == 0 and not self._in_bucket:
      for path in self.folder.glob(what):
        shutil.rmtree(path, ignore_errors=True)

  def latest_step(self) -> int | None:
    """Returns the newest step, saved or being saved, or None."""
    return self._manager.latest_step()

  def save(self, step: int, state, meta: Mapping[str, Any]) -> None:
    """Saves a step in the background, unless it has begun; the state may then be donated.

    Raises:
      WriteError: the previous save failed, or the disk is full. The next save may succeed.
      CheckpointError: the state of the previous save was not finite, and was not saved.
    """
    if step == self.latest_step():
      return
    processes.run_on_all(lambda: self._guarded(self._wait_for_save))
    self._is_lost = True
    processes.run_on_all(lambda: self._bucket and self._guarded(self._bucket.upload))
    self._is_lost = False
    state, meta = self._to_global(state), json.loads(json.dumps({**meta, "step": step}))
    self._delete(f"{DELETING}/*")  # the folder itself may be in use by a running save
    processes.run_on_all(lambda: self._refuse_full_disk(state))
    arrays = checksums.on_host(state)  # a collective if the state is sharded

    def describe() -> dict[str, Any]:
      known, bad = checksums.inspect(arrays)
      _refuse_not_finite(bad)
      described = {**meta, "arrays": known}
      return {**described, "crc32": checksums.digest(described)}

    self._barrier.begin()
    items = ocp.args.Composite(state=_CheckedSave(state, describe))
    self._guarded(lambda: self._manager.save(step, args=items))
    if self._bucket and not self._in_bucket:
      self._uploading = started(self._upload)

  def _upload(self) -> None:
    self._manager.wait_until_finished()
    self._bucket.upload_steps(self._keep, self._keep_every)

  def _refuse_full_disk(self, state) -> None:
    # A disk that fills up during a save raises an error for each of many writes.
    if self._in_bucket:
      return
    needed = sum(x.nbytes for x in jax.tree.leaves(state))
    free = shutil.disk_usage(self.folder).free
    if free < needed:
      raise WriteError(
        f"no space for a checkpoint in {self.folder}: {needed / 1e6:,.1f} MB needed, "
        f"{free / 1e6:,.1f} MB free; {self._what_is_left()}"
      )

  def wait(self) -> None:
    """Waits for pending saves and deletions; raises as `save`."""
    self._guarded(self._wait_for_save)
    self._delete(DELETING)

  def _wait_for_save(self) -> None:
    if self._uploading:
      (thread, failures), self._uploading = self._uploading, None
      thread.join()
      if failures:
        raise failures[0]
    self._barrier.wait(self._manager.wait_until_finished, GRACE_SECS)

  def __enter__(self):
    return self

  def __exit__(self, error, *unused) -> None:
    if error:
      self.abandon()
    else:
      self.close()

  def close(self) -> None:
    """Waits, then closes the manager."""
    self.wait()
    self._manager.close()

  def abandon(self) -> bool:
    """Closes the manager after a failure; a running save may still finish.

    With several processes this waits at most `GRACE_SECS`. Returns whether the manager closed.
    """
    thread, _ = started(self._manager.close)  # a failed manager repeats its error
    thread.join(GRACE_SECS if jax.process_count() > 1 else None)
    return not thread.is_alive()

  def set_aside(self, step: int) -> Path:
    """Moves a checkpoint to DAMAGED, on process 0, and returns its new path."""
    place = self.folder.parent / DAMAGED / str(step)
    if jax.process_index() == 0:
      place = free_name(place)  # keep those set aside earlier
      if self._in_bucket:
        storage.move(str(self.folder / str(step)), str(place))
      else:
        place.parent.mkdir(exist_ok=True)
        shutil.move(self.folder / str(step), place)  # the folder may be a link to another disk
        if self._bucket:
          self._bucket.set_aside(step)
    return place

  def reopen(self) -> None:
    """Reopens the folder, abandoning a failed save.

    Raises WriteError if processes still wait for each other in that save.
    """

    def let_go() -> None:
      if not self.abandon():
        raise WriteError("not all processes finished the previous save: resume the run")

    if self._is_lost:
      return
    processes.run_on_all(let_go)
    self._guarded(self._open)

  def _guarded(self, action: Callable[[], Any]) -> None:
    try:
      action()
    except Exception as error:
      for unfinished in () if self._in_bucket else self.folder.glob("*.orbax-checkpoint-tmp"):
        delete_unfinished(unfinished)
      if isinstance(error, CheckpointError | ClaimError):
        raise
      raise WriteError(
        f"could not write a checkpoint to {self.folder} ({cause(error)}); {self._what_is_left()}"
      ) from error

  def _what_is_left(self) -> str:
    if self._bucket:  # the bucket may be what fails
      return "earlier checkpoints are intact"
    steps = steps_on_disk(self.folder)
    return f"the checkpoint of step {steps[-1]} is intact" if steps else "no earlier checkpoint"

  def restore(self, step: int, shapes) -> tuple[Any, dict[str, Any]]:
    """Returns the state of a step, sharded as `shapes` (of ShapeDtypeStruct), and its metadata.

    Raises:
      DamagedError: the checkpoint is damaged.
      CheckpointError: the arrays do not match `shapes`, or cannot be read at the moment.
    """
    return _restore(self.folder, step, shapes, processes.run_on_all)


def restore_from(
  workdir: str | Path,
  shapes,
  step: int | None = None,
  run_on_all: Callable = lambda action: action(),
) -> tuple[Any, int]:
  """Returns the state of another run's checkpoint, or part of the state, and its step.

  Args:
    shapes: a `TrainState`, or a dict of its fields, of ShapeDtypeStruct with the target sharding.
    step: of the checkpoint; None: the newest.
    run_on_all: `processes.run_on_all` if all processes call this together.

  Raises:
    CheckpointError: the checkpoint is missing or damaged, or arrays are missing or misshaped.
  """
  folder = folder_of(workdir)

  def choose() -> int:
    steps = steps_on_disk(folder)
    if not steps:
      raise CheckpointError(f"{folder} has no checkpoint")
    if step not in (None, *steps):
      raise CheckpointError(f"{folder} has no checkpoint of step {step}; choose one of {steps}")
    return steps[-1] if step is None else step

  chosen = run_on_all(choose)
  return _restore(folder, chosen, shapes, run_on_all)[0], chosen


def _restore(folder: Path, step: int, shapes, run_on_all: Callable):
  """Returns the verified arrays of a step that are in `shapes`, and the step's metadata.

  Each process reads independently; orbax's manager would synchronise them.
  """
  fields = {name.partition("/")[0] for name in named(shapes)}

  def read() -> tuple[Any, dict[str, Any]]:
    meta = _read_meta(folder, step)
    arrays = {k: v for k, v in meta["arrays"].items() if k.partition("/")[0] in fields}
    _refuse_other_arrays(arrays, shapes, f"the checkpoint {folder / str(step)}")
    partial = len(arrays) < len(meta["arrays"])
    restored = ocp.checkpoint_utils.construct_restore_args(shapes)
    args = ocp.args.PyTreeRestore(shapes, restore_args=restored, partial_restore=partial)
    with _reading(folder, step):
      state = _state_handler().restore(folder / str(step) / "state", args=args)
    return state, meta | {"arrays": arrays}

  state, meta = run_on_all(read)
  found, bad = checksums.inspect(checksums.on_host(state))  # a collective if the state is sharded

  def compare() -> None:
    if wrong := [name for name in found if found[name]["crc32"] != meta["arrays"][name]["crc32"]]:
      reason = f"{len(wrong)} arrays do not match their checksums, e.g. {wrong[0]}"
      raise _damaged(folder, step, reason)
    if bad:
      raise _damaged(folder, step, f"{bad[0]} is not finite")

  run_on_all(compare)
  return state, meta


def _read_meta(folder: Path, step: int) -> dict[str, Any]:
  with _reading(folder, step):
    meta = dict(ocp.JsonCheckpointHandler().restore(folder / str(step) / "meta"))
    digest = meta.pop("crc32", None)  # older checkpoints have none
    if digest is not None and digest != checksums.digest(meta):
      raise ValueError("the metadata does not match its checksum")
    if meta["step"] != step or "step" not in meta["arrays"]:
      raise ValueError(f"the metadata says step {meta['step']}")
  return meta


@contextlib.contextmanager
def _reading(folder: Path, step: int) -> Iterator[None]:
  """Adds the path to errors and turns them into DamagedError if the content is wrong."""
  try:
    yield
  except Exception as error:
    first = error.__cause__ or error  # orbax wraps tensorstore's
    if _shows_damage(first):
      raise _damaged(folder, step, cause(first)) from error
    reason = f"the checkpoint {folder / str(step)} cannot be read now: {cause(first)}"
    raise CheckpointError(reason) from error


def _shows_damage(error: BaseException) -> bool:
  if isinstance(error, OSError):
    return isinstance(error, FileNotFoundError)
  if code := re.match("([A-Z_]+): ", str(error)):
    return code[1] in _DAMAGE
  return isinstance(error, ValueError | LookupError | TypeError)  # of a parser


def _state_handler() -> ocp.PyTreeCheckpointHandler:
  # Write one full replica: slicing on each device compiles per shape and device, which takes 5 s in
  # the first save of a tiny model on 8 devices.
  arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
  return ocp.PyTreeCheckpointHandler(
    type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
  )


class _CheckedState(ocp.AsyncCheckpointHandler):
  """Writes a state while computing the metadata."""

  save = restore = None  # `_restore` reads instead

  def __init__(self):
    self._arrays = _state_handler()
    self.finalize = self._arrays.finalize

  async def async_save(self, directory, args: "_CheckedSave") -> list[ocp.future.Future]:
    written = await self._arrays.async_save(directory, args=ocp.args.PyTreeSave(args.state))

    async def describe() -> None:
      meta = args.describe()
      if jax.process_index() == 0:
        (directory.parent / "meta").mkdir()
        (directory.parent / "meta" / "metadata").write_text(json.dumps(meta), "utf-8")

    # Last, so that no write is pending when it fails.
    return [*written, ocp.future.CommitFutureAwaitingContractedSignals(describe())]


@ocp.args.register_with_handler(_CheckedState, for_save=True, for_restore=True)
@dataclasses.dataclass
class _CheckedSave(ocp.args.CheckpointArgs):
  """A state, and a function that computes its metadata in a thread, or raises to cancel."""

  state: Any
  describe: Callable[[], dict[str, Any]]


def folder_of(workdir: str | Path) -> Path:
  """Returns the folder of a run's checkpoints, an `epath.Path` for a bucket, or raises."""
  here = check_name(Path(workdir).resolve())
  link = here / BUCKET_FILE
  if not (link.exists() and (url := link.read_text("utf-8")).startswith("gs://")):
    return here / FOLDER
  storage.forget_listings()
  return epath.Path(url) / FOLDER


def steps_on_disk(folder: Path) -> list[int]:
  """Returns the saved steps in order.

  Unfinished saves have non-numeric names on a disk, and no commit file in a bucket.
  """
  if storage.is_remote(str(folder)):
    return sorted(ocp.utils.checkpoint_steps(folder))
  if not folder.is_dir():
    return []
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def _refuse_not_finite(bad: list[str]) -> None:
  if bad:
    more = f" and {len(bad) - 1} more arrays are" if len(bad) > 1 else " is"
    raise CheckpointError(f"nothing was saved: {bad[0]}{more} not finite")


def _refuse_other_arrays(arrays: Mapping[str, dict], shapes, where: str) -> None:
  """Raises CheckpointError if the names, shapes or dtypes of arrays differ from the model's."""
  wanted = named(shapes)
  problems = [f"{name} is missing" for name in wanted if name not in arrays]
  problems += [f"{name} is not in the model" for name in arrays if name not in wanted]
  for name, x in wanted.items():
    saved = arrays.get(name, {"shape": x.shape, "dtype": str(x.dtype)})
    if (shape := tuple(saved["shape"])) != x.shape:
      problems.append(f"{name} is {shape}, in the model {x.shape}")
    if saved["dtype"] != str(x.dtype):
      problems.append(f"{name} has another dtype, {saved['dtype']}, in the model {x.dtype}")
  if problems:
    more = [f"and {len(problems) - 3} more"] if len(problems) > 3 else []
    listed = "; ".join([*problems[:3], *more])
    raise CheckpointError(f"{where} does not fit the model: {listed}")


def _damaged(folder: Path, step: int, reason: str) -> DamagedError:
  older = [s for s in steps_on_disk(folder) if s < step]
  then = f"resume from step {older[-1]}" if older else "start from the beginning"
  return DamagedError(
    f"the checkpoint {folder / str(step)} is damaged ({reason}); delete that folder to {then}"
  )


def cause(error: BaseException) -> str:
  """Returns the text of an OS error, else the first line of the message, shortened."""
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  # tensorstore's message ends with the OS error, then details in varying order.
  if match := re.search(r": ([^:]*) \[(?:os_error_code|tensorstore_spec)", str(error)):
    return match[1]
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return (lines[0] if lines else type(error).__name__)[:200]
