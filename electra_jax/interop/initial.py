"""Takes shapes, sharing and weights from config.init_from and config.generator.init_from."""

import copy
import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from electra_jax.config import compare, schema, specs, validate
from electra_jax.config.files import load
from electra_jax.core import generators
from electra_jax.core.networks import TIES, generator_size
from electra_jax.core.positions import POSITIONS
from electra_jax.core.transformer_config import HEAD_FIELDS, TransformerConfig, differences
from electra_jax.data import vocabulary
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.interop import hub, sources
from electra_jax.interop.huggingface import MASKED_LM
from electra_jax.interop.vocabularies import difference
from electra_jax.interop.weights import ExchangeError, Network
from electra_jax.runtime import bucket
from electra_jax.runtime.workdir import read_run_config

HUB_NAMES = "hub_names"  # in a run's configuration: {field: Hub name as given}
# Fields of a TransformerConfig that are not taken from init_from.
_FREE = (
  "vocab_size direction compute init_stddev scaled_init"
  " dropout attention_dropout embedding_dropout ffn_dropout"
).split()
_MODEL = [x.name for x in dataclasses.fields(TransformerConfig) if x.name not in _FREE]
_GENERATOR = "kind tie embedding_size width_multiplier depth_multiplier".split()
_FIELDS = [f"model.{x}" for x in _MODEL] + [f"generator.{x}" for x in _GENERATOR]


def resolve(
  config: ConfigDict, given: Collection[str] = (), saved: Mapping[str, Any] | None = None
) -> tuple[ConfigDict, dict[str, Any]]:
  """Returns the configuration with the network shapes of init_from, and {field: value taken}.

  Keeps the fields that the user has set: those in `given`, and those that differ from base.py.

  Args:
    given: fields set on the command line.
    saved: the flat configuration of the resumed run, used instead of init_from.

  Raises:
    ExchangeError: a field that the user has set does not fit the weights or their sharing.
    ValueError: as `sources.open_source`; or the schema does not allow a field's value.
  """
  if config.init_from is None:
    return config, {}
  flat, base = compare.flatten(config), compare.flatten(load("base.py"))
  validate.check_values(flat, schema.PRETRAINING)
  found = _fields(config) if saved is None else {k: saved[k] for k in _FIELDS if k in saved}
  other = {k: v for k, v in found.items() if v != flat[k]}
  taken = {k: v for k, v in other.items() if k not in given and flat[k] == base[k]}
  if saved is None and (wrong := [k for k in other if k not in taken and _is_shape(k, found)]):
    listed = ", ".join(f"{k}={found[k]!r} (here {flat[k]!r})" for k in wrong)
    raise ExchangeError(
      f"config.init_from={config.init_from} has {listed}: leave these fields unset, as in"
      " configs/base.py, to take them from init_from"
    )
  resolved = copy.deepcopy(config)
  resolved.update_from_flattened_dict(taken)
  return resolved, taken


def with_vocabulary(config: ConfigDict, given: Collection[str] = ()) -> ConfigDict:
  """Returns the configuration of a build with the vocabulary of init_from.

  Raises:
    ExchangeError: config.data sets another vocabulary, or the source has none; or as `resolve`.
  """
  config, _ = resolve(config, given)
  if not config.init_from:
    return config
  data, tokens = config.data, sources.open_source(config.init_from).tokenizer
  if tokens is None:
    if data.vocab in vocabulary.KINDS:
      raise ExchangeError(
        f"{config.init_from} has no tokenizer: add its vocab.txt, tokenizer.json or spm.model, or"
        " set config.data.vocab to that file"
      )
    return config
  vocab = tokens.vocab
  if data.vocab == load("base.py").data.vocab and "data.vocab" not in given:
    data.vocab, data.nfc = str(tokens.path), vocab.nfc or None
    if vocab.lowercase is not None:
      same = vocab.strip_accents == vocab.lowercase
      data.lowercase, data.strip_accents = vocab.lowercase, None if same else vocab.strip_accents
  elif data.vocab in vocabulary.KINDS:
    raise ExchangeError(
      f"config.data.vocab={data.vocab} trains a new vocabulary: leave it unset to use the one of"
      f" {config.init_from}"
    )
  elif found := difference(tokens, vocabulary.load_given(config)):
    raise ExchangeError(
      f"config.data.vocab={data.vocab} differs from the vocabulary of {config.init_from}: {found}"
    )
  return config


