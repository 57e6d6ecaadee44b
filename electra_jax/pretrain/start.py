"""Makes the first state of a run: from a checkpoint, from another run, or initial weights."""

import functools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import jax
from ml_collections import ConfigDict
from rich.console import Console

from electra_jax.config import specs
from electra_jax.core import objectives, params
from electra_jax.core.networks import PretrainSpec
from electra_jax.core.step import restarted, with_moments
from electra_jax.core.transformer_config import TransformerConfig, differences
from electra_jax.data import tokenizer
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.interop import initial, sources
from electra_jax.pretrain.run import Run, make_train_fns
from electra_jax.runtime import bucket, checksums, jax_flags, parallel, processes
from electra_jax.runtime.checkpoint import Checkpoints, DamagedError, restore_from
from electra_jax.runtime.workdir import read_run_config

Warn = Callable[[Iterable[str]], None]  # prints and records warnings


def make_state(run: Run, checkpoints: Checkpoints, console: Console, warn: Warn):
  """Returns the restored or initial state and its saved metadata (None at step 0)."""
  restored = _restore_newest(run, checkpoints, console, warn)
  if restored is not None:
    return restored
  tokens = tokenizer.load_from(run.shards.folder, run.shards.vocab)
  if run.config.init_optimizer:
    state = _continue_another_run(run, tokens, console, warn)
  else:
    state = run.fns.init_state(_initial_weights(run, tokens, console, warn))
  if jax.process_count() > 1:  # init_from may differ between hosts
    processes.assert_same({"initial weights": f"CRC-32 {checksums.of_tree(state.params):08x}"})
  return state, None


def _restore_newest(run: Run, checkpoints: Checkpoints, console: Console, warn: Warn):
  """Returns the state and metadata of the newest intact checkpoint, or None."""
  sharding = run.fns.sharding
  while True:
    latest = checkpoints.latest_step()
    processes.assert_same({"newest checkpoint": "none" if latest is None else f"step {latest}"})
    if latest is None:
      return None
    started = time.perf_counter()
    try:
      state, meta = checkpoints.restore(latest, sharding.shapes())
    except ValueError as error:
      if not processes.only_raised(error, DamagedError):
        raise
      if not run.config.checkpoint.fallback:
        raise DamagedError(
          f"{error}; --config.checkpoint.fallback=true does this automatically"
        ) from None
      place = processes.run_on_all(functools.partial(checkpoints.set_aside, latest))
      checkpoints.reopen()
      found = str(error).partition("; delete that folder")[0]
      warn([f"{found}; moved to {place}"])
      continue
    took = time.perf_counter() - started
    horizon = (meta.get("clock") or {}).get("horizon") or [run.config.train.steps]
    what = "already at" if latest == horizon[0] else "resuming from"
    console.print(f"{what} step {latest:,} (restored in {took:.1f} s)")
    return sharding.to_local(state), meta


def _continue_another_run(run: Run, tokens: Tokenizer, console: Console, warn: Warn):
  """Returns the parameters and optimizer state of the run in init_from, at step 0."""
  init, sharding = run.config.init_from, run.fns.sharding
  origin = processes.run_on_all(lambda: bucket.local(init, run.config.init_step))
  processes.run_on_all(lambda: sources.check_run_vocab(origin, tokens))
  saved = read_run_config(origin)
  other = _other_train_fns(run, specs.saved_config(saved), sources.run_spec(origin, tokens))
  shapes = (other or run.fns).sharding.shapes()
  state, first = restore_from(origin, shapes, run.config.init_step, processes.run_on_all)
  processes.assert_same({"init_step": str(first)})
  same_data = saved["data"].get("manifest") == run.shards.digest
  if same_data and saved["seed"] == run.config.seed:
    warn([f"seed={run.config.seed} as in {init}: it reads the same data again"])
  if other:
    own = sharding.to_global(run.fns.init_state(_initial_weights(run, tokens, console, warn)))
    moments, modules = with_moments(own.opt_state, state.opt_state)
    console.print(f"the optimizer of {init}, step {first:,}, goes on for {', '.join(modules)}")
    return restarted(sharding.to_local(own.replace(opt_state=moments)))
  console.print(f"starting from the parameters and the optimizer of {init}, step {first:,}")
  _warn_of_differences(run, specs.read_spec(origin, run.shards.vocab).discriminator, warn)
  state = restarted(sharding.to_local(state))
  return state.replace(params=_with_frozen_generator(run, state.params, tokens, console))


