"""Pretraining, from the configuration to the last checkpoint; see commands/train.py."""

import contextlib
import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict

from electra_jax.config import compare, registry, schema, specs, validate
from electra_jax.core.objectives import OBJECTIVES
from electra_jax.data import pretrain_batches
from electra_jax.interop import initial
from electra_jax.monitor import curves, journal, metrics, tracing, trackers
from electra_jax.monitor.display import Activity, Display, doing
from electra_jax.monitor.goodput import Goodput
from electra_jax.monitor.log import Log
from electra_jax.monitor.thinned import Thinned
from electra_jax.monitor.tracing import Tracer
from electra_jax.monitor.trackers import Start, Tracker
from electra_jax.pretrain import summary
from electra_jax.pretrain.clock import Clock
from electra_jax.pretrain.loop import Loop, Services
from electra_jax.pretrain.run import Run, prepare, save_record, start_or_continue
from electra_jax.pretrain.start import make_state
from electra_jax.runtime import (
  bucket,
  checkpoint,
  jax_flags,
  memory,
  parallel,
  processes,
  terminal,
  version,
)
from electra_jax.runtime.bucket import Bucket
from electra_jax.runtime.checkpoint import Checkpoints
from electra_jax.runtime.interrupt import StopSignals
from electra_jax.runtime.signals import STOPPED
from electra_jax.runtime.workdir import BUCKET_FILE, CONFIG_FILE, claim, read_config

AGAIN = "by training in the same workdir again"
# {activity of Goodput: its name in the display}; steps have a progress bar.
DOING = {
  "start": "starting",
  "data": "reading",
  "restore": "preparing the state",
  "compile": "compiling",
  "evaluation": "evaluating",
  "save": "saving",
  "rest": "preparing",
}
# (step, "train" or "heldout", {metric: number}), for each line of metrics.jsonl.
Hook = Callable[[int, str, Mapping[str, float | None]], None]


class Trained(NamedTuple):
  """The result of a training."""

  workdir: Path  # the local folder, for a URL
  step: int  # steps done
  finished: bool  # whether all steps and the last evaluation are done; else training again resumes

  def history(self, split: str = "heldout") -> list[dict]:
    """Returns the metrics.jsonl lines of a split, "train" or "heldout"."""
    lines = metrics.read_history(self.workdir / metrics.HISTORY_FILE)
    return [line for line in lines if line["split"] == split]


@jax_flags.pinned()
def run(
  config: ConfigDict,
  workdir: str | Path,
  *,
  verify: bool = False,
  coordinator: str = "",
  num_processes: int = 0,
  process_id: int = -1,
  started: float | None = None,
  resume: str = AGAIN,
  given: Collection[str] = (),
) -> int:
  """Joins the other processes, if any, and trains; returns the exit code.

  Args:
    started: `time.monotonic()` when the program started, for train.minutes; None: now.
    verify: check the checksum of every shard first.
    coordinator, num_processes, process_id: as in `processes.initialize`.
    resume: how to resume, for the last line of a stopped run.
    given: fields set on the command line, which init_from must not change.
  """
  started = time.monotonic() if started is None else started
  with doing("joining the other processes", terminal.log_console()):
    processes.initialize(coordinator, num_processes, process_id, config.hosts.timeout_secs)
  parallel.keep_freed_memory()
  signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # ignore requests for a trace before the first step
  trained = _train(config, workdir, verify, started, (), resume, given)
  return 0 if trained.finished else STOPPED


@jax_flags.pinned()
def train(
  config: ConfigDict, workdir: str | Path, *, verify: bool = False, hooks: Sequence[Hook] = ()
) -> Trained:
  """Trains until the last step or a stop signal (Ctrl-C, or interrupt in a notebook).

  Resumes from the newest checkpoint in the workdir, bit for bit.

  Args:
    verify: check the checksum of every shard first.
    hooks: called for each line of metrics, in process 0; an exception ends the run.

  Raises:
    ValueError, OSError: one line about the configuration, data, workdir or checkpoint.
    metrics.NotFiniteError: a number is NaN or infinite; the newest checkpoint is finite.
  """
  return _train(config, workdir, verify, time.monotonic(), hooks, AGAIN)


