"""Checks a configuration before any data is read."""

import warnings
from collections.abc import Iterable, Mapping

import jax
from ml_collections import ConfigDict

from electra_jax.config import schema
from electra_jax.config.compare import flatten
from electra_jax.config.files import load
from electra_jax.config.specs import (
  has_generator_weights,
  make_limits,
  make_optimizer_config,
  make_schedules,
  reference,
)
from electra_jax.core import attention, generators, networks, objectives
from electra_jax.core.encoder import BLOCKS
from electra_jax.core.positions import POSITIONS
from electra_jax.monitor import tracing, trackers
from electra_jax.runtime import parallel


def check(config: ConfigDict) -> None:
  """Raises ValueError if a training configuration is invalid on this machine."""
  check_fields(config)
  check_attention(config.model)
  reference(config)
  trackers.check_installed(trackers.parse(config.log.trackers))
  if config.data.dir is None:
    raise ValueError("config.data.dir is not set: set the folder that electra-jax build wrote")


def check_fields(config: ConfigDict) -> None:
  """Raises ValueError if a training configuration is invalid on every machine."""
  flat = flatten(config)
  check_values(flat, schema.PRETRAINING)
  check_combination(config)
  check_layers(config)
  warn_of_unread(config.objective)
  traced = tracing.parse_steps(config.profile.steps)
  if traced and traced.start > config.train.steps:
    raise ValueError(
      f"config.profile.steps={config.profile.steps} begins after"
      f" config.train.steps={config.train.steps:,}"
    )
  trackers.parse(config.log.trackers)
  make_limits(config)
  make_optimizer_config(config)
  for field in ("init_step", "init_optimizer"):
    # Checkpoint 0 is one, and 0 == False.
    if config[field] is not None and config[field] is not False and config.init_from is None:
      raise ValueError(f"config.{field} needs config.init_from to be a run")
  for name in ("learning_rate", "weight_decay", "clip_norm"):
    field = f"optimizer.generator_{name}"
    if flat[field] is not None and not config.optimizer.separate_optimizers:
      raise ValueError(f"{field} needs optimizer.separate_optimizers=True")
  check_end(config)
  schedules = make_schedules(config)
  for name in ("discriminator_weight", "replace_mlm_weight"):
    if min(weights := schedules[name].values) < 0:
      raise ValueError(
        f"config.objective.{name}_schedule: weights must be at least 0, got {weights}"
      )
  if config.data.seq_length > config.model.max_positions:
    fixed = config.init_from and POSITIONS[config.model.positions].embedded
    raise ValueError(
      f"config.data.seq_length {config.data.seq_length} is above"
      f" config.model.max_positions {config.model.max_positions}"
      + (", which init_from fixes: build shards with a shorter data.seq_length" if fixed else "")
    )
  if config.model.global_every > 1 and config.model.window // 2 >= config.data.seq_length:
    raise ValueError(
      f"config.model.window={config.model.window} covers all of config.data.seq_length"
      f" {config.data.seq_length}: set config.model.global_every=1"
    )


def check_end(config: ConfigDict) -> None:
  """Raises ValueError if the learning rate's decay does not fit the run."""
  p, steps, to_the_end = config.optimizer, config.train.steps, schema.decays_to_the_end(config)
  if p.decay_steps and (to_the_end or p.decay_steps + p.warmup_steps > steps):
    raise ValueError(
      f"optimizer.decay_steps={p.decay_steps:,} needs schedule=wsd, got {p.schedule}, and must fit"
      f" into train.steps={steps:,} with {p.warmup_steps:,} warmup_steps"
    )
  if p.decay_frac is not None and (to_the_end or p.decay_steps):
    raise ValueError(
      f"optimizer.decay_frac={p.decay_frac:g} needs schedule=wsd and decay_steps=0, got"
      f" {p.schedule} and {p.decay_steps:,}"
    )
  if config.train.minutes is not None and not p.decay_frac:
    raise ValueError(
      f"train.minutes={config.train.minutes:g} needs optimizer.schedule=wsd, decay_steps=0 and"
      " decay_frac, e.g. 0.2"
    )


def check_values(flat: Mapping, rows: Mapping[str, schema.Row]) -> None:
  """Raises ValueError if a value of a flat configuration is not allowed by its row.

  None is allowed. Seeds must be below 2**32, because JAX wraps larger ones.
  """
  schema.check_ranges(flat, rows)
  if (last := flat["seed"] + flat.get("seeds", 1) - 1) >= 2**32:
    raise ValueError(f"seeds must be at least 0 and below 2**32, got config.seed up to {last}")
  for field, row in rows.items():
    if (known := row.allowed) is not None and flat[field] not in known:
      hint = "; --import=MODULE registers more" if row.kind else ""
      raise ValueError(
        f"config.{field} must be one of {', '.join(known)}, got {flat[field]!r}{hint}"
      )


def check_devices(config: ConfigDict, devices: int | None = None) -> None:
  """Raises ValueError if `devices` (default: all present) do not divide the batches."""
  for field, size, parts in (
    ("train.batch_size", config.train.batch_size, config.train.accumulation),
    ("eval.batch_size", config.eval.batch_size, 1),
  ):
    try:
      parallel.check_divisible(size, parts, devices)
    except ValueError as error:
      raise ValueError(f"config.{field}: {error}") from None


