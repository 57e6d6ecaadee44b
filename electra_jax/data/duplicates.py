"""Finds documents whose normalised text was seen before (`data.dedup=exact`).

Two documents are the same if their texts are, after Unicode's NFKC, case folding, and with every
run of white space as one space. The first in the order of the input files is kept, so the same
documents are left out whatever the number of parts. A digest has 16 bytes: among 10^10 documents
the chance of one wrong pair is 10^-19.
"""

import hashlib
import unicodedata

import numpy as np

from electra_jax.data.sources import TextChunk

DTYPE = np.dtype("V16")


def normalise(text: str) -> str:
  """Returns the text that is compared.

  >>> normalise("Ａ  Cafe\\n table")
  'a cafe table'
  """
  return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


class Digests:
  """The digests of documents, which come in chunks."""

  def __init__(self):
    self._digests = bytearray()

  def add(self, chunk: TextChunk) -> None:
    """Adds a chunk; the chunks of a document come one after the other."""
    if chunk.first:
      self._hash = hashlib.blake2b(digest_size=DTYPE.itemsize)
      self._digests += bytes(DTYPE.itemsize)
    else:  # where a document was cut leaves no trace
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
  """Returns whether each digest [n] was there before, bool [n].

  >>> repeated(np.array([b"a" * 16, b"b" * 16, b"a" * 16], DTYPE))
  array([False, False,  True])
  """
  found = np.ones(len(digests), bool)
  first_bytes = digests.view(np.uint8)[:: DTYPE.itemsize].copy()
  for value in range(256):  # sorting all at once takes four times their memory
    (places,) = np.nonzero(first_bytes == value)
    found[places[np.unique(digests[places], return_index=True)[1]]] = False
  return found
