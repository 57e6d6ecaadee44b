"""Runs the training loop of a run, with its log lines, evaluations and checkpoints."""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import numpy as np

from electra_jax.config import specs
from electra_jax.data import pretrain_batches
from electra_jax.interop import sources
from electra_jax.monitor import metrics
from electra_jax.monitor.bands import BandMonitor
from electra_jax.monitor.goodput import Goodput, Speed
from electra_jax.monitor.health import Health
from electra_jax.monitor.log import Log
from electra_jax.monitor.stragglers import StragglerDetector
from electra_jax.monitor.tracing import Tracer
from electra_jax.pretrain.clock import Clock
from electra_jax.pretrain.run import Run
from electra_jax.runtime import memory, parallel, processes, terminal, version
from electra_jax.runtime.checkpoint import Checkpoints, WriteError
from electra_jax.runtime.interrupt import StopSignals
from electra_jax.runtime.workdir import check_claim


class UnhealthyError(ValueError):
  """Training stopped because of a warning (`config.health.on_warning`)."""


@dataclasses.dataclass(frozen=True)
class Monitors:
  """The end, checkpoints, stop signals, traces and time accounting of the loop."""

  clock: Clock
  checkpoints: Checkpoints
  stop: StopSignals
  tracer: Tracer
  goodput: Goodput
  started: Callable[[], None]  # called after the first step


def loop(
  run: Run, state, meta: dict | None, skipped: tuple[int, ...], log: Log, monitors: Monitors
):
  """Trains from the state's step to the last, or until stopped.

  Returns the state, and whether the evaluation after its step, if any is due, is done. One that a
  stop interrupts writes nothing; the resumed run repeats it.

  Args:
    meta: the metadata saved with the state, None at step 0.
    skipped: indices of the batches to leave out.

  Raises:
    metrics.NotFiniteError: a number is NaN or infinite.
    UnhealthyError, WriteError, OSError: if the configuration makes them end the run.
  """
  c, hosts, clock = run.config, jax.process_count(), monitors.clock
  start, goodput, tracer = int(state.step), monitors.goodput, monitors.tracer
  batches = batches_from(run, start, skipped)
  if start < clock.horizon.steps:
    with goodput.doing("data"):
      batch = next(batches)
    with goodput.doing("compile"):
      processes.run_on_all(lambda: check_memory(run, state, batch, clock))
    batches = itertools.chain([batch], batches)
  # Two CPU processes deadlock in their collectives when many steps are in flight.
  lockstep = hosts > 1 and jax.default_backend() == "cpu"
  window = metrics.Window(meta and meta["window"], ahead=0 if lockstep else 2)
  peak = run.peak[0] * jax.device_count()
  speed = Speed(goodput, c.train.batch_size, run.shards.seq_length, run.flops_per_step, peak)
  history = metrics.read_history(run.workdir / metrics.HISTORY_FILE)
  reference = BandMonitor(*run.reference) if run.reference else None
  lines = [line for line in history if line["step"] <= start]
  health = Health(specs.make_limits(c), lines, reference, run.suspended_checks)
  compare = StragglerDetector(c.hosts.slow_ratio, c.train.batch_size, start) if hosts > 1 else None

  def is_due(step: int) -> bool:
    every = c.eval.every_steps
    return step in (0, clock.horizon.steps) or bool(every and step % every == 0)

  missing = not any(line["step"] == start and line["split"] == "heldout" for line in history)
  evaluated = True
  if is_due(start) and processes.broadcast_from_0(missing):
    with goodput.doing("evaluation"):
      evaluated = evaluate(run, state.params, start, log, health, monitors.stop)
    if not evaluated:
      return state, False
  if unhealthy(run, start, health):  # where it stopped before: the same command does not go on
    raise_warning(start, health)
  for done in itertools.count(start + 1):
    if done > clock.horizon.steps:
      break
    first = done == start + 1  # the first step compiles and is not timed
    with goodput.doing("data"):
      batch = next(batches)
    tracer.begin(done)
    with goodput.doing("compile" if first else "steps"):
      with jax.profiler.StepTraceAnnotation("train", step_num=done):
        state, values = run.fns.train_step(state, batch, clock.placed)
      window.add(done, values)
      if first:
        window.drain()
    log.display.advance(done)
    if first:
      speed.restart(done)
      clock.restart(done)
      monitors.started()
    last, signal_name = done == clock.horizon.steps, monitors.stop.requested()
    deciding, secs_before = clock.is_due(done), goodput.secs()
    evaluating = deciding or is_due(done)
    saving = last or signal_name or deciding or done % c.checkpoint.every_steps == 0
    logging = last or done % c.log.every_steps == 0
    if first and not logging:  # shown, but no line of the history
      log.display.show(done, "train", window.values())
    with goodput.doing("steps"):
      if logging or evaluating or saving or tracer.ends(done):
        window.drain()  # count pending steps as training time
    if (last or tracer.ends(done)) and (traced := tracer.finish()):
      log.display.print_line(traced)
    if logging:
      values = {**window.close(), **speed.read(done, clock.horizon.steps - done)}
      if clock.is_open:
        values["eta_secs"] = clock.secs_left()
      if compare:
        values |= compare.after(done, values["sequences_per_sec"], goodput.secs()["data"], log)
      record(done, "train", values, log, health)
    if evaluating:
      with goodput.doing("evaluation"):
        evaluated = evaluate(run, state.params, done, log, health, monitors.stop)
      if not evaluated:
        signal_name = monitors.stop.requested()
    stopping = (logging or evaluating) and unhealthy(run, done, health)
    ends = last or bool(signal_name) or stopping
    if saving or ends:
      with goodput.doing("save"):
        sums = {"window": window.state_dict(), "skipped": skipped}
        if kept := clock.state_dict():
          sums["clock"] = kept
        save(run, state, done, sums, log, monitors.checkpoints, final=ends)
        if stopping or deciding:
          settle(run, log, monitors.checkpoints)
    if evaluating or saving or ends:
      log.journal.write("goodput", step=done, secs=goodput.secs())
    if stopping:
      raise_warning(done, health)
    if signal_name:
      log.display.print_line(f"{signal_name}: stopping after step {done:,}")
      break
    if deciding:
      begin_decay(done, clock, secs_before, goodput, log)
  return state, evaluated


