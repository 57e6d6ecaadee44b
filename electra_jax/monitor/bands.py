"""Reference bands: the range of each metric over healthy seeds, and likely causes of a departure.

For each metric and log step a band has the mean over n seeds and a tolerance, the larger of
- the prediction interval of one more run, t s sqrt(1 + 1/n): s is the standard deviation over
  seeds, pooled over SMOOTH neighbouring lines because three seeds estimate it badly, or unpooled if
  that is larger; t is Student's quantile for these degrees of freedom at a false-alarm rate of
  ALARM per number, of which a run has some 400 (LOG.md, "The quickstart's band");
- FLOOR x the metric's largest mean, which allows for other devices, versions and similar corpora.
Successive lines are correlated and many metrics are tested, so a metric leaves the band only after
two consecutive lines on the same side, or one at more than twice the tolerance.
"""

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from electra_jax.monitor import baselines, metrics, quantities
from electra_jax.monitor.quantities import shown
from electra_jax.runtime.foreign import read_json

LEAST_RUNS = 3
SMOOTH = 5  # lines around each line
ALARM = 1e-4
FLOOR = 0.02
LEFT_OUT = ("step", "split", "loss", *metrics.TIMING)  # `loss` depends on its weights' schedules
NAMED = 3  # causes in a warning


class Level(NamedTuple):
  """The mean and tolerance of a metric at a log line."""

  mean: float
  tolerance: float


@dataclasses.dataclass(frozen=True)
class Band:
  """The levels of all metrics over several seeds of a configuration.

  Fields:
    every_steps: steps between the lines; each line has the means since the previous one.
    fields: the flat configuration, without fields that may differ between seeds.
    levels: {split: {step: {metric: Level}}}.
  """

  every_steps: int
  runs: int
  fields: Mapping
  levels: Mapping[str, Mapping[int, Mapping[str, Level]]]

  def distances(self, split: str, step: int, values: Mapping) -> dict[str, float]:
    """Returns {metric: signed distance of a line from the mean, in tolerances}.

    {} if the band lacks the step.
    """
    levels = self.levels.get(split, {}).get(step, {})
    known = (name for name in levels if values.get(name) is not None)
    return {name: (values[name] - levels[name].mean) / levels[name].tolerance for name in known}


def differing(band: Band, fields: Mapping) -> list[str]:
  """Describes the fields of a flat configuration that differ from the reference."""

  def short(value: object) -> str:
    is_hash = isinstance(value, str) and len(value) == 64
    return f"{value[:8]}..." if is_hash else repr(value)

  return [
    f"{k}={short(fields[k])} (reference: {short(old)})"
    for k, old in band.fields.items()
    if fields.get(k, old) != old
  ]


def make(histories: Sequence[Iterable[Mapping]], every_steps: int, fields: Mapping) -> Band:
  """Returns the band of several seeds of one configuration, at their common steps.

  Leaves out metrics that lack a value at one of these steps in any run. Raises ValueError for too
  few runs, or runs without a common step.
  """
  if len(histories) < LEAST_RUNS:
    raise ValueError(f"a band needs at least {LEAST_RUNS} runs, got {len(histories)}")
  by_run = [{(x["split"], x["step"]): x for x in lines} for lines in histories]
  common = sorted(set.intersection(*(set(lines) for lines in by_run)))
  if not common:
    raise ValueError("the runs have no log step in common")
  levels: dict[str, dict[int, dict[str, Level]]] = {}
  for split, step in common:
    levels.setdefault(split, {})[step] = {}
  for split, table in levels.items():
    for name in by_run[0][split, min(table)]:
      values = [[lines[split, step].get(name) for step in table] for lines in by_run]
      if name not in LEFT_OUT and all(isinstance(x, int | float) for row in values for x in row):
        for row, level in zip(table.values(), _levels(np.array(values, np.float64)), strict=True):
          row[name] = level
  return Band(every_steps, len(histories), dict(fields), levels)


