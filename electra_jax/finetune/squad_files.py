"""Reads question answering files: SQuAD (JSON, or rows as in `datasets`) and MRQA (JSON lines)."""

import collections
import dataclasses
import itertools
import json
import os
import re
import string
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from electra_jax.finetune import files
from electra_jax.finetune.files import MAX_BAD_FRAC, TaskError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Question(NamedTuple):
  """A question on a context."""

  id: str
  question: str
  context: str
  answers: tuple[tuple[str, int], ...]  # (text, its first character) of answers in the context
  golds: tuple[str, ...]  # reference texts for scoring, in the context or not
  impossible: bool  # labelled as having no answer in the context


@dataclasses.dataclass(frozen=True)
class Questions:
  """The questions of a file."""

  path: str
  form: str  # "SQuAD 1.1", "SQuAD 2.0" (with impossible questions) or "MRQA"
  items: tuple[Question, ...]
  labelled: bool  # whether every question has answers or is labelled impossible
  repaired: int = 0  # answers whose position in the file was wrong or missing
  lost: int = 0  # questions without an answer in the context, which are not trained on
  empty: int = 0  # questions with a blank text or context
  duplicates: int = 0  # questions dropped for a repeated id

  @property
  def may_be_impossible(self) -> bool:
    """Whether the file is SQuAD 2.0."""
    return self.form == "SQuAD 2.0"

  def summary(self) -> str:
    """Returns the counts in one line."""
    impossible = sum(question.impossible for question in self.items)
    contexts = len({question.context for question in self.items})
    faults = {
      "answers with a corrected position": self.repaired,
      "without an answer in the context": self.lost,
      "blank": self.empty,
      "duplicate ids dropped": self.duplicates,
    }
    found = "".join(f"; {what}: {count:,}" for what, count in faults.items() if count)
    questions = f"{len(self.items):,} questions on {contexts:,} contexts"
    return f"{self.form}, {questions}, {impossible:,} impossible{found}"


def normalize(text: str) -> str:
  """Normalises an answer as the official scripts.

  >>> normalize("The  Cat's, an apple!")
  'cats apple'
  """
  return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


# (question with the file's answers, whether it is labelled)
_Row = tuple[Question, bool]


def read(path: str | os.PathLike, holds: Callable[[str], bool] = lambda context: True) -> Questions:
  """Reads the questions of a file whose contexts `holds` accepts, with or without labels.

  The file is SQuAD 1.1 or 2.0, MRQA, or a table or JSON with the columns of `datasets`' SQuAD.
  An answer at a wrong position is moved to its nearest occurrence.

  Raises:
    TaskError: the file is missing, damaged or of another format, or has no question.
  """
  form, rows = _open(str(path))
  return _collect(str(path), form, (row for row in rows if holds(row[0].context)))


def _open(path: str) -> tuple[str, Iterable[_Row]]:
  """Returns the form of a file and its questions."""
  if files.form_of(path) in (".parquet", ".csv", ".tsv"):
    return _form(rows := list(_flat(path))), rows
  text = files.read_text(path)
  if not text.strip():
    raise TaskError(f"{path}: the file is empty")
  line, _, rest = text.partition("\n")
  first = files.parse_json(line)  # None: an object over several lines
  if isinstance(first, dict) and ("header" in first or "qas" in first):
    return "MRQA", _mrqa(path, text)
  if isinstance(first, dict) and {"question", "context"} <= first.keys():
    return _form(rows := list(_flat(path))), rows
  whole = first if first is not None and not rest.strip() else _parse(text, path)
  data = whole.get("data") if isinstance(whole, dict) else whole
  if isinstance(data, list) and data and isinstance(data[0], dict) and "question" in data[0]:
    return _form(rows := list(_flat(path))), rows
  if not isinstance(whole, dict) or not isinstance(whole.get("data"), list):
    raise TaskError(
      f"{path} must be SQuAD (an object with 'data', or rows with 'question' and 'context') or MRQA"
      " (JSON lines)"
    )
  rows = list(_squad(path, whole["data"]))
  paragraphs = (p for article in whole["data"] for p in article["paragraphs"])
  is_version_2 = str(whole.get("version", "")).startswith("v2") or any(
    "is_impossible" in qa for paragraph in paragraphs for qa in paragraph["qas"]
  )
  return ("SQuAD 2.0" if is_version_2 else _form(rows)), rows


def _form(rows: Iterable[_Row]) -> str:
  """Returns the SQuAD version of the questions."""
  return f"SQuAD {'2.0' if any(question.impossible for question, _ in rows) else '1.1'}"


