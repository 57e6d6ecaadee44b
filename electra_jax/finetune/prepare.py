"""A configuration's task, read and made into rows for the network: what training and scoring need.

The three kinds of task (text, tagging, qa) become one structure here; after this nobody asks which
it is. `Facts` is what has to be kept to use a trained network again.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from electra_jax.core.task_network import HeadSpec
from electra_jax.data.finetune_batches import Feature
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune import glue, glue_files, squad, squad_files, tagging, tasks
from electra_jax.finetune.files import MAX_BAD_FRAC, TaskError
from electra_jax.finetune.tasks import TextTask

KINDS = ("text", "tagging", "qa")


@dataclasses.dataclass(frozen=True)
class Facts:
  """What a fine-tuned network is for; `dataclasses.asdict` of it is JSON.

  Fields:
    kind: one of KINDS.
    name: of the task.
    head: what builds the head again.
    max_length: tokens of a row at most.
    labels: of tagging, in the order of the logits.
    text: the fields of a TextTask; None for other kinds.
    options: how rows are made and decoded, by fields of config.qa or config.tagging; of questions
      also "impossible", whether some of those it was trained on have no answer.
  """

  kind: str
  name: str
  head: HeadSpec
  max_length: int
  labels: tuple[str, ...] = ()
  text: dict | None = None
  options: dict = dataclasses.field(default_factory=dict)

  @property
  def task(self) -> TextTask:
    """The text task."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in self.text.items()}
    return TextTask(**fields)

  @property
  def measure(self) -> Callable[[np.ndarray], dict[str, float]]:
    """The function from units to metrics, the main one first."""
    if self.kind == "text":
      return glue.measure(self.task)
    if self.kind == "tagging":
      return tagging.measure
    return lambda units: squad.measure(units, self.options["threshold"])

  @property
  def main_measure(self) -> Callable[[np.ndarray], dict[str, float]]:
    """The function from units to the main metric alone, which is cheaper to resample."""
    if self.kind == "text":
      return glue.measure(dataclasses.replace(self.task, metrics=self.task.metrics[:1]))
    return self.measure

  @classmethod
  def from_json(cls, content: dict) -> "Facts":
    """Returns the facts that `dataclasses.asdict` gave."""
    head = HeadSpec(**content["head"])
    return cls(**content | {"head": head, "labels": tuple(content["labels"])})


class Split(NamedTuple):
  """A split that is predicted.

  Fields:
    examples: SHA-256 of what is asked and what is right, by which results are compared.
    units: what the network says -> [n, m] for `Facts.measure`; None where labels are hidden.
    write: (folder, what the network says): writes predictions in the form the task has for them.
  """

  features: list[Feature]
  examples: str
  units: Callable[[dict], np.ndarray] | None
  write: Callable[[Path, dict], None]


def _digest(examples: Iterable) -> str:
  return hashlib.sha256("\0".join(map(repr, examples)).encode()).hexdigest()


class Problem(NamedTuple):
  """A task, ready to be trained.

  Fields:
    facts: what is kept with the network.
    title: for people.
    epochs: of the paper.
    train: rows to train on.
    splits: those to measure and to predict, the one that decides first.
    collapsed: units -> whether the network says the same everywhere.
    said: what was read and what is odd about it, in lines.
  """

  facts: Facts
  title: str
  epochs: float
  train: list[Feature]
  splits: dict[str, Split]
  collapsed: Callable[[np.ndarray], bool]
  said: list[str]


def problems(config: ConfigDict) -> list[str]:
  """Returns the names of the configuration's tasks.

  Raises:
    ValueError: there is none, or one is not known.
  """
  names = [name.strip() for name in config.task.split(",") if name.strip()]
  if config.kind not in KINDS:
    raise ValueError(f"config.kind is one of {', '.join(KINDS)}, got {config.kind!r}")
  one = config.kind != "text" or config.own.text is not None
  unknown = [] if one else [name for name in names if name not in tasks.TASKS]
  if unknown or not names or (one and len(names) > 1):
    raise ValueError(
      f"config.task={config.task!r}: one name"
      if one
      else f"config.task={config.task!r}: GLUE's tasks are {', '.join(tasks.TASKS)}; a task of your"
      " own is started with configs/finetune/own.py"
    )
  return names


def prepare(config: ConfigDict, name: str, tokenizer: Tokenizer, max_positions: int) -> Problem:
  """Returns the problem of a task of the configuration.

  Raises:
    ValueError: a file is missing or not in order, or the network has not so many positions.
  """
  if not 8 <= config.data.max_length:
    raise ValueError(f"config.data.max_length is at least 8, got {config.data.max_length}")
  longest = min(config.data.max_length, max_positions)
  make = {"text": _text, "tagging": _tagging, "qa": _qa}[config.kind]
  problem = make(config, name, tokenizer, longest)
  if longest < config.data.max_length:
    problem.said.insert(0, f"rows of {longest} tokens at most: the network has no more positions")
  problem.said.append(_tokens("train", problem.train, tokenizer))
  problem.said.extend(_tokens(k, s.features, tokenizer) for k, s in problem.splits.items())
  return problem


