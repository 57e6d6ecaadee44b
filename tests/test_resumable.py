"""Steps within a time budget: done once, stopped in time, gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from resumable import DONE, FAILED, LEFT, OutOfTime, Step, StepError, Work, run_steps  # noqa: E402

# Counts to a file until it is told to stop, and then says so there.
COUNTER = """
import signal, sys, time
file = open(sys.argv[1], "a", buffering=1)
def stop(*_):
  file.write("saved\\n")
  sys.exit(143)
signal.signal(signal.SIGTERM, stop)
while True:
  file.write("on\\n")
  time.sleep(0.02)
"""


def counter(path: Path) -> list[str]:
  return [sys.executable, "-c", COUNTER, str(path)]


def a_work(folder: Path, secs: float = 3600) -> Work:
  return Work(folder, time.monotonic() + secs)


def until(condition, secs: float = 30) -> None:
  deadline = time.monotonic() + secs
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def statuses(records: dict) -> dict:
  return {name: record["status"] for name, record in records.items()}


def test_what_is_done_is_not_run_again_and_what_failed_is_after_the_others(tmp_path):
  begun, broken = [], [True]

  def fails(work):
    begun.append("fails")
    if broken:
      raise ValueError("two\nlines")
    return {}

  def good(name):
    return lambda work: begun.append(name) or {"name": name}

  steps = {"one": Step(good("one"), 1), "fails": Step(fails, 1)}
  first = run_steps(steps, a_work(tmp_path), print)
  assert statuses(first) == {"one": DONE, "fails": FAILED}
  assert first["one"]["result"]["name"] == "one"
  assert first["fails"]["reason"] == "ValueError: two lines"
  steps["two words"] = Step(good("two words"), 1)
  broken.clear()
  assert statuses(run_steps(steps, a_work(tmp_path), print)) == dict.fromkeys(steps, DONE)
  assert begun == ["one", "fails", "two words", "fails"]
  assert json.loads((tmp_path / "two-words.json").read_text())["result"] == {"name": "two words"}


def test_a_step_is_not_begun_without_its_time_unless_it_can_go_on(tmp_path):
  begun = []

  def goes_on(work):
    begun.append("goes on")
    raise OutOfTime("at 3 of 9")

  steps = {
    "long": Step(lambda work: begun.append("long"), 10),
    "goes on": Step(goes_on, 10, goes_on=True),
    "short": Step(lambda work: begun.append("short") or {}, 1),
  }
  found = run_steps(steps, a_work(tmp_path, 5 * 60), print)
  assert begun == ["goes on", "short"]
  assert statuses(found) == {"long": LEFT, "goes on": LEFT, "short": DONE}
  assert found["long"]["reason"].startswith("takes about 10 minutes, 5.0 are left")
  assert found["goes on"]["reason"] == "at 3 of 9" and found["goes on"]["result"] == {}
  # With no time at all, its record stays.
  again = run_steps(steps, a_work(tmp_path, 0), print)["goes on"]
  assert again == found["goes on"] and len(begun) == 2


def test_a_record_that_was_cut_off_counts_for_nothing(tmp_path):
  (tmp_path / "one.json").write_text('{"status": "do')
  found = run_steps({"one": Step(lambda work: {"ran": True}, 1)}, a_work(tmp_path), print)
  assert found["one"]["result"] == {"ran": True}


@pytest.mark.long
def test_a_program_gets_a_signal_before_the_end_and_is_killed_at_it(tmp_path):
  work = a_work(tmp_path, 10)  # Python takes seconds to start beside other tests
  with pytest.raises(OutOfTime):
    work.program("stops", counter(tmp_path / "stops"), stop_secs=1)
  lines = (tmp_path / "stops").read_text().split()
  assert lines[0] == "on" and lines[-1] == "saved" and work.secs_left() > 0
  with pytest.raises(OutOfTime):
    work.program("killed", counter(tmp_path / "killed"))
  assert -1 < work.secs_left() <= 0 and "saved" not in (tmp_path / "killed").read_text()


def test_a_failed_programs_error_is_reported(tmp_path):
  code = "print('error: no such file'); print('more'); raise SystemExit(7)"
  with pytest.raises(StepError, match=r"^no such file \(exit code 7, logs/bad.log\)$"):
    a_work(tmp_path).program("bad", [sys.executable, "-c", code])


def test_no_program_outlives_a_kill_of_what_runs_the_steps(tmp_path):
  code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
from resumable import Work
Work(Path(sys.argv[1]), time.monotonic() + 60).program("x", {counter(tmp_path / "counts")!r})
"""
  runner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
  counts = tmp_path / "counts"
  until(lambda: counts.exists() and counts.read_text())
  os.kill(runner.pid, signal.SIGKILL)
  runner.wait()

  def still() -> bool:
    before = counts.stat().st_size
    time.sleep(0.2)
    return counts.stat().st_size == before

  until(still)
  assert "saved" not in counts.read_text()
