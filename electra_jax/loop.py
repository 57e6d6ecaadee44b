"""The steps of a run, with lines, evaluations and checkpoints between them."""

import jax

from electra_jax import config as configs
from electra_jax import metrics, parallel, step
from electra_jax.checkpoint import Checkpoints
from electra_jax.data import pretrain
from electra_jax.interrupt import StopSignals
from electra_jax.job import Job


def loop(job: Job, state, meta, checkpoints: Checkpoints, log: metrics.Log, stop: StopSignals):
  """Trains from the state's step to the last, or until stopped, and returns the state."""
  c, n = job.config, job.config.train.steps
  start, host, hosts = int(state.step), jax.process_index(), jax.process_count()
  batches = pretrain.train_batches(
    job.shards,
    seed=c.seed,
    batch_size=c.train.batch_size,
    start_step=start,
    host=host,
    hosts=hosts,
  )
  batches = parallel.prefetch(batches)
  # Two CPU processes deadlock in their collectives when many steps are in flight.
  lockstep = hosts > 1 and jax.default_backend() == "cpu"
  window = metrics.Window(meta and meta["window"], ahead=0 if lockstep else 2)
  peak = job.peak[0] * jax.device_count()
  watch = metrics.Stopwatch(c.train.batch_size, job.shards.seq_length, job.flops_per_step, peak)
  if start == 0:
    evaluate(job, state.params, 0, log)
  for done in range(start + 1, n + 1):
    state, values = job.programs.train_step(state, next(batches))
    window.add(done, values)
    log.display.advance(done)
    if done == start + 1:  # the first step compiles, which is not the speed of training
      window.drain()
      watch.start()
    else:
      watch.step()
    last, signal_name = done == n, stop.requested(done)
    evaluating = last or (c.eval.every_steps and done % c.eval.every_steps == 0)
    saving = last or signal_name or done % c.checkpoint.every_steps == 0
    if evaluating or saving:
      window.drain()  # while the clock runs: the steps under way are training too
    if last or done % c.log.every_steps == 0:
      values = window.close()
      log.write(done, "train", {**values, **watch.read(n - done)})
    watch.pause()
    if evaluating:
      evaluate(job, state.params, done, log)
    if saving:
      save(job, state, done, checkpoints, window)
    if signal_name:
      log.display.console.print(f"{signal_name}: stopping after step {done:,}")
      break
    watch.start()
  return state


def evaluate(job: Job, params: dict, done: int, log: metrics.Log) -> None:
  """Writes a line about the held-out documents, if there are any."""
  if job.heldout is None:
    return
  batches = pretrain.eval_batches(
    job.heldout,
    batch_size=job.config.eval.batch_size,
    max_examples=job.config.eval.max_examples,
    host=jax.process_index(),
    hosts=jax.process_count(),
  )
  values = metrics.evaluate(job.programs.eval_step, params, parallel.prefetch(batches), done)
  log.write(done, "heldout", values)


def save(
  job: Job, state: step.TrainState, done: int, checkpoints: Checkpoints, window: metrics.Window
) -> None:
  """Starts a save of the state, with all that is needed to go on from it."""
  sums = window.state_dict()  # waits for the steps and checks them: only good states are saved
  sequences = done * job.config.train.batch_size
  meta = {
    "config": job.record,
    "seed": job.config.seed,
    "code": configs.code_version(),
    "position": {"sequences": sequences, "epoch": sequences // job.shards.num_examples},
    "window": sums,
  }
  checkpoints.save(done, state, meta)
