"""Histories of any length in bounded memory: the points that a picture of them shows."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from electra_jax.monitor import metrics

LINES = 4096  # kept of a history; a shorter one stays whole
COLUMNS = 256  # metrics of a split whose points are kept, at most
OMITTED = {"step", "split", *metrics.TIMING}


def ends_and_extremes(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
  """Returns the indices of each group's first, last, lowest and highest value in each column.

  A plot of these shows the same as one of all (M4; Jugel et al. 2014).

  Args:
    values: [n, columns], NaN where a value is missing.
    groups: [n], ascending.

  >>> ends_and_extremes(np.array([[2.0], [9.0], [3.0], [0.0], [1.0]]), np.array([0, 0, 0, 0, 1]))
  array([0, 1, 3, 4])
  """
  kept, missing = set(), np.isnan(values)
  lows, highs = (np.where(missing, x, values) for x in (np.inf, -np.inf))
  starts = np.flatnonzero(np.diff(groups, prepend=-1))
  for a, b in itertools.pairwise([*starts, len(groups)]):
    known = ~missing[a:b]
    last = b - a - 1 - known[::-1].argmax(0)
    found = known.argmax(0), last, lows[a:b].argmin(0), highs[a:b].argmax(0)
    kept.update((a + np.array(found)[:, known.any(0)]).flat)
  return np.array(sorted(kept), int)


class Thinned:
  """Takes the lines of a run; keeps the `ends_and_extremes` of ever longer groups of lines."""

  def __init__(self, lines: Iterable[Mapping] = ()):
    self._lines: list[tuple[int, Mapping]] = []  # with their numbers
    self._count, self._size, self._limit = 0, 1, 4 * LINES
    for line in lines:
      self.add(line)

  def add(self, line: Mapping) -> None:
    """Takes the next line."""
    self._lines.append((self._count, line))
    self._count += 1
    if len(self._lines) > self._limit:
      self._lines, self._size = self._fewer()
      self._limit = max(4 * LINES, 2 * len(self._lines))

  def lines(self) -> list[Mapping]:
    """Returns what is kept, in order."""
    return [line for _, line in self._fewer()[0]]

  def _fewer(self) -> tuple[list[tuple[int, Mapping]], int]:
    """Returns at most LINES of the lines, and the size of their groups."""
    lines = self._lines
    if len(lines) <= LINES:
      return lines, self._size
    # Four lines of each group are kept for one metric alone.
    size = max(self._size, 1 << (4 * self._count // LINES).bit_length() - 1)
    splits: dict[str, list[int]] = {}
    for i, (_, line) in enumerate(lines):
      splits.setdefault(line["split"], []).append(i)
    tables = []
    for rows in splits.values():
      found = [lines[i][1] for i in rows]
      names = [k for k in dict.fromkeys(itertools.chain(*found)) if k not in OMITTED][:COLUMNS]
      table = np.full((len(lines), len(names)), np.nan)
      table[rows] = np.array([[*map(line.get, names)] for line in found], float)
      tables.append(table)
    values, numbers = np.hstack(tables), np.array([number for number, _ in lines])
    kept = np.arange(len(lines))
    while len(kept) > LINES and size <= self._count:
      kept = kept[ends_and_extremes(values[kept], numbers[kept] // size)]
      size *= 2 if len(kept) > LINES else 1
    return [lines[i] for i in kept], size


def read(path: Path) -> list[dict]:
  """Returns the thinned lines of a metrics.jsonl."""
  return Thinned(metrics.lines(path)).lines()
