"""Prints FLOPs: electra-jax flops [--config=FILE [--match=FILE]]

--config.FIELD=VALUE sets a field of the first configuration, --match.FIELD=VALUE of the second.

Without --config, prints the FLOPs of the paper's models beside the paper's figures. With --config,
prints the cost of a step and of the whole run, by the paper's accounting and in matrix products.
With --match, prints the number of steps that cost as much as a whole run of the second.
"""

import argparse

from electra_jax.commands import cli
from electra_jax.monitor.display import starting
from electra_jax.runtime import terminal


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.add_config()
  p.add_config(name="match", text="configuration whose compute to match")


def main(args: argparse.Namespace) -> None:
  """Prints the table of a configuration and the steps that match another, or the paper's table."""
  if args.match is not None and args.config is None:
    raise cli.UsageError("--match=FILE needs --config=FILE")
  with starting():  # slow, and not needed for --help
    from electra_jax.cost import tables

  console = terminal.console()
  if args.config is None:
    console.print(tables.paper_table())
    return
  console.print(tables.config_table(args.config))
  if args.match is not None:
    for title, steps in tables.matching_steps(args.config, args.match).items():
      console.print(f"{steps:,} steps cost as much as a whole run of {args.match_file}, {title}")
