"""What a batch is: the one structure that travels from the data to the step."""

from typing import NamedTuple

import jax
import numpy as np

Array = jax.Array | np.ndarray


class Batch(NamedTuple):
  """A batch of token sequences; B sequences of L tokens.

  Fields:
    ids: [B, L] int32, token ids; padding carries the vocabulary's [PAD].
    token_type_ids: [B, L] int32, 0 for the first segment and for padding, 1 for the second.
    padding_mask: [B, L] bool, True on tokens, False on padding. A row that is all False counts for
      nothing.
    row: [B] int32, index of the sequence in the *global* batch. Randomness is keyed by it, so it
      does not depend on how the batch is spread over hosts and devices.
  """

  ids: Array
  token_type_ids: Array
  padding_mask: Array
  row: Array


class Examples(NamedTuple):
  """A batch to fine-tune on or to predict: a `Batch` and what each row's answer is.

  Fields:
    ids, token_type_ids, padding_mask, row: as in `Batch`.
    target: by name, [B] for what is one a row and [B, L] for what is one a token, padded with 0;
      empty where there is only to predict.
  """

  ids: Array
  token_type_ids: Array
  padding_mask: Array
  row: Array
  target: dict[str, Array]
