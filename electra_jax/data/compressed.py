"""Reads compressed files."""

import gzip
import io
import lzma
from typing import BinaryIO

BUFFER_BYTES = 1 << 16


def decompressed(raw: BinaryIO, path: str) -> BinaryIO:
  """Returns the content of a file whose name may end in .gz, .xz or .zst."""
  if path.endswith(".gz"):
    return io.BufferedReader(gzip.GzipFile(fileobj=raw), BUFFER_BYTES)
  if path.endswith(".xz"):
    return io.BufferedReader(lzma.LZMAFile(raw), BUFFER_BYTES)
  if path.endswith(".zst"):
    return io.BufferedReader(_ZstdFile(raw), BUFFER_BYTES)
  return raw


class _ZstdFile(io.RawIOBase):
  """Decompressed .zst of any number of frames; unlike the library's, it detects truncation."""

  def __init__(self, raw: BinaryIO):
    import zstandard

    self._raw, self._rest, self._ready = raw, b"", b""
    self._new = lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    self._frame, self._error = None, zstandard.ZstdError

  def readable(self) -> bool:
    return True

  def readinto(self, buffer) -> int:
    while not self._ready:
      data = self._rest or self._raw.read(1 << 14)
      self._rest = b""
      if not data:
        if self._frame is not None:
          raise EOFError("the file ends in the middle of a frame")
        return 0
      self._frame = self._frame or self._new()
      try:
        self._ready = self._frame.decompress(data)
      except self._error as error:
        raise OSError(str(error)) from None
      if self._frame.eof:
        self._rest, self._frame = self._frame.unused_data, None
    part, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
    buffer[: len(part)] = part
    return len(part)
