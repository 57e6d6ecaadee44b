"""Writes a report on one run or several: a page that opens without a network.

  python -m electra_jax.report RUN [RUN...] --out=report.html [--price=2.5]
                               [--pairs DIR...] [--finetune DIR...]

RUN is a workdir of electra_jax.train, running or finished. --price is that of a device for an hour;
--pairs are folders of `electra_jax.evaluate pairs --out`, --finetune workdirs of
electra_jax.finetune.
"""

import argparse
from pathlib import Path

from rich.console import Console

from electra_jax.config import cli
from electra_jax.runtime.workdir import replacing

PACKAGES = ("bokeh", "jinja2", "markupsafe")  # the extra `report`


def parser() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  p = cli.ArgumentParser(
    prog="python -m electra_jax.report",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  p.add_argument("runs", nargs="+", type=Path, metavar="RUN")
  p.add_argument("--out", type=Path, required=True, metavar="FILE")
  p.add_argument("--price", type=float, help="of a device for an hour, in any currency")
  p.add_argument("--pairs", nargs="+", type=Path, default=[], metavar="DIR")
  p.add_argument("--finetune", nargs="+", type=Path, default=[], metavar="DIR")
  return p


def main() -> None:
  """Runs from the command line."""
  args = parser().parse_args()
  try:
    from electra_jax.report import page
  except ImportError as error:
    if (error.name or "").partition(".")[0] not in PACKAGES:
      raise
    raise ValueError(
      f"a report needs the package {error.name}: pip install 'electra_jax[report]'"
    ) from None
  text = page.render(args.runs, price=args.price, pairs=args.pairs, finetune=args.finetune)
  with replacing(args.out) as temporary:
    temporary.write_text(text, encoding="utf-8")
  console = Console(highlight=False, soft_wrap=True)
  console.print(f"report: {args.out} ({len(text.encode()) / 1e6:.1f} MB)")


if __name__ == "__main__":
  cli.report(main)
