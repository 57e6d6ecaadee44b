"""Writes a report on one run or several: a page that opens without a network.

  python -m electra_jax.report RUN [RUN...] --out=report.html [--price=2.5]
                               [--pairs DIR...] [--finetune DIR...]
  python -m electra_jax.report --make-band RUN RUN RUN [RUN...] --out=band.json

RUN is a workdir of electra_jax.train, running or finished. --price is that of a device for an hour;
--pairs are folders of `electra_jax.evaluate pairs --out`, --finetune workdirs of
electra_jax.finetune. --make-band writes what seeds of one configuration reach, with a tolerance,
for `config.health.reference`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from electra_jax.config import cli, compare, specs
from electra_jax.runtime import bands, metrics
from electra_jax.runtime.workdir import read_config, replacing

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
  p.add_argument("--make-band", action="store_true", help="of three runs or more")
  p.add_argument("--price", type=float, help="of a device for an hour, in any currency")
  p.add_argument("--pairs", nargs="+", type=Path, default=[], metavar="DIR")
  p.add_argument("--finetune", nargs="+", type=Path, default=[], metavar="DIR")
  return p


def make_band(folders: Sequence[Path]) -> bands.Band:
  """Returns the band of runs that differ in their seed.

  Raises:
    ValueError: a folder holds no run, two have the same seed, or they differ in more.
  """
  found = []
  for folder in folders:
    if not folder.is_dir() or (saved := read_config(folder)) is None:
      raise ValueError(f"{folder} holds no run of electra_jax.train")
    found.append(compare.flatten(specs.saved_config(saved)))
  first, fields = folders[0], compare.recipe(found[0])
  for folder, flat in zip(folders[1:], found[1:], strict=True):
    other = compare.recipe(flat)
    if wrong := [k for k in fields if other[k] != fields[k]]:
      k = wrong[0]
      raise ValueError(f"{folder} is another recipe: {k} is {other[k]!r}, in {first} {fields[k]!r}")
    if flat["log.every_steps"] != found[0]["log.every_steps"]:
      raise ValueError(f"{folder} and {first} have other steps between lines (log.every_steps)")
  if len({flat["seed"] for flat in found}) < len(found):
    raise ValueError("two of the runs have the same seed: they are one run")
  histories = [metrics.read_history(folder / metrics.HISTORY_FILE) for folder in folders]
  return bands.make(histories, found[0]["log.every_steps"], fields)


def main() -> None:
  """Runs from the command line."""
  args = parser().parse_args()
  console = Console(highlight=False, soft_wrap=True)
  if args.make_band:
    band = make_band(args.runs)
    with replacing(args.out) as temporary:
      bands.write(temporary, band)
    steps = {step for table in band.levels.values() for step in table}
    console.print(f"band: {args.out}, {band.runs} runs, steps {min(steps):,} to {max(steps):,}")
    return
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
  console.print(f"report: {args.out} ({len(text.encode()) / 1e6:.1f} MB)")


if __name__ == "__main__":
  cli.report(main)
