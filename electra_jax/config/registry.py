"""A user's entries in the tables of objectives, heads, tasks and so on.

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
from typing import Any

NOTEBOOK = "__main__"
# {kind: the table of its entries}
KINDS = {
  "field": "config.schema.PRETRAINING",
  "objective": "core.objectives.OBJECTIVES",
  "generator": "core.generators.GENERATORS",
  "tie": "core.networks.TIES",
  "head": "core.heads.HEADS",
  "block": "core.encoder.BLOCKS",
  "norm": "core.layers.NORMS",
  "feed_forward": "core.layers.FEED_FORWARDS",
  "positions": "core.transformer_config.POSITIONS",
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

  Your entry is replaced if you register it again, as in a notebook's cell.

  Args:
    kinds: {name: entry} for each of KINDS; docs/guides/extend.md has examples.

  Raises:
    ValueError: a kind is unknown, or a name is the project's own.
    TypeError: an entry has another type than the project's.
  """
  place = _place(sys._getframe(1).f_globals)
  for kind, entries in kinds.items():
    known = table(kind)
    own = {name: entry for name, entry in known.items() if (kind, name) not in _origins}
    example = next(iter(own.values()))
    for name, entry in entries.items():
      if name in own:
        raise ValueError(f"{kind} {name!r} is the project's own: take another name")
      if kind == "field" and not name.startswith("objective."):
        raise ValueError(f"field {name!r} must be objective.NAME, of an objective's own_fields")
      if not (callable(entry) if callable(example) else isinstance(entry, type(example))):
        wanted = "a function" if callable(example) else type(example).__name__
        raise TypeError(f"{kind} {name!r} must be {wanted}, got {type(entry).__name__}")
    known.update(entries)
    _origins.update({(kind, name): place for name in entries})


def table(kind: str) -> dict[str, Any]:
  """Returns the entries of a kind; raises ValueError for an unknown kind."""
  if kind not in KINDS:
    close = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown kind {kind!r}; did you mean {close!r}?")
  module, _, name = KINDS[kind].rpartition(".")
  return getattr(importlib.import_module(f"electra_jax.{module}"), name)


def _place(names: Mapping[str, Any]) -> str:
  """Returns the name of the module with these globals, or its file if it has no name to import."""
  name = names.get("__name__", NOTEBOOK)
  if name != NOTEBOOK and name in sys.modules:
    return name
  file = names.get("__file__", "")
  return file if os.path.isfile(file) else NOTEBOOK  # a program read from stdin has "<stdin>"


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
  """Returns the modules and files with entries, for `import_module` in another process."""
  return sorted({place for place in _origins.values() if place != NOTEBOOK})


def names(kind: str) -> list[str]:
  """Returns the names of a user's entries of a kind."""
  return [name for of, name in _origins if of == kind]


def origin(kind: str, name: str) -> str | None:
  """Returns the module or file that registered an entry, None for one of the project's own."""
  return _origins.get((kind, name))


def check(saved: Mapping[str, Mapping[str, str]], path: str | Path) -> None:
  """Checks that entries, {kind: {name: module or file}}, are there.

  Raises:
    ValueError: one is missing; the message names its module and `path`, which needs it.
  """
  for kind, entries in saved.items():
    for name, place in entries.items():
      if name not in table(kind):
        of_file = f"give --import={place}"
        hint = "it was a notebook's, register it again" if place == NOTEBOOK else of_file
        raise ValueError(f"{path} needs the {kind} {name!r}: {hint}")
