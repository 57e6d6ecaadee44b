"""Claims of folders in buckets: one process holds one, and a dead one's is taken over."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from electra_jax.runtime import claims, storage

pytestmark = pytest.mark.buckets
STALE_SECS = 2

# Holds a claim until it is taken over, and says what it sees.
HOLDER = """
import sys, time
from electra_jax.runtime import claims
try:
  with claims.claim(sys.argv[1], float(sys.argv[2])) as check:
    print("holds", flush=True)
    while True:
      check()
      time.sleep(0.05)
except ValueError as error:
  print("error:", error, flush=True)
"""


@pytest.fixture(params=["s3", "gs"])
def url(request, stores, tmp_path):
  return f"{request.param}://corpus/{tmp_path.name}"


def start(url: str) -> subprocess.Popen:
  command = [sys.executable, "-c", HOLDER, url, str(STALE_SECS)]
  return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_of_two_at_once_one_wins_and_the_other_names_it(url):
  results, ready, over = [], threading.Barrier(2), threading.Event()

  def hold() -> None:
    ready.wait(60)
    try:
      with claims.claim(url, STALE_SECS) as check:
        check()
        results.append("holds")
        over.wait(60)
    except ValueError as error:
      results.append(str(error))

  threads = [threading.Thread(target=hold) for _ in range(2)]
  for thread in threads:
    thread.start()
  while len(results) < 2:
    time.sleep(0.05)
  over.set()
  for thread in threads:
    thread.join(60)
  results.remove("holds")
  assert results[0].startswith(f"{url} is in use by process {os.getpid()} on ")
  # It has ended, so nobody waits.
  began = time.monotonic()
  with claims.claim(url, 600) as check:
    check()
  assert time.monotonic() - began < 10
  assert len(storage.find(f"{url}/.claims/*")) == 1  # those before it are removed


def test_claims_that_somebody_deletes_disturb_nobody(url):
  with claims.claim(url, 600) as check:
    for found in storage.find(f"{url}/.claims/*"):
      storage.remove(found.url)
    check()
    with claims.claim(url, 600) as other:
      other()
  storage.put(f"{url}/.claims/000009", b"somebody")
  with claims.claim(url, 0.1) as check:  # an object cut short becomes stale like others
    check()


def test_who_lives_is_not_overtaken_and_who_is_killed_is(url):
  holder = start(url)
  assert holder.stdout.readline() == "holds\n"
  time.sleep(2 * STALE_SECS)
  with pytest.raises(ValueError, match=f"{url} is in use by process {holder.pid} on "):
    with claims.claim(url, STALE_SECS):
      pass
  holder.kill()
  holder.wait()
  began = time.monotonic()
  with claims.claim(url, STALE_SECS) as check:
    assert time.monotonic() - began > STALE_SECS
    check()


def test_who_was_suspended_is_overtaken_and_ends_when_it_wakes(url):
  holder = start(url)
  assert holder.stdout.readline() == "holds\n"
  holder.send_signal(signal.SIGSTOP)
  with claims.claim(url, STALE_SECS) as check:
    holder.send_signal(signal.SIGCONT)
    assert holder.stdout.read().startswith(
      f"error: {url} has been taken over by process {os.getpid()} on "
    )
    assert holder.wait(30) == 0
    check()
  with claims.claim(url, 600) as check:  # whatever the holder has written after it woke
    check()
