"""The log of a run: metrics.jsonl, the terminal, and trackers."""

import contextlib
import errno
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from electra_jax.monitor.display import Display
from electra_jax.monitor.journal import Journal
from electra_jax.monitor.metrics import HISTORY_FILE, lines, parse_line
from electra_jax.monitor.trackers import Tracker, dropping
from electra_jax.runtime.workdir import free_name, naming, replacing


class History:
  """metrics.jsonl: one line per log step or evaluation, `{"step", "split", name: value...}`.

  A resumed run first drops the lines after its step, which it writes again, and damaged lines, with
  `warnings`. If training starts over, renames the earlier file, with `notes`.
  """

  def __init__(self, path: Path, resumed_step: int | None):
    self.path, self.warnings, self.notes = path, [], []
    if resumed_step is None and any(lines(path)):
      aside = path.rename(free_name(path))
      self.notes = [f"training starts over: renamed the earlier {path.name} to {aside}"]
    bad = []
    found = path.open("rb") if path.exists() else io.BytesIO()
    with found, replacing(path) as temporary, temporary.open("wb") as kept:
      for number, text in enumerate(found, 1):
        if (line := parse_line(text)) is None:
          bad.append(f"{number}")
        elif line["step"] <= resumed_step:
          kept.write(text.rstrip() + b"\n")
    if bad:
      self.warnings = [f"{path}: dropped damaged lines: {', '.join(bad)}"]
    self._file = path.open("ab", buffering=0)

  def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
    """Appends a line atomically; raises OSError with the file's name."""
    values = {"step": step, "split": split, **values}
    line = json.dumps(values, allow_nan=False).encode() + b"\n"
    end = self._file.seek(0, os.SEEK_END)
    with naming(self.path):
      try:
        if self._file.write(line) < len(line):
          raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
      except OSError:
        with contextlib.suppress(OSError):
          self._file.truncate(end)
        raise

  def sync(self) -> None:
    """Flushes the lines to disk or bucket; raises OSError with the file's name."""
    with naming(self.path):
      os.fsync(self._file.fileno())

  def close(self, failed: bool) -> None:
    self._file.close()


class Log:
  """All outputs of a run.

  Args:
    others: make trackers and pictures; one that raises anything is dropped with a warning.
    hooks: called with each line; an exception ends the run.
    must_write: raise, not only warn, if a file or a line cannot be written.
    enabled: True in only one process.
  """

  def __init__(
    self,
    folder: Path,
    display: Display,
    *,
    start_step: int,
    resumed: bool,
    others: Iterable[Callable[[], Tracker]] = (),
    hooks: Sequence[Callable] = (),
    must_write: bool = True,
    enabled: bool = True,
  ):
    self.display, self.journal = display, Journal(folder, enabled)
    self._must_write, self._enabled = must_write, enabled
    self._history: History | None = None
    self._hooks, self._others = hooks, []
    if enabled:
      with self._writing("all log lines"):
        history = self._history = History(folder / HISTORY_FILE, start_step if resumed else None)
        self.warn(history.warnings)
        for note in history.notes:
          display.print_line(note, style="bold")
      for make in others:
        with dropping("a tracker", functools.partial(self._drop, "start", None)):
          self._others.append(make())

  @contextlib.contextmanager
  def _writing(self, what: str) -> Iterator[None]:
    """Raises or warns if `what` cannot be written."""
    try:
      yield
    except OSError as error:
      if self._must_write:
        raise
      self.warn([f"{what}: cannot write to {error.filename}: {error.strerror}"])

  def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
    """Writes a line to all outputs."""
    if not self._enabled:
      return
    self.display.show(step, split, values)
    if self._history:
      with self._writing(f"step {step}"):
        self._history.write(step, split, values)
    for hook in self._hooks:
      hook(step, split, values)
    for other in tuple(self._others):
      drop = functools.partial(self._drop, f"step {step}", other)
      with dropping(type(other).__name__, drop):
        other.write(step, split, values)

  def _drop(self, when: str, other: Tracker | None, error: str) -> None:
    self._others = [x for x in self._others if x is not other]
    self.warn([f"{when}: {error}; not used again until the run is resumed"])

  def sync(self) -> None:
    """Flushes metrics.jsonl, so that it survives a power cut or the loss of the machine."""
    if self._history:
      with self._writing("buffered lines"):
        self._history.sync()

  def warn(self, warnings: Iterable[str]) -> None:
    """Prints a line for each warning and writes it to the journal."""
    for warning in warnings:
      self.journal.write("warning", text=warning)
      self.display.print_line(f"warning: {warning}", style="bold")

  def close(self) -> None:
    """Closes the outputs, ignoring errors; after an exception, trackers show a failed run."""
    failed = sys.exception() is not None
    for place in filter(None, (self._history, *self._others)):
      with contextlib.suppress(Exception, SystemExit):  # failed writes are already reported
        place.close(failed)
    self._history, self._others = None, []
