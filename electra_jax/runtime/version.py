"""The version of the running code: package version, commit and a digest of its files."""

import functools
import hashlib
import subprocess
from pathlib import Path

from electra_jax import __version__

PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def code_digest() -> str:
  """Returns the SHA-256 of the package's Python files, by name and content."""
  digest = hashlib.sha256()
  for path in sorted(PACKAGE.rglob("*.py")):
    content = path.read_bytes()
    digest.update(f"{path.relative_to(PACKAGE)} {len(content)}\n".encode() + content)
  return digest.hexdigest()


@functools.cache
def code_version() -> str:
  """Returns the version and, in a clone, the commit and whether the code has changes."""
  root = PACKAGE.parent
  if not (root / ".git").exists():
    return __version__
  try:
    git = ["git", "-C", str(root)]
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    dirty = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True).strip()
  except (OSError, subprocess.CalledProcessError):
    return __version__
  return f"{__version__} ({commit}{', with changes' if dirty else ''})"
