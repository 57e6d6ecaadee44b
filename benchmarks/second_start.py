"""Time to the first step of a second start, with the programs that the first start compiled.

  python benchmarks/second_start.py [--rounds=3] [--json benchmarks/results/second_start.json]

Each round starts the same command twice in an empty workdir, and kills it after the line of step 2,
before any save, so that the second start only has the first one's `compiled/`. The networks read
the same text, in batches of 8 sequences of 128 tokens (quickstart: 16). Prints the time until the
run is described (imports, configuration, data), until the evaluation at step 0, until step 1, and
the time of step 2, for comparison.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine

sys.path.insert(0, str(machine.ROOT / "tests" / "faults"))

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
  with log.open("w", encoding="utf-8") as out:
    began = time.monotonic()
    process = subprocess.Popen(
      [*arguments, f"--workdir={workdir}"], cwd=machine.ROOT, stdout=out, stderr=out
    )
    inode = harness.inode(history)
    while "step 2" not in stages:
      time.sleep(0.01)
      text = history.read_text("utf-8") if harness.inode(history) not in (inode, None) else ""
      reached = {
        "described": "changed from base" in log.read_text("utf-8"),
        "evaluated": '"step": 0,' in text,
        "step 1": '"step": 1,' in text,
        "step 2": '"step": 2,' in text,
      }
      for stage, is_reached in reached.items():
        if is_reached:
          stages.setdefault(stage, round(time.monotonic() - began, 2))
      if process.poll() is not None:
        raise SystemExit(log.read_text("utf-8")[-3000:])
    process.kill()
    process.wait()
  return stages


def main(rounds: int = 3, networks: str = ",".join(NETWORKS)) -> dict:
  results = {}
  with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    harness.write_text(folder / "text.txt")
    for name in networks.split(","):
      build = command("electra_jax.data.build", name, folder)
      subprocess.run(build, cwd=machine.ROOT, check=True, stdout=subprocess.DEVNULL)
      train, found = command("electra_jax.train", name, folder), []
      for i in range(rounds):
        workdir = folder / f"{name}{i}"
        found.append([start(train, workdir), start(train, workdir)])
        print(f"{name}: {found[-1]}", flush=True)
      first, second = (statistics.median(pair[i]["step 1"] for pair in found) for i in (0, 1))
      ratio = statistics.median(b["step 1"] / a["step 1"] for a, b in found)
      results[name] = {"first": first, "second": second, "ratio": ratio, "rounds": found}
  return results


if __name__ == "__main__":
  machine.start(main)
