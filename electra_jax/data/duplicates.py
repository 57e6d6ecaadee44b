"""Finds documents whose normalised text was seen before (`data.dedup=exact`).

Two documents are duplicates if their texts are equal after NFKC normalisation, case folding and
collapsing white space. The first in the order of the input files is kept, so the result does not
depend on the number of parts. With digests of 16 bytes, the probability of a collision among 10^10
documents is 10^-19.
"""

import hashlib
import unicodedata

import numpy as np

from electra_jax.data.sources import TextChunk

DTYPE = np.dtype("V16")


def normalise(text: str) -> str:
  """Returns the normalised text.

  >>> normalise("Ａ  Cafe\\n table")
  'a cafe table'
  """
  return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


class Digests:
  """The digests of documents that arrive in chunks."""

  def __init__(self):
    self._digests = bytearray()

  def add(self, chunk: TextChunk) -> None:
    """Adds a chunk; the chunks of a document come one after the other."""
    if chunk.first:
      self._hash = hashlib.blake2b(digest_size=DTYPE.itemsize)
      self._digests += bytes(DTYPE.itemsize)
    else:  # the digest does not depend on where the document was split
      self._hash.update(b" ")
    self._hash.update(normalise(chunk.text).encode("utf-8"))
    whole = self._hash.copy()
    whole.update(b"\n")
    self._digests[-DTYPE.itemsize :] = whole.digest()

  def __len__(self) -> int:
    return len(self._digests) // DTYPE.itemsize

  def array(self) -> np.ndarray:
    """Returns the digests [documents]."""
    return np.frombuffer(bytes(self._digests), DTYPE)


def repeated(digests: np.ndarray) -> np.ndarray:
  """Returns whether each digest [n] occurs earlier in the array, bool [n].

  >>> repeated(np.array([b"a" * 16, b"b" * 16, b"a" * 16], DTYPE))
  array([False, False,  True])
  """
  found = np.ones(len(digests), bool)
  first_bytes = digests.view(np.uint8)[:: DTYPE.itemsize].copy()
  for value in range(256):  # sorting all digests at once takes four times the memory
    (places,) = np.nonzero(first_bytes == value)
    found[places[np.unique(digests[places], return_index=True)[1]]] = False
  return found
