"""Reads the files of tasks: tables, JSON, parquet and lines of text, plain or compressed."""

import contextlib
import csv
import difflib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from electra_jax.data import compressed
from electra_jax.runtime import foreign, storage

# A cell, quoted or not, and its separator.
_CELL = re.compile(r'(?:"([^"]*(?:""[^"]*)*)"|([^"\t\n]*))(\t|\n|\Z)')
_MARKS = set('"\t\n\r')  # a cell with one of these is quoted
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # valid in JSON, not in UTF-8
MAX_BAD_FRAC = 0.01  # fraction of a file's examples above which the file is rejected
COMPRESSED = tuple(compressed.NEW)
# The place and the columns, then for each row its place and {column: value} or its fault.
Rows = Iterator[tuple[str, Any]]


class TaskError(ValueError):
  """A task or its data is invalid; the message is one line that names the place."""


def read_bytes(path: str | os.PathLike) -> bytes:
  """Returns the content of a file or URL, decompressed if its name ends in one of COMPRESSED.

  gzip is also recognised by its first bytes.

  Raises:
    TaskError: the file is missing, damaged, or decompresses to far more than text does.
  """
  name = os.fspath(path).lower()
  try:
    is_remote = storage.is_remote(name)
    with io.BytesIO(storage.read(os.fspath(path))) if is_remote else open(path, "rb") as file:
      raw = io.BufferedReader(file)
      name = ".gz" if raw.peek(2)[:2] == b"\x1f\x8b" else name
      data = compressed.read_whole(raw, name)
  except FileNotFoundError:
    raise TaskError(f"{path}: no such file") from None
  except (OSError, EOFError, MemoryError) as error:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    raise TaskError(f"{path}: cannot be read ({reason})") from None
  if data.startswith(b"version https://git-lfs"):
    raise TaskError(f"{path}: a pointer of Git LFS: run git lfs pull")
  return data


def read_text(path: str | os.PathLike) -> str:
  """Returns a file's text without a byte order mark; raises TaskError also if it is not UTF-8."""
  data, place = read_bytes(path), 0
  try:
    text = data.decode("utf-8-sig")
    if data.count(0) <= len(data) // 4:
      return text
  except UnicodeDecodeError as error:
    place = error.start
  line, kind = data.count(b"\n", 0, place) + 1, foreign.likely_format(data)
  hint = f", probably {kind}: convert it to UTF-8 text" if kind else ""
  raise TaskError(f"{path}:{line}: not UTF-8 (byte 0x{data[place]:02x}){hint}")


def read_lines(path: str | os.PathLike) -> list[str]:
  """Returns the lines of a file without line ends; raises as `read_text`."""
  text = read_text(path)
  if "\n" not in text:  # the line ends of early Macs
    text = text.replace("\r", "\n")
  # Not splitlines, because a text may contain Unicode's other line ends.
  return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def parse_json(text: str | bytes) -> Any:
  """Returns the value of a JSON text, or None if it is not JSON."""
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    return None


def scalar_text(value: Any) -> Any:
  """Returns a number or a truth value as in JSON, with 1.0 as 1 and NaN as ""; others unchanged."""
  if not isinstance(value, bool | int | float):
    return value
  if value != value:
    return ""
  return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def clean(text: str) -> str:
  """Returns a text with U+FFFD in place of lone surrogates, e.g. of an emoji that was cut."""
  return LONE_SURROGATE.sub("\ufffd", text)


def write_rows(path: str | os.PathLike, rows: Iterable[Iterable[str]]) -> None:
  """Writes a TSV; cells with a tab, a line end or a quote are quoted as in CSV.

  Lone surrogates are escaped as in JSON.
  """
  with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
    for row in rows:  # csv.writer does not quote a lone carriage return
      quoted = ('"' + x.replace('"', '""') + '"' if _MARKS & set(x) else x for x in row)
      file.write("\t".join(quoted) + "\n")


