"""Compressed files: read to the end of their last frame, or refused by name."""

import bz2
import functools
import gzip
import io
import lzma
import os
import tracemalloc

import pytest
import zstandard
from test_sources import read, write

from electra_jax.data import compressed
from electra_jax.data.sources import SourceError
from electra_jax.finetune import files

COMPRESS = {
  ".gz": functools.partial(gzip.compress, compresslevel=1),
  ".xz": functools.partial(lzma.compress, preset=0),
  ".zst": zstandard.compress,
  ".bz2": functools.partial(bz2.compress, compresslevel=1),
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_damaged_compressed_file_is_named(tmp_path, suffix, damage):
  path = write(tmp_path / f"a.txt{suffix}", os.urandom(4000).hex().encode())
  whole = path.read_bytes()
  path.write_bytes(whole[:-9] if damage == "cut" else b"garbage" * 100)
  with pytest.raises(SourceError, match=f"a.txt{suffix}: cannot be read"):
    read(f"text:{path}")


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_of_several_frames_is_read_to_its_end_or_refused(tmp_path, suffix):
  path, second = tmp_path / f"a.txt{suffix}", COMPRESS[suffix](b"b")
  frames, padding = COMPRESS[suffix](b"a\n\n") + second, b"" if suffix == ".zst" else bytes(512)
  path.write_bytes(frames + padding)
  assert read(f"text:{path}")[0] == ["a", "b"]
  for damaged in (b"", frames[: -len(second)] + b"no frame", frames[: 6 - len(second)]):
    path.write_bytes(damaged)
    with pytest.raises(SourceError, match=f"a.txt{suffix}: cannot be read"):
      read(f"text:{path}")


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_that_is_a_thousandth_of_its_content_needs_little_memory(suffix):
  size, read = 1 << (26 if suffix == ".zst" else 23), 0
  stream = compressed.decompressed(io.BytesIO(COMPRESS[suffix](bytes(size))), f"a{suffix}")
  tracemalloc.start()
  while data := stream.read(1 << 16):
    read += len(data)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert read == size and peak < size / 2


@pytest.mark.parametrize("suffix", COMPRESS)
def test_many_small_frames_with_zeros_between_give_every_byte(suffix):
  texts = [os.urandom(i % 7).hex().encode() * (i % 5) for i in range(300)]
  zeros = [b"" if suffix == ".zst" else bytes(4 * (i % 3)) for i in range(300)]
  frames = b"".join(COMPRESS[suffix](t) + z for t, z in zip(texts, zeros, strict=True))
  stream = compressed.decompressed(io.BytesIO(frames), f"a{suffix}")
  assert stream.read() == b"".join(texts)


def test_a_task_file_that_decompresses_to_far_more_than_text_does_is_one_line(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(compressed, "BOMB_BYTES", 1 << 16)
  lines = b"".join(os.urandom(20).hex().encode() + b"\n" for _ in range(1 << 12))
  for suffix, compress in COMPRESS.items():
    path = tmp_path / f"a.tsv{suffix}"
    path.write_bytes(compress(bytes(1 << 22)))
    with pytest.raises(files.TaskError, match=r"a.tsv.*bytes decompress to .*yourself"):
      files.read_bytes(path)
    path.write_bytes(compress(lines))
    assert files.read_bytes(path) == lines
