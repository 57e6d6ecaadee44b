"""Defines the task kind of sequence tagging, on files of words and tags in columns."""

import collections
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from electra_jax.core.task_network import HeadSpec
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune import tagging
from electra_jax.finetune.batches import subset
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.tagging import Sentence, TagWindow
from electra_jax.finetune.task_data import (
  SPLIT_FILES,
  EvalSplit,
  Predictor,
  TaskData,
  TaskInfo,
  TaskKind,
  digest,
  split_files,
)


def _prepare(config: ConfigDict, name: str, tokenizer: Tokenizer, max_length: int) -> TaskData:
  options, notes = config.tagging.to_dict(), []
  read = {split: tagging.read(file, **options) for split, file in split_files(config).items()}
  train = subset(read.pop("train"), config.data.train_examples)
  labels = tagging.labels(train)
  if len(labels) == 1:
    raise TaskError(f"{config.data.train}: all words have the tag {labels[0]}: nothing to learn")
  common = collections.Counter(tag for s in train for tag in s.tags).most_common(5)
  words = sum(len(sentence.words) for sentence in train)
  shares = ", ".join(f"{tag} {100 * n / words:.1f} %" for tag, n in common)
  notes.append(f"train: {len(train):,} sentences, {words:,} words, {len(labels)} labels: {shares}")

  room = max_length - 2  # [CLS] and [SEP]

  def windows(split: str, sentences: list[Sentence]) -> list[TagWindow]:
    made = tagging.windows(sentences, tokenizer, labels, max_length=max_length)
    if cut := sum(window.cut for window in made):
      notes.append(f"{split}: {cut} tokens cut from words longer than {room} tokens")
    if more := len(made) - len(sentences):
      notes.append(f"{split}: {more} rows added by splitting sentences above {room} tokens")
    return made

  splits = {}
  for split, sentences in read.items():
    splits[split] = _eval_split(split, sentences, windows(split, sentences), labels)
    if splits[split].example_scores is not None:
      notes += [f"{split}: {note}" for note in tagging.check_unseen(sentences, labels)]
  head = HeadSpec("tagging", {"outputs": len(labels), "layers": config.model.head})
  info = TaskInfo("tagging", name, head, max_length, labels=labels, options=options)
  rows = [window.feature for window in windows("train", train)]
  return TaskData(info, name, 3.0, rows, splits, _found_nothing, notes)


def _eval_split(
  split: str, sentences: list[Sentence], windows: list[TagWindow], labels: tuple[str, ...]
) -> EvalSplit:
  def decode(outputs: dict) -> list[list[str]]:
    return tagging.decode(sentences, windows, labels, outputs)

  def write(folder: Path, outputs: dict) -> None:
    tagging.write(folder / f"{split}.txt", sentences, decode(outputs), labels)

  def scores(outputs: dict) -> np.ndarray:
    return tagging.example_scores(sentences, decode(outputs), labels)

  labelled = all(sentence.tags is not None for sentence in sentences)
  examples_hash = digest((s.words, s.tags) for s in sentences)
  rows = [window.feature._replace(target={}) for window in windows]
  return EvalSplit(rows, examples_hash, scores if labelled else None, write)


def _found_nothing(scores: np.ndarray) -> bool:
  """True if no entity was predicted; False if tags are not of entities."""
  return scores.shape[1] > 2 and not scores[:, 1].any()


def _tags(predictor: Predictor, sentences: list[Sentence]) -> list[list[str]]:
  """Returns the predicted tag of each word of each sentence."""
  info = predictor.info
  untagged = [s._replace(tags=None) for s in sentences]
  windows = tagging.windows(untagged, predictor.tokenizer, info.labels, max_length=info.max_length)
  if not windows:  # no sentence has words
    return [[] for _ in sentences]
  outputs = predictor.outputs([window.feature for window in windows])
  return tagging.decode(untagged, windows, info.labels, outputs)


def _answer(predictor: Predictor, items: Sequence) -> list[dict]:
  for item in items:
    if isinstance(item, str):
      raise ValueError(f"{predictor.info.name} expects sequences of words: {item!r:.80}")
  sentences = [Sentence(tuple(words), None, f"sentence {i}") for i, words in enumerate(items)]
  return [{"tags": tags} for tags in _tags(predictor, sentences)]


def _predict_file(predictor: Predictor, file: Path, out: Path, columns: Sequence[str]) -> int:
  """Reads a file with the columns of the training file; `out` has a last column of predictions."""
  if columns:
    raise ValueError("--columns is for text tasks: tags are written beside their words")
  sentences = tagging.read(file, **predictor.info.options, tags_optional=True)
  tagging.write(out, sentences, _tags(predictor, sentences), predictor.info.labels)
  return len(sentences)


KIND = TaskKind(
  prepare=_prepare,
  metrics=lambda info: tagging.compute_metrics,
  main_metric=lambda info: tagging.compute_metrics,
  answer=_answer,
  predict_file=_predict_file,
  file_ending=".txt",
  class_names=lambda info: info.labels,
  fields=("tagging", *SPLIT_FILES),
)
