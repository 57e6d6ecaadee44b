"""Weight names in other formats. Conversion changes only layouts, so a round trip is bit-exact.

A network is a tree of float32 arrays: {"embeddings", "encoder"} and a head such as "rtd_head" or
"mlm_head".
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from electra_jax.core import networks, task_network
from electra_jax.core.heads import HEADS
from electra_jax.core.params import make_key, named
from electra_jax.core.transformer_config import HEAD_FIELDS, TransformerConfig
from electra_jax.runtime import foreign

# What PyTorch's DDP, compile, FSDP and activation checkpointing put into names.
_WRAPPERS = re.compile(
  r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)


class ExchangeError(ValueError):
  """Weights cannot be converted; the message is one line that names them."""


@dataclasses.dataclass(frozen=True)
class Network:
  """The config and the weights of one network."""

  cfg: TransformerConfig
  weights: Mapping  # {"embeddings", "encoder"} and the head, numpy float32
  head: str | None  # a key of `heads.HEADS`, or None

  @property
  def is_masked_lm(self) -> bool:
    """Whether the head predicts masked words."""
    kind = HEADS[self.head] if self.head else None
    return kind is not None and kind.predicts_words and not kind.causal

  @property
  def decodes(self) -> bool:
    """Whether the enhanced mask decoder predicts its words."""
    return "mask_decoder" in self.weights

  def first_layers(self, count: int) -> "Network":
    """Returns the embeddings and the first `count` layers, without a head."""
    cfg, encoder = dataclasses.replace(self.cfg, num_layers=count), self.weights["encoder"]
    cut = {**encoder, "layers": jax.tree.map(lambda x: x[:count], encoder["layers"])}
    return Network(cfg, {"embeddings": self.weights["embeddings"], "encoder": cut}, None)

  def without_head(self) -> "Network":
    """Returns the encoder and its embeddings."""
    weights = {name: self.weights[name] for name in ("embeddings", "encoder")}
    return Network(self.cfg, weights, None)


class Row(NamedTuple):
  """The names of one weight. In `hf` and `tf`, {i} is the index of a layer."""

  ours: str  # path in a network; layers are stacked along the first axis
  hf: str  # a kernel is [out, in]
  tf: str = ""  # a kernel is [in, out]
  part: int | None = None  # of query, key, value: the index in our array [..., 3, heads, width]
  first: int = 0  # the first layer that has the weight


@dataclasses.dataclass(frozen=True)
class Family:
  """A kind of network of Hugging Face's transformers."""

  name: str  # for messages
  model_type: str  # in config.json
  rows: list[Row]
  prefix: str  # of the encoder's tensors; absent in a bare encoder
  # {head: class of transformers}; None is the bare encoder
  classes: Mapping[str | None, str]
  # config -> fields of config.json; raises ExchangeError if the class does not support the config
  to_json: Callable[[TransformerConfig, str | None], dict]
  # (path for messages, config.json) -> config; raises ExchangeError, KeyError or TypeError
  from_json: Callable[[Path, Mapping], TransformerConfig]
  tied: str  # name of the copy of the word embeddings
  head_prefixes: tuple[str, ...]  # of heads' tensors that `rows` lack
  # Convert a detector's tensors to two labels, if its class is a token classifier, and back.
  two_labels: Callable[[Mapping], Mapping] = lambda tensors: tensors
  one_logit: Callable[[Mapping], Mapping] = lambda tensors: tensors
  ignored: frozenset[str] = frozenset()  # tensors that are not weights, or not read
  # {head: prefix of its tensors}, if they and not the class say which head a folder has
  heads_by_tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
  renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # {prefix: that of `rows`}
  spare_words: bool = False  # whether the word table may have more rows than the vocabulary
  token_types: bool = True  # takes token_type_ids
  # {field of config.json: special token whose id it holds}; pad_token_id is in every family
  token_ids: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # config -> whether its network is written in this family; ELECTRA is the fallback
  holds: Callable[[TransformerConfig], bool] = lambda cfg: False

  @property
  def pretraining_heads(self) -> tuple[str, ...]:
    """The keys of `heads.HEADS` that the family has classes for."""
    return tuple(head for head in self.classes if head in HEADS)

  @property
  def decodes(self) -> bool:
    """Whether `rows` has the enhanced mask decoder of a masked language model."""
    return any(row.ours.startswith("mask_decoder/") for row in self.rows)

  def is_shared(self, head: str | None) -> bool:
    """Returns whether another head has the same class."""
    with_head = [kind for other, kind in self.classes.items() if other]
    return with_head.count(self.classes[head]) > 1

  def computes(self, head: str | None) -> bool:
    """Returns whether the class computes the head's outputs, not only the states."""
    return head is not None and self.classes[head] != self.classes[None]

  def dropped(self, head: str | None) -> tuple[str, ...]:
    """Returns the prefixes of tensors that a network with `head` does not read."""
    others = tuple(x for name, x in self.heads_by_tensors.items() if name != head)
    return others if head else self.head_prefixes


