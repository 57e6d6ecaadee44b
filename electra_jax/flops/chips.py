"""What an accelerator's chip has, by its data sheet: memory, speed, links to its neighbours.

Peaks are in `flops.PEAK_FLOPS`. Links are as in "How to Scale Your Model" (2025), Section 2.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
  """A kind of chip.

  Fields:
    kind: its key in `flops.PEAK_FLOPS`.
    memory: bytes of its HBM.
    memory_rate: bytes/s of its HBM.
    link_rate: bytes/s of one axis of the torus, both directions together.
    wraps: an axis closes to a ring where its length is a multiple of this.
  """

  kind: str
  memory: float
  memory_rate: float
  link_rate: float
  wraps: int


CHIPS = {
  "v4": Chip("TPU v4", 32 * 2**30, 1.2e12, 9e10, 4),
  "v5e": Chip("TPU v5e", 16 * 2**30, 8.1e11, 9e10, 16),
  "v5p": Chip("TPU v5p", 95 * 2**30, 2.8e12, 1.8e11, 4),
  "v6e": Chip("TPU v6e", 32 * 2**30, 1.6e12, 1.8e11, 16),
}


def parse(topology: str) -> tuple[Chip, tuple[int, ...]]:
  """Returns the chip of a slice and its chips along each axis.

  Raises:
    ValueError: it is none.

  >>> parse("v5e:4x8")[1]
  (4, 8)
  """
  name, _, shape = topology.partition(":")
  axes = shape.split("x")
  if name not in CHIPS or not all(axis.isdecimal() and int(axis) for axis in axes):
    raise ValueError(
      f"topology {topology!r}: the chip ({', '.join(CHIPS)}) and its numbers along the axes, as"
      " v5e:4x8 or v4:2x2x4"
    )
  return CHIPS[name], tuple(map(int, axes))


def all_reduce_secs(chip: Chip, axes: tuple[int, ...], size: float) -> float:
  """Returns how long the chips of a slice take to add up `size` bytes each, the least there is.

  Each byte crosses every link of an axis twice; all axes work at once; an axis that is no ring has
  half the rate.

  >>> all_reduce_secs(CHIPS["v5e"], (16, 16), 9e10)
  1.0
  """
  rates = [chip.link_rate / (1 if n % chip.wraps == 0 else 2) for n in axes if n > 1]
  return 2 * size / sum(rates) if rates else 0.0
