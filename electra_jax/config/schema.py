"""The schema: one row for each field of a configuration.

A row says which values are valid, whether the field defines a run, its value in runs of earlier
versions, and what reads it. Checks, comparisons, resuming and notes on fields without effect use
the rows. Defaults and meanings are in configs/base.py and configs/finetune/base.py.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from electra_jax.config import registry

ALWAYS = object()  # `earlier` of a field that all versions have
# Whether a field defines a run, which then resumes only with the same value.
RUN = "run"
SHAPES = "shapes"  # it also sets names and shapes of arrays, so checkpoints need the same value
# When a run stops reading a field.
AT_START = "at the start"  # at its first checkpoint
UNTIL_DECIDED = "until decided"  # when a run with train.minutes has decided where it ends
# What a field of `data` determines.
SHARDS = "shards"  # the bytes of the shards
EXAMPLES = "examples"  # also the form of the examples; training takes the value from the build
SEGMENTS = "segments"  # as EXAMPLES, for two-segment examples only

ABOVE_0, BELOW_1, SIGNED = "above 0", "at least 0 and below 1", "signed"


@dataclasses.dataclass(frozen=True)
class Row:
  """The properties of a field besides its default and its meaning."""

  range: str = "at least 0"  # of a number; None is allowed if the default is None
  infinite: bool = False  # infinity is allowed and means no limit
  in_32_bits: bool = False  # the optimizer counts it in int32
  choices: Collection[str] | Callable[[], Collection[str]] | None = None
  kind: str | None = None  # a key of `registry.KINDS`: the choices are the entries of that kind
  defines: str | None = None  # RUN, SHAPES or None
  is_path: bool = False  # of another run or export: spellings of the same path are equal
  earlier: Any = ALWAYS  # its value in runs made before the field existed
  read: str | None = None  # AT_START, UNTIL_DECIDED or None (always)
  builds: str | None = None  # SHARDS, EXAMPLES, SEGMENTS or None
  has_schedule: bool = False  # objective.NAME_schedule is its schedule
  has_no_effect: Callable[[ConfigDict], bool] = lambda config: False
  # Of a field that a user registers.
  default: Any = None
  comment: str = ""

  @property
  def allowed(self) -> Collection[str] | None:
    """The choices, None if any value is allowed."""
    if self.kind:
      return registry.table(self.kind)
    return self.choices() if callable(self.choices) else self.choices

  def facts(self, field: str, value: Any, config: ConfigDict | None) -> list[str]:
    """Returns notes on a field: its choices, its range, whether it defines the run.

    Args:
      config: if given, also note registered names and a missing effect; imports JAX.
    """
    known = self.choices if config is None else self.allowed
    found = [f"one of {', '.join(known)}"] if known and not callable(known) else []
    if isinstance(value, int | float) and not isinstance(value, bool):
      found += [self.range] if self.range not in ("at least 0", SIGNED) else []
    found += ["defines the run"] if self.defines else []
    if config is not None:
      with contextlib.suppress(KeyError):  # an objective that is not registered
        unread = self.has_no_effect(config) or (
          "objective" in config and is_of_others(field, config.objective.name)
        )
        found += ["no effect here"] if unread else []
    return found


def check_ranges(flat: Mapping, rows: Mapping[str, Row]) -> None:
  """Raises ValueError if a number of a flat configuration is outside its row's range."""
  for field, x in flat.items():
    if x is None or isinstance(x, bool | str):
      continue
    row = rows[field]
    for wrong, wanted in (
      (math.isnan(x) or (math.isinf(x) and not row.infinite), "finite"),
      (row.range == ABOVE_0 and x <= 0, ABOVE_0),
      (row.range == BELOW_1 and not 0 <= x < 1, BELOW_1),
      (row.in_32_bits and x >= 2**31, "below 2**31"),
      (row.range != SIGNED and x < 0, "at least 0"),
    ):
      if wrong:
        raise ValueError(f"config.{field} must be {wanted}, got {x}")


def _attention() -> Collection[str]:
  return ("auto", *registry.table("attention"))


def _head_layers() -> Collection[str]:
  return ("auto", *registry.table("head_layers"))


