"""Speed of fine-tuning on MRPC, with buckets and padded, compared with a PyTorch loop.

  python benchmarks/finetune.py --glue=GLUE --vocab=vocab.txt --peer --json=OUT
  python benchmarks/finetune.py --peer compiled   # random tokens with the lengths of MRPC's pairs

One epoch over the training set (each pair once) in batches of 32, ELECTRA-Small, dropout 0.1,
float32 on CPUs, bfloat16 on GPUs. Ours trains one seed with the step of `finetune.loop`, in batches
of few lengths and also padded to 128. The peer is transformers' ElectraForSequenceClassification of
the same sizes with PyTorch's AdamW, clipping and a linear schedule, and data padded to 128, as
Trainer does with padding="max_length". Weights are random, because speed does not depend on them.
The contestants take turns on parts of the epoch, because a shared machine's speed drifts, after the
first steps of every length, which compile at the same time. --peer needs torch and transformers.
"""

import statistics

import jax
import machine
import numpy as np
import peers

from electra_jax.config import files
from electra_jax.core import optimizer, task_heads
from electra_jax.core.transformer_config import Compute, TransformerConfig, take_fields
from electra_jax.data import tokenizer
from electra_jax.finetune import batches as data
from electra_jax.finetune import glue_files, loop, tasks, text_task
from electra_jax.runtime import parallel

LENGTH, BATCH = 128, 32
# Percentiles of the tokens of MRPC's 3,668 training pairs, in BERT's vocabulary.
PAIRS, VOCAB_SIZE, PAD = 3668, 30522, 0
PERCENTILES = ((0, 5, 25, 50, 75, 95, 100), (19, 32, 44, 53, 62, 74, 103))


def small(layers: int) -> TransformerConfig:
  """ELECTRA-Small's discriminator, as configs/small.py has it, with a number of layers."""
  m = files.load("small.py").model
  m.num_layers = layers
  on_cpu = jax.default_backend() == "cpu"
  compute = Compute("float32" if on_cpu else "bfloat16", unroll=layers)
  return take_fields(TransformerConfig, m, vocab_size=VOCAB_SIZE, compute=compute)


def random_pairs() -> list[data.Feature]:
  rng = np.random.default_rng(0)
  lengths = np.interp(rng.uniform(0, 100, PAIRS), *PERCENTILES).astype(int)
  return [
    data.Feature(
      rng.integers(1000, VOCAB_SIZE, n, np.int32), n // 2, {"label": np.int32(rng.integers(2))}
    )
    for n in lengths
  ]


def read_pairs(folder: str, vocab: str) -> list[data.Feature]:
  """Returns MRPC's training pairs; the vocabulary is BERT's."""
  task = tasks.TASKS["mrpc"]
  examples = glue_files.read(task, folder, "train").examples
  return text_task.features(task, examples, tokenizer.load(vocab), max_length=LENGTH)[0]


