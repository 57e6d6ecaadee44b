"""Builds shards of training examples from text.

  electra-jax build --config=configs/quickstart.py --config.data.dir=DIR
                    [--part=I/N | --runner=beam|ray [-- OPTION...]]

Reads `config.data.sources`, trains or loads the vocabulary, makes fixed-length examples on all
cores and writes them to `config.data.dir` (layout: electra_jax.data.shards). Reuses a finished
build of the same configuration; --overwrite replaces a different build. After a kill, the same
command keeps the finished parts (`config.data.parts`). The same input and configuration give the
same bytes on any number of cores and machines. Shards for s3:// and gs:// are built in
`config.data.cache` and then uploaded.
"""

import argparse
import re
from collections.abc import Collection

from ml_collections import ConfigDict

from electra_jax.commands import cli
from electra_jax.data import build as data_build
from electra_jax.data.runners import RUNNERS


def build(config: ConfigDict, **options) -> dict:
  """Builds `config.data.dir` as `electra_jax.data.build.build`, with the vocabulary of init_from.

  Raises:
    ValueError, OSError: as `build`; or config.data sets a vocabulary that differs from init_from.
  """
  return data_build.build(_with_vocabulary(config), **options)


def _with_vocabulary(config: ConfigDict, given: Collection[str] = ()) -> ConfigDict:
  if config.get("init_from") is None:
    return config
  from electra_jax.interop import initial  # slow: imports JAX

  return initial.with_vocabulary(config, given)


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.takes_rest = True
  p.add_config()
  p.add_switch("overwrite", "replace a finished build of a different configuration")
  p.add_argument(
    "--part",
    metavar="I/N",
    help="build only part I of N, from 0, in one of several processes; run each part twice",
  )
  p.add_argument(
    "--runner",
    default="local",
    choices=list(RUNNERS),
    help="engine that builds the parts; pass its options after --",
  )


def main(args: argparse.Namespace) -> None:
  """Builds the shards or one part."""
  if args.config is None:
    raise cli.UsageError("--config=FILE is needed, e.g. --config=configs/base.py")
  config = _with_vocabulary(args.config, args.config_fields)
  if args.part is None:
    data_build.build(config, overwrite=args.overwrite, runner=args.runner, options=args.rest)
    return
  if not (asked := re.fullmatch(r"(\d+)/(\d+)", args.part)):
    raise ValueError(f"--part={args.part} must be I/N, e.g. 0/16")
  if args.overwrite or args.runner != "local" or args.rest:
    raise cli.UsageError("--part cannot be combined with --overwrite, --runner or options after --")
  data_build.build_part(config, *map(int, asked.groups()))