def _unread_positions(name: str) -> Callable[[ConfigDict], bool]:
  """Returns config -> whether its position encoding does not read model.NAME."""
  return lambda c: name not in registry.table("positions")[c.model.positions].fields


def _objective(config: ConfigDict):
  return registry.table("objective")[config.objective.name]


def _generator(config: ConfigDict):
  return registry.table("generator")[config.generator.kind]


def _tying(config: ConfigDict):
  return registry.table("tie")[config.generator.tie]


def is_of_others(field: str, objective: str) -> bool:
  """Returns whether a field is a hyper-parameter of other objectives than `objective`."""
  kinds, name = registry.table("objective"), field.removesuffix("_schedule")
  of = {kind for kind in kinds if name in [f"objective.{x}" for x in kinds[kind].own_fields]}
  return objective in kinds and bool(of) and objective not in of


def trains_no_generator(config: ConfigDict) -> bool:
  """Returns whether the run trains no generator, so that no field sets the size of one."""
  generator = _generator(config)
  trained = _objective(config).uses_generator and generator.encoders
  return not trained or generator.pretrained


def decays_to_the_end(config: ConfigDict) -> bool:
  """Returns whether the learning rate decays from the end of warm-up to the last step."""
  return config.optimizer.schedule in ("product", "joined")


_FREE, _RUN, _ABOVE_0 = Row(), Row(defines=RUN), Row(ABOVE_0, defines=RUN)
_SHAPE = Row(ABOVE_0, defines=SHAPES)

_DTYPE = ("auto", "float32", "bfloat16")

