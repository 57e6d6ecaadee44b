"""Scores the acceptability of sentences with one network.

A scorer is an entry of SCORERS. Scorers that mask take one pass per token, the others one pass per
sentence; rows of a batch have about equal length.
"""

import collections
import dataclasses
import functools
import itertools
import operator
import unicodedata
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from electra_jax.core import networks, scoring
from electra_jax.core.batch import Batch, from_rows
from electra_jax.core.heads import HEADS
from electra_jax.core.objectives import OBJECTIVES
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.interop.sources import DETECTOR, ExchangeError, Network, Source
from electra_jax.runtime import parallel

# Tokens of a batch, with padding. On a CPU the activations then fit its caches, 1.5 times as fast.
CPU_BATCH_TOKENS, BATCH_TOKENS = 2_048, 65_536
AHEAD = 4  # batches to start before the first one's scores are read


class Row(NamedTuple):
  """One row of a batch."""

  ids: list[int]  # with [CLS] and [SEP]
  text: int  # index of its text
  numbers: tuple[int, ...] = ()  # further arguments of `compute`'s function, each [B] int32


# (ids with special tokens, whether each token continues a word, [MASK]) -> (ids, position, label)
# of the token to score, or position and label 0 to score all
Rows = Callable[[list[int], list[bool], int], Iterator[tuple[list[int], int, int]]]


@dataclasses.dataclass(frozen=True)
class ScorerDef:
  """A way to score a sentence."""

  head: str  # the required head, a key of `heads.HEADS`
  rows: Rows
  # (cfg, network, batch) -> scores [B, L] of the tokens that it reads; None: it predicts the token
  # at one [MASK] of each row
  of_tokens: Callable[..., jax.Array] | None = None
  # whether a token's score depends on the tokens to its left alone, so that only sums can be
  # compared
  causal: bool = False

  def placed(self, weights: Mapping) -> dict:
    """Returns what a network with the head computes with, on the devices."""
    names = ("embeddings", "encoder", self.head, "mask_decoder")  # few have a mask decoder
    return parallel.replicate({name: weights[name] for name in names if name in weights})

  def apply(self, cfg, network, batch: Batch, positions, labels) -> jax.Array:
    """Returns the scores [B] in nats of rows with positions and labels [B] as in `Rows`."""
    if self.of_tokens is None:
      return scoring.masked_token(cfg, network, batch, positions, labels)
    scores = self.of_tokens(cfg, network, batch)
    length = batch.padding_mask.sum(-1, keepdims=True)
    place = jnp.arange(batch.ids.shape[1])
    return jnp.where((place > 0) & (place < length - 1), scores, 0.0).sum(-1)  # no special tokens


def _once(ids: list[int], continues: list[bool], mask: int) -> Iterator[tuple]:
  yield ids, 0, 0


def _each_masked(ids: list[int], continues: list[bool], mask: int) -> Iterator[tuple]:
  for i in range(1, len(ids) - 1):
    yield [*ids[:i], mask, *ids[i + 1 :]], i, ids[i]


def _each_masked_with_its_words_end(
  ids: list[int], continues: list[bool], mask: int
) -> Iterator[tuple]:
  for i in range(1, len(ids) - 1):
    end = next((j for j in range(i + 1, len(ids) - 1) if not continues[j]), len(ids) - 1)
    yield [*ids[:i], *[mask] * (end - i), *ids[end:]], i, ids[i]


def _original_logits(cfg, network, batch) -> jax.Array:
  states = networks.encode(cfg, network, batch.ids, batch, None)
  return -networks.token_logits(cfg, network, "rtd_head", states)


def _log_original(*args) -> jax.Array:
  return jax.nn.log_sigmoid(_original_logits(*args))


def _own_log_p(cfg, network, batch) -> jax.Array:
  states = networks.encode(cfg, network, batch.ids, batch, None)
  # In chunks, because the logits of all positions take gigabytes.
  return -networks.chunked_nll(cfg, network, states, batch.ids, chunk_size=4)[0]


