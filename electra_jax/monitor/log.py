"""The log of a run: metrics.jsonl, the terminal, and trackers."""

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from electra_jax.monitor.display import Display
from electra_jax.monitor.journal import Journal
from electra_jax.monitor.metrics import HISTORY_FILE, parse_line, read_history
from electra_jax.monitor.trackers import Tracker, TrackerError
from electra_jax.runtime.workdir import free_name, naming, replacing


class History:
  """metrics.jsonl: one line per log step or evaluation, `{"step", "split", name: value...}`.

  A resumed run first drops the lines after its step, which it writes again, and damaged lines, with
  `warnings`. If training starts over, renames the earlier file, with `notes`.
  """

  def __init__(self, path: Path, resumed_step: int | None):
    self.path, self.warnings, self.notes, kept = path, [], [], []
    found = read_history(path)
    if resumed_step is not None:
      kept = [line for line in found if line["step"] <= resumed_step]
      texts = path.read_bytes().splitlines() if path.exists() else []
      if bad := [str(n) for n, text in enumerate(texts, 1) if parse_line(text) is None]:
        self.warnings = [f"{path}: dropped damaged lines: {', '.join(bad)}"]
    elif found:
      aside = path.rename(free_name(path))
      self.notes = [f"training starts over: renamed the earlier {path.name} to {aside}"]
    with replacing(path) as temporary:
      temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
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
    others: make further destinations of the lines. Failing to make one ends the run; a tracker that
      fails later is dropped.
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
    must_write: bool = True,
    enabled: bool = True,
  ):
    self.display, self.journal = display, Journal(folder, enabled)
    self._must_write, self._enabled = must_write, enabled
    self._places: list[History | Tracker] = []
    if enabled:
      with self._writing("all log lines"):
        history = History(folder / HISTORY_FILE, start_step if resumed else None)
        self._places.append(history)
        self.warn(history.warnings)
        for note in history.notes:
          display.print_line(note, style="bold")
      for make in others:
        with self._writing("all log lines"):
          self._places.append(make())

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
    for place in tuple(self._places):
      with self._writing(f"step {step}"):
        try:
          place.write(step, split, values)
        except TrackerError as error:
          self._places.remove(place)
          self.warn([f"step {step}: {error}; not used again until the run is resumed"])

  def sync(self) -> None:
    """Flushes metrics.jsonl, so that it survives a power cut or the loss of the machine."""
    for history in (place for place in self._places if isinstance(place, History)):
      with self._writing("buffered lines"):
        history.sync()

  def warn(self, warnings: Iterable[str]) -> None:
    """Prints a line for each warning and writes it to the journal."""
    for warning in warnings:
      self.journal.write("warning", text=warning)
      self.display.print_line(f"warning: {warning}", style="bold")

  def close(self) -> None:
    """Closes the outputs, ignoring errors; after an exception, trackers show a failed run."""
    for place in self._places:
      with contextlib.suppress(OSError, TrackerError):  # failed writes are already reported
        place.close(failed=sys.exception() is not None)
    self._places = []
