"""Learning-rate schedules: the original's and others. Schedules of other values: `schedules`.

Source: Clark et al. 2020, Appendix A, and the original's code.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from optax import Schedule


def _share(t, steps):
  """Returns t / steps in float32, with the same bits for traced and constant steps.

  XLA multiplies by the reciprocal of a constant.
  """
  return t * (1 / jnp.float32(jnp.maximum(steps, 1)))


def _warmed(t, warmup_steps):
  """Returns the warm-up's factor of the learning rate, from 0 to 1; 1 without warm-up."""
  return jnp.where(warmup_steps > 0, jnp.minimum(1.0, _share(t, warmup_steps)), 1.0)


def product_schedule(lr: float, warmup_steps: int, steps: int, power: float) -> Schedule:
  """lr x (1 - t/T)^power x min(1, t/W): warm-up multiplies the decay, so the peak is below lr.

  As in the original, the first step's rate is 0. The numbers of steps may be traced arrays.

  >>> schedule = product_schedule(1.0, 10, 100, 1.0)
  >>> [round(float(schedule(t)), 4) for t in (0, 5, 10, 100)]
  [0.0, 0.475, 0.9, 0.0]
  """
  return lambda t: lr * jnp.maximum(0.0, 1 - _share(t, steps)) ** power * _warmed(t, warmup_steps)


def joined_schedule(lr: float, warmup_steps: int, steps: int, power: float) -> Schedule:
  """Linear from 0 to lr in `warmup_steps`, then polynomial from lr to 0 at `steps`.

  The numbers of steps may be traced arrays, unlike optax's.
  """

  def schedule(t):
    decay_steps = steps - warmup_steps
    decayed = _share(jnp.clip(t - warmup_steps, 0, decay_steps), decay_steps)
    return jnp.where(
      t < warmup_steps, lr - lr * (1 - _share(t, warmup_steps)), lr * (1 - decayed) ** power
    )

  return schedule


def wsd_schedule(lr: float, warmup_steps: int, steps: int, decay_steps: int) -> Schedule:
  """Warm-up from 0, constant, then lr x (1 - sqrt(t / decay_steps)) to 0 at `steps`.

  The rate before the decay does not depend on `steps`, so a run can be extended from there (Hägele
  et al. 2024, Section 3). The numbers of steps may be traced arrays.

  >>> schedule = wsd_schedule(1.0, 10, 100, 16)
  >>> [round(float(schedule(t)), 4) for t in (0, 5, 10, 84, 88, 100)]
  [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
  """

  def schedule(t):
    decayed = jnp.clip(_share(t - (steps - decay_steps), decay_steps), 0.0, 1.0)
    return lr * _warmed(t, warmup_steps) * (1 - jnp.sqrt(decayed))

  return schedule


# (OptimizerConfig, steps of the run) -> the learning rate as a function of the step. The numbers of
# steps may be traced: with train.minutes they are decided while training, and fine-tuning runs of
# different lengths share a program
SCHEDULES: dict[str, Callable[[Any, int], Schedule]] = {
  "product": lambda c, steps: product_schedule(
    c.learning_rate, c.warmup_steps, steps, c.decay_power
  ),
  "joined": lambda c, steps: joined_schedule(c.learning_rate, c.warmup_steps, steps, c.decay_power),
  "wsd": lambda c, steps: wsd_schedule(c.learning_rate, c.warmup_steps, steps, c.decay_steps),
}


def make_schedule(cfg, steps: int) -> Schedule:
  """Returns the learning rate of an `OptimizerConfig` as a function of the step."""
  return SCHEDULES[cfg.schedule](cfg, steps)
