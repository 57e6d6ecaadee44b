"""Scores sentences with one network, so that the acceptable one of two can be chosen.

A scorer is an entry of SCORERS. Those that mask take one pass for each token, on rows of about
equal length; the others take one pass for each sentence.
"""

import collections
import dataclasses
import functools
import unicodedata
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from electra_jax.core import networks, scoring
from electra_jax.core.batch import Batch, from_rows
from electra_jax.core.objectives import OBJECTIVES
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.interop.sources import ExchangeError, Network
from electra_jax.runtime import parallel

# Of a batch, with padding. On a CPU its activations stay in the caches: 1.5 times as fast.
CPU_BATCH_TOKENS, BATCH_TOKENS = 2_048, 65_536
AHEAD = 4  # batches that are started before the scores of the first are read


class Row(NamedTuple):
  """One input row: a sentence, possibly with masked tokens."""

  ids: list[int]  # with [CLS] and [SEP]
  position: int  # of the token that is scored; 0: all of them
  label: int  # the token that was there
  sentence: int


# (ids with special tokens, whether each token continues a word, [MASK]) -> (ids, position, label)
Rows = Callable[[list[int], list[bool], int], Iterator[tuple[list[int], int, int]]]


@dataclasses.dataclass(frozen=True)
class ScorerDef:
  """A way to score a sentence."""

  head: str  # the head that it needs, a key of `heads.HEADS`
  rows: Rows
  # (cfg, network, batch, positions [B], labels [B]) -> scores [B] in nats
  apply: Callable[..., jax.Array]


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


def _of_all(token_scores: Callable, cfg, network, batch: Batch, positions, labels) -> jax.Array:
  states = networks.encode(cfg, network, batch.ids, batch, None)
  scores = token_scores(cfg, network, states, batch.ids)
  length = batch.padding_mask.sum(-1, keepdims=True)
  place = jnp.arange(batch.ids.shape[1])
  return jnp.where((place > 0) & (place < length - 1), scores, 0.0).sum(-1)  # no special tokens


def _original_logits(cfg, network, states, ids) -> jax.Array:
  return -networks.token_logits(cfg, network, "rtd_head", states)


def _log_original(*args) -> jax.Array:
  return jax.nn.log_sigmoid(_original_logits(*args))


def _own_log_p(cfg, network, states, ids) -> jax.Array:
  # In chunks: the logits of all positions would take gigabytes.
  return -networks.chunked_nll(cfg, network, states, ids, chunk_size=4)[0]


SCORERS = {
  # The discriminator's log-probability that all tokens are original.
  "rtd": ScorerDef("rtd_head", _once, functools.partial(_of_all, _log_original)),
  # Electric's log-likelihood up to a constant (Clark et al. 2020b, Section 2.3).
  "energy": ScorerDef("rtd_head", _once, functools.partial(_of_all, _original_logits)),
  # Pseudo-log-likelihood: log p of each token given all others (Salazar et al. 2020).
  "mlm": ScorerDef("mlm_head", _each_masked, scoring.masked_token),
  # The same without the later pieces of the token's own word (Kauf and Ivanova 2023).
  "mlm_words": ScorerDef("mlm_head", _each_masked_with_its_words_end, scoring.masked_token),
  # Log p of each token with nothing masked. A network that learned words from a generator's samples
  # has never read [MASK], and the sample at a position says little about the original there.
  "mlm_unmasked": ScorerDef("mlm_head", _once, functools.partial(_of_all, _own_log_p)),
}


def network_for(scorer: str, found: dict[str, Network], path) -> Network:
  """Returns the network that has the head of a scorer, the discriminator before the generator.

  Raises:
    ExchangeError: there is none.
  """
  head = SCORERS[scorer].head
  for network in found.values():
    if network.head == head:
      return network
  raise ExchangeError(f"{path} has no {head}, which scorer {scorer} needs")


