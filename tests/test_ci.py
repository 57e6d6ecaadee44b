"""What runs before a change lands fails where it breaks its promise, and says what it did."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from test_launch import programs, write_program

ROOT = Path(__file__).resolve().parent.parent
MAKE = """
echo "$1" >> {folder}/made
echo "$PART" >> {folder}/parts
echo "SKIPPED [2] tests/test_x.py:1: needs PyTorch"
echo "3 passed, 2 skipped in 1.00s"
[[ $1 != "$BROKEN" ]] || {{ echo "the reason"; exit 1; }}
"""


@pytest.fixture
def run(tmp_path):
  """Returns a function that runs a copy of .ci/run, with programs that do nothing."""
  (tmp_path / ".ci").mkdir()
  shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
  write_program(tmp_path / ".venv" / "bin" / "python", "exit 0")
  make = MAKE.format(folder=tmp_path)
  given = programs(tmp_path, make=make, sleep="", **{"apt-get": '[[ $* != *"$ABSENT"* ]]'})

  def call(absent="nothing", broken="", **environment) -> subprocess.CompletedProcess:
    for name in ("made", "parts"):
      (tmp_path / name).unlink(missing_ok=True)
    names = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    env = {**os.environ, **given, **names, "ABSENT": absent, "BROKEN": broken, "CI_PART": "all"}
    env = {name: value for name, value in (env | environment).items() if value}
    done = subprocess.run(
      [tmp_path / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=60
    )
    done.made = set((tmp_path / "made").read_text().split())
    done.parts = set((tmp_path / "parts").read_text().split())
    return done

  return call


def test_the_end_lists_what_ran_and_why_pytest_skipped(run):
  done = run()
  assert done.returncode == 0, done.stdout + done.stderr
  end = done.stdout.partition("=== ran in")[2]
  assert {"test", "test-slurm", "test-report", "test-docs", "test-versions"} <= done.made
  for name in done.made - {".venv/ready", "hf-packages"}:
    assert f"\n{name} " in end, name
  assert "3 passed, 2 skipped in 1.00s" in end and " needs PyTorch\n" in end
  assert "left out" not in end and not done.parts


def test_thirds_take_turns_and_one_that_fails_comes_again(run):
  whole, made = run().made, []
  for broken, part in (("", 0), ("test-long", 1), ("", 1), ("", 2), ("", 0)):
    done = run(broken=broken, CI_PART="")
    assert (done.returncode, done.parts) == (bool(broken), {f"{part}/3"})
    assert f"s, part {part} of thirds" in done.stdout
    made.append(done.made)
  first, _, second, third, again = made
  assert first == again and first | second | third == whole
  always = {".venv/ready", "hf-packages", "test", "test-hf", "test-long", "test-faults"}
  assert first & second == second & third == third & first == always


@pytest.mark.parametrize(("absent", "what"), [("munge", "test-slurm"), ("chromium", "test-docs")])
def test_what_does_not_install_fails_unless_it_may(run, absent, what):
  done = run(absent)
  assert done.returncode == 1 and what not in done.made and "test-tpu" in done.made
  (line,) = (x for x in done.stdout.splitlines() if "left out" in x)
  assert what in line and absent in line and "do not install" in line
  allowed = run(absent, CI_ALLOW_MISSING="1")
  assert allowed.returncode == 0 and line in allowed.stdout


def test_without_pytorch_what_needs_it_is_left_out(run):
  done = run(broken="hf-packages", CI_ALLOW_MISSING="1")
  assert done.returncode == 0 and {"test-long", "test-tpu"} <= done.made
  assert not {"test-hf", "gpu-smoke"} & done.made
  assert "left out: test-hf and gpu-smoke: PyTorch" in done.stdout


def test_what_fails_is_shown_at_the_end_and_the_default_tests_end_it_at_once(run):
  done = run(broken="test-faults")
  assert done.returncode == 1 and "test-tpu" in done.made
  assert "=== test-faults\n" in done.stdout and "the reason" in done.stdout
  assert "FAILED after" in done.stdout.partition("=== ran in")[2]
  done = run(broken="test")
  assert done.returncode == 1 and done.made == {".venv/ready", "test"}
  assert "the reason" in done.stdout
