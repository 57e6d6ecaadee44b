"""Runs the parts of a build on an engine: this machine, Apache Beam or Ray.

To add an engine, write a function (work, parts, options) and an entry in RUNNERS. It has to call
`work(part)` for each part, in any order, in any process that sees the same files and folder.
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
  """One kind of piece of the parts of a build, for processes elsewhere."""

  folder: Path  # of the unfinished build
  plan: Plan = dataclasses.field(repr=False)
  kind: str  # a key of parts.STAGES
  modules: list[str] = dataclasses.field(default_factory=registry.origins)  # that register sources

  def __call__(self, part: int) -> None:
    """Does the piece of a part, unless it is done.

    The message of an error is in a file, too, because engines wrap errors in their own.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # an engine gives each core a part
    collects = gc.isenabled()
    gc.disable()  # a build leaves no cycles, and looking for them takes a seventh of the time
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
  """Turns what an engine raises into a DataError of one line."""

  @functools.wraps(run)
  def explained(work: PartWork, todo: list[int], options: Sequence[str]) -> None:
    for path in work.folder.glob("*.error"):
      path.unlink()
    try:
      run(work, todo, options)
    except ModuleNotFoundError as error:
      raise DataError(f"{error}: pip install 'electra_jax[{run.__name__}]'") from None
    except Exception as error:
      if type(error) is DataError:  # not a subclass that an engine made
        raise
      found = sorted(path.read_text("utf-8") for path in work.folder.glob("*.error"))
      reason = found[0] if found else f"{type(error).__name__}: {one_line(error):.500}"
      raise DataError(f"{reason} (--runner={run.__name__}; the parts that are done stay)") from None

  return explained


def local(work: PartWork, todo: list[int], options: Sequence[str]) -> None:
  """Builds on this machine: one part after the other, each on all cores."""
  if options:
    raise ValueError(f"{options[0]!r}: only other runners take options after --")
  parts.do_stage(work.kind, work.folder, work.plan, todo)


@_explained
def beam(work: PartWork, todo: list[int], options: Sequence[str]) -> None:
  """Builds on Apache Beam, whose options say where: Dataflow, Flink, Spark, or processes here."""
  import apache_beam
  from apache_beam.options.pipeline_options import PipelineOptions

  with apache_beam.Pipeline(options=PipelineOptions(list(options))) as pipeline:
    # Reshuffled, because an engine may run what follows Create in one process.
    numbers = pipeline | apache_beam.Create(todo) | apache_beam.Reshuffle()
    _ = numbers | apache_beam.Map(work)


@_explained
def ray(work: PartWork, todo: list[int], options: Sequence[str]) -> None:
  """Builds on Ray: on the cluster of RAY_ADDRESS, or on processes of this machine.

  Ray stays started until the process ends: the two stages of a build need it.
  """
  import ray as engine

  if options:
    raise DataError(f"{options[0]!r}: Ray takes no options here, set RAY_ADDRESS")

  if not engine.is_initialized():
    engine.init(log_to_driver=False, include_dashboard=False)
  run = engine.remote(lambda part: work(part))
  started = [run.remote(part) for part in todo]
  engine.wait(started, num_returns=len(started))  # where one fails, the others are finished
  engine.get(started)


RUNNERS: dict[str, Runner] = {"local": local, "beam": beam, "ray": ray}