PRETRAINING = {
  "seed": _RUN,
  "init_from": Row(defines=RUN, is_path=True, read=AT_START),
  "init_step": Row(defines=RUN, read=AT_START, earlier=None),
  "init_optimizer": Row(defines=RUN, read=AT_START, earlier=False),
  "allow_config_change": _FREE,
  "model.hidden_size": _SHAPE,
  "model.num_layers": _SHAPE,
  "model.num_heads": _SHAPE,
  "model.ffn_size": _SHAPE,
  "model.embedding_size": _SHAPE,
  "model.max_positions": _SHAPE,
  "model.dropout": Row(BELOW_1, defines=RUN),
  "model.attention_dropout": Row(BELOW_1, defines=RUN),
  "model.init_stddev": _ABOVE_0,
  "model.layer_norm_eps": _ABOVE_0,
  "model.block": Row(kind="block", defines=SHAPES, earlier="post_norm"),
  "model.norm": Row(kind="norm", defines=SHAPES, earlier="layer_norm"),
  "model.feed_forward": Row(kind="feed_forward", defines=SHAPES, earlier="gelu"),
  "model.positions": Row(kind="positions", defines=SHAPES, earlier="learned"),
  "model.rope_theta": Row(
    ABOVE_0, defines=RUN, earlier=10_000.0, has_no_effect=_unread_positions("rope_theta")
  ),
  "model.local_rope_theta": Row(
    ABOVE_0,
    defines=RUN,
    earlier=10_000.0,
    has_no_effect=lambda c: _unread_positions("local_rope_theta")(c) or c.model.global_every == 1,
  ),
  "model.position_buckets": Row(
    ABOVE_0, defines=SHAPES, earlier=256, has_no_effect=_unread_positions("position_buckets")
  ),
  "model.global_every": Row(ABOVE_0, defines=RUN, earlier=1),
  "model.window": Row(
    ABOVE_0, defines=RUN, earlier=128, has_no_effect=lambda c: c.model.global_every == 1
  ),
  "model.biases": Row(defines=SHAPES, earlier=True),
  "model.token_types": Row(defines=SHAPES, earlier=True),
  "model.qk_norm": Row(defines=SHAPES, earlier=False),
  "model.embedding_norm": Row(defines=SHAPES, earlier=True),
  "model.first_norm": Row(defines=RUN, earlier=True),
  "model.scaled_init": Row(defines=RUN, earlier=False),
  "model.embedding_dropout": Row(BELOW_1, defines=RUN, earlier=None),
  "model.ffn_dropout": Row(BELOW_1, defines=RUN, earlier=None),
  "model.head_norm": Row(defines=SHAPES, earlier=False),
  "model.head_first_token": Row(defines=SHAPES, earlier=False),
  "model.dtype": Row(choices=_DTYPE, defines=RUN),
  "model.attention": Row(choices=_attention),
  "model.unroll": _FREE,
  "model.remat": _FREE,
  "generator.kind": Row(kind="generator", defines=SHAPES),
  "generator.tie": Row(kind="tie", defines=SHAPES),
  "generator.init_from": Row(defines=RUN, is_path=True, read=AT_START),
  "generator.sampling_dropout": _RUN,
  "generator.embedding_size": Row(
    ABOVE_0, defines=SHAPES, earlier=None, has_no_effect=lambda c: not _tying(c).own_width
  ),
  "generator.width_multiplier": Row(ABOVE_0, defines=SHAPES, has_no_effect=trains_no_generator),
  "generator.depth_multiplier": Row(ABOVE_0, defines=SHAPES, has_no_effect=trains_no_generator),
  "objective.name": Row(kind="objective", defines=SHAPES),
  "objective.mask_prob": Row(
    defines=RUN, has_schedule=True, has_no_effect=lambda c: _objective(c).causal
  ),
  "objective.whole_words": Row(
    defines=RUN, earlier=False, has_no_effect=lambda c: _objective(c).causal
  ),
  "objective.mask_token_prob": Row(
    defines=RUN,
    has_no_effect=lambda c: (
      _objective(c).causal or (_objective(c).uses_generator and not _generator(c).is_masked_lm)
    ),
  ),
  "objective.temperature": Row(defines=RUN, has_schedule=True),
  "objective.disallow_correct": _RUN,
  "objective.unigram_share": Row(defines=RUN, has_schedule=True, earlier=0.0),
  "objective.keep_mask_share": Row(defines=RUN, earlier=0.0),
  "objective.mlm_weight": Row(
    defines=RUN, has_no_effect=lambda c: _objective(c).uses_generator and not _generator(c).trained
  ),
  "objective.discriminator_weight": Row(
    defines=RUN, has_schedule=True, has_no_effect=lambda c: not _objective(c).uses_generator
  ),
  "objective.replace_mlm_weight": Row(defines=RUN, has_schedule=True, earlier=1.0),
  "objective.adversarial_weight": _RUN,
  "objective.contrast_weight": Row(defines=RUN, earlier=1.0),
  "objective.contrast_group": Row(ABOVE_0, defines=RUN, earlier=8),
  "objective.mask_prob_schedule": _RUN,
  "objective.temperature_schedule": _RUN,
  "objective.unigram_share_schedule": Row(defines=RUN, earlier=""),
  "objective.discriminator_weight_schedule": _RUN,
  "objective.replace_mlm_weight_schedule": Row(defines=RUN, earlier=""),
  "data.dir": _FREE,
  "data.cache": Row(earlier=None),
  "data.sources": Row(builds=SHARDS),
  "data.tfds_dir": _FREE,
  "data.vocab": Row(builds=SHARDS),
  "data.vocab_size": Row(ABOVE_0, builds=SHARDS),
  "data.vocab_train_mb": Row(builds=SHARDS),
  "data.lowercase": Row(builds=SHARDS),
  # A manifest without this field strips accents if the vocabulary lower-cases (`Vocab.from_json`).
  "data.strip_accents": Row(builds=SHARDS, earlier=None),
  "data.nfc": Row(builds=SHARDS, earlier=None),
  "data.seq_length": Row(ABOVE_0, builds=SHARDS),
  "data.examples": Row(choices=("segments", "packed"), builds=EXAMPLES),
  "data.split_lines": Row(builds=SEGMENTS),
  "data.short_prob": Row(builds=SEGMENTS),
  "data.short_min_tokens": Row(builds=SEGMENTS),
  "data.single_segment_prob": Row(builds=SEGMENTS),
  "data.boundary_prob": Row(builds=SEGMENTS),
  "data.holdout_frac": Row(builds=EXAMPLES),
  "data.max_bad_frac": _FREE,
  "data.examples_per_shard": Row(builds=SHARDS),
  "data.parts": Row(builds=SHARDS, earlier=1),
  "data.dedup": Row(builds=SHARDS, earlier=""),
  "data.workers": _FREE,
  "optimizer.name": Row(kind="optimizer", defines=SHAPES),
  "optimizer.learning_rate": _ABOVE_0,
  "optimizer.schedule": Row(kind="schedule", defines=RUN),
  "optimizer.warmup_steps": Row(in_32_bits=True, defines=RUN),
  "optimizer.decay_power": Row(defines=RUN, has_no_effect=lambda c: c.optimizer.schedule == "wsd"),
  "optimizer.decay_steps": Row(
    in_32_bits=True, defines=RUN, earlier=0, has_no_effect=decays_to_the_end
  ),
  "optimizer.decay_frac": Row(
    BELOW_1, defines=RUN, read=UNTIL_DECIDED, earlier=None, has_no_effect=decays_to_the_end
  ),
  "optimizer.weight_decay": _RUN,
  "optimizer.b1": Row(BELOW_1, defines=RUN),
  "optimizer.b2": Row(BELOW_1, defines=RUN),
  "optimizer.eps": _ABOVE_0,
  "optimizer.clip_norm": Row(ABOVE_0, infinite=True, defines=RUN),
  "optimizer.sharded": _FREE,
  "optimizer.separate_optimizers": Row(defines=SHAPES),
  "optimizer.generator_learning_rate": _ABOVE_0,
  "optimizer.generator_weight_decay": _RUN,
  "optimizer.generator_clip_norm": Row(ABOVE_0, infinite=True, defines=RUN),
  "train.batch_size": _ABOVE_0,
  "train.steps": Row(ABOVE_0, in_32_bits=True, defines=RUN, read=UNTIL_DECIDED),
  "train.minutes": Row(ABOVE_0, defines=RUN, read=UNTIL_DECIDED, earlier=None),
  "train.accumulation": Row(ABOVE_0),
  "eval.every_steps": _FREE,
  "eval.batch_size": Row(ABOVE_0),
  "eval.max_examples": Row(ABOVE_0),
  "eval.pairs": Row(earlier=None),
  "eval.max_pairs": Row(ABOVE_0, earlier=2000),
  "eval.fixed_noise": Row(earlier=True),
  "checkpoint.every_steps": Row(ABOVE_0),
  "checkpoint.keep": Row(ABOVE_0),
  "checkpoint.keep_every_steps": _FREE,
  "checkpoint.fallback": _FREE,
  "checkpoint.on_error": Row(choices=("stop", "continue")),
  "health.on_nan": Row(choices=("stop", "rollback")),
  "health.max_rollbacks": _FREE,
  "health.on_warning": Row(choices=("warn", "stop")),
  "health.window": _FREE,
  "health.loss_spike": Row(infinite=True),
  "health.auc_margin": _FREE,
  "health.recall": _FREE,
  "health.entropy_ratio": _FREE,
  "health.reference": Row(earlier=None),
  "health.after_step": _FREE,
  "hosts.timeout_secs": Row(ABOVE_0),
  "hosts.slow_ratio": Row(ABOVE_0, infinite=True),
  "profile.steps": _FREE,
  "profile.signal_steps": Row(ABOVE_0),
  "log.every_steps": Row(ABOVE_0),
  "log.trackers": _FREE,
}
# Hashes of a run's shards and vocabulary, saved and compared with its configuration.
HASHES = {"data.manifest": Row(defines=RUN), "data.vocab_hash": Row(defines=SHAPES)}
# {name in earlier versions: current name}
RENAMED = {
  "objective.rtd_weight": "objective.discriminator_weight",
  "objective.rtd_weight_schedule": "objective.discriminator_weight_schedule",
  "optimizer.decoupled": "optimizer.separate_optimizers",
  "log.tensorboard": "log.trackers",
}
# {field: {value in earlier versions: current value}}
REVALUED = {"log.trackers": {True: "tensorboard", False: ""}}

