"""Trivial baselines of the metrics: what a predictor reaches that does not read the text."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

# Terms about words; their trivial baseline predicts the token frequencies.
WORDS = ("mlm", "cloze", "replace_mlm")


@dataclasses.dataclass(frozen=True)
class Chance:
  """Statistics that determine the trivial baselines; None without held-out text."""

  entropy: float | None = None  # of the unigrams, nats per token
  most_frequent: float | None = None  # share of the most frequent token
  choices: int | None = None  # candidates for the other view of a sequence in `contrast_loss`

  @classmethod
  def of(cls, frequencies, group: int) -> "Chance":
    """Returns the baselines from held-out token counts [V] and the size of a contrast group."""
    counts = np.asarray(frequencies, np.float64)
    if not counts.sum():
      return cls(choices=2 * group - 1)
    p = counts[counts > 0] / counts.sum()
    return cls(float(-(p * np.log(p)).sum()), float(p.max()), 2 * group - 1)

  def level(self, name: str, line: Mapping[str, float | None]) -> tuple[str, float] | None:
    """Returns (description, value) of the trivial baseline for a metric of a line, or None."""
    stem, _, kind = name.rpartition("_")
    words = {
      "loss": ("held-out unigram entropy", self.entropy),
      "accuracy": ("always the most frequent token", self.most_frequent),
    }
    known = {
      **{f"{term}_{end}": level for term in WORDS for end, level in words.items()},
      "contrast_loss": ("any view", self.choices and math.log(self.choices)),
      "pairs_accuracy": ("chance", 0.5),
      f"{stem}_auc": ("chance", 0.5),
    }
    if name not in known and (share := positives(stem, line)) is not None:
      known |= {
        f"{stem}_loss": ("entropy of the share", binary_entropy(share)),
        f"{stem}_accuracy": ("always the same answer", max(share, 1 - share)),
        f"{stem}_precision": ("all are positive", share),
      }
    what, value = known.get(name, ("", None))
    return None if value is None else (what, value)


def positives(stem: str, line: Mapping[str, float | None]) -> float | None:
  """Returns the share of positives (replaced tokens) among those that a detector judged.

  With N tokens, P of them positive, T found and W answers "positive": accuracy = (N - P - W + 2T) /
  N, recall = T / P and precision = T / W give P / N. So it is the loss's own share, for any
  objective: that of the masked positions where only these are judged.

  >>> positives("rtd", {"rtd_accuracy": 0.9, "rtd_recall": 0.5, "rtd_precision": 0.5})
  0.1
  """
  accuracy, recall = (line.get(f"{stem}_{kind}") for kind in ("accuracy", "recall"))
  precision = line.get(f"{stem}_precision")
  if accuracy is None or recall is None:
    return None
  wrong = 1 - recall + (recall / precision - recall if precision else 0.0)  # for each positive
  share = (1 - accuracy) / wrong if wrong > 1e-6 else math.nan
  return round(share, 9) if 0 <= share <= 1 else None


def binary_entropy(share: float) -> float:
  """Returns the entropy of a coin in nats.

  >>> round(binary_entropy(0.5), 4), binary_entropy(0.0)
  (0.6931, 0.0)
  """
  return sum(-p * math.log(p) for p in (share, 1 - share) if 0 < p < 1) + 0.0
