"""Decides where a run ends: at train.steps or after train.minutes, whichever comes first."""

import bisect
import time

import numpy as np
from ml_collections import ConfigDict

from electra_jax.config import specs
from electra_jax.monitor.goodput import Goodput
from electra_jax.pretrain.run import Horizon
from electra_jax.runtime import parallel, processes

CLOSING_SECS = 3.0  # to draw the curves, print the results and exit
FEWEST = 5  # steps to time; the host may be two steps ahead of the device
NOT_STEPS = ("evaluation", "save", "compile", "restore", "start")  # activities of `Goodput`
MARGIN = 0.02  # allowed slowdown of the steps of the decay


class Clock:
  """The horizon of a run and the time left.

  With train.minutes the horizon is open, train.steps without a decay, until only the decay's share
  of the time is left. It is then decided once, from the measured seconds of a step, an evaluation
  and a save; later steps do not depend on time. All processes call `is_due` and `decide` together,
  with process 0's clock.

  Args:
    goodput: counts the seconds of steps and, separately, of NOT_STEPS.
    started: `time.monotonic()` when the program started.
    saved: `state_dict` of the checkpoint that the run resumes from, if any.

  Fields:
    horizon: decided or, with train.minutes, still open (`is_open`).
    was_decided: whether an earlier start decided it.
    placed: the horizon on the devices, for the step.
  """

  def __init__(
    self, config: ConfigDict, goodput: Goodput, started: float, saved: dict | None = None
  ):
    c, saved = config, saved or {"secs": 0.0, "horizon": None}
    self._config, self._goodput = c, goodput
    self._origin = started - saved["secs"]
    self._budget = 60 * (c.train.minutes or 0)
    self._most, self._decay_most = c.train.steps, specs.make_optimizer_config(c).decay_steps
    if self._budget:
      self._decay_most = max(1, self._decay_most)
    self._next_check, self._first, self._reserve = 0, (0, 0.0), CLOSING_SECS
    self.is_open = bool(self._budget) and saved["horizon"] is None
    self.was_decided = saved["horizon"] is not None
    whole = self._most, 0 if self.is_open else self._decay_most
    self._set(Horizon(*(saved["horizon"] or whole)))

  def _set(self, horizon: Horizon) -> None:
    self.horizon = horizon
    self.placed = parallel.replicate(Horizon(*map(np.int32, horizon)))

  def state_dict(self) -> dict | None:
    """Returns the JSON for checkpoints of a run with train.minutes."""
    secs, horizon = time.monotonic() - self._origin, None if self.is_open else list(self.horizon)
    return {"secs": secs, "horizon": horizon} if self._budget else None

  def secs_left(self) -> float:
    """Returns the seconds left of train.minutes."""
    return self._budget - (time.monotonic() - self._origin)

  def restart(self, step: int) -> None:
    """Starts to measure the seconds of a step; call it after `step`, which compiled."""
    if self._first == (0, 0.0):
      # Time for the evaluations before and after the decay, each as long as the first.
      self._reserve = CLOSING_SECS + 2 * self._goodput.secs().get("evaluation", 0.0)
    self._first = step, self._step_secs()

  def _step_secs(self) -> float:
    return sum(secs for name, secs in self._goodput.secs().items() if name not in NOT_STEPS)

  def _secs_a_step(self, done: int) -> float:
    step, secs = self._first
    return (self._step_secs() - secs) / max(done - step, 1)

  def is_due(self, done: int) -> bool:
    """Returns whether the decay begins after step `done`.

    Raises:
      ValueError: no time is left for the decay.
    """
    steps = self._most - self._decay_most - done
    early = done < max(self._next_check, self._first[0] + FEWEST)
    if not self.is_open or done == self._most or (early and steps > 0):
      return False
    mine = [self.secs_left(), self._secs_a_step(done), self._reserve]
    left, pace, reserve = processes.broadcast_from_0(mine)
    self._refuse_if_late(left, done)
    secs = left - reserve - self._config.optimizer.decay_frac * self._budget
    # Half-way to the decay, so that processes rarely wait for process 0's clock.
    is_due = secs <= 0 or steps <= 0
    self._next_check = done + (1 if is_due else max(1, min(int(secs / pace / 2), steps)))
    return is_due

  def decide(self, done: int, evaluation_secs: float, save_secs: float) -> None:
    """Sets the horizon: as many steps after `done` as the time allows.

    Args:
      evaluation_secs, save_secs: the expected seconds of the last evaluation and the last save.

    Raises:
      ValueError: the time allows no step.
    """
    mine = [self.secs_left(), self._secs_a_step(done), evaluation_secs, save_secs]
    left, pace, evaluation, saving = processes.broadcast_from_0(mine)
    c = self._config

    def secs(steps: int) -> float:  # of these steps and the end of the run
      last = done + steps - 1
      evaluations = c.eval.every_steps and last // c.eval.every_steps - done // c.eval.every_steps
      saves = last // c.checkpoint.every_steps - done // c.checkpoint.every_steps
      training = steps * pace * (1 + MARGIN)
      return training + (evaluations + 1) * evaluation + (saves + 1) * saving + CLOSING_SECS

    steps = bisect.bisect_right(range(1, self._most - done + 1), left, key=secs)
    self._refuse_if_late(steps, done)
    self._set(Horizon(done + steps, steps))
    self.is_open = False

  def _refuse_if_late(self, left: float, done: int) -> None:
    if left <= 0:
      raise ValueError(
        f"raise config.train.minutes={self._config.train.minutes:g}: at step {done:,}, after"
        f" {self._budget - self.secs_left():.0f} of {self._budget:.0f} s, no time is left for the"
        f" decay, the last evaluation and the last save ({self._goodput.summary()})"
      )