SCORERS = {
  # The discriminator's log-probability that all tokens are original.
  "rtd": ScorerDef("rtd_head", _once, _log_original),
  # Electric's log-likelihood up to a constant (Clark et al. 2020b, Section 2.3).
  "energy": ScorerDef("rtd_head", _once, _original_logits),
  # Pseudo-log-likelihood: log p of each token given all others (Salazar et al. 2020).
  "mlm": ScorerDef("mlm_head", _each_masked),
  # The same, with the later pieces of the token's word masked too (Kauf and Ivanova 2023).
  "mlm_words": ScorerDef("mlm_head", _each_masked_with_its_words_end),
  # Log p of each token with nothing masked, for networks that predict tokens from a generator's
  # samples: they never read [MASK], and a sample says little about the original at its position.
  "mlm_unmasked": ScorerDef("mlm_head", _once, _own_log_p),
  # Log-likelihood: log p of each token given those to its left.
  "clm": ScorerDef("clm_head", _once, scoring.next_token, causal=True),
}


def network_for(scorer: str, found: dict[str, Network], path: str | Path) -> Network:
  """Returns the first network with a scorer's head; raises ExchangeError if there is none."""
  head = SCORERS[scorer].head
  for network in found.values():
    if network.head == head:
      return network
  beside = Path(path).resolve().parent / DETECTOR
  hint = f"; {beside} has one" if not HEADS[head].predicts_words and beside.is_dir() else ""
  raise ExchangeError(f"{path} has no {head}, which the scorer {scorer} needs{hint}")


def continues_word(text: str, spans: Sequence[tuple[int, int]]) -> list[bool]:
  """Returns for each token whether it continues the word of the previous token (subwords).

  A word is a run of letters, marks and digits; each Chinese character is a word, as in BERT. In
  byte-level BPE the tokens of one character have the same span, and the later ones continue it.

  >>> continues_word("unseen, ok", [(0, 2), (2, 6), (6, 7), (8, 10)])
  [False, True, False, False]
  >>> continues_word("a ", [(0, 1), (2, 2)])  # a piece that is a space
  [False, False]
  >>> continues_word("a  ", [(0, 1), (2, 2), (2, 2)])  # two
  [False, False, False]
  >>> continues_word("né", [(0, 1), (1, 2), (1, 2)])  # the bytes of a character
  [False, True, True]
  >>> continues_word("", [])
  []
  """

  def inside(c: str) -> bool:
    return unicodedata.category(c)[0] in "LMN" and "CJK" not in unicodedata.name(c, "")

  before = [(0, 0), *spans][: len(spans)]
  return [
    last == span != (span[1], span[1])
    or (0 < span[0] == last[1] < span[1] and inside(text[last[1] - 1]) and inside(text[span[0]]))
    for last, span in zip(before, spans, strict=True)
  ]


def default(objective: str | None, heads: Container[str | None]) -> str:
  """Returns the first scorer of the objective, or of all, whose head the networks have.

  Args:
    objective: None if unknown, or the name, which may be unregistered.

  Raises:
    ExchangeError: the networks have no such head.
  """
  own = OBJECTIVES[objective].scorers if objective in OBJECTIVES else ()
  for name in (*own, *SCORERS):
    if SCORERS[name].head in heads:
      return name
  listed = " or ".join(dict.fromkeys(kind.head for kind in SCORERS.values()))
  raise ExchangeError(f"scoring sentences needs a network with {listed}")


def choose(scorer: str | None, source: Source, path: str | Path) -> tuple[str, Network]:
  """Returns a scorer (the objective's for None) and the source's network that it needs.

  Raises:
    ValueError: the scorer is unknown.
    ExchangeError: no network has its head.
  """
  if scorer not in (None, *SCORERS):
    raise ValueError(f"scorer must be one of {', '.join(SCORERS)}, got {scorer!r}")
  if scorer is None:
    objective = (source.training or {}).get("objective")
    scorer = default(objective, {network.head for network in source.networks.values()})
  return scorer, network_for(scorer, source.networks, path)


