#!/usr/bin/env bash
# Trains on all GPUs of this machine, survives the ssh session, and resumes after a kill.
#
#   launch/gpu.sh [--dry-run] --config=configs/base.py --config.data.dir=SHARDS --workdir=DIR
#
# Shows DIR.log. Ctrl-C only ends the display; to save and end the run:
#
#   pkill -f -- '--workdir=DIR/?( |$)'
#
# Installs into .venv of the clone, unless PYTHON names a Python with electra_jax[data,gpu]. Other
# paths are relative to the current folder.
set -euo pipefail
clone=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$clone/.venv/bin/python}
dry=; for x; do shift; if [ "$x" = --dry-run ]; then dry=1; else set -- "$@" "$x"; fi; done
run() { if [ "$dry" ]; then printf '%q ' "$@"; echo; else "$@"; fi; }

workdir=
for argument in "$@"; do
  case $argument in --workdir=*) argument=${argument%/}; workdir=${argument#*=} ;; esac
done
workdir=${workdir/#\~\//$HOME/}
: "${workdir:?give --workdir=DIR}"
see_gpu='import jax; assert jax.default_backend() == "gpu", jax.devices()'
has_gpu() { "$python" -c "$see_gpu" > /dev/null 2>&1; }
if [ -z "${PYTHON-}" ] && [ ! -x "$python" ]; then run python3 -m venv "$clone/.venv"; fi
# Also installs into a .venv from `make`, which is for CPUs.
if [ -z "${PYTHON-}" ] && { [ "$dry" ] || ! has_gpu; }; then
  run "$python" -m pip install --quiet --require-hashes --requirement "$clone/requirements-gpu.lock"
  run "$python" -m pip install --quiet --no-deps --no-build-isolation --editable "$clone"
fi
if [ ! "$dry" ] && ! has_gpu; then
  echo "error: JAX sees no GPU: $python -c '$see_gpu'" >&2
  exit 1
fi
# Restarts after an abort, a memory fault or an out-of-memory kill, unless it was told to stop or three
# starts made no new checkpoint.
# shellcheck disable=SC2016  # expanded in the started shell
again='newest() { find "$0/checkpoints/" -regex ".*/[0-9]+" -prune 2> /dev/null | sort -V | tail -n 1; }
idle=0 before=$(newest)
while "$@"; code=$?; case $code in 134 | 135 | 136 | 137 | 139) true ;; *) false ;; esac; do
  if [ "$(newest)" != "$before" ]; then idle=0 before=$(newest); else idle=$((idle + 1)); fi
  if [ $idle = 3 ]; then echo "error: three starts without a new checkpoint, killed ($code)"; break; fi
  echo "killed ($code): resuming from the newest checkpoint"; sleep 5
done; exit $code'
command=(nohup setsid bash -c "$again" "$workdir" "$python" -m electra_jax.train "$@")
if [ "$dry" ]; then run "${command[@]}"; exit; fi
mkdir -p "$(dirname "$workdir")"
"${command[@]}" >> "$workdir.log" 2>&1 < /dev/null &
tail --pid=$! --retry --follow=name --lines=+1 "$workdir.log" || true
wait $!
