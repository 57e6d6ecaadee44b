"""Loads fine-tuned networks and predicts with them.

Example:

  from electra_jax.finetune import model
  paraphrase = model.load("runs/mrpc")
  paraphrase([("He left.", "He went away."), ("He left.", "He stayed.")])
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune import loop, overview
from electra_jax.finetune.prepare import TASK_KINDS
from electra_jax.finetune.task_data import TaskInfo, TaskKind
from electra_jax.interop import hub, sources
from electra_jax.interop.sources import EXPORT_FILE, ExchangeError, Source
from electra_jax.runtime.workdir import check_new


@dataclasses.dataclass(frozen=True)
class Model:
  """A fine-tuned network."""

  info: TaskInfo
  cfg: TransformerConfig = dataclasses.field(repr=False)
  tokenizer: Tokenizer = dataclasses.field(repr=False)
  weights: dict = dataclasses.field(repr=False)  # {"embeddings", "encoder", "head"}, [1, ...]
  batch_size: int = 32  # rows per device

  @property
  def kind(self) -> TaskKind:
    """The kind of the task."""
    return TASK_KINDS[self.info.kind]

  @functools.cached_property
  def _outputs(self) -> Callable:
    return loop.make_predictor(
      self.cfg,
      self.info.head.make(),
      batch_size=self.batch_size * jax.device_count(),
      buckets=4,
      pad=self.tokenizer.vocab.pad,
    )

  def predict(self, examples: Any) -> Any:
    """Returns the predictions for examples as from `TaskKind.decode`; warns of lost text."""
    for warning in overview.warnings_of(self.kind, self.info, examples, self.tokenizer):
      warnings.warn(warning, stacklevel=2)
    features, windows = self.kind.rows(self.info, examples, self.tokenizer)
    outputs = self._outputs(self.weights, features)[0] if features else {}
    return self.kind.decode(self.info, examples, windows, outputs)

  def __call__(self, items: Iterable) -> list[dict] | np.ndarray:
    """Returns the prediction for each item; a single text is a list of one.

    - Text: a text or a pair -> {"label", "probability"} or {"score"}.
    - Tagging: a sequence of words -> {"tags"}.
    - Question answering: (question, context) -> {"answer", "start", "end", "probability",
      "null_odds"}, start and end in characters of the context (None without an answer).
    - Pairs: texts -> embeddings [n, D] float32 of length 1, whose dot products are cosines.

    Raises:
      ValueError: an item does not have the task's form.
    """
    if not isinstance(items, Iterable):
      raise ValueError(f"give a list of items, got {items!r:.80}")
    items = [items] if isinstance(items, str) else list(items)
    return self.kind.answer(self, items) if items else []

  def predict_file(self, file: Path, out: Path, columns: Sequence[str] = ()) -> int:
    """Writes the predictions for a file in the task's format; returns the number of rows.

    Args:
      file: in the format of the task's files, or .txt with one text a line; labels are ignored.
      out: a new file, or a new folder for question answering.
      columns: for a text task, the columns to copy to the predictions; for pairs, the one to embed.

    Raises:
      ValueError, OSError: `out` exists or cannot be created, or the file is invalid.
    """
    check_new(out)
    return self.kind.predict_file(self, file, out, columns)


def find(path: str | Path) -> Path:
  """Returns the folder of a fine-tuned network: `path`, or the only one below it.

  Raises:
    ExchangeError: the folder has no network, or several.
  """
  path = hub.local(path)
  if (path / EXPORT_FILE).is_file():
    return path
  found = sorted(p.parent for n in (1, 2, 3) for p in path.glob(f"{'[!.]*/' * n}{EXPORT_FILE}"))
  if len(found) != 1:
    named = f": name one of {', '.join(map(str, found))}" if found else ""
    raise ExchangeError(f"{path} holds {len(found) or 'no'} fine-tuned networks{named}")
  return found[0]


def from_source(source: Source, path: str | Path) -> Model:
  """Returns the fine-tuned network of a source opened at `path`.

  Raises:
    ExchangeError: the source is not fine-tuned, or its kind of task is unknown.
  """
  if source.finetuned is None:
    raise ExchangeError(f"{path} is not fine-tuned: run electra-jax finetune first")
  try:
    info = TaskInfo.from_json(source.finetuned.info)
    TASK_KINDS[info.kind]
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ExchangeError(f"{path} has a task unknown to this version ({error})") from None
  network = source.networks["discriminator"]
  weights = {**network.weights, "head": source.finetuned.head}
  return Model(info, network.cfg, source.tokenizer, jax.tree.map(lambda x: x[None], weights))


def load(path: str | Path) -> Model:
  """Returns the fine-tuned network at `path`, or the only one below it.

  Raises:
    ExchangeError: there is not exactly one network, or it is damaged.
  """
  folder = find(path)
  return from_source(sources.open_source(folder), folder)
