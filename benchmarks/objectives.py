"""Step time and memory of every objective; benchmarks/learn.py tests whether each learns.

  python benchmarks/objectives.py speed --json=OUT
  python benchmarks/objectives.py memory --json=OUT

speed   times each one's step at small size, taking turns with electra in one process: the median of
        the rounds' ratios.
memory  compiles the step at base size, 16 x 512 tokens, float32, layers in a loop, and asks the
        compiler for its temporary memory. Runs nothing.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import machine
from learn import OBJECTIVES
from rich.console import Console
from rich.table import Table
from train_step import VOCAB, Ours, synthetic_batch

from electra_jax.config import files, specs
from electra_jax.core import learning_rates, objectives, optimizer, step
from electra_jax.runtime import parallel


def speed(rounds: int, steps: int) -> dict:
  """Returns {name: {secs_per_step, times_electra}} at small size, 8 x 128 tokens."""
  contestants = {}
  for name in OBJECTIVES:
    config = files.load(f"{name}.py", "small")
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
    config = files.load(f"{name}.py", "base")
    spec = specs.make_spec(config, VOCAB)
    cfg = specs.make_optimizer_config(config)
    schedule = learning_rates.make_schedule(cfg, config.train.steps)
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
      table.add_row(name, measure, f"{value:.3f}")
    table.add_section()
  Console(width=100).print(table)


def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("what", choices=("speed", "memory"))
  p.add_argument("--rounds", type=int, default=7)
  p.add_argument("--steps", type=int, default=3, help="steps a round")
  p.add_argument("--json", help="write the result here")
  args = p.parse_args()
  parallel.keep_freed_memory()
  results = speed(args.rounds, args.steps) if args.what == "speed" else memory()
  show(results)
  machine.save(args.json, {"results": results})


if __name__ == "__main__":
  main()
