"""Every objective: does it learn, how long is its step, how much memory does it take.

  python benchmarks/objectives.py learn --sources='text:sample.txt' --json=OUT
  python benchmarks/objectives.py speed --json=OUT
  python benchmarks/objectives.py memory --json=OUT

learn   trains each configuration at quickstart size for 200 steps of 64 x 16 tokens on the text, at
        the quickstart's learning rate, and prints the losses on held-out documents, first and
        last.
speed   times each one's step at small size, taking turns with electra in one process: the median of
        the rounds' ratios.
memory  compiles the step at base size, 16 x 512 tokens, float32, layers in a loop, and asks the
        compiler for its temporary memory. Runs nothing.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import machine
from rich.console import Console
from rich.table import Table
from train_step import VOCAB, Ours, synthetic_batch

from electra_jax.config import files, specs
from electra_jax.core import objectives, optimizer, step
from electra_jax.data import build
from electra_jax.monitor import metrics, quantities
from electra_jax.pretrain import train
from electra_jax.runtime import parallel

# Configuration and stage; what needs another run comes after it.
CONFIGS = (
  "electra",
  "electra_15",
  "replace_mlm",
  "all_tokens_mlm",
  "bert",
  "two_stage:stage1",
  "two_stage:stage2",
  "adversarial",
  "electric",
  "electra_tt",
)
STEPS = 200


def load(name: str, size: str):
  """Returns a configuration at a size."""
  name, _, stage = name.partition(":")
  return files.load(f"{name}.py", f"{stage},{size}" if stage else size)


def learn(sources: str) -> dict:
  """Trains each configuration and returns {name: {metric: [first, last]}} on held-out documents."""
  results = {}
  with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    config = files.load("quickstart.py")
    config.data.dir, config.data.sources = str(folder / "shards"), sources
    build.build(config)
    for name in CONFIGS:
      c = load(name, "quickstart")
      c.data.dir = config.data.dir
      c.train.steps, c.optimizer.warmup_steps, c.log.trackers = STEPS, 20, ""
      if name == "two_stage:stage2":
        c.init_from = c.generator.init_from = str(folder / "two_stage:stage1")
      train.train(c, folder / name)
      lines = metrics.read_history(folder / name / "metrics.jsonl")
      first, *_, last = (line for line in lines if line["split"] == "heldout")
      results[name] = {k: [first[k], last[k]] for k in last if k not in ("step", "split")}
  return results


def speed(rounds: int, steps: int) -> dict:
  """Returns {name: {secs_per_step, times_electra}} at small size, 8 x 128 tokens."""
  contestants = {}
  for name in CONFIGS:
    if not name.startswith("two_stage"):  # bert, and electra with less to learn
      config = load(name, "small")
      config.train.batch_size, config.model.unroll = 8, config.model.num_layers
      contestants[name] = Ours(config, synthetic_batch(8, 128))
  secs = {name: [] for name in contestants}
  for _ in range(rounds):
    for name, contestant in contestants.items():
      start = time.perf_counter()
      contestant.run(steps)
      secs[name].append((time.perf_counter() - start) / steps)
  return {
    name: {
      "secs_per_step": min(times),
      "times_electra": statistics.median(
        a / b for a, b in zip(times, secs["electra"], strict=True)
      ),
    }
    for name, times in secs.items()
  }


def memory() -> dict:
  """Returns {name: {temporary_gb, times_replace_mlm}} at base size, 16 x 512 tokens."""
  results = {}
  for name in ("replace_mlm", "all_tokens_mlm", "electra", "electric"):
    config = load(name, "base")
    spec = specs.make_spec(config, VOCAB)
    cfg = specs.make_optimizer_config(config)
    schedule = optimizer.make_schedule(cfg, config.train.steps)
    tx = optimizer.make_optimizer(cfg, schedule)
    mapped = parallel.map_train_step(
      step.make_train_step(objectives.make(spec), tx, schedule, seed=0)
    )
    state = jax.eval_shape(
      lambda spec=spec, tx=tx: step.init_state(objectives.init_params(spec, jax.random.key(0)), tx)
    )
    batch = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((1, *jnp.shape(x)), x.dtype), synthetic_batch(16, 512)
    )
    temporary = mapped.lower(state, batch).compile().memory_analysis().temp_size_in_bytes
    results[name] = {"temporary_gb": temporary / 1e9}
  for result in results.values():
    result["times_replace_mlm"] = result["temporary_gb"] / results["replace_mlm"]["temporary_gb"]
  return results


def show(results: dict) -> None:
  """Prints results as a table."""
  table = Table()
  for title in ("configuration", "measure", "value"):
    table.add_column(title)
  for name, values in results.items():
    for measure, value in values.items():
      if not isinstance(value, list):
        table.add_row(name, measure, f"{value:.3f}")
      elif quantities.of(measure).kind in ("loss", "auc"):
        first, last = (quantities.shown(measure, x) for x in value)
        table.add_row(name, measure, f"{first} -> {last}")
    table.add_section()
  Console(width=100).print(table)


def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("what", choices=("learn", "speed", "memory"))
  p.add_argument("--sources", help="of the text to learn from, as config.data.sources")
  p.add_argument("--rounds", type=int, default=7)
  p.add_argument("--steps", type=int, default=3, help="steps a round")
  p.add_argument("--json", help="write the result here")
  args = p.parse_args()
  parallel.keep_freed_memory()
  if args.what == "learn":
    results = learn(args.sources or p.error("learn needs --sources"))
  elif args.what == "speed":
    results = speed(args.rounds, args.steps)
  else:
    results = memory()
  show(results)
  machine.save(args.json, {"results": results}, hide=[f"--sources={args.sources}"])


if __name__ == "__main__":
  main()
