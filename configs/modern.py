"""ModernBERT's encoder with a generator of its width: modern.py:17m, :32m, :68m, :150m or :400m.

Command:  python -m electra_jax.train --config=configs/modern.py:17m --workdir=DIR
          --config.data.dir=SHARDS
Hardware: one H200 for 17m, and for 32m with train.accumulation=2 (docs/preflight.md). First run
          configs/modern_short.py, which takes minutes and has a band of healthy runs.
Expected: no published number. The Ettin family was trained on 1.7 T tokens, this run takes 52 G.

The optimizer is AdamW, as published. With four layers of 128 at 2e13 FLOPs, Muon
(--config.optimizer.name=muon) was 0.23 nats better (LOG.md, "Blocks at equal FLOPs").

Sources: Warner et al. 2024 (ModernBERT, Section 2 and Appendix A); Weller et al. 2025 (Ettin: the
shapes and settings of 17m to 150m, and its training configurations); He et al. 2021 (DeBERTaV3: the
generator and gdes).
"""

import dataclasses

from ml_collections import ConfigDict

from electra_jax.config import load


@dataclasses.dataclass(frozen=True)
class Shape:
  """The shape of a discriminator, its peak learning rate and its generator's depth."""

  num_layers: int
  hidden_size: int
  ffn_size: int
  learning_rate: float
  generator_layers: int


SHAPES = {
  "17m": Shape(7, 256, 384, 3e-3, 3),  # Ettin
  "32m": Shape(10, 384, 576, 3e-3, 4),
  "68m": Shape(19, 512, 768, 3e-3, 7),
  "150m": Shape(22, 768, 1152, 8e-4, 8),  # Ettin and ModernBERT-base
  "400m": Shape(28, 1024, 2624, 5e-4, 10),  # ModernBERT-large
}


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration of the size `arg`, by default 17m."""
  if (arg or "17m") not in SHAPES:
    raise ValueError(f"configs/modern.py takes {', '.join(SHAPES)}, got {arg!r}")
  shape = SHAPES[arg or "17m"]
  c = load("base.py")
  c.model.hidden_size = shape.hidden_size
  c.model.num_layers = shape.num_layers
  c.model.num_heads = shape.hidden_size // 64  # ModernBERT and Ettin use a head size of 64
  c.model.ffn_size = shape.ffn_size
  c.model.embedding_size = shape.hidden_size  # no projection
  c.model.max_positions = 8192  # the longest sequence (ModernBERT); costs nothing with RoPE
  c.model.block = "pre_norm"  # (ModernBERT, Section 2.1.1, as the next fields)
  c.model.norm = "layer_norm_no_bias"
  c.model.layer_norm_eps = 1e-5
  c.model.feed_forward = "geglu"
  c.model.positions = "rope"
  c.model.rope_theta = 10_000.0  # 160,000 in a later phase of long sequences (Ettin)
  c.model.local_rope_theta = 10_000.0
  c.model.global_every = 3  # (ModernBERT, Section 2.1.2)
  c.model.window = 128
  c.model.biases = False
  c.model.token_types = False
  c.model.first_norm = False
  c.model.head_norm = True  # as the hidden layer of ModernBertForTokenClassification
  c.model.scaled_init = True  # Megatron's (ModernBERT, Appendix A)
  c.model.dropout = 0.1  # of the attention output only (Ettin)
  c.model.embedding_dropout = 0.0
  c.model.ffn_dropout = 0.0
  c.model.attention_dropout = 0.0
  c.generator.tie = "gdes"  # (DeBERTaV3, Section 3.3)
  c.generator.width_multiplier = 1.0  # equally wide but shallow (DeBERTaV3, Section 5.1)
  c.generator.depth_multiplier = shape.generator_layers / shape.num_layers  # a third to a half
  # 0.3 until the learning rate decays, then 0.15 (Ettin); evaluations at 0.15
  c.objective.mask_prob_schedule = "0%=0.3,90%=0.3,90%=0.15"
  c.data.vocab_size = 50_368  # (ModernBERT, Appendix A)
  c.data.seq_length = 1024  # first phase (Ettin)
  c.data.examples = "packed"
  c.optimizer.name = "adamw"  # both families: StableAdamW
  c.optimizer.learning_rate = shape.learning_rate
  c.optimizer.schedule = "wsd"  # (ModernBERT, Section 2.2)
  c.optimizer.warmup_steps = 5_700  # 3 G tokens (ModernBERT)
  c.optimizer.decay_steps = 10_000  # a tenth
  c.optimizer.weight_decay = 3e-4 / shape.learning_rate  # 3e-4 a step at the peak (Ettin)
  c.optimizer.b2 = 0.98  # (ModernBERT, Appendix A)
  c.train.batch_size = 512  # the families: 4,608
  c.train.steps = 100_000
  return c
