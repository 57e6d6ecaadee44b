"""Speed of the training step, against the machine's matrix products and against PyTorch.

  python benchmarks/train_step.py --config=configs/small.py --batch=32 --length=128 --json=OUT
  python benchmarks/train_step.py --peer   # also Hugging Face's networks; needs torch, transformers

The peer trains the same sizes with the same dropout and batch, gathers the masked positions before
the vocabulary layer, samples, and steps AdamW with clipping; fp32 on CPUs, bf16 autocast on GPUs.
On a CPU ours splits the batch into microbatches of 8, as configs/base.py advises: the same update,
from activations that stay in the caches. `--peer_microbatches` gives the peer the same.
Rounds alternate between the two, because a shared machine's speed drifts; the best one counts. The
peer has a process of its own: in one process the threads of the one wait busily on the other's
cores. `host_secs_per_step` is the CPU time of the thread that starts the steps and reads their
numbers; another one places the batches. Needs no TensorFlow. Works the same on a GPU.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from types import SimpleNamespace

import jax
import machine
import numpy as np

from electra_jax.config import compare, files, specs
from electra_jax.core import flops, objectives, optimizer, step
from electra_jax.core.batch import Batch
from electra_jax.runtime import metrics, parallel

# BERT's uncased vocabulary, as far as the step needs to know it.
VOCAB = SimpleNamespace(size=30522, mask=103, special_ids=(0, 101, 102, 103))


def synthetic_batch(batch_size: int, length: int) -> Batch:
  """Full sequences of random ordinary tokens."""
  ids = np.random.default_rng(0).integers(1000, VOCAB.size, (batch_size, length), np.int32)
  ids[:, 0], ids[:, -1] = 101, 102
  rows = np.arange(batch_size, dtype=np.int32)
  return Batch(ids, np.zeros_like(ids), np.ones_like(ids, bool), rows)


class Ours:
  """The project's own step."""

  name = "electra_jax"

  def __init__(self, config, batch: Batch):
    self.spec = specs.make_spec(config, VOCAB)
    cfg = specs.make_optimizer_config(config)
    schedule = optimizer.make_schedule(cfg, config.train.steps)
    tx = optimizer.make_optimizer(cfg, schedule)
    objective = objectives.make(self.spec)
    self.step = parallel.map_train_step(
      step.make_train_step(
        objective, tx, schedule, seed=0, accumulation=config.train.accumulation, axis=parallel.AXIS
      )
    )

    def fresh():
      return step.init_state(objectives.init_params(self.spec, jax.random.key(0)), tx)

    self.state = parallel.replicate(jax.jit(fresh)())
    self.batch = batch
    self.host_secs = []
    start = time.perf_counter()
    self.run(1)
    self.compile_secs = time.perf_counter() - start
    self.host_secs.clear()

  def run(self, steps: int) -> None:
    """Runs steps as training does, and waits for the last."""
    batches = parallel.prefetch([self.batch] * (steps + 1))
    window = metrics.Window()
    for done in range(1, steps + 1):
      start = time.thread_time()
      self.state, values = self.step(self.state, next(batches))
      window.add(done, values)
      self.host_secs.append(time.thread_time() - start)
    window.drain()
    jax.block_until_ready(self.state)


class Peer:
  """Hugging Face's networks in a plain PyTorch loop."""

  name = "transformers + PyTorch"

  def __init__(self, adam: dict, batch: Batch, spec: objectives.PretrainSpec, microbatches: int):
    import torch
    from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

    def shape(cfg):
      return ElectraConfig(
        vocab_size=cfg.vocab_size,
        embedding_size=cfg.embedding_size,
        hidden_size=cfg.hidden_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        intermediate_size=cfg.ffn_size,
        hidden_dropout_prob=cfg.dropout,
        attention_probs_dropout_prob=cfg.attention_dropout,
      )

    self.torch = torch
    self.device = "cuda" if torch.cuda.is_available() else "cpu"
    self.d = ElectraForPreTraining(shape(spec.discriminator)).to(self.device).train()
    self.g = ElectraForMaskedLM(shape(spec.generator)).to(self.device).train()
    self.g.electra.embeddings = self.d.electra.embeddings
    self.g.generator_lm_head.weight = self.d.electra.embeddings.word_embeddings.weight
    both = [*self.g.parameters(), *self.d.parameters()]
    self.weights = list({id(p): p for p in both}.values())
    self.tx = torch.optim.AdamW(
      self.weights, adam["learning_rate"], weight_decay=adam["weight_decay"]
    )
    self.parts = torch.from_numpy(batch.ids).long().to(self.device).chunk(microbatches)
    self.masked = spec.masking.num_masked(batch.ids.shape[1], True)
    self.weight = spec.discriminator_weight.constant
    start = time.perf_counter()
    self.run(1)
    self.compile_secs = time.perf_counter() - start

  def _loss(self, ids):
    torch = self.torch
    at = torch.rand(ids.shape, device=self.device).topk(self.masked, 1).indices
    originals = ids.gather(1, at)
    with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
      states = self.g.electra(ids.scatter(1, at, VOCAB.mask)).last_hidden_state
      states = states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))
      logits = self.g.generator_lm_head(self.g.generator_predictions(states)).float()
      mlm = torch.nn.functional.cross_entropy(logits.flatten(0, 1), originals.flatten())
      noise = torch.empty_like(logits).exponential_()
      sampled = (logits.detach() - noise.log()).argmax(-1)
      corrupted = ids.scatter(1, at, sampled)
      scores = self.d(corrupted).logits.float()
      rtd = torch.nn.functional.binary_cross_entropy_with_logits(scores, (corrupted != ids).float())
    return mlm + self.weight * rtd

  def _step(self) -> None:
    self.tx.zero_grad()
    for ids in self.parts:  # of equal size, with as many tokens and slots in each
      (self._loss(ids) / len(self.parts)).backward()
    self.torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
    self.tx.step()

  def run(self, steps: int) -> None:
    """Runs steps and waits for the last."""
    for _ in range(steps):
      self._step()
    if self.device == "cuda":
      self.torch.cuda.synchronize()


