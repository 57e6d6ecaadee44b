"""What a program killed at any call to the file system leaves is gone after its next start."""

import contextlib
import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import harness
import pytest
from rich.console import Console

from electra_jax.commands import cli, evaluate, show
from electra_jax.config import files
from electra_jax.data import build
from electra_jax.export import writer
from electra_jax.finetune import train as finetune
from electra_jax.runtime import workdir

pytestmark = pytest.mark.faults
CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.link"}
states, watched = None, None  # where to copy the folder before each call


def copy_state(event: str, arguments: tuple) -> None:
  """Copies the watched folder as a kill before this call would leave it, without the locks."""
  global watched
  if not watched or event not in CALLS or not str(arguments[0]).startswith(str(watched)):
    return
  if watched.exists():
    folder, watched = watched, None
    shutil.copytree(folder, states / f"{len(list(states.iterdir())):04}", symlinks=True)
    watched = folder


sys.addaudithook(copy_state)


def killed(folder: Path, program: Callable[[], object], where: Path) -> list[Path]:
  """Runs a program; returns a copy of its folder before each of its calls there."""
  global states, watched
  states, watched = where, folder
  where.mkdir()
  try:
    program()
  finally:
    watched = None
  return sorted(where.iterdir())


def names(folder: Path) -> set[str]:
  return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def run(alone) -> Path:
  """A trained run: one network for all programs."""
  return alone


def tune(run: Path, root: Path) -> None:
  """Fine-tunes for two steps."""
  rows = (f"{'abcdefgh'[i % 8]} {'abcdefgh'[i // 8]},{i % 2}\n" for i in range(64))
  (run.parent / "task.csv").write_text("text,label\n" + "".join(rows))
  config = files.load("finetune/own.py", "own")
  fields = {"init": str(run), "data.train": str(run.parent / "task.csv"), "own.split": 0.3}
  fields |= {"seeds": 1, "train.epochs": 1, "data.max_length": 16}
  config.update_from_flattened_dict(fields)
  finetune.fine_tune(config, root, Console(file=io.StringIO()))


def export(run: Path, root: Path) -> None:
  """Exports for Hugging Face."""
  shutil.rmtree(root / "hf", ignore_errors=True)
  writer.run(str(run), root / "hf", "hf", Console(file=io.StringIO()))


def score(run: Path, root: Path) -> None:
  """Scores minimal pairs."""
  row = '{"sentence_good": "abc de", "sentence_bad": "de abc"}\n'
  (run.parent / "pairs.jsonl").write_text(row * 3)
  shutil.rmtree(root / "pairs", ignore_errors=True)
  options = ["pairs", f"--model={run}", f"--data={run.parent / 'pairs.jsonl'}"]
  parser = cli.ArgumentParser()
  evaluate.add_options(parser)
  evaluate.main(parser.parse_args([*options, f"--out={root / 'pairs'}"]))


def look(run: Path, root: Path) -> None:
  """Shows samples of a run, which it keeps."""
  if not (root / "run").exists():
    shutil.copytree(run, root / "run")
  show.show(str(root / "run"), Console(file=io.StringIO()))


@pytest.mark.parametrize(
  ("program", "expected"),
  [
    (tune, {".lock", "own", "results.json", "results.jsonl", "results.png"}),
    (export, {"hf"}),
    (score, {"pairs"}),
    (look, {"run"}),
  ],
)
def test_no_temporary_folder_stays(run, tmp_path, program, expected):
  root = tmp_path / "out"
  root.mkdir()
  if program is look:
    look(run, root)
  found = killed(root, lambda: program(run, root), tmp_path / "states")
  whole = names(root)
  assert whole <= expected, whole
  littered = [folder for folder in found if names(folder) - whole]
  assert len(found) > 5 and (littered or program is look), found
  for folder in found:
    inner = folder / "run" if program is look else folder
    workdir.sweep.__wrapped__(inner)  # as every start does there
    assert names(folder) <= whole and not list(inner.glob("*.tmp")), folder
  if littered:  # the program itself, in the fullest
    again = max(littered, key=lambda folder: len(list(folder.rglob("*"))))
    with contextlib.suppress(FileNotFoundError):
      program(run, again)
    assert names(again) == whole


def test_no_unfinished_build_stays(tmp_path):
  harness.write_text(tmp_path / "text.txt")
  whole = (tmp_path / "text.txt").read_text()
  (tmp_path / "text.txt").write_text(whole[:20_000])

  def make(folder: Path) -> None:
    config = files.load("base.py")
    fields = {"data.dir": str(folder), "data.sources": f"text:{tmp_path}/text.txt"}
    fields |= {"data.seq_length": 32, "data.vocab_size": 200, "data.holdout_frac": 0.1}
    config.update_from_flattened_dict(fields | {"data.workers": 1})
    workdir.sweep.cache_clear()  # another process
    build.build(config)

  found = killed(tmp_path / "data", lambda: make(tmp_path / "data"), tmp_path / "states")
  expected = names(tmp_path / "data")
  assert len(found) > 30 and any(".building" in x for folder in found for x in names(folder))
  finished = [folder for folder in found if (folder / "manifest.json").exists()]
  begun = [folder for folder in found if folder not in finished]
  for folder in (*finished, *begun[:: max(1, len(begun) // 8)]):
    make(folder)
    assert names(folder) == expected, folder
    for path in folder.glob("*-of-*"):
      assert path.read_bytes() == (tmp_path / "data" / path.name).read_bytes()
