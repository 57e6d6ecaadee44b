"""What networks can come from: a run, an orbax export, a folder of Hugging Face, a TF1 checkpoint.

Each is recognised by what is in it and read into one structure.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from electra_jax.config import specs
from electra_jax.core import generators, networks, objectives, task_network
from electra_jax.core.encoder import Compute, TransformerConfig
from electra_jax.core.heads import HEADS
from electra_jax.core.task_network import HeadSpec
from electra_jax.data import shards, tokenizer
from electra_jax.data.tokenizer import Tokenizer, Vocab
from electra_jax.interop import huggingface, tf1
from electra_jax.interop.huggingface import ExchangeError
from electra_jax.runtime import metrics, parallel
from electra_jax.runtime.checkpoint import restore_params
from electra_jax.runtime.workdir import CONFIG_FILE, read_config

EXPORT_FILE = "export.json"  # what an orbax export is


@dataclasses.dataclass(frozen=True)
class Network:
  """One network by itself.

  Fields:
    cfg: its shape.
    weights: {"embeddings", "encoder"} and the head, numpy float32.
    head: "rtd_head", "mlm_head" or None.
  """

  cfg: TransformerConfig
  weights: Mapping
  head: str | None


@dataclasses.dataclass(frozen=True)
class Finetuned:
  """What fine-tuning added to a discriminator.

  Fields:
    info: of the task, as JSON; `finetune.task_data.TaskInfo` reads it.
    head: the head's weights, numpy float32.
  """

  info: Mapping
  head: Mapping


@dataclasses.dataclass(frozen=True)
class Source:
  """Networks, and what is known about where they are from.

  Fields:
    networks: by role, "discriminator" (what is kept) and "generator".
    tokenizer: None where the source has none (TF1 without a vocab.txt beside it).
    card: the configuration and sources they were trained with, their last metrics and steps, as
      JSON.
    left_out: what the source has and this cannot hold, in words.
    finetuned: what was fine-tuned on the discriminator, if anything was.
  """

  networks: dict[str, Network]
  tokenizer: Tokenizer | None
  card: dict
  left_out: tuple[str, ...] = ()
  finetuned: Finetuned | None = None


def open_source(path: str | Path) -> Source:
  """Returns the networks at a path, whichever of the four it is.

  Raises:
    ExchangeError, ValueError: it is none of them, or damaged.
  """
  path = Path(path).resolve()
  if (path / EXPORT_FILE).is_file():
    return _orbax(path)
  if (path / CONFIG_FILE).is_file() and (path / "checkpoints").is_dir():
    return _run(path)
  if inside := sorted(path.glob(f"*/{EXPORT_FILE}")):
    named = ", ".join(str(p.parent) for p in inside)
    raise ExchangeError(f"{path} holds exports, name one of them: {named}")
  if any((folder / "config.json").is_file() for folder in _hf_folders(path)):
    return _hugging_face(path)
  if path.with_name(path.name + ".index").is_file() or (path / "checkpoint").is_file():
    return _tf1(path)
  raise ExchangeError(
    f"{path} is neither a run, an orbax export, a folder of Hugging Face nor a TF1 checkpoint"
  )


def read_params(path: str | Path, vocab: Vocab) -> dict:
  """Returns what a source has as parameters to start from, named as in `networks`.

  Raises:
    ExchangeError, ValueError: as `open_source`; or it is of another vocabulary.
  """
  if (Path(path) / CONFIG_FILE).is_file() and (Path(path) / "checkpoints").is_dir():
    return read_run(path, vocab).params
  source = open_source(path)
  if source.tokenizer and source.tokenizer.vocab.hash != vocab.hash:
    theirs = source.tokenizer.vocab
    raise ExchangeError(
      f"{path} is of another vocabulary: {theirs.size} entries, SHA-256 {theirs.hash[:12]}, here"
      f" {vocab.size}, {vocab.hash[:12]}"
    )
  found = source.networks
  tables = found["discriminator" if "discriminator" in found else "generator"].weights["embeddings"]
  params = {"embeddings": tables}
  for role, network in found.items():
    params[role] = {k: v for k, v in network.weights.items() if k != "embeddings"}
    if not jax.tree.all(jax.tree.map(np.array_equal, network.weights["embeddings"], tables)):
      params[role]["embeddings"] = network.weights["embeddings"]
  return params


class RunParams(NamedTuple):
  """The networks of a run's newest checkpoint and the training step that it is of."""

  spec: networks.PretrainSpec
  params: dict
  step: int


