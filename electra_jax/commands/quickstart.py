"""From text to a report in one command: electra-jax quickstart [--workdir=DIR]

Builds shards of the English that every Python installation carries, trains a small network on them
(minutes on two cores), shows words that it fills in and replaced words that it finds, and writes
DIR/report.html. The same as build, train, show and report with configs/quickstart.py; the shards
are in DIR/data. Run again, it continues with what is not done. Your own text, documents between
blank lines:

  electra-jax quickstart --workdir=runs/mine --config.data.sources=text:mine.txt
"""

import argparse
import os
import shlex
import time
from pathlib import Path

from electra_jax.commands import build, cli, report, show
from electra_jax.monitor.display import starting
from electra_jax.monitor.trackers import dropping
from electra_jax.runtime import terminal

CONFIG = "configs/quickstart.py"
_STARTED = time.monotonic()


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.add_config(CONFIG)
  p.set_defaults(config=CONFIG)
  p.add_argument("--workdir", default="runs/quickstart", metavar="DIR", help="of the run")


def main(args: argparse.Namespace) -> int:
  """Builds, trains, shows and reports; returns the exit code of the training."""
  if not args.workdir:
    raise cli.UsageError("--workdir=DIR must name a folder")
  config, workdir, console = args.config, args.workdir, terminal.console()
  if "data.dir" not in args.config_fields and (args.config_file == CONFIG or not config.data.dir):
    config.data.dir = f"{workdir}/data"
  os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")  # JAX, imported below, reads it
  with starting():
    from electra_jax.pretrain import train
    from electra_jax.runtime import jax_flags

  jax_flags.check()
  build.build(config)
  again, given = f"with: {terminal.command_line()}", args.config_fields
  if code := train.run(config, workdir, started=_STARTED, resume=again, given=given):
    return code
  console.print()
  show.show(workdir, console)
  console.print()
  with dropping("report.html", lambda text: console.print(f"warning: {text}")):
    report.write([workdir], Path(workdir) / "report.html", console)
  command = shlex.join(["show", f"--model={workdir}", "The name of the [MASK]."])
  console.print(f"next, a text of your own:\n  {terminal.program()} {command}")
  return code
