"""Measures of pretrained networks; see commands/evaluate.py."""

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from electra_jax.core import objectives, step
from electra_jax.core.masking import Masking
from electra_jax.core.networks import PretrainSpec, TokenCounts
from electra_jax.data import pretrain_batches, tokenizer
from electra_jax.data.pretrain_batches import Shards
from electra_jax.evaluate import cloze, pairs, probe, scorers
from electra_jax.evaluate.pairs import Accuracy, Pair
from electra_jax.evaluate.probe import Probe
from electra_jax.finetune import tagging
from electra_jax.interop import sources
from electra_jax.interop.sources import ExchangeError, Network, Source
from electra_jax.monitor import metrics
from electra_jax.monitor.display import doing
from electra_jax.runtime import jax_flags, parallel


class PairScores(NamedTuple):
  """The minimal pairs that a network gets right, and its accuracies."""

  scorer: str
  pairs: list[Pair]  # the pairs that fit into the network
  margins: np.ndarray  # [n] nats, by which the acceptable sentence scores higher
  all: Accuracy
  categories: dict[str, Accuracy]
  paradigms: dict[str, Accuracy]


def evaluate_pairs(model: str | Path, data: str | Path, scorer: str | None = None) -> PairScores:
  """Scores the minimal pairs of a file.

  Args:
    model: a run, an export, a Hugging Face folder, hf://ORG/NAME[@REVISION] or a TF1 checkpoint.
    data: JSON lines in BLiMP's format.
    scorer: a key of `scorers.SCORERS`; None: the objective's.

  Raises:
    ValueError, OSError: the file, the network or the scorer is invalid.
  """
  found, source = pairs.read(data), _open(model)
  scorer, network = scorers.choose(scorer, source, model)
  sentence_scorer = scorers.SentenceScorer(scorer, network.cfg, source.tokenizer)
  found, left_out = pairs.fitting(sentence_scorer, found)
  for line in left_out:
    warnings.warn(line, stacklevel=2)
  with doing(f"scoring {len(found):,} pairs"):
    margins = pairs.margins(sentence_scorer, network.weights, found)
  right = margins > 0
  categories = pairs.by([pair.category for pair in found], right)
  paradigms = pairs.by([pair.paradigm for pair in found], right)
  return PairScores(scorer, found, margins, pairs.accuracy(right), categories, paradigms)


class ClozeScores(NamedTuple):
  """Where a network ranks the words of held-out text."""

  scorer: str
  words: int  # to rank for each gap
  ranks: np.ndarray  # [n] int from 1 of the gaps' own words; 0: skipped
  first: Accuracy  # how often the rank is 1
  mean_reciprocal_rank: float


def evaluate_cloze(
  model: str | Path, data: str | Path, scorer: str | None = None, *, gaps: int | None = None
) -> ClozeScores:
  """Ranks the words of gaps in texts.

  Args:
    model, scorer: as in `evaluate_pairs`.
    data: JSON lines as for `cloze.read`.
    gaps: maximum number of gaps, evenly spaced; None: all.

  Raises:
    ValueError, OSError: the file, the network or the scorer is invalid, or all gaps are skipped.
  """
  found, source = cloze.read(data, gaps), _open(model)
  scorer, network = scorers.choose(scorer, source, model)
  with doing(f"ranking the words of {len(found):,} gaps"):
    ranks = cloze.ranks(scorer, network.cfg, network.weights, source.tokenizer, found)
  kept = ranks[ranks > 0]
  if left_out := len(ranks) - len(kept):
    why = f"whose words are not one token each, or of more than {network.cfg.max_positions} tokens"
    if not len(kept):
      raise ValueError(f"{data}: all gaps are of texts {why}")
    warnings.warn(f"{left_out:,} gaps are skipped: texts {why}", stacklevel=2)
  mean = float((1 / kept).mean())
  return ClozeScores(scorer, len(found[0].words), ranks, pairs.accuracy(kept == 1), mean)


