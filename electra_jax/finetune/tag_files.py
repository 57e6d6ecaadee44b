"""Reads sentences of words and tags: columns (CoNLL, CoNLL-U) and lists in JSON or parquet."""

import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from electra_jax.finetune import files
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.labels import HIDDEN

DOCUMENT_START = "-DOCSTART-"  # CoNLL-2003's line between documents
DEFAULT = (0, -1)  # columns of the words and the tags
CONLLU = (1, 3)  # in CoNLL-U: the form and the universal part of speech
WORDS, TAGS = ("tokens", "words"), ("ner_tags", "ner", "tags", "labels")  # names of lists
_HEADER = re.compile("(words?|tokens?|form)( (ner(_tags?)?|tags?|labels?|pos|chunk))+", re.I)
# Before a sentence: comments of CoNLL-U and MultiCoNER, CoNLL-2012's marks of documents.
_COMMENT = re.compile(r"#\s?(newdoc|newpar|id|begin document|end document)\b|#\s?\S+ = ")
_PAIRED = re.compile(r"\S+[/|_](O|[BIESLUMWbieslumw]-\S+|[A-Z]{1,5}\$?|[.,:'`]+)")
_UNTAGGED = {*HIDDEN, "-100"}  # tags of a sentence whose tags are hidden


class Sentence(NamedTuple):
  """A sentence of a file."""

  words: tuple[str, ...]
  tags: tuple[str, ...] | None  # one per word, in the file's scheme; None without tags
  place: str  # "file:line" of its first word


_Rows = list[tuple[str, Sequence[Any]]]  # the place and the columns of each word of a sentence


def read(
  path: str | os.PathLike,
  *,
  word_column: int = DEFAULT[0],
  tag_column: int | None = DEFAULT[1],
  labels: str | None = None,
  tags_optional: bool = False,
  is_tag: Callable[[str], bool] | None = None,
) -> list[Sentence]:
  """Reads columns: a word a line, columns at spaces or tabs, blank lines between sentences.

  A row of JSON or parquet is a sentence, and its lists are the columns. Columns count from 0, or
  from the end if negative; by default a list named as in WORDS is first, and as in TAGS last. The
  sentences have no tags if `tag_column` is None or the word's column (as in a file of one column),
  or if the file lacks the column and `tags_optional` is set.

  Args:
    labels: the comma-separated names of tags that are integers, from 0.
    is_tag: whether a text is a tag; then a .txt without columns is read as one text a line.

  Raises:
    TaskError: the file is missing, damaged, not UTF-8, not columns or has no sentence, the number
      of columns varies, or a column does not exist.
  """
  is_default = (word_column, tag_column) == DEFAULT
  sentences = list(_lists(path, is_default) if _is_json(path) else _columns(path))
  if not sentences:
    raise TaskError(f"{path}: the file has no sentences")
  if is_tag and files.form_of(path) == ".txt" and _is_text(sentences, tag_column, is_tag):
    warnings.warn(f"{path} is read as one text a line, with words between spaces", stacklevel=2)
    return [Sentence(tuple(words), None, place) for place, words in itertools.chain(*sentences)]
  first, columns = sentences[0][0]
  width, tag_column = len(columns), word_column if tag_column is None else tag_column
  if is_default and _is_conllu(columns):
    word_column, tag_column = CONLLU
  if tags_optional and not -width <= tag_column < width:
    tag_column = word_column
  for column in (word_column, tag_column):
    if not -width <= column < width:
      raise TaskError(f"{first}: no column {column}, the line has {width} columns")
  for place, columns in itertools.chain(*sentences):
    if len(columns) != width:
      line = first.rpartition(":")[2]
      raise TaskError(f"{place}: {len(columns)} columns, line {line} has {width}")
  is_tagged, found = (tag_column - word_column) % width != 0, []
  for rows in sentences:
    words, tags = (
      tuple(_text(place, columns[i]) for place, columns in rows) for i in (word_column, tag_column)
    )
    if labels:
      tags = tuple(_named(tag, labels.split(","), rows[0][0]) for tag in tags)
    has_tags = is_tagged and not _UNTAGGED.issuperset(tags)
    found.append(Sentence(words, tags if has_tags else None, rows[0][0]))
  return found