_NUMBER, _RATE = Row(ABOVE_0), Row(BELOW_1)
FINE_TUNING = {
  "kind": _FREE,
  "task": _FREE,
  "init": _FREE,
  "like": _FREE,
  "seed": _FREE,
  "seeds": _NUMBER,
  "keep": Row(choices=("best", "all", "none")),
  "data.dir": _FREE,
  "data.tfds_dir": _FREE,
  "data.train": _FREE,
  "data.dev": _FREE,
  "data.test": _FREE,
  "data.vocab": _FREE,
  "data.lowercase": _FREE,
  "data.max_length": _NUMBER,
  "data.buckets": _FREE,
  "data.train_examples": _NUMBER,
  "own.text": _FREE,
  "own.pair": _FREE,
  "own.label": _FREE,
  "own.kind": _FREE,
  "own.metrics": _FREE,
  "own.split": Row(BELOW_1, earlier=0.0),
  "own.folds": Row(earlier=0),
  "own.fold": Row(earlier=None),
  "tagging.word_column": Row(SIGNED),
  "tagging.tag_column": Row(SIGNED),
  "tagging.labels": Row(earlier=None),
  "qa.stride": _NUMBER,
  "qa.max_query": _NUMBER,
  "qa.beam_size": _NUMBER,
  "qa.joint": _FREE,
  "qa.answerable_weight": _FREE,
  "qa.hidden": _NUMBER,
  "qa.n_best": _NUMBER,
  "qa.max_answer_length": _NUMBER,
  "qa.threshold": Row(SIGNED, infinite=True),
  "pairs.train_columns": Row(earlier=None),
  "pairs.dev_columns": Row(earlier=None),
  "pairs.pooling": Row(choices=("mean", "cls"), earlier="mean"),
  "pairs.temperature": Row(ABOVE_0, earlier=0.05),
  "model.head": Row(choices=_head_layers),
  "model.dropout": _RATE,
  "model.embedding_dropout": Row(BELOW_1, earlier=None),
  "model.ffn_dropout": Row(BELOW_1, earlier=None),
  "model.attention_dropout": _RATE,
  "model.dtype": Row(choices=_DTYPE),
  "model.attention": Row(choices=_attention),
  "model.unroll": _FREE,
  "model.remat": _FREE,
  "optimizer.name": Row(kind="optimizer"),
  "optimizer.learning_rate": _NUMBER,
  "optimizer.layer_decay": _NUMBER,
  "optimizer.layer_decay_skip": _FREE,
  "optimizer.schedule": Row(kind="schedule"),
  "optimizer.warmup_frac": _RATE,
  "optimizer.decay_power": _FREE,
  "optimizer.decay_frac": Row(BELOW_1, earlier=None),
  "optimizer.weight_decay": _FREE,
  "optimizer.b1": _RATE,
  "optimizer.b2": _RATE,
  "optimizer.eps": _NUMBER,
  "optimizer.clip_norm": Row(ABOVE_0, infinite=True),
  "train.batch_size": _NUMBER,
  "train.epochs": _NUMBER,
  "train.accumulation": _NUMBER,
  "train.patience": Row(ABOVE_0, earlier=None),
  "eval.batch_size": _NUMBER,
  "eval.every_steps": Row(ABOVE_0, earlier=None),
  "log.every_steps": _NUMBER,
}


def own_field(default: Any, comment: str, **facts) -> Row:
  """Returns the row of a new objective's hyper-parameter, for `registry.register(field=...)`.

  The field defines the run; runs that were started without it have the default.

  Args:
    default: value in base.py.
    comment: its description in `electra-jax config`.
    facts: other fields of Row.
  """
  return Row(**{"defines": RUN, "earlier": default, **facts}, default=default, comment=comment)


def add_registered(config: ConfigDict) -> None:
  """Adds the registered fields to the configuration of base.py."""
  for name in registry.names("field"):
    group, _, field = name.partition(".")
    config[group][field] = PRETRAINING[name].default


def names(rows: dict[str, Row] = PRETRAINING, **wanted) -> list[str]:
  """Returns the fields whose rows have these values, e.g. names(read=AT_START)."""
  return [
    name for name, row in rows.items() if all(getattr(row, k) == v for k, v in wanted.items())
  ]
