"""Building: the same bytes always, nothing lost unseen, and never half a build."""

import contextlib
import errno
import json
import os
import random
import re
import resource
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import SPECIAL, long_except, python

from electra_jax.config import files
from electra_jax.data import build, chunks, duplicates, pool, shards, sources, tokenizer, vocabulary
from electra_jax.data.pretrain_batches import Shards
from electra_jax.data.shards import DataError
from electra_jax.runtime.workdir import new_folder

LETTERS = list("abcdefghijklmnopqrstuvwxyz") + [f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"]


def make_config(folder: Path, text: str | None = None, **fields):
  """Returns a configuration over a text, else 200 documents unless there is a text already."""
  path, vocab = folder / "text.txt", folder / "vocab.txt"
  if not path.exists():
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 4))) for _ in range(60)]
    lines = [" ".join(rng.choices(words, k=rng.randint(2, 30))) + "." for _ in range(1000)]
    documents = ["\n".join(lines[i : i + 5]) for i in range(0, 1000, 5)]
    path.write_text("\n\n".join(documents))
    vocab.write_text("\n".join(SPECIAL + LETTERS + [".", "1", "2"]) + "\n")
  if text is not None:
    path.write_text(text)
  config = files.load("base.py")
  config.data.update(dir=str(folder / "shards"), sources=f"text:{path}", vocab=str(vocab))
  config.data.update(seq_length=16, examples_per_shard=1000, holdout_frac=0.1, workers=1)
  config.data.update(fields)
  return config


def contents(folder) -> dict[str, bytes]:
  """Returns the files of a build but .tags.json, which names the text by its paths."""
  files = (p for p in Path(folder).iterdir() if p.is_file() and p.name != ".tags.json")
  return {p.name: p.read_bytes() for p in files}


def all_records(folder, split: str) -> np.ndarray:
  manifest = shards.read_manifest(folder)
  dtype = shards.layout(manifest)
  files = [Path(folder) / shard["file"] for shard in manifest["splits"][split]["shards"]]
  return np.concatenate([np.fromfile(path, dtype) for path in files])


def test_long_lines_are_split_into_sentences_and_then_lose_less(tmp_path):
  text, lost = "A bc de. F ghi! J kl mn op. " * 200, {}
  for split_lines in (False, True):
    config = make_config(tmp_path, text, split_lines=split_lines, holdout_frac=0.0)
    facts = build.build(config, overwrite=True)["splits"]["train"]
    assert facts["kept"] + facts["discarded"] == facts["tokens"]
    lost[split_lines] = facts["discarded"] / facts["tokens"]
  assert lost[False] > 0.9 and lost[True] < 0.3


@pytest.mark.parametrize("vocab", ["wordpiece", "bpe"])
@pytest.mark.parametrize(
  "paragraph",
  [
    "今天很好。我们走吧！“好吗？”好的。",
    "यह अच्छा है। क्या वह ठीक है? हाँ॥ ",
    "هل أنت بخير؟ نعم۔ أنا بخير. ",
  ],
  ids=["chinese", "hindi", "arabic"],
)
def test_paragraphs_of_other_scripts_lose_no_more_than_english(tmp_path, vocab, paragraph):
  text = "\n\n".join([paragraph * 50] * 4)
  size = 120 if vocab == "wordpiece" else len(set(paragraph)) + 10
  fields = {"vocab": vocab, "vocab_size": size, "seq_length": 64, "holdout_frac": 0.0}
  facts = build.build(make_config(tmp_path, text, **fields))["splits"]["train"]
  assert facts["discarded"] / facts["tokens"] < 0.1  # English of such sentences: 0.05 to 0.10
  assert facts["frequencies"][1] == 0  # unknown


# The same bytes.


@pytest.mark.parametrize("mode", long_except(1, of=["segments", "packed"]))
def test_one_and_four_workers_write_the_same_bytes(tmp_path, monkeypatch, mode):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 1500)
  found = []
  for workers in (1, 4):
    own = {"workers": workers, "dir": str(tmp_path / f"with-{workers}")}
    config = make_config(tmp_path, examples=mode, examples_per_shard=37, **own)
    build.build(config)
    found.append(contents(config.data.dir))
  assert found[0] == found[1] and len(found[0]) > 20


