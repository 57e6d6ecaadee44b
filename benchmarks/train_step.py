"""Speed of the training step, compared with the machine's matrix products and with PyTorch.

  python benchmarks/train_step.py --config=configs/small.py --batch=32 --length=128 --json=OUT
  python benchmarks/train_step.py --peer   # also Hugging Face's networks; needs torch, transformers
  python benchmarks/train_step.py --peer compiled --config=configs/modern.py:150m

The peer trains the same sizes with the same dropout and batch, gathers the masked positions before
the vocabulary layer, samples, and steps AdamW with clipping, in fp32 on CPUs and bf16 autocast on
GPUs, with PyTorch's scaled_dot_product_attention. It shares embeddings where ours has `gdes`, its
ModernBERT has no dropout, and its DeBERTa runs the generator's last layer once on all tokens, ours
twice on the masked ones. On a CPU ours has microbatches of 1,024 tokens, as configs/base.py
advises: the same update, with activations that stay in the caches; `--peer_microbatches` gives the
peer the same. Contestants take turns, because a shared machine's speed drifts, and the best round
counts. The peer runs in a separate process, because the threads of a shared one would spin on each
other's cores. All compile at the same time. `host_secs_per_step` is the CPU time of the thread that
starts the steps and reads the metrics; another thread places the batches. `could_not` lists peers
that fail. Needs no TensorFlow.
"""

import resource
import statistics
import time
from types import SimpleNamespace

import jax
import machine
import numpy as np
import peers
from ml_collections import ConfigDict

from electra_jax.commands import cli
from electra_jax.config import files, specs
from electra_jax.core import flops, objectives
from electra_jax.core.batch import Batch
from electra_jax.monitor import metrics
from electra_jax.pretrain import run as pretraining
from electra_jax.runtime import parallel

# The metadata of BERT's uncased vocabulary that the step needs.
VOCAB = SimpleNamespace(size=30522, mask=103, special_ids=(0, 101, 102, 103))


def synthetic_batch(batch_size: int, length: int) -> Batch:
  """Full sequences of random ordinary tokens."""
  ids = np.random.default_rng(0).integers(1000, VOCAB.size, (batch_size, length), np.int32)
  ids[:, 0], ids[:, -1] = 101, 102
  rows = np.arange(batch_size, dtype=np.int32)
  return Batch(ids, np.zeros_like(ids), np.ones_like(ids, bool), rows)


class Ours:
  """The project's step."""

  name = "electra_jax"

  def __init__(self, config, batch: Batch):
    self.spec = specs.make_spec(config, VOCAB)
    fns = pretraining.make_train_fns(
      self.spec,
      specs.make_optimizer_config(config),
      config.train.steps,
      config.seed,
      config.train.accumulation,
    )
    self.step, self.state = fns.train_step, fns.init_state(parallel.replicate(fns.init_params()))
    self.batch = batch
    self.host_secs = []
    self.compile_secs = peers.secs(lambda: self.run(1))
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


# The vocabulary layer of a masked language model, by Hugging Face's family.
WORD_LOGITS = {
  "electra": lambda model, states: model.generator_lm_head(model.generator_predictions(states)),
  "modernbert": lambda model, states: model.decoder(model.head(states)),
  "deberta-v2": lambda model, states: model.lm_predictions(
    states, model.base_model.embeddings.word_embeddings
  ),
}


class Peer(peers.TorchLoop):
  """Hugging Face's networks in a plain PyTorch loop, with PyTorch's fused attention.

  Args:
    adam: fields of config.optimizer.
    backend: of torch.compile, None without it.
  """

  name = peers.PEERS["eager"][0]

  def __init__(
    self,
    adam: dict,
    batch: Batch,
    spec: objectives.PretrainSpec,
    microbatches: int,
    backend: str | None = None,
  ):
    super().__init__()
    self.d = _network(spec.discriminator, "rtd_head").to(self.device).train()
    self.g = _network(spec.generator, "mlm_head").to(self.device).train()
    self.word_logits = WORD_LOGITS[self.g.config.model_type]
    self.head = _detection_head(self.d.config).to(self.device) if _lacks_head(self.d) else None
    tables = self.d.base_model.embeddings
    self.g.base_model.embeddings = tables
    if self.head is None:  # DeBERTa's head is given the table
      self.g.get_output_embeddings().weight = self.d.get_input_embeddings().weight
    both = [*self.g.parameters(), *self.d.parameters(), *(self.head or self.d).parameters()]
    weights = {id(p): p for p in both}.values()
    self.make_optimizer(weights, adam["learning_rate"], adam["weight_decay"])
    ids = self.torch.from_numpy(batch.ids)
    self.parts = ids.long().to(self.device).chunk(microbatches)
    self.masked = spec.masking.num_masked(batch.ids.shape[1], True)
    self.weight = spec.discriminator_weight.constant
    self.loss = self.compiled(self._loss, backend)
    self.compile_secs = peers.secs(lambda: self.run(1))

  def _loss(self, ids):
    torch = self.torch
    at = torch.rand(ids.shape, device=self.device).topk(self.masked, 1).indices
    originals = ids.gather(1, at)
    with self.autocast():
      states = self.g.base_model(ids.scatter(1, at, VOCAB.mask)).last_hidden_state
      states = states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))
      logits = self.word_logits(self.g, states).float()
      mlm = torch.nn.functional.cross_entropy(logits.flatten(0, 1), originals.flatten())
      noise = torch.empty_like(logits).exponential_()
      sampled = (logits.detach() - noise.log()).argmax(-1)
      corrupted = ids.scatter(1, at, sampled)
      scores = self._scores(corrupted).float().reshape(ids.shape)
      rtd = torch.nn.functional.binary_cross_entropy_with_logits(scores, (corrupted != ids).float())
    return mlm + self.weight * rtd

  def _scores(self, ids):
    if self.head is None:
      return self.d(ids).logits
    states = self.d(ids).last_hidden_state
    return self.head(states + states[:, :1])

  def run(self, steps: int) -> None:
    for _ in range(steps):
      self.tx.zero_grad()
      for ids in self.parts:  # of equal size, with as many tokens and slots in each
        (self.loss(ids) / len(self.parts)).backward()
      self.update()
    self.finish()


