#!/usr/bin/env bash
# Installs the program and the shards on a worker; launch/tpu_pod.sh runs it with BUCKET set.
set -e
: "${BUCKET:?}"
mkdir -p electra_jax
tar -xzf electra_jax.tgz -C electra_jax
cd electra_jax
# The image's Python is too old, so uv installs one. requirements.lock pins the versions.
[ -x ~/.local/bin/uv ] || curl -LsSf https://astral.sh/uv/install.sh | sh
[ -x .venv/bin/python ] || ~/.local/bin/uv venv --python 3.12 .venv
~/.local/bin/uv pip install --quiet --constraint requirements.lock --editable ".[data,tpu,buckets]"
gcloud storage rsync --recursive "gs://$BUCKET/shards" ~/shards
