"""Builds a run: its functions, its data and its saved record."""

import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import optax
from ml_collections import ConfigDict

from electra_jax.config import compare, specs
from electra_jax.core import flops, generators, networks, objectives, optimizer, step, zero
from electra_jax.core.learning_rates import make_schedule
from electra_jax.core.params import make_key, tree_norm
from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data import mirror, pretrain_batches, tokenizer, vocabulary
from electra_jax.data.shards import copy_vocab
from electra_jax.evaluate import pairs, scorers
from electra_jax.interop import initial
from electra_jax.monitor import metrics
from electra_jax.monitor.baselines import Baselines
from electra_jax.runtime import checkpoint, jax_flags, parallel, version
from electra_jax.runtime.storage import is_remote
from electra_jax.runtime.workdir import VOCAB_FOLDER, read_config, write_config


class TrainFns(NamedTuple):
  """The functions of a run, compiled at their first call."""

  init_params: Callable  # () -> fresh parameters
  init_state: Callable  # (params) -> the state of step 0
  shapes: step.TrainState  # of ShapeDtypeStruct
  sharding: parallel.StateSharding
  train_step: Callable  # (state, batch, horizon = the configuration's)
  eval_step: Callable


class Horizon(NamedTuple):
  """The end of a run, an argument of the step so that a run can decide it during training."""

  steps: int  # of the run
  decay_steps: int  # the last steps, in which the schedule wsd decays


def make_train_fns(
  spec: networks.PretrainSpec,
  optimizer_config: optimizer.OptimizerConfig,
  steps: int,
  seed: int,
  accumulation: int,
  devices: tuple[jax.Device, ...] | None = None,
) -> TrainFns:
  """Returns the functions of a run, which do not depend on its data or workdir.

  Compiles the steps for `devices`, by default of this machine. Runs that differ only in the horizon
  share a program.
  """
  config = dataclasses.replace(optimizer_config, decay_steps=0)
  horizon = Horizon(steps, optimizer_config.decay_steps)
  fns = _make_train_fns(spec, config, seed, accumulation, devices)
  return fns._replace(train_step=parallel.with_default(fns.train_step, horizon))


@functools.cache
def _make_train_fns(
  spec: networks.PretrainSpec,
  optimizer_config: optimizer.OptimizerConfig,
  seed: int,
  accumulation: int,
  devices: tuple[jax.Device, ...] | None,
) -> TrainFns:
  objective = objectives.make(spec)
  generator = objectives.generator_of(spec)
  frozen = generator is not None and bool(generator.encoders) and not generator.trained
  apart = optimizer_config.separate_optimizers or frozen
  groups = functools.partial(generators.groups, spec) if apart else None

  @jax.jit  # here, so that the shapes and the weights are traced once
  def init_params() -> dict:
    key = jax.random.fold_in(make_key(seed), step.FIRST_WEIGHTS)
    return objectives.init_params(spec, key)

  norm, make_update = tree_norm, step.replicated_update
  if optimizer_config.sharded:
    count = len(devices or jax.devices())
    norm = zero.norm(jax.eval_shape(init_params), count)
    make_update = functools.partial(zero.zero1_update, devices=count)

  def of_horizon(horizon: Horizon) -> tuple[optax.Schedule, optax.GradientTransformation]:
    config = dataclasses.replace(optimizer_config, decay_steps=horizon.decay_steps)
    schedule = make_schedule(config, horizon.steps)
    return schedule, optimizer.make_optimizer(config, schedule, groups, norm)

  def train_step(state: step.TrainState, batch, horizon: Horizon):
    schedule, tx = of_horizon(horizon)
    return step.make_train_step(
      objective, tx, schedule, seed=seed, accumulation=accumulation, make_update=make_update
    )(state, batch)

  init_state = functools.partial(step.init_state, tx=of_horizon(Horizon(1, 0))[1])
  shapes = jax.eval_shape(lambda: init_state(init_params()))
  sharded = step.TrainState(step=False, params=False, opt_state=optimizer_config.sharded)
  sharding = parallel.StateSharding(shapes, sharded, devices)
  return TrainFns(
    init_params=init_params,
    init_state=sharding.init_state(init_state),
    shapes=shapes,
    sharding=sharding,
    train_step=parallel.map_train_step(train_step, sharding.axes, devices, others=1),
    eval_step=parallel.map_eval_step(step.make_eval_step(objective, seed=seed), devices),
  )


