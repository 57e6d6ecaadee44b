"""Defines the task kind of extractive question answering, on files of SQuAD or MRQA."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from electra_jax.core.task_network import HeadSpec
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune import squad, squad_files, task_data
from electra_jax.finetune.batches import Feature, subset
from electra_jax.finetune.squad import Decoded, Window
from electra_jax.finetune.squad_files import Question, Questions
from electra_jax.finetune.task_data import EvalSplit, Predictor, Seen, TaskData, TaskInfo, TaskKind

# Fields of config.qa for windows and decoding, which are saved, and for the head.
OPTIONS = ("stride", "max_query", "n_best", "max_answer_length", "threshold")
HEAD_ARGUMENTS = ("beam_size", "joint", "answerable_weight", "hidden", "max_answer_length")


def _prepare(config: ConfigDict, name: str, tokenizer: Tokenizer, max_length: int) -> TaskData:
  q = config.qa
  read = {
    split: squad_files.read(part.file, part.holds)
    for split, part in task_data.find_parts(config).items()
  }
  notes = [f"{split}: {questions.summary()}" for split, questions in read.items()]
  train = read.pop("train")
  squad_files.check_places(train)
  impossible = any(question.impossible for question in train.items)
  if impossible and not q.answerable_weight and q.threshold:
    notes.append(
      f"warning: with qa.answerable_weight=0, qa.threshold={q.threshold:g} applies to BERT's null"
      " score, whose threshold is 0"
    )
  options = {name: q[name] for name in OPTIONS} | {"impossible": impossible}
  arguments = {name: q[name] for name in HEAD_ARGUMENTS} | {"layers": config.model.head}
  info = TaskInfo("qa", name, HeadSpec("qa", arguments), max_length, options=options)
  train = dataclasses.replace(train, items=tuple(subset(train.items, config.data.train_examples)))
  rows, _ = _rows(info, train, tokenizer, train=True)
  splits = {
    split: EvalSplit(
      questions,
      *_rows(info, questions, tokenizer),
      questions.labelled,
      task_data.digest((x.question, x.context, x.golds) for x in questions.items),
      split,
    )
    for split, questions in read.items()
  }
  return TaskData(info, name, 2.0, rows, splits, notes, train)


def _seen(info: TaskInfo, questions: Questions, tokenizer: Tokenizer) -> list[Seen]:
  return [Seen((x.question, x.context), x.golds[0] if x.golds else "") for x in questions.items]


def _rows(
  info: TaskInfo, questions: Questions, tokenizer: Tokenizer, train: bool = False
) -> tuple[list[Feature], list[Window]]:
  lengths = {name: info.options[name] for name in ("stride", "max_query")}
  windows = squad.windows(questions, tokenizer, max_length=info.max_length, train=train, **lengths)
  return [window.feature for window in windows], windows


def _decode(info: TaskInfo, questions: Questions, windows: list[Window], outputs: dict) -> Decoded:
  lengths = {name: info.options[name] for name in ("n_best", "max_answer_length")}
  return squad.decode(questions, windows, outputs, **lengths)


def _write(info: TaskInfo, path: Path, questions: Questions, decoded: Decoded) -> None:
  squad.write(path, decoded, _null_threshold(info, questions))


def _null_threshold(info: TaskInfo, questions: Questions | None = None) -> float:
  """Returns the null odds above which a question has no answer.

  Infinite if all training questions have an answer, or all labelled `questions`.
  """
  answerable = questions is not None and questions.labelled and not questions.may_be_impossible
  return info.options["threshold"] if info.options["impossible"] and not answerable else math.inf


def _collapsed(info: TaskInfo, scores: np.ndarray) -> bool:
  """Returns whether questions have answers, but no prediction shares a word with one."""
  if scores.shape[1] == 2:
    return not scores[:, 1].any()
  answered = (scores[:, 4] > 0) & (scores[:, 3] <= _null_threshold(info))
  return bool(scores[:, 2].any() and not scores[answered, 1].any())


def _answer(predictor: Predictor, items: Sequence) -> list[dict]:
  for item in items:
    if isinstance(item, str) or len(item) != 2:
      name = predictor.info.name
      raise ValueError(f"{name} expects pairs of a question and a context, got {item!r:.80}")
  questions = tuple(
    Question(str(i), question, context, (), (), False)
    for i, (question, context) in enumerate(items)
  )
  decoded = predictor.predict(Questions("the questions", "", questions, False))
  threshold, answers = _null_threshold(predictor.info), []
  for name, odds in decoded.null_odds.items():
    found = decoded.nbest[name] if odds <= threshold else []
    text, start, end, _, probability = found[0] if found else ("", None, None, None, 0.0)
    place = {"answer": text, "start": start, "end": end}
    answers.append({**place, "probability": probability, "null_odds": odds})
  return answers


def _predict_file(predictor: Predictor, file: Path, out: Path, columns: Sequence[str]) -> int:
  """Reads SQuAD or MRQA, labels optional; writes a folder `out` of JSON files."""
  if columns:
    raise ValueError("--columns is for text tasks: answers are written by question id")
  questions = squad_files.read(file)
  _write(predictor.info, out, questions, predictor.predict(questions))
  return len(questions.items)


KIND = TaskKind(
  prepare=_prepare,
  rows=_rows,
  seen=_seen,
  kept=lambda info, lengths: [min(lengths[0], info.options["max_query"]), lengths[1]],
  decode=_decode,
  scores=lambda info, questions, decoded: squad.example_scores(questions, decoded),
  write=_write,
  metrics=lambda info: lambda scores: squad.compute_metrics(scores, _null_threshold(info)),
  collapsed=_collapsed,
  answer=_answer,
  predict_file=_predict_file,
  file_ending="",
  level="span",
  limit="qa.max_query",
  fields=("qa", "model.head", *task_data.SPLIT_FIELDS),
)
