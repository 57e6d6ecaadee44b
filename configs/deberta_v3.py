"""DeBERTaV3, by detection and gdes: deberta_v3.py:xsmall, :small, :base, :large or :mini.

Command:  python -m electra_jax.train --config=configs/deberta_v3.py:small --workdir=DIR
          --config.data.dir=SHARDS
Hardware: TPU slice or GPUs. A batch of 8,192 x 512 tokens needs train.accumulation; attention is
          model.attention=xla, because the scores have a bias.
Expected: not run here at these sizes. mini is the quickstart with DeBERTaV3's networks: seven
          minutes of two cores, held-out masked-LM loss 2.99 to 3.08 nats and AUC 0.745 to 0.768,
          over three seeds.

Sources: He et al. 2021 (DeBERTaV3, Section 3 and Appendix) and, where marked "code", the released
configurations and training code of Microsoft. The code differs from the paper in the weight of
detection (10), the batch (64 to 256), the rate (3e-4 xsmall, 1e-4 base and large) and the steps
(1,000,000); its masks never reach the last 50 of 512 positions, here they are uniform.
"""

from ml_collections import ConfigDict

from electra_jax.config import load

# {size: (layers, width, peak learning rate)}
SIZES = {
  "xsmall": (12, 384, 5e-4),  # the paper has no rate: small's
  "small": (6, 768, 5e-4),
  "base": (12, 768, 5e-4),
  "large": (24, 1024, 3e-4),
}


def get_config(arg: str | None = None) -> ConfigDict:
  """Returns the configuration of the size `arg`, by default small."""
  if arg == "mini":
    return _mini()
  if (arg or "small") not in SIZES:
    raise ValueError(f"configs/deberta_v3.py takes {', '.join(SIZES)}, mini, got {arg!r}")
  layers, width, rate = SIZES[arg or "small"]
  c = _networks(load("base.py"))
  c.model.hidden_size = width
  c.model.num_layers = layers
  c.model.num_heads = width // 64
  c.model.ffn_size = 4 * width
  c.model.embedding_size = width  # no projection
  c.objective.mask_token_prob = 1.0  # (code)
  c.objective.discriminator_weight = 50.0  # (Section 3.1); code: 10
  c.data.vocab = "unigram"
  c.data.vocab_size = 128_000
  c.data.lowercase = False
  c.data.examples = "packed"  # code: rows of 510 tokens, across documents
  c.optimizer.name = "adamw"  # code: Adam without bias correction
  c.optimizer.schedule = "joined"
  c.optimizer.learning_rate = rate
  c.optimizer.b2 = 0.98
  c.optimizer.separate_optimizers = True  # each network is clipped by its own norm (code)
  c.train.batch_size = 8192
  c.train.steps = 500_000
  return c


def _networks(c: ConfigDict) -> ConfigDict:
  """Sets what all sizes share, the body of their networks."""
  c.model.layer_norm_eps = 1e-7
  c.model.positions = "disentangled"  # (He et al. 2020, Section 3.1)
  c.model.position_buckets = 256
  c.model.token_types = False
  c.model.head_first_token = True  # (code)
  c.generator.kind = "enhanced_mask_decoder"  # (He et al. 2020, Section 3.2)
  c.generator.tie = "gdes_tables"  # (Section 3.3); each network has its LayerNorm (code)
  c.generator.width_multiplier = 1.0  # equally wide, half as deep (Section 5.1)
  c.generator.depth_multiplier = 0.5
  return c


def _mini() -> ConfigDict:
  """Returns the quickstart with DeBERTaV3's networks, without windows."""
  c, base = _networks(load("quickstart.py")), load("base.py").model
  for name in ("block", "norm", "feed_forward", "biases", "first_norm", "head_norm"):
    c.model[name] = base[name]  # BERT's blocks
  c.model.global_every = 1
  c.model.ffn_size = 512  # without a gate: as many weights as the quickstart's 384 with one
  c.model.position_buckets = 32  # for 64 positions; distances up to 16 have rows of their own
  return c
