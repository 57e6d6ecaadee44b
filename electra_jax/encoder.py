"""Pretrained networks in Python: embeddings, replaced tokens, fill-mask, scores."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from electra_jax.core import networks
from electra_jax.core.batch import Batch
from electra_jax.core.transformer_config import Compute
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.evaluate import scorers
from electra_jax.interop import sources
from electra_jax.interop.huggingface import POOLINGS
from electra_jax.interop.sources import ExchangeError, Network
from electra_jax.monitor.display import doing
from electra_jax.runtime import parallel, terminal

SHOWN = 2_000  # number of texts from which progress is shown


class Token(NamedTuple):
  """A token of a text and the probability that it is a replacement."""

  text: str
  start: int  # first character in the text
  end: int
  replaced: float


class Fill(NamedTuple):
  """A token for a mask, its probability, and the filled-in text."""

  token: str
  probability: float
  text: str


class States(NamedTuple):
  """The states of a text's n tokens, including [CLS] and [SEP]."""

  values: np.ndarray  # float32 [n, D]
  spans: list[tuple[int, int]]  # characters [start, end) of each token; (0, 0) for [CLS] and [SEP]


def load(
  path: str | Path, *, network: str = "auto", dtype: str = "float32", heads: Sequence[int] = ()
) -> "Encoder":
  """Opens the networks at a path.

  Args:
    path: a run, an orbax export, a Hugging Face folder, hf://ORG/NAME[@REVISION] on the Hub, or a
      TF1 checkpoint.
    network: the network for embeddings: "discriminator", "masked_lm", "generator", or "auto" for
      the main network, which is also the one to fine-tune.
    dtype: of activations, float32 or bfloat16.
    heads: the numbers of heads of a TF1 checkpoint's discriminator and generator, if known.

  Raises:
    ExchangeError: the format is unknown, a file is damaged, or the source lacks `network`.
    ValueError: `dtype` is not supported.
  """
  return Encoder(sources.open_source(path, heads), str(path), network, dtype)


