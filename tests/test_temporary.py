"""Temporary files and folders: a killed process leaves none, a live one keeps its own."""

import errno
import os
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT, python

from electra_jax.data import shards
from electra_jax.runtime import workdir

# Forks into a process that writes, and dies at its n-th call to the file system.
KILLED = """
import os, pathlib, signal, sys
from electra_jax.runtime import workdir

folder, calls = pathlib.Path(sys.argv[1]), 0

def write():
  with workdir.replacing(folder / "config.json") as draft:
    draft.write_text("{}")
  with workdir.new_folder(folder / "hf") as outer:
    with workdir.new_folder(outer / "step-1") as inner:
      (inner / "model.bin").write_text("x")

def die(event, arguments):
  global calls
  if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"):
    calls += 1
    if calls == number:
      os.kill(os.getpid(), signal.SIGKILL)

left, number = set(), 0
while True:
  number += 1
  if (child := os.fork()) == 0:
    sys.addaudithook(die)
    write()
    os._exit(0)
  if os.waitpid(child, 0)[1] == 0:
    break
  left |= {path.suffix for path in folder.iterdir()}
  workdir.sweep.__wrapped__(folder)
  found = {path.name for path in folder.iterdir()}
  assert found <= {"config.json", "hf"}, (number, found)
  for path in folder.glob("hf/*/*"):
    path.unlink(), path.parent.rmdir(), path.parent.parent.rmdir()
assert number > 20 and ".tmp" in left, (number, left)
"""


def test_what_a_process_killed_at_any_call_leaves_is_swept_at_the_next_start(tmp_path):
  done = python("-c", KILLED, str(tmp_path))
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "hf" / "step-1" / "model.bin").exists()
  assert {path.name for path in tmp_path.iterdir()} == {"config.json", "hf"}


LIVE = """
import pathlib, sys
from electra_jax.runtime import workdir

folder = pathlib.Path(sys.argv[1])
with workdir.new_folder(folder / "hf") as draft, workdir.replacing(folder / "a.json") as file:
  (draft / "x").write_text("x"), file.write_text("{}")
  print("made", flush=True)
  sys.stdin.readline()
"""


def test_what_a_live_process_writes_is_not_swept(tmp_path):
  command = [sys.executable, "-c", LIVE, str(tmp_path)]
  pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
  live = subprocess.Popen(command, **pipes, env=os.environ | {"PYTHONPATH": str(ROOT)})
  assert live.stdout.readline() == "made\n"
  made = {path.name for path in tmp_path.iterdir()}
  workdir.sweep(tmp_path)
  assert {path.name for path in tmp_path.iterdir()} == made and len(made) == 3
  assert live.communicate("\n", timeout=300)[0] == "" and live.returncode == 0
  assert {path.name for path in tmp_path.iterdir()} == {"hf", "a.json"}


def test_only_files_of_the_form_are_swept_and_other_hosts_after_a_day(tmp_path):
  mine = [f".hf.{socket.gethostname()}-7-0123abcd.tmp", f"a.{socket.gethostname()}-7-0123abcd.tmp"]
  others = [".hf.another-7-0123abcd.tmp", "notes.tmp", ".hf.0123abcd", "a-7-0123abcdef.tmp"]
  for name in (*mine, *others):
    (tmp_path / name).write_text("")
  (tmp_path / others[0]).with_suffix("").mkdir()
  (tmp_path / mine[0]).with_suffix("").symlink_to(tmp_path / "precious")
  (tmp_path / "precious").mkdir()
  workdir.sweep(tmp_path)
  kept = {*others, others[0][:-4], mine[0][:-4], "precious"}
  assert {path.name for path in tmp_path.iterdir()} == kept
  os.utime(tmp_path / others[0], 2 * (time.time() - 25 * 3600,))
  workdir.sweep.__wrapped__(tmp_path)
  assert {path.name for path in tmp_path.iterdir()} == kept - {others[0], others[0][:-4]}


@pytest.mark.parametrize("lock", [workdir.claim, lambda folder: shards.locked(folder / ".lock")])
def test_a_lock_that_is_a_link_is_not_followed_and_one_in_use_is_not_emptied(tmp_path, lock):
  (tmp_path / "precious").write_text("kept")
  (tmp_path / ".lock").symlink_to(tmp_path / "precious")
  with (
    pytest.raises(OSError, match=r"A symbolic link: delete it: .*\.lock") as error,
    lock(tmp_path),
  ):
    pass
  assert error.value.errno == errno.ELOOP and (tmp_path / "precious").read_text() == "kept"
  (tmp_path / ".lock").unlink()
  with workdir.claim(tmp_path):
    held = (tmp_path / ".lock").read_text()
    with pytest.raises(ValueError, match="is in use by process|another build is"), lock(tmp_path):
      pass
    assert (tmp_path / ".lock").read_text() == held != ""
