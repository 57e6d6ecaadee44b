"""Reads checkpoints of google-research/electra by the table in `electra`."""

import itertools
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from electra_jax.core.transformer_config import TransformerConfig
from electra_jax.data.tfds import import_tensorflow
from electra_jax.interop.electra import FIELDS, FIXED, TABLE
from electra_jax.interop.weights import ExchangeError, Network, check_fixed, fill, read_json

# A scalar of the generator's head, which the original's converters drop, too.
IGNORED = {"generator_predictions/temperature"}
CONFIGS = ("config.json", "electra_config.json", "bert_config.json")  # beside a checkpoint
_ENDING = re.compile(r"\.(index|meta|data-\d+-of-\d+)$")
Shapes = Mapping[str, list[int]]  # of the variables of a checkpoint


class Scopes(NamedTuple):
  """The variable scopes of a network."""

  embeddings: str
  encoder: str
  predictions: str


def find(path: Path) -> Path | None:
  """Returns a checkpoint's prefix, given the prefix, one of its files or its folder, else None.

  For a folder, returns the newest checkpoint, as in the note `checkpoint`. The note has an absolute
  path, of which only the name is used, because the path may be wrong on another machine.

  Raises:
    ExchangeError: the checkpoint named in the note is missing, or a folder without a note holds
      several checkpoints.
  """
  if not path.is_dir():
    prefix = path.with_name(_ENDING.sub("", path.name))
    return prefix if prefix.with_name(f"{prefix.name}.index").is_file() else None
  note, there = path / "checkpoint", sorted(p.stem for p in path.glob("*.index"))
  if note.is_file():
    named = re.search(
      rb'^model_checkpoint_path: *"(?:[^"\n]*[/\\])?([^/\\"\n]+)"', note.read_bytes(), re.M
    )
    if named is None:
      raise ExchangeError(f"{note} names no checkpoint")
    name = named[1].decode(errors="replace")
    if name not in there:
      listed = f"; the folder has {', '.join(there)}" if there else ""
      raise ExchangeError(f"{note} names {name}, which is missing{listed}")
    return path / name
  if len(there) > 1:
    raise ExchangeError(f"{path} holds several checkpoints, choose one: {', '.join(there)}")
  return path / there[0] if there else None


def load(prefix: Path, heads: Sequence[int] = ()) -> tuple[dict[str, Network], tuple[str, ...]]:
  """Returns a checkpoint's networks, and descriptions of the generators that are not read.

  The networks are "discriminator" and "generator". A generator without an encoder shares the
  discriminator's. Without a discriminator (the original's BERT objective), the generator is
  returned as the discriminator, with an MLM head. Adam's slots and the step are ignored.

  Sizes come from the variables, other fields from a config.json in the checkpoint's folder, which
  describes the discriminator; without one, warns and assumes heads of size 64.

  Args:
    heads: the networks' numbers of heads, if known.

  Raises:
    ExchangeError: the checkpoint cannot be read or holds neither network; a size or the number of
      heads cannot be determined or differs from the config; variables are missing, of the wrong
      shape, or unknown in a network's scope.
  """
  tf = import_tensorflow()
  try:
    reader = tf.train.load_checkpoint(str(prefix))
    shapes = reader.get_variable_to_shape_map()
  except (tf.errors.OpError, ValueError) as error:
    raise ExchangeError(f"{prefix} is not a readable TF1 checkpoint: {error}") from None

  def read(name: str) -> np.ndarray | None:
    try:
      return reader.get_tensor(name) if name in shapes else None
    except (tf.errors.OpError, ValueError, LookupError, RuntimeError) as error:
      raise ExchangeError(f"{name} cannot be read: {str(error).splitlines()[0]}") from None

  places, found = _scopes(prefix, shapes), {}
  if len(heads) > len(places):
    raise ExchangeError(f"{prefix} holds {len(places)} network, but got heads for {len(heads)}")
  known = {}  # {encoder, which both networks may share: its heads}
  for (role, scopes), number in itertools.zip_longest(places.items(), heads):
    cfg = _config(prefix, shapes, role, scopes, number or known.get(scopes.encoder))
    known[scopes.encoder] = cfg.num_heads
    found[role] = _network(prefix, shapes, read, cfg, scopes)
  others = {name.split("/")[0] for name in shapes if name.startswith("generator")}
  others -= {scopes.encoder for scopes in places.values()} | {"generator_predictions"}
  return found, tuple(f"the original's {x}" for x in sorted(others))


