"""Trains several seeds on a task at once, with the step of pretraining and another objective.

Arrays with one value per seed have the seeds as their first axis, S.
"""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from electra_jax.core import step as steps
from electra_jax.core.optimizer import (
  OptimizerConfig,
  layer_rates,
  make_optimizer,
  make_schedule,
  scale_each,
)
from electra_jax.core.task_heads import Head
from electra_jax.core.task_network import init_backbone, make_objective, make_predict, shapes
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data import finetune_batches as data
from electra_jax.data.finetune_batches import Feature
from electra_jax.runtime import parallel


@dataclasses.dataclass(frozen=True)
class Settings:
  """The hyperparameters of a task; fields as in configs/finetune/base.py."""

  seeds: tuple[int, ...]
  optimizer: OptimizerConfig  # warmup_steps are set from warmup_frac
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


def init_params(cfg: TransformerConfig, head: Head, backbone: dict | None, seeds: Sequence[int]):
  """Returns the initial weights [S, ...]: the backbone, and a fresh head for each seed.

  `backbone` is {"embeddings", "encoder"} for all seeds; None initialises one per seed.
  """

  def of_seed(seed):
    key = jax.random.fold_in(jax.random.key(seed), 1)
    weights = init_backbone(cfg, jax.random.fold_in(key, 2)) if backbone is None else backbone
    return {**weights, "head": head.init(cfg, key)}

  return jax.jit(jax.vmap(of_seed))(jnp.asarray(seeds, jnp.uint32))


def make_step(
  cfg: TransformerConfig, head: Head, settings: Settings, num_steps: int
) -> tuple[optax.GradientTransformation, Callable]:
  """Returns the optimizer and the step on all seeds: (state [S, ...], batch [b, S, ...])."""
  opt = dataclasses.replace(
    settings.optimizer, warmup_steps=round(num_steps * settings.warmup_frac)
  )
  schedule = make_schedule(opt, num_steps)
  weights, decay = shapes(cfg, head), settings.layer_decay
  rates = layer_rates(weights, cfg.num_layers, decay, settings.layer_decay_skip)
  tx = optax.chain(make_optimizer(opt, schedule), scale_each(rates))
  objective = make_objective(cfg, head, scale=settings.batch_size)

  def of_seed(seed, state, batch):
    return steps.make_train_step(
      objective, tx, schedule, seed=seed, accumulation=settings.accumulation
    )(state, batch)

  together = parallel.over_seeds(of_seed, (True, True, True))

  def step(state, batch):
    by_seed = jax.tree.map(lambda x: x.swapaxes(0, 1), batch)
    return together(jnp.asarray(settings.seeds, jnp.uint32), state, by_seed)

  return tx, step


def train(
  cfg: TransformerConfig,
  head: Head,
  backbone: dict | None,
  features: Sequence[Feature],
  settings: Settings,
  log: Callable[[int, int, list[float], float], None] = lambda *line: None,
) -> dict:
  """Returns the weights after training, [S, ...].

  Every `log_every` steps and after the last, calls log(steps done, total steps, mean loss of each
  seed since the last call, examples per second).

  Raises:
    ValueError: the devices do not divide the batch, or there are no steps.
    ArithmeticError: the loss of a seed is not finite.
  """
  parallel.check_divisible(settings.batch_size, settings.accumulation)
  lengths = np.array([len(f.ids) for f in features])
  num_steps = data.steps_of(len(features), settings.batch_size, settings.epochs)
  if not num_steps:
    raise ValueError(f"{len(features)} examples in {settings.epochs} epochs give no training step")
  params = init_params(cfg, head, backbone, settings.seeds)
  tx, step = make_step(cfg, head, settings, num_steps)
  state = parallel.replicate(jax.vmap(lambda p: steps.init_state(p, tx))(params))
  step = parallel.map_train_step(step)
  batches = data.batches(
    features,
    buckets=data.bucket_lengths(lengths, settings.buckets, cfg.max_positions),
    batch_size=settings.batch_size,
    epochs=settings.epochs,
    seeds=settings.seeds,
    pad=settings.pad,
  )
  window, since = None, time.perf_counter()
  in_flight = collections.deque()
  for done, batch in enumerate(parallel.prefetch(batches), 1):
    state, packed = step(state, batch)
    window = packed.flat if window is None else window + packed.flat
    # The collectives of CPU devices may deadlock when dozens of steps are in flight.
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
            f" optimizer.learning_rate ({settings.optimizer.learning_rate})"
          )
      now = time.perf_counter()
      rate = count * settings.batch_size * len(settings.seeds) / (now - since)
      log(done, num_steps, losses, rate)
      window, since = None, now
  return state.params


def make_predictor(
  cfg: TransformerConfig, head: Head, *, batch_size: int, buckets: int, pad: int
) -> Callable[[dict, Sequence[Feature]], list[dict[str, np.ndarray | list[np.ndarray]]]]:
  """Returns (weights [S, ...], features) -> the outputs of each seed, in the features' order.

  Every feature is computed exactly once on any number of devices. The outputs of a seed are
  {name: [n, ...]}; token outputs are a list of arrays, each as long as its feature. Each length
  compiles once for all calls. It raises ArithmeticError where an output is not finite.
  """
  parallel.check_divisible(batch_size, 1)
  of_seeds = parallel.over_seeds(make_predict(cfg, head), (True, False))

  def step(params, batch):
    return jax.tree.map(lambda x: x.swapaxes(0, 1), of_seeds(params, batch))

  mapped = parallel.map_predict(step)

  def predict(params, features):
    lengths = np.array([len(f.ids) for f in features])
    ladder = data.bucket_lengths(lengths, buckets, cfg.max_positions)
    found: dict[str, list] = {}
    for plan in data.plan_once(lengths, ladder, batch_size):
      batch = parallel.shard(data.collate(features, plan, batch_size, pad))
      for name, values in mapped(params, batch).items():
        for row, value in zip(plan.rows, values, strict=False):  # the rest is padding
          value = value[:, : lengths[row]] if name in head.token_outputs else value
          found.setdefault(name, [None] * len(features))[row] = value
    for name, rows in found.items():
      if bad := sum(not np.isfinite(row).all() for row in rows):
        raise ArithmeticError(
          f"the {name} of {bad:,} of {len(rows):,} rows are not finite: train with a lower"
          " optimizer.learning_rate"
        )

    def of_seed(seed: int) -> dict[str, np.ndarray | list[np.ndarray]]:
      outputs = {name: [row[seed] for row in rows] for name, rows in found.items()}
      return {k: v if k in head.token_outputs else np.stack(v) for k, v in outputs.items()}

    return [of_seed(seed) for seed in range(len(jax.tree.leaves(params)[0]))]

  return predict
