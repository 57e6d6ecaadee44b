"""The metrics of text tasks and of retrieval."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


def _sklearn(name: str, rows: np.ndarray, classes: int, **options) -> float:
  """Returns scikit-learn's metric of rows [n, 2] of label and prediction.

  It weights distinct rows by their counts, which keeps thousands of resamplings cheap.
  """
  from sklearn import metrics

  counts = np.bincount((rows[:, 0] * classes + rows[:, 1]).astype(np.int64))
  codes = np.flatnonzero(counts)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a resampling with one class
    return getattr(metrics, name)(*divmod(codes, classes), sample_weight=counts[codes], **options)


def _f1(rows: np.ndarray, classes: int) -> float:
  """Returns the F1 of class 1 of two classes, or the mean F1 of more classes."""
  average = "binary" if classes == 2 else "macro"
  return _sklearn("f1_score", rows, classes, average=average, zero_division=0.0)


def _correlation(name: str, rows: np.ndarray, classes: int) -> float:
  from scipy import stats

  if (np.ptp(rows, axis=0) == 0).any():
    return 0.0
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # nearly constant predictions
    value = getattr(stats, name)(rows[:, 0], rows[:, 1]).statistic
  return value if math.isfinite(value) else 0.0


class Metric(NamedTuple):
  """A metric of predictions.

  `compute` maps rows [n, 2] of label and prediction and the number of classes (or 0) to a number
  from -1 to 1. MCC and correlations are 0 for constant labels or predictions.
  """

  compute: Callable[[np.ndarray, int], float]
  label_types: tuple[str, ...]  # keys of labels.LABEL_TYPES


_CLASSES, _NUMBERS = ("classification",), ("regression",)
METRICS = {
  "accuracy": Metric(functools.partial(_sklearn, "accuracy_score"), _CLASSES),
  "f1": Metric(_f1, _CLASSES),
  "mcc": Metric(functools.partial(_sklearn, "matthews_corrcoef"), _CLASSES),
  "spearman": Metric(functools.partial(_correlation, "spearmanr"), _NUMBERS),
  "pearson": Metric(functools.partial(_correlation, "pearsonr"), _NUMBERS),
}
RETRIEVAL = ("ndcg@10", "mrr@10", "accuracy@1")


def retrieval(scores: np.ndarray, is_relevant: np.ndarray) -> tuple[float, float, float]:
  """Returns the RETRIEVAL metrics of a query, 0 to 1, from the scores [n] of all candidates.

  nDCG@10 has gains of 0 and 1 (Järvelin & Kekäläinen 2002). Ties rank irrelevant candidates first,
  so that constant scores find nothing.

  >>> retrieval(np.array([0.9, 0.7, 0.5]), np.array([False, True, False]))
  (0.63..., 0.5, 0.0)
  """
  own = -np.sort(-scores[is_relevant])
  others = scores[~is_relevant]
  ranks = 1 + np.arange(len(own)) + (others >= own[:, None]).sum(1)
  gains = np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0)
  ideal = (1 / np.log2(2 + np.arange(min(10, len(own))))).sum()
  first = ranks[0]
  return float(gains.sum() / ideal), 1 / int(first) if first <= 10 else 0.0, float(first == 1)
