"""Reads compressed files in bounded memory."""

import bz2
import functools
import io
import lzma
import zlib
from collections.abc import Callable
from typing import BinaryIO

BUFFER_BYTES = 1 << 16  # decompressed at a time
READ_BYTES = 1 << 12
ZSTD_BYTES = (
  1 << 8
)  # given to zstandard at a time, which makes up to 32 KB of each and has no limit
WINDOW_BYTES = 1 << 31  # that a file may make a decompressor remember, as `zstd --long=31`
BOMB_BYTES, BOMB_RATIO = 1 << 28, 100  # text compresses to a tenth, rarely to a thirtieth


def _new_zstd():
  import zstandard

  return zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj()


def _some(frame, data: bytes) -> tuple[bytes, bytes]:
  return frame.decompress(data, BUFFER_BYTES), b""  # it keeps the rest: `needs_input`


def _some_gzip(frame, data: bytes) -> tuple[bytes, bytes]:
  return frame.decompress(data, BUFFER_BYTES), frame.unconsumed_tail


def _some_zstd(frame, data: bytes) -> tuple[bytes, bytes]:
  return frame.decompress(data[:ZSTD_BYTES]), data[ZSTD_BYTES:]


# {suffix: (makes a decompressor, (decompressor, data) -> (some output, the data that it has not
# read))}. zlib reads gzip's format, with its checksums, as 16 + 15.
NEW: dict[str, tuple[Callable, Callable]] = {
  ".gz": (lambda: zlib.decompressobj(31), _some_gzip),
  ".xz": (functools.partial(lzma.LZMADecompressor, memlimit=WINDOW_BYTES), _some),
  ".zst": (_new_zstd, _some_zstd),
  ".bz2": (bz2.BZ2Decompressor, _some),
}


def decompressed(raw: BinaryIO, path: str) -> BinaryIO:
  """Returns the content of a file, decompressed if its name ends in a key of NEW."""
  for end, (new, some) in NEW.items():
    if path.endswith(end):
      return io.BufferedReader(_Frames(raw, new, some), BUFFER_BYTES)
  return raw


def read_whole(raw: BinaryIO, path: str) -> bytes:
  """Returns the content of a file as `decompressed`.

  Raises:
    OSError: it is damaged, or more than BOMB_BYTES and BOMB_RATIO times as large as the file.
    EOFError: it is cut off.
  """
  content, stream = io.BytesIO(), decompressed(raw, path)
  while data := stream.read(BUFFER_BYTES):
    size = content.tell() + content.write(data)
    if stream is not raw and size > max(BOMB_BYTES, BOMB_RATIO * raw.tell()):
      raise OSError(
        f"its first {raw.tell():,} bytes decompress to {size:,}: to read it all the same,"
        " decompress it yourself"
      )
  return content.getvalue()


class _Frames(io.RawIOBase):
  """The content of one or more frames, possibly with zeros between them.

  Unlike each of the libraries' readers, it raises OSError for damage at the start of a later frame
  and EOFError for a file that is empty or cut off.
  """

  def __init__(self, raw: BinaryIO, new: Callable, some: Callable):
    self._raw, self._new, self._some = raw, new, some
    self._frame, self._rest, self._ready = new(), b"", memoryview(b"")

  def readable(self) -> bool:
    return True

  def readinto(self, buffer) -> int:
    while not self._ready:
      wants = getattr(self._frame, "needs_input", True)
      data = (self._rest or self._raw.read(READ_BYTES)) if wants else b""
      if not data and wants:
        if self._frame:
          raise EOFError("the file ends in the middle of a frame")
        return 0
      if not self._frame:
        data = data.lstrip(b"\0")
        self._frame, self._rest = self._new() if data else None, b""
      if self._frame:
        self._decompress(data)
    part, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
    buffer[: len(part)] = part
    return len(part)

  def _decompress(self, data: bytes) -> None:
    try:
      found, self._rest = self._some(self._frame, data)
    except Exception as error:  # each library has different exceptions
      raise OSError(str(error)) from None
    self._ready = memoryview(found)
    if self._frame.eof:
      self._rest, self._frame = self._frame.unused_data + self._rest, None
