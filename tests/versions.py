"""The core tests and a training on the oldest and newest Python and libraries of pyproject.toml.

  python tests/versions.py

Installs uv and, in environments of their own, the lowest versions that pyproject.toml names on
Python 3.11, and the newest of everything on 3.13. Where such a Python is neither here nor
comes from uv, its part is left out, in a line that says so. Exits with 0 if all that ran passed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import packages

UV = "uv==0.13.9"
PARTS = {"lowest": ("3.11", "lowest-direct"), "newest": ("3.13", "highest")}
TESTS = (
  ("-m", "core and not long and not slow", "tests"),
  ("-m", "not long", "tests/test_train.py", "-k", "leaves_everything"),
)


def find(uv: str, version: str) -> str | None:
  """Returns a Python that runs: on the path, of pyenv, or one that uv installs."""
  pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
  for found in filter(None, (shutil.which(f"python{version}"), *map(str, pyenv[::-1]))):
    # pyenv's command on the path fails for a version that is installed but not chosen.
    if not subprocess.run([found, "--version"], capture_output=True, timeout=60).returncode:
      return found
  asked = subprocess.run([uv, "python", "install", version], timeout=300)
  return None if asked.returncode else version


def main() -> int:
  os.environ["UV_SYSTEM_CERTS"] = "1"  # as pip
  uv = str(packages.install("uv", UV) / "bin" / "uv")
  failed = []
  for name, (version, resolution) in PARTS.items():
    python = find(uv, version)
    if python is None:
      print(f"left out: {name}: Python {version} is not here, and uv cannot install it", flush=True)
      continue
    folder = Path(sys.prefix) / "versions" / name
    subprocess.run(
      [uv, "venv", "--quiet", "--clear", f"--python={python}", folder], check=True, timeout=300
    )
    own = str(folder / "bin" / "python")
    command = [uv, "pip", "install", "--quiet", f"--python={own}", f"--resolution={resolution}"]
    packages.thrice([*command, "--requirement", packages.ROOT / "pyproject.toml", "--extra", "dev"])
    for tests in TESTS:
      # In one process: each more imports and collects for twelve seconds.
      test = [own, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", *tests]
      environment = os.environ | {"PYTHONPATH": str(packages.ROOT)}
      ran = subprocess.run(test, cwd=packages.ROOT, env=environment, timeout=1500)
      if ran.returncode:
        failed.append(f"{name}: {' '.join(tests)}")
  print("\n".join(f"failed: {x}" for x in failed))
  return bool(failed)


if __name__ == "__main__":
  sys.exit(main())
