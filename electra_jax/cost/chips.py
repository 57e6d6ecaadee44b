"""Data sheets of TPU chips (memory, bandwidths, links) and names of topologies.

GPUs are in `gpus`, peaks in `flops.PEAK_FLOPS`. Links are from "How to Scale Your Model" (2025),
Section 2.
"""

import dataclasses
import math

from electra_jax.cost.gpus import GPUS, Gpu


@dataclasses.dataclass(frozen=True)
class Chip:
  """A kind of chip."""

  kind: str  # its key in `flops.PEAK_FLOPS`
  memory: float  # bytes of HBM
  memory_rate: float  # bytes/s of HBM
  link_rate: float  # bytes/s of one torus axis, both directions together
  # an axis is a ring if its length is a multiple of this; in three dimensions only if all axes are
  # ("TPU v4", Google Cloud: smaller slices are meshes)
  wraps: int
  cores: int = 1  # per chip; two form one device

  def links(self, axes: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """Returns (the number of chips that communicate, bytes/s of each)."""
    return ((math.prod(axes), link_rate(self, axes)),)


CHIPS = {
  "v4": Chip("TPU v4", 32 * 2**30, 1.2e12, 9e10, 4, 2),
  "v5e": Chip("TPU v5e", 16 * 2**30, 8.1e11, 9e10, 16),
  "v5p": Chip("TPU v5p", 95 * 2**30, 2.8e12, 1.8e11, 4, 2),
  "v6e": Chip("TPU v6e", 32 * 2**30, 1.6e12, 1.8e11, 16),
}


def parse(topology: str) -> tuple[Chip | Gpu, tuple[int, ...]]:
  """Parses a topology: a TPU chip and the number of chips along each axis, or hosts x GPUs.

  Raises ValueError for other texts.

  >>> parse("v5e:4x8")[1], parse("h200x16")[1]
  ((4, 8), (2, 8))
  """
  gpu, _, count = topology.partition("x")
  if gpu in GPUS:
    if not count.isdecimal() or not int(count):
      raise ValueError(f"topology {topology!r} must end in the number of GPUs, e.g. h200x8")
    number, most = int(count), GPUS[gpu].per_host
    if number > most and number % most:
      raise ValueError(
        f"topology {topology!r}: the number of GPUs must be at most {most} (one host) or a multiple"
        f" of {most}"
      )
    return GPUS[gpu], (-(-number // most), min(number, most))
  name, _, shape = topology.partition(":")
  axes = shape.split("x")
  if name not in CHIPS or not all(axis.isdecimal() and int(axis) for axis in axes):
    raise ValueError(
      f"topology {topology!r} must be a TPU chip ({', '.join(CHIPS)}) with the size of each axis,"
      f" e.g. v5e:4x8 or v4:2x2x4, or a GPU ({', '.join(GPUS)}) with the number, e.g. h200x8"
    )
  return CHIPS[name], tuple(map(int, axes))


def link_rate(chip: Chip, axes: tuple[int, ...]) -> float:
  """Returns the bytes/s into the chip with the fewest links in a slice, infinity for one chip.

  All axes transfer at once. A chip at the end of an axis that is not a ring lacks half of the
  axis's links.
  """
  rings = [n % chip.wraps == 0 for n in axes]
  if len(axes) == 3:
    rings = [all(rings)] * 3
  halves = sum(1 + ring for n, ring in zip(axes, rings, strict=True) if n > 1)
  return halves * chip.link_rate / 2 if halves else math.inf
