"""The container image and the lock files pin everything that they install."""

import re

from test_launch import LAUNCH


def test_the_image_copies_what_the_package_is_built_from():
  lines = (LAUNCH / "Dockerfile").read_text().splitlines()
  copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
  lock = "requirements-${EXTRA}.lock"
  assert copied == {lock, "pyproject.toml", "setup.cfg", "electra_jax", "configs"}
  for extra in ("gpu", "tpu"):
    assert (LAUNCH.parent / lock.replace("${EXTRA}", extra)).exists()
  assert 'ENTRYPOINT ["python", "-m", "electra_jax.train"]' in lines
  assert "ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64" in lines  # of a GPU node's driver


def test_every_installed_file_is_checked_against_a_hash():
  for name in ("requirements", "requirements-beam", "requirements-gpu", "requirements-tpu"):
    lines = (LAUNCH.parent / f"{name}.lock").read_text().splitlines()
    for line, after in zip(lines, lines[1:], strict=False):
      assert "==" not in line or after.startswith("    --hash=sha256:"), (name, line)
  for path in LAUNCH.iterdir():
    text = path.read_text()
    assert not re.search(r"(curl|wget)[^\n]*\|", text), path
    for install in re.findall(r"pip install((?:[^\n&]|\\\n)*)", text):
      assert "--require-hashes" in install or "--no-deps" in install, (path, install)
  lines = (LAUNCH / "Dockerfile").read_text().splitlines()
  assert [x for x in lines if x.startswith("FROM") and "@sha256:" not in x] == []
  assert next(x for x in reversed(lines) if x.startswith("USER")) == "USER 1000:1000"
