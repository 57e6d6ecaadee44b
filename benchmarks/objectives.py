"""Step time and memory of every objective; benchmarks/learn.py tests whether each learns.

  python benchmarks/objectives.py speed --json=OUT
  python benchmarks/objectives.py memory --json=OUT

speed   times the step of each at small size, in turns with electra in one process: the median
        of the ratios.
memory  compiles the step at base size, 16 x 512 tokens, float32, layers in a loop, and prints the
        compiler's temporary memory. Runs nothing.
"""

import statistics
from typing import Literal

import jax
import machine
import peers
from learn import OBJECTIVES
from train_step import Ours, synthetic_batch

from electra_jax.config import files
from electra_jax.cost import preflight
from electra_jax.runtime import parallel


def speed(rounds: int, steps: int) -> dict:
  """Returns {name: {secs_per_step, times_electra}} at small size, 8 x 128 tokens."""
  contestants = []
  for name in OBJECTIVES:
    config = files.load(f"{name}.py", "small")
    config.train.batch_size, config.model.unroll = 8, config.model.num_layers
    contestants.append(peers.Action(name, Ours(config, synthetic_batch(8, 128)).run))
  secs, _ = peers.take_turns(contestants, rounds * [(steps,)])
  return {
    name: {
      "secs_per_step": min(times) / steps,
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
    config.train.batch_size, config.data.seq_length = 16, 512
    compiled, _ = preflight.compile_step(config, tuple(jax.devices()[:1]))
    results[name] = {"temporary_gb": compiled.memory_analysis().temp_size_in_bytes / 1e9}
  for result in results.values():
    result["times_replace_mlm"] = result["temporary_gb"] / results["replace_mlm"]["temporary_gb"]
  return results


def main(what: Literal["speed", "memory"], /, rounds: int = 7, steps: int = 3) -> dict:
  parallel.keep_freed_memory()
  return {"results": speed(rounds, steps) if what == "speed" else memory()}


if __name__ == "__main__":
  machine.start(main)
