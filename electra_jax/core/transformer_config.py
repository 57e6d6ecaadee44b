"""The configuration of a transformer encoder."""

import dataclasses
import math
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Compute:
  """How a network is computed; it changes outputs by rounding only, and does not change weights."""

  dtype: str = "float32"  # of activations and matmuls
  attention: str = "xla"  # a key of `attention.ATTENTION`
  unroll: int = 1  # layers per iteration of the loop over layers, a multiple of global_every
  remat: bool = False  # recompute each block's activations in the backward pass


@dataclasses.dataclass(frozen=True)
class PositionsDef:
  """The definition of a position encoding; `positions` has the functions."""

  embedded: bool = False  # adds a table [max_positions, E] to the word embeddings
  rotary: bool = False  # rotates queries and keys (RoPE, Su et al. 2021)
  # (cfg, length, document_ids) -> what `apply` takes, shared by all layers; it may create Linen
  # modules of the encoder
  tables: Callable = lambda cfg, length, document_ids: None
  # (cfg, positions.Layer, tables) -> the layer with positions
  apply: Callable = lambda cfg, layer, tables: layer
  # (cfg, length) -> products of each query, and of each key, with rows of a table; for FLOPs
  products: Callable = lambda cfg, length: 0
  bias: bool = False  # adds to the scores: needs an attention that can, and no windows
  fields: tuple[str, ...] = ()  # of TransformerConfig, which it alone reads


HEAD_FIELDS = (
  "head_norm",
  "head_first_token",
)  # of TransformerConfig; only the RTD head reads them
POSITIONS = {"learned": PositionsDef(embedded=True)}  # the others are in `positions`


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """A network's shape, kinds of layers, dropout rates, initialisation and `Compute`.

  The defaults are BERT's; ModernBERT's are in configs/modern.py (Warner et al. 2024, Section 2.1).
  """

  vocab_size: int
  embedding_size: int
  hidden_size: int
  num_layers: int
  num_heads: int
  ffn_size: int
  max_positions: int
  dropout: float = 0.1
  attention_dropout: float = 0.1
  init_stddev: float = 0.02
  layer_norm_eps: float = 1e-12
  direction: str = "both"  # tokens attend to both sides; "ltr": to the left, "rtl": to the right
  block: str = "post_norm"  # a key of `encoder.BLOCKS`
  norm: str = "layer_norm"  # a key of `layers.NORMS`
  feed_forward: str = "gelu"  # a key of `layers.FEED_FORWARDS`
  positions: str = "learned"  # a key of POSITIONS
  rope_theta: float = 10_000.0  # of the layers that attend to all tokens
  local_rope_theta: float = 10_000.0  # of the layers that attend to a window
  position_buckets: int = 256  # disentangled: rows of the table for either direction
  # layers with a multiple of this as index attend to all tokens, others to window // 2 on each side
  global_every: int = 1
  window: int = 128
  biases: bool = True  # of dense layers, except those that return logits
  token_types: bool = True
  qk_norm: bool = False  # normalise the queries and keys of each head
  embedding_norm: bool = True  # normalise the sum of the embeddings
  first_norm: bool = True  # pre_norm: normalise the input of the first block
  scaled_init: bool = False  # scale the initial output kernels of a block by 1 / sqrt(2 N)
  embedding_dropout: float | None = None  # None: `dropout`
  ffn_dropout: float | None = None  # of the feed-forward output; None: `dropout`
  head_norm: bool = False  # normalise the hidden layer of the RTD head
  # the RTD head reads the normalised sum of a token's and the first token's state
  head_first_token: bool = False
  compute: Compute = Compute()

  def __post_init__(self):
    for field in dataclasses.fields(self):
      _check(field, getattr(self, field.name))
    if self.hidden_size % self.num_heads:
      raise ValueError(f"{self.num_heads} heads do not divide the hidden size {self.hidden_size}")
    if self.direction not in ("both", "ltr", "rtl"):
      raise ValueError(f"direction must be both, ltr or rtl, got {self.direction!r}")
    if POSITIONS[self.positions].rotary and self.head_size % 2:
      raise ValueError(f"RoPE needs an even head size, got {self.head_size}")
    if self.global_every > 1 and POSITIONS[self.positions].bias:
      raise ValueError(f"{self.positions} positions have no windows: set model.global_every to 1")
    if self.position_buckets < 4:
      raise ValueError(f"position_buckets must be at least 4, got {self.position_buckets}")
    if self.window < 2:
      raise ValueError(f"window must be at least 2, got {self.window}")
    if not self.first_norm and self.block != "pre_norm":
      raise ValueError(f"first_norm=False needs block=pre_norm, got {self.block}")
    if not (self.first_norm or self.embedding_norm):
      raise ValueError("first_norm=False needs embedding_norm=True")

  @property
  def head_size(self) -> int:
    """The size of a head, D / H."""
    return self.hidden_size // self.num_heads

  def to_json(self) -> dict:
    """Returns the fields without the machine-specific `compute`."""
    return {name: value for name, value in vars(self).items() if name != "compute"}

  def computed(self, **changes) -> "TransformerConfig":
    """Returns the config with some fields of `Compute` changed."""
    return dataclasses.replace(self, compute=dataclasses.replace(self.compute, **changes))


def _check(field: dataclasses.Field, value: object) -> None:
  """Raises ValueError if a value has not the type of its field, or is a number out of range."""
  kinds = field.type | int if field.type in (float, float | None) else field.type
  if not isinstance(value, kinds) or (isinstance(value, bool) and field.type is not bool):
    raise ValueError(f"{field.name} is {value!r}, not of type {getattr(kinds, '__name__', kinds)}")
  if isinstance(value, int) and field.type is int and value < 1:
    raise ValueError(f"{field.name} must be above 0, got {value}")
  below = 1 if field.name.endswith("dropout") else math.inf
  if isinstance(value, float | int) and not 0 <= value < below:
    raise ValueError(f"{field.name} must be at least 0 and below {below}, got {value}")


def differences(cfg: TransformerConfig, other: TransformerConfig) -> list[str]:
  """Describes the fields that make `cfg` compute other outputs than `other` from equal weights."""
  fields = "block norm layer_norm_eps feed_forward positions global_every first_norm head_norm"
  fields += " head_first_token"
  has_local_layers = max(cfg.global_every, other.global_every) > 1
  read = {name: 0 for x in (cfg, other) for name in POSITIONS[x.positions].fields}
  fields = " ".join([fields, *(x for x in read if has_local_layers or x != "local_rope_theta")])
  if has_local_layers:
    fields += " window"
  return [
    f"model.{name} is {getattr(cfg, name)}, was {getattr(other, name)}"
    for name in fields.split()
    if getattr(cfg, name) != getattr(other, name)
  ]


def take_fields(cls: type, group: Mapping, /, **others):
  """Returns cls(...) from the entries of `group` that are fields of cls, and `others`.

  >>> take_fields(Compute, {"dtype": "bfloat16", "hidden_size": 8}, unroll=2)
  Compute(dtype='bfloat16', attention='xla', unroll=2, remat=False)
  """
  names = [field.name for field in dataclasses.fields(cls)]
  return cls(**{name: group[name] for name in names if name in group} | others)
