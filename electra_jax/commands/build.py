"""Builds shards of training examples from text.

  electra-jax build --config=configs/quickstart.py --config.data.dir=DIR
                    [--part=i/n | --runner=beam|ray [-- OPTION...]]

Reads `config.data.sources`, trains or loads the vocabulary, makes fixed-length examples on all
cores and writes them to `config.data.dir` (layout: electra_jax.data.shards). A finished build of
the same configuration is reused; one that differs is replaced only with --overwrite. A build that
was killed resumes with the finished parts (`config.data.parts`). The same input and configuration
give the same bytes for any number of cores and machines. Shards for s3:// and gs:// are built in
`config.data.cache` and then uploaded, the manifest last.
"""

import argparse
import re

from electra_jax.commands import cli
from electra_jax.data.build import build, build_part
from electra_jax.data.runners import RUNNERS


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.takes_rest = True
  p.add_config()
  p.add_switch("overwrite", "replace a finished build of another configuration")
  p.add_argument(
    "--part",
    metavar="I/N",
    help="only part I of N, from 0; processes share a build, and run each part twice",
  )
  p.add_argument(
    "--runner",
    default="local",
    choices=list(RUNNERS),
    help="engine that builds the parts; its options follow --",
  )


def main(args: argparse.Namespace) -> None:
  """Builds the shards, or a part of them."""
  if args.config is None:
    raise cli.UsageError("--config=FILE is needed, e.g. --config=configs/base.py")
  if args.part is None:
    build(args.config, overwrite=args.overwrite, runner=args.runner, options=args.rest)
    return
  if not (asked := re.fullmatch(r"(\d+)/(\d+)", args.part)):
    raise ValueError(f"--part={args.part} is not i/n, such as 0/16")
  if args.overwrite or args.runner != "local" or args.rest:
    raise cli.UsageError("--part cannot be combined with --overwrite, --runner or options after --")
  build_part(args.config, *map(int, asked.groups()))
