"""The first five losses of every configuration and option, made small: what must never change.

  python tests/golden/losses.py [CASE...]  # compares with losses.json, prints what differs
  python tests/golden/losses.py --write CASE...  # only when a number is meant to change
  JAX_PLATFORMS=cuda JAX_DEFAULT_MATMUL_PRECISION=highest python tests/golden/losses.py  # on a GPU

Networks of two layers on a fixed batch of random tokens, with the configuration's own objective,
generator, ties, masking and optimizer. Needs no data and no TensorFlow.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from electra_jax.config import files, specs, validate  # noqa: E402
from electra_jax.core import generators  # noqa: E402
from electra_jax.core.batch import Batch  # noqa: E402
from electra_jax.monitor import metrics  # noqa: E402
from electra_jax.pretrain.run import make_train_fns  # noqa: E402
from electra_jax.runtime import parallel  # noqa: E402

HERE = Path(__file__).parent
STEPS = 5
V, L, B = 100, 16, 16
SMALL = {
  "model.hidden_size": 16, "model.num_layers": 2, "model.num_heads": 2, "model.ffn_size": 32,
  "model.max_positions": L, "model.dtype": "float32", "data.seq_length": L, "data.vocab_size": V,
  "optimizer.warmup_steps": 2, "train.batch_size": B,
}  # fmt: skip
# The quickstart as it was when these losses were written.
DEEP = {"generator.depth_multiplier": 1.0, "train.steps": 2600}
# Name: file, and fields that are set beside SMALL.
CASES = {
  "base": ("base.py", {"model.embedding_size": 16}),
  "small": ("small.py", {}),
  "large": ("large.py", {"model.embedding_size": 16, "model.unroll": 2}),
  "quickstart": ("quickstart.py", {**DEEP, "model.embedding_size": 16, "model.unroll": 2}),
  "deberta_v3": ("deberta_v3.py", {"model.embedding_size": 16, "model.position_buckets": 4}),
  "quickstart by AdamW": (
    "quickstart.py",
    {
      **{**DEEP, "model.embedding_size": 16, "model.unroll": 2, "model.global_every": 1},
      **{"optimizer.name": "adamw", "optimizer.learning_rate": 1.2e-3},
      **{"optimizer.generator_learning_rate": 2e-3},
    },
  ),
  "quickstart of 0.1": (
    "base.py",
    {
      **{"model.embedding_size": 16, "model.dropout": 0.0, "model.attention_dropout": 0.0},
      **{"model.init_stddev": 0.1, "model.unroll": 2, "objective.mask_prob": 0.25},
      **{"optimizer.name": "adamw", "optimizer.schedule": "joined", "optimizer.b2": 0.98},
      **{"optimizer.learning_rate": 7e-4, "optimizer.decay_power": 0.5, "train.steps": 7000},
    },
  ),
  **{
    name: (f"{name}.py:small", {})
    for name in (
      "electra", "electra_15", "electra_tt", "all_tokens_mlm", "replace_mlm", "electric",
      "adversarial", "bert", "electra_mlm", "metro", "clm",
    )
  },
  "coco_lm": ("coco_lm.py:small", {"objective.contrast_group": 2}),
  "bert_small": ("bert_small.py", {}),
  "stage1": ("two_stage.py:stage1,small", {}),
  "stage2": ("two_stage.py:stage2,small", {"generator.init_from": "stage1"}),
  "uniform": ("small.py", {"generator.kind": "uniform"}),
  "unigram": ("small.py", {"generator.kind": "unigram"}),
  "tie none": ("small.py", {"generator.tie": "none"}),
  "tie tokens": ("small.py", {"generator.tie": "tokens"}),
  "gdes": ("small.py", {"generator.tie": "gdes"}),
  "tie all": ("small.py", {"generator.tie": "all", "generator.width_multiplier": 1.0}),
  "decoupled": (
    "small.py", {"optimizer.separate_optimizers": True, "optimizer.generator_clip_norm": 0.5},
  ),
  "sharded": ("small.py", {"optimizer.sharded": True}),
  "microbatches": ("small.py", {"train.accumulation": 2}),
  "schedules": (
    "small.py",
    {
      "objective.mask_prob_schedule": "0=0.3,5=0.15",
      "objective.temperature_schedule": "0=2,5=1",
      "objective.discriminator_weight_schedule": "2=0,2=50",
    },
  ),
  # ModernBERT's body, every phase of a short schedule, and what only one of these reads.
  "modern": (
    "modern.py:17m",
    {
      **{"model.embedding_size": 16, "model.window": 4, "generator.width_multiplier": 1.0},
      **{"objective.name": "electra_mlm", "objective.replace_mlm_weight_schedule": "0=0,4=2"},
      **{"objective.unigram_share": 0.3, "optimizer.decay_steps": 2, "train.steps": 5},
    },
  ),
  "sampling without dropout": (
    "small.py", {"generator.sampling_dropout": False, "objective.disallow_correct": True},
  ),
}  # fmt: skip


def load(case: str):
  """Returns a case's configuration."""
  file, changes = CASES[case]
  name, _, arg = file.partition(":")
  config = files.load(files.resolve(name), arg or None)
  small = {"model.embedding_size": 8, "generator.width_multiplier": 0.5, **SMALL}
  if "kind" not in str(changes) and config.objective.name == "bert":
    small.pop("generator.width_multiplier")
  config.update_from_flattened_dict({**small, **changes})
  return config


