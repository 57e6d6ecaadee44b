"""Pages about runs, and bands of healthy seeds: see electra_jax.report."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from electra_jax.config import compare, schema, specs
from electra_jax.runtime import bands, metrics
from electra_jax.runtime.display import doing
from electra_jax.runtime.workdir import read_run_config, replacing


def make_band(folders: Sequence[Path]) -> bands.Band:
  """Returns the band of runs on the same data that differ in their seed.

  Raises:
    ValueError: a folder holds no run, two have the same seed, or they differ in more.
  """
  found = []
  for folder in folders:
    saved = read_run_config(folder)
    flat = compare.flatten(saved)
    hashes = {k: flat.get(k) for k in schema.HASHES}
    found.append(compare.flatten(specs.saved_config(saved)) | hashes)
  first, one, fields = folders[0], found[0], compare.recipe(found[0])
  for folder, flat in zip(folders[1:], found[1:], strict=True):
    if wrong := [k for k in (*schema.HASHES, *fields) if flat[k] != one[k]]:
      k = wrong[0]
      raise ValueError(f"{folder} is another recipe: {k} is {flat[k]!r}, in {first} {one[k]!r}")
    if flat["log.every_steps"] != one["log.every_steps"]:
      raise ValueError(f"{folder} and {first} have other steps between lines (log.every_steps)")
  if len({flat["seed"] for flat in found}) < len(found):
    raise ValueError("two of the runs have the same seed: they are one run")
  histories = [metrics.read_history(folder / metrics.HISTORY_FILE) for folder in folders]
  return bands.make(histories, one["log.every_steps"], fields)


def write_band(folders: Sequence[Path], out: Path, console: Console) -> None:
  """Writes the band of runs as JSON, and prints how many steps it covers."""
  band = make_band(folders)
  with replacing(out) as temporary:
    bands.write(temporary, band)
  steps = {step for table in band.levels.values() for step in table}
  console.print(f"band: {out}, {band.runs} runs, steps {min(steps):,} to {max(steps):,}")


def write_page(args: argparse.Namespace, console: Console) -> None:
  """Writes the page about runs."""
  from electra_jax.report import page  # needs the extra `report`

  with doing("drawing"):
    text = page.render(args.runs, price=args.price, pairs=args.pairs, finetune=args.finetune)
  with replacing(args.out) as temporary:
    temporary.write_text(text, encoding="utf-8")
  console.print(f"report: {args.out} ({len(text.encode()) / 1e6:.1f} MB)")


def run(args: argparse.Namespace, console: Console) -> None:
  """Writes a band or a page."""
  if args.make_band:
    write_band(args.runs, args.out, console)
  else:
    write_page(args, console)
