"""Reads networks from a run, an orbax export, a Hugging Face folder or a TF1 checkpoint.

The files in a folder determine its format. `hub` fetches the folder of a name on the Hub.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from electra_jax.config import compare, specs
from electra_jax.core import flops, generators, networks, objectives, task_network
from electra_jax.core.heads import HEADS
from electra_jax.core.task_network import HeadSpec
from electra_jax.core.transformer_config import Compute, TransformerConfig
from electra_jax.data import shards, tokenizer
from electra_jax.data.tokenizer import Tokenizer, Vocab
from electra_jax.interop import hub, huggingface, tf1, weight_files
from electra_jax.interop.hub import EXPORT_FILE
from electra_jax.interop.huggingface import DETECTOR, MASKED_LM
from electra_jax.interop.vocabularies import difference
from electra_jax.interop.weights import ExchangeError, Network, network_shapes, read_json
from electra_jax.monitor import metrics
from electra_jax.runtime import bucket, jax_flags, parallel
from electra_jax.runtime.checkpoint import FOLDER, cause, restore_from
from electra_jax.runtime.workdir import CONFIG_FILE, VOCAB_FOLDER, read_config

HUB = f"; write a network on Hugging Face's Hub as {hub.FORM}"


@dataclasses.dataclass(frozen=True)
class Finetuned:
  """The task and the head that fine-tuning added to a discriminator."""

  info: Mapping  # the task as JSON, read by `finetune.task_data.TaskInfo`
  head: Mapping  # weights, numpy float32


@dataclasses.dataclass(frozen=True)
class Source:
  """Networks with their tokenizer and metadata."""

  networks: dict[str, Network]  # by role: "discriminator", "generator" or MASKED_LM
  tokenizer: Tokenizer | None  # None for TF1 without a vocab.txt
  card: dict  # JSON: training configuration, text, steps and last metrics
  left_out: tuple[str, ...] = ()  # descriptions of the parts that were not read
  finetuned: Finetuned | None = None

  @property
  def main(self) -> str:
    """The role of the main network; "generator" if there is only a masked language model."""
    return next(x for x in ("discriminator", MASKED_LM, "generator") if x in self.networks)

  @property
  def training(self) -> Mapping | None:
    """How it was trained: the fields of `evaluate.likelihoods.ORIGINAL`; None if not recorded."""
    card = self.card
    if card.get("training") or not card.get("config") or self.finetuned:
      return card.get("training")
    config = specs.saved_config(card["config"])
    schedules = specs.make_schedules(config)
    rates = ("mask_prob", "temperature", "unigram_share")
    return {
      "objective": config.objective.name,
      "generator_kind": config.generator.kind,
      "disallow_correct": config.objective.disallow_correct,
      "keep_mask_share": config.objective.keep_mask_share,
      **{name: float(schedules[name].at(card["steps"])) for name in rates},
    }


def open_source(
  path: str | Path, heads: Sequence[int] = (), of_run: Callable[..., "RunParams"] | None = None
) -> Source:
  """Reads the networks at a path or a URL of gs:// or s3://, in any of the four formats.

  Args:
    heads: the numbers of heads of a TF1 checkpoint's discriminator and generator, if known.
    of_run: (workdir, tokenizer) -> a run's networks at one step; None: the newest of any source.

  Raises:
    ExchangeError, ValueError: the format is unknown, a file is damaged, or the sizes of vocabulary
      and networks differ.
  """
  jax_flags.check()
  if not str(path):
    raise ExchangeError("the path of the networks is empty")
  path = hub.local(bucket.local(path)).resolve()
  read = _reader(path)
  if heads and read is not _tf1:
    raise ExchangeError(f"leave out heads: {path} is not a TF1 checkpoint")
  if of_run and read is not _run:
    raise ExchangeError(f"leave out step: {path} is not a run")
  source = _tf1(path, heads) if read is _tf1 else _run(path, of_run) if of_run else read(path)
  check_vocab(source.tokenizer, source.networks, path)
  return source


def is_run(path: str | Path) -> bool:
  """Returns whether a folder holds a run."""
  return (Path(path) / CONFIG_FILE).is_file() and (Path(path) / FOLDER).is_dir()


def check_vocab(
  tokens: Tokenizer | None, networks: Mapping[str, Network], path: str | Path
) -> None:
  """Raises ExchangeError if the sizes of a vocabulary and the networks at `path` differ."""
  for role, network in networks.items():
    if tokens and tokens.vocab.size != network.cfg.vocab_size:
      raise ExchangeError(
        f"the vocabulary {tokens.path} has {tokens.vocab.size} entries, the {role} of {path} has"
        f" {network.cfg.vocab_size}"
      )


def _reader(path: Path) -> Callable[..., Source]:
  """Returns the function that reads a path's format; a converted TF1 checkpoint is not TF1."""
  if (path / EXPORT_FILE).is_file():
    return _orbax
  if is_run(path):
    return _run
  is_converted = (path / FOLDER).exists() or any(map(weight_files.find, _hf_folders(path)))
  if not is_converted and tf1.find(path):
    return _tf1
  # The exports of a task, or of all tasks in a folder of results.
  stars = ("[!.]*", "[!.]*/[!.]*")
  inside = sorted(p.parent for x in stars for p in path.glob(f"{x}/{EXPORT_FILE}"))
  if len(inside) == 1:
    return lambda path: _orbax(inside[0])
  if inside:
    named = ", ".join(map(str, inside))
    raise ExchangeError(f"{path} holds several exports, choose one: {named}")
  if any((folder / "config.json").is_file() for folder in _hf_folders(path)):
    return _hugging_face
  if not path.exists():
    raise ExchangeError(f"{path} does not exist{'' if path.parent.exists() else HUB}")
  if any(path.glob("pytorch_model*.bin*")):
    raise ExchangeError(f"{path / 'config.json'} is missing beside pytorch_model.bin")
  if run := next(filter(is_run, path.parents), None):
    raise ExchangeError(f"{path} is part of a run: use the run's folder, {run}")
  raise ExchangeError(
    f"{path} is not a run, an orbax export, a Hugging Face folder or a TF1 checkpoint"
  )