def read_run(workdir: str | Path, vocab: Vocab) -> RunParams:
  """Returns a run's newest checkpoint, placed on the devices.

  Raises:
    ValueError: it is no run, of another vocabulary, or its checkpoint is damaged.
  """
  spec = specs.read_spec(workdir, vocab)
  shapes = jax.eval_shape(lambda: objectives.init_params(spec, jax.random.key(0)))
  sharding = parallel.StateSharding(shapes, sharded=False)
  params, step = restore_params(workdir, sharding.shapes())
  return RunParams(spec, parallel.replicate(sharding.to_local(params)), step)


def vocab_of(folder: str | Path) -> Vocab:
  """Returns the facts about the vocabulary of a folder of shards."""
  return Vocab.from_json(shards.read_manifest(folder)["vocab"])


def plain(cfg: TransformerConfig) -> TransformerConfig:
  """Returns the shape without how this machine computes it, which is not exchanged."""
  return dataclasses.replace(cfg, compute=Compute())


def _run(path: Path) -> Source:
  saved = read_config(path)
  vocab = vocab_of(saved["data"]["dir"])
  spec, params, steps = read_run(path, vocab)
  params = jax.tree.map(np.asarray, params)
  heads = [name for name in huggingface.HEADS if name in params["discriminator"]]
  found = {
    "discriminator": Network(
      spec.discriminator,
      {
        "embeddings": jax.tree.map(np.asarray, networks.embeddings(spec, params, "discriminator")),
        "encoder": params["discriminator"]["encoder"],
        heads[0]: params["discriminator"][heads[0]],
      },
      heads[0],
    )
  }
  others = HEADS.keys() - huggingface.HEADS.keys()
  left_out = [f"the discriminator's {name}" for name in params["discriminator"] if name in others]
  generator = objectives.generator_of(spec)
  if generator and generator.is_masked_lm:
    cfg, weights = generators.masked_language_model(spec, params)
    found["generator"] = Network(cfg, jax.tree.map(np.asarray, weights), "mlm_head")
  elif params.get("generator"):
    left_out.append(f"the {spec.generator_kind} generator, which nothing else has")
  history = [x for x in metrics.read_history(path / "metrics.jsonl") if x["split"] == "heldout"]
  text = [source["source"] for source in shards.read_manifest(saved["data"]["dir"])["sources"]]
  card = {"config": saved, "text": text, "steps": steps, "heldout": (history or [{}])[-1]}
  found = {role: dataclasses.replace(n, cfg=plain(n.cfg)) for role, n in found.items()}
  return Source(found, tokenizer.load_from(saved["data"]["dir"], vocab), card, tuple(left_out))


def _hf_folders(path: Path) -> list[Path]:
  return [path, path / "discriminator", path / "generator"]


def _hugging_face(path: Path) -> Source:
  found, left_out = {}, []
  for folder in _hf_folders(path):
    if (folder / "config.json").is_file():
      cfg, head, weights = huggingface.load(folder)
      left_out += [f"{folder.name}'s {name}" for name in huggingface.task_tensors(folder)]
      # A discriminator that was trained as a masked language model is in a folder of that name.
      mlm = head == "mlm_head" and folder.name != "discriminator"
      role = "generator" if mlm or folder.name == "generator" else "discriminator"
      found[role] = Network(cfg, weights, head)
  tokens = next(filter(None, map(_hf_tokenizer, _hf_folders(path))), None)
  return Source(found, tokens, {}, tuple(left_out))