def read_json(path: Path) -> dict:
  """Reads a JSON object, {} if the file is missing; raises ExchangeError if it is damaged."""
  try:
    return foreign.read_json(path) if path.is_file() else {}
  except ValueError as error:
    raise ExchangeError(str(error)) from None


def check_fixed(path: Path, content: Mapping, fixed: Mapping) -> None:
  """Raises ExchangeError if a config.json differs from `fixed`."""
  for field, right in fixed.items():
    if content.get(field, right) != right:
      raise ExchangeError(f"{path}: {field} must be {right!r}, got {content[field]!r}")


def label_fields(labels: Sequence[str]) -> dict:
  """Returns the fields of config.json for a head's labels, {} without labels."""
  ids = {label: i for i, label in enumerate(labels)}
  return {"id2label": dict(enumerate(labels)), "label2id": ids} if labels else {}


def check_layers(name: str, cfg: TransformerConfig, head: str | None, layers: Mapping) -> None:
  """Raises ExchangeError if a network's fields differ from the `layers` of the family `name`."""
  read = {k: v for k, v in layers.items() if head == "rtd_head" or k not in HEAD_FIELDS}
  wrong = [f"{k}={getattr(cfg, k)!r}" for k, right in read.items() if getattr(cfg, k) != right]
  if cfg.embedding_size != cfg.hidden_size:
    wrong.append(f"embedding_size={cfg.embedding_size} at hidden_size={cfg.hidden_size}")
  if wrong:
    raise ExchangeError(f"Hugging Face's {name} does not support {', '.join(wrong)}")


def network_shapes(cfg: TransformerConfig, *heads: str | None, decodes: bool = False) -> dict:
  """Returns the shapes of a network with `heads`, and with a mask decoder if it `decodes`."""

  def fresh(key):
    found = {head: networks.init_head(head, cfg, cfg.hidden_size, key) for head in heads if head}
    found |= {"mask_decoder": networks.init_mask_decoder(cfg, key)} if decodes else {}
    return task_network.init_backbone(cfg, key) | found

  return jax.eval_shape(fresh, make_key(0))


def _walk(
  rows: list[Row], cfg: TransformerConfig, ours: Mapping[str, np.ndarray]
) -> Iterator[tuple[Row, int | None, np.ndarray, tuple[int, ...]]]:
  """Yields (row, layer, view of our array, its shape in TF1) for each tensor."""
  for row in rows:
    if row.ours not in ours:
      continue
    for i in range(row.first, cfg.num_layers) if "{i}" in row.hf else (None,):
      x = ours[row.ours] if i is None else ours[row.ours][i]
      if row.part is not None:
        x = x[..., row.part, :, :]
      shape = x.shape if row.part is None else (x.size,)
      if row.ours.endswith("/kernel"):  # [D, H, d], [D, 2, F] or [D, F]; [H, d, D]
        axes = 2 if row.ours.endswith("attention_output/kernel") else 1  # input axes
        shape = (math.prod(x.shape[:axes]), math.prod(x.shape[axes:]))
      yield row, i, x, shape


