"""What a running program shows: an activity with a clock, the newest metrics and a progress bar.

On a terminal these lines stay below everything that is printed. Elsewhere they become lines.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderHook, RenderResult
from rich.control import Control
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from electra_jax.runtime import terminal
from electra_jax.runtime.terminal import clock, duration, label, shown

TICK_SECS = 0.25
SHOWN_AFTER_SECS = 1.0  # shorter activities are not shown
BEAT_SECS = 5.0  # without a terminal: most time without a line
STEPS_BEAT_SECS = 60.0  # and between two lines while steps are trained
LAST_DROPPED = ("tokens_per_sec", "eta_secs")  # of a line that is too long


class Activity(NamedTuple):
  """What a program does at the moment."""

  what: str | None = None  # "compiling"; None: nothing to be told
  secs: float = 0.0  # so far
  last_secs: float | None = None  # that it took the last time

  def __str__(self) -> str:
    """Returns the activity with its clock.

    >>> str(Activity("compiling", 12.0, 30.4))
    'compiling, 0:00:12 (30 s the last time)'
    """
    last = "" if self.last_secs is None else f" ({duration(self.last_secs)} the last time)"
    return f"{self.what}, {clock(self.secs)}{last}"


class Display:
  """Shows a run; a context manager that leaves the terminal as it was, on any exit.

  A thread draws. All methods only say what is to be drawn.

  Args:
    now: returns the activity; called by the thread.
    transient: nothing is left on the terminal at the end.
  """

  def __init__(self, console: Console, now: Callable[[], Activity], *, transient: bool = False):
    self.console = console
    self._now = now
    self._rows: dict[str, tuple[int, Mapping]] = {}
    self._progress: Progress | None = None
    self._notes: list[str] = []
    self._ends_at: float | None = None  # by the newest metrics, on time.monotonic's clock
    self._lines = _Lines(console)
    self._told, self._last_line = None, time.monotonic()
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

  def begin(self, start_step: int, steps: int) -> None:
    """Adds the bar."""
    columns = (BarColumn(None), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
    progress = Progress(*columns, TextColumn("{task.fields[eta]}"), expand=True)
    progress.add_task("", total=steps, completed=start_step, eta="")
    self._progress = progress

  def advance(self, step: int) -> None:
    """Moves the bar."""
    self._progress.update(self._progress.task_ids[0], completed=step)

  def show(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
    """Shows the newest metrics of a split ("train", "heldout")."""
    self._rows[split] = (step, values)
    if (eta_secs := values.get("eta_secs")) is not None:
      self._ends_at = time.monotonic() + eta_secs
    if not self.console.is_interactive:
      of = f"/{self._progress.tasks[0].total}" if self._progress else ""
      self.say(metrics_line(f"{split} step {step}{of}", values, self.console.width))

  def announce(self, text: str) -> None:
    """Has the thread print a line; a signal's handler may call this."""
    self._notes.append(text)

  def say(self, text: str, style: str = "") -> None:
    """Prints a line."""
    self.console.print(text, style=style, markup=False)
    self._last_line = time.monotonic()

  # The thread.

  def _draw_until_closed(self) -> None:
    while not self._closed.wait(TICK_SECS):
      with contextlib.suppress(OSError):  # a full disk; the program itself will meet it
        while self._notes:
          self.say(self._notes.pop(0))
        self._draw() if self.console.is_interactive else self._beat()

  def _draw(self) -> None:
    """Draws anew on a terminal, without the remains of another size."""
    if not self.console.is_interactive:
      return
    if not self._live.is_started:
      if not self._progress and self._activity() is None:
        return
      self._live.start()
      self.console.push_render_hook(self._lines)
    self._live.refresh()

  def _beat(self) -> None:
    """Prints a line if there was none for long."""
    quiet = time.monotonic() - self._last_line
    if activity := self._activity():
      if activity.what != self._told or quiet + TICK_SECS >= BEAT_SECS:
        self._told = activity.what
        self.say(str(activity))
    elif self._progress and quiet >= STEPS_BEAT_SECS:
      task = self._progress.tasks[0]
      self.say(f"step {task.completed}/{task.total}")

  def _activity(self) -> Activity | None:
    activity = self._now()
    is_told = activity.what and activity.secs >= SHOWN_AFTER_SECS and not self._closed.is_set()
    return activity if is_told else None

  def _view(self) -> "_Lines":
    """Returns what is to be seen: metrics as there is room, the activity, the bar."""
    below: list[Text | Progress] = []
    if activity := self._activity():
      below.append(Text(str(activity), style="dim", no_wrap=True, overflow="ellipsis"))
    if self._progress:
      self._progress.update(self._progress.task_ids[0], eta=self._eta())
      below.append(self._progress)
    room = self.console.height - len(below) - 2  # the heading, and a line for what is printed
    self._lines.content = [*self._tables(room), *below]
    return self._lines

  def _eta(self) -> str:
    """Returns the estimated rest of the time: by the newest metrics, before them by the bar."""
    left = self._progress.tasks[0].time_remaining
    if self._ends_at is not None:
      left = max(0.0, self._ends_at - time.monotonic())
    return "" if left is None else f"ETA {clock(left)}"

  def _tables(self, room: int) -> Iterator[Table]:
    rows = dict(sorted(self._rows.items(), key=lambda row: row[0] != "train"))
    names = dict.fromkeys(k for _, values in rows.values() for k in values)
    names = [name for name in names if name not in ("eta_secs", "elapsed_secs")][: max(room, 0)]
    if not names:
      return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("step", style="dim", no_wrap=True)
    for split, (step, _) in rows.items():
      table.add_column(f"{split} {step}", justify="right", no_wrap=True)
    for name in names:
      cells = (shown(name, v[name]) if name in v else "" for _, v in rows.values())
      table.add_row(label(name), *cells)
    yield table