def _parse(text: str, where: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise TaskError(f"{where} is not JSON: {error}") from None


def _field(record: Any, name: str, kind: type, where: str, default: Any = None) -> Any:
  """Returns a field of a JSON object; raises TaskError unless it has type `kind`."""
  value = record.get(name, default) if isinstance(record, dict) else None
  if not isinstance(value, kind):
    kinds = {str: "text", int: "an integer", list: "a list", bool: "true or false"}
    raise TaskError(f"{where}: {name!r} is missing or not {kinds[kind]}")
  return files.clean(value) if kind is str else value


def _squad(path: str, data: list) -> Iterator[_Row]:
  for a, article in enumerate(data, 1):
    at = f"{path}: article {a}"
    for p, paragraph in enumerate(_field(article, "paragraphs", list, at), 1):
      at = f"{path}: article {a}, paragraph {p}"
      context = _field(paragraph, "context", str, at)
      for q, qa in enumerate(_field(paragraph, "qas", list, at), 1):
        yield _question(qa, context, f"{at}, question {q}")


def _question(qa: Any, context: str, where: str) -> _Row:
  """Returns a question from its object in SQuAD."""
  text = _field(qa, "question", str, where)
  number = isinstance(qa.get("id"), int)  # as in GermanQuAD
  name = str(qa["id"]) if number else _field(qa, "id", str, where)
  impossible = _field(qa, "is_impossible", bool, where, False)
  answers = [
    (_field(x, "text", str, where), _field(x, "answer_start", int, where))
    for x in _field(qa, "answers", list, where, [])
  ]
  # Files without labels have no answer lists, or empty ones.
  is_labelled = answers or impossible or {"is_impossible", "answers"} <= qa.keys()
  golds = tuple(answer for answer, _ in answers)
  impossible = impossible or bool(is_labelled and not answers)
  return Question(name, text, context, tuple(answers), golds, impossible), bool(is_labelled)


def _flat(path: str) -> Iterator[_Row]:
  """Yields the questions of rows whose answers are {"text": [...], "answer_start": [...]}."""
  for where, row in itertools.islice(files.read_rows(path), 1, None):
    context, qa = _field(row, "context", str, where), {"id": where, **row}
    found = qa.pop("answers", None)
    if isinstance(found, str):  # in a cell
      found = _parse(found, f"{where}: 'answers'")
    if isinstance(found, list):  # as in SQuAD
      qa |= {"answers": found, "is_impossible": not found}
    elif found is not None:
      lists = [_field(found, name, list, where) for name in ("text", "answer_start")]
      if len(lists[0]) != len(lists[1]):
        raise TaskError(f"{where}: {len(lists[0])} texts but {len(lists[1])} answer starts")
      pairs = zip(*lists, strict=True)
      qa["answers"] = [{"text": text, "answer_start": start} for text, start in pairs]
      qa["is_impossible"] = not qa["answers"]
    yield _question(qa, context, where)


def _mrqa(path: str, text: str) -> Iterator[_Row]:
  for number, line in enumerate(text.split("\n"), 1):
    where = f"{path}:{number}"
    record = _parse(line, where) if line.strip() else {"header": None}
    if isinstance(record, dict) and "header" in record:
      continue
    context = _field(record, "context", str, where)
    for qa in _field(record, "qas", list, where):
      name, question = (_field(qa, key, str, where) for key in ("qid", "question"))
      golds = [files.clean(str(x)) for x in _field(qa, "answers", list, where, [])]
      found = _field(qa, "detected_answers", list, where, [])
      answers = [_detected(x, context, where) for x in found] or [(gold, -1) for gold in golds]
      golds = golds or [answer for answer, _ in answers]
      yield Question(name, question, context, tuple(answers), tuple(golds), False), bool(answers)


def _detected(answer: Any, context: str, where: str) -> tuple[str, int]:
  """Returns the text and the first character of an MRQA answer's first span."""
  text, spans = _field(answer, "text", str, where), _field(answer, "char_spans", list, where)
  try:
    start, last = map(int, spans[0])
  except (ValueError, TypeError, IndexError, OverflowError):
    raise TaskError(f"{where}: 'char_spans' must be pairs of integers") from None
  there = context[max(start, 0) : last + 1]
  # Some answers are lower-cased or lack punctuation: take the text from the context.
  same = there.strip() and normalize(there) == normalize(text)
  return (there if same else text), start


def _collect(path: str, form: str, rows: Iterable[_Row]) -> Questions:
  """Locates the answers in their contexts; counts repairs and faults."""
  items: dict[str, Question] = {}
  counts: collections.Counter[str] = collections.Counter()
  labelled = True
  for question, has_labels in rows:
    if question.id in items:
      counts["duplicates"] += 1
      continue
    found = [(_place(question.context, *answer), answer[1]) for answer in question.answers]
    placed = tuple(place for place, _ in found if place)
    counts["repaired"] += sum(place[1] != start for place, start in found if place)
    counts["lost"] += has_labels and not placed and not question.impossible
    counts["empty"] += not (question.question.strip() and question.context.strip())
    labelled = labelled and has_labels
    items[question.id] = question._replace(answers=placed)
  if not items:
    raise TaskError(f"{path}: the file has no questions")
  return Questions(path, form, tuple(items.values()), labelled, **counts)


def check_places(train: Questions) -> None:
  """Raises TaskError if over 1 % of training questions have answers but none in the context."""
  if train.lost > MAX_BAD_FRAC * len(train.items):
    raise TaskError(
      f"{train.path}: {train.lost} of {len(train.items)} questions have no answer in their context,"
      f" more than {MAX_BAD_FRAC:.0%}"
    )


def _place(context: str, text: str, start: int) -> tuple[str, int] | None:
  """Returns an answer and its position: `start`, or the nearest occurrence, or None."""
  if text.strip() and start >= 0 and context.startswith(text, start):
    return text, start
  text = text.strip()
  places = [match.start() for match in re.finditer(f"(?={re.escape(text)})", context)]
  return (text, min(places, key=lambda i: abs(i - start))) if text and places else None
