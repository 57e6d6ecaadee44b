"""A linear probe of word tags on the frozen states of an encoder."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from electra_jax.core.task_heads import Head
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune import loop, tagging
from electra_jax.finetune.tagging import Sentence, TagWindow
from electra_jax.interop.sources import Network
from electra_jax.runtime import parallel

BATCH_SIZE, BUCKETS = 32, 4  # rows per device; number of lengths
ITERATIONS = 200  # maximum, of L-BFGS


class Probe(NamedTuple):
  """The size of a probe's training data and the test scores."""

  words: int
  labels: int
  metrics: dict[str, float]  # on the test file, as in fine-tuning
  dimensions: float  # `effective_dimensions` of the training states
  width: int  # of the states
  layers: int  # of the encoder that give the states


def effective_dimensions(states: np.ndarray) -> float:
  """Returns the participation ratio of states [n, D], (Σλ)² / Σλ² of their covariance: 1 to D.

  It is 1 for a collapsed discriminator, whose states vary in one direction.
  """
  variances = np.linalg.eigvalsh(np.cov(states, rowvar=False))
  return float(variances.sum() ** 2 / (variances**2).sum())


def _states(network: Network, tokenizer: Tokenizer, windows: Sequence[TagWindow]) -> np.ndarray:
  """Returns the states of the words that the windows tag, [words, D] float32."""
  head = Head(
    init=lambda cfg, key: {},
    loss=lambda *args: {},
    predict=lambda cfg, weights, states, batch: {"states": states},
    token_outputs=("states",),
  )
  predict = loop.make_predictor(
    network.cfg,
    head,
    batch_size=BATCH_SIZE * jax.device_count(),
    buckets=BUCKETS,
    pad=tokenizer.vocab.pad,
  )
  weights = {k: network.weights[k] for k in ("embeddings", "encoder")} | {"head": {}}
  features = [window.feature for window in windows]
  with parallel.full_precision():
    (outputs,) = predict(jax.tree.map(lambda x: x[None], weights), features)
  of_words = [x[w.positions] for x, w in zip(outputs["states"], windows, strict=True)]
  return np.concatenate(of_words).astype(np.float32)


def run(
  network: Network,
  tokenizer: Tokenizer,
  train: Sequence[Sentence],
  test: Sequence[Sentence],
  max_words: int,
) -> Probe:
  """Fits a logistic regression on the states of words' first tokens, and scores it.

  Args:
    max_words: number of words to read from the start of the training file.

  Raises:
    TaskError: a file has no tags, or too many tags that are missing in the training file.
    ValueError: the first `max_words` words have the same tag.
  """
  from sklearn.exceptions import ConvergenceWarning
  from sklearn.linear_model import LogisticRegression
  from sklearn.pipeline import make_pipeline
  from sklearn.preprocessing import StandardScaler

  labels = tagging.labels(train)
  for note in tagging.check_unseen(test, labels):
    warnings.warn(f"{test[0].place.rpartition(':')[0]}: {note}", stacklevel=1)
  length = network.cfg.max_positions
  of_train, of_test = (
    tagging.windows(sentences, tokenizer, labels, max_length=length) for sentences in (train, test)
  )
  ends = np.cumsum([len(w.words) for w in of_train])
  of_train = of_train[: np.searchsorted(ends, max_words) + 1]
  y = np.concatenate([w.feature.target["tag"][w.positions] for w in of_train])[:max_words]
  if len(found := np.unique(y)) == 1:
    raise ValueError(f"all {len(y):,} training words have the tag {labels[found[0]]}")
  x = _states(network, tokenizer, of_train)[:max_words]
  model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=ITERATIONS))
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", ConvergenceWarning)  # all networks get the same iterations
    model.fit(x, y)
  predicted = model.predict(_states(network, tokenizer, of_test))
  tags = tagging.split_tags(test, labels, predicted)
  scores = tagging.compute_metrics(tagging.example_scores(test, tags, labels))
  sizes = effective_dimensions(x), x.shape[1], network.cfg.num_layers
  return Probe(len(x), len(labels), scores, *sizes)


def score_layers(
  network: Network, tokenizer: Tokenizer, train: Sequence[Sentence], max_words: int
) -> dict[int, float]:
  """Returns {n: score} of the states of layers 1 to n, on the last tenth of the sentences.

  It is the first of `Probe.metrics`, after training on the other nine tenths; to choose a layer
  without the test file. Raises as `run`.
  """
  most = len(train) - max(1, len(train) // 10)

  def score(count: int) -> float:
    parts = train[:most], train[most:]
    return next(
      iter(run(network.first_layers(count), tokenizer, *parts, max_words).metrics.values())
    )

  return {count: score(count) for count in range(1, network.cfg.num_layers + 1)}
