"""Warnings from a run's log lines: loss spikes, collapsed networks, departures from a reference.

Checks metrics by name, as in metrics.jsonl: a loss with an accuracy (`mlm_loss`, `mlm_accuracy`), a
discriminator's `_auc` and `_recall`, a generator's `sample_entropy`. `metrics` detects non-finite
losses, and `pretrain.train` stops or rolls back.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping

from electra_jax.monitor import quantities
from electra_jax.monitor.bands import BandMonitor

GENERATOR_LOSSES = ("mlm_loss", "cloze_loss")  # in nats, as is sample_entropy
LEAST_LINES = 5  # lines of a loss before checks for spikes
LEAST_RISE = 0.1  # nats; a loss near 0 may double at random
# Noise limit in median absolute deviations; 7 are 4.7 standard deviations. Without it, lines of one
# small batch would exceed LEAST_RISE.
NOISE = 7


@dataclasses.dataclass(frozen=True)
class Limits:
  """Thresholds of the warnings; 0 disables a check."""

  window: int  # lines of a collapse before a warning, and of a loss's median
  loss_spike: float  # ratio of a loss to the median; the rise must exceed the noise, too
  auc_margin: float  # an AUC closer than this to 0.5 is chance
  # least fraction of replaced tokens found; below it, all predictions are "original"
  recall: float
  entropy_ratio: float  # least ratio of the generator's entropy to its loss; 1 if calibrated
  # first step checked for collapses; untrained discriminators predict "original"
  after_step: int

  def __post_init__(self):
    if self.window < 1:
      raise ValueError(f"health.window must be at least 1 line, got {self.window}")
    if self.loss_spike and self.loss_spike <= 1:
      raise ValueError(f"health.loss_spike must be above 1, or 0 for off, got {self.loss_spike}")
    for name, most in (("auc_margin", 0.5), ("recall", 1.0), ("entropy_ratio", 1.0)):
      if not 0 <= getattr(self, name) <= most:
        raise ValueError(f"health.{name} must be between 0 and {most}, got {getattr(self, name)}")


class Health:
  """The state of a run's checks.

  Args:
    history: lines of metrics.jsonl to replay, so that a resumed run warns as if uninterrupted.
    reference: compares the lines with a band.
    suspended_checks: step -> names or kinds of metrics not checked for a collapse at it.
  """

  def __init__(
    self,
    limits: Limits,
    history: Iterable[Mapping] = (),
    reference: BandMonitor | None = None,
    suspended_checks: Callable[[int], tuple[str, ...]] = lambda step: (),
  ):
    self._limits, self._reference, self._suspended_checks = limits, reference, suspended_checks
    self._last: dict[str, int] = {}  # the last step at which a metric's check was suspended
    self._levels: dict[str, _Level] = {}
    self._newest: tuple[int, list[str]] = (0, [])  # the newest line's step and its warnings
    self._since: dict[str, tuple[int, int]] = {}  # first step of a collapse, and its lines so far
    for line in history:
      self.check(line["step"], line, line.get("split", "train"))

  def check(self, step: int, values: Mapping[str, float | None], split: str = "train") -> list[str]:
    """Returns a warning for each problem that begins at a line.

    Evaluations are only compared with the reference.
    """
    warnings = [*self._spikes(values), *self._collapses(step, values)] if split == "train" else []
    if self._reference:
      warnings += self._reference.check(split, step, values)
    told = [f"step {step:,}: {text}" for text in warnings]
    self._newest = step, self.warnings(step) + told
    return told

  def warnings(self, step: int) -> list[str]:
    """Returns the warnings at a step, [] unless it is the newest."""
    newest, warnings = self._newest
    return warnings if newest == step else []

  def _spikes(self, values: Mapping) -> Iterator[str]:
    if not self._limits.loss_spike:
      return
    for name, value in values.items():
      quantity = quantities.of(name)
      accuracy = quantity.other("accuracy")
      # Not the weighted sum `loss`, which jumps when a schedule changes a weight.
      if quantity.kind != "loss" or value is None or accuracy not in values:
        continue
      # A discriminator's loss rises as its generator learns, but at most to log 2, the largest loss
      # of predicting the base rate, unless it collapses.
      least = math.log(2) if quantity.other("auc") in values else 0.0
      level = self._levels.setdefault(name, _Level(self._limits, least))
      lines = len(level.usual)
      if (median := level.take(value)) is not None:
        yield (
          f"{name} {value:.3f} nats is {value / max(median, 1e-9):.3g} times the median"
          f" {median:.3f} of the previous {lines} log lines (limit {self._limits.loss_spike:g})."
          " Unless a schedule jumps here: lower optimizer.learning_rate or optimizer.clip_norm,"
          " raise optimizer.warmup_steps, or resume with these from an earlier checkpoint"
        )

  def _collapses(self, step: int, values: Mapping) -> Iterator[str]:
    suspended = self._suspended_checks(step)
    self._last |= {x: step for x in values if x in suspended or quantities.of(x).kind in suspended}
    for name, is_bad, seen, advice in _signs(self._limits, values):
      if not is_bad or step <= self._last.get(name, 0) + self._limits.after_step:
        self._since.pop(name, None)
        continue
      first, lines = self._since.get(name, (step, 0))
      self._since[name] = first, lines + 1
      if lines + 1 == self._limits.window:
        yield f"{seen}, on {lines + 1} log lines since step {first:,}: {advice}"


class _Level:
  """The usual level of a loss: the last lines without spikes."""

  def __init__(self, limits: Limits, least: float):
    self._ratio, self._least = limits.loss_spike, least
    self.usual = collections.deque(maxlen=max(limits.window, LEAST_LINES))
    self._high: list[float] = []  # lines of the current spike

  def take(self, value: float) -> float | None:
    """Takes a loss; returns the usual median if a spike begins here."""
    begins, limit, median = not self._high, math.inf, None
    if len(self.usual) >= LEAST_LINES:
      median = statistics.median(self.usual)
      noise = statistics.median(abs(x - median) for x in self.usual)
      rise = max((self._ratio - 1) * median, NOISE * noise, LEAST_RISE)
      # A spike ends half-way back, so that a loss that fluctuates at the limit is one spike.
      limit = max(median + (rise if begins else rise / 2), self._least)
    is_high = value > limit
    self._high = [*self._high, value] if is_high else []
    if not is_high:
      self.usual.append(value)
    elif len(self._high) == self.usual.maxlen:  # a new level, not a spike
      self.usual.extend(self._high)
      self._high = []
    return median if is_high and begins else None


def _signs(limits: Limits, values: Mapping) -> Iterator[tuple[str, bool, str, str]]:
  """Yields (name, is_bad, observation, advice) for each metric that has a value."""
  losses = [(k, values[k]) for k in GENERATOR_LOSSES if values.get(k) is not None]
  for name, value in values.items():
    if value is None:
      continue
    kind = quantities.of(name).kind
    if kind == "auc":
      is_bad = abs(value - 0.5) < limits.auc_margin
      seen = f"{name} {value:.3f} is within {limits.auc_margin:g} of chance (0.5)"
      advice = (
        "the discriminator does not learn. Try a weaker generator (generator.width_multiplier), a"
        " lower optimizer.learning_rate, or optimizer.separate_optimizers"
      )
    elif kind == "recall":
      share = values.get("replaced")
      of = "" if share is None else f" (replaced: {100 * share:.3g} % of all)"
      is_bad = value < limits.recall
      seen = f"{name} {100 * value:.3g} % is below {100 * limits.recall:g} %{of}"
      advice = (
        "the discriminator predicts 'original' for every token. Try a higher objective.mask_prob,"
        " a weaker generator (generator.width_multiplier), a lower optimizer.learning_rate, or a"
        " higher objective.discriminator_weight"
      )
    elif name == "sample_entropy" and losses:
      loss, level = losses[0]
      is_bad = value < limits.entropy_ratio * level
      seen = f"{name} {value:.3f} nats is below {limits.entropy_ratio:g} times {loss} {level:.3f}"
      advice = (
        "the generator samples the same few tokens. Raise objective.temperature or"
        " objective.mlm_weight, or lower objective.adversarial_weight"
      )
    else:
      continue
    yield name, is_bad, seen, advice
