"""Builds the objects of `core` and `monitor` from a checked configuration.

Their constructors raise ValueError for inconsistent values, before compilation.
"""

import dataclasses
import warnings
from pathlib import Path

import jax
from ml_collections import ConfigDict

from electra_jax.config import registry, schema
from electra_jax.config.compare import flatten, recipe, upgrade
from electra_jax.config.files import find_data, load
from electra_jax.core import objectives, optimizer, schedules
from electra_jax.core.attention import ATTENTION
from electra_jax.core.generators import GENERATORS, masked_language_model
from electra_jax.core.masking import Masking
from electra_jax.core.networks import TIES, PretrainSpec, TokenCounts, generator_size
from electra_jax.core.positions import POSITIONS
from electra_jax.core.transformer_config import Compute, TransformerConfig, take_fields
from electra_jax.monitor import bands, health
from electra_jax.runtime.workdir import CONFIG_FILE, read_run_config

# Additional fields of a run's saved configuration: the config of its frozen generator, or None,
# and the result of `registered`, if it is not empty.
FROZEN_GENERATOR, REGISTERED = "frozen_generator", "registered"
DAMAGED = f"{CONFIG_FILE} of the run is damaged"
FIELDS = dataclasses.fields(PretrainSpec)
ALL_LAYERS = 1000  # more than any network has


def make_spec(
  config: ConfigDict,
  vocab,
  frequencies=None,
  frozen: TransformerConfig | None = None,
  word_parts: bytes = b"",
) -> PretrainSpec:
  """Returns the two networks, the masking and the loss weights.

  Args:
    vocab: has `size` and the ids `mask` and `special_ids`.
    frequencies: [V] token counts of the training text, to draw replacements from in the unigram
      generator and in evaluations.
    frozen: config of the masked language model in generator.init_from, if any.
    word_parts: as in `Masking`, for objective.whole_words.
  """
  g, o = config.generator, config.objective
  compute = make_compute(
    config.model, config.model.hidden_size // config.model.num_heads, config.model.positions
  )
  try:
    discriminator = take_fields(
      TransformerConfig, config.model, vocab_size=vocab.size, compute=compute
    )
  except ValueError as error:
    raise ValueError(f"config.model: {error}") from None
  if objectives.OBJECTIVES[o.name].causal and not ATTENTION[compute.attention].one_direction:
    discriminator = discriminator.computed(attention="xla")
  settings = {**o, **make_schedules(config)}
  others = set(objectives.OBJECTIVES[o.name].own_fields) - {x.name for x in FIELDS}
  special_ids = tuple(vocab.special_ids)
  return take_fields(
    PretrainSpec,
    settings,
    generator=_generator(config, discriminator, frozen),
    discriminator=discriminator,
    masking=take_fields(
      Masking, settings, mask_id=vocab.mask, special_ids=special_ids, word_parts=word_parts
    ),
    objective=o.name,
    generator_kind=g.kind,
    tying=g.tie,
    sampling_dropout=g.sampling_dropout,
    fixed_noise=config.eval.fixed_noise,
    options=tuple((name, settings[name]) for name in sorted(others)),
    frequencies=TokenCounts(() if frequencies is None else frequencies),
  )


def make_schedules(config: ConfigDict) -> dict[str, schedules.Schedule]:
  """Returns {NAME: Schedule} for each config.objective.NAME with a NAME_schedule.

  Raises:
    ValueError: a schedule cannot be parsed; the message names the field.
  """
  o, found = config.objective, {}
  for name in (name.partition(".")[2] for name in schema.names(has_schedule=True)):
    field = f"{name}_schedule"
    try:
      if config.train.minutes and "%" in o[field]:
        raise ValueError(
          f"{o[field]!r} has positions in %, but train.minutes leaves the number of steps open: use"
          " steps"
        )
      found[name] = schedules.Schedule(o[name], schedules.parse(o[field], config.train.steps))
    except ValueError as error:
      raise ValueError(f"config.objective.{field}: {error}") from None
  return found


def has_generator_weights(config: ConfigDict) -> bool:
  """Returns whether there is a generator with weights."""
  uses_generator = objectives.OBJECTIVES[config.objective.name].uses_generator
  return uses_generator and bool(GENERATORS[config.generator.kind].encoders)


def _generator(
  config: ConfigDict, discriminator: TransformerConfig, frozen: TransformerConfig | None
) -> TransformerConfig:
  """Returns the generator's config; the discriminator's if they share an encoder or it has none."""
  g = config.generator
  tying, definition = TIES[g.tie], GENERATORS[g.kind]
  if definition.pretrained:
    if frozen.max_positions < config.data.seq_length:
      raise ValueError(
        f"data.seq_length {config.data.seq_length} exceeds the {frozen.max_positions} positions of"
        " the frozen generator"
      )
    return dataclasses.replace(frozen, compute=discriminator.compute).computed(attention="xla")
  if tying.shares_encoder or not has_generator_weights(config):
    return discriminator
  cfg = generator_size(discriminator, g.width_multiplier, g.depth_multiplier)
  if tying.own_width:  # the width of its layers, as in the original
    cfg = dataclasses.replace(cfg, embedding_size=g.embedding_size or cfg.hidden_size)
  kind = ATTENTION[cfg.compute.attention]
  fits = kind.takes_head(cfg.head_size) and (kind.one_direction or not definition.predicts_all)
  return cfg if fits else cfg.computed(attention="xla")


