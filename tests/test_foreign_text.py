"""Sources name the first invalid byte of a file; escaped paths are parsed literally."""

import gzip
import os
import random
import re

import pytest
from test_sources import read

from electra_jax.data import sources
from electra_jax.data.sources import SourceError, SourceStats, parse

FRENCH = "plain\n\nune journée très agréable\n".encode()


@pytest.mark.parametrize(
  ("content", "place", "probably"),
  [
    (FRENCH.decode().encode("cp1252"), ":3: byte 0xe9 at 16", "Windows-1252: convert it: iconv"),
    (FRENCH.decode().encode("utf-16"), ":1: byte 0xff at 0", "UTF-16: convert it: iconv -f UTF-16"),
    (b"good text\n\n" + "more".encode("utf-32"), ":3: byte 0xff at 11", "UTF-16"),
    ("no mark".encode("utf-16-le"), ":1: byte 0x00 at 1", "UTF-16"),
    ("漢字かな交じり文".encode("shift-jis"), ":1: byte 0x8a at 0", "GBK, Shift-JIS or"),
    (gzip.compress(FRENCH, mtime=0), ":1: byte 0x8b at 1", "gzip: add .gz to its name"),
    (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", ":2: byte 0xe2 at 10", "PDF: extract its text"),
    (FRENCH * 4000 + b"cut \xc3", ":12001: byte 0xc3 at 144,004", ""),  # UTF-8 that is damaged
    (b"x" * 65535 + FRENCH + b"\xff", ":4: byte 0xff at 65,571", ""),  # and behind a block's end
    (bytes(1000), ":1: byte 0x00 at 0", ""),
  ],
)
def test_bytes_that_are_no_text_are_named_with_line_byte_and_likely_format(
  tmp_path, content, place, probably
):
  path = tmp_path / "a.txt"
  path.write_bytes(content)
  with pytest.raises(SourceError, match="documents are null or undecodable") as caught:
    read(f"text:{path}")
  assert f"; the first: {path}{place} is not UTF-8 text" in str(caught.value)
  assert (f"; probably {probably}" in str(caught.value)) == bool(probably), caught.value


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    (b'{"text": null}', "'text' is null"),
    (b'{"text": "\\ud83d cut"}', "'text' has a lone surrogate, \\ud83d"),
    (b"[", "probably a JSON array: write one object a line: jq"),
    ('{"text": "caf\xe9"}'.encode("cp1252"), "probably Windows-1252"),
    (gzip.compress(b"{}", mtime=0), "probably gzip"),
    (b'{"text": "' + b"x" * 1000 + b'"}', "above 500 bytes"),
  ],
)
def test_a_json_line_that_cannot_be_read_is_named(tmp_path, monkeypatch, line, reason):
  monkeypatch.setattr(sources, "JSON_BYTES", 500)
  (tmp_path / "a").write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good too"}')
  texts, tally = read(f"jsonl:{tmp_path}/a#text", max_bad_frac=0.5)
  assert texts == ["good", "good too"] and tally.undecodable == 1
  assert tally.bad.startswith(f"{tmp_path}/a:3: ") and reason in tally.bad
  assert tally.note == f"1 of 3 documents are undecodable, first {tally.bad}"


def test_text_without_line_feeds_or_blank_lines_is_noted(tmp_path):
  for text, note in (
    (
      "\r".join(["a line"] * 50),
      "1 document in 50 lines: blank lines separate documents; convert its carriage",
    ),
    ("\n".join(["a line"] * 2000), "1 document in 2,000 lines: blank lines separate documents"),
    ("\n\n".join(["a line"] * 2000), ""),
  ):
    (tmp_path / "a.txt").write_text(text, newline="")
    found = read(f"text:{tmp_path}/a.txt")[1].note
    assert found.startswith(note) and bool(found) == bool(note)


def test_what_is_no_file_is_named(tmp_path):
  (tmp_path / "x.txt").mkdir()
  os.mkfifo(tmp_path / "pipe")
  for path, message in (
    (tmp_path / "x.txt", "x.txt is a folder: name files, e.g. .*/x.txt/\\*.txt"),
    (tmp_path / "pipe", "pipe is a pipe or a device: copy it to a file"),
    ("/dev/zero", "/dev/zero is a pipe or a device"),
    (f"{tmp_path}/a,b.txt", "a source begins with its kind"),
  ):
    with pytest.raises(SourceError, match=message):
      read(f"text:{path}")


@pytest.mark.parametrize("size", [0, 500_000, 2_000_000], ids=["emptied", "cut", "grown"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, size):
  (tmp_path / "a.txt").write_text("a document\n\n" * 100_000)
  (source,) = parse(f"text:{tmp_path}/a.txt")
  documents = sources.documents(source, SourceStats(source))
  next(documents)
  os.truncate(tmp_path / "a.txt", size)
  with pytest.raises(SourceError, match="a.txt: cannot be read .it has changed while it was read"):
    list(documents)


# Names with characters that have a meaning.


def test_a_path_that_is_escaped_is_parsed_as_itself():
  rng = random.Random(0)
  paths = ["a" + "".join(rng.choices(",@#[]*?\\ :/a2é", k=rng.randint(1, 9))) for _ in range(500)]
  for path in [*paths, "a\\,text:b@3 ", "a,python-docs"]:
    (found,) = parse(f"hf:{sources.escape(path)}#text@3")
    assert (found.target, found.field, found.weight) == (path, "text", 3)
    first, second = parse(f"text:{sources.escape(path)}, text:{sources.escape(path)}@0.5")
    assert first.target == second.target and (first.weight, second.weight) == (1, 0.5)
    assert re.sub(r"\[([\[*?])\]", r"\1", first.target) == path


@pytest.mark.parametrize("name", ["Corpus [v2], cleaned", "a, [b]@2", "a@2", "*?", "a\\,b", "#1"])
def test_a_file_of_any_name_is_read_escaped(tmp_path, name):
  (tmp_path / name).mkdir()
  (tmp_path / name / "a.txt").write_text("found")
  (tmp_path / name / "b.jsonl").write_text('{"text": "too"}')
  folder = f"{tmp_path}/{sources.escape(name)}"
  assert read(f"text:{folder}/a.txt")[0] == ["found"]
  assert read(f"jsonl:{folder}/*.jsonl#text")[0] == ["too"]


@pytest.mark.parametrize(
  "name", ["Corpus [v2], cleaned/a.txt", "a@2", "b,c@1.5", "x [1], y, z.txt"]
)
def test_a_file_with_a_comma_brackets_or_a_number_needs_no_escape(tmp_path, name):
  (tmp_path / name).parent.mkdir(exist_ok=True)
  (tmp_path / name).write_text("found")
  first, second = parse(f"text:{tmp_path}/{name}, python-docs@2")
  assert (first.weight, second.weight) == (1, 2)
  assert read(f"text:{tmp_path}/{name}")[0] == ["found"]