def begin_decay(
  done: int, clock: Clock, secs_before: dict[str, float], goodput: Goodput, log: Log
) -> None:
  """Decides where the run ends; `secs_before` are of before the evaluation and the save there."""
  secs = {name: now - secs_before.get(name, 0.0) for name, now in goodput.secs().items()}
  clock.decide(done, secs.get("evaluation", 0.0), secs["save"])
  steps, decay_steps = clock.horizon
  log.journal.write("horizon", step=done, steps=steps, decay_steps=decay_steps)
  log.display.set_steps(steps)
  left = terminal.duration(clock.secs_left())
  log.display.print_line(f"step {done:,}: the rate decays until step {steps:,}, {left} are left")


def batches_from(run: Run, start: int, skipped: tuple[int, ...]):
  """Yields the batches of the steps after `start`, placed on this process's devices."""
  batches = pretrain_batches.train_batches(
    run.shards,
    seed=run.config.seed,
    batch_size=run.config.train.batch_size,
    start_step=start,
    skipped=skipped,
    host=jax.process_index(),
    hosts=jax.process_count(),
  )
  return parallel.prefetch(batches)


def check_memory(run: Run, state, batch, clock: Clock) -> None:
  """Compiles the step and the evaluation; raises ValueError if memory is too short for one."""
  step = run.fns.train_step.lower(state, batch, clock.placed).compile()
  memory.check("the training step", step, "train.accumulation, or lower train.batch_size")
  if run.heldout is not None:
    rows = run.eval_batch_size // jax.device_count()
    empty = jax.tree.map(lambda x: np.zeros((len(x), rows, *x.shape[2:]), x.dtype), batch)
    evaluation = run.fns.eval_step.lower(state.params, empty).compile()
    memory.check("evaluation", evaluation, "the number of devices, or lower eval.batch_size")


