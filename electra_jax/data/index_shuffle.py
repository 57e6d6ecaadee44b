"""`tf.random.experimental.index_shuffle` in NumPy, for when TensorFlow is not installed.

Computes a random permutation element by element with a cycle-walking cipher (Black and Rogaway
2002): a block cipher of just enough bits, applied until the result is in range. The cipher is Simon
(Beaulieu et al. 2013) with four rounds.
"""

import functools

import numpy as np

FIRST_KEY = 498247692  # TensorFlow's constant; the seed gives the other two
LEAST_BITS = 16  # of a block


def index_shuffle(index: np.ndarray, seed: tuple[int, int], max_index: int) -> np.ndarray:
  """Returns where a permutation of 0 to `max_index` puts `index` [n], as [n] int64.

  >>> index_shuffle(np.arange(8), (3, 1), 99).tolist()
  [10, 34, 5, 1, 66, 45, 51, 40]
  """
  found = np.array(index, np.uint64)
  if max_index == 0:
    return np.zeros(found.shape, np.int64)
  # As in TensorFlow: max_index = 2^16, 2^18, ... gets one bit too few and is mapped as 0 is.
  bits = max((max_index - 1).bit_length(), LEAST_BITS)
  width = (bits + 1) // 2  # of a word, half of a block
  keys = tuple(_round_keys(seed, width))
  left = np.ones(found.shape, bool)
  while left.any():  # about 2^bits / max_index times
    if bits > LEAST_BITS:
      found[left] = _encrypt(found[left], keys, width)
    else:
      found[left] = _encrypted(keys, width)[found[left]]
    left = found > max_index
  return found.astype(np.int64)


@functools.lru_cache(maxsize=2)
def _encrypted(keys: tuple[int, ...], width: int) -> np.ndarray:
  """Returns all blocks encrypted, because with few examples the cycles are long."""
  return _encrypt(np.arange(1 << 2 * width, dtype=np.uint64), keys, width)


def _round_keys(seed: tuple[int, int], width: int) -> list[int]:
  most = 2**width - 1
  keys = [key % 2**32 & most for key in (FIRST_KEY, *seed)]

  def right(n: int) -> int:
    return keys[2] >> n | keys[2] << (width - n) & most

  return [*keys, 0xFFFFFFFC & most ^ 1 ^ keys[0] ^ right(3) ^ right(4)]


def _encrypt(block: np.ndarray, keys: tuple[int, ...], width: int) -> np.ndarray:
  most = np.uint64(2**width - 1)

  def mix(x: np.ndarray) -> np.ndarray:
    one, eight, two = ((x << n | x >> (width - n)) & most for n in np.uint64([1, 8, 2]))
    return one & eight ^ two

  width = np.uint64(width)
  high, low = block >> width & most, block & most
  for first, second in np.uint64(keys).reshape(-1, 2):
    high = high ^ mix(low) ^ first
    low = low ^ mix(high) ^ second
  return high << width | low
