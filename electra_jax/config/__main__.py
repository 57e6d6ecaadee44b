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


def with_equals(words: list[str]) -> list[str]:
  """Joins --config and --config.FIELD with the value that follows, which argparse takes for FILE.

  Where no other word can be FILE, the first value is: that field is set to True.

  >>> with_equals(["--config.train.steps", "9", "small.py"])
  ['--config.train.steps=9', 'small.py']
  >>> with_equals(["--config.model.remat", "small.py"])
  ['--config.model.remat', 'small.py']
  """
  pairs = list(zip(["", *words], words, strict=False))
  values = [
    i
    for i, (before, word) in enumerate(pairs)
    if re.fullmatch(r"--?config(\.[\w.]+)?", before) and not word.startswith("--")
  ]
  others = [x for i, x in enumerate(pairs) if i not in values and x[0] != "--grep"]
  if all(word.startswith("-") and not _is_config(word) for _, word in others):
    values = values[1:]
  joined: list[str] = []
  for i, word in enumerate(words):
    joined.append(f"{joined.pop()}={word}" if i in values else word)
  return joined


def _is_config(word: str) -> bool:
  return bool(re.match("--?config(=|$)", word))


def main() -> None:
  """Runs from the command line."""
  parser = cli.parser(__doc__)
  parser.add_argument("file", nargs="?", metavar="FILE[:ARG]", help="e.g. configs/small.py")
  parser.add_argument("--grep", metavar="WORD", default="", help="a regular expression")
  args, rest = parser.parse_known_args(with_equals(sys.argv[1:]))
  console = terminal.console()
  if args.file:
    rest = [f"--config={args.file}", *rest]
  elif not (rest or args.grep):
    return list_files(console)
  elif not any(map(_is_config, rest)):
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
