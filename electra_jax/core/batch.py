"""The batch, which the data pipeline passes to the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # builds of data do not need JAX, which takes a second to import
  import jax

  Array = jax.Array | np.ndarray

# A row of L tokens has at most L / 8 documents, because attention kernels need a bound.
TOKENS_PER_DOCUMENT = 8


class Batch(NamedTuple):
  """B token sequences of length L."""

  ids: Array  # [B, L] int32 token ids; padding is the vocabulary's [PAD]
  token_type_ids: Array  # [B, L] int32, 0 for the first segment and padding, 1 for the second
  padding_mask: Array  # [B, L] bool, True on tokens. A row that is all False is ignored
  # [B] int32, index in the *global* batch, from which random keys are derived
  row: Array
  # [B, L] int32, the document of each token from 1, and 0 on padding. Attention stays inside a
  # document and positions restart. None: each row is one document
  document_ids: Array | None = None
  # {name: labels} of a task, [B] or [B, L], padded with 0; empty for prediction
  target: dict[str, Array] | None = None


def from_rows(rows: Sequence[Sequence[int]], shape: tuple[int, int], pad: int) -> Batch:
  """Returns NumPy arrays [B, L] of rows of ids, one segment each; missing rows are padding."""
  ids, lengths = np.full(shape, pad, np.int32), np.zeros((shape[0], 1), np.int32)
  for i, row in enumerate(rows):
    ids[i, : len(row)], lengths[i] = row, len(row)
  mask = np.arange(shape[1]) < lengths
  return Batch(ids, np.zeros_like(ids), mask, np.arange(shape[0], dtype=np.int32))
