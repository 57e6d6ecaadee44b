"""What other programs wrote is read, or an error of one line says why not."""

import gzip
import json

import pytest

from electra_jax.runtime import foreign


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "", b"\xff", '{"a": 1} {"b": 2}'])
def test_json_that_cannot_be_read_is_one_line(tmp_path, text):
  path = tmp_path / "x.json"
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(ValueError, match=r"x\.json is not JSON: ") as error:
    foreign.read_json(path)
  assert "\n" not in str(error.value)


def test_json_has_the_type_that_is_asked_for(tmp_path):
  (tmp_path / "x.json").write_text(json.dumps([1]))
  assert foreign.read_json(tmp_path / "x.json", list) == [1]
  with pytest.raises(ValueError, match="holds a JSON list, not a dict"):
    foreign.read_json(tmp_path / "x.json")


OUTSIDE = ("", "/etc/passwd", "../x", "a/../../x", "..", "a\0b", 3, None, ["x"])


def test_names_stay_inside_their_folder(tmp_path):
  assert foreign.inside(tmp_path, "a/b.txt") == tmp_path / "a/b.txt"
  for name in OUTSIDE:
    with pytest.raises(ValueError, match="is not the name of a file inside"):
      foreign.inside(tmp_path, name)


def test_formats_of_bytes_that_are_not_utf8():
  assert foreign.likely_format(gzip.compress(b"text")) == "gzip"
  assert foreign.likely_format("Zoë is here".encode("utf-16-le")) == "UTF-16"
  assert foreign.likely_format("Zoë is here".encode("latin-1")) == "Windows-1252"
  assert not foreign.likely_format(b"\x81\x8d\x00\x01")
