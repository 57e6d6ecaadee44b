"""Reads what other programs wrote: JSON of any depth, names of files, bytes that are not UTF-8."""

import json
import os
from pathlib import Path
from typing import Any

# How files begin that people give in place of text.
_MAGIC = {
  b"\x1f\x8b": "gzip",
  b"\x28\xb5\x2f\xfd": "Zstandard",
  b"\xfd7zXZ\0": "xz",
  b"BZh": "bzip2",
  b"PK\x03\x04": "ZIP",
  b"%PDF": "PDF",
  b"PAR1": "Parquet",
  b"ARROW1": "Arrow",
  b"\xff\xfe\0\0": "UTF-32",
  b"\xff\xfe": "UTF-16",
  b"\xfe\xff": "UTF-16",
}


def _number(text: str) -> int | float:
  return value if -(2**63) <= (value := int(text)) < 2**63 else float(text)


def parse_json(text: str | bytes, where: object, kind: type = object) -> Any:
  """Returns the value of a JSON text; integers beyond 64 bits are floats.

  Args:
    where: names the text in errors, e.g. its path.
    kind: the type that the value must have, e.g. dict.

  Raises:
    ValueError: the text is not JSON, is nested too deeply, or its value is of another type.
  """
  try:
    value = json.loads(text, parse_int=_number)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{where} is not JSON: {error}") from None
  if not isinstance(value, kind):
    raise ValueError(f"{where} holds a JSON {type(value).__name__}, not a {kind.__name__}")
  return value


def read_json(path: str | os.PathLike, kind: type = dict) -> Any:
  """Returns the value in a JSON file; raises as `parse_json`, and OSError."""
  return parse_json(Path(path).read_bytes(), path, kind)


def inside(folder: str | os.PathLike, name: object) -> Path:
  """Returns the path of a file that a foreign file names; it must lie in `folder` or below.

  Raises:
    ValueError: the name is absolute, leads out of the folder, or is not a name.
  """
  parts = Path(name).parts if isinstance(name, str) and "\0" not in name else ()
  if not parts or ".." in parts or Path(name).is_absolute():
    raise ValueError(f"{name!r:.80} is not the name of a file inside {folder}")
  return Path(folder, name)


def likely_format(data: bytes) -> str:
  r"""Returns what bytes that are not UTF-8 probably are; "" if nothing is likely.

  Args:
    data: the beginning of the file.

  >>> likely_format("naïve café".encode("utf-16")), likely_format("naïve café".encode("cp1252"))
  ('UTF-16', 'Windows-1252')
  """
  for magic, name in _MAGIC.items():
    if data.startswith(magic):
      return name
  if data.count(0) > len(data) // 4:
    return "UTF-16" if data.strip(b"\0") else ""
  try:
    data.decode("cp1252")
  except UnicodeDecodeError:
    return ""
  marked = sum(byte >= 0x80 for byte in data)
  if b"\0" in data or not marked:
    return ""
  return "Windows-1252" if marked < len(data) / 4 else "GBK, Shift-JIS or Windows-1251"
