"""Reads compressed files."""

import io
import lzma
import zlib
from collections.abc import Callable
from typing import BinaryIO

BUFFER_BYTES = 1 << 16
READ_BYTES = 1 << 12  # may decompress to a thousand times as much


def _new_zstd():
  import zstandard

  return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


# {suffix: makes a decompressor}. zlib reads gzip's format, with its checksums, as 16 + 15.
NEW = {".gz": lambda: zlib.decompressobj(31), ".xz": lzma.LZMADecompressor, ".zst": _new_zstd}


def decompressed(raw: BinaryIO, path: str) -> BinaryIO:
  """Returns the content of a file, decompressed if its name ends in .gz, .xz or .zst."""
  for end, new in NEW.items():
    if path.endswith(end):
      return io.BufferedReader(_Frames(raw, new), BUFFER_BYTES)
  return raw


class _Frames(io.RawIOBase):
  """The content of one or more frames, possibly with zeros between them.

  Unlike each of the libraries' readers, it raises OSError for damage at the start of a later frame
  and EOFError for a file that is empty or cut off.
  """

  def __init__(self, raw: BinaryIO, new: Callable):
    self._raw, self._new = raw, new
    self._frame, self._rest, self._ready = new(), b"", b""

  def readable(self) -> bool:
    return True

  def readinto(self, buffer) -> int:
    while len(self._ready) < len(buffer):
      data, self._rest = self._rest or self._raw.read(READ_BYTES), b""
      if not data and self._frame:
        raise EOFError("the file ends in the middle of a frame")
      if not data:
        break
      if not self._frame:
        data = data.lstrip(b"\0")
        self._frame = self._new() if data else None
      if self._frame:
        self._decompress(data)
    part, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
    buffer[: len(part)] = part
    return len(part)

  def _decompress(self, data: bytes) -> None:
    try:
      self._ready += self._frame.decompress(data)
    except Exception as error:  # each library has different exceptions
      raise OSError(str(error)) from None
    if self._frame.eof:
      self._rest, self._frame = self._frame.unused_data, None
