"""Pretrains: electra-jax train --config=configs/base.py --workdir=DIR

A run (1) checks the configuration; (2) locks the workdir, so that no other process writes there;
(3) opens the shards and compares them with those saved with the run; (4) prints its description;
(5) restores the state, or initialises it from the seed or another run's parameters; (6) trains,
with log lines, evaluations and checkpoints. The same command resumes from the newest checkpoint,
bit for bit. Ctrl-C, SIGTERM and SIGUSR1 end the step or leave the evaluation, save and exit with
code 143.
"""

import time

from absl import flags

from electra_jax.config import cli
from electra_jax.runtime.display import starting

_STARTED = time.monotonic()


def main() -> int:
  """Runs from the command line; returns the exit code."""
  args = flags.FLAGS
  if args.config is None or not args.workdir:
    raise flags.Error("--config=FILE and --workdir=DIR are needed, e.g. --config=configs/base.py")
  with starting():  # slow, and not needed for --help
    from electra_jax.config import validate
    from electra_jax.programs import train

  validate.warn_of_unread_overrides(args.config, cli.overrides())
  return train.run(
    args.config,
    args.workdir,
    verify=args.verify,
    coordinator=args.coordinator,
    num_processes=args.num_processes,
    process_id=args.process_id,
    started=_STARTED,
  )


if __name__ == "__main__":
  cli.define_config_flag()
  flags.DEFINE_string("workdir", None, "folder of the run: checkpoints, metrics, curves")
  flags.DEFINE_bool("verify", False, "check the checksum of every shard before training")
  flags.DEFINE_string("coordinator", "", "HOST:PORT of process 0, if there are several")
  flags.DEFINE_integer("num_processes", 0, "number of processes")
  flags.DEFINE_integer("process_id", -1, "index of this process, from 0")
  cli.run(main)
