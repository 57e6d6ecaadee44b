"""Trivial baselines: the metrics of a predictor that does not read the text."""

import dataclasses
import math
from collections.abc import Collection, Mapping

import numpy as np

from electra_jax.monitor import quantities

# {loss of `objectives.copy_nll`: line -> share of its positions whose input is the original}.
COPIES = {
  "corrective": lambda line: line.get("sampled_accuracy"),
  "all_tokens": lambda line: None if (x := line.get("replaced")) is None else 1 - x,
}
COPIED = "held-out unigram entropy with copies"
LEAST_UNIGRAM_AUC = 0.6  # at most this: the generator is too strong, see docs/healthy.md
SEQUENCES = ("contrast",)  # losses with an accuracy that do not predict tokens


def learned(name: str, value: float, level: float, auc_margin: float) -> bool:
  """Returns whether a metric is better than its trivial baseline `level`, as docs/healthy.md says.

  >>> learned("mlm_loss", 4.8, 4.9, 0.02), learned("rtd_auc", 0.51, 0.5, 0.02)
  (True, False)
  """
  if quantities.of(name).kind == "auc":
    return value > (LEAST_UNIGRAM_AUC if name == "unigram_auc" else level + auc_margin)
  return value < level


def words(names: Collection[str]) -> list[str]:
  """Returns the prefixes of token-prediction losses among the names of a line's metrics.

  `terms.token_terms` has an accuracy; `terms.detection_terms` has a recall, too.

  >>> words(["mlm_loss", "mlm_accuracy", "rtd_loss", "rtd_accuracy", "rtd_recall"])
  ['mlm']
  """
  found = map(quantities.of, names)
  return [x.subject for x in found if x.kind == "loss" and _predicts_tokens(x.subject, names)]


def _predicts_tokens(stem: str, names: Collection[str]) -> bool:
  accuracy = f"{stem}_accuracy" in names and f"{stem}_recall" not in names
  return f"{stem}_loss" in names and (stem in COPIES or (accuracy and stem not in SEQUENCES))


@dataclasses.dataclass(frozen=True)
class Baselines:
  """Statistics that determine the trivial baselines; None without held-out text."""

  entropy: float | None = None  # unigram entropy, nats per token
  most_frequent: float | None = None  # share of the most frequent token
  choices: int | None = None  # candidates in `contrast_loss`
  masked: float = 1.0  # share of the targets of `mlm_loss` that [MASK] hides; others can be copied

  @classmethod
  def of(cls, frequencies, group: int, masked: float = 1.0) -> "Baselines":
    """Returns the baselines from held-out token counts [V] and fields of config.objective.

    Args:
      group: contrast_group.
      masked: mask_token_prob.
    """
    counts = np.asarray(frequencies, np.float64)
    if not counts.sum():
      return cls(choices=2 * group - 1, masked=masked)
    p = counts[counts > 0] / counts.sum()
    return cls(float(-(p * np.log(p)).sum()), float(p.max()), 2 * group - 1, masked)

  def level(self, name: str, line: Mapping[str, float | None]) -> tuple[str, float] | None:
    """Returns (description, value) of a metric's trivial baseline at a line, or None."""
    stem = quantities.of(name).subject
    known = {
      "contrast_loss": ("any view", self.choices and math.log(self.choices)),
      "pairs_accuracy": ("chance", 0.5),
      f"{stem}_auc": ("chance", 0.5),
    }
    if name == "mlm_loss" and self.entropy is not None and self.masked < 1:
      return COPIED, self.masked * self.entropy
    if _predicts_tokens(stem, line):
      known |= {
        f"{stem}_loss": self._copying(stem, line)
        if stem in COPIES
        else ("held-out unigram entropy", self.entropy),
        f"{stem}_accuracy": ("always the most frequent token", self.most_frequent),
      }
    elif name not in known and (share := positives(stem, line)) is not None:
      known |= {
        f"{stem}_loss": ("entropy of the replaced share", binary_entropy(share)),
        f"{stem}_accuracy": ("always the same answer", max(share, 1 - share)),
        f"{stem}_precision": ("always 'replaced'", share),
      }
    found = known.get(name)
    return found if found and found[1] is not None else None

  def shown(self, name: str, line: Mapping[str, float | None]) -> str:
    """Returns the value of `level` with its unit, "" if unknown."""
    level = self.level(name, line)
    return quantities.shown(name, level[1]) if level else ""

  def _copying(self, stem: str, line: Mapping[str, float | None]) -> tuple[str, float | None]:
    """Returns the baseline of a loss of COPIES, in nats.

    The predictor copies any token with probability 1 - replaced, else predicts the frequencies p.
    The estimate ignores copies that p would also predict, at most replaced x E[p] nats.
    """
    share, replaced, level = COPIES[stem](line), line.get("replaced"), None
    if None not in (share, self.entropy) and replaced and replaced < 1:
      level = -share * math.log(1 - replaced) + (1 - share) * (self.entropy - math.log(replaced))
    return COPIED, level


def positives(stem: str, line: Mapping[str, float | None]) -> float | None:
  """Returns the share of positives (replaced tokens) among the tokens in a detection loss.

  With N tokens, P of them positive, T true positives and W predicted positives: accuracy =
  (N - P - W + 2T) / N, recall = T / P and precision = T / W give P / N.

  >>> positives("rtd", {"rtd_accuracy": 0.9, "rtd_recall": 0.5, "rtd_precision": 0.5})
  0.1
  >>> positives("rtd", {"rtd_accuracy": 0.8, "rtd_recall": 0.0, "rtd_precision": 0.0})  # any W
  """
  accuracy, recall = (line.get(f"{stem}_{kind}") for kind in ("accuracy", "recall"))
  precision = line.get(f"{stem}_precision")
  if accuracy is None or recall is None or precision == 0:  # W is unknown if T is 0
    return None
  wrong = 1 - recall + (recall / precision - recall if precision else 0.0)  # per positive
  share = (1 - accuracy) / wrong if wrong > 1e-6 else math.nan
  return round(share, 9) if 0 <= share <= 1 else None


def binary_entropy(share: float) -> float:
  """Returns the entropy of a Bernoulli variable in nats."""
  return sum(-p * math.log(p) for p in (share, 1 - share) if 0 < p < 1) + 0.0
