"""Bands of healthy runs, for config.health.reference."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from electra_jax.config import compare, schema, specs
from electra_jax.monitor import bands, metrics
from electra_jax.runtime.workdir import read_run_config, replacing


def make(folders: Sequence[Path]) -> bands.Band:
  """Returns the band of runs on the same data that differ in their seed, else raises ValueError."""
  found = []
  for folder in folders:
    saved = read_run_config(folder)
    flat = compare.flatten(saved)
    hashes = {k: flat.get(k) for k in schema.HASHES}
    found.append(compare.flatten(specs.saved_config(saved)) | hashes)
  first, one, fields = folders[0], found[0], compare.recipe(found[0])
  for folder, flat in zip(folders, found, strict=True):
    for k in (*schema.HASHES, *fields):
      if flat[k] != one[k]:
        raise ValueError(f"{folder} is another recipe: {k} is {flat[k]!r}, in {first} {one[k]!r}")
    if flat["log.every_steps"] != one["log.every_steps"]:
      raise ValueError(f"{folder} and {first} have other steps between lines (log.every_steps)")
  if len({flat["seed"] for flat in found}) < len(found):
    raise ValueError("two of the runs have the same seed: they are one run")
  histories = [metrics.read_history(folder / metrics.HISTORY_FILE) for folder in folders]
  return bands.make(histories, one["log.every_steps"], fields)


def write(folders: Sequence[Path], out: Path, console: Console) -> None:
  """Writes the band of runs as JSON, and prints how many steps it covers."""
  band = make(folders)
  with replacing(out) as temporary:
    bands.write(temporary, band)
  steps = {step for table in band.levels.values() for step in table}
  console.print(f"band: {out}, {band.runs} runs, steps {min(steps):,} to {max(steps):,}")
