"""Stores on loopback for the tests of this folder."""

import pytest

from buckets import servers


@pytest.fixture(scope="session")
def stores():
  """Runs the stores with a bucket; see `servers.everything`."""
  with servers.everything() as found:
    servers.make_bucket(found, "bucket")
    yield found
