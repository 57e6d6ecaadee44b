"""Reads the text files of tasks: UTF-8, plain or gzip."""

import gzip
import os
import zlib
from pathlib import Path

MAX_BAD_FRAC = 0.01  # of a file's examples; above it the file is rejected


class TaskError(ValueError):
  """A task or its data cannot be used; the message is one line that names the place."""


def read_text(path: str | os.PathLike) -> str:
  """Returns a file's text without a byte order mark; gzip is detected by name or first bytes.

  Raises:
    TaskError: the file is missing, damaged or not UTF-8.
  """
  try:
    data = Path(path).read_bytes()
    if Path(path).suffix.lower() == ".gz" or data[:2] == b"\x1f\x8b":
      data = gzip.decompress(data)
    return data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    line = error.object.count(b"\n", 0, error.start) + 1
    byte = error.object[error.start]
    raise TaskError(f"{path}:{line}: not UTF-8 (byte 0x{byte:02x})") from None
  except FileNotFoundError:
    raise TaskError(f"{path}: no such file") from None
  except (OSError, EOFError, zlib.error) as error:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    raise TaskError(f"{path}: cannot be read ({reason})") from None


def read_lines(path: str | os.PathLike) -> list[str]:
  """Returns the lines of a file without line ends; raises as `read_text` does."""
  # Not splitlines: a text may contain characters that Unicode treats as line ends.
  return [line.removesuffix("\r") for line in read_text(path).removesuffix("\n").split("\n")]
