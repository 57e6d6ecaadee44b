"""Writes a report on one run or several: a page that opens without a network.

  electra-jax report RUN [RUN...] --out=report.html [--price=2.5] [--pairs DIR...]
                     [--finetune DIR...]
  electra-jax report --make-band RUN RUN RUN [RUN...] --out=band.json

RUN is a workdir of training, also gs:// or s3://, running or finished; runs that differ only in
their seed are shown together, with mean and spread. --price is the price of a device-hour; --pairs
are folders of `electra-jax evaluate pairs --out`, --finetune workdirs of `electra-jax finetune`.
--make-band writes what seeds of one configuration reach, with a tolerance, for
`config.health.reference`.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from electra_jax.commands import cli
from electra_jax.monitor.display import doing, starting
from electra_jax.runtime import terminal


def price(text: str) -> float:
  """Parses a price."""
  if not 0 <= (number := float(text)) < math.inf:
    raise argparse.ArgumentTypeError(f"must be at least 0 and finite, got {text!r}")
  return number


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.add_argument("runs", nargs="+", metavar="RUN")
  p.add_argument("--out", type=Path, required=True, metavar="FILE")
  p.add_switch("make-band", "of three runs or more")
  p.add_argument("--price", type=price, help="of a device for an hour, in any currency")
  p.add_argument("--pairs", nargs="+", type=Path, default=[], metavar="DIR")
  p.add_argument("--finetune", nargs="+", type=Path, default=[], metavar="DIR")


def main(args: argparse.Namespace) -> None:
  """Writes a band or a page."""
  console = terminal.console()
  if not args.make_band:
    pages = {"price": args.price, "pairs": args.pairs, "finetune": args.finetune}
    write(args.runs, args.out, console, **pages)
    return
  if args.price or args.pairs or args.finetune:
    raise cli.UsageError("--make-band cannot be combined with --price, --pairs or --finetune")
  with starting():  # slow, and not needed for --help
    from electra_jax.report import band
    from electra_jax.runtime import bucket

  band.write([bucket.local(run, step=0) for run in args.runs], args.out, console)


def write(runs: Sequence[str], out: Path, console: Console, **options) -> None:
  """Writes a page; the options are those of `report.page.render`."""
  with starting():
    from electra_jax.report import page  # needs the extra `report`
    from electra_jax.runtime import bucket
    from electra_jax.runtime.workdir import replacing

  with doing("drawing"):
    text = page.render([bucket.local(run, step=0) for run in runs], **options)
  content = text.encode(errors="backslashreplace")  # of names that are not UTF-8
  with replacing(out) as temporary:
    temporary.write_bytes(content)
  console.print(f"report: {out} ({len(content) / 1e6:.1f} MB)")
