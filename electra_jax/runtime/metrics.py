"""What a run says about itself: sums over a window, and numbers as text.

No TensorFlow. Nothing here knows an objective: the terms that a step reports are added up, divided
and shown, whatever they are called. By their names, terms ending in `_scores` are histograms
[2, bins] of a score for two classes and are shown as the area under the ROC curve (`_auc`), and
terms ending in `_loss` are in nats.
"""

import collections
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from electra_jax.runtime.parallel import Packed

# Shown as they are at the last step of a window; every other number of a step is averaged over it.
LAST = ("learning_rate", "param_norm")
# How fast it went: the numbers of a line that differ between two runs of the same thing.
TIMING = (
  "sequences_per_sec",
  "tokens_per_sec",
  "mfu",
  "eta_secs",
  "elapsed_secs",
  "fastest_host_step_ms",
  "slowest_host_step_ms",
  "slowest_host",
)
PERCENT = ("accuracy", "recall", "precision", "replaced", "copied", "mfu")


class NotFiniteError(ArithmeticError):
  """A number is NaN or infinite.

  Fields:
    step: of training in which it came up; None where that was an evaluation.
  """

  step: int | None = None


def auc(scores: np.ndarray) -> float | None:
  """Returns the area under the ROC curve of a histogram of scores; ties count half.

  Args:
    scores: [2, bins], how many negatives (row 0) and positives (row 1) fall into each bin, bins in
      the order of the score.

  >>> auc(np.array([[3, 1], [1, 3]]))  # of 16 pairs, 9 are in order and 6 tie
  0.75
  """
  negatives, positives = np.asarray(scores, np.float64)
  if not negatives.sum() or not positives.sum():
    return None
  below = np.cumsum(negatives) - negatives
  return float((positives * (below + negatives / 2)).sum() / positives.sum() / negatives.sum())


def means(terms: Mapping[str, tuple]) -> dict[str, float | None]:
  """Returns total / count of each term, None where nothing was counted; histograms as `_auc`."""
  values = {}
  for name, (total, count) in terms.items():
    if np.ndim(total) == 0:
      values[name] = float(total) / float(count) if count else None
    elif name.endswith("_scores"):
      values[name.removesuffix("_scores") + "_auc"] = auc(total)
  return values


class Window:
  """Adds up what the steps report between two lines, in float64 and in the order of the steps.

  Reading a number from the device waits for it, so the last `ahead` steps stay unread: the device
  has the next step queued while the host reads an old one. Each is checked when it is read.

  The sums are part of a checkpoint (`state_dict`), so that a line is the same bit for bit whether
  or not the run was interrupted inside its window.
  """

  def __init__(self, saved: dict | None = None, *, ahead: int = 2):
    self._ahead = ahead
    self._unread = collections.deque()
    self._sum = np.array(saved["sum"]) if saved else np.zeros(0)
    self.steps = saved["steps"] if saved else 0

  def add(self, step: int, metrics: Packed) -> None:
    """Takes the metrics of a step (numbered from 1), still on the device."""
    self._unread.append((step, metrics))
    while len(self._unread) > self._ahead:
      self._read()

  def _read(self) -> None:
    step, self._newest = self._unread.popleft()
    self._numbers = self._newest.read()
    try:
      check_finite(f"step {step}", self._newest, self._numbers)
    except NotFiniteError as error:
      error.step = step
      raise
    if self._sum.size != self._numbers.size:  # the first step, or the first of another objective
      self._sum, self.steps = np.zeros_like(self._numbers), 0
    self._sum += self._numbers
    self.steps += 1

  def drain(self) -> None:
    """Waits for every step so far, and checks it."""
    while self._unread:
      self._read()

  def close(self) -> dict[str, float | None]:
    """Returns the values of the window, which has had a step, and starts the next one."""
    self.drain()
    sums, last = self._newest.unpack(self._sum), self._newest.unpack(self._numbers)
    terms = means(sums.pop("terms"))
    scalars = {k: float(last[k]) if k in LAST else float(v) / self.steps for k, v in sums.items()}
    self._sum, self.steps = np.zeros(0), 0
    return losses_first({**terms, **scalars})

  def state_dict(self) -> dict:
    """Returns the sums so far as JSON; floats survive it exactly."""
    self.drain()
    return {"sum": self._sum.tolist(), "steps": self.steps}


