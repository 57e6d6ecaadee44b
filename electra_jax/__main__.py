"""The command `electra-jax`, which starts the commands by name."""

import difflib
import importlib.metadata
import platform
import sys

from electra_jax.commands import COMMANDS, cli
from electra_jax.runtime import terminal, version

USAGE = """\
Pretrains and fine-tunes text encoders by replaced-token detection (ELECTRA).

usage: electra-jax COMMAND [OPTION ...], or python -m electra_jax COMMAND [OPTION ...]
"""
HELP = "\nelectra-jax COMMAND --help lists a command's options, electra-jax --version the versions."


def listing() -> str:
  """Returns the list of commands."""
  width = max(map(len, COMMANDS))
  lines = (f"  {name:<{width}}  {purpose}" for name, purpose in COMMANDS.items())
  return "\n".join([USAGE, *lines, HELP])


def versions() -> str:
  """Returns the versions, for bug reports."""
  jax = importlib.metadata.version("jax")
  return f"electra_jax {version.code_version()}, jax {jax}, Python {platform.python_version()}"


INSTEAD = {"": listing, "-h": listing, "--help": listing, "help": listing, "--version": versions}


def main() -> None:
  """Runs from the command line."""
  name, *arguments = sys.argv[1:] or [""]
  if name in INSTEAD:
    cli.report(lambda: terminal.console().print(INSTEAD[name]()))
    return
  if name not in COMMANDS:
    close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.0)[0]
    print(f"error: unknown command {name!r}; did you mean {close}?", file=sys.stderr)
    sys.exit(2)
  cli.start(name, arguments)


if __name__ == "__main__":
  main()
