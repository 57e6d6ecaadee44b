"""Reads the text files of tasks: UTF-8, plain or compressed."""

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from electra_jax.data.compressed import decompressed

# A cell, in quotes or not, and what follows it.
_CELL = re.compile(r'(?:"([^"]*(?:""[^"]*)*)"|([^"\t\n]*))(\t|\n|\Z)')
_MARKS = set('"\t\n\r')  # a cell with one of these is quoted
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell them, UTF-8 cannot
MAX_BAD_FRAC = 0.01  # of a file's examples; above it the file is rejected


class TaskError(ValueError):
  """A task or its data cannot be used; the message is one line that names the place."""


def read_text(path: str | os.PathLike) -> str:
  """Returns a file's text without a byte order mark.

  A name ending in .gz, .xz or .zst says how it is compressed, and gzip is seen by its first bytes.

  Raises:
    TaskError: the file is missing, damaged or not UTF-8.
  """
  try:
    with open(path, "rb") as raw:
      name = ".gz" if raw.peek(2)[:2] == b"\x1f\x8b" else os.fspath(path).lower()
      return decompressed(raw, name).read().decode("utf-8-sig")
  except UnicodeDecodeError as error:
    line = error.object.count(b"\n", 0, error.start) + 1
    byte = error.object[error.start]
    raise TaskError(f"{path}:{line}: not UTF-8 (byte 0x{byte:02x})") from None
  except FileNotFoundError:
    raise TaskError(f"{path}: no such file") from None
  except (OSError, EOFError) as error:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    raise TaskError(f"{path}: cannot be read ({reason})") from None


def read_lines(path: str | os.PathLike) -> list[str]:
  """Returns the lines of a file without line ends; raises as `read_text` does."""
  # Not splitlines: a text may contain characters that Unicode treats as line ends.
  return [line.removesuffix("\r") for line in read_text(path).removesuffix("\n").split("\n")]


def parse_json(text: str | bytes) -> Any:
  """Returns the value of a JSON text, None if it is not JSON."""
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    return None


def write_rows(path: str | os.PathLike, rows: Iterable[Iterable[str]]) -> None:
  """Writes the cells of a TSV, quoted as in CSV where they hold a tab, a line end or a quote.

  A lone surrogate is written as JSON spells it.
  """
  with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
    for row in rows:  # csv.writer leaves a lone carriage return without quotes
      quoted = ('"' + x.replace('"', '""') + '"' if _MARKS & set(x) else x for x in row)
      file.write("\t".join(quoted) + "\n")


def csv_rows(path: str | os.PathLike, lines: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
  """Yields the line number and the cells of each row of a CSV, without empty lines.

  Raises:
    TaskError: a quote is where CSV has none, or is missing.
  """
  reader, number = csv.reader((f"{line}\n" for line in lines), strict=True), 1
  try:
    for cells in reader:
      if cells:
        yield number, cells
      number = reader.line_num + 1
  except csv.Error as error:
    raise TaskError(f"{path}:{number}: not CSV ({error}): double the quotes in a cell") from None


def split_rows(lines: Sequence[str], *, quoting: bool) -> Iterator[tuple[int, list[str]]]:
  """Returns the line number and the cells of each row of a TSV.

  With `quoting`, the quotes of CSV are removed if all quotes are where CSV writers such as pandas
  put them: around a cell that needs it, for it is empty or has a tab, a line end or a quote
  (doubled), or around all cells of the header. If any quote is elsewhere, all quotes are text.
  """
  rows = _unquoted(lines) if quoting and any('"' in line for line in lines) else None
  return iter(rows or ((number, line.split("\t")) for number, line in enumerate(lines, 1)))


def _unquoted(lines: Sequence[str]) -> list[tuple[int, list[str]]] | None:
  """Returns the rows without their quotes; None if these are not CSV's."""
  widths = {line.count("\t") for line in lines}
  # No cell spans lines where all of them have the same columns: there, a stray quote is text.
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