def _levels(values: np.ndarray) -> list[Level]:
  """Returns the levels of a metric from its values [runs, lines]."""
  from scipy import stats  # slow to import, and only needed to make a band

  n, lines = values.shape
  mean, variance = values.mean(0), values.var(0, ddof=1)
  near = [variance[max(0, i - SMOOTH // 2) : i + SMOOTH // 2 + 1] for i in range(lines)]
  t = stats.t.ppf(1 - ALARM / 2, [(n - 1) * len(x) for x in near])
  tolerance = t * np.sqrt(np.maximum([x.mean() for x in near], variance) * (1 + 1 / n))
  floor = FLOOR * np.abs(mean).max() or 1e-12
  return [Level(*x) for x in zip(mean.tolist(), np.maximum(tolerance, floor).tolist(), strict=True)]


def write(path: Path, band: Band) -> None:
  """Writes a band as JSON with five-digit numbers."""

  def rounded(row: Mapping[str, Level]) -> dict[str, list[float]]:
    return {name: [float(f"{x:.5g}") for x in level] for name, level in row.items()}

  levels = {
    split: {str(step): rounded(row) for step, row in table.items()}
    for split, table in band.levels.items()
  }
  content = {"runs": band.runs, "every_steps": band.every_steps, "fields": band.fields}
  text = json.dumps(content | {"levels": levels}, separators=(",", ":"))
  path.write_text(text.replace('},"', '},\n"') + "\n", "utf-8")


def read(path: Path) -> Band:
  """Reads a band; raises ValueError if the file is not a band, OSError if not readable."""
  try:
    content = read_json(path)
    levels = {
      split: {int(step): {k: _level(*x) for k, x in row.items()} for step, row in table.items()}
      for split, table in content["levels"].items()
    }
    return Band(int(content["every_steps"]), content["runs"], dict(content["fields"]), levels)
  except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
    raise ValueError(f"{path} is not a band of electra-jax report --make-band: {error}") from None


def _level(mean: float, tolerance: float) -> Level:
  if not (math.isfinite(mean) and tolerance > 0):
    raise ValueError(f"invalid mean {mean} or tolerance {tolerance}")
  return Level(mean, tolerance)


class BandMonitor:
  """Compares a run's lines with a band; warns once, at the first line outside it."""

  def __init__(self, band: Band, name: str, differing: Sequence[str] = ()):
    self._band, self._name, self._differing = band, name, differing
    self._before: dict[tuple[str, str], float] = {}  # distances at the previous line
    self._left = False

  def check(self, split: str, step: int, values: Mapping[str, float | None]) -> list[str]:
    """Takes a log line; returns a warning if the run leaves the band at it."""
    distances, out = self._band.distances(split, step, values), []
    for name, distance in distances.items():
      before = self._before.get((split, name), 0.0)
      self._before[split, name] = distance
      again = min(abs(distance), abs(before)) > 1 and distance * before > 0
      if again or abs(distance) > 2:
        out.append(name)
    if self._left or not out:
      return []
    self._left = True
    seen, where = [], "" if split == "train" else f" ({split})"
    for name in sorted(out, key=lambda name: -abs(distances[name]))[:NAMED]:
      usual = " ± ".join(shown(name, x) for x in self._band.levels[split][step][name])
      side = "above" if distances[name] > 0 else "below"
      seen.append(f"{name}{where} {shown(name, values[name])} is {side} {usual}")
    causes = ", ".join(f"({i}) {text}" for i, text in enumerate(causes_of(distances, values), 1))
    text = f"left the reference {self._name}: {'; '.join(seen)}. Likely causes: {causes}"
    listed = ", ".join(self._differing)
    return [f"{text}. Differences from the reference: {listed}" if listed else text]


# The effect of each cause on kinds of metrics: 1 above the band, -1 below, 0 inside.
CAUSES: dict[str, Mapping[str, int]] = {
  "a higher learning rate (optimizer.learning_rate, generator_learning_rate)": {
    "rate": 1, "words": -1, "entropy": -1,
  },
  "a lower learning rate or a longer warm-up (optimizer.learning_rate, warmup_steps)": {
    "rate": -1, "words": 1, "entropy": 1,
  },
  "a generator that does not learn (optimizer.generator_learning_rate, a frozen generator)": {
    "rate": 0, "words": 1, "detection": 0,
  },
  "targets that do not match their text (labels shuffled, or shifted by a position)": {
    "rate": 0, "words": 1, "detection": -1,
  },
  "a discriminator that does not learn (objective.discriminator_weight, its gradient)": {
    "rate": 0, "words": 0, "detection": -1,
  },
  "text that is too easy: unknown tokens, a broken tokenizer, repeated documents": {
    "rate": 0, "words": -1, "entropy": -1,
  },
  "a different kind of text, or a different vocabulary": {"rate": 0, "words": 1, "entropy": 1},
  "a different gradient scale (weights of the losses, optimizer.clip_norm, dtype)": {
    "rate": 0, "words": 0, "norm": 1,
  },
}  # fmt: skip


# {metric: its kind in CAUSES}; every `_auc` is "detection", every token loss "words".
KINDS = {"sample_entropy": "entropy", "learning_rate": "rate", "grad_norm": "norm"}


def causes_of(distances: Mapping[str, float], names: Collection[str]) -> list[str]:
  """Returns the NAMED causes whose effects agree best with the distances, best first.

  `names` are all metrics of the line, from which `baselines.words` finds the token losses.
  """
  kinds = KINDS | {f"{stem}_loss": "words" for stem in baselines.words(names)}
  observed: dict[str, float] = {}
  for name, distance in distances.items():
    kind = "detection" if quantities.of(name).kind == "auc" else kinds.get(name)
    if kind and abs(distance) >= abs(observed.get(kind, 0.0)):
      observed[kind] = distance

  def score(effects: Mapping[str, int]) -> float:  # the mean agreement, each from -1 to 1
    known = [(effect, observed[kind]) for kind, effect in effects.items() if kind in observed]
    agreements = [e * max(-1, min(1, x)) if e else 0.5 - min(1, abs(x)) for e, x in known]
    return sum(agreements) / max(len(known), 1)

  return sorted(CAUSES, key=lambda cause: -score(CAUSES[cause]))[:NAMED]
