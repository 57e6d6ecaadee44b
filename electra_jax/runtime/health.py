"""Judges the lines of a run's log: losses that spike, networks that collapse.

Nothing here knows an objective. Terms are judged by their names, as in metrics.jsonl: a loss with
an accuracy beside it (`mlm_loss`, `mlm_accuracy`), a discriminator's `_auc` and `_recall`, and a
generator's `sample_entropy`. What an objective does not report is not judged.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping

LEAST_LINES = 5  # of a loss, before there is a level that it can rise above
LEAST_RISE = 0.1  # nats: a loss near 0 may double by chance
# Median deviations from the median that noise does not reach, 4.7 standard deviations: lines of a
# step each, of a few sequences, differ by more than a tenth.
NOISE = 7


@dataclasses.dataclass(frozen=True)
class Limits:
  """Where trouble begins; a limit of 0 switches that judgement off.

  Fields:
    window: lines that a collapse has to last, and whose median a loss is compared with.
    loss_spike: a loss over that median, if it is beyond the window's noise too.
    auc_margin: a discriminator's AUC is less than this from 0.5, which is guessing.
    recall: it finds less than this share of the replaced tokens: it always says "original".
    entropy_ratio: the generator's entropy is below this times its loss; calibrated, they are equal.
    after_step: collapses are looked for after this step only: discriminators begin with "original".
  """

  window: int
  loss_spike: float
  auc_margin: float
  recall: float
  entropy_ratio: float
  after_step: int

  def __post_init__(self):
    if self.window < 1:
      raise ValueError(f"health.window is at least 1 line, got {self.window}")
    if self.loss_spike and self.loss_spike <= 1:
      raise ValueError(f"health.loss_spike is above 1, or 0 for off, got {self.loss_spike}")
    for name, most in (("auc_margin", 0.5), ("recall", 1.0), ("entropy_ratio", 1.0)):
      if not 0 <= getattr(self, name) <= most:
        raise ValueError(f"health.{name} is from 0 to {most}, got {getattr(self, name)}")


class Health:
  """What has been seen of a run so far, as far as the next line is judged by it.

  Args:
    history: lines of metrics.jsonl that a resumed run continues: it judges as if it had not been
      interrupted. Lines of evaluations are passed over.
  """

  def __init__(self, limits: Limits, history: Iterable[Mapping] = ()):
    self._limits = limits
    self._levels: dict[str, _Level] = {}
    self._since: dict[str, tuple[int, int]] = {}  # where a collapse began, and its lines so far
    for line in history:
      if line.get("split", "train") == "train":
        self.check(line["step"], line)

  def check(self, step: int, values: Mapping[str, float | None]) -> list[str]:
    """Takes a line of the log and returns a warning for every trouble that begins with it."""
    warnings = [*self._spikes(values), *self._collapses(step, values)]
    return [f"step {step:,}: {text}" for text in warnings]

  def _spikes(self, values: Mapping) -> Iterator[str]:
    if not self._limits.loss_spike:
      return
    for name, value in values.items():
      stem = name.removesuffix("_loss")
      # Not the weighted sum `loss`: it jumps where a schedule changes a weight.
      if stem == name or value is None or f"{stem}_accuracy" not in values:
        continue
      # A discriminator's task gets harder as its generator learns, and its loss rises, but to no
      # more than log 2, which costs nothing but to know how many tokens are replaced.
      least = math.log(2) if f"{stem}_auc" in values else 0.0
      level = self._levels.setdefault(name, _Level(self._limits, least))
      lines = len(level.usual)
      median = level.take(value)
      if median is not None:
        yield (
          f"{name} {value:.3f} nats is {value / max(median, 1e-9):.3g} times the median"
          f" {median:.3f} of the {lines} lines before (limit {self._limits.loss_spike:g}). Unless a"
          " schedule jumps here: lower optimizer.learning_rate or optimizer.clip_norm, raise"
          " optimizer.warmup_steps, or resume with these from an earlier checkpoint"
        )

  def _collapses(self, step: int, values: Mapping) -> Iterator[str]:
    if step <= self._limits.after_step:
      return
    for name, is_bad, seen, advice in _signs(self._limits, values):
      if not is_bad:
        self._since.pop(name, None)
        continue
      first, lines = self._since.get(name, (step, 0))
      self._since[name] = first, lines + 1
      if lines + 1 == self._limits.window:
        yield f"{seen}, on {lines + 1} lines from step {first:,}: {advice}"


class _Level:
  """Where a loss usually is: its last lines without those of spikes."""

  def __init__(self, limits: Limits, least: float):
    self._ratio, self._least = limits.loss_spike, least
    self.usual = collections.deque(maxlen=max(limits.window, LEAST_LINES))
    self._high: list[float] = []  # the lines of a spike that is going on

  def take(self, value: float) -> float | None:
    """Takes a line's loss and returns the usual median if a spike begins here."""
    if len(self.usual) < LEAST_LINES:
      self.usual.append(value)
      return None
    median, begins = statistics.median(self.usual), not self._high
    noise = statistics.median(abs(x - median) for x in self.usual)
    rise = max((self._ratio - 1) * median, NOISE * noise, LEAST_RISE)
    # A spike ends half way back, so that one loss that wavers at the limit is one spike.
    if value <= max(median + (rise if begins else rise / 2), self._least):
      self.usual.append(value)
      self._high = []
      return None
    self._high.append(value)
    if len(self._high) == self.usual.maxlen:  # it has come to stay
      self.usual.extend(self._high)
      self._high = []
    return median if begins else None


def _signs(limits: Limits, values: Mapping) -> Iterator[tuple[str, bool, str, str]]:
  """Yields (name, whether it is as in a collapse, what is seen, what to do) for what is reported.

  None says nothing: it was not counted.
  """
  for name, value in values.items():
    if value is None:
      continue
    if name.endswith("_auc"):
      yield (
        name,
        abs(value - 0.5) < limits.auc_margin,
        f"{name} {value:.3f} is within {limits.auc_margin:g} of guessing (0.5)",
        "the discriminator tells nothing. A generator that is not as strong"
        " (generator.width_multiplier), a lower optimizer.learning_rate, or"
        " optimizer.separate_optimizers",
      )
    elif name.endswith("_recall"):
      share = values.get("replaced")
      of = "" if share is None else f" (replaced: {100 * share:.3g} % of all)"
      yield (
        name,
        value < limits.recall,
        f"{name} {100 * value:.3g} % is below {100 * limits.recall:g} %{of}",
        "the discriminator says 'original' of every token. More to find (raise"
        " objective.mask_prob), a generator that is not as strong (generator.width_multiplier), a"
        " lower optimizer.learning_rate, or a higher objective.discriminator_weight",
      )
    elif name == "sample_entropy":
      loss = next((k for k in ("mlm_loss", "cloze_loss") if values.get(k) is not None), None)
      if loss is not None:
        yield (
          name,
          value < limits.entropy_ratio * values[loss],
          f"{name} {value:.3f} nats is below {limits.entropy_ratio:g} times {loss}"
          f" {values[loss]:.3f}",
          "the generator samples the same few tokens. Raise objective.temperature or"
          " objective.mlm_weight, or lower objective.adversarial_weight",
        )
