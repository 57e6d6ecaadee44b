"""Experiment trackers by name (`log.trackers`): TensorBoard, Weights & Biases, MLflow.

Each gets the configuration, and the numbers of metrics.jsonl as `train/NAME` and `heldout/NAME`.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from electra_jax.runtime.foreign import read_json
from electra_jax.runtime.workdir import naming, replacing

IDS_FILE = "trackers.json"  # {tracker: id of its run}, which a resumed run continues
PROJECT = "electra_jax"


class TrackerError(ValueError):
  """A tracker failed; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Start:
  """The start or resumption of a run, for a tracker."""

  folder: Path  # the run's
  step: int
  resumed: bool
  config: Mapping  # flat

  def remembered(self, tracker: str, make: Callable[[], str]) -> str:
    """Returns the run's saved id in a tracker, or a new id if the run starts over.

    Raises TrackerError if the file of ids is damaged.
    """
    path = self.folder / IDS_FILE
    try:
      ids = read_json(path) if path.exists() else {}
    except ValueError as error:
      raise TrackerError(f"{error}: delete it to begin new runs in trackers") from None
    if not self.resumed or tracker not in ids:
      ids[tracker] = make()
      with replacing(path) as temporary:
        temporary.write_text(json.dumps(ids) + "\n", "utf-8")
    return ids[tracker]


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
  """Lets imports of a module fail, unless it is imported already."""
  hidden = sys.modules.setdefault(module, None) is None
  try:
    yield
  finally:
    if hidden:
      del sys.modules[module]


class Tracker(Protocol):
  """The interface of a tracker; one whose methods raise anything is dropped."""

  def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
    """Adds the numbers of a line."""

  def close(self, failed: bool) -> None:
    """Ends the tracker's run, as failed or finished."""


class Events:
  """TensorBoard event files, written in the calling thread.

  tensorboardX's writer uses a thread that a full disk ends, and then waits for it forever.
  """

  def __init__(self, start: Start):
    with _without("torch"):  # tensorboardX imports it where it is installed: seconds of a start
      from tensorboardX import event_file_writer, summary
      from tensorboardX.proto import event_pb2

    folder = start.folder / "tensorboard"
    folder.mkdir(parents=True, exist_ok=True)
    self._folder, self._event, self._scalar = folder, event_pb2.Event, summary.scalar
    # START hides earlier events of steps that are trained again.
    session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    with naming(folder):
      self._writer = event_file_writer.EventsWriter(str(folder / "events"), f".{time.time_ns()}")
      self._writer.write_event(self._event(step=start.step + 1, session_log=session))

  def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
    with naming(self._folder):
      for name, value in _numbers(split, values).items():
        event = self._event(wall_time=time.time(), step=step, summary=self._scalar(name, value))
        self._writer.write_event(event)
      self._writer.flush()

  def close(self, failed: bool) -> None:
    self._writer.close()


class Wandb:
  """A run in Weights & Biases: WANDB_PROJECT; WANDB_MODE=offline writes to the run's folder.

  Logs the step as a metric, because wandb drops lines below its last step, which a resumed run may
  repeat.
  """

  def __init__(self, start: Start):
    import wandb

    self._errors = (wandb.Error, OSError)  # OSError: wandb's process has ended
    with _failing("wandb", wandb.Error):
      self._run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        dir=start.folder,
        name=start.folder.name,
        id=start.remembered("wandb", lambda: uuid.uuid4().hex[:16]),
        resume="allow",
        config=dict(start.config),
        settings=wandb.Settings(console="off", silent=True),
      )
      self._run.define_metric("*", step_metric="step")

  def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
    with _failing("wandb", self._errors):
      self._run.log({"step": step, **_numbers(split, values)})

  def close(self, failed: bool) -> None:
    with _failing("wandb", self._errors):
      self._run.finish(exit_code=int(failed))


class Mlflow:
  """A run in MLflow: at MLFLOW_TRACKING_URI, or else in the run's folder."""

  def __init__(self, start: Start):
    import mlflow
    from mlflow.entities import Metric

    # Recent versions of MLflow require this variable for plain files, without a server.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    self._metric, self._error = Metric, mlflow.exceptions.MlflowException
    place = os.environ.get("MLFLOW_TRACKING_URI", (start.folder.absolute() / "mlruns").as_uri())
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    with _failing("mlflow", self._error):
      self._client = mlflow.MlflowClient(place)
      self._run = start.remembered("mlflow", lambda: self._create(name, start))
      self._client.update_run(self._run, "RUNNING")

  def _create(self, experiment: str, start: Start) -> str:
    from mlflow.entities import Param

    found = self._client.get_experiment_by_name(experiment)
    number = found.experiment_id if found else self._client.create_experiment(experiment)
    run = self._client.create_run(number, run_name=start.folder.name).info.run_id
    params = [Param(k, str(v)) for k, v in start.config.items()]
    for first in range(0, len(params), 100):  # the largest batch
      self._client.log_batch(run, params=params[first : first + 100])
    return run

  def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
    now, numbers = int(1000 * time.time()), _numbers(split, values)
    with _failing("mlflow", self._error):
      batch = [self._metric(name, value, now, step) for name, value in numbers.items()]
      self._client.log_batch(self._run, metrics=batch)

  def close(self, failed: bool) -> None:
    with _failing("mlflow", self._error):
      self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


@dataclasses.dataclass(frozen=True)
class TrackerDef:
  """A tracker and its package; the extra of pyproject.toml has the tracker's name."""

  make: Callable[[Start], Tracker]
  package: str


TRACKERS = {
  "tensorboard": TrackerDef(Events, "tensorboardX"),
  "wandb": TrackerDef(Wandb, "wandb"),
  "mlflow": TrackerDef(Mlflow, "mlflow"),
}


def parse(text: str) -> Sequence[str]:
  """Parses "tensorboard,wandb"; raises ValueError if a name is unknown."""
  names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
  if unknown := [name for name in names if name not in TRACKERS]:
    raise ValueError(f"config.log.trackers: {unknown[0]!r} must be one of {', '.join(TRACKERS)}")
  return names


def check_installed(names: Sequence[str]) -> None:
  """Raises ValueError if a tracker's package is missing."""
  for name in names:
    spec = importlib.util.find_spec(TRACKERS[name].package)
    if spec is None or spec.loader is None:  # no loader: a folder of that name, such as wandb makes
      raise ValueError(
        f"config.log.trackers={name} needs the package {TRACKERS[name].package}:"
        f" pip install 'electra_jax[{name}]'"
      )


def _numbers(split: str, values: Mapping[str, float | None]) -> dict[str, float]:
  return {f"{split}/{name}": value for name, value in values.items() if value is not None}


@contextlib.contextmanager
def _failing(tracker: str, kind: type[Exception] | tuple[type[Exception], ...]) -> Iterator[None]:
  """Turns a tracker's exceptions into TrackerError."""
  try:
    yield
  except kind as error:
    raise TrackerError(f"{tracker}: {' '.join(str(error).split())}") from None


@contextlib.contextmanager
def dropping(what: str, warn: Callable[[str], None]) -> Iterator[None]:
  """Warns, in one line, of anything that a tracker, picture or report raises in the block."""
  try:
    yield
  except (Exception, SystemExit) as error:
    kind = "" if isinstance(error, TrackerError) else f"{what}: {type(error).__name__}: "
    warn(" ".join(f"{kind}{error}".encode(errors="replace").decode().split()))