class _Lines(RenderHook):
  """Lines of a terminal that are drawn again and again.

  A terminal that becomes narrower breaks the lines it shows, and one that becomes lower scrolls
  them out of sight, from where some bring them back. `Live` knows of neither and would leave them.
  """

  def __init__(self, console: Console):
    self.content: list = []
    self._console, self._size = console, console.size
    self._widths: list[int] = []  # of the lines that stand there
    self._hidden: list[int] = []  # of those above them that have scrolled out of sight

  def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
    lines = []
    for part in self.content:
      # A character less than there are: terminals differ in what a full line does.
      lines += console.render_lines(part, options.update(width=options.max_width - 1), pad=False)
    texts = ["".join(segment.text for segment in line).rstrip() for line in lines]
    self._widths = [Text(text).cell_len for text in texts]
    for line, width in zip(lines, self._widths, strict=True):
      yield from Segment.adjust_line_length(line, width)
      yield Segment.line()

  def process_renderables(self, renderables: list) -> list:
    """Takes what `Live` made of a print: go up as many lines as are drawn, print, draw."""
    _, *printed, _ = renderables
    clear = self._clear_after_resize()
    if not all(isinstance(x, Control) for x in printed):
      self._hidden = []  # they are not above the drawn lines any more, but above the printed ones
    return [clear, *renderables]

  def _clear_after_resize(self) -> Control:
    """Returns what goes up the lines that `Live` does not know of, and clears them."""
    size = self._console.size
    if size == self._size:
      return Control()
    self._size = size
    widths = [*self._hidden, *self._widths]
    rows = [max(1, math.ceil(width / size.width)) for width in widths]
    out, self._hidden = sum(rows) - size.height, []  # rows out of sight, which are not cleared
    for width, height in zip(widths, rows, strict=True):
      if out > 0:
        self._hidden.append(min(width, out * size.width))
      out -= height
    up = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
    return Control(*up * (sum(rows) - len(self._widths)))


def metrics_line(head: str, values: Mapping[str, float | None], width: int) -> str:
  """Returns metrics in a line, without the last ones if it gets longer than `width`.

  >>> metrics_line("train step 3/9", {"loss": 1.5, "eta_secs": 6.0}, 50)
  'train step 3/9 | loss 1.5000 nats | ETA 0:00:06'
  """
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
  began = time.monotonic()

  def now() -> Activity:
    return Activity(what, time.monotonic() - began)

  with Display(console or terminal.console(stderr=True), now, transient=True) as display:
    yield display


def starting() -> contextlib.AbstractContextManager:
  """Shows on a terminal that a program starts."""
  on_terminal = terminal.console(stderr=True).is_interactive
  return doing("starting") if on_terminal else contextlib.nullcontext()
