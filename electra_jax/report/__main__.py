"""Writes a report on one run or several: a page that opens without a network.

  electra-jax report RUN [RUN...] --out=report.html [--price=2.5] [--pairs DIR...]
                     [--finetune DIR...]
  electra-jax report --make-band RUN RUN RUN [RUN...] --out=band.json

RUN is a workdir of training, running or finished. --price is that of a device for an hour; --pairs
are folders of `electra-jax evaluate pairs --out`, --finetune workdirs of `electra-jax finetune`.
--make-band writes what seeds of one configuration reach, with a tolerance, for
`config.health.reference`.
"""

import argparse
import math
from pathlib import Path

from absl import flags

from electra_jax.config import cli
from electra_jax.runtime import terminal
from electra_jax.runtime.display import starting


def price(text: str) -> float:
  """Returns the price that an argument is."""
  if not 0 <= (number := float(text)) < math.inf:
    raise argparse.ArgumentTypeError(f"must be at least 0 and finite, got {text!r}")
  return number


def main() -> None:
  """Runs from the command line."""
  p = cli.parser(__doc__)
  p.add_argument("runs", nargs="+", type=Path, metavar="RUN")
  p.add_argument("--out", type=Path, required=True, metavar="FILE")
  p.add_argument("--make-band", action="store_true", help="of three runs or more")
  p.add_argument("--price", type=price, help="of a device for an hour, in any currency")
  p.add_argument("--pairs", nargs="+", type=Path, default=[], metavar="DIR")
  p.add_argument("--finetune", nargs="+", type=Path, default=[], metavar="DIR")
  args = p.parse_args()
  if args.make_band and (args.price or args.pairs or args.finetune):
    raise flags.Error("--make-band goes with neither --price, --pairs nor --finetune")
  with starting():  # slow, and not needed for --help
    from electra_jax.programs import report

  report.run(args, terminal.console())


if __name__ == "__main__":
  cli.report(main)