def _scopes(prefix: Path, shapes: Shapes) -> dict[str, Scopes]:
  roles = [r for r in ("discriminator", "generator") if f"{r}_predictions/dense/kernel" in shapes]
  if not roles:
    raise ExchangeError(f"{prefix} holds neither a discriminator nor a generator")
  found = {}
  for role in roles:
    mine = ["generator", "electra"] if role == "generator" else ["electra"]
    embeddings, encoder = (
      next((s for s in mine if any(n.startswith(f"{s}/{part}/") for n in shapes)), "electra")
      for part in ("embeddings", "encoder")
    )
    is_bert = encoder == "electra" and roles == ["generator"]
    found["discriminator" if is_bert else role] = Scopes(embeddings, encoder, f"{role}_predictions")
  return found


def _network(prefix: Path, shapes: Shapes, read, cfg: TransformerConfig, scopes: Scopes) -> Network:
  head = "rtd_head" if scopes.predictions.startswith("discriminator") else "mlm_head"
  mine = (f"{scopes.embeddings}/embeddings/", f"{scopes.encoder}/", f"{scopes.predictions}/")
  unread = {n for n in shapes if n.startswith(mine) and not n.endswith(("/adam_m", "/adam_v"))}

  def take(row, i: int | None) -> tuple[str, np.ndarray | None]:
    name = row.tf.format(i=i, embeddings=scopes.embeddings, encoder=scopes.encoder)
    unread.discard(name)
    return name, read(name)

  try:
    weights = fill(TABLE, cfg, head, take, transposed=False)
  except ExchangeError as error:
    raise ExchangeError(f"{prefix}: {error}") from None
  if extra := sorted(unread - IGNORED):
    raise ExchangeError(f"{prefix}: unknown variables: {', '.join(extra[:8])}")
  return Network(cfg, weights, head)


def _config(
  prefix: Path, shapes: Shapes, role: str, scopes: Scopes, heads: int | None
) -> TransformerConfig:
  layer, tables = f"{scopes.encoder}/encoder/layer_", f"{scopes.embeddings}/embeddings/"
  matrices = f"{tables}word_embeddings", f"{tables}position_embeddings"
  matrices += (f"{layer}0/intermediate/dense/kernel",)
  for name in matrices:
    if len(shape := shapes.get(name, ())) != 2:
      wrong = f"has shape {tuple(shape)}" if name in shapes else "is missing"
      raise ExchangeError(f"{prefix}: the matrix {name!r}, which gives a size, {wrong}")
  (vocab_size, embedding_size), (max_positions, _), (hidden_size, ffn_size) = map(
    shapes.__getitem__, matrices
  )
  layers = {int(n.removeprefix(layer).split("/")[0]) for n in shapes if n.startswith(layer)}
  sizes = {
    "vocab_size": vocab_size,
    "embedding_size": embedding_size,
    "hidden_size": hidden_size,
    "num_layers": 1 + max(layers),
    "ffn_size": ffn_size,
    "max_positions": max_positions,
  }
  stated = _stated(prefix, sizes) if scopes.encoder == "electra" else {}
  stated |= {"num_heads": heads} if heads else {}
  if "num_heads" not in stated:
    stated["num_heads"] = _assumed_heads(prefix, role, hidden_size)
  try:
    return TransformerConfig(**{**stated, **sizes})
  except (ValueError, TypeError, ZeroDivisionError) as error:  # from the config file
    raise ExchangeError(f"{prefix}: the {role}: {error}") from None


def _stated(prefix: Path, sizes: dict) -> dict:
  """Returns the fields of the config file in a checkpoint's folder; its sizes must be `sizes`."""
  path = next((p for p in map(prefix.with_name, CONFIGS) if p.is_file()), None)
  if path is None:
    return {}
  content = read_json(path)
  check_fixed(path, content, FIXED)
  stated = {ours: content[theirs] for ours, theirs in FIELDS.items() if theirs in content}
  for name, size in sizes.items():
    if stated.get(name, size) != size:
      raise ExchangeError(
        f"{path}: {FIELDS[name]} is {stated[name]}, but in {prefix.name} it is {size}"
      )
  return stated


def _assumed_heads(prefix: Path, role: str, width: int) -> int:
  hint = f"set num_attention_heads in a {CONFIGS[0]} in its folder, or export with --heads"
  if width > 64 and width % 64:
    raise ExchangeError(
      f"{prefix} does not store the number of heads, and the {role}'s hidden size {width} is not a"
      f" multiple of 64: {hint}"
    )
  number = max(1, width // 64)
  warnings.warn(
    f"{prefix} does not store the number of heads: assuming {number} of size {width // number} for"
    f" the {role}, as in the original; if this is wrong, {hint}",
    stacklevel=2,
  )
  return number
