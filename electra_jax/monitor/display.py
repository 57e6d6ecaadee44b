"""Live display of a running program: its activity, the newest metrics and a progress bar.

On a terminal the display stays below the printed lines. Elsewhere its content is printed as lines.
"""

import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderHook, RenderResult
from rich.control import Control
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from electra_jax.monitor.baselines import Baselines
from electra_jax.monitor.quantities import label, shown
from electra_jax.runtime import terminal
from electra_jax.runtime.terminal import clock, duration

TICK_SECS = 0.25
SHOWN_AFTER_SECS = 1.0  # shorter activities are not shown
HEARTBEAT_SECS = 5.0  # without a terminal, the first silence; each further one is twice as long
STEPS_HEARTBEAT_SECS = 60.0  # any silence in training, once two lines of metrics show its pace
LAST_DROPPED = ("tokens_per_sec", "eta_secs")  # of a line that is too long


class Activity(NamedTuple):
  """The current activity of a program."""

  name: str | None = None  # e.g. "compiling"; None: nothing to show
  secs: float = 0.0  # elapsed
  last_secs: float | None = None  # duration in the previous run

  def __str__(self) -> str:
    last = "" if self.last_secs is None else f" ({duration(self.last_secs)} the last time)"
    return f"{self.name}, {clock(self.secs)}{last}"


