"""The command `electra-jax`: starts the programs by name."""

import difflib
import importlib.metadata
import platform
import runpy
import sys
from typing import NamedTuple

from electra_jax.runtime import terminal, version


class Command(NamedTuple):
  """A program, started as `python -m MODULE`."""

  module: str
  purpose: str


COMMANDS = {
  "config": Command("electra_jax.config", "prints the fields of a configuration"),
  "build": Command("electra_jax.data.build", "builds shards of training examples from text"),
  "preflight": Command("electra_jax.preflight", "estimates a step's memory and time on TPUs, GPUs"),
  "flops": Command("electra_jax.flops", "counts the FLOPs of a step and of a run"),
  "train": Command("electra_jax.train", "pretrains, or resumes a run"),
  "evaluate": Command("electra_jax.evaluate", "measures a pretrained network in minutes"),
  "finetune": Command("electra_jax.finetune", "fine-tunes on tasks, compares results, predicts"),
  "score": Command("electra_jax.score", "prints the pseudo-log-likelihoods of sentences"),
  "report": Command("electra_jax.report", "writes a page about runs, or a band of healthy ones"),
  "export": Command("electra_jax.export", "writes networks for Hugging Face or fine-tuning"),
}


USAGE = """\
Pretrains and fine-tunes text encoders by replaced-token detection (ELECTRA).

usage: electra-jax COMMAND [OPTION ...], or python -m electra_jax COMMAND [OPTION ...]
"""
HELP = "\nelectra-jax COMMAND --help lists its options, electra-jax --version the versions."


def listing() -> str:
  """Returns the commands, a line each."""
  lines = (f"  {name:<{max(map(len, COMMANDS))}}  {c.purpose}" for name, c in COMMANDS.items())
  return "\n".join([USAGE, *lines, HELP])


def versions() -> str:
  """Returns the versions that a bug report needs."""
  jax = importlib.metadata.version("jax")
  return f"electra_jax {version.code_version()}, jax {jax}, Python {platform.python_version()}"


INSTEAD = {"": listing, "-h": listing, "--help": listing, "help": listing, "--version": versions}


def main() -> None:
  """Runs from the command line."""
  name = sys.argv[1] if len(sys.argv) > 1 else ""
  if name in INSTEAD:
    terminal.console().print(INSTEAD[name]())
    return
  if name not in COMMANDS:
    close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.0)[0]
    print(f"error: unknown command {name!r}; did you mean {close}?", file=sys.stderr)
    sys.exit(2)
  del sys.argv[1]
  runpy.run_module(COMMANDS[name].module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()
