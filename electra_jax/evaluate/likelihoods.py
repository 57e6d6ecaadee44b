"""Pseudo-log-likelihoods of sentences; see commands/score.py."""

import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import numpy as np

from electra_jax.core import objectives, scoring
from electra_jax.core.batch import from_rows
from electra_jax.core.masking import Masking
from electra_jax.core.networks import PretrainSpec
from electra_jax.data import mirror, tokenizer
from electra_jax.data.tokenizer import Vocab
from electra_jax.interop import sources
from electra_jax.interop.sources import ExchangeError, RunParams, Source
from electra_jax.monitor.display import doing
from electra_jax.runtime import bucket, jax_flags, parallel

# The training of the original's Small and Base, assumed for sources that do not say theirs.
ORIGINAL = {
  "objective": "electra",
  "generator_kind": "transformer",
  "mask_prob": 0.15,
  "temperature": 1.0,
  "unigram_share": 0.0,
  "keep_mask_share": 0.0,
  "disallow_correct": False,
}


class Scorer:
  """Scores sentences with a run's newest checkpoint or another source's networks."""

  def __init__(self, path: str | Path, data_dir: str | None = None, batch_size: int = 32):
    path = bucket.local(path)
    is_run = sources.is_run(path)
    own = sources.data_folder(path) if is_run else None
    folder = mirror.local(data_dir, splits=()) if data_dir else own
    tokens = folder and tokenizer.load_from(folder, sources.vocab_of(folder))
    if is_run:
      self.tokenizer = tokens
      self.spec, params, step = sources.read_run(path, tokens)
    else:
      source = sources.open_for(path, tokens) if tokens else sources.open_source(path)
      self.tokenizer = tokens or source.tokenizer
      if self.tokenizer is None:
        raise ValueError(f"{path} has no vocabulary: add its vocab.txt, or set --data_dir")
      sources.check_vocab(self.tokenizer, source.networks, path)
      self.spec, params, step = as_run(source, self.tokenizer.vocab, path)
    self.batch_size = batch_size
    # Without a generator, `spec.generator` is the discriminator's config.
    both = self.spec.discriminator, self.spec.generator
    self.longest = min(cfg.max_positions for cfg in both) - 2
    self._params = params
    self._score = jax.jit(
      lambda params, batch: objectives.token_scores(self.spec, params, batch, step).sum(-1)
    )

  def check_lengths(self, scored: list[tuple[float, int]]) -> None:
    """Raises ValueError, naming the line, if a sentence was too long to be scored."""
    lengths = enumerate((length for _, length in scored), 1)
    if too_long := [f"line {i} has {n} tokens" for i, n in lengths if n > self.longest]:
      others = f", and {len(too_long) - 1} more lines have too many" if too_long[1:] else ""
      raise ValueError(f"{too_long[0]}, the limit is {self.longest}{others}")

  def __call__(self, sentences: list[str]) -> list[tuple[float, int]]:
    """Returns (pseudo-log-likelihood in nats, tokens) of each sentence; NaN if it is too long."""
    encoded = self.tokenizer.encode_batch(sentences)
    fitting = [i for i, ids in enumerate(encoded) if len(ids) <= self.longest]
    # Sorting and padding to a power of two gives few shapes to compile and little padding.
    order = sorted(fitting, key=lambda i: len(encoded[i]))
    vocab, scores = self.tokenizer.vocab, np.full(len(encoded), np.nan)
    for start in range(0, len(order), self.batch_size):
      rows = order[start : start + self.batch_size]
      texts = [[vocab.cls, *encoded[i], vocab.sep] for i in rows]
      length = min(1 << (len(texts[-1]) - 1).bit_length(), self.longest + 2)
      batch = from_rows(texts, (self.batch_size, length), vocab.pad)
      with parallel.full_precision():
        scores[rows] = self._score(self._params, batch)[: len(rows)]
    return [(float(score), len(ids)) for score, ids in zip(scores, encoded, strict=True)]