def open_for(path: str | Path, tokens: Tokenizer) -> Source:
  """Opens a source; its vocabulary, if any, must be the shards' `tokens`.

  Raises:
    ExchangeError, ValueError: as `open_source`; or the vocabulary differs.
  """
  source = open_source(path)
  if source.tokenizer and (found := difference(source.tokenizer, tokens)):
    rule = re.match(r"normalizer\.(nfc|lowercase|strip_accents) is (\w+)", found)
    remedy = rule and f"; build them with --config.data.{rule[1]}={rule[2].lower()}"
    raise ExchangeError(f"{path} and the shards have different vocabularies: {found}{remedy or ''}")
  return source


def masked_lm(source: Source, path: str | Path) -> Network:
  """Returns a source's masked language model; raises ExchangeError if it has none."""
  for role in ("generator", "discriminator", MASKED_LM):
    network = source.networks.get(role)
    if network and network.is_masked_lm:
      return network
  raise ExchangeError(f"{path} has no masked language model")


class RunParams(NamedTuple):
  """The networks of a run's checkpoint, and its step."""

  spec: networks.PretrainSpec
  params: dict
  step: int | None  # None if it is not known


def read_run(workdir: str | Path, tokens: Tokenizer, step: int | None = None) -> RunParams:
  """Returns the networks of a run's checkpoint in float32, replicated on the devices.

  Args:
    tokens: a tokenizer with the entries and rules of the run's vocabulary.
    step: of the checkpoint; None: the newest.

  Raises:
    ValueError: the folder is not a run, its vocabulary differs, or its checkpoint is damaged.
  """
  spec = run_spec(workdir, tokens)
  sharding = parallel.StateSharding(objectives.param_shapes(spec), sharded=False)
  found, step = restore_from(workdir, {"params": sharding.shapes()}, step)
  return RunParams(spec, parallel.replicate(sharding.to_local(found["params"])), step)