def record(done: int, split: str, values: dict, log: Log, health: Health) -> None:
  """Writes a log line and warnings about it; raises OSError if the line must be written."""
  log.write(done, split, values)
  log.warn(health.check(done, values, split))


def unhealthy(run: Run, step: int, health: Health) -> bool:
  """Returns whether `health.on_warning` stops all processes for a warning of this step."""
  stops = run.config.health.on_warning == "stop"
  return stops and processes.broadcast_from_0(bool(health.warnings(step)))


def raise_warning(step: int, health: Health) -> None:
  """Raises UnhealthyError with the step's first warning; on a process that lacks it `PeerError`."""

  def fail():
    if warnings := health.warnings(step):
      raise UnhealthyError(f"stopped by config.health.on_warning: {warnings[0]}")

  processes.run_on_all(fail)


def evaluate(
  run: Run, params: dict, done: int, log: Log, health: Health, stop: StopSignals
) -> bool:
  """Evaluates on the held-out documents, if there are any, writes a log line and checks it.

  Returns False, and writes nothing, if a stop is requested before the last batch.
  """
  if run.heldout is None:
    return True
  batches = pretrain_batches.eval_batches(
    run.heldout,
    batch_size=run.eval_batch_size,
    max_examples=run.config.eval.max_examples,
    host=jax.process_index(),
    hosts=jax.process_count(),
  )
  values = metrics.evaluate(
    run.fns.eval_step, params, parallel.prefetch(batches), done, stop.requested
  )
  if values is None:
    return False
  if run.pairs:
    weights = sources.main_networks(run.spec, params)["discriminator"].weights
    values["pairs_accuracy"] = run.pairs.accuracy(weights, stop.requested)
    if values["pairs_accuracy"] is None:
      return False
  record(done, "heldout", values, log, health)
  return True


def save(
  run: Run, state, done: int, sums: dict, log: Log, checkpoints: Checkpoints, final: bool
) -> None:
  """Starts saving the state with the metadata needed to resume.

  Args:
    sums: the window sums and the skipped batches; the sums are known to be finite.
    final: True for the last save, whose failure is always raised.
  """
  sequences = pretrain_batches.batch_number(done, sums["skipped"]) * run.config.train.batch_size
  meta = {
    "config": run.record,
    "seed": run.config.seed,
    "code": version.code_version(),
    "position": {"sequences": sequences, "epoch": sequences // run.shards.num_examples},
    **sums,
  }

  def failure() -> ValueError | None:
    try:
      checkpoints.save(done, state, meta)
    except ValueError as error:
      if processes.only_raised(error, WriteError):
        return error
      raise

  def ready() -> None:
    if jax.process_index() == 0:
      check_claim(run.workdir)
      log.sync()  # metrics.jsonl must reach the checkpoint's step

  processes.run_on_all(ready)
  if first := failure():
    _reopen_or_raise(run, checkpoints, first)
    again = failure()  # None if the first error came from the previous save
    if again and final:
      raise again
    log.warn([f"{first}; training continues"])


def settle(run: Run, log: Log, checkpoints: Checkpoints) -> None:
  """Waits for a save in progress; its failure is raised, or a warning, as at the next `save`."""
  try:
    processes.run_on_all(checkpoints.wait)
  except ValueError as error:
    if not processes.only_raised(error, WriteError):
      raise
    _reopen_or_raise(run, checkpoints, error)
    log.warn([f"{error}; training continues"])


def _reopen_or_raise(run: Run, checkpoints: Checkpoints, failed: ValueError) -> None:
  """Abandons a failed save, whose error is raised if `checkpoint.on_error` is "stop"."""
  if run.config.checkpoint.on_error == "stop":
    raise failed
  try:
    checkpoints.reopen()
  except ValueError as error:
    raise WriteError(f"{failed}; {error}") from None
