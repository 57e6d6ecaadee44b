"""Weights in and out: units, vocabularies, heads, files of others, and what is refused in a line."""

import os
import subprocess
import sys

import pytest

from electra_jax.runtime import workdir


def command(program: str, *args, text: str = "", umask: int = 0o022):
  """Returns a program's exit code, its output and its errors."""
  done = subprocess.run(
    [sys.executable, "-m", f"electra_jax.{program}", *map(str, args)],
    input=text, capture_output=True, text=True, umask=umask,
    env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
  )  # fmt: skip
  return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775)])
def test_what_is_written_has_the_umasks_mode(umask, file, folder, tmp_path):
  import numpy as np
  from safetensors.numpy import save_file

  before = os.umask(umask)
  try:
    with workdir.new_folder(tmp_path / "out") as new:
      (new / "inside").mkdir()
      save_file({"x": np.zeros(3)}, new / "inside" / "model.safetensors")
      (new / "config.json").write_text("{}")
  finally:
    os.umask(before)
  modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "out").rglob("*") if p.is_file()}
  assert modes == {file}
  found = {p.stat().st_mode & 0o777 for p in (tmp_path / "out", tmp_path / "out" / "inside")}
  assert found == {folder}


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
  def refuse(*args):
    raise PermissionError(13, "Permission denied", str(args[0]))

  monkeypatch.setattr(os, "mkdir", refuse)
  with pytest.raises(PermissionError) as error, workdir.new_folder(tmp_path / "out"):
    pass
  assert error.value.filename == str(tmp_path / "out")
