"""Reads compressed files."""

import io
import lzma
import zlib
from collections.abc import Callable
from typing import BinaryIO

BUFFER_BYTES = 1 << 16
READ_BYTES = 1 << 12  # a thousand times as much may come out


def _new_zstd():
  import zstandard

  return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


# {suffix: makes a decompressor}. gzip's checksums are in the format that zlib calls 16 + 15.
NEW = {".gz": lambda: zlib.decompressobj(31), ".xz": lzma.LZMADecompressor, ".zst": _new_zstd}


def decompressed(raw: BinaryIO, path: str) -> BinaryIO:
  """Returns the content of a file whose name may end in .gz, .xz or .zst."""
  for end, new in NEW.items():
    if path.endswith(end):
      return io.BufferedReader(_Frames(raw, new), BUFFER_BYTES)
  return raw


class _Frames(io.RawIOBase):
  """The content of one frame or more, with zeros between them if any.

  Unlike the libraries' own readers, all of which miss one of these, it raises OSError for damage at
  the start of a later frame and EOFError for a file that is empty or cut off.
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
    except Exception as error:  # each library has its own
      raise OSError(str(error)) from None
    if self._frame.eof:
      self._rest, self._frame = self._frame.unused_data, None