def run_spec(workdir: str | Path, tokens: Tokenizer) -> networks.PretrainSpec:
  """Returns the spec of a run's networks in float32; for `tokens` and errors see `read_run`."""
  spec = specs.read_spec(workdir, tokens.vocab)
  cfgs = {name: plain(getattr(spec, name)) for name in ("discriminator", "generator")}
  check_run_vocab(workdir, tokens)
  return dataclasses.replace(spec, **cfgs)


def check_run_vocab(workdir: str | Path, tokens: Tokenizer) -> None:
  """Raises ExchangeError if a run's vocabulary gives different ids than `tokens`.

  If the run's shards are on another machine or were rebuilt, compares only SHA-256 sums.
  """
  saved = compare.upgrade(compare.flatten(read_config(Path(workdir)))).get("data.vocab_hash")
  if saved == tokens.vocab.hash:
    return
  folder = data_folder(workdir)
  why = f"SHA-256 {str(saved)[:12]}, not {tokens.vocab.hash[:12]}"
  with contextlib.suppress(ValueError, OSError):
    of_run = tokenizer.load_from(folder, vocab_of(folder))
    if of_run.vocab.hash == saved:
      if (found := difference(of_run, tokens)) is None:
        return
      why = found
  raise ExchangeError(f"{workdir} and {tokens.path} have different vocabularies: {why}")


def vocab_of(folder: str | Path) -> Vocab:
  """Returns the vocabulary of a folder of shards."""
  return Vocab.from_json(shards.read_manifest(folder)["vocab"])


def data_folder(workdir: str | Path) -> Path:
  """Returns the folder with a run's vocabulary and manifest: the run's copy or its shards."""
  copy, saved = Path(workdir) / VOCAB_FOLDER, read_config(Path(workdir))
  return copy if (copy / shards.MANIFEST).is_file() else Path(str(saved["data"].get("dir")))


def plain(cfg: TransformerConfig) -> TransformerConfig:
  """Returns the config without its compute settings, which are not exported."""
  return dataclasses.replace(cfg, compute=Compute())


def main_networks(spec: networks.PretrainSpec, params: Mapping) -> dict[str, Network]:
  """Returns a run's main network with its embeddings and one head, by role.

  "discriminator" has the objective's first head that Hugging Face supports, else its first.
  MASKED_LM is the same network with a second head that predicts words, if any.
  """
  weights, cfg = params["discriminator"], spec.discriminator
  trained = objectives.OBJECTIVES[spec.objective].heads
  heads = [name for name in huggingface.family_of(cfg).pretraining_heads if name in trained]
  heads = [*heads, *(name for name in trained if name not in heads)]
  tables = jax.tree.map(np.asarray, networks.embeddings(spec, params, "discriminator"))

  def with_head(name: str | None) -> Network:
    head = {name: weights[name]} if name else {}
    return Network(cfg, {"embeddings": tables, "encoder": weights["encoder"], **head}, name)

  found = {"discriminator": with_head(heads[0] if heads else None)}
  if words := [name for name in heads[1:] if HEADS[name].predicts_words]:
    found[MASKED_LM] = with_head(words[0])
  return found


def without_class(spec: networks.PretrainSpec) -> dict[str, str]:
  """Returns {role: reason} for a run's networks that transformers has no class for."""
  generator, found = objectives.generator_of(spec), {}
  words = {"generator": spec.generator} if generator and generator.is_masked_lm else {}
  for role, cfg in {"discriminator": spec.discriminator, **words}.items():
    head, decodes = ("mlm_head", generator.decodes) if role in words else (None, False)
    try:
      huggingface.check_form(cfg, head, decodes)
    except ExchangeError as error:
      found[role] = str(error)
  return found


