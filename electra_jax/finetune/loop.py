"""Trains several seeds on a task at once, with the step of pretraining.

Arrays with a value for each seed have the seeds as their first axis, S.
"""

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from electra_jax.core import step as steps
from electra_jax.core.learning_rates import make_schedule
from electra_jax.core.optimizer import OptimizerConfig, layer_rates, make_optimizer, scale_each
from electra_jax.core.params import make_key
from electra_jax.core.task_heads import Head
from electra_jax.core.task_network import init_backbone, make_objective, make_predict, shapes
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.finetune import batches as data
from electra_jax.finetune.batches import Feature
from electra_jax.runtime import parallel

# Reuses compiled programs of equal arguments; limited, because a new head is a new argument.
_REUSED = functools.lru_cache(maxsize=16)


@dataclasses.dataclass(frozen=True)
class Settings:
  """The hyperparameters of a task; fields as in configs/finetune/base.py."""

  seeds: tuple[int, ...]
  optimizer: OptimizerConfig  # warmup_frac and decay_frac set its warmup_steps and decay_steps
  warmup_frac: float
  layer_decay: float
  layer_decay_skip: bool
  batch_size: int
  accumulation: int
  epochs: float
  eval_batch_size: int
  buckets: int
  log_every: int
  pad: int  # id of [PAD]
  max_length: int  # maximum tokens of a row, and the length of all rows if `buckets` is 0
  decay_frac: float = 0.0  # for the schedule wsd
  patience: int | None = None  # evaluations, see `Best`; None: no evaluation
  eval_every: int | None = None  # steps; None: an epoch


class SeedState(NamedTuple):
  """The training state of one seed, with values that the compiled step reads as data."""

  train: steps.TrainState
  seed: jax.Array  # [] uint32
  num_steps: jax.Array  # [] int32, for the schedule
  warmup_steps: jax.Array  # [] int32
  decay_steps: jax.Array  # [] int32


def init_params(cfg: TransformerConfig, head: Head, backbone: dict | None, seeds: Sequence[int]):
  """Returns weights [S, ...]: the backbone, or random ones if it is None, and random heads."""
  return _param_initializer(cfg, head)(jnp.asarray(seeds, jnp.uint32), backbone)


@_REUSED
def _param_initializer(cfg: TransformerConfig, head: Head) -> Callable:
  def of_seed(seed, backbone):
    key = jax.random.fold_in(make_key(seed), 1)
    weights = init_backbone(cfg, jax.random.fold_in(key, 2)) if backbone is None else backbone
    return {**weights, "head": head.init(cfg, key)}

  return jax.jit(jax.vmap(of_seed, in_axes=(0, None)))


