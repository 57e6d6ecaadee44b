"""Speed of fine-tuning on MRPC, with buckets and padded, against a PyTorch loop of Trainer's kind.

  python benchmarks/finetune.py --glue=GLUE --vocab=vocab.txt --peer --json=OUT

One epoch over the training set (each pair once) in batches of 32, ELECTRA-Small, dropout 0.1,
float32 on CPUs. Ours trains one seed by `finetune.loop`'s step: in batches of few lengths, and, as
a limit, padded to 128 as the peer is. The peer is transformers' ElectraForSequenceClassification of
the same sizes with PyTorch's AdamW, clipping and a linear schedule, its dataset padded to 128, as
Trainer does with padding="max_length". Weights are fresh: speed does not depend on them. The epoch
is cut into parts, and the contestants take turns, because a shared machine's speed drifts. The
first step of every length, which compiles, comes before. Needs torch and transformers for --peer.
"""

import argparse
import json
import multiprocessing
import statistics
import time

import jax
import machine
import numpy as np

from electra_jax.config import files
from electra_jax.core import optimizer, task_heads
from electra_jax.core import step as steps
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data import finetune_batches as data
from electra_jax.data import tokenizer
from electra_jax.finetune import glue, glue_files, loop, tasks
from electra_jax.runtime import parallel

LENGTH, BATCH = 128, 32


def small(vocab_size: int) -> TransformerConfig:
  """ELECTRA-Small's discriminator, as configs/small.py has it."""
  m = files.load("small.py").model
  return TransformerConfig(
    vocab_size,
    m.embedding_size,
    m.hidden_size,
    m.num_layers,
    m.num_heads,
    m.ffn_size,
    m.max_positions,
    unroll=m.num_layers if jax.default_backend() == "cpu" else 1,
    dtype="float32" if jax.default_backend() == "cpu" else "bfloat16",
  )