class InItsOwnProcess:
  """A peer that runs there and is waited for here."""

  name = Peer.name

  def __init__(self, *args):
    context = multiprocessing.get_context("spawn")
    self.pipe, theirs = context.Pipe()
    context.Process(target=_serve, args=(theirs, *args), daemon=True).start()
    self.compile_secs = self.pipe.recv()

  def run(self, steps: int) -> None:
    self.pipe.send(steps)
    self.pipe.recv()


def _serve(pipe, *args) -> None:
  peer = Peer(*args)
  pipe.send(peer.compile_secs)
  while True:
    peer.run(pipe.recv())
    pipe.send(None)


def measure(contestants: list, rounds: int, steps: int) -> dict[str, list[float]]:
  """Returns the seconds a step of each contestant in each round, contestants taking turns."""
  secs = {c.name: [] for c in contestants}
  for _ in range(rounds):
    for c in contestants:
      start = time.perf_counter()
      c.run(steps)
      secs[c.name].append((time.perf_counter() - start) / steps)
  return secs


def peak_memory_gb() -> float:
  """Returns the most memory used so far: of the device where it says, else of this process."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"] / 1e9
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--config", default="configs/small.py")
  p.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="of the configuration")
  p.add_argument("--batch", type=int, default=32, help="sequences in a step")
  p.add_argument("--length", type=int, default=128, help="tokens of a sequence")
  p.add_argument("--rounds", type=int, default=5)
  p.add_argument("--steps", type=int, default=3, help="steps a round")
  p.add_argument("--peer", action="store_true", help="also run transformers on PyTorch")
  p.add_argument("--peer_microbatches", type=int, default=1, help="of the peer")
  p.add_argument("--json", help="write the result here")
  args = p.parse_args()

  config = files.load(args.config)
  config.train.batch_size = args.batch
  parallel.keep_freed_memory()
  if jax.default_backend() == "cpu":
    # What configs/base.py advises for a CPU.
    config.model.unroll = config.model.num_layers
    config.train.accumulation = max(1, args.batch // 8)
  for field, value in (pair.split("=", 1) for pair in args.set):
    config.update_from_flattened_dict({field: type(compare.flatten(config)[field])(value)})
  batch = synthetic_batch(args.batch, args.length)

  ours = Ours(config, batch)
  memory = peak_memory_gb()
  contestants = [ours] + (
    [InItsOwnProcess(config.optimizer.to_dict(), batch, ours.spec, args.peer_microbatches)]
    if args.peer
    else []
  )
  work = flops.step_flops(ours.spec, args.batch, args.length)
  secs = measure(contestants, args.rounds, args.steps)
  peak, source = flops.peak_flops(jax.local_devices()[0])
  peak *= jax.device_count()
  rows = {}
  for c in contestants:
    best = min(secs[c.name])
    rows[c.name] = {
      "secs_per_step": best,
      "secs_per_step_median": statistics.median(secs[c.name]),
      "sequences_per_sec": args.batch / best,
      "tokens_per_sec": args.batch * args.length / best,
      "model_flops_per_sec": work / best,
      "share_of_matmul_peak": work / best / peak,
      "first_step_secs": c.compile_secs,
    }
  rows[ours.name]["peak_memory_gb"] = memory
  rows[ours.name]["host_secs_per_step"] = statistics.median(ours.host_secs)
  result = {
    "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    "sizes": f"{args.config}, batch {args.batch} x {args.length},"
    f" {ours.spec.discriminator.compute.dtype},"
    f" dropout {ours.spec.discriminator.dropout}, in {config.train.accumulation} microbatches",
    "matmul_peak_flops": peak,
    "matmul_peak_source": source,
    "results": rows,
  }
  if args.peer:
    result["peer_microbatches"] = args.peer_microbatches
    ratios = [b / a for a, b in zip(*(secs[c.name] for c in contestants), strict=True)]
    result["speed_over_peer_best"] = min(secs[Peer.name]) / min(secs[ours.name])
    result["speed_over_peer_median_of_rounds"] = statistics.median(ratios)
  print(json.dumps(result, indent=1))
  machine.save(args.json, result)


if __name__ == "__main__":
  main()
