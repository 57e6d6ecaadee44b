"""The training loop of a run, with log lines, evaluations and checkpoints."""

import contextlib
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


class Services(NamedTuple):
  """What the loop uses: the clock, checkpoints, stop signals, traces and time accounting."""

  clock: Clock
  checkpoints: Checkpoints
  stop: StopSignals
  tracer: Tracer
  goodput: Goodput
  started: Callable[[], None]  # called after the first step


class Loop:
  """A training: the state, the sums since the last line, and the monitors.

  Args:
    meta: the metadata saved with the state; None at step 0.
    skipped: indices of the batches to leave out.

  Fields:
    evaluated: whether an evaluation that is due after the state's step is done.
  """

  def __init__(
    self, run: Run, state, meta: dict | None, skipped: tuple[int, ...], log: Log, services: Services
  ):
    self.run, self.state, self.skipped, self.log = run, state, skipped, log
    self.clock, self.checkpoints, self.stop, self.tracer, self.goodput, self.started = services
    self.start, self.evaluated = int(state.step), True
    c, hosts = run.config, jax.process_count()
    # CPU processes deadlock in collectives when many steps are in flight.
    lockstep = hosts > 1 and jax.default_backend() == "cpu"
    self.window = metrics.Window(meta and meta["window"], ahead=0 if lockstep else 2)
    peak = run.peak[0] * jax.device_count()
    self.speed = Speed(
      self.goodput, c.train.batch_size, run.shards.seq_length, run.flops_per_step, peak
    )
    self.history = run.workdir / metrics.HISTORY_FILE
    lines = (line for line in metrics.lines(self.history) if line["step"] <= self.start)
    reference = BandMonitor(*run.reference) if run.reference else None
    self.health = Health(specs.make_limits(c), lines, reference, run.suspended_checks)
    self.stragglers = (
      StragglerDetector(c.hosts.slow_ratio, c.train.batch_size, self.start) if hosts > 1 else None
    )

  def train(self):
    """Trains from the state's step to the last, or until stopped.

    Returns the state and `evaluated`. An evaluation interrupted by a stop writes nothing; the
    resumed run repeats it.

    Raises:
      metrics.NotFiniteError: a number is NaN or infinite.
      UnhealthyError, WriteError, OSError: if the configuration lets them end the run.
    """
    batches = self._batches()
    if self._resume():
      for done in itertools.count(self.start + 1):
        if done > self.clock.horizon.steps:
          break
        self._step(done, batches)
        if self._after(done):
          break
    return self.state, self.evaluated

  def _batches(self) -> Iterator:
    """Returns the batches after the start, on this process's devices.

    Reads the first batch and compiles the programs for it, to check memory.
    """
    batches = batches_from(self.run, self.start, self.skipped)
    if self.start >= self.clock.horizon.steps:
      return batches
    with self.goodput.doing("data"):
      first = next(batches)
    with self.goodput.doing("compile"), self.stop.at_once():
      processes.run_on_all(lambda: self._check_memory(first))
    return itertools.chain([first], batches)

  def _check_memory(self, batch) -> None:
    """Compiles the step and the evaluation; raises ValueError if one exceeds the memory."""
    run = self.run
    step = run.fns.train_step.lower(self.state, batch, self.clock.placed).compile()
    memory.check("the training step", step, "train.accumulation, or lower train.batch_size")
    if run.heldout is not None:
      rows = run.eval_batch_size // jax.device_count()
      empty = jax.tree.map(lambda x: np.zeros((len(x), rows, *x.shape[2:]), x.dtype), batch)
      # Placed as in an evaluation: JAX traces and compiles for other arrays again.
      placed = parallel.split_rows(empty)
      evaluation = run.fns.eval_step.lower(self.state.params, placed).compile()
      memory.check("evaluation", evaluation, "the number of devices, or lower eval.batch_size")

  def _resume(self) -> bool:
    """Evaluates and checks at the start's step, if that is left; returns whether to train."""
    done = self.start
    if self._evaluates(done):
      lines = metrics.lines(self.history)
      there = any(x["step"] == done and x["split"] == "heldout" for x in lines)
      if processes.broadcast_from_0(not there):
        self._evaluate(done)
    if self.evaluated and self._unhealthy(done):
      self._raise_warning(done)  # the same command stops again
    return self.evaluated

  def _step(self, done: int, batches: Iterator) -> None:
    """Takes a step; the first compiles and is not timed."""
    first = done == self.start + 1
    with self.goodput.doing("data"):
      batch = next(batches)
    self.tracer.begin(done)
    soon = self.stop.at_once() if first else contextlib.nullcontext()
    with self.goodput.doing("compile" if first else "steps"):
      with soon, jax.profiler.StepTraceAnnotation("train", step_num=done):
        self.state, values = self.run.fns.train_step(self.state, batch, self.clock.placed)
      self.window.add(done, values)
      if first:
        self.window.drain()
    self.log.display.advance(done)
    if first:
      self.speed.restart(done)
      self.clock.restart(done)
      self.started()

  def _after(self, done: int) -> bool:
    """Logs, evaluates and saves when due; returns whether the run ends."""
    c, last, signal = self.run.config, done == self.clock.horizon.steps, self.stop.requested()
    decides = self.clock.is_due(done)  # the end of a run with train.minutes
    logs = last or done % c.log.every_steps == 0
    evaluates = decides or self._evaluates(done)
    saves = last or bool(signal) or decides or done % c.checkpoint.every_steps == 0
    secs_before = self.goodput.secs()
    if done == self.start + 1 and not logs:  # shown but not recorded
      self.log.display.show(done, "train", self.window.values())
    self._finish_pending(done, logs or evaluates or saves)
    if logs:
      self._write_line(done)
    if evaluates:
      self._evaluate(done)
      if not self.evaluated:
        signal = self.stop.requested()
    stopping = (logs or evaluates) and self._unhealthy(done)
    ends = last or bool(signal) or stopping
    if saves or ends:
      self._save(done, final=ends, now=stopping or decides)
    if evaluates or saves or ends:
      self.log.journal.write("goodput", step=done, secs=self.goodput.secs())
    if stopping:
      self._raise_warning(done)
    if signal:
      self.log.display.print_line(f"{signal}: stopping after step {done:,}")
    elif decides:
      self._begin_decay(done, secs_before)
    return bool(signal)

  def _evaluates(self, done: int) -> bool:
    every = self.run.config.eval.every_steps
    return done in (0, self.clock.horizon.steps) or bool(every and done % every == 0)

  def _finish_pending(self, done: int, pauses: bool) -> None:
    """Waits for steps in flight before a pause or the end of a trace, and ends the trace."""
    with self.goodput.doing("steps"):
      if pauses or self.tracer.ends(done):
        self.window.drain()
    last = done == self.clock.horizon.steps
    if (last or self.tracer.ends(done)) and (traced := self.tracer.finish()):
      self.log.display.print_line(traced)

  def _write_line(self, done: int) -> None:
    values = {**self.window.close(), **self.speed.read(done, self.clock.horizon.steps - done)}
    if self.clock.is_open:
      values["eta_secs"] = self.clock.secs_left()
    if self.stragglers:
      waited = self.goodput.secs()["data"]
      values |= self.stragglers.after(done, values["sequences_per_sec"], waited, self.log)
    self._record(done, "train", values)

  def _record(self, done: int, split: str, values: dict) -> None:
    """Writes a log line and its warnings; raises OSError if the line must be written."""
    self.log.write(done, split, values)
    self.log.warn(self.health.check(done, values, split))

  def _unhealthy(self, done: int) -> bool:
    """Returns whether `health.on_warning` stops all processes because of this step."""
    stops = self.run.config.health.on_warning == "stop"
    return stops and processes.broadcast_from_0(bool(self.health.warnings(done)))

  def _raise_warning(self, done: int) -> None:
    """Raises UnhealthyError with the step's first warning, or PeerError on other processes."""

    def fail():
      if warnings := self.health.warnings(done):
        raise UnhealthyError(f"stopped by config.health.on_warning: {warnings[0]}")

    processes.run_on_all(fail)

  def _evaluate(self, done: int) -> None:
    """Evaluates on the held-out documents, if any, and writes and checks a log line."""
    with self.goodput.doing("evaluation"):
      if self.run.heldout is None:
        return
      values = self._heldout_values(done)
      self.evaluated = values is not None
      if self.evaluated:
        self._record(done, "heldout", values)

  def _heldout_values(self, done: int) -> dict | None:
    """Returns the metrics on the held-out documents, or None if a stop is requested."""
    run, params, stops = self.run, self.state.params, self.stop.requested
    batches = pretrain_batches.eval_batches(
      run.heldout,
      batch_size=run.eval_batch_size,
      max_examples=run.config.eval.max_examples,
      host=jax.process_index(),
      hosts=jax.process_count(),
    )
    values = metrics.evaluate(run.fns.eval_step, params, parallel.prefetch(batches), done, stops)
    if values is not None and run.pairs:
      weights = sources.main_networks(run.spec, params)["discriminator"].weights
      values["pairs_accuracy"] = run.pairs.accuracy(weights, stops)
      if values["pairs_accuracy"] is None:
        return None
    return values

  def _save(self, done: int, final: bool, now: bool) -> None:
    """Starts saving the state and the metadata for resuming; waits if `now`.

    Args:
      final: whether it is the last save, whose failure is always raised.
    """
    run, c = self.run, self.run.config
    with self.goodput.doing("save"):
      sequences = pretrain_batches.batch_number(done, self.skipped) * c.train.batch_size
      meta = {
        "config": run.record,
        "seed": c.seed,
        "code": version.code_version(),
        "position": {"sequences": sequences, "epoch": sequences // run.shards.num_examples},
        "window": self.window.state_dict(),  # all finite
        "skipped": self.skipped,
      }
      if kept := self.clock.state_dict():
        meta["clock"] = kept

      def ready() -> None:
        if jax.process_index() == 0:
          check_claim(run.workdir)
          self.log.sync()  # metrics.jsonl must reach the checkpoint's step

      def save() -> None:
        self.checkpoints.save(done, self.state, meta)

      processes.run_on_all(ready)
      if first := _write_error(save):
        self._reopen_or_raise(first)
        again = _write_error(save)  # None if the first error came from the previous save
        if again and final:
          raise again
        self.log.warn([f"{first}; training continues"])
      if now:
        self.settle()

  def settle(self) -> None:
    """Waits for a save in progress; raises or warns if it failed, as the next save would."""
    if error := _write_error(lambda: processes.run_on_all(self.checkpoints.wait)):
      self._reopen_or_raise(error)
      self.log.warn([f"{error}; training continues"])

  def _reopen_or_raise(self, failed: ValueError) -> None:
    """Abandons a failed save, or raises its error if `checkpoint.on_error` is "stop"."""
    if self.run.config.checkpoint.on_error == "stop":
      raise failed
    try:
      self.checkpoints.reopen()
    except ValueError as error:
      raise WriteError(f"{failed}; {error}") from None

  def _begin_decay(self, done: int, secs_before: dict[str, float]) -> None:
    """Decides where the run ends; `secs_before` is from before the evaluation and the save."""
    secs = {name: now - secs_before.get(name, 0.0) for name, now in self.goodput.secs().items()}
    self.clock.decide(done, secs.get("evaluation", 0.0), secs["save"])
    steps, decay_steps = self.clock.horizon
    self.log.journal.write("horizon", step=done, steps=steps, decay_steps=decay_steps)
    self.log.display.set_steps(steps)
    left = terminal.duration(self.clock.secs_left())
    self.log.display.print_line(
      f"step {done:,}: the learning rate decays until step {steps:,}; {left} left"
    )


def _write_error(save: Callable[[], None]) -> ValueError | None:
  """Returns the error of an action if all failed processes raised a WriteError."""
  try:
    save()
  except ValueError as error:
    if processes.only_raised(error, WriteError):
      return error
    raise
  return None


def batches_from(run: Run, start: int, skipped: tuple[int, ...]) -> Iterator:
  """Yields the batches after step `start`, on this process's devices."""
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