def _lacks_head(network) -> bool:
  """Returns whether transformers has no detection head for a network (DeBERTaV3)."""
  return network.base_model is network


def _detection_head(config):
  """Returns DeBERTaV3's detection head, for the sum of a token's and the first token's state."""
  from torch import nn

  width = config.hidden_size
  norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
  return nn.Sequential(norm, nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))


def _network(cfg, head: str):
  """Returns a fresh network of Hugging Face's of the same shape."""
  import transformers

  from electra_jax.interop import huggingface

  transformers.utils.logging.set_verbosity_error()
  kind = getattr(transformers, huggingface.family_of(cfg).classes[head])
  fields = huggingface.config_json(cfg, head, pad_id=0)
  fields |= {} if fields["model_type"] == "deberta-v2" else {"attn_implementation": "sdpa"}
  return kind(kind.config_class.from_dict(fields))


def peak_memory_gb() -> float:
  """Returns the peak memory of the device if it is reported, else of this process."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"] / 1e9
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def configure(config: str, batch: int, length: int, fields: list[str]) -> ConfigDict:
  """Returns the configuration that is measured, with fields set by FIELD=VALUE."""
  own = [f"train.batch_size={batch}"]
  if jax.default_backend() == "cpu":
    # What configs/base.py advises for a CPU.
    own.append(f"model.unroll={files.load_named(config).model.num_layers}")
    own.append(f"train.accumulation={max(1, batch * length // 1024)}")
  return change(config, [*own, *fields])


def change(config: str, fields: list[str]) -> ConfigDict:
  """Returns a configuration with fields set by FIELD=VALUE."""
  return cli.configured(config, [f"--config.{field}" for field in fields])[0]


def summarise(batch: Batch, ours: Ours, contestants: list, secs: dict) -> dict:
  """Returns the results of all contestants from the seconds per step in their rounds."""
  sequences, length = batch.ids.shape
  work = flops.step_flops(ours.spec, sequences, length)
  peak, source = flops.peak_flops(jax.local_devices()[0])
  peak *= jax.device_count()
  rows = {}
  for c in contestants:
    best = min(secs[c.name])
    rows[c.name] = {
      "secs_per_step": best,
      "secs_per_step_median": statistics.median(secs[c.name]),
      "sequences_per_sec": sequences / best,
      "tokens_per_sec": sequences * length / best,
      "model_flops_per_sec": work / best,
      "share_of_matmul_peak": work / best / peak,
      "first_step_secs": c.compile_secs,
    }
  for name in rows.keys() - {ours.name}:
    ratios = [theirs / own for theirs, own in zip(secs[name], secs[ours.name], strict=True)]
    rows[name]["our_speed_over_it_best"] = min(secs[name]) / min(secs[ours.name])
    rows[name]["our_speed_over_it_median_of_rounds"] = statistics.median(ratios)
  rows[ours.name]["host_secs_per_step"] = statistics.median(ours.host_secs)
  return {"matmul_peak_flops": peak, "matmul_peak_source": source, "results": rows}


def main(
  config: str = "configs/small.py",
  batch: int = 32,
  length: int = 128,
  set: list[str] = (),
  rounds: int = 5,
  steps: int = 3,
  peer: peers.Kinds = None,
  peer_microbatches: int = 1,
) -> dict:
  """
  --set    FIELD=VALUE of the configuration
  --steps  per round
  --peer   also run transformers on PyTorch (eager)
  """
  parallel.keep_freed_memory()
  configured, rows = configure(config, batch, length, set), synthetic_batch(batch, length)
  spec, adam = specs.make_spec(configured, VOCAB), configured.optimizer.to_dict()
  others = [
    peers.InItsOwnProcess(name, Peer, adam, rows, spec, peer_microbatches, backend)
    for name, backend in peers.chosen(peer)
  ]
  ours = Ours(configured, rows)
  memory = peak_memory_gb()
  contestants, secs, could_not = peers.compare([ours], others, rounds * [(steps,)])
  secs = {name: [x / steps for x in values] for name, values in secs.items()}
  compute = ours.spec.discriminator.compute
  result = {
    "device": machine.devices(),
    "sizes": f"{config}, batch {batch} x {length}, {compute.dtype},"
    f" dropout {ours.spec.discriminator.dropout}, in {configured.train.accumulation} microbatches",
    "batch": batch,
    "length": length,
    "dtype": compute.dtype,
    "attention": compute.attention,
    **summarise(rows, ours, contestants, secs),
    "peer_microbatches": peer_microbatches,
    "could_not": could_not,
  }
  result["results"][ours.name]["peak_memory_gb"] = memory
  return result


if __name__ == "__main__":
  machine.start(main)
