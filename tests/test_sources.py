"""Sources: what they yield, how often, and what they refuse."""

import gzip
import json
import lzma
import re
import sys
import tracemalloc

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from electra_jax.commands import cli
from electra_jax.data import sources
from electra_jax.data.sources import SourceError, SourceStats, parse

DOCUMENTS = ["first line\nsecond line", "ein Käse", "last"]
TEXT = "first line\n  second line \n\n\n \nein Käse\r\n\nlast"


def read(spec: str, max_bad_frac: float = 0.0, **options):
  """Returns the texts of a specification of one source, and its tally."""
  (source,) = parse(spec)
  tally = SourceStats(source)
  pieces = sources.documents(source, tally, max_bad_frac=max_bad_frac, **options)
  texts = [piece.text for piece in pieces]
  sources.check_undecodable(tally, max_bad_frac)
  return texts, tally


def write(path, data: bytes):
  if path.suffix == ".gz":
    data = gzip.compress(data)
  elif path.suffix == ".xz":
    data = lzma.compress(data)
  elif path.suffix == ".zst":
    data = zstandard.compress(data[: len(data) // 2]) + zstandard.compress(data[len(data) // 2 :])
  path.write_bytes(data)
  return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_blank_lines_end_documents_in_every_compression(tmp_path, suffix):
  write(tmp_path / f"a.txt{suffix}", TEXT.encode())
  texts, tally = read(f"text:{tmp_path}/a.txt*")
  assert texts == DOCUMENTS
  assert (tally.documents, tally.undecodable) == (3, 0)
  assert tally.text_bytes == sum(len(text.encode()) for text in DOCUMENTS)
  assert tally.done_bytes == pytest.approx(tally.total_bytes, rel=0.5)


def test_files_are_read_in_the_order_of_their_names_and_documents_end_with_them(tmp_path):
  for name in "bca":
    (tmp_path / f"{name}.txt").write_text(name)
  assert read(f"text:{tmp_path}/*.txt")[0] == ["a", "b", "c"]


def test_a_byte_order_mark_is_no_text(tmp_path):
  for name in ("a", "b"):
    (tmp_path / f"{name}.txt").write_text(f"{name} \ufeff{name}\n", "utf-8-sig")
  assert read(f"text:{tmp_path}/*.txt")[0] == ["a \ufeffa", "b \ufeffb"]
  (tmp_path / "a.txt").write_text("\na\n", "utf-8-sig")
  (tmp_path / "b.txt").write_text("", "utf-8-sig")  # a mark alone
  assert read(f"text:{tmp_path}/*.txt")[0] == ["a"]


def test_a_link_in_a_circle_gives_a_file_once_and_one_to_nothing_is_named(tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder" / "a.txt").write_text("a")
  (tmp_path / "folder" / "b.txt").symlink_to("a.txt")
  (tmp_path / "folder" / "circle").symlink_to("..")
  for pattern in ("**/*.txt", "**"):
    assert read(f"text:{tmp_path}/{pattern}")[0] == ["a", "a"]
  (tmp_path / "folder" / "c.txt").symlink_to("gone")
  for pattern in ("*/*.txt", "folder/c.txt", "**"):
    with pytest.raises(SourceError, match=r"folder/c.txt is a link to a missing file"):
      read(f"text:{tmp_path}/{pattern}")


def test_jsonl_takes_the_field_and_counts_bad_json(tmp_path):
  values = [{"text": "one\n\ntwo", "id": 1}, {"text": "three"}, {"text": "\ud800"}]
  lines = [json.dumps(value) for value in values]
  bad = ["{not json", "[" * 100_000 + "]" * 100_000, ""]
  write(tmp_path / "a.jsonl.gz", "\n".join([lines[0], *bad, *lines[1:]]).encode())
  texts, tally = read(f"jsonl:{tmp_path}/*.gz#text", max_bad_frac=0.6)
  assert texts == ["one\ntwo", "three"]
  assert (tally.documents, tally.undecodable) == (2, 3)


def test_undecodable_documents_are_skipped_counted_and_stop_above_the_limit(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"good\n\nbad \xff\nrest\n\ngood too")
  texts, tally = read(f"text:{tmp_path}/a.txt", max_bad_frac=0.4)
  assert texts == ["good", "good too"] and tally.undecodable == 1
  with pytest.raises(SourceError, match="1 of 3 documents are null or undecodable.*0.3"):
    read(f"text:{tmp_path}/a.txt", max_bad_frac=0.3)


@pytest.mark.parametrize(
  "spec", ["text:{}/none*.txt", "jsonl:{}/none#text", "parquet:{}/none*#text"]
)
def test_a_source_without_files_is_refused(tmp_path, spec):
  with pytest.raises(SourceError, match="matches no file"):
    read(spec.format(tmp_path))


@pytest.mark.parametrize(
  "spec, message",
  [
    ("", "empty"),
    ("text:", "expected text:GLOB"),
    ("wiki", "expected text:GLOB"),
    ("jsonl:a.jsonl", "name the field"),
    ("parquet:a.parquet", "name the field, e.g. parquet:GLOB#text"),
    ("hf:folder", "name the field, e.g. hf:PATH#text"),
    ("hf:#text", "name the field"),
    ("text:a@0", "above 0"),
    ("text:a@-1", "above 0"),
    ("text:a@nan", "above 0"),
  ],
)
def test_a_wrong_specification_is_refused(spec, message):
  with pytest.raises(SourceError, match=message):
    parse(spec)


def test_a_bucket_without_its_package_names_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "gcsfs", None)
  with pytest.raises(ModuleNotFoundError) as caught:
    read("text:gs://bucket/*.txt")
  assert cli.explain(caught.value).endswith("pip install 'electra_jax[buckets]'")


@pytest.mark.parametrize(
  "spec, wanted",
  [
    ("hf://datasets/x/y/*.parquet#text", "parquet:hf://datasets/x/y/*.parquet#text"),
    ("hf:hf://datasets/x/y/*.parquet#body", "parquet:hf://datasets/x/y/*.parquet#text"),
    ("hf://datasets/x/y/*.jsonl.gz", "jsonl:hf://datasets/x/y/*.jsonl.gz#text"),
    ("s3://b/*.txt.zst", "text:s3://b/*.txt.zst"),
    ("https://host/a.jsonl#body", "jsonl:https://host/a.jsonl#text"),
  ],
)
def test_a_url_without_its_kind_is_refused_with_one(spec, wanted):
  with pytest.raises(SourceError) as caught:
    read(spec)
  assert str(caught.value).endswith(wanted)


@pytest.mark.parametrize(
  "url, message",
  [
    ("https://me:word@host/a.txt", "https://host/a.txt: leave credentials out of the URL"),
    ("https://host/a.txt?X-Amz-Signature=word", "https://host/a.txt: leave credentials out"),
    ("https://host/*.txt", "list the URLs of files on a web server"),
    ("hf://x/y", "expected hf://datasets/OWNER/NAME/PATH"),
    ("abfs://box/a.txt", "abfs://box/a.txt: the scheme must be one of s3://, gs://, hf://"),
  ],
)
def test_urls_that_cannot_be_read_are_refused_without_asking_for_them(url, message):
  with pytest.raises(SourceError, match=re.escape(message)) as caught:
    read(f"text:{url}")
  assert "word" not in str(caught.value)


def test_specifications_are_read_as_documented():
  text, wiki, versioned, docs = parse(
    "text:/a@b/*.txt@2.5, tfds:wiki40b/en:train[:10%]#body, tfds:lm1b:1.1.0:test, python-docs@3"
  )
  assert (text.kind, text.target, text.weight) == ("text", "/a@b/*.txt", 2.5)
  assert (wiki.target, wiki.split, wiki.field) == ("wiki40b/en", "train[:10%]", "body")
  assert (versioned.target, versioned.split, versioned.field) == ("lm1b:1.1.0", "test", "text")
  assert (docs.kind, docs.weight) == ("python-docs", 3)


def test_a_weight_repeats_whole_passes_and_a_fraction_by_hash(tmp_path):
  words = [f"document {i}" for i in range(1000)]
  (tmp_path / "a.txt").write_text("\n\n".join(words))
  texts, _ = read(f"text:{tmp_path}/a.txt@2.25")
  assert texts[:2000] == words * 2
  extra = texts[2000:]
  assert 200 < len(extra) < 300 and len(set(extra)) == len(extra)
  assert read(f"text:{tmp_path}/a.txt@0.25")[0] == extra


def test_a_giant_line_is_cut_at_spaces_and_loses_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(sources, "LINE_BYTES", 100)
  monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
  words = [f"wörd{i}" for i in range(3000)]
  (tmp_path / "a.txt").write_text(" ".join(words), encoding="utf-8")
  (source,) = parse(f"text:{tmp_path}/a.txt")
  tally = SourceStats(source)
  pieces = list(sources.documents(source, tally))
  assert " ".join(piece.text for piece in pieces).split() == words
  assert len(pieces) > 10 and max(piece.size for piece in pieces) < 1200
  assert len({piece.key for piece in pieces}) == 1 and tally.documents == 1


def test_many_spaces_in_a_line_end_no_document(tmp_path, monkeypatch):
  monkeypatch.setattr(sources, "LINE_BYTES", 100)
  space = " " * 1000
  (tmp_path / "a.txt").write_text(f"a{space}b\n{space}c{space}\n{space}\nd\n{space}")
  assert read(f"text:{tmp_path}/a.txt")[0] == ["a\nb\nc", "d"]


def test_a_giant_line_without_spaces_is_cut_between_characters(tmp_path, monkeypatch):
  monkeypatch.setattr(sources, "LINE_BYTES", 64)
  text = "aé中🙂" * 500
  (tmp_path / "a.txt").write_text(text, encoding="utf-8")
  texts, tally = read(f"text:{tmp_path}/a.txt")
  assert "".join(texts).replace("\n", "") == text and tally.undecodable == 0


def test_memory_does_not_grow_with_the_file(tmp_path):
  line = b"some words of a document that never ends " * 30 + b"\n"
  with gzip.open(tmp_path / "a.txt.gz", "wb", compresslevel=1) as file:
    for _ in range(20_000):  # 25 MB
      file.write(line)
  (source,) = parse(f"text:{tmp_path}/a.txt.gz")
  tracemalloc.start()
  size = sum(piece.size for piece in sources.documents(source, SourceStats(source)))
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert size > 24e6 and peak < 8e6


def test_tfds_datasets_are_read_from_a_local_folder(tmp_path):
  import tensorflow_datasets as tfds

  class TinyTexts(tfds.core.GeneratorBasedBuilder):
    """Two documents."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      kinds = {"body": tfds.features.Text(), "label": tfds.features.ClassLabel(num_classes=10)}
      features = tfds.features.FeaturesDict(kinds)
      return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
      return {"train": self._generate_examples(), "test": self._generate_examples()}

    def _generate_examples(self):
      for i in range(10):
        yield i, {"body": f"document {i}\nKäse", "label": i}

  TinyTexts(data_dir=tmp_path).download_and_prepare()
  options = {"tfds_dir": str(tmp_path)}
  texts, tally = read("tfds:tiny_texts:train[:80%]#body", **options)
  assert len(set(texts)) == 8 and set(texts) < {f"document {i}\nKäse" for i in range(10)}
  assert read("tfds:tiny_texts:train[:80%]#body", **options)[0] == texts
  assert tally.documents == 8 and tally.done_bytes == pytest.approx(tally.total_bytes)
  with pytest.raises(SourceError, match="field 'label' is int64, not text"):
    read("tfds:tiny_texts:test#label", **options)
  with pytest.raises(SourceError, match="no field 'text'.*body"):
    read("tfds:tiny_texts:test", **options)
  with pytest.raises(SourceError, match="tiny_text") as error:
    read("tfds:tiny_text", **options)
  assert "\n" not in str(error.value)


# Tables.


def save_parquet(path, column: list, type_="string", **columns):
  columns = {"id": list(range(len(column)))} | columns
  column = pyarrow.array(column, "string").cast(type_)
  parquet.write_table(pyarrow.table({"body": column, **columns}), path, row_group_size=2)


def save_dataset(folder, column: list, files: int = 2):
  """What `datasets.Dataset.save_to_disk` (5.2) writes: Arrow streams, and their names in order."""
  folder.mkdir()
  names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
  for i, name in enumerate(names):
    part = column[i * len(column) // files : (i + 1) * len(column) // files]
    table = pyarrow.table({"body": pyarrow.array(part, "string"), "id": range(len(part))})
    with pyarrow.OSFile(str(folder / name), "wb") as sink:
      with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
  state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1"}
  (folder / "state.json").write_text(json.dumps(state))
  (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize("type_", ["string", "large_string", "dictionary", "binary"])
def test_parquet_gives_what_json_lines_give(tmp_path, type_):
  type_ = pyarrow.dictionary("int32", "string") if type_ == "dictionary" else type_
  bodies = [f"document {i}\n\n  अच्छा 好 {i % 7}" for i in range(25)]
  for name, part in (("a", bodies[:10]), ("b", bodies[10:])):
    save_parquet(tmp_path / f"{name}.parquet", part, type_)
  (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": x}) for x in bodies))
  wanted, _ = read(f"jsonl:{tmp_path}/a.jsonl#body@1.5")
  texts, tally = read(f"parquet:{tmp_path}/*.parquet#body@1.5")
  assert texts == wanted and len(texts) > 25
  assert tally.done_bytes == pytest.approx(2 * tally.file_bytes)


def test_a_dataset_saved_on_disk_is_read_in_the_order_of_its_state(tmp_path):
  bodies = [f"document {i}" for i in range(25)]
  save_dataset(tmp_path / "train", bodies)
  texts, tally = read(f"hf:{tmp_path}/train#body")
  assert texts == bodies and tally.documents == 25
  (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
  with pytest.raises(SourceError, match="splits train, test: name one, e.g. hf:.*/train#body"):
    read(f"hf:{tmp_path}#body")
  for damaged in ("{", "[]", '{"splits": []}', '{"splits": [1]}', '{"splits": {"train": 1}}'):
    (tmp_path / "dataset_dict.json").write_text(damaged)
    with pytest.raises(SourceError, match="dataset_dict.json is damaged"):
      read(f"hf:{tmp_path}#body")


def test_text_in_a_table_that_is_not_utf8_is_undecodable(tmp_path):
  column = pyarrow.array([b"good", b"bad \xff"], "binary")
  parquet.write_table(pyarrow.table({"body": column}), tmp_path / "a.parquet")
  texts, tally = read(f"parquet:{tmp_path}/a.parquet#body", max_bad_frac=0.5)
  assert texts == ["good"] and tally.undecodable == 1


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_a_document_that_is_null_is_skipped_and_counted(tmp_path, kind):
  bodies = ["one", None, "two"]
  if kind == "jsonl":
    (tmp_path / "d").write_text("\n".join(json.dumps({"body": x}) for x in bodies))
  elif kind == "parquet":
    save_parquet(tmp_path / "d", bodies)
  else:
    save_dataset(tmp_path / "d", bodies, files=1)
  texts, tally = read(f"{kind}:{tmp_path}/d#body", max_bad_frac=0.5)
  assert texts == ["one", "two"] and (tally.documents, tally.undecodable) == (2, 1)
  with pytest.raises(SourceError, match="1 of 3 documents are null or undecodable.*0.3"):
    read(f"{kind}:{tmp_path}/d#body", max_bad_frac=0.3)


@pytest.mark.parametrize(
  "field, message",
  [
    ("text", "a.parquet has no column 'text' \\(it has: body, id\\)"),
    ("id", "a.parquet: column 'id' is int64, not text"),
  ],
)
def test_a_column_that_is_no_text_is_refused(tmp_path, field, message):
  save_parquet(tmp_path / "a.parquet", ["one", "two", None])
  with pytest.raises(SourceError, match=message):
    read(f"parquet:{tmp_path}/a.parquet#{field}")


@pytest.mark.parametrize("kind", ["parquet", "hf"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_damaged_table_is_named(tmp_path, kind, damage):
  if kind == "hf":
    save_dataset(tmp_path / "d", ["text"] * 100, files=1)
    (path,) = (tmp_path / "d").glob("*.arrow")
  else:
    path = tmp_path / "d"
    save_parquet(path, ["text"] * 100)
  whole = path.read_bytes()
  damaged = {"cut": whole[: len(whole) // 2], "garbage": b"garbage" * 99, "empty": b""}
  path.write_bytes(damaged[damage])
  with pytest.raises(SourceError, match=f"{path.name}: cannot be read") as error:
    read(f"{kind}:{tmp_path}/d#body")
  assert "\n" not in str(error.value)


def test_a_folder_that_is_no_saved_dataset_is_refused(tmp_path):
  with pytest.raises(
    SourceError, match="'hf:allenai/c4#text': .* save the dataset with save_to_disk"
  ):
    read("hf:allenai/c4#text")
  save_dataset(tmp_path / "d", ["text"])
  state = json.loads((tmp_path / "d" / "state.json").read_text())
  for content, message in (
    ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "flatten_indices"),
    ({"_data_files": [{"filename": "gone.arrow"}]}, "gone.arrow is missing"),
    ({"_data_files": None}, "state.json is damaged"),
  ):
    (tmp_path / "d" / "state.json").write_text(json.dumps(state | content))
    with pytest.raises(SourceError, match=message):
      read(f"hf:{tmp_path}/d#body")


def test_without_pyarrow_a_table_is_an_error_that_names_the_extra(tmp_path, monkeypatch):
  save_parquet(tmp_path / "a.parquet", ["one"])
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  with pytest.raises(ModuleNotFoundError) as error:
    read(f"parquet:{tmp_path}/a.parquet#body")
  assert cli.explain(error.value) == ("pyarrow is not installed: pip install 'electra_jax[data]'")