class Ours:
  """The project's own step on one seed, an epoch at a time."""

  def __init__(
    self, name: str, rows: list, cfg: TransformerConfig, buckets: tuple, pad: int, micro
  ):
    self.name, self.rows, self.buckets, self.pad = name, rows, buckets, pad
    adam = optimizer.OptimizerConfig(
      "electra_adam", 3e-4, "product", 0, 1.0, 0.0, 0.9, 0.999, 1e-6, 1.0
    )
    settings = loop.Settings((0,), adam, 0.1, 0.8, False, BATCH, micro, 3.0, BATCH, 4, 100, pad)
    head = task_heads.classification(2, "linear")
    params = loop.init_params(cfg, head, None, (0,))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
    tx, step = loop.make_step(cfg, head, settings, 3 * -(-len(rows) // BATCH), shapes)
    self.state = parallel.replicate(jax.vmap(lambda p: steps.init_state(p, tx))(params))
    self.step = parallel.map_train_step(step)
    start = time.perf_counter()
    for length in buckets:
      self._run([data.Plan(np.arange(BATCH) * 0 + self._short(length), length)])
    self.compile_secs = time.perf_counter() - start
    lengths = np.array([len(r.ids) for r in rows])
    self.plans = data.plan_epoch(lengths, buckets, BATCH, 0, 0)

  def _short(self, length: int) -> int:
    return next(i for i, row in enumerate(self.rows) if len(row.ids) <= length)

  def _run(self, plans: list) -> None:
    batches = (data.collate(self.rows, plan, BATCH, self.pad) for plan in plans)
    one_seed = (jax.tree.map(lambda x: x[:, None], batch) for batch in batches)
    for batch in parallel.prefetch(one_seed):
      self.state, _ = self.step(self.state, batch)
    jax.block_until_ready(self.state)

  def run(self, part: int, parts: int) -> None:
    """Trains on every `parts`-th batch of the epoch."""
    self._run(self.plans[part::parts])


class Peer:
  """Hugging Face's classifier in a plain PyTorch loop."""

  def __init__(self, rows: list, cfg: TransformerConfig, pad: int):
    import torch
    from transformers import ElectraConfig, ElectraForSequenceClassification

    self.torch = torch
    self.device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = ElectraConfig(
      vocab_size=cfg.vocab_size,
      embedding_size=cfg.embedding_size,
      hidden_size=cfg.hidden_size,
      num_hidden_layers=cfg.num_layers,
      num_attention_heads=cfg.num_heads,
      intermediate_size=cfg.ffn_size,
      num_labels=2,
    )
    self.model = ElectraForSequenceClassification(shape).to(self.device).train()
    self.tx = torch.optim.AdamW(self.model.parameters(), 3e-4, weight_decay=0.0)
    self.schedule = torch.optim.lr_scheduler.LambdaLR(self.tx, lambda t: max(0.0, 1 - t / 1000))
    order = np.random.default_rng(0).permutation(len(rows))
    plans = [data.Plan(order[i : i + BATCH], LENGTH) for i in range(0, len(rows), BATCH)]
    self.batches = [data.collate(rows, plan, len(plan.rows), pad) for plan in plans]
    start = time.perf_counter()
    self._step(self.batches[0])
    self.compile_secs = time.perf_counter() - start

  def _step(self, batch) -> None:
    torch = self.torch
    tensors = {
      "input_ids": batch.ids,
      "token_type_ids": batch.token_type_ids,
      "attention_mask": batch.padding_mask,
      "labels": batch.target["label"],
    }
    tensors = {k: torch.from_numpy(v).long().to(self.device) for k, v in tensors.items()}
    with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
      loss = self.model(**tensors).loss
    self.tx.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
    self.tx.step()
    self.schedule.step()

  def run(self, part: int, parts: int) -> None:
    """Trains on every `parts`-th batch of the epoch."""
    for batch in self.batches[part::parts]:
      self._step(batch)
    if self.device == "cuda":
      self.torch.cuda.synchronize()


class InItsOwnProcess:
  """A peer that runs there and is waited for here: in one process threads wait on each other."""

  name = "transformers + PyTorch, padded to 128"

  def __init__(self, *args):
    context = multiprocessing.get_context("spawn")
    self.pipe, theirs = context.Pipe()
    context.Process(target=_serve, args=(theirs, *args), daemon=True).start()
    self.compile_secs = self.pipe.recv()

  def run(self, *part) -> None:
    """As `Peer.run`."""
    self.pipe.send(part)
    self.pipe.recv()

  def stop(self) -> None:
    """Ends the process."""
    self.pipe.send(None)


def _serve(pipe, *args) -> None:
  peer = Peer(*args)
  pipe.send(peer.compile_secs)
  while (part := pipe.recv()) is not None:
    peer.run(*part)
    pipe.send(None)


def main() -> None:
  """Runs from the command line."""
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--glue", required=True, help="folder with GLUE's folders")
  p.add_argument("--vocab", required=True, help="BERT's vocab.txt")
  p.add_argument("--examples", type=int, default=0, help="an even choice of so many; 0 = all")
  p.add_argument("--parts", type=int, default=6, help="turns that the epoch is cut into")
  p.add_argument("--buckets", type=int, default=4)
  p.add_argument("--microbatch", type=int, default=8, help="examples; on accelerators all at once")
  p.add_argument("--peer", action="store_true", help="also run transformers on PyTorch")
  p.add_argument("--json", help="write the result here")
  args = p.parse_args()
  parallel.keep_freed_memory()
  task, words = tasks.TASKS["mrpc"], tokenizer.load(args.vocab)
  rows, _ = glue.features(
    task, glue_files.read(task, args.glue, "train").examples, words, max_length=LENGTH
  )
  if args.examples:
    rows = [rows[i * len(rows) // args.examples] for i in range(args.examples)]
  lengths = np.array([len(r.ids) for r in rows])
  cfg, pad = small(words.vocab.size), words.vocab.pad
  micro = BATCH // args.microbatch if jax.default_backend() == "cpu" else 1
  buckets = data.bucket_lengths(lengths, args.buckets)
  padded = np.asarray(buckets)[np.searchsorted(buckets, lengths)]
  contestants = [
    Ours("electra_jax", rows, cfg, buckets, pad, micro),
    Ours("electra_jax, padded to 128", rows, cfg, (LENGTH,), pad, micro),
  ]
  if args.peer:
    contestants.append(InItsOwnProcess(rows, cfg, pad))
  secs: dict[str, list[float]] = {c.name: [] for c in contestants}
  for part in range(args.parts):
    for c in contestants:
      start = time.perf_counter()
      c.run(part, args.parts)
      secs[c.name].append(time.perf_counter() - start)
  result = {
    "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    "examples": len(rows),
    "mean_tokens": float(lengths.mean()),
    "buckets": buckets,
    "padding_frac": float(1 - lengths.sum() / padded.sum()),
    "microbatches": micro,
    "results": {
      c.name: {
        "epoch_secs": sum(secs[c.name]),
        "examples_per_sec": len(rows) / sum(secs[c.name]),
        "first_steps_secs": c.compile_secs,
      }
      for c in contestants
    },
  }
  if args.peer:
    contestants[-1].stop()
    peer = secs[InItsOwnProcess.name]
    for c in contestants[:2]:
      ratios = [b / a for a, b in zip(secs[c.name], peer, strict=True)]
      result["results"][c.name]["speed_over_peer"] = sum(peer) / sum(secs[c.name])
      result["results"][c.name]["speed_over_peer_median_of_turns"] = statistics.median(ratios)
  print(json.dumps(result, indent=1))
  machine.save(args.json, result, hide=[args.glue, args.vocab])


if __name__ == "__main__":
  main()
