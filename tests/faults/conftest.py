"""One text, one reference run and one cache of compiled steps for all faults."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import harness  # noqa: E402
from harness import STEPS  # noqa: E402


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
  """A folder with text.txt and data/."""
  folder = tmp_path_factory.mktemp("data")
  harness.build(folder)
  return folder


@pytest.fixture(scope="session")
def alone(data, tmp_path_factory) -> Path:
  """The workdir of a run of STEPS steps that was left alone."""
  workdir = tmp_path_factory.mktemp("alone") / "run"
  harness.Run(data, workdir, STEPS).finish()
  return workdir


@pytest.fixture(scope="session")
def two_alone(data, tmp_path_factory) -> Path:
  """The workdir of a run of two processes that was left alone."""
  workdir = tmp_path_factory.mktemp("two") / "run"
  for run in harness.pair(data, workdir, STEPS):
    run.finish()
  return workdir