def form_of(path: str | os.PathLike) -> str:
  """Returns a file's extension without the compression's, a key of FORMS.

  >>> form_of("reviews.CSV.gz")
  '.csv'
  """
  name = os.fspath(path).lower()
  name = next((name.removesuffix(end) for end in COMPRESSED if name.endswith(end)), name)
  return os.path.splitext(name)[1]


def read_rows(
  path: str | os.PathLike, *, unheaded: Sequence[str] = (), quoting: bool = True, text: str = "text"
) -> Rows:
  """Yields the place and columns of a file in one of FORMS, or else of JSON, then the rows.

  Args:
    unheaded: the columns of a TSV without a header.
    quoting: see `split_rows`.
    text: the name of the column of a file with one text a line.

  Raises:
    TaskError: the file cannot be read, is empty, or has no row.
  """
  read = FORMS.get(form_of(path), _json)
  return read(path, unheaded=unheaded, quoting=quoting, text=text)


def check_columns(where: str, columns: Sequence[str], wanted: Sequence[str]) -> None:
  """Raises TaskError if a wanted column of a file is missing or duplicated."""
  for column in wanted:
    if columns.count(column) != 1:
      count = "two columns" if column in columns else "no column"
      close = difflib.get_close_matches(column, columns, n=1) if count == "no column" else []
      hint = f"; did you mean {close[0]!r}?" if close else ""
      has = ", ".join(columns)
      raise TaskError(f"{where} has {count} {column!r} (columns: {has:.200}){hint}")


def _filled(path: str | os.PathLike) -> list[str]:
  lines = read_lines(path)
  if not any(lines):
    raise TaskError(f"{path}: the file is empty")
  return lines


def _table(
  path: str | os.PathLike, rows: Iterator[tuple[int, list[str]]], columns: Sequence[str] = ()
) -> Rows:
  """Yields the rows of a table; its header is the first row unless `columns` are given."""
  where, columns = (path, columns) if columns else (f"{path}:1", next(rows)[1])
  yield str(where), columns
  for number, cells in rows:
    same = len(cells) == len(columns)
    fault = f"{len(cells)} columns instead of {len(columns)}"
    yield f"{path}:{number}", dict(zip(columns, cells, strict=True)) if same else fault


def _tsv(path: str | os.PathLike, unheaded: Sequence[str], quoting: bool, **_) -> Rows:
  lines = _filled(path)
  # An empty line is a row only if the table has a single column.
  while not lines[-1] and "\t" in lines[0]:
    lines.pop()
  yield from _table(path, split_rows(lines, quoting=quoting), unheaded)


def _csv(path: str | os.PathLike, **_) -> Rows:
  """Reads a CSV with the separator of Excel's line sep=;, or else the header's most frequent."""
  lines = _filled(path)
  named = re.fullmatch('"?sep=(.)"?', lines[0])
  header = re.sub('"[^"]*"', "", lines[0])
  between = named[1] if named else max(",;\t|", key=header.count)
  yield from _table(path, _csv_rows(path, ["", *lines[1:]] if named else lines, between))


def _csv_rows(
  path: str | os.PathLike, lines: Sequence[str], between: str
) -> Iterator[tuple[int, list[str]]]:
  """Yields the line number and the cells of each row of a CSV, without empty lines."""
  csv.field_size_limit(2**31 - 1)  # characters of a cell; by default 131,072
  reader = csv.reader((f"{line}\n" for line in lines), delimiter=between, strict=True)
  number, is_header_read = 1, False
  try:
    for cells in reader:
      if cells:
        yield number, cells if is_header_read else list(map(str.strip, cells))
        is_header_read = True
      number = reader.line_num + 1
  except csv.Error as error:
    raise TaskError(f"{path}:{number}: not CSV ({error}): double the quotes in a cell") from None


