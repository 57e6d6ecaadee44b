"""Parses the name of a metric into a subject and a kind (`rtd_auc`), which determines the unit.

Lines of metrics.jsonl hold only names and numbers, also from earlier versions and registered
objectives.
"""

from collections.abc import Callable
from typing import NamedTuple

from electra_jax.runtime.terminal import clock


def _percent(value: float) -> str:
  return f"{100 * value:.1f} %"


def _number(value: float) -> str:
  return f"{value:.2e}" if value and not 1e-2 <= abs(value) < 1e5 else f"{value:.4g}"


def _milliseconds(value: float) -> str:
  return f"{value:,.1f} ms" if value < 100 else f"{value:,.0f} ms"


def _per_second(value: float) -> str:
  return f"{value:,.0f}/s" if value >= 100 else f"{value:.1f}/s"


class Kind(NamedTuple):
  """A kind of metric."""

  text: Callable[[float], str]  # the value with its unit
  unit: str = ""  # of an axis
  is_in_value: bool = False  # the unit shows the kind, so the label is only the subject


FRACTIONS = "accuracy", "recall", "precision", "replaced", "copied"
KINDS = {
  "loss": Kind("{:.4f} nats".format, "nats"),
  "entropy": Kind("{:.4f} nats".format, "nats"),
  **dict.fromkeys(FRACTIONS, Kind(_percent, "fraction")),
  "auc": Kind(_number, "fraction"),
  "scores": Kind(_number),  # a histogram; lines have its auc
  "mfu": Kind(_percent),
  "per_sec": Kind(_per_second, is_in_value=True),
  "secs": Kind(clock, is_in_value=True),
  "ms": Kind(_milliseconds, is_in_value=True),
}
OTHER = Kind(_number)


class Quantity(NamedTuple):
  """The parts of a metric's name."""

  subject: str  # "rtd" of rtd_auc, "" of loss
  kind: str  # a key of KINDS, or "" (learning_rate)

  def other(self, kind: str) -> str:
    """Returns the name of another metric of this subject."""
    return f"{self.subject}_{kind}"


def of(name: str) -> Quantity:
  """Parses a name.

  >>> of("rtd_auc"), of("loss").kind, of("tokens_per_sec").kind, of("learning_rate").kind
  (Quantity(subject='rtd', kind='auc'), 'loss', 'per_sec', '')
  """
  for kind in KINDS:
    if name == kind:
      return Quantity("", kind)
    if name.endswith(f"_{kind}"):
      return Quantity(name[: -len(kind) - 1], kind)
  return Quantity(name, "")


def shown(name: str, value: float | None) -> str:
  """Formats a metric with its unit.

  >>> shown("rtd_loss", 0.41234), shown("rtd_recall", 0.5), shown("rtd_auc", None)
  ('0.4123 nats', '50.0 %', '-')
  """
  return "-" if value is None else KINDS.get(of(name).kind, OTHER).text(value)


def label(name: str) -> str:
  """Returns a metric's display name: tokens for `tokens_per_sec`, whose value has the unit."""
  subject, kind = of(name)
  short = subject if KINDS.get(kind, OTHER).is_in_value else name
  return short.upper() if short in ("eta", "mfu") else short.replace("_", " ")


def unit(name: str) -> str:
  """Returns the unit of a metric's axis.

  >>> unit("sample_entropy"), unit("rtd_auc"), unit("grad_norm")
  ('nats', 'fraction', '')
  """
  return KINDS.get(of(name).kind, OTHER).unit
