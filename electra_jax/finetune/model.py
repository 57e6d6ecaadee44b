"""Fine-tuned networks: kept in a folder, opened again, asked.

In three lines:

  from electra_jax.finetune import model
  paraphrase = model.load("runs/mrpc")
  paraphrase([("He left.", "He went away."), ("He left.", "He stayed.")])
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from electra_jax.core.encoder import TransformerConfig
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune import glue, glue_files, loop, squad, squad_files, tagging
from electra_jax.finetune.prepare import Facts, null_threshold
from electra_jax.interop import sources
from electra_jax.interop.sources import EXPORT_FILE, ExchangeError, Source


@dataclasses.dataclass(frozen=True)
class Model:
  """A fine-tuned network.

  Fields:
    weights: {"embeddings", "encoder", "head"}, with a first axis of one seed.
  """

  facts: Facts
  cfg: TransformerConfig
  tokenizer: Tokenizer
  weights: dict
  batch_size: int = 32

  @functools.cached_property
  def _predict(self) -> Callable:
    return loop.make_predictor(
      self.cfg,
      self.facts.head.make(),
      batch_size=self.batch_size * jax.device_count(),
      buckets=4,
      pad=self.tokenizer.vocab.pad,
    )

  def outputs(self, features: list) -> dict:
    """Returns what the head says of rows; see `loop.make_predictor`."""
    return self._predict(self.weights, features)[0]

  def __call__(self, items: Sequence) -> list[dict]:
    """Returns what the network says of each item.

    Args:
      items: of a text task texts, or pairs of them; of tagging sentences as sequences of words; of
        question answering (question, context).

    Returns:
      {"label", "probability"} or {"score"}; {"tags"}; {"answer", "start", "end", "probability",
      "null_odds"}, start and end in characters of the context (None without an answer).

    Raises:
      ValueError: an item has not the form that the task has.
    """
    if not items:
      return []
    return {"text": self._text, "tagging": self._tags, "qa": self._answers}[self.facts.kind](items)

  def _text(self, items: Sequence) -> list[dict]:
    task, paired = self.facts.task, self.facts.task.pair is not None
    for item in items:
      if isinstance(item, str) == paired or (paired and len(item) != 2):
        raise ValueError(f"{task.title} takes {'pairs of texts' if paired else 'texts'}: {item!r}")
    pairs = [tuple(item) if paired else (item, None) for item in items]
    examples = [glue_files.Example(a, b, None, i) for i, (a, b) in enumerate(pairs)]
    rows, _ = glue.features(task, examples, self.tokenizer, max_length=self.facts.max_length)
    said = self.outputs(rows)
    if task.labels is None:
      return [{"score": float(score) * task.scale} for score in said["score"]]
    logits = said["logits"].astype(np.float64)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    best = shares.argmax(-1)
    return [
      {"label": task.labels[i], "probability": float(row[i])}
      for i, row in zip(best, shares, strict=True)
    ]

  def _tags(self, items: Sequence) -> list[dict]:
    sentences = [
      tagging.Sentence(tuple(words), None, f"sentence {i}") for i, words in enumerate(items)
    ]
    return [{"tags": tags} for tags in self.tags(sentences)]

  def tags(self, sentences: list[tagging.Sentence]) -> list[list[str]]:
    """Returns the tag of each word of each sentence."""
    labels = self.facts.labels
    bare = [s._replace(tags=None) for s in sentences]
    pieces = tagging.features(bare, self.tokenizer, labels, max_length=self.facts.max_length)
    said = self.outputs([piece.feature for piece in pieces])
    return tagging.decode(bare, pieces, labels, said)

  def _answers(self, items: Sequence) -> list[dict]:
    asked = [
      squad_files.Question(str(i), question, context, (), (), False)
      for i, (question, context) in enumerate(items)
    ]
    questions = squad_files.Questions("the questions", "", tuple(asked), False, 0, 0, 0, 0)
    decoded, threshold, found = self.answers(questions), null_threshold(self.facts.options), []
    for question in asked:
      best = (decoded.nbest[question.id] or [None])[0]
      one = {"answer": "", "start": None, "end": None, "probability": 0.0}
      odds = decoded.null_odds[question.id]
      if best is not None and (threshold is None or odds <= threshold):
        one = {
          "answer": best.text, "start": best.start, "end": best.end, "probability": best.probability
        }  # fmt: skip
      found.append({**one, "null_odds": odds})
    return found

  def answers(self, questions: squad_files.Questions) -> squad.Decoded:
    """Returns the answers of all questions."""
    o = self.facts.options
    windows = squad.windows(
      questions,
      self.tokenizer,
      max_length=self.facts.max_length,
      stride=o["stride"],
      max_query=o["max_query"],
      train=False,
    )
    return squad.decode(
      questions,
      windows,
      self.outputs([w.feature for w in windows]),
      n_best=o["n_best"],
      max_answer_length=o["max_answer_length"],
    )


def find(path: str | Path) -> Path:
  """Returns the folder of a fine-tuned network: itself, or the only one that a result has.

  Raises:
    ExchangeError: there is none, or there are several.
  """
  path = Path(path)
  if (path / EXPORT_FILE).is_file():
    return path
  found = sorted(
    p.parent for pattern in ("[!.]*", "[!.]*/[!.]*") for p in path.glob(f"{pattern}/{EXPORT_FILE}")
  )
  if len(found) != 1:
    named = f": name one of {', '.join(map(str, found))}" if found else ""
    raise ExchangeError(f"{path} holds {len(found) or 'no'} fine-tuned networks{named}")
  return found[0]


def of_source(source: Source, where: str | Path) -> Model:
  """Returns the fine-tuned network of a source.

  Raises:
    ExchangeError: the source was not fine-tuned.
  """
  if source.finetuned is None:
    raise ExchangeError(f"{where} is not fine-tuned: python -m electra_jax.finetune does that")
  network = source.networks["discriminator"]
  weights = {**network.weights, "head": source.finetuned.head}
  return Model(
    Facts.from_json(json.loads(json.dumps(source.finetuned.facts))),
    network.cfg,
    source.tokenizer,
    jax.tree.map(lambda x: x[None], weights),
  )


def load(path: str | Path) -> Model:
  """Returns the fine-tuned network in a folder, or in that of its results.

  Raises:
    ExchangeError: there is none, or it is damaged.
  """
  folder = find(path)
  return of_source(sources.open_source(folder), folder)