def _other_train_fns(run: Run, config: ConfigDict, spec: PretrainSpec):
  """Returns a run's programs if its networks or number of optimizers are not those of `run`.

  Returns None if they are, or if the optimizer has another name, so that no moment fits.
  """
  mine, theirs = (objectives.param_shapes(x) for x in (run.spec, spec))
  names = ("name", "separate_optimizers")
  (name, apart), (other, others_apart) = (
    [x.optimizer[k] for k in names] for x in (run.config, config)
  )
  if name != other or (mine == theirs and apart == others_apart):
    return None
  return _train_fns(config, spec)


def _train_fns(config: ConfigDict, spec: PretrainSpec):
  made = specs.make_optimizer_config(config)
  return make_train_fns(spec, made, config.train.steps, config.seed, config.train.accumulation)


@jax_flags.pinned()
def read_initial(workdir: str | Path, tokens: Tokenizer) -> sources.RunParams:
  """Recomputes a run's networks at step 0, which has no checkpoint; returns as `sources.read_run`.

  They follow from the seed, init_from and generator.init_from, which must be unchanged, bit for bit
  on the same kind of device.
  """
  config = specs.saved_config(read_run_config(workdir))
  spec = sources.run_spec(workdir, tokens)
  # The fields of `Run` that are used.
  run = SimpleNamespace(config=config, spec=spec, fns=_train_fns(config, spec))
  weights = _initial_weights(run, tokens, Console(quiet=True), lambda warnings: None)
  return sources.RunParams(spec, weights, 0)


def _initial_weights(run: Run, tokens: Tokenizer, console: Console, warn: Warn) -> dict:
  """Returns initial parameters, with the weights of init_from and generator.init_from if set."""
  origin, step = run.config.init_from, run.config.init_step
  weights = parallel.replicate(run.fns.init_params())
  if origin is not None:
    found, cfg, left_out = processes.run_on_all(
      lambda: initial.read_params(origin, tokens, run.spec.tying, step)
    )
    found = params.match_roles(weights, found)
    if _is_frozen(run):  # the generator comes from generator.init_from
      found = {role: tree for role, tree in found.items() if role != "generator"}
    weights, taken, fresh, unused = params.inherit(weights, found)
    _warn_of_differences(run, cfg, warn)
    weights = parallel.replicate(weights)
    console.print(f"starting from the parameters of {origin}: {', '.join(taken)}")
    if fresh := [x for x in fresh if not (_is_frozen(run) and x.startswith("generator/"))]:
      console.print(f"newly initialised: {', '.join(fresh)}")
    if unused := [*unused, *left_out]:
      console.print(f"not used: {', '.join(unused)}")
  return _with_frozen_generator(run, weights, tokens, console)


def _is_frozen(run: Run) -> bool:
  generator = objectives.generator_of(run.spec)
  return generator is not None and generator.pretrained


def _with_frozen_generator(run: Run, weights: dict, tokens: Tokenizer, console: Console) -> dict:
  """Returns the weights, with those of generator.init_from if the generator is frozen."""
  if not _is_frozen(run):
    return weights
  source = run.config.generator.init_from
  kind = run.spec.generator_kind
  found = processes.run_on_all(lambda: initial.masked_language_model(source, tokens, kind))
  console.print(f"frozen generator: the masked language model of {source}")
  return {**weights, "generator": parallel.replicate(found.weights)}


def _warn_of_differences(run: Run, cfg: TransformerConfig, warn: Warn) -> None:
  if changes := differences(run.spec.discriminator, cfg):
    warn([f"{'; '.join(changes)} in {run.config.init_from}"])
