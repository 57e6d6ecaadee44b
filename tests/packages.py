"""Installs what one program of the tests alone needs, into its own folder of the environment."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def locked(name: str) -> list[str]:
  """Returns the lines of a lock file without their hashes."""
  return [x.rstrip(" \\") for x in (ROOT / name).read_text().splitlines() if "==" in x]


def constraint() -> tuple[str, str]:
  """Returns pip's option for the versions of requirements.lock; with hashes it wants one of all."""
  path = Path(sys.prefix) / "constraints.txt"
  path.write_text("\n".join(locked("requirements.lock")))
  return "--constraint", str(path)


def thrice(command: list) -> None:
  """Runs a command that downloads; an index may not answer at once."""
  for _ in range(2):
    if not subprocess.run(command, timeout=900).returncode:
      return
    time.sleep(10)
  subprocess.run(command, check=True, timeout=900)


def install(name: str, *wanted: str) -> Path:
  """Installs packages if they are not there in these versions, and returns the folder.

  Args:
    wanted: arguments of pip: packages with versions, and options.
  """
  folder = Path(sys.prefix) / name
  done = folder / "ready"
  if not done.exists() or done.read_text() != str(wanted):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # To compile all modules takes as long as the rest, and few of them are imported.
    thrice([*pip, "--no-compile", "--upgrade", "--target", folder, *wanted])
    done.write_text(str(wanted))
  return folder