def check_combination(config: ConfigDict) -> None:
  """Raises ValueError if the objective, the generator and the optimizer are inconsistent."""
  o, g, p, base = config.objective, config.generator, config.optimizer, load("base.py")
  objective, tying = objectives.OBJECTIVES[o.name], networks.TIES[g.tie]
  generator, kinds = generators.GENERATORS[g.kind], generators.GENERATORS
  weightless = not has_generator_weights(config)
  sampling = (
    (o.temperature, o.unigram_share, o.keep_mask_share) != (1, 0, 0)
    or o.temperature_schedule
    or o.unigram_share_schedule
    or o.disallow_correct
    or not g.sampling_dropout
  )
  accepted = [kind for kind in kinds if objective.accepts(kinds[kind])]
  frozen = [name for name, kind in kinds.items() if kind.pretrained]
  for wrong, reason in (
    (
      not objective.uses_generator
      and (g.kind != base.generator.kind or sampling or o.discriminator_weight_schedule),
      f"objective {o.name} has no generator and one loss: keep the defaults of generator.kind,"
      " sampling_dropout, temperature, unigram_share, their schedules, keep_mask_share,"
      " disallow_correct and discriminator_weight_schedule",
    ),
    (
      g.kind not in accepted,
      f"objective {o.name} needs a generator of kind {' or '.join(accepted)}, got {g.kind}",
    ),
    (
      weightless and g.tie != base.generator.tie,
      f"generator.tie={g.tie} needs a generator with weights: set it to {base.generator.tie}",
    ),
    (
      generator.pretrained and not tying.own_width,
      f"a {g.kind} generator shares no embeddings: set generator.tie=none, got {g.tie}",
    ),
    (
      generator.pretrained != (g.init_from is not None),
      f"set generator.init_from if and only if generator.kind is {' or '.join(frozen)}: got"
      f" {g.init_from} and {g.kind}",
    ),
    (
      tying.shares_encoder and (g.width_multiplier != 1 or g.depth_multiplier != 1),
      f"generator.tie={g.tie} shares the encoder: set generator.width_multiplier and"
      f" depth_multiplier to 1, got {g.width_multiplier} and {g.depth_multiplier}",
    ),
    (
      tying.shares_encoder and len(generator.encoders) > 1,
      f"generator.tie={g.tie} shares one encoder, but a {g.kind} generator has"
      f" {len(generator.encoders)}",
    ),
    (
      objective.exact_sampling and sampling,
      f"objective {o.name} needs the exact probabilities of its samples: keep temperature at 1 and"
      " unigram_share at 0 without schedules, keep_mask_share at 0, disallow_correct off and"
      " sampling_dropout on",
    ),
    (
      not generator.trained and not g.sampling_dropout,
      f"a generator of kind {g.kind} always samples without dropout: keep sampling_dropout on",
    ),
  ):
    if wrong:
      raise ValueError(reason)
  if p.separate_optimizers and (weightless or not generator.trained):
    raise ValueError(
      "optimizer.separate_optimizers needs two trained networks, but only one is trained"
    )


def check_layers(config: ConfigDict) -> None:
  """Raises ValueError if positions, attention and the generator's mask decoder do not fit."""
  m, kind, positions = config.model, config.generator.kind, POSITIONS[config.model.positions]
  if positions.bias and m.attention != "auto" and not attention.ATTENTION[m.attention].bias:
    raise ValueError(
      f"config.model.attention={m.attention} has no model.positions={m.positions}: auto selects one"
      " that has"
    )
  misfit = BLOCKS[m.block].residual or m.global_every != 1 or positions.rotary
  generator = generators.GENERATORS[kind]
  if generator.decodes and not generator.pretrained and misfit:
    raise ValueError(
      f"generator.kind={kind} needs model.block=post_norm, global_every=1 and positions=learned or"
      f" disentangled, got {m.block}, {m.global_every} and {m.positions}"
    )


def warn_of_unread(o: ConfigDict) -> None:
  """Warns of changed fields of config.objective that the objective does not read.

  It does not raise, because runs of earlier versions that set them must resume.
  """
  base = load("base.py").objective
  changed = (f"objective.{k}" for k in o if o[k] != base[k])
  if unread := [field for field in changed if schema.is_of_others(field, o.name)]:
    warnings.warn(f"objective {o.name} does not read {', '.join(unread)}", stacklevel=1)


def warn_of_unread_overrides(config: ConfigDict, fields: Iterable[str]) -> None:
  """Warns of fields set on the command line that this configuration does not read.

  A configuration file may set them for other objectives. Unknown names are ignored here.
  """
  rows = schema.PRETRAINING
  kinds = ("objective.name", "generator.kind", "model.positions")
  if any(rows[field].allowed.get(flatten(config)[field]) is None for field in kinds):
    return
  if found := [field for field in fields if field in rows and rows[field].has_no_effect(config)]:
    warnings.warn(f"this configuration does not read {', '.join(found)}", stacklevel=1)


def check_attention(m: ConfigDict, platform: str | None = None) -> None:
  """Raises ValueError if `platform` (None: this machine) lacks the requested attention."""
  if m.attention == "auto":
    return
  platform, kind = platform or jax.default_backend(), attention.ATTENTION[m.attention]
  dropout = m.attention_dropout if not kind.dropout else 0
  if kind.platform not in (None, platform) or dropout:
    needs = [f"a {kind.platform.upper()}"] if kind.platform else []
    needs += [] if kind.dropout else ["model.attention_dropout=0"]
    raise ValueError(
      f"config.model.attention={m.attention} needs {' and '.join(needs)}, got {platform} and"
      f" {m.attention_dropout}: auto selects a supported one"
    )
