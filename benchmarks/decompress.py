"""Speed of decompression, compared with each library's own reader.

  python benchmarks/decompress.py [--json benchmarks/results/decompress.json]

Both read the same bytes from memory, 64 KB at a time, and take turns for several rounds; the unit
is MB of output per second of processor time. Contents: zeros; one repeated line; Python's manual,
as text; the same text in frames of 4 KB.
"""

import bz2
import gzip
import io
import lzma
import pydoc_data.topics
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import BinaryIO

import machine
import zstandard

from electra_jax.data import compressed

LIBRARIES = {  # {suffix: (compress, open)}
  ".gz": (lambda x: gzip.compress(x, 6), gzip.open),
  ".xz": (lambda x: lzma.compress(x, preset=1), lzma.open),
  ".zst": (
    zstandard.ZstdCompressor(3).compress,
    lambda x: zstandard.ZstdDecompressor().stream_reader(x, read_across_frames=True),
  ),
  ".bz2": (lambda x: bz2.compress(x, 9), bz2.open),
}


def read(stream: BinaryIO) -> int:
  """Returns the number of bytes in a stream."""
  size = 0
  while data := stream.read(1 << 16):
    size += len(data)
  return size


def rate(read_all: Callable[[], int], size: int) -> float:
  """Returns MB per second of processor time; raises ValueError if bytes are missing."""
  start = time.process_time()
  if (found := read_all()) != size:
    raise ValueError(f"{found} of {size} bytes were read")
  return size / 1e6 / (time.process_time() - start)


def main(mb: int = 64, rounds: int = 3) -> dict:
  size = mb << 20
  topics = "\n".join(pydoc_data.topics.topics.values()).encode()
  text = (topics * (size // len(topics) + 1))[: size // 8]
  contents = {"zeros": bytes(size), "one line": b"The same line.\n" * (size // 15), "text": text}
  rates, peaks, ratios = {}, {}, {}
  for end, (compress, opened) in LIBRARIES.items():
    packed = {name: compress(content) for name, content in contents.items()}
    parts = (text[i : i + 4096] for i in range(0, len(text), 4096))
    packed["small frames"] = b"".join(map(compress, parts))
    for name, data in packed.items():
      length = len(contents.get(name, text))

      def ours(data=data, end=end) -> int:
        return read(compressed.decompressed(io.BytesIO(data), f"a{end}"))

      def library(data=data, opened=opened) -> int:
        return read(opened(io.BytesIO(data)))

      found = [(rate(ours, length), rate(library, length)) for _ in range(rounds)]
      medians = [round(statistics.median(x)) for x in zip(*found, strict=True)]
      tracemalloc.start()
      ours()
      peaks[f"{name}{end}"] = round(tracemalloc.get_traced_memory()[1] / 1e6, 1)
      tracemalloc.stop()
      rates[f"{name}{end}"] = dict(zip(("electra_jax", "library"), medians, strict=True))
      ratios[f"{name}{end}"] = round(length / len(data), 1)
  return {"mb_per_sec": rates, "peak_mb": peaks, "compression": ratios}


if __name__ == "__main__":
  machine.start(main)