def check_finite(where: str, packed: Packed, numbers: np.ndarray) -> None:
  """Stops with the place and the names if some of the numbers of `packed` are NaN or infinite."""
  if np.isfinite(numbers).all():
    return
  bad = {}
  for path, value in jax.tree.leaves_with_path(packed.unpack(numbers)):
    if not np.isfinite(value).all():
      name = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)][-1]
      bad.setdefault(name, np.asarray(value).flat[0])
  listed = ", ".join(f"{name} = {value}" for name, value in bad.items())
  raise NotFiniteError(f"{where}: {listed}")


def evaluate(eval_step, params, batches, step: int) -> dict[str, float | None]:
  """Returns the values of `eval_step(params, batch)`, its terms summed over the batches.

  Raises:
    NotFiniteError: naming `step`, the number of steps that the parameters have seen.
  """
  sums = 0.0
  for batch in batches:
    packed = eval_step(params, batch)
    numbers = packed.read()
    check_finite(f"evaluation after step {step}", packed, numbers)
    sums = sums + numbers
  return losses_first(means(packed.unpack(sums)))


def losses_first(values: dict) -> dict:
  """Returns the values in the order in which they are shown."""
  return dict(sorted(values.items(), key=lambda item: not item[0].endswith("loss")))


# Numbers as text.


def shown(name: str, value: float | None) -> str:
  """Returns a number as text, with its unit.

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
  """Returns a metric's name as shown: `tokens_per_sec` is tokens, its number says per second."""
  short = name.removesuffix("_per_sec").removesuffix("_secs")
  return short.upper() if short in ("eta", "mfu") else short.replace("_", " ")


# Read back, and on the screen.


def read_history(path: Path) -> list[dict]:
  """Returns the lines of metrics.jsonl; a last line that was cut off is left out."""
  lines = []
  for text in path.read_text().splitlines() if path.exists() else ():
    try:
      lines.append(json.loads(text))
    except json.JSONDecodeError:
      break
  return lines


class Display:
  """A progress bar with the newest numbers on a terminal; one plain line each elsewhere.

  Use as a context manager, so that the terminal is whole again whatever happens.
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
    """Shows the newest numbers of a split ("train", "heldout")."""
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


class Stopwatch:
  """Speed between two lines, without the time that evaluations and checkpoints take.

  Args:
    flops_per_step: matmul FLOPs of a step, over all devices.
    peak: FLOP/s of all devices together.
  """

  def __init__(self, batch_size: int, seq_length: int, flops_per_step: float, peak: float):
    self._batch_size, self._seq_length = batch_size, seq_length
    self._flops, self._peak = flops_per_step, peak
    self._started, self._spent, self._since, self._steps = time.perf_counter(), 0.0, None, 0

  def start(self) -> None:
    """Starts, or goes on after a pause."""
    self._since = time.perf_counter()

  def pause(self) -> None:
    """Stops counting."""
    if self._since is not None:
      self._spent += time.perf_counter() - self._since
      self._since = None

  def step(self) -> None:
    """Counts a step."""
    self._steps += 1

  def read(self, steps_left: int) -> dict[str, float | None]:
    """Returns the speed since the last reading, and starts anew."""
    self.pause()
    rate = self._steps / self._spent if self._steps and self._spent else math.nan
    self._spent, self._steps = 0.0, 0
    self.start()
    values = {
      "sequences_per_sec": rate * self._batch_size,
      "tokens_per_sec": rate * self._batch_size * self._seq_length,
      "mfu": rate * self._flops / self._peak,
      "eta_secs": steps_left / rate,
      "elapsed_secs": time.perf_counter() - self._started,
    }
    return {k: v if math.isfinite(v) else None for k, v in values.items()}
