"""A configuration, checked and turned into the plain objects of the layers below.

Those never see a ConfigDict. Whatever does not fit together is refused here or by the objects made
here, as a ValueError of one line, before anything is compiled.
"""

import dataclasses
from pathlib import Path

import jax
from ml_collections import ConfigDict

from electra_jax.config import flatten, load
from electra_jax.core import generators, masking, model, networks, objectives, optimizer, schedules
from electra_jax.runtime import health, parallel, tracing
from electra_jax.runtime.workdir import read_config

# Numbers that have to be above 0, from 0, or from 0 to below 1; what else is wrong, the objects
# that are made from them refuse themselves.
_ABOVE_0 = (
  "model.hidden_size model.num_layers model.num_heads model.ffn_size model.embedding_size "
  "model.max_positions model.init_stddev model.layer_norm_eps model.unroll "
  "generator.width_multiplier generator.depth_multiplier data.seq_length "
  "optimizer.learning_rate optimizer.eps optimizer.clip_norm train.batch_size train.steps "
  "train.accumulation eval.batch_size eval.max_examples checkpoint.every_steps checkpoint.keep "
  "log.every_steps hosts.timeout_secs hosts.slow_ratio profile.signal_steps"
).split()
_FROM_0 = (
  "seed objective.mlm_weight objective.rtd_weight objective.adversarial_weight "
  "optimizer.warmup_steps optimizer.decay_power optimizer.weight_decay eval.every_steps "
  "checkpoint.keep_every_steps health.max_rollbacks"
).split()
_FROM_0_BELOW_1 = ("model.dropout", "model.attention_dropout", "optimizer.b1", "optimizer.b2")


def check(config: ConfigDict) -> None:
  """Refuses a training configuration that cannot work, before any data or device is touched."""
  check_fields(config)
  check_attention(config.model)
  if config.data.dir is None:
    raise ValueError(
      "config.data.dir is not set: the folder of shards, made by electra_jax.data.build"
    )


def check_fields(config: ConfigDict) -> None:
  """Refuses a training configuration that cannot work on any machine, with any data."""
  flat = flatten(config)
  check_numbers(flat, _ABOVE_0, _FROM_0, _FROM_0_BELOW_1)
  for field, known in (
    ("objective.name", objectives.OBJECTIVES),
    ("generator.kind", generators.GENERATORS),
    ("generator.tie", networks.TIES),
    ("optimizer.name", optimizer.OPTIMIZERS),
    ("optimizer.schedule", optimizer.SCHEDULES),
    ("model.dtype", ("auto", "float32", "bfloat16")),
    ("model.attention", ("auto", "xla", "cudnn")),
    ("checkpoint.on_error", ("stop", "continue")),
    ("health.on_nan", ("stop", "rollback")),
    ("health.on_warning", ("warn", "stop")),
  ):
    if flat[field] not in known:
      raise ValueError(f"config.{field} is one of {', '.join(known)}, got {flat[field]!r}")
  check_combination(config)
  tracing.parse_steps(config.profile.steps)
  make_limits(config)
  own = ("learning_rate", "weight_decay", "clip_norm")
  for field in (f"optimizer.generator_{name}" for name in own):
    if flat[field] is not None and not flat[field] > 0 and not field.endswith("decay"):
      raise ValueError(f"config.{field} is above 0, got {flat[field]}")
  weight = _schedule(config.objective, "rtd_weight_schedule", config.train.steps)
  if weight and min(weight.values) < 0:
    raise ValueError(
      f"config.objective.rtd_weight_schedule: weights are from 0, got {weight.values}"
    )
  if config.data.seq_length > config.model.max_positions:
    raise ValueError(
      f"config.data.seq_length {config.data.seq_length} does not fit"
      f" config.model.max_positions {config.model.max_positions}"
    )


def check_numbers(flat: dict, above_0: list, from_0: list, from_0_below_1: list) -> None:
  """Refuses fields of a flat configuration that are out of their range; None is in any."""
  for fields, right, wanted in (
    (above_0, lambda x: x > 0, "above 0"),
    (from_0, lambda x: x >= 0, "at least 0"),
    (from_0_below_1, lambda x: 0 <= x < 1, "at least 0 and below 1"),
  ):
    for field in fields:
      if flat[field] is not None and not right(flat[field]):
        raise ValueError(f"config.{field} is {wanted}, got {flat[field]}")


def check_devices(config: ConfigDict, devices: int | None = None) -> None:
  """Refuses batches that so many devices, or those at hand, do not divide."""
  for field, size, parts in (
    ("train.batch_size", config.train.batch_size, config.train.accumulation),
    ("eval.batch_size", config.eval.batch_size, 1),
  ):
    try:
      parallel.check_divisible(size, parts, devices)
    except ValueError as error:
      raise ValueError(f"config.{field}: {error}") from None