@dataclasses.dataclass(frozen=True)
class Run:
  """The immutable parts of a run."""

  config: ConfigDict
  workdir: Path
  shards: pretrain_batches.Shards
  heldout: pretrain_batches.Shards | None  # None without held-out documents: no evaluation
  spec: networks.PretrainSpec
  frozen: TransformerConfig | None  # config of the network in generator.init_from
  fns: TrainFns
  flops_per_step: int
  peak: tuple[float, str]  # FLOP/s of one device, and the source of the number
  baselines: Baselines  # on the held-out text
  pairs: pairs.Suite | None  # of eval.pairs
  reference: tuple | None = None  # the arguments of `bands.BandMonitor`, from health.reference
  # {field: value taken from init_from}, and {field: name on the Hub, as given without a commit}
  taken: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  hub_names: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def eval_batch_size(self) -> int:
    """The number of sequences in an evaluation batch."""
    count = min(self.heldout.num_examples, self.config.eval.max_examples)
    return eval_batch_size(self.config, jax.device_count(), count)

  def suspended_checks(self, step: int) -> tuple[str, ...]:
    """Returns the metrics that a schedule temporarily makes look collapsed, for `Health`.

    A constant weight of 0 or a constant low temperature deserves a warning.
    """
    weight, temperature = self.spec.discriminator_weight, self.spec.masking.temperature
    names = []
    if weight.points and weight.at(step) == 0:
      names += ["auc", "recall"]
    if temperature.points and temperature.at(step) < 1:
      names.append("sample_entropy")
    return tuple(names)

  @property
  def record(self) -> dict:
    """The saved description: configuration, data hashes, JAX's flags, a frozen generator."""
    hashes = {"manifest": self.shards.digest, "vocab_hash": self.shards.vocab.hash}
    nested = self.config.to_dict()
    if not is_remote(folder := nested["data"]["dir"]):
      folder = str(Path(folder).absolute())
    nested["data"] |= {"dir": folder, **hashes}
    if found := specs.registered(self.config):
      nested[specs.REGISTERED] = found
    if self.hub_names:
      nested[initial.HUB_NAMES] = dict(self.hub_names)
    flags = {compare.FLAGS: jax_flags.record()}
    return nested | flags | {specs.FROZEN_GENERATOR: self.frozen and self.frozen.to_json()}

  @property
  def fingerprint(self) -> dict[str, str]:
    """Descriptions, without paths, that must be equal in all processes of a run."""
    fields = compare.flatten(self.record)
    fields = {k: v for k, v in fields.items() if k not in ("data.dir", "data.cache")}
    text = json.dumps(fields, sort_keys=True, default=str)
    return {
      "code": f"SHA-256 {version.code_digest()[:12]}, jax {jax.__version__}",
      "data": f"manifest {self.shards.digest[:12]}",
      "configuration": f"SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:12]}",
    }


