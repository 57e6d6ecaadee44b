"""Prints a configuration: electra-jax config FILE[:ARG] [--grep=WORD] [--effects]
                                             [--config.FIELD=VALUE ...]

Prints every field with its value and meaning and, in brackets, its choices or range and whether it
defines a run, which then resumes only with the same value. A star marks values that differ from the
default. --effects also shows fields without effect and the registered names; --grep selects fields
by name or meaning; --config.FIELD=VALUE sets a field. Without FILE, lists the configurations.
"""

import argparse
import ast
import re

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from electra_jax.commands import cli
from electra_jax.config import files
from electra_jax.config.fields import Field, base_of, fields_of
from electra_jax.runtime import terminal


def list_files(console: Console) -> None:
  """Prints the project's configurations with the first line of their docstrings."""
  for name in files.known():
    doc = ast.get_docstring(ast.parse(files.resolve(name).read_text(encoding="utf-8"))) or ""
    console.print(f"configs/{name:<22} {doc.partition(chr(10))[0]}")


def matching(fields: list[Field], pattern: str) -> list[Field]:
  """Returns the fields whose name or comment matches a regular expression.

  Raises:
    ValueError: `pattern` is not a regular expression, or nothing matches.
  """
  try:
    found = [f for f in fields if re.search(pattern, f"{f.name} {f.comment}", re.IGNORECASE)]
  except re.error as error:
    raise ValueError(f"--grep={pattern}: {error}") from None
  if not found:
    raise ValueError(f"--grep={pattern} matches none of {len(fields)} fields")
  return found


def show(field: Field, console: Console) -> None:
  """Prints a field and its comment: on a terminal below it, otherwise in the same line."""
  line = f"{'*' if field.is_changed else ' '} {field}"
  facts = f"[{'; '.join(field.facts)}]" if field.facts else ""
  meaning = " ".join(filter(None, (field.comment, facts)))
  if not console.is_terminal:
    console.print(f"{line}  # {meaning}" if meaning else line, markup=False)
    return
  console.print(line, style="bold" if field.is_changed else "")
  if meaning:
    console.print(Padding(Text(meaning), (0, 0, 0, 6)), style="dim", soft_wrap=False)


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.add_argument("config", nargs="?", action=cli.Once, metavar="FILE[:ARG]", help="as --config")
  p.add_argument("--grep", metavar="WORD", default="", help="regular expression")
  p.add_switch("effects", "also show fields without effect in this configuration (takes a second)")
  p.add_config(base=None)


def main(args: argparse.Namespace) -> None:
  """Prints the fields of a configuration, or lists the configurations."""
  console = terminal.console()
  if args.config is None:
    if args.grep:
      raise cli.UsageError("--grep needs FILE, e.g. configs/small.py")
    return list_files(console)
  fields = fields_of(args.config, effects=args.effects)
  for field in matching(fields, args.grep):
    show(field, console)
  changed = sum(field.is_changed for field in fields)
  base = base_of(args.config)
  console.print(f"{changed} of {len(fields)} fields differ from configs/{base} (*)")