def _train(
  config: ConfigDict,
  workdir: str | Path,
  verify: bool,
  begun: float,
  hooks: Sequence[Hook],
  resume: str,
  given: Collection[str] = (),
) -> Trained:
  with contextlib.ExitStack() as stack:
    with doing(f"opening {workdir}", terminal.log_console()):
      folder, uploads = stack.enter_context(bucket.opened(workdir))
    stack.enter_context(_naming_the_checkpoint(folder))
    return _train_in(config, folder, uploads, verify, begun, hooks, resume, given)


def _train_in(
  config: ConfigDict,
  workdir: Path,
  uploads: Bucket | None,
  verify: bool,
  begun: float,
  hooks: Sequence[Hook],
  resume: str,
  given: Collection[str],
) -> Trained:
  goodput = Goodput()
  console, last_secs = terminal.log_console(), journal.first_step_seconds(journal.read(workdir))

  def now() -> Activity:
    name, secs = goodput.now()
    return Activity(DOING.get(name), secs, last_secs.get(name))

  @functools.cache  # not again after a rollback
  def started() -> None:
    last_secs.clear()
    events.write("first step", secs=goodput.secs())

  with _compilation_cache(workdir), contextlib.ExitStack() as stack:
    with Display(console, now) as display:
      with goodput.doing("start"):  # starts the devices
        console.quiet = jax.process_index() > 0
      with goodput.doing("data"):
        run, allowed = processes.run_on_all(lambda: begin(config, workdir, verify, stack, given))
        processes.assert_same(run.fingerprint | {"workdir": shared_or_not(workdir)})
      events, warned = journal.Journal(workdir, jax.process_index() == 0), []

      def warn(texts: Iterable[str]) -> None:
        for text in texts:
          display.print_line(f"warning: {text}", style="bold")
          warned.append(text)

      summary.describe(run, console, allowed)
      warn(contradictions(run, allowed))
      checkpoints = stack.enter_context(_open_checkpoints(run, uploads))
      processes.run_on_all(lambda: check_state_memory(run))
      with goodput.doing("restore"), processes.abort_if_peer_lost():
        state, meta = make_state(run, checkpoints, console, warn)
      # Only now, so that a failed resume does not change the record of its run.
      processes.run_on_all(lambda: save_record(run) if jax.process_index() == 0 else None)
      events.write("start", step=int(state.step), **start_event(run))
      for text in warned:
        events.write("warning", text=text)
      clock = Clock(config, goodput, begun, meta and meta.get("clock"))
      if clock.was_decided and (unused := unread(allowed, schema.UNTIL_DECIDED)):
        warn([f"{', '.join(unused)} has no effect: the run ends at step {clock.horizon.steps:,}"])
      display.begin(int(state.step), None if clock.is_open else clock.horizon.steps)
      steps = tracing.parse_steps("" if console.quiet else config.profile.steps)
      tracer = Tracer(workdir / "profile", steps, config.profile.signal_steps)
      with StopSignals(display.announce) as stop, tracer, processes.abort_if_peer_lost():
        services = Services(clock, checkpoints, stop, tracer, goodput, started)
        state, evaluated = train_with_rollback(run, state, meta, display, services, hooks)
        with goodput.doing("save"):  # not interrupted by a second signal
          checkpoints.wait()
    done = int(state.step)
    finished = evaluated and done == clock.horizon.steps
    events.write("goodput", step=done, secs=goodput.secs())
    if not console.quiet:
      if done:
        summary.finish(run, done, console)
      console.print(terminal.fill(f"time:       {goodput.summary()}", console.width, indent=12))
      if not finished:
        saved = f", saved: {checkpoint.folder_of(workdir) / str(done)}" if done else ""
        of = "" if clock.is_open else f" of {clock.horizon.steps:,}"
        console.print(f"stopped after step {done:,}{of}{saved}\nresume {resume}")
    return Trained(workdir, done, finished)


