"""Compares configurations and refuses to resume a run whose defining fields have changed."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from electra_jax.config.files import load

# Groups whose fields define a run: it resumes only with the same values.
DEFINING = (
  "seed init_from init_step init_optimizer model generator objective optimizer train".split()
)
# Exceptions: fields of these groups that may change with the machine.
FREE = ("model.attention", "model.unroll", "model.remat", "train.accumulation", "optimizer.sharded")
# Fields that set the names and shapes of arrays: with other values no checkpoint can be restored.
SHAPES = (
  "model.hidden_size model.num_layers model.num_heads model.ffn_size model.embedding_size "
  "model.max_positions model.block model.norm model.feed_forward model.positions model.biases "
  "model.token_types model.qk_norm model.head_norm "
  "generator.kind generator.tie generator.width_multiplier generator.depth_multiplier "
  "objective.name optimizer.name optimizer.separate_optimizers data.vocab_hash"
).split()
# Fields with the path of another run or export.
SOURCES = ("init_from", "generator.init_from")
# Groups in which a run may differ from its reference (health.reference), and exceptions.
NOT_COMPARED = "seed data eval checkpoint health hosts profile log allow_config_change".split()
COMPARED = ("data.seq_length", "data.vocab_hash")  # on another text another vocabulary is trained
LISTED = 8  # differing fields in an error message
# Hashes of the shards, compared like fields although they are not in the configuration.
DATA_HASHES = ("data.manifest", "data.vocab_hash")

# {name in earlier versions: name of the field}.
RENAMED = {
  "objective.rtd_weight": "objective.discriminator_weight",
  "objective.rtd_weight_schedule": "objective.discriminator_weight_schedule",
  "optimizer.decoupled": "optimizer.separate_optimizers",
  "log.tensorboard": "log.trackers",
}
# {field: {value in earlier versions: value}}
REVALUED = {"log.trackers": {True: "tensorboard", False: ""}}
# Fields that earlier versions lacked, with the value that reproduces them. A new field of base.py
# belongs here; `tests/test_earlier_versions.py` finds a missing one.
ADDED: dict[str, Any] = {
  "init_step": None,
  "init_optimizer": False,
  "objective.replace_mlm_weight": 1.0,
  "objective.replace_mlm_weight_schedule": "",
  "objective.unigram_share": 0.0,
  "objective.unigram_share_schedule": "",
  "objective.contrast_weight": 1.0,
  "objective.contrast_group": 8,
  "eval.pairs": None,
  "eval.max_pairs": 2000,
  "health.reference": None,
  "data.parts": 0,
  "data.dedup": "",
  "data.strip_accents": None,  # a manifest without it: where it lower-cases (`Vocab.from_json`)
  "model.block": "post_norm",
  "model.norm": "layer_norm",
  "model.feed_forward": "gelu",
  "model.positions": "learned",
  "model.rope_theta": 10_000.0,
  "model.local_rope_theta": 10_000.0,
  "model.global_every": 1,
  "model.window": 128,
  "model.biases": True,
  "model.token_types": True,
  "model.qk_norm": False,
  "model.first_norm": True,
  "model.scaled_init": False,
  "model.embedding_dropout": None,
  "model.ffn_dropout": None,
  "model.head_norm": False,
  "optimizer.decay_steps": 0,
  "optimizer.decay_frac": None,
  "train.minutes": None,
}


def flatten(config: ConfigDict | dict) -> dict[str, Any]:
  """Returns {"group.field": value} in the order of the file.

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


def upgrade(saved: dict[str, Any]) -> dict[str, Any]:
  """Converts a flat configuration saved by an earlier version to the fields of this version.

  >>> upgrade({"objective.rtd_weight": 50.0})["objective.discriminator_weight"]
  50.0
  >>> upgrade({"log.tensorboard": False})["log.trackers"]
  ''
  """
  fields = ADDED | {RENAMED.get(field, field): value for field, value in saved.items()}
  for field, values in REVALUED.items():
    if field in fields:
      fields[field] = values.get(fields[field], fields[field])
  return fields


def changed_from_base(config: ConfigDict) -> dict[str, tuple[Any, Any]]:
  """Returns {field: (value in base.py, value here)} for the fields that differ from base.py."""
  base = flatten(load("base.py"))
  return {k: (base.get(k), v) for k, v in flatten(config).items() if base.get(k) != v}


def recipe(flat: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of a flat configuration in which seeds of one recipe are equal.

  >>> recipe({"seed": 1, "data.seq_length": 128, "train.steps": 10, "model.unroll": 4})
  {'data.seq_length': 128, 'train.steps': 10}
  """
  return {
    k: v
    for k, v in flat.items()
    if k in COMPARED or (k.split(".")[0] not in NOT_COMPARED and k not in FREE)
  }


def differences(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
  """Returns {field: (saved, current)} of the defining fields that differ between two runs.

  `saved` and `current` are flat configurations with DATA_HASHES.
  """
  pairs = {k: (saved.get(k), current.get(k)) for k in {**saved, **current} if k not in FREE}
  return {
    k: (old, new)
    for k, (old, new) in pairs.items()
    if (k in DATA_HASHES or k.split(".")[0] in DEFINING)
    and old != new
    and not (k in SOURCES and old and new and Path(old).absolute() == Path(new).absolute())
  }


def unknown_field(field: str, known: Sequence[str], prefix: str = "") -> str:
  """Returns the message for an unknown field, with its new or the nearest name."""
  if field in RENAMED:
    return f"{prefix}{field} was renamed to {prefix}{RENAMED[field]}"
  last = field.rsplit(".", 1)[-1]
  close = difflib.get_close_matches(field, known, n=1, cutoff=0.7)
  alike = [name for name in known if name.rsplit(".", 1)[-1] == last]
  close = close or difflib.get_close_matches(field, alike, n=1, cutoff=0.0)
  close = close or difflib.get_close_matches(field, known, n=1, cutoff=0.0)
  return f"unknown field {prefix}{field}; did you mean {prefix}{close[0]}?"


def refuse_other_run(saved: dict, current: dict, allowed: str, workdir: str | Path) -> list[str]:
  """Raises ValueError if a defining field of a run has changed; returns the allowed changes.

  A change of SHAPES cannot be allowed.

  Args:
    saved, current: flat configurations with DATA_HASHES.
    allowed: comma-separated fields, or groups of fields, that may differ.
  """
  names = [name.strip() for name in allowed.split(",") if name.strip()]
  for name in names:
    groups = {field.rsplit(".", 1)[0] for field in current}
    if name not in current and name not in groups:
      raise ValueError(f"allow_config_change: {unknown_field(name, [*current, *groups])}")
  found = differences(upgrade(saved), current)
  refused = [
    f for f in found if f in SHAPES or not any(f == n or f.startswith(f"{n}.") for n in names)
  ]
  if refused:
    listed = ", ".join(f"{f} was {found[f][0]!r}, is {found[f][1]!r}" for f in refused[:LISTED])
    if len(refused) > LISTED:
      listed += f" and {len(refused) - LISTED} more fields differ"
    anyway = f", or resume anyway with --config.allow_config_change={','.join(refused)}"
    hint = "" if set(refused) & set(SHAPES) else anyway
    raise ValueError(f"{workdir} holds another run: {listed}; use another --workdir{hint}")
  return list(found)
