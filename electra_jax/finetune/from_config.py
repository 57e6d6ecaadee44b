"""Checks a fine-tuning configuration and builds the encoder and the settings."""

import dataclasses
import math
import warnings

from ml_collections import ConfigDict

from electra_jax.config import compare, schema, specs, validate
from electra_jax.core.optimizer import OptimizerConfig
from electra_jax.core.transformer_config import TransformerConfig, take_fields
from electra_jax.data import tokenizer
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune import loop
from electra_jax.interop import hub, sources
from electra_jax.interop.vocabularies import difference

RANDOM = "random"
# {largest width: learning rate}: up to 256 measured on chunking, then the paper's.
RATES = {128: 1e-3, 256: 3e-4, 768: 1e-4, math.inf: 5e-5}
DROPOUTS = ("dropout", "attention_dropout", "embedding_dropout", "ffn_dropout")


@dataclasses.dataclass(frozen=True)
class PretrainedEncoder:
  """The network to fine-tune, without a head."""

  cfg: TransformerConfig  # with the configuration's dropout and compute settings
  weights: dict | None  # {"embeddings", "encoder"}; None: random for each seed
  tokenizer: Tokenizer
  left_out: tuple[str, ...]  # descriptions of the unused parts of the source
  origin: str | None = None  # its name and commit on the Hub


def load_pretrained(config: ConfigDict) -> PretrainedEncoder:
  """Returns the pretrained encoder; raises ValueError for an invalid source or vocabulary."""
  fresh = config.init == RANDOM
  path = config.like if fresh else config.init
  if path is None:
    raise ValueError(
      "config.init=random needs config.like, a run or export with the shape and the vocabulary"
      if fresh
      else "config.init is not set: set a run, an export, a Hugging Face folder, hf://ORG/NAME,"
      " a TF1 checkpoint, or random with config.like"
    )
  if config.like is not None and not fresh:
    raise ValueError("config.like needs config.init=random")
  path = hub.pinned(path)
  source = sources.open_source(path)
  network, found = source.networks[source.main], source.tokenizer
  if source.main != "discriminator" and not fresh:
    warnings.warn(
      f"{path} has no discriminator: fine-tuning its masked language model", stacklevel=1
    )
  if config.data.vocab is not None:
    rules = found.vocab if found else None
    known, strips = (rules.lowercase, rules.strip_accents) if rules else (None, None)
    lowercase = config.data.lowercase if known is None else known
    given = tokenizer.load(config.data.vocab, lowercase, strips, bool(rules and rules.nfc))
    if found is None:
      found = given
    elif differs := difference(given, found):
      raise ValueError(f"{config.data.vocab} is not the vocabulary of {path}: {differs}")
  if found is None:
    raise ValueError(f"{path} has no vocabulary: set config.data.vocab")
  sources.check_vocab(found, {"discriminator": network}, path)
  weights = {name: network.weights[name] for name in ("embeddings", "encoder")}
  m = config.model
  rates = {name: m[name] for name in DROPOUTS if m[name] is not None}
  compute = specs.make_compute(m, network.cfg.head_size, network.cfg.positions)
  cfg = dataclasses.replace(network.cfg, **rates, compute=compute)
  if fresh:
    return PretrainedEncoder(cfg, None, found, source.left_out)
  origin = path if hub.is_name(path) else hub.origin(source.card)
  return PretrainedEncoder(cfg, weights, found, source.left_out, origin)


def make_settings(
  config: ConfigDict, pretrained: PretrainedEncoder, epochs: float
) -> loop.Settings:
  """Returns the settings of a task; unset rates get values for the network's width."""
  p, width = config.optimizer, pretrained.cfg.hidden_size
  rate = p.learning_rate or next(r for widest, r in RATES.items() if width <= widest)
  return take_fields(
    loop.Settings,
    {**p, **config.data, **config.train},
    seeds=tuple(range(config.seed, config.seed + config.seeds)),
    optimizer=take_fields(OptimizerConfig, p, learning_rate=rate, warmup_steps=0),
    decay_frac=p.decay_frac or 0.0,
    layer_decay=p.layer_decay or (0.9 if width > 768 else 0.8),
    epochs=epochs if config.train.epochs is None else config.train.epochs,
    eval_batch_size=config.eval.batch_size,
    eval_every=config.eval.every_steps,
    log_every=config.log.every_steps,
    pad=pretrained.tokenizer.vocab.pad,
  )


def check(config: ConfigDict) -> None:
  """Raises ValueError for an invalid configuration, before any file is read."""
  validate.check_values(compare.flatten(config), schema.FINE_TUNING)
  p = config.optimizer
  lacks_share = p.schedule == "wsd" and not p.decay_frac
  if lacks_share or (p.decay_frac and schema.decays_to_the_end(config)):
    raise ValueError(
      "set optimizer.decay_frac, e.g. to 0.2, if and only if optimizer.schedule=wsd: got"
      f" {p.decay_frac} and {p.schedule}"
    )
  o = config.own
  if o.folds == 1 or (o.folds and o.split) or (o.fold is not None and o.fold >= o.folds):
    raise ValueError(
      "config.own.folds must be at least 2, above own.fold, and not combined with own.split: got"
      f" {o.folds}, {o.fold} and {o.split}"
    )
  if config.eval.every_steps and not config.train.patience:
    raise ValueError("config.eval.every_steps needs config.train.patience, e.g. 3")
  validate.check_attention(config.model)
  validate.check_devices(config)