def read_spec(workdir: str | Path, vocab) -> PretrainSpec:
  """Returns the spec of another run, from its saved configuration and its vocabulary.

  Raises:
    ValueError: the folder holds no run, its configuration is damaged, or the run has entries that
      are not registered.
  """
  saved = read_run_config(workdir)
  config = saved_config(saved)
  config.model.attention = "auto"  # this machine may not support the saved value
  try:
    registry.check(saved.get(REGISTERED, {}), workdir)
    return make_spec(config, vocab, frozen=saved_generator(saved, vocab))
  except (TypeError, LookupError, AttributeError) as error:
    raise ValueError(f"{DAMAGED}: {type(error).__name__} {error}") from None


def registered(config: ConfigDict) -> dict[str, dict[str, str]]:
  """Returns {kind: {name: module or file}} of a configuration's registered entries."""
  found: dict[str, dict[str, str]] = {}
  flat = flatten(config)
  for field, row in schema.PRETRAINING.items():
    if row.kind and (place := registry.origin(row.kind, flat[field])):
      found[row.kind] = {flat[field]: place}
    if place := registry.origin("field", field):
      found.setdefault("field", {})[field] = place
  return found


def saved_generator(saved: dict, vocab) -> TransformerConfig | None:
  """Returns the config of a run's frozen generator, from its saved configuration."""
  if cfg := saved.get(FROZEN_GENERATOR):
    return TransformerConfig(**cfg)
  origin = (saved.get("generator") or {}).get("init_from")
  # Earlier versions did not save it; read it from the generator's run.
  return masked_lm_config(origin, vocab) if origin else None


def masked_lm_config(workdir: str | Path, vocab) -> TransformerConfig:
  """Returns the config of a run's masked language model.

  Raises:
    ValueError: the folder holds no run, or the run has no masked language model.
  """
  spec = read_spec(workdir, vocab)
  return masked_language_model(spec, objectives.param_shapes(spec))[0]


def saved_config(saved: dict) -> ConfigDict:
  """Returns a run's saved configuration; missing fields have the current defaults.

  Raises:
    ValueError: a field has a value of another type, or out of its range.
  """
  config = load("base.py")
  known, groups = flatten(config), [k for k, v in config.items() if isinstance(v, ConfigDict)]
  try:
    saved = upgrade(flatten(saved))
    if wrong := [
      k for k, v in saved.items() if k in groups or (v is None and known.get(k, v) != v)
    ]:
      raise ValueError(f"{wrong[0]} cannot be {saved[wrong[0]]!r:.40}")
    config.update_from_flattened_dict({k: v for k, v in saved.items() if k in known})
    schema.check_ranges(flatten(config), schema.PRETRAINING)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{DAMAGED}: {' '.join(str(error).split())}") from None
  return config


def default_unroll(platform: str) -> int:
  """Returns the layers per loop iteration on a platform: all on a GPU, else one.

  On an H200 a loop over layers makes a step 1.3 to 1.7 times as long, because it copies each
  layer's weights and residuals (LOG.md).
  """
  return ALL_LAYERS if platform == "gpu" else 1


def make_compute(m: ConfigDict, head_width: int, positions: str) -> Compute:
  """Returns the compute settings of config.model, with "auto" and 0 chosen for this machine.

  Args:
    head_width, positions: of the network, which config.model lacks in fine-tuning.
  """
  platform, dtype, attention = jax.default_backend(), m.dtype, m.attention
  if dtype == "auto":
    dtype = "float32" if platform == "cpu" else "bfloat16"
  if attention == "auto":
    kind, bias = ATTENTION["cudnn"], POSITIONS[positions].bias
    cudnn = platform == "gpu" and dtype == "bfloat16" and not m.attention_dropout
    fits = kind.takes_head(head_width) and (kind.bias or not bias)
    attention = "cudnn" if cudnn and fits else "xla"
  return Compute(dtype, attention, m.unroll or default_unroll(platform), m.remat)


def reference(config: ConfigDict, vocab=None) -> tuple[bands.Band, str, list[str]] | None:
  """Returns the band of health.reference, its name and the differing fields, or None.

  Args:
    vocab: of the shards, has `hash`; None to compare the configuration alone.

  Raises:
    ValueError: the file is not a band, or log.every_steps differs from its runs'.
    OSError: it cannot be read.
  """
  if not (name := config.health.reference):
    return None
  band = bands.read(find_data(name))
  if band.every_steps != config.log.every_steps:
    raise ValueError(
      f"config.log.every_steps must be {band.every_steps} as in the runs of"
      f" health.reference={name}, got {config.log.every_steps}"
    )
  if all(step > config.train.steps for table in band.levels.values() for step in table):
    warnings.warn(
      f"health.reference={name} checks no line of this run: it begins after"
      f" config.train.steps={config.train.steps:,}",
      stacklevel=1,
    )
  flat = flatten(config) | ({"data.vocab_hash": vocab.hash} if vocab else {})
  return band, name, bands.differing(band, recipe(flat))


def make_limits(config: ConfigDict) -> health.Limits:
  """Returns the thresholds of the health checks."""
  return take_fields(health.Limits, config.health)


def make_optimizer_config(config: ConfigDict) -> optimizer.OptimizerConfig:
  """Returns config.optimizer as an OptimizerConfig, with decay_frac converted to steps."""
  o = config.optimizer
  decay_steps = round((o.decay_frac or 0) * config.train.steps) or o.decay_steps
  return take_fields(optimizer.OptimizerConfig, {**o, "decay_steps": decay_steps})
