"""What is released works without the clone: in a fresh environment, from an empty folder.

The libraries are those of the environment that runs the tests, found through a .pth file.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from electra_jax import __version__
from electra_jax.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


def build(kind: str, source: Path, out: Path) -> None:
  """Builds an sdist or a wheel of a source folder."""
  arguments = [sys.executable, "-c", BUILD.format(kind), str(out)]
  subprocess.run(arguments, cwd=source, check=True, capture_output=True, timeout=300)


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
  """The folder of a wheel, built from the sdist of what git has, and that sdist unpacked."""
  folder = tmp_path_factory.mktemp("release")
  clone = folder / "clone"
  clone.mkdir()
  tree = subprocess.run(
    ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, timeout=300
  ).stdout
  names = [name for name in tree.decode().split("\0") if name and (ROOT / name).is_file()]
  for name in names:
    (clone / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / name, clone / name)
  build("sdist", clone, folder)
  shutil.unpack_archive(next(folder.glob("*.tar.gz")), folder)  # tarfile's filter is of 3.11.4
  build("wheel", folder / f"electra_jax-{__version__}", folder)
  return folder


@pytest.fixture(scope="module")
def script(release) -> Path:
  """The command of a fresh environment with the wheel."""
  fresh = release / "fresh"
  venv.create(fresh, symlinks=True)
  python = fresh / "bin" / "python"
  purelib = sysconfig.get_path("purelib", vars={"base": str(fresh)})
  libraries = sysconfig.get_path("purelib")
  (Path(purelib) / "libraries.pth").write_text(f"{libraries}\n")
  wheel = next(release.glob("*.whl"))
  install = ["-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
  subprocess.run([sys.executable, *install, wheel], check=True, capture_output=True, timeout=300)
  return fresh / "bin" / "electra-jax"


@pytest.fixture
def call(script, tmp_path):
  """Returns a function that runs the command in an empty folder and returns what it says."""

  def run(*args: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
      [script, *args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

  return run


def test_every_page_names_this_version():
  released = re.search(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M).groups()
  citation = (ROOT / "CITATION.cff").read_text()
  assert re.findall(r"^(?:version|date-released): (\S+)$", citation, re.M) == list(released)
  assert released[0] == __version__
  for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "launch").iterdir()]:
    assert set(re.findall(r"electra_jax-(\d[\d.]*\d)", page.read_text())) <= {__version__}, page


@pytest.mark.long
def test_the_sdist_has_what_a_user_needs_and_no_tests(release):
  source = release / f"electra_jax-{__version__}"
  for name in ("README.md", "LICENSE", "LOG.md", "requirements.lock", "launch/gpu.sh"):
    assert (source / name).is_file(), name
  assert (source / "docs" / "scale.md").is_file() and not (source / "tests").exists()


@pytest.mark.long
def test_the_installed_command_lists_helps_and_finds_the_configurations(call):
  assert call("--version").startswith(f"electra_jax {__version__}, jax ")
  assert all(f"\n  {name} " in call() for name in COMMANDS)
  assert "--config=" in call("train", "--help")
  output = call("config", "configs/small.py", "--grep", "warmup")
  assert "optimizer.warmup_steps = 10000" in output and "differ from configs/base.py" in output
  assert "electra-jax finetune" in call("finetune", "--help")


@pytest.mark.long
def test_the_quickstart_builds_trains_and_exports_by_the_installed_command(call, tmp_path):
  (tmp_path / "text.txt").write_text("\n\n".join(f"alpha beta {i}.\ngamma." for i in range(2000)))
  quickstart = ["--config=configs/quickstart.py", "--config.data.dir=data"]
  fields = ["--config.data.sources=text:text.txt", "--config.data.vocab_size=100"]
  assert "wrote data/manifest.json" in call("build", *quickstart, *fields)
  few = ["--config.train.steps=2", "--config.eval.max_examples=16", "--config.eval.every_steps=2"]
  few += ["--config.model.hidden_size=32", "--config.model.embedding_size=32"]
  call("train", *quickstart, *few, "--workdir=run")
  history = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
  told = [(x["split"], x["step"]) for x in history]
  assert told == [("heldout", 0), ("train", 2), ("heldout", 2)]
  assert "exported to out" in call("export", "run", "out", "--to", "orbax")
  assert "Scores sentences" in call("score", "--help")


def test_a_folder_of_the_packages_name_does_not_hide_it(tmp_path):
  """A clone is such a folder, for scripts beside it."""
  (tmp_path / "electra_jax").mkdir()
  code = "import electra_jax; print(electra_jax.__version__)"
  environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  found = subprocess.run(
    [sys.executable, "-c", code],
    cwd=tmp_path,
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert found.stdout == f"{__version__}\n", found.stderr
