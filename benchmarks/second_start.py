"""How long does a second start take to its first step, with what the first one has compiled?

  python benchmarks/second_start.py [--rounds=3] [--json benchmarks/results/second_start.json]

Each round starts the same command twice in an empty workdir, and each time kills it when the line
of step 2 is written. Nothing was saved by then: all the second has over the first is `compiled/`.
The networks see the same text, in batches of 8 sequences of 128 tokens, quickstart's of 16. Tells
how long it took until the run was described (imports, configuration, data), until the held-out
documents were evaluated at step 0, until step 1, and how long step 2 takes, which nothing shortens.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "faults"))

import harness  # noqa: E402

DATA = {"data.vocab_size": 2000, "data.seq_length": 128, "data.holdout_frac": 0.1}
RUN = {"train.batch_size": 8, "eval.batch_size": 8, "eval.max_examples": 8, "log.every_steps": 1}
TINY = {k: v for k, v in harness.FIELDS.items() if k.startswith(("model.", "generator."))}
NETWORKS = {  # name: (configuration, changes)
  "tiny": ("base", {**TINY, "model.max_positions": 128}),
  "quickstart": ("quickstart", {"data.seq_length": 16}),
  "small": ("small", {}),
  "base": ("base", {}),
}


def command(module: str, name: str, folder: Path) -> list[str]:
  """Returns a command line for the network of that name."""
  file, changes = NETWORKS[name]
  places = {"data.dir": folder / f"data_{name}", "data.sources": f"text:{folder}/text.txt"}
  fields = {**DATA, **RUN, **places, **changes}
  arguments = [f"--config.{k}={v}" for k, v in fields.items()]
  return [sys.executable, "-m", module, f"--config=configs/{file}.py", *arguments]


def start(arguments: list[str], workdir: Path) -> dict[str, float]:
  """Starts a run, kills it after step 2, and returns the seconds to each stage."""
  log = workdir.with_suffix(".log")
  history, stages = workdir / "metrics.jsonl", {}
  with log.open("w") as out:
    began = time.monotonic()
    process = subprocess.Popen(
      [*arguments, f"--workdir={workdir}"], cwd=ROOT, stdout=out, stderr=out
    )
    inode = harness.inode(history)
    while "step 2" not in stages:
      time.sleep(0.01)
      text = history.read_text() if harness.inode(history) not in (inode, None) else ""
      reached = {
        "described": "changed from base" in log.read_text(),
        "evaluated": '"step": 0,' in text,
        "step 1": '"step": 1,' in text,
        "step 2": '"step": 2,' in text,
      }
      for stage, is_reached in reached.items():
        if is_reached:
          stages.setdefault(stage, round(time.monotonic() - began, 2))
      if process.poll() is not None:
        raise SystemExit(log.read_text()[-3000:])
    process.kill()
    process.wait()
  return stages


def main() -> None:
  """Runs from the command line."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--networks", default=",".join(NETWORKS))
  parser.add_argument("--json", default=None)
  args = parser.parse_args()
  console, results = Console(highlight=False, soft_wrap=True), {}
  table = Table("network", "first, s", "second, s", "ratio", "described", "evaluated", "one step")
  with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    harness.write_text(folder / "text.txt")
    for name in args.networks.split(","):
      build = command("electra_jax.data.build", name, folder)
      subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
      train = command("electra_jax.train", name, folder)
      rounds = []
      for i in range(args.rounds):
        workdir = folder / f"{name}{i}"
        rounds.append([start(train, workdir), start(train, workdir)])
        console.print(f"{name}: {rounds[-1]}")
      first, second = (statistics.median(pair[i]["step 1"] for pair in rounds) for i in (0, 1))
      ratio = statistics.median(b["step 1"] / a["step 1"] for a, b in rounds)
      results[name] = {"first": first, "second": second, "ratio": ratio, "rounds": rounds}
      stages = [statistics.median(b[k] for _, b in rounds) for k in ("described", "evaluated")]
      stages.append(statistics.median(b["step 2"] - b["step 1"] for _, b in rounds))
      table.add_row(name, *(f"{x:.3g}" for x in (first, second, ratio, *stages)))
  console.print(table)
  machine.save(args.json, results)


if __name__ == "__main__":
  main()
