"""The batch: the one structure that passes from the data to the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # data is built without JAX, which takes a second to import
  import jax
  import numpy as np

  Array = jax.Array | np.ndarray

# A row of L tokens holds at most L / 8 documents, because attention kernels need a limit.
TOKENS_PER_DOCUMENT = 8


class Batch(NamedTuple):
  """B token sequences of length L."""

  ids: Array  # [B, L] int32 token ids; padding is the vocabulary's [PAD]
  token_type_ids: Array  # [B, L] int32, 0 for the first segment and padding, 1 for the second
  padding_mask: Array  # [B, L] bool, True on tokens. A row that is all False is ignored
  # [B] int32, index in the *global* batch. Random keys derive from it, not from the device
  row: Array
  # [B, L] int32, the document of each token, 1, 2, ... and 0 on padding. Attention stays inside a
  # document and positions begin anew. None: each row is one document
  document_ids: Array | None = None


class Examples(NamedTuple):
  """A `Batch` for fine-tuning or prediction, with its labels."""

  ids: Array
  token_type_ids: Array
  padding_mask: Array
  row: Array
  # {name: labels}, [B] per row or [B, L] per token, padded with 0; empty for prediction
  target: dict[str, Array]
  document_ids = None  # as in `Batch`: each row is one document
