"""Cloze ranking: how often a network prefers the word of a text to samples of a reference model.

A masked language model ranks the words at [MASK]; a detector, or a causal language model, reads the
text with each of them. So networks with different heads are compared on the same choices.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from electra_jax.core import networks
from electra_jax.core.batch import Batch
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.evaluate import scorers
from electra_jax.evaluate.scorers import SCORERS, Row, ScorerDef
from electra_jax.finetune import files
from electra_jax.finetune.batches import subset
from electra_jax.monitor.metrics import NotFiniteError

COLUMNS = ("left", "right", "words")


class Cloze(NamedTuple):
  """A text with a gap, and the words to rank in it."""

  left: str
  right: str
  words: list[str]  # the first is the text's own


def read(path: str | Path, most: int | None = None) -> list[Cloze]:
  """Reads at most `most` gaps, evenly spaced, of JSON lines with `left`, `right` and `words`.

  Raises:
    ValueError: the file is empty, or a row (which the message names) is damaged or incomplete.
  """
  rows, found = files.read_rows(path), []
  files.check_columns(*next(rows), COLUMNS)
  for where, row in rows:
    if isinstance(row, str):
      raise ValueError(f"{where}: {row}")
    left, right, words = (row.get(name) for name in COLUMNS)
    if not all(isinstance(text, str) for text in (left, right)):
      raise ValueError(f"{where}: left and right must be texts")
    if not (isinstance(words, list) and all(isinstance(x, str) and x.strip() for x in words)):
      raise ValueError(f"{where}: words must be a list of texts")
    if len(set(words)) < len(words) or len(words) != len(found[0].words if found else words):
      raise ValueError(f"{where}: words must differ, and be as many in all rows")
    if len(words) < 2 or any(map(files.LONE_SURROGATE.search, (left, right, *words))):
      raise ValueError(f"{where}: words must be two or more, in UTF-8")
    found.append(Cloze(left, right, words))
  return subset(found, most)


def encode(cloze: Cloze, tokenizer: Tokenizer) -> tuple[list[int], int, list[int]] | None:
  """Returns the ids of the text, the position of the gap and the ids of its words.

  Returns None if the words are not one token each, or the same token.
  """
  texts = tokenizer.encode_batch([cloze.left + word + cloze.right for word in cloze.words])
  if len({len(ids) for ids in texts}) > 1:
    return None
  table = np.array(texts)
  places = np.flatnonzero((table != table[0]).any(axis=0))
  if len(places) != 1 or len(set(labels := table[:, places[0]].tolist())) < len(labels):
    return None
  return texts[0], int(places[0]), labels


def _at_mask(
  cfg: TransformerConfig, network: dict, batch: Batch, positions: jax.Array, *labels: jax.Array
) -> jax.Array:
  """Returns the logits [B, W] of W labels, each [B], at a [MASK] of each row."""
  state = networks.states_to_predict(cfg, network, batch.ids, batch, None, positions[:, None])
  logits = networks.vocabulary_logits(cfg, network, state)[:, 0]
  return jnp.take_along_axis(logits, jnp.stack(labels, axis=1), axis=1)


def _in_place(
  kind: ScorerDef, cfg: TransformerConfig, network: dict, batch: Batch, positions: jax.Array
) -> jax.Array:
  """Returns the score [B] of the token at a position [B] of each row; if causal, of the row."""
  if kind.causal:
    return kind.apply(cfg, network, batch, None, None)
  scores = kind.of_tokens(cfg, network, batch)
  return jnp.take_along_axis(scores, positions[:, None], axis=1)[:, 0]


def ranks(
  scorer: str, cfg: TransformerConfig, weights: Mapping, tokenizer: Tokenizer, gaps: Sequence[Cloze]
) -> np.ndarray:
  """Returns the rank of each gap's own word, [n] int from 1; equal scores rank above it.

  The rank is 0 for gaps that are skipped: the text is too long, or `encode` returns None.

  Args:
    scorer: a key of `scorers.SCORERS`.
    weights: of a network with the scorer's head.

  Raises:
    NotFiniteError: a score is NaN or infinite.
  """
  kind, vocab = SCORERS[scorer], tokenizer.vocab
  encoded = [encode(gap, tokenizer) for gap in gaps]
  fitting = [
    i for i, x in enumerate(encoded) if x is not None and len(x[0]) + 2 <= cfg.max_positions
  ]
  scores = np.full((len(gaps), len(gaps[0].words)), np.nan)

  def rows() -> Iterator[Row]:
    for i in sorted(fitting, key=lambda i: len(encoded[i][0])):
      ids, at, labels = encoded[i]
      texts = [[*ids[:at], x, *ids[at + 1 :]] for x in labels]
      if kind.of_tokens is None:
        texts = [[*ids[:at], vocab.mask, *ids[at + 1 :]]]
      own = labels if kind.of_tokens is None else ()
      for k, text in enumerate(texts):
        yield Row([vocab.cls, *text, vocab.sep], i * len(labels) + k, (at + 1, *own))

  function = _at_mask if kind.of_tokens is None else functools.partial(_in_place, kind)
  function = jax.jit(functools.partial(function, cfg))
  planned = scorers.plan(rows(), cfg.max_positions)
  for row, values in scorers.compute(function, kind.placed(weights), planned, vocab.pad):
    i, k = divmod(row.text, scores.shape[1])
    scores[i, k : k + np.size(values)] = values
  if wrong := int((~np.isfinite(scores[fitting])).sum()):
    raise NotFiniteError(f"{wrong} of the network's scores are not finite")
  found = np.zeros(len(gaps), int)
  found[fitting] = (scores[fitting] >= scores[fitting, :1]).sum(axis=1)
  return found