def batch() -> Batch:
  """Rows of 6 to 16 tokens, two segments, the last row empty."""
  rng = np.random.default_rng(0)
  lengths = rng.integers(6, L + 1, B)
  lengths[-1] = 0
  mask = np.arange(L) < lengths[:, None]
  ids = np.where(mask, rng.integers(5, V, (B, L)), 0).astype(np.int32)
  segments = ((np.arange(L) >= lengths[:, None] // 2) & mask).astype(np.int32)
  return Batch(ids, segments, mask, np.arange(B, dtype=np.int32))


def run(case: str) -> dict:
  """Returns what the steps report, the evaluation after them, and the size of the networks."""
  config = load(case)
  validate.check_fields(config)
  vocab = SimpleNamespace(size=V, mask=4, special_ids=(0, 2, 3, 4), hash=None)
  counts = np.random.default_rng(1).integers(0, 50, V)
  # A stage 2 of random weights: what the first stage learned is not looked at.
  frozen = specs.make_spec(load("stage1"), vocab).discriminator if case == "stage2" else None
  spec = specs.make_spec(config, vocab, counts, frozen)
  optimizer, steps = specs.make_optimizer_config(config), config.train.steps
  programs = make_train_fns(spec, optimizer, steps, config.seed, config.train.accumulation)
  state = programs.init_state(parallel.replicate(programs.init_params()))
  window, placed, found = metrics.Window(), parallel.shard(batch()), []
  for step in range(1, STEPS + 1):
    state, values = programs.train_step(state, placed)
    window.add(step, values)
    found.append(window.close())
  heldout = metrics.evaluate(programs.eval_step, state.params, [placed], STEPS)
  sizes = generators.count_networks(spec, programs.shapes.params)
  return {"train": found, "heldout": heldout, "parameters": sizes}


def difference(found, expected) -> float:
  """Returns the largest relative difference of two trees of numbers; infinite if they differ.

  Measures that are newer than the record are left out.
  """
  if isinstance(expected, dict):
    if found.keys() - expected.keys() - {"unigram_auc"} or expected.keys() - found.keys():
      return float("inf")
    return max((difference(found[k], x) for k, x in expected.items()), default=0.0)
  if isinstance(expected, list):
    if len(found) != len(expected):
      return float("inf")
    return max((difference(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)
  if found is None or expected is None:
    return 0.0 if found is expected else float("inf")
  return abs(found - expected) / max(abs(expected), 1e-3)


def main() -> None:
  jax.config.update("jax_compilation_cache_dir", None)
  path = HERE / "losses.json"
  expected = json.loads(path.read_text())
  if sys.argv[1:2] == ["--write"]:
    found = expected | {case: run(case) for case in sys.argv[2:]}
    path.write_text(json.dumps({case: found[case] for case in CASES}, indent=0) + "\n")
    return
  for case in sys.argv[1:] or CASES:
    print(f"{case:26}{difference(run(case), expected[case]):.1e}", flush=True)


if __name__ == "__main__":
  main()
