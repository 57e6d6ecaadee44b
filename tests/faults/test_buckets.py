"""Runs whose workdir is a bucket: killed at any moment, they end in the bits of a local run."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest
from buckets import servers
from harness import STEPS

pytestmark = pytest.mark.buckets

# A holder that was killed is waited for, for this long.
SOON = """
from electra_jax.runtime import claims, storage
claims.STALE_SECS, storage.WAITS = 3, (0.1,)
"""

# Runs the program until it has begun (before), or done (after), its second upload of metrics.
DIES_UPLOADING = """
import os, signal, sys
moment, put, count = sys.argv.pop(1), storage.put, [0]

def die(url, *args, **kwargs):
  count[0] += url.endswith("metrics.jsonl")
  if moment == "before" and count[0] == 2:
    os.kill(os.getpid(), signal.SIGKILL)
  put(url, *args, **kwargs)
  if moment == "after" and count[0] == 2:
    os.kill(os.getpid(), signal.SIGKILL)

storage.put = die
"""


@pytest.fixture(scope="module")
def stores():
  before = dict(os.environ)
  with servers.everything() as found:
    servers.make_bucket(found, "bucket")
    yield found
  os.environ.clear()
  os.environ.update(before)


class Place:
  """A workdir at a URL, and its local folder."""

  def __init__(self, url: str, cache: Path):
    from electra_jax.runtime import bucket

    self.url, self.cache = url, cache
    os.environ["XDG_CACHE_HOME"] = str(cache)
    self.local = bucket.local_folder("runs", f"{url} 0", url)
    self.local.parent.mkdir(parents=True)

  def run(self, data: Path, *args: str, code: str = "", arguments: tuple = (), **kwargs):
    head = harness.program(SOON + code, *arguments)
    return harness.Run(data, self.local, STEPS, *args, head=head, url=self.url, **kwargs)

  def read(self, name: str) -> bytes:
    from electra_jax.runtime import storage

    return storage.read(f"{self.url}/{name}")

  def names(self) -> list[str]:
    from electra_jax.runtime import storage

    return [x.url[len(self.url) + 1 :] for x in storage.find(f"{self.url}/**")]

  def whole(self) -> list[int]:
    """Returns the steps that say that they are whole, in order."""
    found = (name.split("/") for name in self.names())
    return sorted(int(x[1]) for x in found if x[0] == "checkpoints" and x[2:] == [MARKER])

  def outcome(self, folder: Path) -> tuple[dict, list[dict]]:
    """Returns what `harness.outcome` does, from the bucket; `folder` is for its files."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(self.read("metrics.jsonl"))
    meta = json.loads(self.read(f"checkpoints/{STEPS}/meta/metadata"))
    return meta["arrays"], harness.lines(folder)


MARKER = "commit_success.txt"


@pytest.fixture(params=["gs", "s3"])
def place(request, stores, tmp_path, monkeypatch) -> Place:
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  return Place(f"{request.param}://bucket/{tmp_path.name}/run", tmp_path / "cache")


def test_kills_in_a_step_a_save_and_an_upload_end_in_the_same_bits(
  data, alone, stores, place, tmp_path
):
  proxy = stores[place.url.partition(":")[0]]

  def goes_on(run: harness.Run) -> bool:
    """Returns whether a run has resumed from the newest whole step."""
    return f"resuming from step {before}" in run.output

  def saves(run: harness.Run) -> bool:
    """Returns whether the arrays of the next step are being written."""
    names = (f"checkpoints{slash}{before + 5}{slash}state{slash}ocdbt" for slash in ("%2F", "/"))
    sent = [path for method, path in proxy.requests if method in ("POST", "PUT")]
    return any(name in path for name in names for path in sent)

  assert place.run(data, code=DIES_UPLOADING, arguments=("before",)).wait() == -signal.SIGKILL
  (before,) = place.whole()
  dies = place.run(data, code=DIES_UPLOADING, arguments=("after",))
  assert dies.wait() == -signal.SIGKILL and goes_on(dies)
  before = place.whole()[-1]
  run = place.run(data).when(lambda: harness.last_line(place.local) >= before + 7)
  run.kill()
  assert goes_on(run)
  before = place.whole()[-1]
  run = place.run(data)
  run.when(lambda: goes_on(run))
  proxy.requests.clear()
  run.when(lambda: saves(run)).kill()
  assert place.whole()[-1] == before
  assert any(name.startswith(f"checkpoints/{before + 5}/") for name in place.names())  # a half one
  assert f"resuming from step {before}" in place.run(data).finish()
  assert place.outcome(tmp_path / "copy") == harness.outcome(alone, STEPS)
  steps = {name.split("/")[1] for name in place.names() if name.startswith("checkpoints/")}
  assert {"40", "44"} == steps == set(map(str, place.whole()))


def test_two_processes_share_a_workdir_at_a_url(data, two_alone, stores, tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  place = Place(f"gs://bucket/{tmp_path.name}/run", tmp_path / "cache")

  def start() -> list[harness.Run]:
    return harness.pair(data, place.local, STEPS, head=harness.program(SOON), url=place.url)

  runs = start()
  runs[0].when(lambda: place.whole() and harness.last_line(place.local) >= 12)
  for run in runs:
    run.kill()
  newest = place.whole()[-1]
  outputs = harness.finish(start())
  assert f"resuming from step {newest}" in outputs[0]
  assert place.outcome(tmp_path / "copy") == harness.outcome(two_alone, STEPS)


def test_two_processes_on_s3_are_refused(data, stores, tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  place = Place(f"s3://bucket/{tmp_path.name}/run", tmp_path / "cache")
  for run in harness.pair(data, place.local, STEPS, url=place.url):
    assert "s3:// supports only runs of one process: use gs://" in run.error()
  assert place.names() == []


@pytest.fixture
def front(place, stores, monkeypatch) -> Iterator[servers.Proxy]:
  """What the run takes for the store of its place."""
  proxy = servers.Proxy(stores[place.url.partition(":")[0]].port)
  with monkeypatch.context() as patch:
    for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
      patch.setenv(name, proxy.url)
    yield proxy


def test_a_store_that_cannot_be_reached_ends_a_run_in_one_line(data, alone, place, front, tmp_path):
  run, port = place.run(data), front.port
  run.when(lambda: place.whole())
  front.port = servers.free_port()  # where nobody is
  error = run.error()
  assert "could not write a checkpoint to " in error and "earlier checkpoints are intact" in error
  front.port = port
  newest = place.whole()[-1]
  assert f"resuming from step {newest}" in place.run(data).finish()
  assert place.outcome(tmp_path / "copy") == harness.outcome(alone, STEPS)


# On gs:// orbax writes by itself: a store that goes away within its save ends the run.
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_run_may_go_on_while_the_store_cannot_be_reached(data, alone, place, front, tmp_path):
  run, port = place.run(data, checkpoint__on_error="continue"), front.port
  run.when(lambda: place.whole())
  front.port = servers.free_port()
  run.when(lambda: "earlier checkpoints are intact; training continues" in run.output)
  front.port = port
  run.finish()
  assert place.outcome(tmp_path / "copy") == harness.outcome(alone, STEPS)
