"""The fields of a configuration with their defaults and the comments of the base configuration."""

import ast
import io
import tokenize
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from electra_jax.config.compare import flatten
from electra_jax.config.files import load, resolve

BASES = ("base.py", "finetune/base.py")


class Field(NamedTuple):
  """A field of a configuration."""

  name: str  # group.field
  value: Any
  default: Any  # in the base configuration
  comment: str  # there, "" if it has none

  @property
  def is_changed(self) -> bool:
    """Whether the value differs from the default."""
    return self.value != self.default

  def __str__(self) -> str:
    """Returns the value and, where it is another, the default.

    >>> str(Field("seed", 1, 0, ""))
    'seed = 1 (default 0)'
    """
    default = f" (default {self.default!r})" if self.is_changed else ""
    return f"{self.name} = {self.value!r}{default}"


def base_of(config: ConfigDict) -> str:
  """Returns the base configuration that has the same fields.

  Raises:
    ValueError: none has.
  """
  names = flatten(config).keys()
  for base in BASES:
    if flatten(load(base)).keys() == names:
      return base
  raise ValueError(f"its fields are those of neither {' nor '.join(BASES)}: start with load(...)")


def fields_of(config: ConfigDict) -> list[Field]:
  """Returns all fields, in the order of the base configuration."""
  base = base_of(config)
  values, defaults = flatten(config), flatten(load(base))
  comments = comments_in(resolve(base))
  return [Field(name, values[name], defaults[name], text) for name, text in comments.items()]


def comments_in(path: Path) -> dict[str, str]:
  """Returns {field: comment}, from above and behind its assignment; "" without one."""
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