def _open_checkpoints(run: Run, uploads: Bucket | None) -> Checkpoints:
  with processes.abort_if_peer_lost():  # orbax synchronises the processes here
    return Checkpoints(
      run.workdir,
      keep=run.config.checkpoint.keep,
      keep_every_steps=run.config.checkpoint.keep_every_steps,
      to_global=run.fns.sharding.to_global,
      bucket=uploads,
    )


@contextlib.contextmanager
def _naming_the_checkpoint(workdir: Path) -> Iterator[None]:
  """Adds the newest checkpoint to a KeyboardInterrupt."""
  try:
    yield
  except KeyboardInterrupt as error:
    folder = checkpoint.folder_of(workdir)
    steps = checkpoint.steps_on_disk(folder)
    saved = f"the newest checkpoint: {folder / str(steps[-1])}" if steps else "nothing is saved yet"
    raise type(error)(f"{str(error) or 'interrupted'}; {saved}") from None


def train_with_rollback(
  run: Run, state, meta: dict | None, display: Display, services: Services, hooks: Sequence[Hook]
):
  """Trains to the end; with health.on_nan=rollback, restores and skips the batch that gave NaN.

  Returns and raises as `Loop.train`, with advice in a NotFiniteError.
  """
  limit = run.config.health.max_rollbacks if run.config.health.on_nan == "rollback" else 0
  skipped = tuple(meta.get("skipped", ())) if meta else ()
  display.baselines = run.baselines
  while True:
    log = Log(
      run.workdir,
      display,
      start_step=int(state.step),
      resumed=meta is not None,
      others=destinations(run, int(state.step), meta is not None),
      hooks=hooks,
      must_write=run.config.checkpoint.on_error == "stop",
      enabled=jax.process_index() == 0,
    )
    with contextlib.closing(log):
      loop = Loop(run, state, meta, skipped, log, services)
      try:
        return loop.train()
      except metrics.NotFiniteError as error:
        if error.step is None or len(skipped) >= limit:
          log.journal.write("warning", text=f"stopped: {error}")
          log.journal.write("diverged", step=error.step)
          log.journal.write("goodput", step=error.step, secs=services.goodput.secs())
          raise metrics.NotFiniteError(f"{error}; {remedy(run.config.optimizer)}") from None
        skipped = (*skipped, pretrain_batches.batch_number(error.step - 1, skipped))
        which = f"{len(skipped)} of at most {limit}"
        log.warn([f"{error}: rolling back to skip batch {skipped[-1]:,} ({which})"])
        with services.goodput.doing("save"):
          loop.settle()
    del state, loop  # donated to the failed step
    with services.goodput.doing("restore"):
      state, meta = make_state(run, services.checkpoints, display.console, log.warn)


def destinations(run: Run, step: int, resumed: bool) -> list[Callable[[], Tracker]]:
  """Returns functions that open the other destinations of lines: trackers and curves."""
  start = Start(run.workdir, step, resumed, compare.flatten(run.record))
  names = trackers.parse(run.config.log.trackers)
  made = [functools.partial(trackers.TRACKERS[name].make, start) for name in names]
  draw, path = functools.partial(summary.draw_curves, run), run.workdir / metrics.HISTORY_FILE
  return [*made, lambda: curves.Redrawn(draw, Thinned(metrics.lines(path)))]


def remedy(o: ConfigDict) -> str:
  """Returns advice on config.optimizer after a NaN or infinity."""
  rates = {k: o[k] for k in ("learning_rate", "generator_learning_rate") if o[k]}
  listed = " or ".join(f"optimizer.{name} (now {rate:g})" for name, rate in rates.items())
  return f"try a lower {listed}, or more optimizer.warmup_steps (now {o.warmup_steps:,})"


