"""Defines the task kind of sequence tagging, on files of words and tags."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from electra_jax.core.task_network import HeadSpec
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune import tagging, task_data
from electra_jax.finetune.batches import Feature, subset
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.labels import shares
from electra_jax.finetune.tagging import Sentence, TagWindow
from electra_jax.finetune.task_data import EvalSplit, Predictor, Seen, TaskData, TaskInfo, TaskKind


def _prepare(config: ConfigDict, name: str, tokenizer: Tokenizer, max_length: int) -> TaskData:
  options, notes = config.tagging.to_dict(), []
  read = {
    split: [s for s in tagging.read(part.file, **options) if part.holds(" ".join(s.words))]
    for split, part in task_data.find_parts(config).items()
  }
  train = subset(read.pop("train"), config.data.train_examples)
  labels = tagging.labels(train)
  if len(labels) == 1:
    raise TaskError(f"{config.data.train}: all words have the tag {labels[0]}")
  tags = [tag for sentence in train for tag in sentence.tags]
  notes.append(f"train: {len(train):,} sentences, {len(tags):,} words: {shares(tags)}")
  notes.append(f"train: {tagging.describe(train)}")

  room = max_length - 2  # [CLS] and [SEP]

  def windows(split: str, sentences: list[Sentence]) -> list[TagWindow]:
    made = tagging.windows(sentences, tokenizer, labels, max_length=max_length)
    if more := len(made) - len(sentences):
      notes.append(f"{split}: {more} rows added by splitting sentences above {room} tokens")
    return made

  splits = {}
  for split, sentences in read.items():
    made = windows(split, sentences)
    splits[split] = EvalSplit(
      sentences,
      [window.feature._replace(target={}) for window in made],
      made,
      all(sentence.tags is not None for sentence in sentences),
      task_data.digest((s.words, s.tags) for s in sentences),
      f"{split}.txt",
    )
    if splits[split].labelled:
      notes += [f"{split}: {note}" for note in tagging.check_unseen(sentences, labels)]
  head = HeadSpec("tagging", {"outputs": len(labels), "layers": config.model.head})
  info = TaskInfo("tagging", name, head, max_length, labels=labels, options=options)
  rows = [window.feature for window in windows("train", train)]
  return TaskData(info, name, 3.0, rows, splits, notes, train)


def _seen(info: TaskInfo, sentences: list[Sentence], tokenizer: Tokenizer) -> list[Seen]:
  texts = (tokenizer.spaced(" ".join(s.words), s.words) for s in sentences)
  return [Seen(x, tags=s.tags or ()) for x, s in zip(texts, sentences, strict=True)]


def _rows(
  info: TaskInfo, sentences: list[Sentence], tokenizer: Tokenizer
) -> tuple[list[Feature], list[TagWindow]]:
  untagged = [s._replace(tags=None) for s in sentences]
  windows = tagging.windows(untagged, tokenizer, info.labels, max_length=info.max_length)
  return [window.feature for window in windows], windows


def _decode(
  info: TaskInfo, sentences: list[Sentence], windows: list[TagWindow], outputs: dict
) -> list[list[str]]:
  """Returns the predicted tag of each word of each sentence."""
  if not windows:  # no sentence has words
    return [[] for _ in sentences]
  return tagging.decode(sentences, windows, info.labels, outputs)


def _found_nothing(info: TaskInfo, scores: np.ndarray) -> bool:
  """Returns whether no entity was predicted; False for other tags."""
  return scores.shape[1] > 2 and not scores[:, 1].any()


def _answer(predictor: Predictor, items: Sequence) -> list[dict]:
  for item in items:
    if isinstance(item, str):
      raise ValueError(f"{predictor.info.name} expects sequences of words, got {item!r:.80}")
  sentences = [Sentence(tuple(words), None, f"sentence {i}") for i, words in enumerate(items)]
  return [{"tags": tags} for tags in predictor.predict(sentences)]


def _predict_file(predictor: Predictor, file: Path, out: Path, columns: Sequence[str]) -> int:
  """Reads a file with the training file's columns; the last column of `out` has the predictions."""
  if columns:
    raise ValueError("--columns is for text tasks: tags are written with their words")
  info = predictor.info

  def is_tag(text: str) -> bool:
    as_entity = tagging.is_entities(info.labels) and tagging.scheme_of([text]) is not None
    return as_entity or text in info.labels

  sentences = tagging.read(file, **info.options, tags_optional=True, is_tag=is_tag)
  tagging.write(out, sentences, predictor.predict(sentences), info.labels)
  return len(sentences)


KIND = TaskKind(
  prepare=_prepare,
  rows=_rows,
  seen=_seen,
  kept=lambda info, lengths: [min(n, info.max_length - 2) for n in lengths],
  decode=_decode,
  scores=lambda info, *found: tagging.example_scores(*found, info.labels),
  write=lambda info, path, *found: tagging.write(path, *found, info.labels),
  metrics=lambda info: tagging.compute_metrics,
  collapsed=_found_nothing,
  answer=_answer,
  predict_file=_predict_file,
  file_ending=".txt",
  level="token",
  fields=("tagging", "model.head", *task_data.SPLIT_FIELDS),
)
