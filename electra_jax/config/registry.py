"""Entries of a user's own in the tables of objectives, heads, tasks and so on.

A module registers them, and is named with --import=MODULE, or is the configuration file itself.
"""

import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

NOTEBOOK = "__main__"


class Kind(NamedTuple):
  """Where the entries of a kind are, and where a run names one."""

  table: str  # module and dict
  field: str | None = None  # of a pretraining configuration


KINDS = {
  "objective": Kind("core.objectives.OBJECTIVES", "objective.name"),
  "generator": Kind("core.generators.GENERATORS", "generator.kind"),
  "tie": Kind("core.networks.TIES", "generator.tie"),
  "head": Kind("core.heads.HEADS"),  # which objectives name
  "block": Kind("core.encoder.BLOCKS", "model.block"),
  "norm": Kind("core.layers.NORMS", "model.norm"),
  "feed_forward": Kind("core.layers.FEED_FORWARDS", "model.feed_forward"),
  "optimizer": Kind("core.optimizer.OPTIMIZERS", "optimizer.name"),
  "schedule": Kind("core.optimizer.SCHEDULES", "optimizer.schedule"),
  "source": Kind("data.sources.READERS"),
  "task": Kind("finetune.tasks.TASKS"),
  "task_head": Kind("core.task_network.HEAD_KINDS"),
  "metric": Kind("finetune.labels.METRICS"),
}
# {(kind, name): the module or file that registered it}
_origins: dict[tuple[str, str], str] = {}


def register(**kinds: Mapping[str, Any]) -> None:
  """Adds entries: register(objective={"shuffled": ObjectiveDef(...)}, schedule={...}).

  An entry of your own is replaced if it is registered again, as in a notebook's cell.

  Args:
    kinds: {name: entry} for each of KINDS; docs/guides/extend.md has examples.

  Raises:
    ValueError: a kind is unknown, or a name is the project's own.
    TypeError: an entry is of another type than the project's.
  """
  origin = _origin(sys._getframe(1).f_globals)
  for kind, entries in kinds.items():
    table = _table(kind)
    own = {name: entry for name, entry in table.items() if (kind, name) not in _origins}
    example = next(iter(own.values()))
    for name, entry in entries.items():
      if name in own:
        raise ValueError(f"{kind} {name!r} is the project's own: take another name")
      if not (callable(entry) if callable(example) else isinstance(entry, type(example))):
        wanted = "a function" if callable(example) else type(example).__name__
        raise TypeError(f"{kind} {name!r} must be {wanted}, got {type(entry).__name__}")
    table.update(entries)
    _origins.update({(kind, name): origin for name in entries})


def _table(kind: str) -> dict[str, Any]:
  if kind not in KINDS:
    close = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown kind {kind!r}; did you mean {close!r}?")
  module, _, name = KINDS[kind].table.rpartition(".")
  return getattr(importlib.import_module(f"electra_jax.{module}"), name)


def _origin(names: Mapping[str, Any]) -> str:
  """Returns the name of the module with these globals, or its file if it has no name to import."""
  name = names.get("__name__", NOTEBOOK)
  importable = name != NOTEBOOK and name in sys.modules
  return name if importable else names.get("__file__", NOTEBOOK)


def import_module(name: str) -> None:
  """Imports a module, also of the current folder, or executes a file FILE.py.

  Raises:
    ValueError: it cannot be imported; the message is one line.
  """
  try:
    if name.endswith(".py"):
      spec = importlib.util.spec_from_file_location(f"electra_jax_import_{Path(name).stem}", name)
      spec.loader.exec_module(importlib.util.module_from_spec(spec))
    else:
      with _current_folder():
        importlib.import_module(name)
  except Exception as error:  # whatever the module raises
    text = " ".join(str(error).split())
    raise ValueError(f"--import={name}: {type(error).__name__}: {text}") from error


@contextlib.contextmanager
def _current_folder() -> Iterator[None]:
  """Adds the current folder to those that Python imports from."""
  folder = os.getcwd()
  added = not {"", folder} & set(sys.path)
  if added:
    sys.path.insert(0, folder)
  try:
    yield
  finally:
    if added:
      sys.path.remove(folder)


def origins() -> list[str]:
  """Returns the modules and files with entries, for `import_module` in another process."""
  return sorted({origin for origin in _origins.values() if origin != NOTEBOOK})


def record(flat: Mapping[str, Any]) -> dict[str, dict[str, str]]:
  """Returns {kind: {name: its module or file}} of what a flat configuration names."""
  found: dict[str, dict[str, str]] = {}
  for (kind, name), origin in _origins.items():
    if (field := KINDS[kind].field) and flat[field] == name:
      found.setdefault(kind, {})[name] = origin
  return found


def check(saved: Mapping[str, Mapping[str, str]], path: str | Path) -> None:
  """Checks that the entries of a `record` are there.

  Raises:
    ValueError: one is not; the message names its module and `path`, which needs it.
  """
  for kind, entries in saved.items():
    for name, origin in entries.items():
      if name not in _table(kind):
        where = "a notebook: register it again" if origin == NOTEBOOK else f"--import={origin}"
        raise ValueError(f"{path} has the {kind} {name!r} of {where}")