def _tokens(split: str, features: list[Feature], tokenizer: Tokenizer) -> str:
  """Says how many rows and tokens there are, and how many the vocabulary does not know."""
  ids = np.concatenate([f.ids for f in features]) if features else np.zeros(0, np.int32)
  unknown = 100 * np.mean(ids == tokenizer.vocab.unk) if len(ids) else 0.0
  longest = max((len(f.ids) for f in features), default=0)
  return (
    f"{split}: {len(features):,} rows of {len(ids) / max(len(features), 1):.1f} tokens, at most"
    f" {longest}; {unknown:.2f} % unknown to the vocabulary"
  )


def _first(config: ConfigDict, examples: list) -> list:
  """Returns the training examples to use: an even choice over the file, whose order may matter."""
  most = config.data.train_examples
  if most is None or most >= len(examples):
    return examples
  if most < 1:
    raise ValueError(f"config.data.train_examples is at least 1, got {most}")
  return [examples[i * len(examples) // most] for i in range(most)]


# Text.


def _text(config: ConfigDict, name: str, tokenizer: Tokenizer, longest: int) -> Problem:
  c = config
  if c.data.dir is None:
    raise ValueError("config.data.dir is not set: the folder with the task's files, or tfds:glue")
  if c.own.text is not None:
    metrics = tuple(m.strip() for m in c.own.metrics.split(",") if m.strip())
    task = tasks.own(
      name, text=c.own.text, pair=c.own.pair, label=c.own.label, kind=c.own.kind, metrics=metrics
    )
  else:
    task = tasks.TASKS[name]
  task = glue_files.complete(task, c.data.dir, data_dir=c.data.tfds_dir)
  said: list[str] = []

  def read(split: str) -> list[glue_files.Example]:
    examples, bad = glue_files.read(task, c.data.dir, split, data_dir=c.data.tfds_dir)
    said.append(f"{split}: {len(examples):,} examples{_distribution(task, examples)}")
    if bad:
      said.append(f"{split}: {len(bad)} rows left out: {'; '.join(bad[:3])}")
    return examples

  def rows(split: str, examples: list[glue_files.Example]) -> list[Feature]:
    features, cut = glue.features(task, examples, tokenizer, max_length=longest)
    if cut:
      said.append(f"{split}: {100 * cut / len(examples):.1f} % cut to {longest} tokens")
    return features

  train = _first(c, read("train"))
  train = rows("train", glue.doubled(train) if task.doubled else train)
  splits = {split: _text_split(task, split, read(split), rows) for split in task.dev_splits}
  for split in task.submission:
    try:
      splits[split] = _text_split(task, split, read(split), rows)
    except glue_files.MissingSplit as error:
      said.append(f"{split}: not predicted, {error}")
  kind, width = task.kind, {} if task.labels is None else {"outputs": len(task.labels)}
  facts = Facts(
    "text",
    name,
    HeadSpec(kind, {**width, "layers": c.model.head}),
    longest,
    text=dataclasses.asdict(task),
  )

  def collapsed(units: np.ndarray) -> bool:
    return glue.collapsed(units, kind)

  return Problem(facts, task.title, task.epochs, train, splits, collapsed, said)


def _text_split(task: TextTask, split: str, examples: list, rows: Callable) -> Split:
  def write(folder: Path, outputs: dict) -> None:
    name = task.submission.get(split, f"{split}.tsv")
    glue.write_submission(folder / name, task, examples, outputs)

  labelled = all(example.label is not None for example in examples)
  units = (lambda outputs: glue.units(task, examples, outputs)) if labelled else None
  asked = _digest((e.text, e.pair, e.label) for e in examples)
  return Split(rows(split, examples), asked, units, write)


def _distribution(task: TextTask, examples: list[glue_files.Example]) -> str:
  """Says how often each label occurs, or how numbers are spread."""
  labels = [e.label for e in examples if e.label is not None]
  if not labels:
    return ", no labels"
  if task.labels is None:
    return f", labels {np.mean(labels):.2f} ± {np.std(labels):.2f}"
  counts = collections.Counter(labels).most_common(5)
  return ": " + ", ".join(
    f"{task.labels[int(label)]} {100 * n / len(labels):.1f} %" for label, n in counts
  )


# Tagging.


def _files(config: ConfigDict) -> dict[str, str]:
  """Returns {split: file} of a task that is given as files."""
  files = {"train": config.data.train, "dev": config.data.dev, "test": config.data.test}
  for split in ("train", "dev"):
    if files[split] is None:
      raise ValueError(f"config.data.{split} is not set: the file of that split")
  return {split: file for split, file in files.items() if file is not None}


def _tagging(config: ConfigDict, name: str, tokenizer: Tokenizer, longest: int) -> Problem:
  t, said = config.tagging, []
  read = {
    split: tagging.read(file, word_column=t.word_column, tag_column=t.tag_column)
    for split, file in _files(config).items()
  }
  train = _first(config, read.pop("train"))
  labels = tagging.labels(train)
  common = collections.Counter(tag for s in train for tag in s.tags).most_common(5)
  words = sum(len(s.words) for s in train)
  shares = ", ".join(f"{tag} {100 * n / words:.1f} %" for tag, n in common)
  said.append(f"train: {len(train):,} sentences, {words:,} words, {len(labels)} labels: {shares}")

  def pieces(split: str, sentences: list) -> list[tagging.TagWindow]:
    made = tagging.features(sentences, tokenizer, labels, max_length=longest)
    if cut := sum(piece.cut for piece in made):
      said.append(f"{split}: {cut} tokens of words longer than {longest} tokens cut")
    if more := len(made) - len(sentences):
      said.append(f"{split}: {more} more rows than sentences, for sentences above {longest} tokens")
    return made

  splits = {}
  for split, sentences in read.items():
    splits[split] = _tagging_split(split, sentences, pieces(split, sentences), labels)
    if splits[split].units and (unseen := tagging.unseen(sentences, labels)):
      counted = ", ".join(f"{tag} ({count})" for tag, count in list(unseen.items())[:5])
      why = f"{split}: tags never seen in training, always wrong: {counted}"
      words = sum(len(s.words) for s in sentences)
      if sum(unseen.values()) > MAX_BAD_FRAC * words:
        raise TaskError(f"{why}; above {MAX_BAD_FRAC:.0%} of {words} words")
      said.append(why)
  facts = Facts(
    "tagging",
    name,
    HeadSpec("tagging", {"outputs": len(labels)}),
    longest,
    labels=labels,
    options=t.to_dict(),
  )
  rows = [piece.feature for piece in pieces("train", train)]
  return Problem(facts, name, 3.0, rows, splits, _no_entity, said)


def _tagging_split(split: str, sentences: list, pieces: list, labels: tuple) -> Split:
  def decode(outputs: dict) -> list[list[str]]:
    return tagging.decode(sentences, pieces, labels, outputs)

  def write(folder: Path, outputs: dict) -> None:
    tagging.write(folder / f"{split}.txt", sentences, decode(outputs))

  def units(outputs: dict) -> np.ndarray:
    return tagging.units(sentences, decode(outputs))

  labelled = all(sentence.tags is not None for sentence in sentences)
  asked = _digest((s.words, s.tags) for s in sentences)
  return Split([p.feature for p in pieces], asked, units if labelled else None, write)


def _no_entity(units: np.ndarray) -> bool:
  """Whether no entity at all was predicted; never where tags are not of entities."""
  return units.shape[1] > 2 and not units[:, 1].any()


# Question answering.


def _qa(config: ConfigDict, name: str, tokenizer: Tokenizer, longest: int) -> Problem:
  q, said = config.qa, []
  read = {split: squad_files.read(file) for split, file in _files(config).items()}
  said += [questions.summary() for questions in read.values()]

  def windows(questions: squad_files.Questions, train: bool) -> list[squad.Window]:
    return squad.windows(
      questions,
      tokenizer,
      max_length=longest,
      stride=q.stride,
      max_query=q.max_query,
      train=train,
    )

  limit = f"cut to {q.max_query} tokens"
  for split, asked in read.items():
    if cut := squad.cut_questions(asked, tokenizer, q.max_query):
      said.append(f"{split}: {cut} of {len(asked.items)} questions {limit}")
  questions = read.pop("train")
  impossible = questions.form == "SQuAD 2.0"
  questions = dataclasses.replace(questions, items=tuple(_first(config, list(questions.items))))
  train = windows(questions, train=True)
  options = {
    "stride": q.stride,
    "max_query": q.max_query,
    "n_best": q.n_best,
    "max_answer_length": q.max_answer_length,
    "threshold": q.threshold,
    "impossible": impossible,
  }
  splits = {
    split: _qa_split(split, r, windows(r, train=False), options) for split, r in read.items()
  }
  head = {
    "beam_size": q.beam_size,
    "joint": q.joint,
    "answerable_weight": q.answerable_weight,
    "hidden": q.hidden,
    "max_answer_length": q.max_answer_length,
  }
  facts = Facts("qa", name, HeadSpec("qa", head), longest, options=options)
  return Problem(facts, name, 2.0, [w.feature for w in train], splits, _never_right, said)


def _qa_split(split: str, questions: squad_files.Questions, windows: list, options: dict) -> Split:
  def decode(outputs: dict) -> squad.Decoded:
    lengths = {name: options[name] for name in ("n_best", "max_answer_length")}
    return squad.decode(questions, windows, outputs, **lengths)

  def write(folder: Path, outputs: dict) -> None:
    squad.write(folder / split, decode(outputs), null_threshold(options))

  def units(outputs: dict) -> np.ndarray:
    return squad.units(questions, decode(outputs))

  asked = _digest((x.question, x.context, x.golds) for x in questions.items)
  return Split([w.feature for w in windows], asked, units if questions.labelled else None, write)


def null_threshold(options: dict) -> float | None:
  """Returns the null odds above which there is no answer; None where all questions have one."""
  return options["threshold"] if options["impossible"] else None


def _never_right(units: np.ndarray) -> bool:
  """Whether no prediction shares a word with an answer."""
  return not units[:, 1].any()
