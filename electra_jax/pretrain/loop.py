"""Runs the training loop of a run, with its log lines, evaluations and checkpoints."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

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
class Services:
  """The end, checkpoints, stop signals, traces and time accounting of the loop."""

  clock: Clock
  checkpoints: Checkpoints
  stop: StopSignals
  tracer: Tracer
  goodput: Goodput
  started: Callable[[], None]  # called after the first step


class Due(NamedTuple):
  """What follows a step."""

  log: bool  # a line of metrics
  evaluate: bool
  save: bool
  decide: bool  # where a run by the clock ends
  signal: str | None  # that stops the run


def loop(
  run: Run, state, meta: dict | None, skipped: tuple[int, ...], log: Log, services: Services
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
  training = Loop(run, state, meta, skipped, log, services)
  batches = training.batches()
  if training.resume():
    for done in itertools.count(training.start + 1):
      if done > services.clock.horizon.steps:
        break
      training.step(done, batches)
      if training.after(done):
        break
  return training.state, training.evaluated


class Loop:
  """A training: its state, its sums since the last line, and what watches it."""

  def __init__(
    self, run: Run, state, meta: dict | None, skipped: tuple[int, ...], log: Log, services: Services
  ):
    self.run, self.state, self.skipped, self.log = run, state, skipped, log
    self.services, self.clock, self.goodput = services, services.clock, services.goodput
    self.start, self.evaluated = int(state.step), True
    c, hosts = run.config, jax.process_count()
    # Two CPU processes deadlock in their collectives when many steps are in flight.
    lockstep = hosts > 1 and jax.default_backend() == "cpu"
    self.window = metrics.Window(meta and meta["window"], ahead=0 if lockstep else 2)
    peak = run.peak[0] * jax.device_count()
    self.speed = Speed(
      self.goodput, c.train.batch_size, run.shards.seq_length, run.flops_per_step, peak
    )
    self.history = metrics.read_history(run.workdir / metrics.HISTORY_FILE)
    lines = [line for line in self.history if line["step"] <= self.start]
    reference = BandMonitor(*run.reference) if run.reference else None
    self.health = Health(specs.make_limits(c), lines, reference, run.suspended_checks)
    self.stragglers = (
      StragglerDetector(c.hosts.slow_ratio, c.train.batch_size, self.start) if hosts > 1 else None
    )

  def batches(self) -> Iterator:
    """Returns the batches of the steps after the start, placed on this process's devices.

    The first is read, and compiled for, to see whether memory is enough.
    """
    batches = batches_from(self.run, self.start, self.skipped)
    if self.start >= self.clock.horizon.steps:
      return batches
    with self.goodput.doing("data"):
      first = next(batches)
    with self.goodput.doing("compile"):
      processes.run_on_all(lambda: check_memory(self.run, self.state, first, self.clock))
    return itertools.chain([first], batches)

  def resume(self) -> bool:
    """Does what is left of the step that the run starts after; returns whether it goes on."""
    done = self.start
    missing = not any(x["step"] == done and x["split"] == "heldout" for x in self.history)
    if self._evaluates(done) and processes.broadcast_from_0(missing):
      self._evaluate(done)
    if self.evaluated and unhealthy(self.run, done, self.health):
      raise_warning(done, self.health)  # where it stopped before, the same command does not go on
    return self.evaluated

  def step(self, done: int, batches: Iterator) -> None:
    """Takes a step; the first one compiles and is not timed."""
    first = done == self.start + 1
    with self.goodput.doing("data"):
      batch = next(batches)
    self.services.tracer.begin(done)
    with self.goodput.doing("compile" if first else "steps"):
      with jax.profiler.StepTraceAnnotation("train", step_num=done):
        self.state, values = self.run.fns.train_step(self.state, batch, self.clock.placed)
      self.window.add(done, values)
      if first:
        self.window.drain()
    self.log.display.advance(done)
    if first:
      self.speed.restart(done)
      self.clock.restart(done)
      self.services.started()

  def after(self, done: int) -> bool:
    """Logs, evaluates and saves if that is due; returns whether the run ends."""
    due, secs_before = self._due(done), self.goodput.secs()
    if done == self.start + 1 and not due.log:  # shown, but no line of the history
      self.log.display.show(done, "train", self.window.values())
    self._finish_pending(done, due)
    if due.log:
      self._write_line(done)
    signal = due.signal
    if due.evaluate:
      self._evaluate(done)
      if not self.evaluated:
        signal = self.services.stop.requested()
    stopping = (due.log or due.evaluate) and unhealthy(self.run, done, self.health)
    ends = done == self.clock.horizon.steps or bool(signal) or stopping
    if due.save or ends:
      self._save(done, final=ends, now=stopping or due.decide)
    if due.evaluate or due.save or ends:
      self.log.journal.write("goodput", step=done, secs=self.goodput.secs())
    if stopping:
      raise_warning(done, self.health)
    if signal:
      self.log.display.print_line(f"{signal}: stopping after step {done:,}")
    elif due.decide:
      begin_decay(done, self.clock, secs_before, self.goodput, self.log)
    return bool(signal)

  def _due(self, done: int) -> Due:
    last, signal = done == self.clock.horizon.steps, self.services.stop.requested()
    decide = self.clock.is_due(done)
    c = self.run.config
    return Due(
      log=last or done % c.log.every_steps == 0,
      evaluate=decide or self._evaluates(done),
      save=last or bool(signal) or decide or done % c.checkpoint.every_steps == 0,
      decide=decide,
      signal=signal,
    )

  def _evaluates(self, done: int) -> bool:
    every = self.run.config.eval.every_steps
    return done in (0, self.clock.horizon.steps) or bool(every and done % every == 0)

  def _finish_pending(self, done: int, due: Due) -> None:
    """Waits for the steps in flight where what follows is not training time; ends a trace."""
    tracer = self.services.tracer
    with self.goodput.doing("steps"):
      if due.log or due.evaluate or due.save or tracer.ends(done):
        self.window.drain()
    last = done == self.clock.horizon.steps
    if (last or tracer.ends(done)) and (traced := tracer.finish()):
      self.log.display.print_line(traced)

  def _write_line(self, done: int) -> None:
    values = {**self.window.close(), **self.speed.read(done, self.clock.horizon.steps - done)}
    if self.clock.is_open:
      values["eta_secs"] = self.clock.secs_left()
    if self.stragglers:
      waited = self.goodput.secs()["data"]
      values |= self.stragglers.after(done, values["sequences_per_sec"], waited, self.log)
    record(done, "train", values, self.log, self.health)

  def _evaluate(self, done: int) -> None:
    with self.goodput.doing("evaluation"):
      self.evaluated = evaluate(
        self.run, self.state.params, done, self.log, self.health, self.services.stop
      )

  def _save(self, done: int, final: bool, now: bool) -> None:
    """Starts to save, and waits for it if `now`."""
    with self.goodput.doing("save"):
      sums = {"window": self.window.state_dict(), "skipped": self.skipped}
      if kept := self.clock.state_dict():
        sums["clock"] = kept
      save(self.run, self.state, done, sums, self.log, self.services.checkpoints, final)
      if now:
        settle(self.run, self.log, self.services.checkpoints)


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
