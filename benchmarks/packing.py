"""Packed rows: real tokens per second compared with two-segment examples, and attention's memory.

  python benchmarks/packing.py speed --folder=DIR --json=benchmarks/results/packing.json
  python benchmarks/packing.py memory v5e:1x1 h200x1 --json=benchmarks/results/packing_memory.json

`speed` builds the docstrings of the installed packages both ways at 128 and 512 tokens and times
the step of a small network on these batches; rounds alternate, and the best counts. Real tokens are
tokens of the text, without padding, special and discarded tokens.

`memory` compiles attention and its gradient for described devices: with the mask and, on TPUs,
splash attention, on GPUs cuDNN's packed layout. Needs the TPU compiler (the extra `tpu`), or the
GPU compiler (`gpu-compile`) and nvidia-cudnn-cu13.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import machine
import peers

from electra_jax.config import files, specs
from electra_jax.core import attention
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.cost import targets
from electra_jax.data import build, pretrain_batches
from electra_jax.pretrain import run
from electra_jax.runtime import parallel

TOKENS = 2048  # of a batch


class Contestant:
  """The training step on batches of one kind of examples."""

  def __init__(self, folder: str, kind: str, length: int):
    c = files.load("quickstart.py")
    c.data.dir, c.data.examples, c.data.seq_length = f"{folder}/{kind}-{length}", kind, length
    c.model.max_positions, c.train.batch_size = length, TOKENS // length
    self.name, self.facts = kind, build.build(c)["splits"]["train"]
    shards = pretrain_batches.Shards.open(c.data.dir)
    spec = specs.make_spec(c, shards.vocab)
    optimizer_config = specs.make_optimizer_config(c)
    fns = run.make_train_fns(spec, optimizer_config, 1000, 0, c.train.accumulation)
    self.step, self.state = fns.train_step, fns.init_state(fns.init_params())
    batches = pretrain_batches.train_batches(shards, seed=0, batch_size=c.train.batch_size)
    self.batches = parallel.prefetch(batches)
    self.tokens_per_step = self.facts["kept"] / self.facts["examples"] * c.train.batch_size
    self.run(1)

  def run(self, steps: int) -> None:
    for _ in range(steps):
      self.state, _ = self.step(self.state, next(self.batches))
    jax.block_until_ready(self.state)


def speed(folder: str, rounds: int, steps: int) -> dict:
  """Returns the real tokens per second for each kind of examples and each length."""
  found = {}
  for length in (128, 512):
    contestants = [Contestant(folder, kind, length) for kind in ("segments", "packed")]
    secs, _ = peers.take_turns(contestants, rounds * [(steps,)])
    for c in contestants:
      best = min(secs[c.name]) / steps
      found[f"{c.name} {length}"] = {
        "secs_per_step": best,
        "real_tokens_per_sec": c.tokens_per_step / best,
        "discarded": c.facts["discarded"] / c.facts["tokens"],
        "padded": c.facts["padded"] / (c.facts["examples"] * length),
      }
  return found


def memory(topologies: list[str]) -> dict:
  """Returns the bytes of temporaries of attention and its gradient, 8 rows of 512, bfloat16."""
  from jax._src.cudnn import fused_attention_stablehlo as fused

  fused.check_compute_capability = lambda capability: True  # it asks for a GPU of this machine
  B, L, H, d = 8, 512, 12, 64
  cfg = TransformerConfig(1000, H * d, H * d, 1, H, 4 * H * d, L, window=128)
  found = {}
  for topology in topologies:
    device = targets.find(topology).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((B, L, H, d), jnp.bfloat16, sharding=sharding)
    ids = jax.ShapeDtypeStruct((B, L), jnp.int32, sharding=sharding)
    for name in ("xla", {"gpu": "cudnn", "tpu": "splash"}[device.platform]):
      for local in (False, True)[: 1 + attention.ATTENTION[name].local]:

        def total(q, k, v, ids, name=name, local=local):
          inputs = attention.Inputs(q, k, v, ids > 0, ids, None)
          y = attention.ATTENTION[name].apply(cfg, inputs, local)
          return jnp.square(y.astype(jnp.float32)).sum()

        compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(x, x, x, ids).compile()
        label = f"{topology} {name}{' window 128' if local else ''}"
        found[label] = {"temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}
  return found


def main(
  what: Literal["speed", "memory"],
  topologies: list[str],
  /,
  folder: str | None = None,
  rounds: int = 6,
  steps: int = 5,
) -> dict:
  return {"results": speed(folder, rounds, steps) if what == "speed" else memory(topologies)}


if __name__ == "__main__":
  machine.start(main)