class Encoder:
  """The networks of a source.

  Methods take a text or a list of texts, and return one result or an array or list of results.
  Texts are grouped by length, and each padded length is compiled once. Texts above `max_length`
  tokens are truncated with a warning.

  Fields:
    tokenizer: None for a TF1 checkpoint without vocab.txt, which takes only `ids`.
    width: D, the width of the states.
    max_length: maximum number of tokens of a text, with [CLS] and [SEP].
  """

  def __init__(self, source: sources.Source, path: str, network: str, dtype: str):
    if dtype not in ("float32", "bfloat16"):
      raise ValueError(f"dtype must be float32 or bfloat16, got {dtype!r}")
    if network not in ("auto", *source.networks):
      raise ExchangeError(f"{path} has no {network}, only {', '.join(source.networks)}")
    self._source, self._path, self._dtype = source, path, dtype
    self._main = source.networks[source.main if network == "auto" else network]
    self._placed: dict[int, dict] = {}  # weights on the devices, by id of the network
    self._scorers: dict[str, scorers.SentenceScorer] = {}
    self.width, self.max_length = self._main.cfg.hidden_size, self._main.cfg.max_positions

  def __repr__(self) -> str:
    cfg = self._main.cfg
    return (
      f"<Encoder {self._path}: {cfg.num_layers} layers of {cfg.hidden_size},"
      f" {cfg.vocab_size:,} tokens, {', '.join(self._source.networks)}>"
    )

  @property
  def tokenizer(self) -> Tokenizer | None:
    """The tokenizer of the networks."""
    return self._source.tokenizer

  def embed(
    self, texts: str | Sequence[str], *, pool: str = "mean", batch_size: int | None = None
  ) -> np.ndarray:
    """Returns the embedding of each text, float32 [n, D], or [D] for a single text.

    Args:
      pool: "mean" of the states of all tokens, with [CLS] and [SEP], or "cls", the state of [CLS].
      batch_size: rows of a batch; None: a number that suits the device.

    Raises:
      ValueError: an argument is invalid.
    """
    if pool not in POOLINGS:
      raise ValueError(f"pool must be {' or '.join(POOLINGS)}, got {pool!r}")
    texts, one = self._texts(texts)
    ids, _ = self._encode(texts)
    found = np.zeros((len(texts), self.width), np.float32)
    for i, vector in self._compute(self._main, _pooled, (pool,), ids, batch_size):
      found[i] = vector
    return found[0] if one else found

  def states(
    self,
    texts: str | Sequence[str] | None = None,
    *,
    ids: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    batch_size: int | None = None,
  ) -> States | list[States] | np.ndarray:
    """Returns the last states of each text's tokens, or float32 [n, L, D] of `ids`.

    Args:
      ids: token ids [n, L], with [CLS] and [SEP], instead of texts.
      mask: [n, L], True on tokens, with padding at the end; None: all are tokens.

    Raises:
      ValueError: texts and ids are both given or both missing, or have a wrong shape.
    """
    if (texts is None) == (ids is None):
      raise ValueError("give either texts or ids")
    if ids is not None:
      return self._states_of_ids(np.asarray(ids), mask, batch_size)
    texts, one = self._texts(texts)
    ids, spans = self._encode(texts)
    found: list = [None] * len(texts)
    for i, values in self._compute(self._main, _states, (), ids, batch_size):
      found[i] = States(values[: len(ids[i])], [(0, 0), *spans[i], (0, 0)])
    return found[0] if one else found

  def _states_of_ids(self, ids: np.ndarray, mask, batch_size: int | None) -> np.ndarray:
    mask = np.ones(ids.shape, bool) if mask is None else np.asarray(mask).astype(bool)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or mask.shape != ids.shape:
      raise ValueError(
        f"ids and mask must be [n, L], integers and bool, got {ids.shape} of {ids.dtype} and"
        f" {mask.shape}"
      )
    lengths = mask.sum(1)
    if not (mask == (np.arange(ids.shape[1]) < lengths[:, None])).all():
      raise ValueError("mask must be True on a row's tokens, then False on padding")
    if not ((ids[mask] >= 0) & (ids[mask] < self._main.cfg.vocab_size)).all():
      raise ValueError(f"ids must be at least 0 and below {self._main.cfg.vocab_size:,}")
    if lengths.max(initial=0) > self.max_length:
      raise ValueError(f"{lengths.max()} tokens are more than the network's {self.max_length}")
    found = np.zeros((*ids.shape, self.width), np.float32)
    rows = [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]
    for i, values in self._compute(self._main, _states, (), rows, batch_size):
      found[i, : lengths[i]] = values[: lengths[i]]
    return found

  def detect(
    self, texts: str | Sequence[str], *, batch_size: int | None = None
  ) -> list[Token] | list[list[Token]]:
    """Returns the tokens of each text with the probability that each is a replacement.

    Raises:
      ExchangeError: no network has a detection head.
    """
    network = scorers.network_for("rtd", self._source.networks, self._path)
    texts, one = self._texts(texts)
    ids, spans = self._encode(texts)
    found: list = [None] * len(texts)
    for i, values in self._compute(network, _replaced, (), ids, batch_size):
      found[i] = [
        Token(texts[i][start:end], start, end, float(p))
        for (start, end), p in zip(spans[i], values[1 : len(ids[i]) - 1], strict=True)
      ]
    return found[0] if one else found

  def fill_mask(
    self, texts: str | Sequence[str], k: int = 5, *, batch_size: int | None = None
  ) -> list:
    """Returns the k most probable tokens for each [MASK] of each text.

    Returns:
      [Fill] * k for a single text with one mask; a list of these for several masks, and a list of
      results for several texts.

    Raises:
      ExchangeError: no network predicts tokens.
      ValueError: a text has no mask or exceeds the network's length, or `k` exceeds the vocabulary.
    """
    network = sources.masked_lm(self._source, self._path)
    if not 1 <= k <= network.cfg.vocab_size:
      raise ValueError(f"k must be from 1 to {network.cfg.vocab_size:,}, got {k}")
    texts, one = self._texts(texts)
    vocab, name = self.tokenizer.vocab, self.tokenizer.decode([self.tokenizer.vocab.mask])
    rows, places = [], []  # (ids, position) of each mask; the parts of each text between masks
    for text in texts:
      parts = text.split(name)
      if len(parts) == 1:
        raise ValueError(f"no {name} in {text!r}")
      ids, at = [vocab.cls], []
      for part in self.tokenizer.encode_batch(self.tokenizer.spaced(text, parts)):
        ids += [*part, vocab.mask]
        at.append(len(ids) - 1)
      ids[-1] = vocab.sep
      if len(ids) > (most := network.cfg.max_positions):
        raise ValueError(f"{len(ids)} tokens are more than {most}: {text[:60]!r}")
      rows += [(ids, position) for position in at[:-1]]
      places.append(parts)
    ids, positions = zip(*rows, strict=True) if rows else ((), ())
    found: list = [None] * len(rows)
    for i, values in self._compute(network, _likeliest, (k,), ids, batch_size, positions):
      found[i] = values
    results, used = [], iter(found)
    for parts in places:
      fills = [self._fills(parts, i, name, next(used)) for i in range(len(parts) - 1)]
      results.append(fills[0] if len(fills) == 1 else fills)
    return results[0] if one else results

  def _fills(self, parts: list[str], i: int, name: str, found: tuple) -> list[Fill]:
    left, right = name.join(parts[: i + 1]), name.join(parts[i + 1 :])
    fills = []
    for token_id, probability in zip(*(x.tolist() for x in found), strict=True):
      token = self.tokenizer.decode([token_id]).strip()
      joined = left.rstrip() + token[2:] if token.startswith("##") else left + token
      fills.append(Fill(token, probability, joined + right))
    return fills

  def score(self, texts: str | Sequence[str], scorer: str | None = None) -> float | np.ndarray:
    """Returns the acceptability of each text in nats, float64 [n]; NaN if it is too long.

    Args:
      scorer: a key of `evaluate.scorers.SCORERS`; None: the objective's.

    Raises:
      ExchangeError, ValueError: no network has the scorer's head, or the scorer is unknown.
    """
    texts, one = self._texts(texts)
    scorer, network = scorers.choose(scorer, self._source, self._path)
    if scorer not in self._scorers:
      self._scorers[scorer] = scorers.SentenceScorer(scorer, network.cfg, self.tokenizer)
    found = self._scorers[scorer](network.weights, texts)
    return float(found[0]) if one else found

  def save(self, out: str | Path, form: str = "hf", **storage) -> None:
    """Writes the networks to a new folder, as `electra-jax export`.

    Args:
      form: "hf", "onnx" or "orbax".
      storage: dtype, max_shard_mb and pooling, for "hf" only.

    Raises:
      ExchangeError, ValueError: nothing was written.
    """
    from electra_jax.export import writer

    if form not in ("hf", "onnx", "orbax"):
      raise ValueError(f"form must be hf, onnx or orbax, got {form!r}")
    if form != "hf" and storage:
      raise ValueError(f"{', '.join(storage)} need form='hf', got {form!r}")
    writer.write(self._source, Path(out), form, console := terminal.console(), **storage)
    console.print(f"exported to {out}")

  def _texts(self, texts: str | Sequence[str]) -> tuple[list[str], bool]:
    """Returns the texts as a list, and whether a single text was given."""
    if self.tokenizer is None:
      raise ExchangeError(f"{self._path} has no vocabulary: add its vocab.txt to the folder")
    one = isinstance(texts, str)
    if not (one or isinstance(texts, Iterable)):
      raise TypeError(f"give a text or a list of texts, got {type(texts).__name__}")
    texts = [texts] if one else list(texts)
    for i, text in enumerate(texts):
      if not isinstance(text, str):
        raise TypeError(f"texts must be strings, but texts[{i}] is {type(text).__name__}")
    return texts, one

  def _encode(self, texts: list[str]) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """Returns the ids of each text with [CLS] and [SEP], and the spans of the other tokens."""
    vocab, most = self.tokenizer.vocab, self.max_length - 2
    encoded = self.tokenizer.encode_offsets(texts)
    if long := sum(len(ids) > most for ids, _ in encoded):
      warnings.warn(
        f"{long:,} of {len(texts):,} texts are truncated to {self.max_length} tokens", stacklevel=3
      )
    ids = [[vocab.cls, *ids[:most], vocab.sep] for ids, _ in encoded]
    return ids, [spans[:most] for _, spans in encoded]

  def _compute(
    self,
    network: Network,
    function: Callable,
    settings: tuple,
    ids: Sequence[list[int]],
    batch_size: int | None,
    positions: Sequence[int] | None = None,
  ) -> Iterator[tuple[int, Any]]:
    """Yields the index of each row of ids and its result of a function, the shortest rows first.

    Args:
      function: (cfg, *settings, weights, batch[, positions [B]]) -> arrays [B, ...].
    """
    if batch_size is not None and batch_size < 1:
      raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if id(network) not in self._placed:
      self._placed[id(network)] = parallel.replicate(dict(network.weights))
    weights, longest = self._placed[id(network)], network.cfg.max_positions
    cfg = dataclasses.replace(network.cfg, compute=Compute(self._dtype))
    apply = _compiled(function, cfg, *settings)
    pad = self.tokenizer.vocab.pad if self.tokenizer else 0
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    rows = [scorers.Row(ids[i], i, (positions[i],) if positions else ()) for i in order]
    with _progress(rows) as shown:
      planned = scorers.plan(shown, longest, batch_size, shrinks=True)
      for row, values in scorers.compute(apply, weights, planned, pad):
        yield row.text, values


