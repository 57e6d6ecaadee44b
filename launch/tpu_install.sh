#!/usr/bin/env bash
# Installs the program and the shards on a worker; launch/tpu_pod.sh runs it with BUCKET set.
set -e
: "${BUCKET:?}"
mkdir -p electra_jax
tar -xzf electra_jax.tgz -C electra_jax
cd electra_jax
# The image's Python is too old, so uv, of this hash, installs one.
[ -x ~/.local/bin/uv ] || python3 -m pip install --quiet --user --require-hashes --requirement /dev/stdin <<< \
  "uv==0.13.9 --hash=sha256:d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19"
[ -x .venv/bin/python ] || ~/.local/bin/uv venv --python 3.12 .venv
~/.local/bin/uv pip install --quiet --no-config --require-hashes --requirement requirements-tpu.lock
~/.local/bin/uv pip install --quiet --no-deps --no-build-isolation --editable .
gcloud storage rsync --recursive "gs://$BUCKET/shards" ~/shards
