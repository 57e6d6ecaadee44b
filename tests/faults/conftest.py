"""One text, one reference run and one cache of compiled steps for all faults."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import harness  # noqa: E402
from harness import STEPS  # noqa: E402


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
  """Returns a folder that one worker makes and all of them read: shared(name, make)."""
  base = tmp_path_factory.getbasetemp()
  base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

  def get(name: str, make: Callable[[Path], None]) -> Path:
    folder, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      if not done.exists():
        folder.mkdir()
        make(folder)
        done.touch()
    return folder

  return get


@pytest.fixture(scope="session")
def data(shared) -> Path:
  """A folder with text.txt and data/."""
  return shared("data", harness.build)


@pytest.fixture(scope="session")
def alone(data, shared) -> Path:
  """The workdir of a run of STEPS steps that was left alone."""
  return shared("alone", lambda folder: harness.Run(data, folder / "run", STEPS).finish()) / "run"


@pytest.fixture(scope="session")
def two_alone(data, shared) -> Path:
  """The workdir of a run of two processes that was left alone."""

  def make(folder: Path) -> None:
    harness.finish(harness.pair(data, folder / "run", STEPS))

  return shared("two_alone", make) / "run"


@pytest.fixture
def workdir(tmp_path) -> Path:
  """Where a run is to be."""
  return tmp_path / "run"


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
  """A disk of 40 MB, which takes root."""
  folder = tmp_path / "disk"
  folder.mkdir()
  subprocess.run(
    ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], check=True, timeout=300
  )
  yield folder
  subprocess.run(["umount", "-l", folder], check=True, timeout=300)