def pinned(config: ConfigDict, saved: Mapping) -> tuple[ConfigDict, dict[str, str]]:
  """Returns the configuration with commits in names on the Hub, and {field: name as given}.

  A resumed run keeps its commits without a request to the Hub, where a branch may have moved.
  """
  flat, before, old = compare.flatten(config), saved.get(HUB_NAMES, {}), compare.flatten(saved)
  names = {x: flat[x] for x in schema.names(is_path=True) if hub.is_name(flat[x])}
  same = {x: old[x] for x, name in names.items() if name in (before.get(x), old.get(x))}
  config = copy.deepcopy(config) if names else config
  config.update_from_flattened_dict({x: same.get(x) or hub.pinned(names[x]) for x in names})
  return config, names | {x: before[x] for x in same if x in before}


def _is_shape(field: str, found: Mapping[str, Any]) -> bool:
  """Returns whether a field decides the shapes of the weights, not only the outputs."""
  if field == "model.max_positions":
    return POSITIONS[found["model.positions"]].embedded
  return schema.PRETRAINING[field].defines == schema.SHAPES


def _fields(config: ConfigDict) -> dict[str, Any]:
  """Returns the fields of those networks in init_from that the run has."""
  path = bucket.local(config.init_from, config.init_step)
  no_generator = schema.trains_no_generator(config)
  if sources.is_run(path):
    other = specs.saved_config(read_run_config(path))
    own, kind = config.generator.kind, other.generator.kind
    takes = own == load("base.py").generator.kind and _is_jointly_trained_lm(kind)
    no_generator |= own != kind and not takes
    no_generator |= schema.trains_no_generator(other)
    flat = compare.flatten(other)
    return {k: flat[k] for k in _FIELDS if not (no_generator and k.startswith("generator."))}
  if config.init_optimizer:
    raise ExchangeError(f"init_optimizer needs a run: {config.init_from} has no optimizer state")
  source = sources.open_source(path)
  main, generator = source.networks[source.main], source.networks.get("generator")
  if main is generator:  # a masked language model, for either network of its size
    if not no_generator and _multipliers(config, config.model, main.cfg)[1]:
      return {}
    no_generator = True
  found = {f"model.{name}": getattr(main.cfg, name) for name in _MODEL}
  if main.head is None or main.is_masked_lm:
    found = {name: x for name, x in found.items() if name.partition(".")[2] not in HEAD_FIELDS}
  if no_generator or generator is None:
    return found
  return found | _generator_fields(config, path, main, generator)


def _is_jointly_trained_lm(kind: str) -> bool:
  generator = generators.GENERATORS[kind]
  return generator.is_masked_lm and generator.trained


def _multipliers(config: ConfigDict, model: Any, cfg: TransformerConfig) -> tuple[dict, bool]:
  """Returns the multipliers of a generator with cfg's size, and whether the config has them."""
  g, found, equal = config.generator, {}, True
  for name, of, size in (
    ("width_multiplier", model.hidden_size, cfg.hidden_size),
    ("depth_multiplier", model.num_layers, cfg.num_layers),
  ):
    fits = round(of * g[name]) == size
    found[f"generator.{name}"] = g[name] if fits else size / of
    equal = equal and fits
  return found, equal


def _generator_fields(
  config: ConfigDict, path: str, main: Network, generator: Network
) -> dict[str, Any]:
  """Returns the fields of config.generator that describe a source's generator.

  Raises:
    ExchangeError: no multipliers of the main network's size give the generator's shape.
  """
  g, cfg = config.generator, generator.cfg
  found = _multipliers(config, main.cfg, cfg)[0]
  if generator.decodes != generators.GENERATORS[g.kind].decodes:
    found["generator.kind"] = generators.masked_lm_kind(generator.decodes, pretrained=False)
  tables, others = main.weights["embeddings"], generator.weights["embeddings"]
  differ = {k for k in tables if not _equal(tables[k], others[k])}
  same_width = cfg.embedding_size == main.cfg.embedding_size
  # {tie: the tables in which the networks may differ}
  apart = {
    name: tables
    if same_width and tying.split(tables)[1].get("embedding_delta")
    else tying.own(tables)
    for name, tying in TIES.items()
  }
  possible = [name for name in TIES if differ <= apart[name].keys()]
  fewest = sorted(
    filter(lambda name: TIES[name].own(tables), possible), key=lambda x: len(apart[x])
  )
  if generator.decodes:  # DeBERTaV3's: only the words are shared, and summed
    fewest = [x for x in reversed(possible) if TIES[x].trained_with == "generator"] + fewest
  tie = g.tie if g.tie in possible else fewest[0]
  found["generator.tie"] = tie
  if TIES[tie].own_width:
    fits = (g.embedding_size or cfg.hidden_size) == cfg.embedding_size
    found["generator.embedding_size"] = g.embedding_size if fits else cfg.embedding_size
  w, depth = found["generator.width_multiplier"], found["generator.depth_multiplier"]
  made = generator_size(main.cfg, w, depth)
  if _is_global(made) == _is_global(cfg):  # with few layers, periods may be equivalent
    cfg = dataclasses.replace(cfg, global_every=made.global_every)
  shapes = set(_MODEL) & {x.partition(".")[2] for x in schema.names(defines=schema.SHAPES)}
  shapes -= {"embedding_size", "max_positions", *HEAD_FIELDS}
  wrong = [
    f"{x} is {getattr(cfg, x)}" for x in sorted(shapes) if getattr(made, x) != getattr(cfg, x)
  ]
  if wrong := wrong or differences(cfg, made):
    raise ExchangeError(
      f"{path}: no generator.width_multiplier gives its generator ({wrong[0]}):"
      " set config.init_from to the folder of the discriminator alone"
    )
  return found