@jax_flags.pinned()
def evaluate_detection(
  model: str | Path, data: str | Path, *, batch_size: int = 64, examples: int = 2048
) -> float:
  """Returns the AUC of detecting replacements drawn by token frequency in held-out shards.

  Args:
    model: as in `evaluate_pairs`, with a detection head.
    data: a folder or URL of shards; a URL's held-out shards are copied.
    batch_size: sequences over all devices.
    examples: maximum number of examples, evenly spaced.

  Raises:
    ValueError, OSError: the shards or the network are invalid, or do not fit each other.
  """
  heldout = Shards.open(data, "heldout")
  tokens = tokenizer.load_from(heldout.folder, heldout.vocab)
  source = sources.open_for(model, tokens)
  network = scorers.network_for("rtd", source.networks, model)
  sources.check_vocab(tokens, {"discriminator": network}, model)
  if heldout.seq_length > network.cfg.max_positions:
    raise ValueError(
      f"{data} has {heldout.seq_length} tokens per row, the network {network.cfg.max_positions}"
      " positions"
    )
  frequencies = np.array(heldout.manifest["splits"]["train"]["frequencies"], np.int64)
  with doing("detecting"):
    return detection_auc(network, heldout, frequencies, batch_size, examples)


def detection_auc(
  network: Network, data: Shards, frequencies: np.ndarray, batch_size: int, examples: int
) -> float:
  """Returns the AUC of detecting replacements of 15 % of the tokens, drawn by `frequencies` [V].

  It is the `unigram_auc` of a run's evaluations; every network gets the same replacements.

  Raises:
    ValueError: the devices do not divide the batch.
  """
  parallel.check_divisible(batch_size, 1)
  vocab = data.vocab
  rates = Masking(0.15, 1.0, 1.0, mask_id=vocab.mask, special_ids=tuple(vocab.special_ids))
  counts = TokenCounts(frequencies)
  spec = PretrainSpec(network.cfg, network.cfg, rates, tying="none", frequencies=counts)
  weights = dict(network.weights)
  params = {"embeddings": weights.pop("embeddings"), "discriminator": weights}

  def terms(params, batch, keys, step):
    return objectives.detect_unigrams(spec, params, batch)

  evaluate = parallel.map_eval_step(step.make_eval_step(terms, seed=0))
  batches = pretrain_batches.eval_batches(data, batch_size=batch_size, max_examples=examples)
  with parallel.full_precision():
    values = metrics.evaluate(evaluate, parallel.replicate(params), parallel.prefetch(batches), 0)
  return values["unigram_auc"]


def evaluate_probe(
  model: str | Path,
  train: str | Path,
  test: str | Path,
  *,
  max_words: int = 100_000,
  best_layer: bool = False,
) -> tuple[Probe, dict[int, float]]:
  """Fits a linear classifier to the frozen states of tagged words, and scores it.

  Also returns `probe.score_layers`, {} without `best_layer`.

  Args:
    model: as in `evaluate_pairs`.
    train, test: CoNLL files.
    max_words: maximum number of training words.
    best_layer: probe the layer with the best score on a tenth of `train`, instead of the last one.

  Raises:
    ValueError, OSError: a file or the network is invalid.
  """
  sentences = [tagging.read(str(file)) for file in (train, test)]
  source = _open(model)
  with doing("fitting"):
    network, tokens, layers = source.networks[source.main], source.tokenizer, {}
    if best_layer:
      layers = probe.score_layers(network, tokens, sentences[0], max_words)
      network = network.first_layers(max(layers, key=layers.get))
    return probe.run(network, tokens, *sentences, max_words), layers


def _open(path: str | Path) -> Source:
  with doing("reading"):
    source = sources.open_source(path)
  if source.tokenizer is None:
    raise ExchangeError(f"{path} has no vocabulary: add its vocab.txt to the folder")
  return source
