#!/usr/bin/env bash
# What launch/tpu_pod.sh runs on every worker, with BUCKET set: program, bucket and shards.
set -e
: "${BUCKET:?}"
mkdir -p electra_jax bucket
tar -xzf electra_jax.tgz -C electra_jax
cd electra_jax
# The image's Python is too old: uv brings one. requirements.lock sets the versions.
[ -x ~/.local/bin/uv ] || curl -LsSf https://astral.sh/uv/install.sh | sh
[ -x .venv/bin/python ] || ~/.local/bin/uv venv --python 3.12 .venv
~/.local/bin/uv pip install --quiet --constraint requirements.lock --editable ".[data,tpu]"
if ! command -v gcsfuse > /dev/null; then
  key=/usr/share/keyrings/cloud.google.asc packages=https://packages.cloud.google.com/apt
  curl -LsSf $packages/doc/apt-key.gpg | sudo tee $key > /dev/null
  echo "deb [signed-by=$key] $packages gcsfuse-$(lsb_release -cs) main" |
    sudo tee /etc/apt/sources.list.d/gcsfuse.list
  sudo apt-get -qq update
  sudo apt-get -qq install -y -o DPkg::Lock::Timeout=600 gcsfuse  # others install at boot
fi
mountpoint -q ~/bucket || gcsfuse --implicit-dirs --rename-dir-limit=100000 "$BUCKET" ~/bucket
gcloud storage rsync --recursive "gs://$BUCKET/shards" ~/shards
