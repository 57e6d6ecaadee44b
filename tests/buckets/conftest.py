"""The stores of tests/buckets, once for each worker."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import servers  # noqa: E402


@pytest.fixture(autouse=True)
def undrawn():
  """Draws the pictures of runs, because their upload is tested."""


@pytest.fixture(scope="session")
def running():
  """The servers of all schemes, with a bucket `corpus`."""
  assert "huggingface_hub" not in sys.modules  # it reads the environment when it is imported
  with servers.everything() as stores:
    servers.make_bucket(stores, "corpus")
    yield stores


@pytest.fixture
def stores(running, request):
  """The servers, without faults, and with `prefix`: names of the test's own objects begin so."""
  yield running | {"prefix": request.node.name.partition("[")[0] + str(os.urandom(4).hex())}
  for proxy in running.values():
    proxy.fault, proxy.delay, proxy.spoiled = None, 0, 0