class Ours:
  """The project's step on one seed, an epoch at a time."""

  def __init__(self, name: str, rows: list, cfg: TransformerConfig, buckets: tuple, micro: int):
    self.name, self.rows, self.buckets = name, rows, buckets
    adam = optimizer.OptimizerConfig(
      "electra_adam", 3e-4, "product", 0, 1.0, 0.0, 0.9, 0.999, 1e-6, 1.0
    )
    settings = loop.Settings(
      (0,), adam, 0.1, 0.8, False, BATCH, micro, 3.0, BATCH, 4, 100, PAD, LENGTH
    )
    head = task_heads.classification(2, "linear")
    self.state, self.step = loop.start(cfg, head, None, settings, 3 * -(-len(rows) // BATCH))
    self.compile_secs = peers.secs(
      lambda: [
        self._run([data.Plan(np.arange(BATCH) * 0 + self._short(length), length)])
        for length in buckets
      ]
    )
    lengths = np.array([len(r.ids) for r in rows])
    self.plans = data.plan_epoch(lengths, buckets, BATCH, 0, 0)

  def _short(self, length: int) -> int:
    return next(i for i, row in enumerate(self.rows) if len(row.ids) <= length)

  def _run(self, plans: list) -> None:
    batches = (data.collate(self.rows, plan, BATCH, PAD) for plan in plans)
    one_seed = (jax.tree.map(lambda x: x[:, None], batch) for batch in batches)
    for batch in parallel.prefetch(one_seed):
      self.state, _ = self.step(self.state, batch)
    jax.block_until_ready(self.state)

  def run(self, part: int, parts: int) -> None:
    self._run(self.plans[part::parts])


class Peer(peers.TorchLoop):
  """Hugging Face's classifier in a plain PyTorch loop; `backend` is torch.compile's, or None."""

  def __init__(self, backend: str | None, rows: list, cfg: TransformerConfig):
    from transformers import ElectraConfig, ElectraForSequenceClassification

    super().__init__()
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
    self.forward = self.compiled(self.model, backend)
    self.make_optimizer(self.model.parameters(), 3e-4, 0.0)
    schedule = self.torch.optim.lr_scheduler.LambdaLR
    self.schedule = schedule(self.tx, lambda t: max(0.0, 1 - t / 1000))
    order = np.random.default_rng(0).permutation(len(rows))
    plans = [data.Plan(order[i : i + BATCH], LENGTH) for i in range(0, len(rows), BATCH)]
    self.batches = [data.collate(rows, plan, len(plan.rows), PAD) for plan in plans]
    sizes = {len(batch.ids): batch for batch in self.batches}.values()
    self.compile_secs = peers.secs(lambda: [self._step(batch) for batch in sizes])

  def _step(self, batch) -> None:
    tensors = {
      "input_ids": batch.ids,
      "token_type_ids": batch.token_type_ids,
      "attention_mask": batch.padding_mask,
      "labels": batch.target["label"],
    }
    tensors = {k: self.torch.from_numpy(v).long().to(self.device) for k, v in tensors.items()}
    with self.autocast():
      loss = self.forward(**tensors).loss
    self.tx.zero_grad()
    loss.backward()
    self.update()
    self.schedule.step()

  def run(self, part: int, parts: int) -> None:
    for batch in self.batches[part::parts]:
      self._step(batch)
    self.finish()


def main(
  glue: str | None = None,
  vocab: str | None = None,
  examples: int = 0,
  parts: int = 6,
  buckets: int = 4,
  microbatch: int = 8,
  peer: peers.Kinds = None,
  layers: int = 12,
) -> dict:
  """
  --glue        folder with GLUE's folders
  --vocab       BERT's vocab.txt, with --glue
  --examples    number of examples, evenly spaced; 0 = all
  --parts       number of turns in the epoch
  --microbatch  examples per microbatch; on accelerators the whole batch
  --peer        also run transformers on PyTorch (eager)
  """
  parallel.keep_freed_memory()
  if glue and not vocab:
    raise SystemExit("error: --glue needs --vocab")
  rows = read_pairs(glue, vocab) if glue else random_pairs()
  if examples:
    rows = [rows[i * len(rows) // examples] for i in range(examples)]
  lengths = np.array([len(r.ids) for r in rows])
  cfg = small(layers)
  others = [
    peers.InItsOwnProcess(f"{name}, padded to 128", Peer, backend, rows, cfg)
    for name, backend in peers.chosen(peer)
  ]
  micro = BATCH // microbatch if jax.default_backend() == "cpu" else 1
  several = data.bucket_lengths(lengths, buckets)
  padded = np.asarray(several)[np.searchsorted(several, lengths)]
  ours = [
    Ours("electra_jax", rows, cfg, several, micro),
    Ours("electra_jax, padded to 128", rows, cfg, (LENGTH,), micro),
  ]
  rounds = [(i, parts) for i in range(parts)]
  contestants, secs, could_not = peers.compare(ours, others, rounds)
  results = {
    c.name: {
      "epoch_secs": sum(secs[c.name]),
      "examples_per_sec": len(rows) / sum(secs[c.name]),
      "first_steps_secs": c.compile_secs,
    }
    for c in contestants
  }
  for name in results.keys() - {c.name for c in ours}:
    results[name]["our_speed_over_it"] = {
      c.name: {
        "epoch": sum(secs[name]) / sum(secs[c.name]),
        "median_of_turns": statistics.median(np.divide(secs[name], secs[c.name])),
      }
      for c in ours
    }
  return {
    "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    "pairs": "MRPC" if glue else "random tokens of MRPC's lengths",
    "examples": len(rows),
    "mean_tokens": float(lengths.mean()),
    "buckets": several,
    "padding_frac": float(1 - lengths.sum() / padded.sum()),
    "microbatches": micro,
    "results": results,
    "could_not": could_not,
  }


if __name__ == "__main__":
  machine.start(main)