class Display:
  """Shows a run; a context manager that leaves the terminal as it was, on any exit.

  A background thread calls `now` for the activity and draws; the methods only change the content.
  With `transient`, the display is cleared at the end.
  """

  def __init__(self, console: Console, now: Callable[[], Activity], *, transient: bool = False):
    self.console, self._now = console, now
    self.baselines = Baselines()  # shown in the table beside the metrics
    self._rows: dict[str, tuple[int, Mapping]] = {}
    self._train_lines = 0
    self._progress: Progress | None = None
    self._notes: collections.deque[str] = collections.deque()
    self._ends_at: float | None = None  # by the newest metrics, on time.monotonic's clock
    self._lines = _Lines(console)
    self._last_line = self._began = time.monotonic()
    self._waiting, self._next_secs = "steps", HEARTBEAT_SECS  # what for, and when a line is due
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._draw_until_closed, daemon=True)
    self._live = Live(
      console=console, auto_refresh=False, get_renderable=self._view, transient=transient
    )

  def __enter__(self) -> "Display":
    self._thread.start()
    return self

  def __exit__(self, *unused) -> None:
    self._closed.set()
    self._thread.join()
    if self._progress or self._live.is_started:
      self._draw()
    if self._live.is_started:
      self.console.pop_render_hook()
      self._live.stop()

  def begin(self, start_step: int, steps: int | None) -> None:
    """Adds the bar; None where the number of steps is not known yet."""
    columns = (BarColumn(None), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
    progress = Progress(*columns, TextColumn("{task.fields[eta]}"), expand=True)
    progress.add_task("", total=steps, completed=start_step, eta="")
    self._progress = progress

  def set_steps(self, steps: int) -> None:
    """Sets the length of the bar."""
    self._progress.update(self._progress.task_ids[0], total=steps)

  def advance(self, step: int) -> None:
    """Moves the bar."""
    self._progress.update(self._progress.task_ids[0], completed=step)

  def show(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
    """Shows the newest metrics of a split ("train", "heldout")."""
    self._rows[split] = (step, values)
    self._train_lines += split == "train"
    if (eta_secs := values.get("eta_secs")) is not None:
      self._ends_at = time.monotonic() + eta_secs
    if not self.console.is_interactive:
      self.print_line(metrics_line(f"{split} step {step}{self._of()}", values, self.console.width))

  def announce(self, text: str) -> None:
    """Queues a line for the thread to print; safe in a signal handler."""
    self._notes.append(text)

  def print_line(self, text: str, style: str = "") -> None:
    """Prints a line, after those that are queued."""
    self._print_queued()
    if self.console.is_interactive:
      text = terminal.fill(text, self.console.width)
    self.console.print(text, style=style, markup=False)
    self._last_line = time.monotonic()

  def _print_queued(self) -> None:
    with contextlib.suppress(IndexError):  # another thread may have taken the last one
      while True:
        self.console.print(self._notes.popleft(), markup=False)
        self._last_line = time.monotonic()

  def _draw_until_closed(self) -> None:
    while not self._closed.wait(TICK_SECS):
      with contextlib.suppress(OSError):  # a full disk; the program itself will meet it
        self._print_queued()
        if self.console.is_interactive:
          self._draw()
        else:
          self._print_heartbeat()

  def _draw(self) -> None:
    """Redraws the display on a terminal."""
    if not self.console.is_interactive:
      return
    if not self._live.is_started:
      if not self._progress and self._activity() is None:
        return
      self._live.start()
      self.console.push_render_hook(self._lines)
    self._live.refresh()

  def _print_heartbeat(self) -> None:
    """Prints a new activity; what it still waits for after 5, 10, 20, 40 ... s; steps."""
    now, activity = time.monotonic(), self._activity()
    waiting = activity.name if activity else "steps"
    if waiting != self._waiting:
      self._waiting, self._next_secs = waiting, HEARTBEAT_SECS
      self._began = now - (activity.secs if activity else 0.0)
      due = activity is not None
    elif activity or self._train_lines < 2:
      due = now - self._began + TICK_SECS >= self._next_secs
      self._next_secs *= 2 if due else 1
    else:
      due = now - self._last_line + TICK_SECS >= STEPS_HEARTBEAT_SECS
    if due and (activity or self._progress):
      self.print_line(str(activity or f"step {self._progress.tasks[0].completed}{self._of()}"))

  def _of(self) -> str:
    total = self._progress and self._progress.tasks[0].total
    return "" if total is None else f"/{total}"

  def _activity(self) -> Activity | None:
    activity = self._now()
    is_shown = activity.name and activity.secs >= SHOWN_AFTER_SECS and not self._closed.is_set()
    return activity if is_shown else None

  def _view(self) -> "_Lines":
    """Returns the content: as many metrics as fit, the activity and the bar."""
    below: list[Text | Progress] = []
    if activity := self._activity():
      below.append(Text(str(activity), style="dim", no_wrap=True, overflow="ellipsis"))
    if self._progress:
      self._progress.update(self._progress.task_ids[0], eta=self._eta())
      below.append(self._progress)
    room = self.console.height - len(below) - 2  # the heading, and a line for what is printed
    rows = dict(sorted(self._rows.items(), key=lambda row: row[0] != "train"))
    names = dict.fromkeys(k for _, values in rows.values() for k in values)
    names = [name for name in names if name not in ("eta_secs", "elapsed_secs")][: max(room, 0)]
    self._lines.content = [_table(rows, names, self.baselines), *below] if names else below
    return self._lines

  def _eta(self) -> str:
    """Returns the estimated time left, by the newest metrics or, before them, by the bar."""
    left = self._progress.tasks[0].time_remaining
    if self._ends_at is not None:
      left = max(0.0, self._ends_at - time.monotonic())
    return "" if left is None else f"ETA {clock(left)}"


def _table(
  rows: Mapping[str, tuple[int, Mapping]], names: Sequence[str], baselines: Baselines
) -> Table:
  table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
  table.add_column("step", style="dim", no_wrap=True)
  for split, (step, _) in rows.items():
    table.add_column(f"{split} {step}", justify="right", no_wrap=True)
  table.add_column("trivial baseline", justify="right", style="dim", no_wrap=True)
  for name in names:
    cells = (shown(name, v[name]) if name in v else "" for _, v in rows.values())
    trivial = (baselines.shown(name, v) for _, v in rows.values() if v.get(name) is not None)
    table.add_row(label(name), *cells, next(filter(None, trivial), ""))
  return table


class _Lines(RenderHook):
  """The redrawn lines, which are cleared also after the terminal was resized.

  A narrower terminal wraps the lines on it, and a shorter one scrolls them out of view; some scroll
  them back later. `Live` handles neither and would leave old copies behind.
  """

  def __init__(self, console: Console):
    self.content: list = []
    self._console, self._size = console, console.size
    self._widths: list[int] = []  # of the drawn lines
    self._hidden: list[int] = []  # of the lines that have scrolled out of view

  def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
    lines = []
    for part in self.content:
      # One column is left free: terminals differ in whether a full line wraps.
      lines += console.render_lines(part, options.update(width=options.max_width - 1), pad=False)
    texts = ["".join(segment.text for segment in line).rstrip() for line in lines]
    self._widths = [Text(text).cell_len for text in texts]
    for line, width in zip(lines, self._widths, strict=True):
      yield from Segment.adjust_line_length(line, width)
      yield Segment.line()

  def process_renderables(self, renderables: list) -> list:
    """Clears displaced lines before `Live`'s output: cursor up, printed lines, redrawn lines."""
    _, *printed, _ = renderables
    clear = self._clear_after_resize()
    if not all(isinstance(x, Control) for x in printed):
      self._hidden = []  # the printed lines are now between them and the drawn ones
    return [clear, *renderables]

  def _clear_after_resize(self) -> Control:
    """Returns a control that clears the lines which a resize has displaced."""
    size = self._console.size
    if size == self._size:
      return Control()
    self._size = size
    widths = [*self._hidden, *self._widths]
    rows = [max(1, math.ceil(width / size.width)) for width in widths]
    out, self._hidden = sum(rows) - size.height, []  # rows out of view cannot be cleared
    for width, height in zip(widths, rows, strict=True):
      if out > 0:
        self._hidden.append(min(width, out * size.width))
      out -= height
    up = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
    return Control(*up * (sum(rows) - len(self._widths)))


def metrics_line(head: str, values: Mapping[str, float | None], width: int) -> str:
  """Returns metrics in a line, without the last ones if it gets longer than `width`."""
  parts = {name: f"{label(name)} {shown(name, value)}" for name, value in values.items()}
  parts.pop("elapsed_secs", None)
  for name in [n for n in reversed(parts) if n not in LAST_DROPPED]:
    if len(" | ".join([head, *parts.values()])) <= width:
      break
    del parts[name]
  return " | ".join([head, *parts.values()])


@contextlib.contextmanager
def doing(what: str, console: Console | None = None) -> Iterator[Display]:
  """Shows an activity with a clock while the block runs, on stderr unless there is a console."""
  console, began = console or terminal.console(stderr=True), time.monotonic()
  with Display(console, lambda: Activity(what, time.monotonic() - began), transient=True) as shown:
    yield shown


def starting() -> contextlib.AbstractContextManager:
  """Shows on a terminal that a program starts."""
  on_terminal = terminal.console(stderr=True).is_interactive
  return doing("starting") if on_terminal else contextlib.nullcontext()