@_REUSED
def make_programs(
  cfg: TransformerConfig,
  head: Head,
  optimizer: OptimizerConfig,
  layer_decay: float,
  layer_decay_skip: bool,
  batch_size: int,
  accumulation: int,
) -> tuple[Callable, Callable]:
  """Returns two functions, compiled once for equal arguments, which are as in `Settings`.

  Returns:
    initialisation: (weights [S, ...], seeds [S], steps, warm-up steps, decay steps) ->
      SeedState [S, ...]
    step: (SeedState [S, ...], batch [D, b, S, ...]) -> (SeedState, Packed metrics)
  """
  rates = layer_rates(shapes(cfg, head), cfg.num_layers, layer_decay, layer_decay_skip)
  objective = make_objective(cfg, head, scale=batch_size)

  def transformation(schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(make_optimizer(optimizer, schedule), scale_each(rates))

  @jax.jit
  def init_state(params, seeds, *steps_of_schedule):
    def of_seed(params, seed):
      train = steps.init_state(params, transformation(lambda step: 0.0))  # states have no rate
      return SeedState(train, seed, *map(jnp.int32, steps_of_schedule))

    return jax.vmap(of_seed)(params, seeds)

  def of_seed(state, batch):
    own = dataclasses.replace(
      optimizer, warmup_steps=state.warmup_steps, decay_steps=state.decay_steps
    )
    schedule = make_schedule(own, state.num_steps)
    train_step = steps.make_train_step(
      objective, transformation(schedule), schedule, seed=state.seed, accumulation=accumulation
    )
    train, metrics = train_step(state.train, batch)
    return state._replace(train=train), metrics

  together = parallel.over_seeds(of_seed, (True, True))

  def step(state, batch):
    return together(state, jax.tree.map(lambda x: x.swapaxes(0, 1), batch))

  return init_state, parallel.map_train_step(step)


def start(
  cfg: TransformerConfig, head: Head, backbone: dict | None, settings: Settings, num_steps: int
) -> tuple[SeedState, Callable]:
  """Returns the initial state [S, ...] on the devices and the step, for `num_steps` steps."""
  s = settings
  init_state, step = make_programs(
    cfg, head, s.optimizer, s.layer_decay, s.layer_decay_skip, s.batch_size, s.accumulation
  )
  params, seeds = init_params(cfg, head, backbone, s.seeds), np.asarray(s.seeds, np.uint32)
  warmup_steps, decay_steps = (round(num_steps * part) for part in (s.warmup_frac, s.decay_frac))
  state = init_state(params, seeds, num_steps, warmup_steps, decay_steps)
  return parallel.replicate(state), step


def train(
  cfg: TransformerConfig,
  head: Head,
  backbone: dict | None,
  features: Sequence[Feature],
  settings: Settings,
  log: Callable[[int, int, list[float], float], None] = lambda *line: None,
  stop: Callable[[int, dict], bool] | None = None,
) -> dict:
  """Returns the weights after training, [S, ...].

  Args:
    log: called every `log_every` steps and after the last one with (steps done, total steps, mean
      loss of each seed, examples per second), averaged since its last call.
    stop: called every `eval_every` steps and after the last one with (steps done, weights); True
      ends the training.

  Raises:
    ValueError: the devices do not divide the batch, or there are no steps.
    ArithmeticError: the loss of a seed is not finite.
  """
  parallel.check_divisible(settings.batch_size, settings.accumulation)
  lengths = np.array([len(f.ids) for f in features])
  num_steps = data.steps_of(len(features), settings.batch_size, settings.epochs)
  if not num_steps:
    raise ValueError(f"{len(features)} examples in {settings.epochs} epochs give no training step")
  state, step = start(cfg, head, backbone, settings, num_steps)
  batches = data.batches(
    features,
    buckets=data.bucket_lengths(lengths, settings.buckets, cfg.max_positions, settings.max_length),
    batch_size=settings.batch_size,
    epochs=settings.epochs,
    seeds=settings.seeds,
    pad=settings.pad,
  )
  eval_every = settings.eval_every or data.steps_of(len(features), settings.batch_size, 1)
  window, since = None, time.perf_counter()
  in_flight = collections.deque()
  for done, batch in enumerate(parallel.prefetch(batches), 1):
    state, packed = step(state, batch)
    window = packed.flat if window is None else window + packed.flat
    # Collectives on CPU devices may deadlock with dozens of steps in flight.
    in_flight.append(packed.flat)
    if len(in_flight) > 2:
      in_flight.popleft().block_until_ready()
    if done % settings.log_every == 0 or done == num_steps:
      count = (done - 1) % settings.log_every + 1
      sums = packed.unpack(np.asarray(window).astype(np.float64))
      # The step's loss is scaled by the batch size (`make_objective`).
      losses = (sums["loss"] / (count * settings.batch_size)).tolist()
      for seed, loss in zip(settings.seeds, losses, strict=True):
        if not math.isfinite(loss):
          raise ArithmeticError(
            f"seed {seed}: the loss is {loss} in steps {done - count + 1} to {done}: lower"
            f" optimizer.learning_rate={settings.optimizer.learning_rate}"
          )
      now = time.perf_counter()
      rate = count * settings.batch_size * len(settings.seeds) / (now - since)
      log(done, num_steps, losses, rate)
      window, since = None, now
    if stop and (done % eval_every == 0 or done == num_steps) and stop(done, state.train.params):
      break
  return state.train.params


class Best:
  """The best weights of each seed, for `stop` of `train`.

  A seed ends after `patience` evaluations without a better score. Later ones do not count, so that
  its weights do not depend on the other seeds.
  """

  def __init__(self, evaluate: Callable[[int, dict], Sequence[float]], patience: int):
    """`evaluate` maps (steps done, weights [S, ...]) to the score of each seed."""
    self._evaluate, self._patience = evaluate, patience
    self.weights, self.steps = None, None  # [S, ...] and [S], after the first evaluation

  def __call__(self, step: int, weights: dict) -> bool:
    """Evaluates weights [S, ...]; returns whether all seeds have ended."""
    scores = np.array(self._evaluate(step, weights), np.float64)
    if self.weights is None:
      self.weights, self.steps = weights, np.zeros(len(scores), int)
      self._scores, self._since = np.full(len(scores), -np.inf), np.zeros(len(scores), int)
    is_better = (scores > self._scores) & (self._since < self._patience)

    def better(old, new):  # a copy, because the next step overwrites `new`
      return jnp.where(is_better.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    self.weights = jax.tree.map(better, self.weights, weights)
    self.steps = np.where(is_better, step, self.steps)
    self._scores = np.where(is_better, scores, self._scores)
    self._since = np.where(is_better, 0, self._since + 1)
    return bool((self._since >= self._patience).all())


@_REUSED
def _mapped_predict(cfg: TransformerConfig, head: Head) -> Callable:
  of_seeds = parallel.over_seeds(make_predict(cfg, head), (True, False))

  def step(params, batch):
    return jax.tree.map(lambda x: x.swapaxes(0, 1), of_seeds(params, batch))

  return parallel.map_predict(step)


def make_predictor(
  cfg: TransformerConfig,
  head: Head,
  *,
  batch_size: int,
  buckets: int,
  pad: int,
  max_length: int | None = None,
) -> Callable[[dict, Sequence[Feature]], list[dict[str, np.ndarray | list[np.ndarray]]]]:
  """Returns (weights [S, ...], features) -> the outputs of each seed, in the features' order.

  The outputs of a seed are {name: [n, ...]}; token outputs are lists of arrays, each as long as its
  feature. The function raises ArithmeticError if an output is not finite.
  """
  parallel.check_divisible(batch_size, 1)
  mapped = _mapped_predict(cfg, head)

  def predict(params, features):
    lengths = np.array([len(f.ids) for f in features])
    ladder = data.bucket_lengths(lengths, buckets, cfg.max_positions, max_length)
    found: dict[str, list] = {}
    for plan in data.plan_once(lengths, ladder, batch_size):
      batch = parallel.shard(data.collate(features, plan, batch_size, pad))
      for name, values in mapped(params, batch).items():
        for row, value in zip(plan.rows, values, strict=False):  # the rest is padding
          value = value[:, : lengths[row]] if name in head.token_outputs else value
          found.setdefault(name, [None] * len(features))[row] = value
    of_seeds = [{} for _ in range(len(jax.tree.leaves(params)[0]))]
    for name, rows in found.items():
      if bad := sum(not np.isfinite(row).all() for row in rows):
        raise ArithmeticError(
          f"non-finite {name} in {bad:,} of {len(rows):,} rows: train with a lower"
          " optimizer.learning_rate"
        )
      for seed, outputs in enumerate(of_seeds):
        values = [row[seed] for row in rows]
        outputs[name] = values if name in head.token_outputs else np.stack(values)
    return of_seeds

  return predict
