"""Pretrains: electra-jax train --config=configs/base.py --workdir=DIR

A run (1) checks the configuration; (2) locks the workdir, so that no other process writes there;
(3) opens the shards, copied to this host if `config.data.dir` is a URL, and compares them with
those of the saved run; (4) prints its description; (5) restores the state, or initialises it from
the seed or from init_from; (6) trains, with log lines, evaluations and checkpoints. The same
command resumes from the newest checkpoint, bit for bit. After Ctrl-C, SIGTERM or SIGUSR1, the run
finishes the step or leaves the evaluation, saves and exits with code 143.
"""

import argparse
import time

from electra_jax.commands import cli
from electra_jax.monitor.display import starting
from electra_jax.runtime import terminal

_STARTED = time.monotonic()


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.add_config()
  p.add_argument("--workdir", metavar="DIR", help="folder of the run: checkpoints, metrics, curves")
  p.add_switch("verify", "check the checksum of every shard before training")
  p.add_argument("--coordinator", default="", metavar="HOST:PORT", help="address of process 0")
  p.add_argument("--num-processes", type=int, default=0, metavar="N")
  p.add_argument("--process-id", type=int, default=-1, metavar="I", help="from 0")


def main(args: argparse.Namespace) -> int:
  """Trains; returns the exit code."""
  if args.config is None or not args.workdir:
    raise cli.UsageError(
      "--config=FILE and --workdir=DIR are needed, e.g. --config=configs/base.py"
    )
  with starting():  # slow, and not needed for --help
    from electra_jax.config import validate
    from electra_jax.pretrain import train

  validate.warn_of_unread_overrides(args.config, args.config_fields)
  return train.run(
    args.config,
    args.workdir,
    verify=args.verify,
    coordinator=args.coordinator,
    num_processes=args.num_processes,
    process_id=args.process_id,
    started=_STARTED,
    resume=f"with: {terminal.command_line()}",
    given=args.config_fields,
  )
