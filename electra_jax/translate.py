"""A configuration, checked and turned into the plain objects of the layers below.

Those never see a ConfigDict. Whatever does not fit together is refused here or by the objects made
here, as a ValueError of one line, before anything is compiled.
"""

import jax
from ml_collections import ConfigDict

from electra_jax import masking, model, objectives, optimizer, parallel
from electra_jax.config import flatten

# Numbers that have to be above 0, from 0, or from 0 to below 1; what else is wrong, the objects
# that are made from them refuse themselves.
_ABOVE_0 = (
  "model.hidden_size model.num_layers model.num_heads model.ffn_size model.embedding_size "
  "model.max_positions model.init_stddev model.layer_norm_eps model.unroll "
  "generator.width_multiplier generator.depth_multiplier data.seq_length "
  "optimizer.learning_rate optimizer.eps optimizer.clip_norm train.batch_size train.steps "
  "train.accumulation eval.batch_size eval.max_examples checkpoint.every_steps checkpoint.keep "
  "log.every_steps"
).split()
_FROM_0 = (
  "seed objective.mlm_weight objective.rtd_weight optimizer.warmup_steps optimizer.decay_power "
  "optimizer.weight_decay eval.every_steps checkpoint.keep_every_steps"
).split()
_FROM_0_BELOW_1 = ("model.dropout", "model.attention_dropout", "optimizer.b1", "optimizer.b2")


def check(config: ConfigDict) -> None:
  """Refuses a training configuration that cannot work, before any data or device is touched."""
  flat = flatten(config)
  for fields, right, wanted in (
    (_ABOVE_0, lambda x: x > 0, "above 0"),
    (_FROM_0, lambda x: x >= 0, "at least 0"),
    (_FROM_0_BELOW_1, lambda x: 0 <= x < 1, "at least 0 and below 1"),
  ):
    for field in fields:
      if not right(flat[field]):
        raise ValueError(f"config.{field} is {wanted}, got {flat[field]}")
  for field, known in (
    ("objective.name", objectives.OBJECTIVES),
    ("optimizer.name", optimizer.OPTIMIZERS),
    ("optimizer.schedule", optimizer.SCHEDULES),
    ("model.dtype", ("auto", "float32", "bfloat16")),
    ("model.attention", ("auto", "xla", "cudnn")),
  ):
    if flat[field] not in known:
      raise ValueError(f"config.{field} is one of {', '.join(known)}, got {flat[field]!r}")
  if config.data.seq_length > config.model.max_positions:
    raise ValueError(
      f"config.data.seq_length {config.data.seq_length} does not fit"
      f" config.model.max_positions {config.model.max_positions}"
    )
  if config.data.dir is None:
    raise ValueError(
      "config.data.dir is not set: the folder of shards, made by electra_jax.data.build"
    )


def check_devices(config: ConfigDict) -> None:
  """Refuses batches that the devices at hand do not divide."""
  for field, size, parts in (
    ("train.batch_size", config.train.batch_size, config.train.accumulation),
    ("eval.batch_size", config.eval.batch_size, 1),
  ):
    try:
      parallel.check_divisible(size, parts)
    except ValueError as error:
      raise ValueError(f"config.{field}: {error}") from None


def make_spec(config: ConfigDict, vocab) -> objectives.Spec:
  """Returns the two networks and the masking.

  Args:
    vocab: facts about the vocabulary: `size`, the ids `mask` and `special_ids`.
  """
  m, o = config.model, config.objective
  platform = jax.default_backend()
  dtype = m.dtype
  if dtype == "auto":
    dtype = "float32" if platform == "cpu" else "bfloat16"
  discriminator = model.TransformerConfig(
    vocab_size=vocab.size,
    embedding_size=m.embedding_size,
    hidden_size=m.hidden_size,
    num_layers=m.num_layers,
    num_heads=m.num_heads,
    ffn_size=m.ffn_size,
    max_positions=m.max_positions,
    dropout=m.dropout,
    attention_dropout=m.attention_dropout,
    init_stddev=m.init_stddev,
    layer_norm_eps=m.layer_norm_eps,
    dtype=dtype,
    attention=_attention(m.attention, platform, dtype, m),
    unroll=min(m.unroll, m.num_layers),
    remat=m.remat,
  )
  generator = model.generator_size(
    discriminator, config.generator.width_multiplier, config.generator.depth_multiplier
  )
  rates = masking.Masking(
    mask_prob=o.mask_prob,
    mask_token_prob=o.mask_token_prob,
    temperature=o.temperature,
    mask_id=vocab.mask,
    special_ids=tuple(vocab.special_ids),
  )
  return objectives.Spec(generator, discriminator, rates, o.mlm_weight, o.rtd_weight)


def _attention(asked: str, platform: str, dtype: str, m: ConfigDict) -> str:
  """Returns how attention is computed: what cuDNN cannot do is left to XLA."""
  if asked != "auto":
    return asked
  head = m.hidden_size // m.num_heads
  cudnn = platform == "gpu" and dtype == "bfloat16" and not m.attention_dropout
  return "cudnn" if cudnn and head % 8 == 0 and head <= 128 else "xla"


def make_optimizer_config(config: ConfigDict) -> optimizer.OptimizerConfig:
  """Returns the optimizer's fields as the plain object that `optimizer` takes."""
  return optimizer.OptimizerConfig(**config.optimizer)