def _run(path: Path, read: Callable[..., RunParams] = read_run) -> Source:
  saved, folder = read_config(path), data_folder(path)
  tokens = tokenizer.load_from(folder, vocab_of(folder))
  spec, params, steps = read(path, tokens)
  params = jax.tree.map(np.asarray, params)
  found = main_networks(spec, params)
  others = params["discriminator"].keys() & HEADS.keys() - {n.head for n in found.values()}
  left_out = [f"the discriminator's {name}" for name in sorted(others)]
  generator = objectives.generator_of(spec)
  if generator and generator.is_masked_lm:
    cfg, weights = generators.masked_language_model(spec, params)
    found["generator"] = Network(cfg, jax.tree.map(np.asarray, weights), "mlm_head")
  elif params.get("generator"):
    left_out.append(f"the {spec.generator_kind} generator, specific to electra_jax")
  lines = metrics.lines(path / metrics.HISTORY_FILE)
  heldout = [x for x in lines if x["split"] == "heldout" and x["step"] <= steps]
  config = specs.saved_config(saved)
  sequences, length = steps * config.train.batch_size, config.data.seq_length
  card = {
    "config": saved,
    "text": [source["source"] for source in shards.read_manifest(folder)["sources"]],
    "steps": steps,
    "tokens": sequences * length,
    "flops": flops.step_flops(spec, sequences, length),
    "heldout": (heldout or [{}])[-1],
  }
  found = {role: dataclasses.replace(n, cfg=plain(n.cfg)) for role, n in found.items()}
  return Source(found, tokens, card, tuple(left_out))


def _hf_folders(path: Path) -> list[Path]:
  return [path, *(path / x for x in huggingface.FOLDERS)]


def _hugging_face(path: Path) -> Source:
  found, left_out, card = {}, [], {}
  for folder in _hf_folders(path):
    if (folder / "config.json").is_file():
      cfg, head, weights = huggingface.load(folder)
      network = Network(cfg, weights, head)
      left_out += [f"{folder.name}'s {name}" for name in huggingface.task_tensors(folder)]
      trained = read_json(folder / "config.json").get(huggingface.TRAINING) or {}
      if not isinstance(trained, dict):
        raise ExchangeError(f"{folder / 'config.json'}: {huggingface.TRAINING} must be an object")
      if folder == path / MASKED_LM or folder.name in ("discriminator", "generator"):
        role = folder.name
      else:
        kind = objectives.OBJECTIVES.get(str(trained.get("objective")))
        is_main = kind is not None and kind.heads[0] == head  # a run's, in a renamed folder
        role = "generator" if network.is_masked_lm and not is_main else "discriminator"
      if folder == path / DETECTOR and "discriminator" in found:
        _check_same_encoder(path, found["discriminator"], network)
      found[role] = network
      if generator := huggingface.load_generator(folder, cfg):
        found["generator"] = Network(*generator, "mlm_head")
      if folder.name != "generator":  # a generator is a masked language model
        card = card or {"training": trained or None}
  vocabularies = [*filter(None, map(huggingface.load_tokenizer, _hf_folders(path)))]
  for other in vocabularies[1:]:
    if text := difference(vocabularies[0], other):
      raise ExchangeError(f"{vocabularies[0].path} and {other.path} differ: {text}")
  tokens = next(iter(vocabularies), None)
  for role, network in found.items() if tokens else ():
    found[role], spare = _without_spare_words(network, tokens.vocab.size)
    left_out += [f"the {role}'s {spare} rows of words beyond the vocabulary"] if spare else []
  return Source(found, tokens, card, tuple(left_out))


