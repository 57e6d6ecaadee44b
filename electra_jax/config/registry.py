"""A user's entries in the tables of objectives, heads, tasks and so on.

The configuration file registers them, or a module that is imported with --import=MODULE.
"""

import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NOTEBOOK = "__main__"
# {kind: table of its entries}
KINDS = {
  "field": "config.schema.PRETRAINING",
  "objective": "core.objectives.OBJECTIVES",
  "generator": "core.generators.GENERATORS",
  "tie": "core.networks.TIES",
  "head": "core.heads.HEADS",
  "block": "core.encoder.BLOCKS",
  "norm": "core.layers.NORMS",
  "feed_forward": "core.layers.FEED_FORWARDS",
  "positions": "core.positions.POSITIONS",
  "attention": "core.attention.ATTENTION",
  "optimizer": "core.optimizer.OPTIMIZERS",
  "schedule": "core.learning_rates.SCHEDULES",
  "source": "data.sources.READERS",
  "task": "finetune.tasks.TASKS",
  "task_head": "core.task_network.HEAD_KINDS",
  "head_layers": "core.task_heads.HEAD_LAYERS",
  "metric": "finetune.metrics.METRICS",
}
# {(kind, name): the module or file that registered it}
_origins: dict[tuple[str, str], str] = {}


def register(**kinds: Mapping[str, Any]) -> None:
  """Adds entries: register(objective={"shuffled": ObjectiveDef(...)}, schedule={...}).

  Registering a name again replaces your entry, e.g. in a notebook.

  Args:
    kinds: {name: entry} for any of KINDS; docs/guides/research.md has examples.

  Raises:
    ValueError: a kind is unknown, or a name is built in.
    TypeError: an entry has another type than the built-in ones.
  """
  place, tables = _place(sys._getframe(1).f_globals), {kind: table(kind) for kind in kinds}
  for kind, entries in kinds.items():
    known = tables[kind]
    built_in = {name: entry for name, entry in known.items() if (kind, name) not in _origins}
    example = next(iter(built_in.values()))
    for name, entry in entries.items():
      if name in built_in:
        raise ValueError(f"{kind} {name!r} is built in: choose another name")
      if kind == "field" and not name.startswith("objective."):
        raise ValueError(f"field {name!r} must be objective.NAME, for an objective's own_fields")
      if not (callable(entry) if callable(example) else isinstance(entry, type(example))):
        wanted = "a function" if callable(example) else type(example).__name__
        raise TypeError(f"{kind} {name!r} must be {wanted}, got {type(entry).__name__}")
  for kind, entries in kinds.items():  # all or none
    tables[kind].update(entries)
    _origins.update({(kind, name): place for name in entries})


def table(kind: str) -> dict[str, Any]:
  """Returns the entries of a kind; raises ValueError for an unknown kind."""
  if kind not in KINDS:
    close = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown kind {kind!r}; did you mean {close!r}?")
  module, _, name = KINDS[kind].rpartition(".")
  return getattr(importlib.import_module(f"electra_jax.{module}"), name)


def _place(names: Mapping[str, Any]) -> str:
  """Returns the name of the module with these globals, or its file if it cannot be imported."""
  name = names.get("__name__", NOTEBOOK)
  if name != NOTEBOOK and name in sys.modules:
    return name
  file = names.get("__file__", "")
  return file if os.path.isfile(file) else NOTEBOOK  # a program read from stdin has "<stdin>"


def import_module(name: str) -> None:
  """Imports a module, also from the current folder, or executes a file FILE.py.

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
  """Adds the current folder to Python's import path."""
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
  """Returns the modules and files that registered entries, for `import_module` elsewhere."""
  return sorted({place for place in _origins.values() if place != NOTEBOOK})


def names(kind: str) -> list[str]:
  """Returns the names of a user's entries of a kind."""
  return [name for of, name in _origins if of == kind]


def origin(kind: str, name: str) -> str | None:
  """Returns the module or file that registered an entry, None for a built-in one."""
  return _origins.get((kind, name))


def check(saved: Mapping[str, Mapping[str, str]], path: str | Path) -> None:
  """Checks that the entries {kind: {name: module or file}} are registered.

  Raises:
    ValueError: an entry that `path` needs is missing; the message names its module.
  """
  for kind, entries in saved.items():
    for name, place in entries.items():
      if name not in table(kind):
        of_file = f"add --import={place}"
        hint = "register it again, as in its notebook" if place == NOTEBOOK else of_file
        raise ValueError(f"{path} needs the {kind} {name!r}: {hint}")
