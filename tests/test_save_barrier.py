"""The barrier of a save, between two real processes: one that fails ends the wait of the other."""

import subprocess
import sys
import textwrap

import pytest
from test_multiprocess import finish, free_port

PREAMBLE = """
import sys, time
from jax._src import distributed
from electra_jax.runtime import processes
from electra_jax.runtime.save_barrier import SaveBarrier, SaveError

port, me = sys.argv[1], int(sys.argv[2])
processes.initialize(f"localhost:{port}", 2, me, 60)
store = distributed.global_state.client
barrier = SaveBarrier(str)


def arrive(name, secs=30):
  barrier(key=name, timeout_ms=1000 * secs)


def meet(name):  # without the barrier under test
  store.wait_at_barrier(name, 60_000)
"""


def run_two(code: str) -> None:
  program = PREAMBLE + textwrap.dedent(code)
  command = [sys.executable, "-c", program, str(free_port())]
  options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  finish(*(subprocess.Popen([*command, str(i)], **options) for i in range(2)))


@pytest.mark.long
def test_each_call_of_each_save_waits_for_both_processes():
  run_two("""
    for save in range(3):
      barrier.begin()
      for call in range(2):
        if me == 1:
          time.sleep(0.5)
          store.key_value_set(f"before/{save}/{call}", "here")
        arrive("state")
        # Process 0 returns only after process 1 has come.
        assert store.key_value_try_get(f"before/{save}/{call}") == "here"
      assert barrier.failure() == ""
  """)


@pytest.mark.long
def test_a_failed_process_passes_its_reason_on_and_the_other_stops_waiting():
  run_two("""
    barrier.begin()
    arrive("state")
    if me == 1:
      try:
        raise ValueError("disk full")
      except ValueError:
        arrive("metadata")  # orbax calls it while it handles the error: it returns at once
    else:
      began = time.monotonic()
      try:
        arrive("metadata", secs=50)
      except SaveError as error:
        assert str(error) == "process 1: disk full"
        arrive("metadata")  # this process has no failure of its own to tell
      else:
        raise AssertionError("the other process never came")
      assert time.monotonic() - began < 25
      # What waits for the other process, such as for a folder that it makes, is left too.
      try:
        barrier.wait(lambda: time.sleep(120), grace_secs=0.5)
      except SaveError as error:
        assert str(error) == "process 1: disk full"
      else:
        raise AssertionError("the wait did not end")
    meet("failed")
    assert barrier.failure() == "process 1: disk full"

    # The next save begins without the failure; process 1 may still look at the one before.
    if me == 0:
      barrier.begin()
    meet("begun on 0")
    if me == 1:
      assert barrier.failure() == "process 1: disk full"
      barrier.begin()
    arrive("state")
    assert barrier.failure() == ""
    barrier.wait(lambda: None, grace_secs=0.5)
    try:
      barrier.wait(lambda: 1 / 0, grace_secs=0.5)
    except ZeroDivisionError:
      pass
    else:
      raise AssertionError("the error of the function is lost")
  """)