def _without_spare_words(network: Network, size: int) -> tuple[Network, int]:
  """Returns a network without the rows of words that no text has, and their number."""
  cfg = network.cfg
  if not huggingface.family_of(cfg).spare_words or cfg.vocab_size <= size:
    return network, 0
  weights = {**network.weights, "embeddings": dict(network.weights["embeddings"])}
  weights["embeddings"]["word"] = weights["embeddings"]["word"][:size]
  if network.is_masked_lm:
    head = weights[network.head]
    weights[network.head] = {**head, "bias": head["bias"][:size]}
  cut = dataclasses.replace(cfg, vocab_size=size)
  return Network(cut, weights, network.head), cfg.vocab_size - size


def _check_same_encoder(path: Path, a: Network, b: Network) -> None:
  a, b = a.without_head(), b.without_head()
  same = a.cfg == b.cfg and jax.tree.map(np.array_equal, a.weights, b.weights)
  if not jax.tree.all(same):
    raise ExchangeError(
      f"{path}: discriminator and {DETECTOR} have different encoders; delete the wrong folder"
    )


def _tf1(path: Path, heads: Sequence[int]) -> Source:
  """Reads a checkpoint of the original, with a vocabulary in its folder (released: vocab.txt)."""
  prefix = tf1.find(path)
  found, left_out = tf1.load(prefix, heads)
  return Source(found, huggingface.load_tokenizer(prefix.parent), {}, left_out)


def save_orbax(folder: Path, source: Source) -> None:
  """Writes the discriminator with its heads, the tokenizer and metadata into a new folder."""
  network, finetuned = source.networks["discriminator"], source.finetuned
  words = source.networks.get(MASKED_LM)
  weights = {**network.weights, **({words.head: words.weights[words.head]} if words else {})}
  weights |= {"head": finetuned.head} if finetuned else {}
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(folder.absolute() / "params", weights)
  except Exception as error:
    raise ExchangeError(f"{folder / 'params'} cannot be written: {cause(error)}") from error
  content = {
    "model": network.cfg.to_json(),
    "head": network.head,
    "words_head": words and words.head,
    "finetuned": finetuned.info if finetuned else None,
    "vocab": dataclasses.asdict(source.tokenizer.vocab) if source.tokenizer else None,
    **source.card,
  }
  if source.tokenizer:
    source.tokenizer.save(folder)
  (folder / EXPORT_FILE).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _orbax(path: Path) -> Source:
  try:
    content = read_json(path / EXPORT_FILE)
    how = {field.name for field in dataclasses.fields(Compute)}  # earlier versions wrote these too
    model = {name: value for name, value in content.pop("model").items() if name not in how}
    cfg, head = TransformerConfig(**model), content.pop("head")
    vocab, info = content.pop("vocab"), content.pop("finetuned", None)
    vocab = Vocab.from_json(vocab) if vocab else None
    words = content.pop("words_head", None)  # earlier versions exported one head
    task_head = HeadSpec(**info["head"]).make() if info else None
  except ExchangeError:
    raise
  except (KeyError, TypeError, AttributeError, ValueError) as error:
    raise ExchangeError(f"{path / EXPORT_FILE} is damaged: {error}") from None
  try:
    shapes = task_network.shapes(cfg, task_head) if info else network_shapes(cfg, head, words)
    # Unlike orbax's Checkpointer, the handler does not synchronise the processes.
    args = ocp.args.StandardRestore(shapes)
    weights = ocp.StandardCheckpointHandler().restore(path.absolute() / "params", args=args)
  except Exception as error:
    raise ExchangeError(f"{path / 'params'} is damaged: {str(error).splitlines()[0]}") from error
  weights = jax.tree.map(np.asarray, weights)
  tokens = tokenizer.load_from(path, vocab) if vocab else None
  finetuned = Finetuned(info, weights.pop("head")) if info else None
  found = {"discriminator": Network(cfg, {k: weights[k] for k in weights if k != words}, head)}
  if words:
    found[MASKED_LM] = Network(cfg, {k: weights[k] for k in weights if k != head}, words)
  return Source(found, tokens, content, finetuned=finetuned)