def _hf_tokenizer(folder: Path) -> Tokenizer | None:
  """Returns the tokenizer of a folder of Hugging Face; None where it has none.

  A vocab.txt alone is BERT's tokenizer, lower-casing unless the folder says otherwise. Where the
  folder changes another of BERT's rules, only its tokenizer.json has them.
  """
  path, said = folder / "tokenizer_config.json", {}
  if path.is_file():
    try:
      said = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
      raise ExchangeError(f"{path} is damaged: {error}") from None
  lowercase = said.get("do_lower_case", True)
  is_berts = said.get("strip_accents") in (None, lowercase) and said.get(
    "tokenize_chinese_chars", True
  )
  names = [huggingface.ORIGINAL_TOKENIZER, "vocab.txt", "spm.model", "tokenizer.json"]
  if not is_berts:
    names.remove("vocab.txt")
  for name in names:
    if (folder / name).is_file():
      return tokenizer.load(folder / name, lowercase)
  if (folder / "vocab.txt").is_file():
    raise ExchangeError(f"{path} changes BERT's rules for vocab.txt, tokenizer.json is missing")
  return None


def _tf1(path: Path) -> Source:
  """Reads the shapes from the variables themselves: a checkpoint of the original has no config."""
  if (path / "checkpoint").is_file():
    path = tf1.newest(path)
  found = {}
  for role in ("discriminator", "generator"):
    cfg = tf1.read_config(path, role)
    if cfg is not None:
      head = "rtd_head" if role == "discriminator" else "mlm_head"
      found[role] = Network(cfg, tf1.load(path, cfg, role), head)
  if not found:
    raise ExchangeError(f"{path} holds neither of ELECTRA's networks")
  left_out = () if "generator" in found else tf1.left_out(path)
  # The released archives hold their vocabulary, of lower-cased text.
  vocab = path.with_name("vocab.txt")
  tokens = tokenizer.load(vocab, True) if vocab.is_file() else None
  return Source(found, tokens, {}, left_out)


# orbax exports.


def save_orbax(folder: Path, source: Source) -> None:
  """Writes the discriminator, the tokenizer and their metadata into a new folder."""
  network, finetuned = source.networks["discriminator"], source.finetuned
  weights = {**network.weights, **({"head": finetuned.head} if finetuned else {})}
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder.absolute() / "params", weights)
  content = {
    "model": {k: v for k, v in vars(network.cfg).items() if k != "compute"},
    "head": network.head,
    "finetuned": finetuned.info if finetuned else None,
    "vocab": dataclasses.asdict(source.tokenizer.vocab) if source.tokenizer else None,
    **source.card,
  }
  if source.tokenizer:
    source.tokenizer.save(folder)
  (folder / EXPORT_FILE).write_text(json.dumps(content, indent=2) + "\n")


def _orbax(path: Path) -> Source:
  try:
    content = json.loads((path / EXPORT_FILE).read_text())
    how = {field.name for field in dataclasses.fields(Compute)}  # that earlier versions wrote too
    model = {name: value for name, value in content.pop("model").items() if name not in how}
    cfg, head = TransformerConfig(**model), content.pop("head")
    vocab, info = content.pop("vocab"), content.pop("finetuned", None)
    task_head = HeadSpec(**info["head"]).make() if info else None
  except (KeyError, TypeError, json.JSONDecodeError) as error:
    raise ExchangeError(f"{path / EXPORT_FILE} is damaged: {error}") from None
  try:
    shapes = task_network.shapes(cfg, task_head) if info else huggingface.shapes(cfg, head)
    # Each process by itself: orbax's Checkpointer would have them wait for each other.
    args = ocp.args.StandardRestore(shapes)
    weights = ocp.StandardCheckpointHandler().restore(path.absolute() / "params", args=args)
  except Exception as error:
    raise ExchangeError(f"{path / 'params'} is damaged: {str(error).splitlines()[0]}") from error
  weights = jax.tree.map(np.asarray, weights)
  tokens = None
  if vocab:
    tokens = tokenizer.load_from(path, Vocab.from_json(vocab))
  finetuned = Finetuned(info, weights.pop("head")) if info else None
  return Source(
    {"discriminator": Network(cfg, weights, head)}, tokens, content, finetuned=finetuned
  )
