"""The fields of a configuration with the defaults and comments of its base configuration."""

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from electra_jax.config import registry, schema
from electra_jax.config.compare import flatten, unknown_field
from electra_jax.config.files import load, load_named, one_line, resolve

BASES = ("base.py", "finetune/base.py")


class Field(NamedTuple):
  """A field of a configuration."""

  name: str  # group.field
  value: Any
  default: Any  # in the base configuration
  comment: str  # in the base configuration, or ""
  facts: tuple[str, ...] = ()  # from the schema: choices, range, whether it defines the run

  @property
  def is_changed(self) -> bool:
    """Whether the value differs from the default."""
    return self.value != self.default

  def __str__(self) -> str:
    """Returns the value and, where they differ, the default.

    >>> str(Field("seed", 1, 0, ""))
    'seed = 1 (default 0)'
    """
    default = f" (default {self.default!r})" if self.is_changed else ""
    return f"{self.name} = {self.value!r}{default}"


def base_of(config: ConfigDict) -> str:
  """Returns the base configuration with the same fields; raises ValueError if there is none."""
  names = flatten(config).keys()
  for base in BASES:
    if flatten(load(base)).keys() == names:
      return base
  raise ValueError(f"its fields differ from those of {' and '.join(BASES)}: start with load(...)")


def check_field(config: ConfigDict, field: str) -> None:
  """Raises ValueError for an unknown field; the message names the closest one."""
  known = flatten(config)
  if field in known:
    return
  if any(name.startswith(f"{field}.") for name in known):
    raise ValueError(
      f"config.{field} is a group of fields: set one of them, e.g. --config.{field}.NAME=VALUE"
    )
  raise ValueError(unknown_field(field, list(known), "config."))


def check_set(config: ConfigDict, fields: Iterable[str]) -> None:
  """Raises ValueError if a field is None although its default is not."""
  now = flatten(config)
  unset = [field for field in fields if now[field] is None]
  always = flatten(load(base_of(config))) if unset else {}
  if wrong := [field for field in unset if always[field] is not None]:
    raise ValueError(f"config.{wrong[0]}=None: the field needs a value")


def check_base(config: ConfigDict, name: str, base: str) -> None:
  """Raises ValueError if a configuration has fields or groups that `base` lacks."""
  if others := set(config) - set(load(base)):
    raise ValueError(
      f"{name} is for another program: it sets config.{min(others)}, which configs/{base} lacks"
    )


def load_config(name: str | Path, fields: Mapping[str, Any] | None = None) -> ConfigDict:
  """Returns a configuration: load_config("quickstart", {"train.steps": 100}).

  Args:
    name: a built-in configuration ("quickstart", "modern:17m", "finetune/glue:mrpc") or a file's
      path; the text after a colon is the argument of get_config.
    fields: values to set, paths as text or `Path`; `electra-jax config NAME` lists all fields.

  Raises:
    FileNotFoundError: no configuration has this name.
    ValueError: the schema lacks a field, or a value has the wrong type.
  """
  config = load_named(str(name))
  for field, value in (fields or {}).items():
    check_field(config, field)
    value = str(value) if isinstance(value, Path) else value
    try:
      config.update_from_flattened_dict({field: value})
    except TypeError as error:
      raise ValueError(f"config.{field}: {one_line(error)}") from None
  check_set(config, fields or {})
  return config


def fields_of(config: ConfigDict, *, effects: bool = False) -> list[Field]:
  """Returns all fields, in the order of the base configuration.

  Args:
    effects: also list registered names and mark fields without effect; imports JAX.
  """
  base = base_of(config)
  values, defaults = flatten(config), flatten(load(base))
  own = {name: schema.PRETRAINING[name].comment for name in registry.names("field")}
  comments = comments_in(resolve(base)) | {
    name: text for name, text in own.items() if name in values
  }
  rows = schema.PRETRAINING if base == BASES[0] else schema.FINE_TUNING
  of = config if effects else None
  return [
    Field(name, values[name], defaults[name], text, tuple(rows[name].facts(name, values[name], of)))
    for name, text in comments.items()
  ]


def comments_in(path: Path) -> dict[str, str]:
  """Returns {field: comment} with the comments above and after its assignment, or ""."""
  text = path.read_text(encoding="utf-8")
  above, behind = {}, {}  # {line: comment}
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      place = behind if token.line[: token.start[1]].strip() else above
      place[token.start[0]] = token.string.lstrip("# ")
  found, groups = {}, {}  # groups: {variable: name of its group, with the dot}
  for node in ast.walk(ast.parse(text)):
    if not isinstance(node, ast.Assign):
      continue
    names = [_field(target, groups) for target in node.targets]
    if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "ConfigDict":
      group = "".join(f"{name}." for name in names if name)
      groups |= {t.id: group for t in node.targets if isinstance(t, ast.Name)}
    elif names[0]:
      first = node.lineno
      while first - 1 in above:
        first -= 1
      over = " ".join(above[n] for n in range(first, node.lineno))
      after = (behind.get(n) for n in range(node.lineno, node.end_lineno + 1))
      found[names[0]] = "; ".join(filter(None, (over, *after)))
  return found


def _field(target: ast.expr, groups: dict[str, str]) -> str | None:
  """Returns the field that an assignment sets, e.g. `model.dropout`; None if it sets no field."""
  if not isinstance(target, ast.Attribute):
    return None
  variable, _, rest = ast.unparse(target).partition(".")
  return groups[variable] + rest if variable in groups else None
