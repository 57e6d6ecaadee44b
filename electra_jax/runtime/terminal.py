"""Terminal output: metrics with units, and a progress bar."""

from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PERCENT = ("accuracy", "recall", "precision", "replaced", "copied", "mfu")


def console() -> Console:
  """Returns the console of a program: lines that are too long are wrapped by the terminal."""
  return Console(highlight=False, markup=False, soft_wrap=True)


def shown(name: str, value: float | None) -> str:
  """Formats a metric with its unit.

  >>> shown("rtd_loss", 0.41234), shown("rtd_recall", 0.5), shown("rtd_auc", None)
  ('0.4123 nats', '50.0 %', '-')
  """
  if value is None:
    return "-"
  if name.endswith(("loss", "entropy")):
    return f"{value:.4f} nats"
  if name.endswith("_secs"):
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
  if name.endswith(PERCENT):
    return f"{100 * value:.1f} %"
  if name.endswith("_per_sec"):
    return f"{value:,.0f}/s" if value >= 100 else f"{value:.1f}/s"
  return f"{value:.2e}" if value and not 1e-2 <= abs(value) < 1e5 else f"{value:.4g}"


def label(name: str) -> str:
  """Returns a metric's display name: `tokens_per_sec` is tokens, as its value has the unit."""
  short = name.removesuffix("_per_sec").removesuffix("_secs")
  return short.upper() if short in ("eta", "mfu") else short.replace("_", " ")


class Display:
  """A progress bar with the newest metrics on a terminal; plain lines elsewhere.

  As a context manager it restores the terminal on any exit.
  """

  def __init__(self, start_step: int, steps: int, console: Console | None = None):
    self.console = console or Console(highlight=False, soft_wrap=True)
    self._steps = steps
    self._rows: dict[str, tuple[int, Mapping]] = {}
    self._live = None
    if self.console.is_terminal:
      columns = (BarColumn(None), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
      self._progress = Progress(*columns, TextColumn("{task.fields[eta]}"), expand=True)
      self._task = self._progress.add_task("", total=steps, completed=start_step, eta="")
      self._live = Live(self._view(), console=self.console, refresh_per_second=4)

  def __enter__(self):
    if self._live:
      self._live.start()
    return self

  def __exit__(self, *unused):
    if self._live:
      self._live.stop()

  def advance(self, step: int) -> None:
    """Moves the bar."""
    if self._live:
      self._progress.update(self._task, completed=step)

  def show(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
    """Shows the newest metrics of a split ("train", "heldout")."""
    if not self._live:
      numbers = " | ".join(f"{label(k)} {shown(k, v)}" for k, v in values.items())
      self.console.print(f"{split} step {step}/{self._steps} | {numbers}")
      return
    self._rows[split] = (step, values)
    if "eta_secs" in values:
      self._progress.update(self._task, eta=f"ETA {shown('eta_secs', values['eta_secs'])}")
    self._live.update(self._view())

  def _view(self) -> Group:
    names = list(dict.fromkeys(k for _, values in self._rows.values() for k in values))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("", style="dim")
    for split, (step, _) in self._rows.items():
      table.add_column(f"{split}, step {step}", justify="right")
    for name in names:
      if name not in ("eta_secs", "elapsed_secs"):
        row = (shown(name, v[name]) if name in v else "" for _, v in self._rows.values())
        table.add_row(label(name), *row)
    return Group(table, self._progress) if names else Group(self._progress)
