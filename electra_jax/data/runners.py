"""Runs the parts of a build on an engine: this machine, Apache Beam or Ray.

To add an engine, write a function (work, parts, options) that calls `work(part)` for each part, in
any order, in any process that sees the same files and folder, and add it to RUNNERS.
"""

import contextlib
import dataclasses
import functools
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from electra_jax.config import registry
from electra_jax.config.files import one_line
from electra_jax.data import parts
from electra_jax.data import plan as plans
from electra_jax.data.plan import Plan
from electra_jax.data.shards import DataError


@dataclasses.dataclass(frozen=True)
class PartWork:
  """A picklable function of a part that does one stage of a build."""

  folder: Path  # of the unfinished build
  plan: Plan = dataclasses.field(repr=False)
  kind: str  # a key of parts.STAGES
  modules: list[str] = dataclasses.field(default_factory=registry.origins)  # that register sources

  def __call__(self, part: int) -> None:
    """Does the stage for a part, unless it is done.

    Writes an error message to a file, too, because engines wrap exceptions.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # an engine gives each core a part
    collects = gc.isenabled()
    gc.disable()  # a build makes no cycles, and collection takes a seventh of the time
    try:
      for module in self.modules:
        registry.import_module(module)
      plan = plans.make(self.plan.config, self.folder, 1, self.plan.parts)
      parts.check_plan(self.folder, plan)
      parts.do_stage(self.kind, self.folder, plan, [part], 1)
    except (ValueError, OSError) as error:
      with contextlib.suppress(OSError):
        name = f"{parts.name_of(self.kind, part)}.error"
        (self.folder / name).write_text(one_line(error), "utf-8")
      raise
    finally:
      if collects:
        gc.enable()


Runner = Callable[[PartWork, list[int], Sequence[str]], None]


def _explained(run: Runner) -> Runner:
  """Turns an engine's exceptions into a DataError of one line."""

  @functools.wraps(run)
  def explained(work: PartWork, todo: list[int], options: Sequence[str]) -> None:
    for path in work.folder.glob("*.error"):
      path.unlink()
    try:
      run(work, todo, options)
    except ModuleNotFoundError as error:
      raise DataError(f"{error}: pip install 'electra_jax[{run.__name__}]'") from None
    except Exception as error:
      if type(error) is DataError:  # not an engine's subclass
        raise
      found = sorted(path.read_text("utf-8") for path in work.folder.glob("*.error"))
      reason = found[0] if found else f"{type(error).__name__}: {one_line(error):.500}"
      raise DataError(f"{reason} (--runner={run.__name__}; finished parts are kept)") from None

  return explained


def local(work: PartWork, todo: list[int], options: Sequence[str]) -> None:
  """Builds the parts on this machine one by one, each on all cores."""
  if options:
    raise ValueError(f"{options[0]!r}: --runner=local takes no options after --")
  parts.do_stage(work.kind, work.folder, work.plan, todo)


@_explained
def beam(work: PartWork, todo: list[int], options: Sequence[str]) -> None:
  """Builds on Apache Beam; `options` select Dataflow, Flink, Spark or local processes."""
  import apache_beam
  from apache_beam.options.pipeline_options import PipelineOptions

  with apache_beam.Pipeline(options=PipelineOptions(list(options))) as pipeline:
    # Without Reshuffle an engine may run all elements of Create in one process.
    numbers = pipeline | apache_beam.Create(todo) | apache_beam.Reshuffle()
    _ = numbers | apache_beam.Map(work)


@_explained
def ray(work: PartWork, todo: list[int], options: Sequence[str]) -> None:
  """Builds on Ray: on the cluster of RAY_ADDRESS, or in processes on this machine.

  Ray keeps running until the process ends, because both stages of a build need it.
  """
  import ray as engine

  if options:
    raise DataError(f"{options[0]!r}: --runner=ray takes no options after --; set RAY_ADDRESS")

  if not engine.is_initialized():
    engine.init(log_to_driver=False, include_dashboard=False)
  run = engine.remote(lambda part: work(part))
  started = [run.remote(part) for part in todo]
  engine.wait(started, num_returns=len(started))  # if one fails, the others still finish
  engine.get(started)


RUNNERS: dict[str, Runner] = {"local": local, "beam": beam, "ray": ray}
