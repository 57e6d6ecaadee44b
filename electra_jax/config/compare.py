"""Compares configurations and refuses to resume a run whose defining fields have changed."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from electra_jax.config import schema
from electra_jax.config.files import load
from electra_jax.config.schema import RENAMED, REVALUED

# Fields that runs of a recipe share besides the defining ones: a vocabulary trained on other text
# has another hash.
OF_DATA = ("data.seq_length", "data.vocab_hash")
FLAGS = "jax"  # the group of JAX's flags in a saved configuration, `jax_flags.record`
LISTED = 8  # differing fields in an error message


def flatten(config: ConfigDict | dict) -> dict[str, Any]:
  """Returns {"group.field": value} in the order of the configuration.

  >>> flatten({"seed": 0, "train": {"steps": 10}})
  {'seed': 0, 'train.steps': 10}
  """
  flat = {}
  for name, value in config.items():
    if isinstance(value, ConfigDict | dict):
      flat.update({f"{name}.{inner}": v for inner, v in flatten(value).items()})
    else:
      flat[name] = value
  return flat


def upgrade(
  saved: dict[str, Any], rows: Mapping[str, schema.Row] = schema.PRETRAINING
) -> dict[str, Any]:
  """Converts a flat configuration saved by an earlier version to the fields of this version.

  >>> upgrade({"objective.rtd_weight": 50.0})["objective.discriminator_weight"]
  50.0
  >>> upgrade({"log.tensorboard": False})["log.trackers"]
  ''
  """
  earlier = {k: row.earlier for k, row in rows.items() if row.earlier is not schema.ALWAYS}
  fields = earlier | {RENAMED.get(field, field): value for field, value in saved.items()}
  for field, values in REVALUED.items():
    if field in fields:
      fields[field] = values.get(fields[field], fields[field])
  return fields


def changed_from_base(config: ConfigDict) -> dict[str, tuple[Any, Any]]:
  """Returns {field: (value in base.py, value here)} for the fields that differ from base.py."""
  base = flatten(load("base.py"))
  return {k: (base.get(k), v) for k, v in flatten(config).items() if base.get(k) != v}


def recipe(flat: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of a flat configuration that are equal for all seeds of a recipe.

  >>> recipe({"seed": 1, "data.seq_length": 128, "train.steps": 10, "model.unroll": 4})
  {'data.seq_length': 128, 'train.steps': 10}
  """
  return {
    k: v
    for k, v in flat.items()
    if k in OF_DATA or (k not in ("seed", *schema.HASHES) and _defines(k))
  }


def _defines(field: str) -> str | None:
  """Returns `Row.defines` of a field; RUN for an unknown field of a group with defining fields."""
  row = (schema.PRETRAINING | schema.HASHES).get(field)
  if row is not None:
    return row.defines
  group = f"{field.split('.')[0]}."
  others = (row for name, row in schema.PRETRAINING.items() if name.startswith(group))
  return schema.RUN if any(row.defines for row in others) else None


def differences(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
  """Returns {field: (saved, current)} of the defining fields that differ between two runs.

  `saved` and `current` are flat configurations with `schema.HASHES` and JAX's flags, which differ
  only if both have them: earlier versions of this package and other versions of JAX have fewer.
  """
  both = {k for k in saved if k.startswith(f"{FLAGS}.") and k in current}
  names = [k for k in {**saved, **current} if _defines(k) or k in both]
  pairs = {k: (saved.get(k), current.get(k)) for k in names}
  paths = schema.names(is_path=True)
  return {
    k: (old, new)
    for k, (old, new) in pairs.items()
    if old != new
    and not (k in paths and old and new and Path(old).absolute() == Path(new).absolute())
  }


def flags(saved: Mapping[str, Any]) -> dict[str, Any]:
  """Returns JAX's flags in a saved configuration, flat; {} for one of an earlier version.

  >>> flags({"seed": 1, "jax": {"softmax_custom_jvp": False}})
  {'jax.softmax_custom_jvp': False}
  """
  return flatten({FLAGS: saved.get(FLAGS, {})})


def unknown_field(field: str, known: Sequence[str], prefix: str = "") -> str:
  """Returns the message for an unknown field, with its new name or the closest one."""
  if field in RENAMED:
    return f"{prefix}{field} was renamed to {prefix}{RENAMED[field]}"
  last = field.rsplit(".", 1)[-1]
  close = difflib.get_close_matches(field, known, n=1, cutoff=0.7)
  alike = [name for name in known if name.rsplit(".", 1)[-1] == last]
  close = close or difflib.get_close_matches(field, alike, n=1, cutoff=0.0)
  close = close or difflib.get_close_matches(field, known, n=1, cutoff=0.0)
  return f"unknown field {prefix}{field}; did you mean {prefix}{close[0]}?"


def _names(allowed: str) -> list[str]:
  return [name.strip() for name in allowed.split(",") if name.strip()]


def allows(allowed: str, field: str) -> bool:
  """Returns whether config.allow_config_change allows a field to differ in a resumed run.

  >>> allows("train.steps, data", "data.manifest"), allows("", "data.manifest")
  (True, False)
  """
  return any(field == name or field.startswith(f"{name}.") for name in _names(allowed))


def refuse_other_run(saved: dict, current: dict, allowed: str, workdir: str | Path) -> list[str]:
  """Raises ValueError if a defining field of a run has changed; returns the allowed changes.

  Changes of array names or shapes and fields of a later version are never allowed.

  Args:
    saved, current: flat configurations with `schema.HASHES`.
    allowed: comma-separated fields or groups of fields that may differ.
  """
  for name in _names(allowed):
    groups = {field.rsplit(".", 1)[0] for field in current}
    if name not in current and name not in groups:
      raise ValueError(f"allow_config_change: {unknown_field(name, [*current, *groups])}")
  found = differences(upgrade(saved), current)
  fixed = {field for field in found if _defines(field) == schema.SHAPES or field not in current}
  refused = [field for field in found if field in fixed or not allows(allowed, field)]
  if refused:
    listed = ", ".join(f"{f} was {found[f][0]!r}, is {found[f][1]!r}" for f in refused[:LISTED])
    if len(refused) > LISTED:
      listed += f" and {len(refused) - LISTED} more fields differ"
    anyway = f", or resume anyway with --config.allow_config_change={','.join(refused)}"
    hint = "" if fixed else anyway
    raise ValueError(f"{workdir} holds another run: {listed}; use another --workdir{hint}")
  return list(found)