class SentenceScorer:
  """Scores sentences with networks of one config; each padded length is compiled once.

  Args:
    scorer: a key of SCORERS.
  """

  def __init__(self, scorer: str, cfg: TransformerConfig, tokenizer: Tokenizer):
    self._kind, self.tokenizer = SCORERS[scorer], tokenizer
    self.longest = cfg.max_positions - 2  # tokens of a sentence
    self._apply = jax.jit(functools.partial(self._kind.apply, cfg))

  def __call__(
    self, weights: Mapping, sentences: Sequence[str], stops: Callable[[], object] = lambda: None
  ) -> np.ndarray | None:
    """Returns the score of each sentence, [n] float64, in nats; NaN if it is too long.

    Args:
      weights: of a network with the scorer's head.
      stops: called before each batch; a true value ends the scoring with the result None.
    """
    weights = self._kind.placed(weights)
    vocab, encoded = self.tokenizer.vocab, self.tokenizer.encode_offsets(sentences)
    fitting = [i for i, (ids, _) in enumerate(encoded) if len(ids) <= self.longest]

    def rows() -> Iterator[Row]:
      for i in sorted(fitting, key=lambda i: len(encoded[i][0])):
        ids, spans = encoded[i]
        continues = [False, *continues_word(sentences[i], spans), False]
        whole = [vocab.cls, *ids, vocab.sep]
        for ids, *numbers in self._kind.rows(whole, continues, vocab.mask):
          yield Row(ids, i, tuple(numbers))

    scores = np.full(len(sentences), np.nan)
    scores[fitting] = 0
    planned = itertools.takewhile(lambda _: not stops(), plan(rows(), self.longest + 2))
    for row, score in compute(self._apply, weights, planned, vocab.pad):
      scores[row.text] += score
    return None if stops() else scores


Planned = tuple[list[Row], tuple[int, int]]  # the rows and the shape of a batch


def compute(
  function: Callable, weights: dict, planned: Iterable[Planned], pad: int
) -> Iterator[tuple[Row, Any]]:
  """Yields each row and its result of a function; a few batches are computed ahead.

  Args:
    function: (weights, batch, *`Row.numbers`, each [B]) -> arrays [B, ...].
    weights: on the devices.
  """
  started = collections.deque()
  for rows, shape in planned:
    batch = from_rows([row.ids for row in rows], shape, pad)
    numbers = np.zeros((len(rows[0].numbers), shape[0]), np.int32)
    numbers[:, : len(rows)] = np.transpose([row.numbers for row in rows])
    with parallel.full_precision():
      started.append((rows, function(weights, *parallel.split_rows((batch, *numbers)))))
    if len(started) > AHEAD:
      yield from _by_row(*started.popleft())
  for rows, values in started:
    yield from _by_row(rows, values)


def _by_row(rows: list[Row], values) -> Iterator[tuple[Row, Any]]:
  values = jax.tree.map(np.asarray, values)
  for i, row in enumerate(rows):
    yield row, jax.tree.map(operator.itemgetter(i), values)


def plan(
  rows: Iterable[Row], longest: int, batch_size: int | None = None, *, shrinks: bool = False
) -> Iterator[Planned]:
  """Yields batches of rows, which must be sorted by length, with one padded length each.

  Args:
    longest: the network's number of positions.
    batch_size: rows; None: a number that suits the device.
    shrinks: whether to pad the rows of a batch that is not full only to the next power of two.
  """
  devices = jax.local_device_count()
  tokens = CPU_BATCH_TOKENS if jax.default_backend() == "cpu" else BATCH_TOKENS
  for length, group in itertools.groupby(
    rows, lambda row: padded_length(max(8, len(row.ids)), longest)
  ):
    per_device = -(-batch_size // devices) if batch_size else max(1, tokens // length // devices)
    while batch := list(itertools.islice(group, per_device * devices)):
      few = 1 << max(0, -(-len(batch) // devices) - 1).bit_length()
      yield batch, (devices * (min(per_device, few) if shrinks else per_device), length)


def padded_length(length: int, longest: int) -> int:
  """Returns the padded length of rows, for few shapes to compile and little padding.

  >>> [padded_length(n, 512) for n in (5, 9, 33, 510)]
  [8, 12, 48, 512]
  """
  step = 4 if length <= 32 else 16 if length <= 128 else 64
  return min(longest, -(-length // step) * step)
