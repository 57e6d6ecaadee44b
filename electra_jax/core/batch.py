"""The batch: the one structure that passes from the data to the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # data is built without JAX, which takes a second to import
  import jax

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
  # {name: labels} of a task, [B] per row or [B, L] per token, padded with 0; empty for prediction
  target: dict[str, Array] | None = None


def from_rows(rows: Sequence[Sequence[int]], shape: tuple[int, int], pad: int) -> Batch:
  """Returns rows of ids, one segment each, as NumPy arrays [B, L]; other rows are all padding."""
  ids, lengths = np.full(shape, pad, np.int32), np.zeros((shape[0], 1), np.int32)
  for i, row in enumerate(rows):
    ids[i, : len(row)], lengths[i] = row, len(row)
  mask = np.arange(shape[1]) < lengths
  return Batch(ids, np.zeros_like(ids), mask, np.arange(shape[0], dtype=np.int32))