def _text(place: str, cell: Any) -> str:
  text = files.scalar_text(cell)
  if not isinstance(text, str) or not text:
    raise TaskError(f"{place}: {cell!r:.40} is not a word or a tag")
  return files.clean(text)


def _named(tag: str, names: Sequence[str], place: str) -> str:
  if not tag.isdecimal():
    return tag
  if int(tag) >= len(names):
    raise TaskError(
      f"{place}: the tag {tag} is not in tagging.labels, which has {len(names)} names"
    )
  return names[int(tag)].strip()


def _is_json(path: str | os.PathLike) -> bool:
  form = files.form_of(path)
  if form in (".json", ".jsonl", ".parquet"):
    return True
  if form == ".csv":
    raise TaskError(f"{path}: tags are read from columns at spaces or tabs, or from JSON, not CSV")
  return isinstance(files.parse_json(files.read_lines(path)[0]), dict)


def _lists(path: str | os.PathLike, is_default: bool) -> Iterator[_Rows]:
  """Yields the sentences of rows of lists."""
  is_parquet = files.form_of(path) == ".parquet"
  names = files.class_names(path) if is_parquet else {}
  read_rows = files.FORMS[".parquet" if is_parquet else ".json"]
  for place, row in itertools.islice(read_rows(path), 1, None):
    if isinstance(row, str):
      raise TaskError(f"{place}: {row}")
    lists = {name: value for name, value in row.items() if isinstance(value, list)}
    if is_default:
      order = sorted(lists, key=lambda name: (name in TAGS) - (name in WORDS))
      lists = {name: lists[name] for name in order}
    if not lists:
      raise TaskError(f"{place}: no list of words (columns: {', '.join(row):.200})")
    if len({len(values) for values in lists.values()}) > 1:
      lengths = " and ".join(str(len(values)) for values in lists.values())
      raise TaskError(f"{place}: lists of {lengths} elements")
    named = (
      [_named(str(x), names[name], place) for x in values] if name in names else values
      for name, values in lists.items()
    )
    if words := [(place, columns) for columns in zip(*named, strict=True)]:
      yield words


def _is_conllu(columns: Sequence[Any]) -> bool:
  return len(columns) == 10 and re.fullmatch(r"\d+([-.]\d+)?", str(columns[0])) is not None


def _columns(path: str | os.PathLike) -> Iterator[_Rows]:
  """Yields the sentences of a file of columns; skips the ranges and empty nodes of CoNLL-U."""
  lines = files.read_lines(path)
  data = (line.split("\t") for line in lines if line.strip() and not line.startswith("#"))
  is_conllu = _is_conllu(next(data, ()))
  rows: list[tuple[str, Sequence[str]]] = []
  for number, line in enumerate(lines, 1):
    cells = line.split("\t") if is_conllu and line.strip() else re.findall(r"[^ \t]+", line)
    begins = not rows or not rows[-1][1]
    if begins and (is_conllu and line.startswith("#") or _COMMENT.match(line)):
      continue
    if not (is_conllu and cells and not cells[0].isdecimal()):
      rows.append((f"{path}:{number}", cells))
  if rows and _HEADER.fullmatch(" ".join(rows[0][1])):
    del rows[0]
  start = [cells for _, cells in rows[:50] if cells]
  if start and all(_PAIRED.fullmatch(cell) for cells in start for cell in cells):
    raise TaskError(
      f"{rows[0][0]}: {start[0][0]!r} is a word with its tag: write each word on a line of its own,"
      " then a tab and its tag"
    )
  for has_words, words in itertools.groupby(
    rows, lambda row: bool(row[1]) and DOCUMENT_START not in row[1]
  ):
    if has_words:
      yield list(words)


def _is_text(
  sentences: Sequence[_Rows], tag_column: int | None, is_tag: Callable[[str], bool]
) -> bool:
  """Returns whether lines are texts: of several widths, or of one that has neither tags nor blocks.

  Lines of one word are columns.
  """
  lines = [cells for rows in sentences for _, cells in rows]
  width = len(lines[0])
  if any(len(cells) != width for cells in lines):
    return True
  has_tags = tag_column is not None and -width <= tag_column < width
  has_blocks = len(sentences) > 1 and any(len(rows) > 1 for rows in sentences)
  return width > 1 and not (
    has_blocks or (has_tags and all(is_tag(cells[tag_column]) for cells in lines))
  )