@pytest.mark.parametrize("workers", long_except(0, of=[1, 2]))
def test_a_table_makes_the_shards_of_the_same_json_lines(tmp_path, monkeypatch, workers):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  monkeypatch.setattr(chunks, "CHUNK_BYTES", 1500)
  make_config(tmp_path)
  texts = (tmp_path / "text.txt").read_text().split("\n\n")
  table = pyarrow.table({"body": texts})
  parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
  (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
  (tmp_path / "saved").mkdir()
  with pyarrow.ipc.new_stream(str(tmp_path / "saved" / "data.arrow"), table.schema) as stream:
    stream.write_table(table, max_chunksize=9)
  state = {"_data_files": [{"filename": "data.arrow"}]}
  (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
  found = []
  for source in ("jsonl:{}/a.jsonl#body", "parquet:{}/a.parquet#body", "hf:{}/saved#body"):
    config = make_config(tmp_path, workers=workers, sources=source.format(tmp_path))
    build.build(config, overwrite=True)
    files = contents(config.data.dir)
    manifest = json.loads(files.pop(shards.MANIFEST))
    found.append((files, manifest["splits"]))
    assert build.build(config) == manifest  # known again by its files
  assert found[0] == found[1] == found[2]


def test_the_seed_changes_the_examples(tmp_path):
  config = make_config(tmp_path, short_prob=0.5)
  first = build.build(config)
  config.seed = 1
  second = build.build(config, overwrite=True)
  train = [facts["splits"]["train"]["shards"][0]["sha256"] for facts in (first, second)]
  assert train[0] != train[1]


def test_a_dead_worker_ends_the_build_with_one_line():
  with pool.start(2) as executor, pytest.raises(pool.WorkerError, match="memory"):
    list(pool.in_order(executor, os._exit, range(3), 2))


def test_a_worker_that_dies_while_more_is_sent_than_a_pipe_holds_ends_the_build():
  large = 1 << 8_000_000  # a megabyte, no exit code
  with pool.start(2) as executor, pytest.raises((pool.WorkerError, OverflowError)):
    list(pool.in_order(executor, os._exit, [0] + 9 * [large], 9))


# What is kept apart, and what is recorded.


def test_held_out_documents_are_never_trained_on(tmp_path):
  words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"]
  config = make_config(tmp_path, "\n\n".join(words), sources=f"text:{tmp_path}/text.txt@2.5")
  (tmp_path / "vocab.txt").write_text("\n".join(SPECIAL + words) + "\n")
  build.build(config)
  seen = {split: all_records(config.data.dir, split) for split in shards.SPLITS}
  train, heldout = ({*seen[split]["ids"].ravel().tolist()} - {*range(5)} for split in shards.SPLITS)
  assert not train & heldout and len(train) + len(heldout) == 512
  assert len(heldout) == pytest.approx(51, abs=20)
  assert len(seen["heldout"]) == len(heldout)  # repetitions by weight are for training only


def test_the_manifest_counts_what_is_in_the_shards(tmp_path):
  config = make_config(tmp_path, examples_per_shard=50)
  manifest = build.build(config)
  for split in shards.SPLITS:
    facts, records = manifest["splits"][split], all_records(config.data.dir, split)
    assert facts["examples"] == len(records) == sum(s["examples"] for s in facts["shards"])
    assert all(shard["examples"] == 50 for shard in facts["shards"][:-1])
    counts = np.bincount(records["ids"].ravel(), minlength=manifest["vocab"]["size"])
    counts[[0, 2, 3, 4]] = 0
    assert facts["frequencies"] == counts.tolist() and facts["kept"] == counts.sum()
    assert facts["kept"] + facts["discarded"] == facts["tokens"]
    assert facts["padded"] == (records["ids"] == 0).sum()
  assert manifest["sources"][0]["documents"] == 200
  assert json.loads((tmp_path / "shards/manifest.json").read_text()) == manifest


def test_large_vocabularies_take_four_bytes_a_token(tmp_path):
  config = make_config(tmp_path, "zz a. zz\n\n" * 50, holdout_frac=0.0)
  pieces = SPECIAL + LETTERS + ["."] + [f"x{i}" for i in range(70_000)] + ["zz"]
  (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
  assert build.build(config)["record_bytes"] == 4 + 4 * 16
  assert all_records(config.data.dir, "train")["ids"].max() == len(pieces) - 1


def test_a_trained_vocabulary_never_saw_the_held_out_documents(tmp_path, monkeypatch):
  make_config(tmp_path)
  with open(tmp_path / "text.txt", "a", encoding="utf-8") as file:
    for i in range(200):
      file.write(f"\n\nonly {'zyx' * 3} number {i}")
  seen, original = [], build.vocabulary.train

  def train(kind, texts, **kw):
    return original(kind, (seen.append(text) or text for text in texts), **kw)

  monkeypatch.setattr(build.vocabulary, "train", train)
  build.build(make_config(tmp_path, vocab="wordpiece", vocab_size=200, holdout_frac=0.5))
  held_out = 0
  for text in (tmp_path / "text.txt").read_text().split("\n\n"):
    key = sources.hashlib.blake2b(text.encode(), digest_size=16).digest()
    if chunks.is_held_out(key, 0.5):
      held_out += 1
      assert text.split("\n")[0] not in seen
  assert 150 < held_out < 250


def test_a_vocabulary_of_another_kind_replaces_the_old_file(tmp_path):
  config = make_config(tmp_path, vocab="wordpiece", vocab_size=200)
  build.build(config)
  config.data.update(vocab="bpe", vocab_size=50)
  build.build(config, overwrite=True)
  files = contents(config.data.dir)
  assert "spm.model" in files and "vocab.txt" not in files


def test_the_vocabulary_sample_is_bounded_and_spread():
  keys = [bytes([i % 256, i // 256] * 8) for i in range(5000)]
  pieces = [sources.TextChunk(key, True, 0, str(i), 10) for i, key in enumerate(keys)]
  taken = [int(piece.text) for piece in vocabulary.sample(pieces, 5000)]
  assert len(taken) == 500 and taken == sorted(taken)
  assert np.mean(taken) == pytest.approx(2500, abs=250)
  (beginning,) = vocabulary.sample([text._replace(text="äöü" * 9) for text in pieces[:9]], 7)
  assert beginning.text == "äöü"  # 7 bytes end within a character


def test_a_long_document_is_a_duplicate_wherever_its_lines_end():
  found = duplicates.Digests()
  for cuts in (["a b", "c d"], ["a", "b c", "d"], ["A b c\nd"], ["a b c", "e"]):
    for i, text in enumerate(cuts):
      found.add(sources.TextChunk(b"", i == 0, 0, text, len(text)))
  assert duplicates.repeated(found.array()).tolist() == [False, True, True, False]


@pytest.mark.parametrize("strip_accents", [None, True, False])
def test_entries_with_accents_that_berts_rule_strips_are_reported(tmp_path, capsys, strip_accents):
  make_config(tmp_path)
  with open(tmp_path / "vocab.txt", "a", encoding="utf-8") as file:
    file.write("अच्छा\nviệt\n##é\n")
  build.build(make_config(tmp_path, strip_accents=strip_accents))
  told = "vocab.txt has 3 entries with accents, which BERT's rule strips" in capsys.readouterr().out
  assert told == (strip_accents is None)


def test_accents_of_a_vocabulary_with_its_own_rules_are_refused(tmp_path):
  config = make_config(tmp_path)
  tokenizer.load(config.data.vocab)._engine.save(str(tmp_path / "tokenizer.json"))
  config = make_config(tmp_path, vocab=str(tmp_path / "tokenizer.json"), strip_accents=False)
  with pytest.raises(ValueError, match="strip_accents unset: .*tokenizer.json defines"):
    build.build(config)


# Never half a build.

KILLED = """
import os, signal, sys
from electra_jax.data import chunks, shards
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_build
chunks.CHUNK_BYTES = 1500
calls = 0
def kill_at(function, at):
  def wrapped(*args, **kwargs):
    global calls
    calls += 1
    if calls == at:
      os.kill(os.getpid(), signal.SIGKILL)
    return function(*args, **kwargs)
  return wrapped
{function} = kill_at({function}, {at})
test_build.build.build(test_build.make_config(Path({folder!r})), overwrite=True)
"""
WRITING = ("shards.ShardWriter.append", 9)
NAMING = ("os.replace", 3)  # while files get their final names


def build_killed(folder: Path, function: str, at: int) -> None:
  """Builds in a process that is killed where it calls the function for that time."""
  tests = str(Path(__file__).parent)
  program = KILLED.format(tests=tests, folder=str(folder), function=function, at=at)
  ended = python("-c", program)
  assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.mark.parametrize("kill", [WRITING, NAMING, ("shards.dump", 1)])
def test_after_a_killed_build_the_next_gives_the_same_bytes(tmp_path, kill, monkeypatch):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 1500)
  config = make_config(tmp_path)
  build_killed(tmp_path, *kill)
  with pytest.raises(DataError, match="manifest.json is missing"):
    Shards.open(config.data.dir)
  build.build(config)
  again = contents(config.data.dir)
  config.data.dir = str(tmp_path / "clean")
  build.build(config)
  assert again == contents(config.data.dir)
  assert not (tmp_path / "shards" / shards.BUILDING).exists()


def test_a_build_killed_while_it_replaces_another_leaves_none_that_looks_whole(tmp_path):
  config = make_config(tmp_path, short_prob=1.0)
  build.build(config)
  before = contents(config.data.dir)
  build_killed(tmp_path, *WRITING)
  assert contents(config.data.dir) == before
  Shards.open(config.data.dir, verify=True)
  build_killed(tmp_path, *NAMING)
  with pytest.raises(DataError, match="is missing"):
    Shards.open(config.data.dir)


def test_two_builds_of_one_folder_are_refused(tmp_path):
  config = make_config(tmp_path)
  with shards.locked(tmp_path / "shards/.lock"), pytest.raises(DataError, match="another build"):
    build.build(config)
  build.build(config)


def run_build(config, **options):
  fields = {k: v for k, v in build.settings(config).items() if k != "seed" and v is not None}
  flags = [f"--config.data.{k}={v}" for k, v in fields.items()]
  flags += [f"--config.data.dir={config.data.dir}", "--config.data.workers=1"]
  return python("-m", "electra_jax.data.build", "--config=configs/base.py", *flags, **options)


def test_a_full_disk_ends_with_one_line_and_nothing_that_looks_whole(tmp_path):
  config = make_config(tmp_path)
  ended = run_build(config, file_bytes=9000)
  assert ended.returncode == 1
  assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
  assert str(tmp_path / "shards") in ended.stderr
  assert not (tmp_path / "shards" / shards.MANIFEST).exists()
  assert not list((tmp_path / "shards").rglob("*-000*"))


def test_a_disk_that_is_full_from_the_first_part_on_is_named(tmp_path):
  config = make_config(tmp_path, vocab="wordpiece", vocab_size=60)
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
  try:
    with pytest.raises(OSError, match="File too large") as caught:
      build.build(config)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert caught.value.filename == str(tmp_path / "shards" / ".building")
  with pytest.raises(OSError) as caught, new_folder(tmp_path / "out"):  # of every other program
    raise OSError(errno.ENOSPC, "No space left on device")
  line = files.one_line(caught.value)
  assert line.startswith(f"No space left on device: {tmp_path}/out: free space or choose another")


def test_the_command_builds_and_reuses(tmp_path):
  config = make_config(tmp_path)
  for expected in ("wrote", "built already"):
    ended = run_build(config)
    assert ended.returncode == 0, ended.stderr
    assert expected in ended.stdout
  assert Shards.open(config.data.dir, verify=True).num_examples > 100


def test_the_build_reports_unknown_characters_and_advises_packing(tmp_path, capsys):
  text = "\n\n".join(["a b c d e f g h i 中."] * 100)
  for kind, advised in (("segments", True), ("packed", False)):
    fields = {"seq_length": 64, "holdout_frac": 0.0, "examples": kind, "dir": str(tmp_path / kind)}
    build.build(make_config(tmp_path, text, **fields))
    output = capsys.readouterr().out
    assert re.search(r"train │ +\d+ │ +1,100 │ +1,100 │ +9\.09% │", output), output
    assert "100 documents, 100 lines: examples" in output
    assert "a b c d e f g h i [UNK]." in output.replace(" .", ".")
    assert ("use data.examples=packed" in output) == advised


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError, match="file"):
    build.build(make_config(tmp_path, dir=str(tmp_path / "file" / "shards")))


@contextlib.contextmanager
def not_root():
  """Gives up root's right to write anywhere, in a process of root."""
  user = os.geteuid()
  os.seteuid(user or 65534)
  try:
    yield
  finally:
    os.seteuid(user)


def test_a_folder_without_permission_is_refused(tmp_path):
  build.build(make_config(tmp_path))  # imports what a build needs
  with tempfile.TemporaryDirectory() as folder:  # pytest's are for this user alone
    config = make_config(Path(folder))
    os.chmod(folder, 0o555)
    with not_root(), pytest.raises(PermissionError, match=f"{folder}/shards"):
      build.build(config)
    assert sorted(os.listdir(folder)) == ["text.txt", "vocab.txt"]


def test_text_without_any_example_is_refused(tmp_path):
  with pytest.raises(DataError, match="no training example"):
    build.build(make_config(tmp_path, "\n\n \n"))
  assert not (tmp_path / "shards" / shards.MANIFEST).exists()


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"examples": "bert"}, "must be segments or packed"),
    ({"seq_length": 4}, "seq_length=4 must be between"),
    ({"short_prob": 1.5}, "short_prob=1.5 must be between 0 and 1"),
    ({"short_min_tokens": 17}, "short_min_tokens=17 must be between 4 and 16"),
    ({"examples_per_shard": 0}, "examples_per_shard=0"),
    ({"vocab_train_mb": 0.0}, "vocab_train_mb=0.0 must be between 0.001"),
    ({"vocab_train_mb": -1.0}, "vocab_train_mb=-1.0"),
    ({"vocab_train_mb": float("nan")}, "vocab_train_mb=nan"),
    ({"dir": "https://host/x"}, "must be a folder, s3:// or gs://"),
  ],
)
def test_fields_that_make_no_sense_are_refused_first(tmp_path, fields, message):
  with pytest.raises(ValueError, match=message):
    build.build(make_config(tmp_path, **fields))
  assert not (tmp_path / "shards").exists()
