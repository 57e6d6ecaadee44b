"""What the programs that ask a compiler have in common: the preflight's answer, and their output.

A compiler is installed in the version that this JAX is for, and where no other program finds it: an
ordinary one that does complains at its start of a missing device.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30


def preflight(folder: str, config: str, topologies: str, fields: dict) -> tuple[str, list[dict]]:
  """Returns what the program prints, and its JSON; `folder` is that of `packages.install`."""
  changes = [f"--config.{name}={value}" for name, value in fields.items()]
  with tempfile.TemporaryDirectory() as made:
    path = Path(made) / "costs.jsonl"
    command = [sys.executable, "-m", "electra_jax.preflight", f"--config=configs/{config}.py"]
    done = subprocess.run(
      [*command, *changes, f"--topology={topologies}", f"--json={path}"],
      cwd=ROOT,
      env=os.environ | {"PYTHONPATH": f"{sys.prefix}/{folder}", "JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
      timeout=900,
    )
    if done.returncode:
      raise SystemExit(f"the preflight failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout, [json.loads(line) for line in path.read_text().splitlines()]


def run(*checks) -> None:
  """Calls each check and prints what it found to be so."""
  console = Console(highlight=False, soft_wrap=True)
  for check in checks:
    console.print(f"ok: {check()}")