def has_generator_weights(config: ConfigDict) -> bool:
  """Whether there is a generator, and one that is a network."""
  kinds = objectives.OBJECTIVES[config.objective.name].kinds
  return bool(kinds) and config.generator.kind not in ("uniform", "unigram")


def check_combination(config: ConfigDict) -> None:
  """Refuses an objective, a generator and an optimizer that mean nothing together."""
  o, g, p = config.objective, config.generator, config.optimizer
  recipe = objectives.OBJECTIVES[o.name]
  weightless = not has_generator_weights(config)
  own = [f"generator_{x}" for x in ("learning_rate", "weight_decay", "clip_norm")]
  own = [name for name in own if p[name] is not None]
  exact = o.name in ("adversarial", "electric")
  sampling = (
    o.temperature != 1 or o.temperature_schedule or o.disallow_correct or not g.sampling_dropout
  )
  for wrong, reason in (
    (
      not recipe.kinds and (g.kind != "transformer" or sampling or o.rtd_weight_schedule),
      f"objective {o.name} has no generator and one loss: leave generator.kind, its sampling and"
      " rtd_weight_schedule as they are",
    ),
    (
      recipe.kinds and g.kind not in recipe.kinds,
      f"objective {o.name} needs a generator of kind {' or '.join(recipe.kinds)}, got {g.kind}",
    ),
    (
      weightless and g.tie != "embeddings",
      f"generator.tie={g.tie} shares with a generator that has no weights: leave it at embeddings",
    ),
    (
      g.kind == "frozen" and g.tie != "none",
      f"a frozen generator brings its own embeddings: set generator.tie=none, got {g.tie}",
    ),
    (
      (g.kind == "frozen") != (g.init_from is not None),
      "generator.init_from names the run of a generator of kind frozen, which needs it: got kind"
      f" {g.kind} and {g.init_from}",
    ),
    (
      g.tie == "all" and (g.width_multiplier != 1 or g.depth_multiplier != 1),
      "generator.tie=all shares the encoder, so both networks have one size: set"
      f" generator.width_multiplier and depth_multiplier to 1, got {g.width_multiplier} and"
      f" {g.depth_multiplier}",
    ),
    (
      g.tie == "all" and g.kind == "two_tower",
      "generator.tie=all shares one encoder, a two_tower generator has two of its own",
    ),
    (
      exact and sampling,
      f"objective {o.name} computes with the probabilities that are sampled from: leave temperature"
      " at 1 without a schedule, disallow_correct off and sampling_dropout on",
    ),
    (
      g.kind in ("uniform", "unigram", "frozen") and not g.sampling_dropout,
      f"a generator of kind {g.kind} samples without dropout anyway: leave sampling_dropout on",
    ),
    (
      p.decoupled and (weightless or g.kind == "frozen"),
      "optimizer.decoupled separates two networks that are trained; here only one is",
    ),
    (own and not p.decoupled, f"optimizer.{(own or [''])[0]} needs optimizer.decoupled"),
  ):
    if wrong:
      raise ValueError(reason)


def make_spec(config: ConfigDict, vocab, frequencies=None) -> objectives.Spec:
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
  return objectives.Spec(
    generator,
    discriminator,
    rates,
    mlm_weight=o.mlm_weight,
    rtd_weight=o.rtd_weight,
    objective=o.name,
    kind=g.kind,
    tie=g.tie,
    sampling_dropout=g.sampling_dropout,
    frequencies=tuple(float(x) for x in counts),
    rtd_weight_schedule=_schedule(o, "rtd_weight_schedule", steps),
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


def read_spec(workdir: str, vocab) -> objectives.Spec:
  """Returns the spec of another run, from the configuration saved with it.

  Raises:
    ValueError: it holds no run, or one of another vocabulary.
  """
  saved = read_config(Path(workdir)) if Path(workdir).is_dir() else None
  if saved is None:
    raise ValueError(f"{workdir} holds no run")
  config, saved = load("base.py"), flatten(saved)
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


def check_attention(m: ConfigDict) -> None:
  """Refuses cuDNN's attention where it cannot be."""
  if m.attention == "cudnn" and (jax.default_backend() != "gpu" or m.attention_dropout):
    raise ValueError(
      "config.model.attention=cudnn needs a GPU and model.attention_dropout=0, here are"
      f" {jax.default_backend()} and {m.attention_dropout}: auto takes it where it can"
    )


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
