"""Builds the plain objects of `core` and `runtime` from a configuration that was checked.

Those never see a ConfigDict. What does not fit together is refused by the objects themselves, as a
ValueError of one line, before anything is compiled.
"""

import dataclasses
from pathlib import Path

import jax
from ml_collections import ConfigDict

from electra_jax.config.compare import flatten, upgrade
from electra_jax.config.files import load
from electra_jax.core import masking, model, networks, objectives, optimizer, schedules
from electra_jax.runtime import health
from electra_jax.runtime.workdir import read_config


def has_generator_weights(config: ConfigDict) -> bool:
  """Whether there is a generator, and one that is a network."""
  kinds = objectives.OBJECTIVES[config.objective.name].kinds
  return bool(kinds) and config.generator.kind not in ("uniform", "unigram")


def make_spec(config: ConfigDict, vocab, frequencies=None) -> objectives.PretrainSpec:
  """Returns the two networks, the masking and the weights of the losses.

  Args:
    vocab: facts about the vocabulary: `size`, the ids `mask` and `special_ids`, its `hash`.
    frequencies: [V] how often each token is in the training text; the unigram generator needs it.
  """
  g, o, steps = config.generator, config.objective, config.train.steps
  discriminator = _discriminator(config, vocab)
  if g.kind == "frozen":
    generator = _frozen_generator(config, discriminator, vocab)
  elif g.tie == "all" or not has_generator_weights(config):
    generator = discriminator
  else:
    generator = model.generator_size(discriminator, g.width_multiplier, g.depth_multiplier)
    if g.tie == "none":  # as wide as itself, as in the original
      generator = dataclasses.replace(generator, embedding_size=generator.hidden_size)
    if g.kind == "two_tower" or not _cudnn_fits(generator):
      generator = dataclasses.replace(generator, attention="xla")
  rates = masking.Masking(
    mask_prob=o.mask_prob,
    mask_token_prob=o.mask_token_prob,
    temperature=o.temperature,
    mask_id=vocab.mask,
    special_ids=tuple(vocab.special_ids),
    disallow_correct=o.disallow_correct,
    mask_prob_schedule=_schedule(o, "mask_prob_schedule", steps),
    temperature_schedule=_schedule(o, "temperature_schedule", steps),
  )
  counts = frequencies if g.kind == "unigram" and frequencies is not None else ()
  return objectives.PretrainSpec(
    generator,
    discriminator,
    rates,
    mlm_weight=o.mlm_weight,
    discriminator_weight=o.discriminator_weight,
    objective=o.name,
    generator_kind=g.kind,
    tying=g.tie,
    sampling_dropout=g.sampling_dropout,
    frequencies=tuple(float(x) for x in counts),
    discriminator_weight_schedule=_schedule(o, "discriminator_weight_schedule", steps),
    adversarial_weight=o.adversarial_weight,
  )


def _schedule(group: ConfigDict, field: str, steps: int) -> schedules.Piecewise | None:
  try:
    return schedules.parse(group[field], steps)
  except ValueError as error:
    raise ValueError(f"config.objective.{field}: {error}") from None


def _discriminator(config: ConfigDict, vocab) -> model.TransformerConfig:
  m = config.model
  dtype, attention = resolve_compute(m, m.hidden_size // m.num_heads)
  return model.TransformerConfig(
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
    attention=attention,
    unroll=min(m.unroll, m.num_layers),
    remat=m.remat,
  )


def read_spec(workdir: str, vocab) -> objectives.PretrainSpec:
  """Returns the spec of another run, from the configuration saved with it.

  Raises:
    ValueError: it holds no run, or one of another vocabulary.
  """
  saved = read_config(Path(workdir)) if Path(workdir).is_dir() else None
  if saved is None:
    raise ValueError(f"{workdir} holds no run")
  config, saved = load("base.py"), upgrade(flatten(saved))
  if vocab.hash is not None and saved["data.vocab_hash"] != vocab.hash:
    raise ValueError(
      f"{workdir} is of another vocabulary than {vocab.size} entries of {vocab.hash}"
    )
  known = flatten(config)
  config.update_from_flattened_dict({k: v for k, v in saved.items() if k in known})
  config.model.attention = "auto"  # another machine's choice may not be there on this one
  return make_spec(config, vocab)


def _frozen_generator(
  config: ConfigDict, discriminator: model.TransformerConfig, vocab
) -> model.TransformerConfig:
  """Returns the shape of another run's masked language model, computed as this run computes."""
  spec = read_spec(config.generator.init_from, vocab)
  shapes = jax.eval_shape(lambda: objectives.init_params(spec, jax.random.key(0)))
  cfg, _ = networks.masked_language_model(spec, shapes)
  if cfg.max_positions < config.data.seq_length:
    raise ValueError(
      f"the frozen generator takes {cfg.max_positions} tokens at most, config.data.seq_length is"
      f" {config.data.seq_length}"
    )
  return dataclasses.replace(
    cfg,
    dtype=discriminator.dtype,
    attention="xla",
    unroll=min(discriminator.unroll, cfg.num_layers),
  )


def resolve_compute(m: ConfigDict, head_width: int) -> tuple[str, str]:
  """Returns dtype and attention of config.model where they are "auto": what this machine does best.

  What cuDNN cannot do is left to XLA.
  """
  platform, dtype, attention = jax.default_backend(), m.dtype, m.attention
  if dtype == "auto":
    dtype = "float32" if platform == "cpu" else "bfloat16"
  if attention == "auto":
    cudnn = platform == "gpu" and dtype == "bfloat16" and not m.attention_dropout
    attention = "cudnn" if cudnn and _head_fits(head_width) else "xla"
  return dtype, attention


def _head_fits(width: int) -> bool:
  """Whether cuDNN's attention takes heads of that width."""
  return width % 8 == 0 and width <= 128


def _cudnn_fits(cfg: model.TransformerConfig) -> bool:
  return _head_fits(cfg.hidden_size // cfg.num_heads)


def make_limits(config: ConfigDict) -> health.Limits:
  """Returns where trouble begins."""
  h = config.health
  return health.Limits(
    window=h.window,
    loss_spike=h.loss_spike,
    auc_margin=h.auc_margin,
    recall=h.recall,
    entropy_ratio=h.entropy_ratio,
    after_step=h.after_step,
  )


def make_optimizer_config(config: ConfigDict) -> optimizer.OptimizerConfig:
  """Returns the optimizer's fields as the plain object that `optimizer` takes."""
  return optimizer.OptimizerConfig(**config.optimizer)