def continues_word(text: str, spans: Sequence[tuple[int, int]]) -> list[bool]:
  """Returns for each token whether it continues the word of the token before (subword pieces).

  A word is a run of letters, marks and digits; each Chinese character is a word, as in BERT. In
  byte-level BPE the tokens of one character have its place, and the later ones continue it.

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
  """Returns the objective's scorer, or the first of any, whose head is available.

  Args:
    objective: of the training, None if unknown; one that is not registered counts as unknown.
    heads: of the networks.

  Raises:
    ExchangeError: no scorer is for one of these heads.
  """
  own = OBJECTIVES[objective].scorers if objective in OBJECTIVES else ()
  for name in (*own, *SCORERS):
    if SCORERS[name].head in heads:
      return name
  listed = " or ".join(dict.fromkeys(kind.head for kind in SCORERS.values()))
  raise ExchangeError(f"sentences can only be scored by a network with {listed}")


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
      weights: {"embeddings", "encoder"} and the head that the scorer needs.
      stops: called before each batch; where it returns something, the result is None.
    """
    weights = parallel.replicate(
      {k: weights[k] for k in ("embeddings", "encoder", self._kind.head)}
    )
    vocab, encoded = self.tokenizer.vocab, self.tokenizer.encode_offsets(sentences)
    fitting = [i for i, (ids, _) in enumerate(encoded) if len(ids) <= self.longest]

    def rows() -> Iterator[Row]:
      for i in sorted(fitting, key=lambda i: len(encoded[i][0])):
        ids, spans = encoded[i]
        continues = [False, *continues_word(sentences[i], spans), False]
        whole = [vocab.cls, *ids, vocab.sep]
        for row in self._kind.rows(whole, continues, vocab.mask):
          yield Row(*row, i)

    scores = np.full(len(sentences), np.nan)
    scores[fitting] = 0
    with parallel.full_precision():
      started = collections.deque()
      for batch in _batches(rows(), self.longest + 2):
        if stops():
          return None
        started.append(self._start(weights, *batch))
        if len(started) > AHEAD:
          _add(scores, *started.popleft())
      for owners, values in started:
        _add(scores, owners, values)
    return scores

  def _start(self, weights: dict, rows: list[Row], length: int) -> tuple[np.ndarray, jax.Array]:
    """Returns the rows' sentence indices and their scores, still being computed on the device."""
    shape = batch_rows(length), length
    batch = from_rows([row.ids for row in rows], shape, self.tokenizer.vocab.pad)
    positions, labels = np.zeros((2, shape[0]), np.int32)
    positions[: len(rows)] = [row.position for row in rows]
    labels[: len(rows)] = [row.label for row in rows]
    placed = parallel.split_rows((batch, positions, labels))
    return np.array([row.sentence for row in rows]), self._apply(weights, *placed)


def _add(scores: np.ndarray, owners: np.ndarray, values: jax.Array) -> None:
  np.add.at(scores, owners, np.asarray(values, np.float64)[: len(owners)])


def batch_rows(length: int) -> int:
  devices = jax.local_device_count()
  tokens = CPU_BATCH_TOKENS if jax.default_backend() == "cpu" else BATCH_TOKENS
  return max(1, tokens // length // devices) * devices


def padded_length(length: int, longest: int) -> int:
  """Returns the length that rows are padded to: few shapes to compile, little padding.

  >>> [padded_length(n, 512) for n in (5, 9, 33, 510)]
  [8, 12, 48, 512]
  """
  step = 4 if length <= 32 else 16 if length <= 128 else 64
  return min(longest, -(-length // step) * step)


def _batches(rows: Iterator[Row], longest: int) -> Iterator[tuple[list[Row], int]]:
  """Yields rows, which come by length, in batches of one padded length."""
  batch, length = [], 0
  for row in rows:
    padded = padded_length(max(8, len(row.ids)), longest)
    if batch and (padded != length or len(batch) == batch_rows(length)):
      yield batch, length
      batch = []
    length = padded
    batch.append(row)
  if batch:
    yield batch, length