def as_run(source: Source, vocab: Vocab, path: str | Path) -> RunParams:
  """Returns the networks of a source at `path` as `RunParams` without a step.

  A lone masked language model is scored as one, whatever objective it was trained with.

  Raises:
    ExchangeError: the networks give no likelihood.
  """
  main, generator = (source.networks.get(role) for role in ("discriminator", "generator"))
  recorded = source.training
  settings = dict(recorded or ORIGINAL)
  if main is None or (main.is_masked_lm and recorded is None):
    main, generator, settings["objective"] = source.networks[source.main], None, "bert"
  if source.finetuned or main.head is None:
    raise ExchangeError(f"{path} has no pretraining head, which likelihoods need")
  kinds = {name: type(value) for name, value in ORIGINAL.items()}
  wrong = [name for name, value in settings.items() if type(value) is not kinds.get(name)]
  if wrong or not {"objective", "generator_kind"} <= settings.keys():
    raise ExchangeError(f"{path}: the record of the training is damaged: {', '.join(wrong)}")
  if settings["objective"] not in objectives.OBJECTIVES:
    raise ExchangeError(
      f"{path} was trained with the objective {settings['objective']!r}: add --import=MODULE with"
      " the module that registers it"
    )
  kind = objectives.OBJECTIVES[settings["objective"]]
  if kind.log_p is scoring.implied and generator is None:
    raise ExchangeError(f"{path} has no generator, which likelihoods need besides a discriminator")
  if recorded is None and generator is not None:
    warnings.warn(
      f"{path} does not say its mask rate: assuming {ORIGINAL['mask_prob']}, as in the original's"
      " Small and Base",
      stacklevel=2,
    )
  kinds = {name: settings.pop(name) for name in ("objective", "generator_kind")}
  rates = Masking(
    **settings, mask_token_prob=1.0, mask_id=vocab.mask, special_ids=vocab.special_ids
  )
  spec = PretrainSpec((generator or main).cfg, main.cfg, rates, **kinds, tying="none")
  weights = dict(main.weights)
  params = {"embeddings": weights.pop("embeddings"), "discriminator": weights}
  if generator is not None:
    params["generator"] = generator.weights
  return RunParams(spec, params, None)


def best(lines: Iterable[tuple[str, float, str]], likelihoods, weight: float) -> Iterator[tuple]:
  """Yields (ID, score, hypothesis) with the highest combined score for each ID, in order.

  >>> list(best([("a", -1.0, "x"), ("a", -2.0, "y"), ("b", -3.0, "z")], [-9.0, -1.0, -5.0], 0.5))
  [('a', -2.5, 'y'), ('b', -5.5, 'z')]
  """
  found: dict[str, tuple[str, float, str]] = {}
  for (name, score, text), log_p in zip(lines, likelihoods, strict=True):
    total = score + weight * log_p
    if name not in found or total > found[name][1]:
      found[name] = (name, total, text)
  yield from found.values()


def read_nbest(lines: list[str]) -> list[tuple[str, float, str]]:
  """Parses lines of ID, score and hypothesis; raises ValueError if one is malformed."""
  hypotheses = []
  for number, line in enumerate(lines, 1):
    try:
      name, score, text = line.split("\t", 2)
      hypotheses.append((name, float(score), text))
      if not math.isfinite(hypotheses[-1][1]):
        raise ValueError
    except ValueError:
      raise ValueError(
        f"line {number} must be ID, TAB, finite score, TAB, hypothesis, got {line!r}"
      ) from None
  return hypotheses


@jax_flags.pinned()
def run(
  lines: list[str], path: str, data_dir: str | None, batch_size: int, weight: float | None
) -> None:
  """Prints the scores of lines of text or, with a weight, the best hypotheses of n-best lists.

  Raises:
    ValueError: a line is too long; the others have been printed.
  """
  hypotheses = [] if weight is None else read_nbest(lines)
  texts = lines if weight is None else [text for _, _, text in hypotheses]
  with doing("reading"):
    scorer = Scorer(path, data_dir, batch_size)
  with doing(f"scoring {len(texts):,} sentences"):
    scored = scorer(texts)
  fits = [tokens <= scorer.longest for _, tokens in scored]
  if weight is None:
    for (log_p, tokens), text, ok in zip(scored, texts, fits, strict=True):
      if ok:
        print(f"{log_p:.4f}\t{tokens}\t{text}")
  else:  # an ID with an unscored hypothesis has no best one
    left = {name for (name, _, _), ok in zip(hypotheses, fits, strict=True) if not ok}
    for name, total, text in best(hypotheses, [log_p for log_p, _ in scored], weight):
      if name not in left:
        print(f"{name}\t{total:.4f}\t{text}")
  scorer.check_lengths(scored)
