"""Shows the progress of reading: a bar on a terminal, occasional log lines otherwise."""

import time
from collections.abc import Callable

from rich.progress import BarColumn, Progress, TaskProgressColumn

from electra_jax.runtime import terminal
from electra_jax.runtime.terminal import clock, duration, log_console

LINE_SECS = 5.0  # between two log lines
BAR_SECS = 0.2  # between two updates of the bar


class Status:
  """A context manager that shows MB, MB/s, tokens and ETA, and ends with a summary line."""

  def __init__(
    self, label: str, done: Callable[[], float], unit: str = "MB of text", bar: bool = True
  ):
    """Starts the clock; `done` returns the finished fraction, 0 to 1; 0 while it is unknown.

    bar=False prints lines on a terminal, too, where a `Display` may be.
    """
    self._label, self._done, self._unit = label, done, unit
    self._bytes, self._tokens = 0, 0
    self._start = self._last = time.monotonic()
    self._bar = None
    console = terminal.console(stderr=True)
    if bar and console.is_interactive:
      columns = ("{task.description}", BarColumn(), TaskProgressColumn(), "{task.fields[text]}")
      self._bar = Progress(*columns, console=console, transient=True)
      self._task = self._bar.add_task(label, total=None, text="")

  def __enter__(self) -> "Status":
    if self._bar:
      self._bar.start()
    return self

  def __exit__(self, kind, *_) -> None:
    if self._bar:
      self._bar.stop()
    if kind is None:
      print_line(f"{self._label}: {self._text()}, {duration(time.monotonic() - self._start)}")

  def update(self, size: int = 0, tokens: int = 0) -> None:
    """Adds `size` bytes of text and `tokens` tokens."""
    self._bytes, self._tokens = self._bytes + size, self._tokens + tokens
    now = time.monotonic()
    if now - self._last < (BAR_SECS if self._bar else LINE_SECS):
      return
    self._last = now
    done = self._done()
    eta = f", ETA {clock((now - self._start) * (1 - done) / done)}" if done else ""
    if self._bar:
      self._bar.update(self._task, completed=done, total=1.0, text=self._text() + eta)
    else:
      percent = f" {100 * done:.0f} %," if done else ""
      print_line(f"{self._label}:{percent} {self._text()}{eta}")

  def _text(self) -> str:
    rate = self._bytes / 1e6 / max(time.monotonic() - self._start, 1e-9)
    tokens = f", {self._tokens / 1e6:.2f} M tokens" if self._tokens else ""
    return f"{self._bytes / 1e6:.1f} {self._unit} at {rate:.1f} MB/s{tokens}"


def print_line(line: str) -> None:
  """Prints a line, with the time unless stdout is a terminal."""
  if (console := log_console()).is_interactive:
    # Above a display, which belongs to another console.
    print(terminal.fill(line, console.width))
  else:
    console.print(line)
