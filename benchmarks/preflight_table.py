"""The preflight of the paper's three models and of modern ones on TPUs and GPUs, as a table.

  python benchmarks/preflight_table.py [--write] [--minutes=45] [--jobs=2]

Runs `electra_jax.preflight` at each configuration's batch size, in a process for each slice, and
prints the table. Started again, skips slices in the JSON file; leaves out slices without a compiler
(the extras `tpu` and `gpu-compile`). --write writes preflight_table.md. All slices take
over three hours on one core.
"""

import concurrent.futures
import json
import math
import os
import time

import machine

from electra_jax.config import files
from electra_jax.cost import chips, gpus

RESULTS = machine.ROOT / "benchmarks" / "results" / "preflight_table.json"
# The most useful first: one slice for each model and kind of chip, then a pod, one chip, ...
SLICES = (
  ("small", "v4:2x2x1 v5e:2x2 v5p:2x2x1 v6e:2x2"),
  ("base", "v4:2x2x4 v5e:4x4 v5p:2x2x4 v6e:4x4"),
  ("large", "v4:4x4x4 v5e:8x8 v5p:4x4x4 v6e:8x8"),
  ("large", "v4:4x8x8 v5e:16x16 v5p:4x8x8 v6e:16x16"),
  ("small", "v4:1x1x1 v5e:1x1 v5p:1x1x1 v6e:1x1"),
  ("base", "v4:2x2x1 v5e:2x2 v5p:2x2x1 v6e:2x2"),
  ("large", "v4:2x2x4 v5e:4x4 v5p:2x2x4 v6e:4x4"),
  ("modern:150m", "v5e:4x4 v5p:2x2x4 v6e:4x4"),
  ("modern:400m", "v5e:8x8 v5p:4x4x4 v6e:8x8"),
  ("small", "h200x1"),
  ("base", "h200x8"),
  ("modern:150m", "h200x8"),
  ("large", "h200x8"),
  ("modern:400m", "h200x8"),
  ("modern:17m", "h200x1"),
  ("modern:32m", "h200x1"),
  ("modern:68m", "h200x8"),
  ("small", "h100x1 a100x1 b200x1 l4x1"),
  ("base", "h100x8 a100x8 b200x8 l4x8"),
  ("large", "h200x64 h100x64 a100x64 b200x64"),
)
HEAD = (
  "# Preflight of every model\n\nAt each configuration's batch size, in the fewest microbatches"
  " that fit ([JSON](preflight_table.json), [columns](../../docs/preflight.md))."
)
SHEETS = [*chips.CHIPS.values(), *gpus.GPUS.values()]
PLAN = [(name, topology) for name, several in SLICES for topology in several.split()]
MODELS = ("small", "base", "large", *(f"modern:{n}m" for n in (17, 32, 68, 150, 400)))
TITLES = (
  "model|slice or GPUs|chips|microbatches|GiB a chip|ms a step ≥|sequences/s ≤|MFU ≤|hours ≥"
  "|chip-hours ≥"
).split("|")


def estimate_step(name: str, topology: str) -> dict:
  """Returns the costs from a preflight in a separate process, or its error."""
  started, (file, colon, size) = time.perf_counter(), name.partition(":")
  try:
    found = {"costs": machine.preflight(f"configs/{file}.py{colon}{size}", topology)}
  except ValueError as error:
    found = {"error": str(error)}
  secs = round(time.perf_counter() - started)
  return {"config": name, "topology": topology, "secs": secs, **found}


def row(found: dict) -> list[str]:
  name, topology = found["config"], found["topology"]
  chip, axes = chips.parse(topology)
  start = [name, f"`{topology}`", str(math.prod(axes))]
  if "error" in found:
    return [*start, found["error"].removeprefix("error: ")] + (len(TITLES) - 4) * [""]
  last, config = found["costs"][-1], files.load_size(name)
  gib = f"{last['used'] / 2**30:.1f} of {last['memory'] / 2**30:.0f}"
  if not last["fits"]:
    return [*start, f"does not fit, in {last['accumulation']}", gib] + (len(TITLES) - 5) * [""]
  hours = last["secs"] * config.train.steps / 3600
  return [
    *start,
    str(last["accumulation"]),
    gib,
    f"{1000 * last['secs']:.3g}",
    f"{config.train.batch_size / last['secs']:,.0f}",
    f"{100 * last['mfu']:.0f} %",
    f"{hours:,.3g}",
    f"{hours * last['chips']:,.{0 if hours * last['chips'] >= 100 else 1}f}",
  ]


def markdown(results: list[dict]) -> str:
  """Returns the table, ordered by model, kind of chip and size."""

  def target(found):
    chip, axes = chips.parse(found["topology"])
    return MODELS.index(found["config"]), SHEETS.index(chip), math.prod(axes)

  rows = [TITLES, ["---"] * 2 + ["---:"] * (len(TITLES) - 2)]
  rows += [row(found) for found in sorted(results, key=target)]
  return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def main(write: bool = False, minutes: float = math.inf, jobs: int = 1) -> None:
  """
  --write    write benchmarks/results/preflight_table.md
  --minutes  time after which no slice is started
  --jobs     slices at a time, one core each
  """
  results = json.loads(RESULTS.read_text("utf-8"))["results"] if RESULTS.exists() else []
  known, end = {(x["config"], x["topology"]) for x in results}, time.monotonic() + 60 * minutes
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

  def in_time(slice_: tuple[str, str]) -> dict | None:
    return estimate_step(*slice_) if time.monotonic() < end else None

  with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
    todo = [slice_ for slice_ in PLAN if slice_ not in known]
    for future in concurrent.futures.as_completed(pool.submit(in_time, x) for x in todo):
      if (found := future.result()) is None:
        continue
      if "pip install 'electra_jax[" in found.get("error", ""):
        print(found["error"], flush=True)
        continue
      results.append(found)
      print(" ".join(row(found)), f"({found['secs']} s)", flush=True)
      machine.save(str(RESULTS), {"results": results})
  print(table := markdown(results))
  if write:
    RESULTS.with_suffix(".md").write_text(f"{HEAD}\n\n{table}", "utf-8")


if __name__ == "__main__":
  machine.start(main)