def _is_global(cfg: TransformerConfig) -> list[bool]:
  return [layer % cfg.global_every == 0 for layer in range(cfg.num_layers)]


def _equal(one, other) -> bool:
  return jax.tree.all(jax.tree.map(np.array_equal, one, other))


def read_params(
  path: str | Path, tokens: Tokenizer, tying: str, step: int | None = None
) -> tuple[dict, TransformerConfig, tuple[str, ...]]:
  """Returns (initial parameters from a source, the main config, descriptions of what is not read).

  The parameters are named as in `networks`. For `tokens` and errors see `sources.open_for`.

  Args:
    tying: a key of TIES: how the run, and also a run at `path`, shares embeddings.
    step: of a run's checkpoint; None: the newest.
  """
  path = bucket.local(path, step)
  if sources.is_run(path):
    found = sources.read_run(path, tokens, step)
    return found.params, found.spec.discriminator, ()
  if step is not None:
    raise ValueError(f"init_step={step} needs a run: {path} has no steps")
  source = sources.open_for(path, tokens)
  main = source.networks[source.main]
  params = {"embeddings": main.weights["embeddings"]}
  for role, network in source.networks.items():
    role = "discriminator" if role == MASKED_LM else role
    weights = {k: v for k, v in network.weights.items() if k != "embeddings"}
    params[role] = params.get(role, {}) | weights
  generator = source.networks.get("generator")
  if generator is not main and (generator or not main.is_masked_lm):
    _share(params, generator.weights["embeddings"] if generator else params["embeddings"], tying)
  return params, main.cfg, source.left_out


def _share(params: dict, of_generator: dict, tying: str) -> None:
  """Moves the tables of the discriminator, params["embeddings"], and the generator as TIES says.

  Args:
    of_generator: the generator's tables, or without a generator the discriminator's.
  """
  tables = params["embeddings"]
  params["embeddings"], others = TIES[tying].split(tables)
  if "embedding_delta" in others:
    params["embeddings"] = of_generator
    summed = others["embedding_delta"]
    own, shared = ({name: x[name] for name in summed} for x in (tables, of_generator))
    others["embedding_delta"] = jax.tree.map(np.subtract, own, shared)
  params["discriminator"] |= others
  if "generator" in params and (kept := TIES[tying].own(of_generator)):
    params["generator"]["embeddings"] = kept


def masked_language_model(path: str | Path, tokens: Tokenizer, kind: str) -> Network:
  """Returns a source's masked language model, whose vocabulary must be `tokens`.

  Args:
    kind: of the generator that it becomes, a key of `generators.GENERATORS`.

  Raises:
    ExchangeError, ValueError: as `sources.open_for`, or the source has no masked language model of
      this kind.
  """
  path = bucket.local(path)
  if sources.is_run(path):
    run = sources.read_run(path, tokens)
    network = Network(*generators.masked_language_model(run.spec, run.params), "mlm_head")
  else:
    network = sources.masked_lm(sources.open_for(path, tokens), path)
    sources.check_vocab(tokens, {"masked language model": network}, path)
  right = generators.masked_lm_kind(network.decodes, pretrained=True)
  if kind != right:
    raise ExchangeError(f"set generator.kind={right}, not {kind}, for the generator of {path}")
  return network


def frozen_generator(config: ConfigDict) -> TransformerConfig | None:
  """Returns the config of the masked language model in generator.init_from, if it is set."""
  if config.generator.init_from is None:
    return None
  path = bucket.local(config.generator.init_from)
  if sources.is_run(path):
    vocab = sources.vocab_of(sources.data_folder(path))
    return specs.masked_lm_config(path, vocab)
  return sources.masked_lm(sources.open_source(path), path).cfg
