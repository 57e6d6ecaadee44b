"""Minimal pairs: how often a network scores the acceptable of two sentences higher.

Warstadt et al. 2020 (BLiMP): 67 paradigms of 1,000 pairs.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from electra_jax.evaluate.scorers import SentenceScorer
from electra_jax.finetune import files
from electra_jax.finetune.batches import subset
from electra_jax.monitor import curves
from electra_jax.monitor.metrics import NotFiniteError
from electra_jax.runtime import terminal

GOOD, BAD = "sentence_good", "sentence_bad"
NAMES = ("UID", "linguistics_term")  # fields of the paradigm and the category
UNNAMED = "all"  # the paradigm or category of pairs without one


class Pair(NamedTuple):
  """An acceptable sentence, and a slightly different unacceptable one."""

  good: str
  bad: str
  paradigm: str
  category: str


class Accuracy(NamedTuple):
  """Accuracy on minimal pairs and its confidence interval."""

  pairs: int
  accuracy: float
  low: float  # 95 % Wilson interval
  high: float


def read(path: str | Path, most: int | None = None) -> list[Pair]:
  """Reads at most `most` pairs, evenly spaced, from a file in one of `files.FORMS`.

  A row has `sentence_good`, `sentence_bad` and optionally `UID`, the paradigm, and
  `linguistics_term`, the category.

  Raises:
    ValueError: the file is empty, or a row (which the message names) is damaged or incomplete.
  """
  rows = files.read_rows(path)
  files.check_columns(*next(rows), (GOOD, BAD))
  pairs = []
  for where, row in rows:
    if isinstance(row, str):
      raise ValueError(f"{where}: {row}")
    good, bad = (row.get(field) for field in (GOOD, BAD))
    names = [UNNAMED if (x := row.get(field)) in (None, "") else x for field in NAMES]
    if not all(isinstance(text, str) and text.strip() for text in (good, bad)):
      raise ValueError(f"{where}: {GOOD} and {BAD} must be non-empty texts")
    if not all(isinstance(name, str | int | float) for name in names):
      raise ValueError(f"{where}: {' and '.join(NAMES)} must be texts or numbers")
    pair = Pair(good, bad, *map(str, names))
    if any(map(files.LONE_SURROGATE.search, pair)):
      raise ValueError(f"{where}: not UTF-8")
    pairs.append(pair)
  if not pairs:
    raise ValueError(f"{path} has no pairs")
  return subset(pairs, most)


def fitting(scorer: SentenceScorer, pairs: Sequence[Pair]) -> tuple[list[Pair], list[str]]:
  """Returns the pairs whose sentences have tokens and fit into the network, and warnings.

  Raises:
    ValueError: no pair is left.
  """
  good, bad = (scorer.tokenizer.encode_batch([pair[i] for pair in pairs]) for i in (0, 1))
  counts = [(len(a), len(b)) for a, b in zip(good, bad, strict=True)]
  fit = [0 < min(both) and max(both) <= scorer.longest for both in counts]
  kept, limit = list(itertools.compress(pairs, fit)), f"0 or more than {scorer.longest} tokens"
  if not kept:
    raise ValueError(f"all pairs have a sentence with {limit}")
  warnings = []
  if left_out := len(pairs) - len(kept):
    warnings.append(f"{left_out:,} pairs with a sentence with {limit} are skipped")
  if same := sum(a == b for a, b, fits in zip(good, bad, fit, strict=True) if fits):
    warnings.append(f"{same:,} pairs have two equal token sequences, which counts as wrong")
  return kept, warnings


def margins(
  scorer: SentenceScorer,
  weights: Mapping,
  pairs: Sequence[Pair],
  stops: Callable[[], object] = lambda: None,
) -> np.ndarray | None:
  """Returns by how many nats the acceptable sentence scores higher, [n], for pairs that fit.

  Args:
    stops: as in `SentenceScorer`.

  Raises:
    NotFiniteError: the score of a sentence is NaN or infinite.
  """
  scores = scorer(weights, [pair.good for pair in pairs] + [pair.bad for pair in pairs], stops)
  if scores is None:
    return None
  if wrong := int((~np.isfinite(scores)).sum()):
    raise NotFiniteError(
      f"the network's scores of {wrong} of {len(scores)} sentences are not finite"
    )
  return scores[: len(pairs)] - scores[len(pairs) :]


def effect(margins: np.ndarray) -> tuple[float, float]:
  """Returns the mean margin in standard deviations of the margins, and its standard error.

  Unlike the mean in nats, it can be compared between scorers; unlike the accuracy, it tells by how
  much the sentences differ. The error is that of Cohen's d (Hedges and Olkin 1985).

  >>> effect(np.array([1.0, 2.0, 3.0]))
  (2.0, 1.0)
  >>> effect(np.zeros(2))
  (0.0, 0.707...)
  """
  n, spread = len(margins), float(np.std(margins, ddof=1)) if len(margins) > 1 else 0.0
  mean = float(np.mean(margins)) / spread if spread else 0.0
  return mean, ((1 + mean**2 / 2) / n) ** 0.5


class Suite(NamedTuple):
  """Pairs that fit into a network, and a scorer."""

  scorer: SentenceScorer
  pairs: Sequence[Pair]

  def accuracy(self, weights: Mapping, stops: Callable[[], object]) -> float | None:
    """Returns the fraction of correct pairs; `stops` as in `margins`."""
    found = margins(self.scorer, weights, self.pairs, stops)
    return None if found is None else float((found > 0).mean())


def accuracy(right: np.ndarray) -> Accuracy:
  """Returns the accuracy and its 95 % Wilson interval.

  >>> accuracy(np.array([True, True, False, True]))
  Accuracy(pairs=4, accuracy=0.75, low=0.300..., high=0.954...)
  """
  n, mean, z = len(right), float(np.mean(right)), 1.959964
  centre, shrunk = mean + z * z / (2 * n), 1 + z * z / n
  half = z * (mean * (1 - mean) / n + z * z / (4 * n * n)) ** 0.5
  return Accuracy(n, mean, (centre - half) / shrunk, (centre + half) / shrunk)


def by(names: Sequence[str], right: np.ndarray) -> dict[str, Accuracy]:
  """Returns the accuracy for each name of pairs, in order of first occurrence."""
  every = np.array(names)
  return {name: accuracy(right[every == name]) for name in dict.fromkeys(names)}


def rows(total: Accuracy, categories: Mapping[str, Accuracy]) -> list[tuple[str, Accuracy]]:
  """Returns the rows of a table: all pairs, and the categories if the file has any."""
  named = () if categories.keys() == {UNNAMED} else categories.items()
  return [("all pairs", total), *named]


@curves.plain_names()
def draw(path: Path, title: str, pairs: Sequence[Pair], right: np.ndarray) -> None:
  """Writes a PNG of the paradigms' accuracies and their intervals, by category."""
  from matplotlib import colormaps

  category = {pair.paradigm: pair.category for pair in pairs}
  means = by([pair.category for pair in pairs], right)
  found = by([pair.paradigm for pair in pairs], right)
  order = sorted(found, key=lambda p: (means[category[p]].accuracy, category[p], found[p].accuracy))
  figure = curves.new_figure(8, 1.2 + 0.17 * len(order), layout="constrained")
  axis = figure.subplots()
  colours = {name: colormaps["tab20"](i % 20) for i, name in enumerate(means)}
  for y, name in enumerate(order):
    a, colour = found[name], colours[category[name]]
    axis.plot([a.low, a.high], [y, y], color=colour, linewidth=1.2)
    axis.plot([a.accuracy], [y], "o", color=colour, markersize=4)
  axis.axvline(0.5, color="#666666", linestyle="--", linewidth=1)
  axis.set_yticks(range(len(order)), order, fontsize=6.5)
  axis.set_ylim(-1, len(order))
  axis.set_xlim(-0.02, 1.02)
  axis.set_xlabel("accuracy (dashed: random guessing; lines: 95 % intervals)", fontsize=8)
  axis.set_title(terminal.printable(title), fontsize=9)
  axis.grid(axis="x", alpha=0.25)
  for name, a in sorted(means.items(), key=lambda item: -item[1].accuracy):
    axis.plot([], [], "o", color=colours[name], markersize=4, label=f"{name} {a.accuracy:.3f}")
  axis.legend(fontsize=6.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
  curves.save_figure(path, figure)
