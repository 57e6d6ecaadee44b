"""The jobs of a long comparison, where one fails."""

import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import jobs  # noqa: E402


def test_a_failure_ends_the_queue_before_the_jobs_that_are_waited_for_first():
  begun, go = [], threading.Event()

  def job(name: str) -> None:
    begun.append(name)
    if name == "fails":
      raise SystemExit("failed")
    go.wait(60)

  with pytest.raises(SystemExit, match="failed"):
    with jobs.workers(2) as pool:
      started = [pool.submit(job, name) for name in ("long", "fails", "queued", "later")]
      threading.Timer(1, go.set).start()  # "long" and what took the place of "fails"
      jobs.finish(started)
  assert "later" not in begun and started[3].cancelled()