def eval_batch_size(config: ConfigDict, devices: int, examples: int) -> int:
  """Returns eval.batch_size, at most `examples`, rounded up to whole groups per device."""
  groups = "contrast_group" in objectives.OBJECTIVES[config.objective.name].own_fields
  multiple = devices * (config.objective.contrast_group if groups else 1)
  return -(-min(config.eval.batch_size, examples) // multiple) * multiple


def spec_without_data(config: ConfigDict) -> networks.PretrainSpec:
  """Returns the networks of a configuration whose shards may be missing.

  The vocabulary is the file data.vocab or, without a file, has data.vocab_size entries.
  """
  d = config.data
  vocab = SimpleNamespace(size=d.vocab_size, mask=4, special_ids=(0, 2, 3, 4))
  if d.vocab not in vocabulary.KINDS:
    if Path(d.vocab).is_file():
      vocab = tokenizer.load(d.vocab).vocab
    else:
      warnings.warn(
        f"config.data.vocab={d.vocab} is missing: assuming config.data.vocab_size={d.vocab_size:,}"
        " entries",
        stacklevel=1,
      )
  return specs.make_spec(config, vocab, (1,) * vocab.size, initial.frozen_generator(config))


def prepare(config: ConfigDict, workdir: Path, verify: bool) -> Run:
  """Opens the data and builds the constant parts of the run.

  Args:
    verify: check the SHA-256 of every data file, not only the sizes.

  Raises:
    ValueError: the data, frozen generator, pairs or reference are unusable, or there are too few
      sequences for a batch.
  """
  saved = read_config(workdir) if checkpoint.steps_on_disk(checkpoint.folder_of(workdir)) else {}
  d, t = config.data, config.train
  allowed = compare.allows(config.allow_config_change, "data.manifest")
  wanted = None if allowed else saved.get("data", {}).get("manifest")
  folder = mirror.local(d.dir, d.cache, wanted=wanted)
  shards = pretrain_batches.Shards.open(folder, "train", seq_length=d.seq_length, verify=verify)
  heldout = None
  if shards.manifest["splits"]["heldout"]["examples"]:
    heldout = pretrain_batches.Shards.open(
      folder, "heldout", seq_length=d.seq_length, verify=verify
    )
  elif config.eval.pairs and not saved:  # earlier versions ignored the pairs
    raise ValueError(
      f"eval.pairs needs evaluations, but {d.dir} has no held-out documents: build shards with"
      " data.holdout_frac, or leave eval.pairs unset"
    )
  if shards.num_examples < t.batch_size:
    raise ValueError(
      f"{d.dir}: {shards.num_examples:,} sequences are too few for a batch of {t.batch_size:,}"
    )
  if specs.FROZEN_GENERATOR in saved:  # generator.init_from may be deleted
    frozen = specs.saved_generator(saved, shards.vocab)
  else:
    frozen = initial.frozen_generator(config)
  parts = b""
  if config.objective.whole_words:
    parts = tokenizer.load_from(shards.folder, shards.vocab).word_parts()
  spec = specs.make_spec(config, shards.vocab, shards.frequencies, frozen, parts)
  fns = make_train_fns(
    spec, specs.make_optimizer_config(config), t.steps, config.seed, t.accumulation
  )
  return Run(
    config=config,
    workdir=workdir,
    shards=shards,
    heldout=heldout,
    spec=spec,
    frozen=frozen,
    fns=fns,
    flops_per_step=flops.step_flops(spec, t.batch_size, shards.seq_length),
    peak=_peak_flops(jax.local_devices()[0]),
    baselines=Baselines.of(
      heldout.frequencies if heldout else (),
      config.objective.contrast_group,
      config.objective.mask_token_prob,
    ),
    pairs=_pairs(config, spec, shards) if config.eval.pairs else None,
    reference=specs.reference(config, shards.vocab),
  )


def _pairs(config: ConfigDict, spec: networks.PretrainSpec, shards) -> pairs.Suite:
  tokens = tokenizer.load_from(shards.folder, shards.vocab)
  heads = objectives.OBJECTIVES[spec.objective].heads
  scorer = scorers.SentenceScorer(
    scorers.default(spec.objective, heads), spec.discriminator, tokens
  )
  found = pairs.read(config.eval.pairs, config.eval.max_pairs)
  try:
    kept, notes = pairs.fitting(scorer, found)
  except ValueError as error:
    raise ValueError(f"config.eval.pairs={config.eval.pairs}: {error}") from None
  for note in notes:
    warnings.warn(f"config.eval.pairs: {note}", stacklevel=1)
  return pairs.Suite(scorer, kept)


_peak_flops = functools.cache(flops.peak_flops)  # measuring takes half a second


def start_or_continue(run: Run) -> list[str]:
  """Returns the allowed changes of fields in a resumed run; call `save_record` later.

  A run without a checkpoint starts over: its configuration may differ, and is saved at once.

  Raises:
    ValueError: the workdir holds another run, is after the last step, or lacks its checkpoints;
      nothing is written.
  """
  allowed, saved = [], read_config(run.workdir)
  checkpoints, history = run.workdir / checkpoint.FOLDER, run.workdir / metrics.HISTORY_FILE
  if not checkpoints.exists() and any(metrics.lines(history)):
    raise ValueError(
      f"{checkpoints} is missing, but {history.name} has lines: restore the folder to resume, or"
      " start over in another --workdir"
    )
  done = checkpoint.steps_on_disk(checkpoint.folder_of(run.workdir))
  steps = run.config.train.steps
  if done and done[-1] > steps:
    raise ValueError(
      f"{run.workdir} is at step {done[-1]:,}: raise config.train.steps={steps:,}, or use another"
      " --workdir"
    )
  if saved is not None and done:
    allowed = compare.refuse_other_run(
      compare.flatten(saved),
      compare.flatten(run.record),
      run.config.allow_config_change,
      run.workdir,
    )
  else:
    save_record(run)
  return allowed


def save_record(run: Run) -> None:
  """Saves the configuration and the vocabulary to the workdir."""
  write_config(run.workdir, run.record)
  copy_vocab(run.shards.folder, run.shards.vocab, run.workdir / VOCAB_FOLDER)