def to_hf(family: Family, cfg: TransformerConfig, network: Mapping) -> dict[str, np.ndarray]:
  """Returns a network's tensors under Hugging Face's names."""
  ours = {name: np.asarray(x, np.float32) for name, x in named(network).items()}
  tensors = {}
  for row, i, x, shape in _walk(family.rows, cfg, ours):
    x = x.reshape(shape).T if row.ours.endswith("/kernel") else x.reshape(shape)
    tensors[row.hf.format(i=i)] = np.ascontiguousarray(x)
  return tensors


def fill(
  rows: list[Row],
  cfg: TransformerConfig,
  head: str | None,
  take: Callable,
  *,
  transposed: bool,
  decodes: bool = False,
) -> dict:
  """Returns a network from the tensors that `take` finds.

  take(row, layer) returns a tensor's name, and the tensor or None. Elements that no row covers
  (the attention norm that ModernBERT's first layer lacks) are 1.

  Raises:
    ExchangeError: tensors are missing or have the wrong shape.
  """
  wanted = network_shapes(cfg, head, decodes=decodes)
  ours = {name: np.ones(x.shape, np.float32) for name, x in named(wanted).items()}
  problems = []
  for row, i, target, shape in _walk(rows, cfg, ours):
    name, x = take(row, i)
    turned = transposed and row.ours.endswith("/kernel")
    shape = shape[::-1] if turned else shape
    if x is None:
      problems.append(f"{name} is missing")
    elif x.shape != shape:
      problems.append(f"{name} has shape {x.shape}, but must have {shape}")
    else:
      target[...] = (x.T if turned else x).reshape(target.shape)
  if problems:
    more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
    raise ExchangeError("; ".join([*problems[:8], *more]))
  return jax.tree.unflatten(jax.tree.structure(wanted), list(ours.values()))


def own_names(family: Family, names: Collection[str]) -> dict[str, str]:
  """Returns {name of a tensor: its name in transformers}.

  Training adds the names of PyTorch's wrappers (DDP's "module.", torch.compile's "_orig_mod.") and
  of the module that holds the network (Lightning's "model.").

  Raises:
    ExchangeError: the tensors are of several networks, or two have the same name.
  """
  plain, whole = {name: _WRAPPERS.sub("", name) for name in names}, family.rows[0].hf
  for missing in ("", family.prefix):  # a bare encoder lacks the family's prefix
    words = whole.removeprefix(missing)
    prefixes = {x[: -len(words)] for x in plain.values() if f".{x}".endswith(f".{words}")}
    if len(prefixes) > 1:
      raise ExchangeError(f"tensors of several networks: {', '.join(sorted(prefixes))}: save one")
    if prefixes:
      before = prefixes.pop()
      for name, x in plain.items():
        x = x.removeprefix(before)
        plain[name] = x if x.startswith(family.head_prefixes) else missing + x
      break
  for name, x in plain.items():
    old = next(filter(x.startswith, family.renamed), "")
    plain[name] = family.renamed.get(old, "") + x.removeprefix(old)
  for name, count in collections.Counter(plain.values()).items():
    if count > 1:
      raise ExchangeError(f"{count} tensors are {name}")
  return plain


def from_hf(
  family: Family, cfg: TransformerConfig, head: str | None, tensors: Mapping[str, np.ndarray]
) -> dict:
  """Returns a network from Hugging Face's tensors.

  Raises:
    ExchangeError: tensors are missing, unknown or have the wrong shape.
  """
  dropped = family.dropped(head)
  left = {name: x for name, x in tensors.items() if not name.startswith(dropped)}
  decoder = (x.hf for x in family.rows if x.ours.startswith("mask_decoder/"))
  decodes = bool(head) and HEADS[head].predicts_words and any(x in left for x in decoder)

  def take(row: Row, i: int | None) -> tuple[str, np.ndarray | None]:
    return (name := row.hf.format(i=i)), left.pop(name, None)

  network = fill(family.rows, cfg, head, take, transposed=True, decodes=decodes)
  tied = left.pop(family.tied, None)
  word = network["embeddings"]["word"]
  if tied is not None and not np.array_equal(tied.astype(word.dtype), word):
    raise ExchangeError(f"{family.tied} must equal the word embeddings")
  if extra := sorted(left.keys() - family.ignored):
    raise ExchangeError(f"unknown tensors: {', '.join(extra[:8])}")
  return network
