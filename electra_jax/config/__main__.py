"""Prints a configuration: electra-jax config FILE[:ARG] [--grep=WORD] [--config.FIELD=VALUE ...]

Every field with its value and what it means; where the value is not the default, a star and the
default. --grep shows the fields whose name or meaning matches, --config.FIELD=VALUE sets a field as
for the other programs. Without FILE: the configurations there are.
"""

import ast
import re
import sys

from absl import flags
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from electra_jax.config import cli, files
from electra_jax.config.fields import Field, base_of, fields_of
from electra_jax.runtime import terminal


def list_files(console: Console) -> None:
  """Prints the project's configurations and the first line of what each says."""
  for name in files.known():
    doc = ast.get_docstring(ast.parse(files.resolve(name).read_text(encoding="utf-8"))) or ""
    console.print(f"configs/{name:<22} {doc.partition(chr(10))[0]}")


def matching(fields: list[Field], pattern: str) -> list[Field]:
  """Returns the fields whose name or comment matches a regular expression.

  Raises:
    ValueError: it is none, or nothing matches.
  """
  try:
    found = [f for f in fields if re.search(pattern, f"{f.name} {f.comment}", re.IGNORECASE)]
  except re.error as error:
    raise ValueError(f"--grep={pattern}: {error}") from None
  if not found:
    raise ValueError(f"--grep={pattern}: no field matches, of {len(fields)}")
  return found


def show(field: Field, console: Console) -> None:
  """Prints a field: on a terminal the comment below it, elsewhere in the same line."""
  line = f"{'*' if field.is_changed else ' '} {field}"
  if not console.is_terminal:
    console.print(f"{line}  # {field.comment}" if field.comment else line)
    return
  console.print(line, style="bold" if field.is_changed else "")
  if field.comment:
    console.print(Padding(Text(field.comment), (0, 0, 0, 6)), style="dim", soft_wrap=False)


def main() -> None:
  """Runs from the command line."""
  parser = cli.parser(__doc__)
  parser.add_argument("file", nargs="?", metavar="FILE[:ARG]", help="e.g. configs/small.py")
  parser.add_argument("--grep", metavar="WORD", default="", help="a regular expression")
  args, rest = parser.parse_known_args()
  console = terminal.console()
  if args.file:
    rest = [f"--config={args.file}", *rest]
  elif not (rest or args.grep):
    return list_files(console)
  elif not any(re.match("--?config(=|$)", arg) for arg in rest):
    raise flags.Error("FILE is needed, e.g. configs/small.py")

  def print_config() -> None:
    config = flags.FLAGS.config
    fields = fields_of(config)
    for field in matching(fields, args.grep):
      show(field, console)
    changed = sum(field.is_changed for field in fields)
    console.print(f"{changed} of {len(fields)} fields differ from configs/{base_of(config)} (*)")

  sys.argv[1:] = rest
  cli.define_config_flag()
  cli.run(print_config, base=None)


if __name__ == "__main__":
  cli.report(main)
