"""Schedules: numbers that are constant or piecewise linear in the step.

The mask rate, the temperature and the loss weights are `Schedule`s; learning rates are in
`learning_rates`. Points are written "POSITION=VALUE,POSITION=VALUE,...", with positions in steps or
percent of the run.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

Points = tuple[tuple[float, float], ...]  # (step, value), steps do not decrease


def parse(text: str, steps: int) -> Points:
  """Parses the points of a schedule for a run of `steps` steps; () for an empty text.

  >>> parse("0%=0.3, 100%=0.15", 1000)
  ((0.0, 0.3), (1000.0, 0.15))
  >>> weight = Schedule(1.0, parse("100=0,100=50", 1000))  # nothing until step 100
  >>> [float(weight.at(step)) for step in (0, 99, 100, 1000, None)]
  [0.0, 0.0, 50.0, 50.0, 1.0]

  Raises:
    ValueError: a point is malformed or not finite, or positions decrease.
  """
  points = []
  for point in filter(None, (part.strip() for part in text.split(","))):
    match = re.fullmatch(r"([\d.]+)(%?)\s*=\s*([\d.eE+-]+)", point)
    try:
      position, percent, value = match.groups()
      points.append((float(position) * (steps / 100 if percent else 1), float(value)))
      if not all(map(math.isfinite, points[-1])):
        raise ValueError
    except (AttributeError, ValueError):
      raise ValueError(f"a schedule needs POSITION=VALUE (e.g. 0%=0.3), got {point!r}") from None
  if any(a[0] > b[0] for a, b in zip(points, points[1:], strict=False)):
    raise ValueError(f"positions of a schedule must not decrease, got {text!r} for {steps} steps")
  return tuple(points)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A number that is in training linear between `points`, if any, and constant outside them.

  Two points at one step make a jump at that step. In evaluation it is always `constant`, so that
  evaluations at different steps are comparable.
  """

  constant: float
  points: Points = ()

  @classmethod
  def of(cls, value: "Schedule | float") -> "Schedule":
    """Turns a number into a constant schedule."""
    return value if isinstance(value, Schedule) else cls(value)

  def at(self, step: jax.Array | int | None) -> float | jax.Array | np.ndarray:
    """Returns the value at a training step, or in evaluation (None).

    With points it is [] float32: NumPy for an int, JAX for an array.
    """
    if step is None or not self.points:
      return self.constant
    xnp = jnp if isinstance(step, jax.Array) else np
    xs, ys = (xnp.array(column, xnp.float32) for column in zip(*self.points, strict=True))
    right = xnp.searchsorted(xs, xnp.asarray(step, xnp.float32), side="right")
    left, right = xnp.maximum(right - 1, 0), xnp.minimum(right, len(self.points) - 1)
    width = xs[right] - xs[left]
    along = xnp.where(width > 0, (step - xs[left]) / xnp.where(width > 0, width, 1), 0)
    return ys[left] + xnp.clip(along, 0, 1) * (ys[right] - ys[left])

  @property
  def values(self) -> tuple[float, ...]:
    """The constant and the values of the points, which include the minimum and the maximum."""
    return (self.constant, *(value for _, value in self.points))

  def highest(self, training: bool) -> float:
    """Returns the highest value in training, or the value in evaluation."""
    return max(value for _, value in self.points) if training and self.points else self.constant
