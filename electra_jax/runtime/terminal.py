"""Formats times, and makes the consoles that programs print to."""

import contextlib
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

SCRIPT = "electra-jax"  # the installed command
STAMP, STAMP_WIDTH = "%Y-%m-%d %H:%M:%S ", 20
LINE = 160  # characters of a line without a terminal, including the time stamp
# Consoles print text unchanged, with [brackets] and long lines. In a notebook, Rich would otherwise
# add an HTML element for each line.
PLAIN = {"highlight": False, "markup": False, "soft_wrap": True, "force_jupyter": False}


def typed() -> list[str]:
  """Returns the command that started this program: `electra-jax train ...`, `python -m ...`."""
  python, *words = sys.orig_argv
  if not words or Path(words[0]).name != SCRIPT:
    return [python, *words]
  return [SCRIPT if words[0] == shutil.which(SCRIPT) else words[0], *words[1:]]


def program() -> str:
  """Returns what starts another command here: `electra-jax`, `python -m electra_jax`."""
  first, *words = typed()
  is_module = words[:1] == ["-m"] and words[1].startswith("electra_jax")
  return f"{first} -m electra_jax" if is_module else first if SCRIPT in first else SCRIPT


def command_line() -> str:
  """Returns the command that started this program, quoted for a shell."""
  return shlex.join(typed())


def fill(text: str, width: int, indent: int = 0) -> str:
  """Returns a text in lines of a width, broken between words; further lines are indented.

  >>> fill("error: no such file: a-long-name.txt", 20, indent=2)
  'error: no such file:\\n  a-long-name.txt'
  """
  whole = {"break_long_words": False, "break_on_hyphens": False}
  return textwrap.fill(text, width, subsequent_indent=" " * indent, **whole)


def printable(text: str) -> str:
  """Escapes the bytes of a file's name that are not UTF-8, which fonts and encoders refuse.

  >>> printable("runs/\\udce9t\\xe9")
  'runs/\\\\udce9t\xe9'
  """
  return text.encode(errors="backslashreplace").decode()


class StampedLines:
  """A file that writes lines to stdout, each after the time.

  Drops lines that cannot be written (full disk, closed pipe): metrics.jsonl is the record.
  """

  failed = False  # whether a line was dropped, in this process
  encoding = property(lambda self: sys.stdout.encoding)  # Rich uses ASCII boxes if not UTF-8
  _begins = True  # whether the next character begins a line

  def write(self, text: str) -> int:
    """Writes text with any number of lines."""
    with self._dropping():
      for line in text.splitlines(keepends=True):
        sys.stdout.write(time.strftime(STAMP) + line if self._begins else line)
        self._begins = line.endswith("\n")
    return len(text)

  def flush(self) -> None:
    """Flushes stdout."""
    with self._dropping():
      sys.stdout.flush()

  @contextlib.contextmanager
  def _dropping(self) -> Iterator[None]:
    try:
      yield
    except OSError:
      StampedLines.failed = True

  def isatty(self) -> bool:
    """Returns False: lines on a terminal have no time."""
    return False


def console(stderr: bool = False) -> Console:
  """Returns the console of a program; the terminal wraps long lines.

  Interactive only on a terminal; by default, Rich treats a file as one if FORCE_COLOR is set.
  """
  file = sys.stderr if stderr else sys.stdout
  interactive = None if file.isatty() else False
  return Console(**PLAIN, stderr=stderr, force_interactive=interactive)


def log_console() -> Console:
  """Returns the console of a long-running program; without a terminal, it adds the time."""
  if (on_terminal := console()).is_interactive:
    return on_terminal
  options = PLAIN | {"width": LINE - STAMP_WIDTH, "force_interactive": False}
  return Console(file=StampedLines(), **options)


def clock(secs: float) -> str:
  """Formats seconds as hours, minutes and seconds.

  >>> clock(75.2)
  '0:01:15'
  """
  minutes, seconds = divmod(round(secs), 60)
  return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def duration(secs: float) -> str:
  """Formats seconds in one or two rounded units.

  >>> [duration(x) for x in (0.04, 3.21, 59.7, 272, 7300, 190_000)]
  ['< 0.1 s', '3.2 s', '1 min', '4 min 32 s', '2 h 1 min', '2 d 4 h']
  """
  if secs < 9.95:
    return f"{secs:.1f} s" if secs >= 0.1 else "< 0.1 s"
  left, parts = round(secs), []
  for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
    if parts or left >= size:
      parts.append((left // size, unit))
      left %= size
  return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count)


def share(part: float, whole: float) -> str:
  """Formats a share in whole percent; 100 % only if complete.

  >>> share(59.7, 60), share(0.001, 60), share(0, 60)
  ('99 %', '< 1 %', '0 %')
  """
  percent = 100 * part / whole if whole else 0.0
  if 0 < percent < 1:
    return "< 1 %"
  return f"{min(round(percent), 99) if part < whole else 100} %"