def _json(path: str | os.PathLike, **_) -> Rows:
  """The places are lines, or row numbers from 1 of an array, which may be the field "data"."""
  lines = _filled(path)
  rows = [(f"{path}:{n}", parse_json(line)) for n, line in enumerate(lines, 1) if line.strip()]
  if len(rows) == 1 or not any(isinstance(row, dict) for _, row in rows):
    whole = parse_json("\n".join(lines))
    whole = whole.get("data") if isinstance(whole, dict) else whole
    if isinstance(whole, list) and any(isinstance(row, dict) for row in whole):
      rows = [(f"{path}:{number}", row) for number, row in enumerate(whole, 1)]
  columns = next(((place, list(row)) for place, row in rows if isinstance(row, dict)), None)
  if columns is None:
    hint = "" if form_of(path) in FORMS else f": end its name in one of {', '.join(FORMS)}"
    raise TaskError(f"{rows[0][0]}: not a JSON object ({len(rows)} of {len(rows)} rows){hint}")
  yield columns
  yield from ((place, x if isinstance(x, dict) else "not a JSON object") for place, x in rows)


def _parquet(path: str | os.PathLike, **_) -> Rows:
  """The places are row numbers from 1."""
  import pyarrow
  from pyarrow import parquet

  try:
    table = parquet.read_table(io.BytesIO(read_bytes(path)))
  except pyarrow.ArrowException as error:
    reason = str(error).split("\n")[0]
    raise TaskError(f"{path}: cannot be read as parquet ({reason:.200})") from None
  yield str(path), table.column_names
  yield from ((f"{path}:{number}", row) for number, row in enumerate(table.to_pylist(), 1))


def class_names(path: str | os.PathLike) -> dict[str, list[str]]:
  """Returns {column: names of its integers} that `datasets` wrote to a parquet file, or {}."""
  from pyarrow import parquet

  saved = (parquet.read_schema(io.BytesIO(read_bytes(path))).metadata or {}).get(b"huggingface")
  found = {}
  with contextlib.suppress(AttributeError, TypeError, LookupError):  # another program's metadata
    for column, feature in parse_json(saved or "{}")["info"]["features"].items():
      inner = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
      found |= {column: inner["names"]} if isinstance(inner.get("names"), list) else {}
  return found


def _texts(path: str | os.PathLike, text: str, **_) -> Rows:
  lines = _filled(path)
  yield str(path), [text]
  yield from ((f"{path}:{number}", {text: x}) for number, x in enumerate(lines, 1))


# {extension of a file without its compression's: function that yields its rows as `read_rows`}
FORMS: dict[str, Callable[..., Rows]] = {
  ".tsv": _tsv,
  ".csv": _csv,
  ".json": _json,
  ".jsonl": _json,
  ".parquet": _parquet,
  ".txt": _texts,
}


def split_rows(lines: Sequence[str], *, quoting: bool) -> Iterator[tuple[int, list[str]]]:
  """Returns the line number and the cells of each row of a TSV.

  With `quoting`, CSV quotes are removed if all quotes are where CSV writers such as pandas put
  them: around cells that are empty or have a tab, a line end or a (doubled) quote, or around all
  cells of the header. If a quote is elsewhere, all quotes are text.
  """
  rows = _unquoted(lines) if quoting and any('"' in line for line in lines) else None
  return iter(rows or ((number, line.split("\t")) for number, line in enumerate(lines, 1)))


def _unquoted(lines: Sequence[str]) -> list[tuple[int, list[str]]] | None:
  """Returns the rows without their quotes; None if they are not CSV quotes."""
  widths = {line.count("\t") for line in lines}
  # If all lines have the same columns, no cell spans lines, and a stray quote is text.
  texts = lines if len(widths) == 1 and widths != {0} else ["\n".join(lines)]
  rows, number, all_quoted = [], 1, False
  for text in texts:
    place, mark, cells, quoted = 0, "\t", [], []
    while mark:
      if not (found := _CELL.match(text, place)):
        return None
      inner, plain, mark = found.groups()
      place = found.end()
      cells.append(plain if inner is None else inner.replace('""', '"'))
      quoted.append(inner)
      if mark == "\t":
        continue
      all_quoted = all_quoted or (number == 1 and None not in quoted)
      if not all_quoted and any(inner and not _MARKS & set(inner) for inner in quoted):
        return None
      rows.append((number, cells))
      number += sum(inner.count("\n") for inner in quoted if inner) + 1
      cells, quoted = [], []
  return rows