@contextlib.contextmanager
def _progress(rows: list) -> Iterator[Iterable]:
  """Yields the rows, showing progress for many: a bar on a terminal, elsewhere lines."""
  console, title = terminal.console(stderr=True), f"{len(rows):,} texts"
  if len(rows) < SHOWN:
    yield rows
  elif console.is_interactive:
    yield track(rows, description=title, transient=True, console=console)
  else:
    with doing(title, console):
      yield rows


@functools.lru_cache(maxsize=32)
def _compiled(function: Callable, *settings) -> Callable:
  return jax.jit(functools.partial(function, *settings))


def _states(cfg, weights: dict, batch: Batch) -> jax.Array:
  return networks.encode(cfg, weights, batch.ids, batch, None).astype(jnp.float32)


def _pooled(cfg, pool: str, weights: dict, batch: Batch) -> jax.Array:
  states = _states(cfg, weights, batch)
  if pool == "cls":
    return states[:, 0]
  mask = batch.padding_mask[..., None]
  return (states * mask).sum(1) / jnp.maximum(mask.sum(1), 1)


def _replaced(cfg, weights: dict, batch: Batch) -> jax.Array:
  states = networks.encode(cfg, weights, batch.ids, batch, None)
  return jax.nn.sigmoid(networks.token_logits(cfg, weights, "rtd_head", states))


def _likeliest(cfg, k: int, weights: dict, batch: Batch, positions) -> tuple[jax.Array, jax.Array]:
  at = positions[:, None]
  state = networks.states_to_predict(cfg, weights, batch.ids, batch, None, at)
  logits = networks.vocabulary_logits(cfg, weights, state)[:, 0]
  probabilities, ids = jax.lax.top_k(jax.nn.softmax(logits), k)
  return ids, probabilities
