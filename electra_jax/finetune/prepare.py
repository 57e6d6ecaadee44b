"""Lists the kinds of task and prepares the data of a configuration's tasks."""

import warnings
from collections.abc import Iterable

from ml_collections import ConfigDict

from electra_jax.core import qa_head, task_heads
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune import overview, qa_task, sentence_pairs, tagging_task, text_task
from electra_jax.finetune.task_data import TaskData, TaskKind
from electra_jax.interop import huggingface

TASK_KINDS: dict[str, TaskKind] = {
  "text": text_task.KIND,
  "tagging": tagging_task.KIND,
  "qa": qa_task.KIND,
  "pairs": sentence_pairs.KIND,
}


def warn_of_unread_overrides(config: ConfigDict, fields: Iterable[str]) -> None:
  """Warns of fields set on the command line that config.kind does not read."""
  if config.kind not in TASK_KINDS:
    return
  mine = set(TASK_KINDS[config.kind].fields)
  others = {field for kind in TASK_KINDS.values() for field in kind.fields} - mine
  near = {field: {field, field.partition(".")[0]} for field in fields}
  if found := [field for field, x in near.items() if x & others and not x & mine]:
    warnings.warn(f"kind={config.kind} does not read {', '.join(found)}", stacklevel=1)


def task_names(config: ConfigDict) -> list[str]:
  """Returns the names of the configuration's tasks.

  Raises:
    ValueError: a task is missing or unknown.
  """
  names = list(dict.fromkeys(name.strip() for name in config.task.split(",") if name.strip()))
  if config.kind not in TASK_KINDS:
    raise ValueError(f"config.kind must be one of {', '.join(TASK_KINDS)}, got {config.kind!r}")
  known = TASK_KINDS[config.kind].known_names(config)
  if known is None:
    if len(names) != 1:
      raise ValueError(f"config.task must be one name, got {config.task!r}")
    if "/" in names[0] or names[0].startswith(".") or "\0" in names[0]:
      raise ValueError(f"config.task must be a valid folder name, got {config.task!r}")
  elif not names or set(names) - set(known):
    raise ValueError(
      f"config.task={config.task!r}: the tasks of kind={config.kind} are {', '.join(known)}; use"
      " configs/finetune/own.py for other tasks"
    )
  return names


def with_head(config: ConfigDict, cfg: TransformerConfig) -> ConfigDict:
  """Returns a configuration with all fields of its head set as described in finetune/base.py.

  Args:
    cfg: of the network, whose class in transformers defines model.head=auto.
  """
  config, level = config.copy_and_resolve_references(), TASK_KINDS[config.kind].level
  q = config.qa
  if q.joint is None:
    q.joint = config.model.head == "linear"
  if q.answerable_weight is None:
    q.answerable_weight = 0.5 if q.joint else 0.0
  if q.threshold is None:
    q.threshold = -2.75 if q.answerable_weight else 0.0
  if config.model.head == "auto" and level:
    known = [*task_heads.HEAD_LAYERS.items(), *qa_head.HEAD_LAYERS.items()]
    classes = huggingface.family_of(cfg).classes
    found = (name for name, layers in known if layers.exports.get(level, "") in classes)
    config.model.head = "linear" if level == "span" and q.joint else next(found)
  return config


def prepare(
  config: ConfigDict, name: str, tokenizer: Tokenizer, cfg: TransformerConfig
) -> TaskData:
  """Returns the data of a task for a network; rows have at most `cfg.max_positions` tokens.

  Raises:
    ValueError: a file is missing or invalid, or `data.max_length` is too small.
  """
  if not 8 <= config.data.max_length:
    raise ValueError(f"config.data.max_length must be at least 8, got {config.data.max_length}")
  longest = min(config.data.max_length, cfg.max_positions)
  task = TASK_KINDS[config.kind].prepare(with_head(config, cfg), name, tokenizer, longest)
  if not next(iter(task.splits.values())).labelled:
    field = next(x for x in ("dev", "train", "dir") if config.data[x] is not None)
    part = "" if field == "dev" else " in the dev split"
    raise ValueError(f"config.data.{field}={config.data[field]} has no labels{part}")
  rows = {"train": task.train, **{split: x.features for split, x in task.splits.items()}}
  if empty := [split for split, features in rows.items() if not features]:
    raise ValueError(f"{task.title}: the split {empty[0]!r} has no row: change config.own.split")
  if longest < config.data.max_length:
    task.notes.insert(0, f"rows are limited to {longest} tokens, the network's positions")
  if "layers" in task.info.head.arguments:
    task.notes.append(_describe_head(task, cfg))
  return task._replace(notes=task.notes + overview.notes(task, TASK_KINDS[config.kind], tokenizer))


def _describe_head(task: TaskData, cfg: TransformerConfig) -> str:
  layers = task.info.head.arguments["layers"]
  if name := huggingface.family_of(cfg).classes.get(task.info.head.make().export or ""):
    return f"head: {layers}, exported as {name}"
  return f"head: {layers}, not exported: transformers lacks it (model.head=auto is exported)"
