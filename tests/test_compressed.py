"""Compressed files: read to the end of their last frame, or refused by name."""

import gzip
import lzma
import os

import pytest
import zstandard
from test_sources import read, write

from electra_jax.data.sources import SourceError

COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
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