@contextlib.contextmanager
def _compilation_cache(workdir: Path) -> Iterator[None]:
  """Caches compiled programs in the workdir, or JAX_COMPILATION_CACHE_DIR, for resumed runs."""
  if jax.config.jax_compilation_cache_dir is not None:
    yield
    return
  jax.config.update("jax_compilation_cache_dir", str(workdir.absolute() / "compiled"))
  # The path of XLA's caches would be part of every key, so a moved run would compile again.
  jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
  try:
    yield
  finally:  # another run of this process uses another folder
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def begin(
  config: ConfigDict,
  workdir: Path,
  verify: bool,
  stack: contextlib.ExitStack,
  given: Collection[str] = (),
) -> tuple[Run, list[str]]:
  """Checks the configuration and locks the workdir until the stack is closed.

  Returns the run and the allowed changes of fields.
  """
  if jax.process_index() == 0:  # `run_on_all` raises on the others, too
    registry.check((read_config(workdir) or {}).get(specs.REGISTERED, {}), workdir)
  resumes = checkpoint.steps_on_disk(checkpoint.folder_of(workdir)) and read_config(workdir)
  config, names = initial.pinned(config, resumes or {})
  saved = compare.upgrade(compare.flatten(resumes)) if resumes else None
  config, taken = initial.resolve(config, given, saved)
  validate.check(config)
  validate.check_devices(config)
  if jax.process_index() == 0:
    stack.enter_context(claim(workdir))
  run = dataclasses.replace(prepare(config, workdir, verify), taken=taken, hub_names=names)
  return run, start_or_continue(run) if jax.process_index() == 0 else []


def shared_or_not(workdir: Path) -> str:
  """Describes whether this process sees the configuration written by process 0."""
  if (workdir / BUCKET_FILE).exists():
    return (workdir / BUCKET_FILE).read_text("utf-8")
  return "a shared folder" if (workdir / CONFIG_FILE).exists() else "a folder that is not shared"


def unread(fields: list[str], read: str) -> list[str]:
  """Returns the fields whose schema row has `read`, the point after which a run ignores them."""
  return [field for field in fields if field in schema.names(read=read)]


def contradictions(run: Run, allowed: list[str]) -> Iterator[str]:
  """Yields a warning for each field with no or a surprising effect; arguments as `describe`."""
  c, changed = run.config, compare.changed_from_base(run.config)
  if unused := unread(allowed, schema.AT_START):
    yield f"{', '.join(unused)} has no effect on a run that resumes from a checkpoint"
  for name, row in schema.PRETRAINING.items():
    if row.builds not in (schema.EXAMPLES, schema.SEGMENTS) or name not in changed:
      continue
    field = name.partition(".")[2]
    built, wanted = run.shards.manifest["build"].get(field), c.data[field]
    if built not in (None, wanted):
      yield (
        f"{name}={wanted!r}, but the shards were built with {built!r}: training reads them as"
        " they are; build others into another data.dir to change that"
      )
  if "contrast_group" in OBJECTIVES[c.objective.name].own_fields and c.objective.contrast_group < 2:
    yield "objective.contrast_group=1: no sequence has another in its group, so contrast_loss is 0"
  if (warmup := c.optimizer.warmup_steps) > c.train.steps:
    yield (
      f"optimizer.warmup_steps={warmup:,} is above train.steps={c.train.steps:,}: the learning rate"
      f" ends at {c.train.steps / warmup:.1%} of optimizer.learning_rate"
    )


def start_event(run: Run) -> dict:
  """Returns the code, devices and command of this start, for the journal."""
  devices = jax.devices()
  return {
    "code": version.code_version(),
    "jax": jax.__version__,
    "devices": len(devices),
    "device_kind": devices[0].device_kind,
    "processes": jax.process_count(),
    "peak_flops": len(devices) * run.peak[0],
    "pairs": len(run.pairs.pairs) if run.pairs else 0,
    "command": terminal.command_line(),
  }


def check_state_memory(run: Run) -> None:
  """Raises ValueError if the weights and the optimizer state exceed the free memory."""
  remedy = "lower the networks' size, or set optimizer.sharded=True on more devices"
  memory.refuse("the state", run.fns.sharding.bytes_per_device(), remedy)
