"""A file cannot make a program read, write or delete outside its folder."""

import json
import shutil
from pathlib import Path

import pytest
from test_foreign import OUTSIDE

from electra_jax.config import files
from electra_jax.data import build, source_files, sources
from electra_jax.data.pretrain_batches import Shards
from electra_jax.data.shards import MANIFEST, DataError
from electra_jax.interop import sources as networks
from electra_jax.interop.weights import ExchangeError
from electra_jax.runtime import bucket, storage

GOLDEN = Path(__file__).parent / "golden" / "version_0_2"


def change(path: Path, *keys, to) -> None:
  """Changes a value in a JSON file."""
  content = place = json.loads(path.read_text("utf-8"))
  for key in keys[:-1]:
    place = place[key]
  place[keys[-1]] = to
  path.write_text(json.dumps(content), "utf-8")


@pytest.fixture
def data(tmp_path) -> Path:
  """A folder of shards, and beside it a file that is nobody's business."""
  (tmp_path / "precious.txt").write_text("keep", "utf-8")
  return shutil.copytree(GOLDEN / "data", tmp_path / "data")


@pytest.mark.parametrize("name", [*OUTSIDE, "../precious.txt", "notes.txt", "manifest.json"])
@pytest.mark.parametrize("keys", [("vocab", "file"), ("splits", "train", "shards", 0, "file")])
def test_a_manifest_names_only_files_of_a_build(data, name, keys):
  change(data / MANIFEST, *keys, to=name)
  with pytest.raises(DataError, match=f"{MANIFEST} is damaged: ") as error:
    Shards.open(data)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["../precious.txt", "mine.txt"])
def test_a_build_deletes_no_file_that_a_manifest_names(data, tmp_path, name):
  (data / "mine.txt").write_text("keep", "utf-8")
  change(data / MANIFEST, "vocab", "file", to=name)
  (tmp_path / "text.txt").write_text("a b c d e.\n\n" * 40, "utf-8")
  config = files.load("base.py")
  config.data.update(dir=str(data), sources=f"text:{tmp_path}/text.txt", workers=1, seq_length=16)
  config.data.update(vocab=str(GOLDEN / "data" / "vocab.txt"))
  build.build(config, overwrite=True)
  assert (data / name).read_text("utf-8") == "keep" and Shards.open(data).num_examples


def test_a_runs_copy_of_the_vocabulary_stays_in_the_run(data, tmp_path):
  """`train` copies it under the name that the manifest gives."""
  shutil.copy(data / "vocab.txt", tmp_path / ".bashrc.txt")
  change(data / MANIFEST, "vocab", "file", to="../.bashrc.txt")
  with pytest.raises(DataError, match="'../.bashrc.txt' is not the file of a wordpiece vocabulary"):
    networks.vocab_of(data)


def test_an_export_names_its_own_vocabulary(tmp_path):
  folder = shutil.copytree(GOLDEN / "finetuned", tmp_path / "finetuned")
  shutil.copy(folder / "vocab.txt", tmp_path)
  change(folder / "export.json", "vocab", "file", to="../vocab.txt")
  with pytest.raises(ExchangeError, match=r"export.json is damaged: '../vocab.txt' is not"):
    networks.open_source(folder)


def test_the_only_export_below_a_folder_is_the_one_that_is_meant(tmp_path):
  """Of a task's workdir, beside the folder of a fine-tuning that was killed."""
  for name in ("few/own/model", "few/.own.x/model"):
    shutil.copytree(GOLDEN / "finetuned", tmp_path / name)
  for folder in ("few", "few/own"):
    assert networks.open_source(tmp_path / folder).finetuned
  shutil.copytree(GOLDEN / "finetuned", tmp_path / "few/other/model")
  with pytest.raises(ExchangeError, match="few holds several exports, choose one: .*/other/model"):
    networks.open_source(tmp_path / "few")


def test_a_saved_dataset_names_files_of_its_folder(tmp_path):
  (tmp_path / "set").mkdir()
  state = tmp_path / "set" / "state.json"
  for name in OUTSIDE:
    state.write_text(json.dumps({"_data_files": [{"filename": name}]}), "utf-8")
    with pytest.raises(source_files.SourceError, match="is not the name of a file inside"):
      source_files.files(sources.parse(f"hf:{state.parent}#text")[0])


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x"])
def test_the_names_of_objects_stay_in_the_local_folder(tmp_path, name):
  with pytest.raises(ValueError, match="is not the name of a file inside"):
    bucket.fetch("gs://b/run", tmp_path, [storage.Object(f"gs://b/run/{name}", 1, "")])
