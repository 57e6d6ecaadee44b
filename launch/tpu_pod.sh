#!/usr/bin/env bash
# Trains on a TPU slice, makes it anew after each preemption until the run is done, then deletes it.
#
#   NAME=large ZONE=us-east5-a TYPE=v5litepod-64 BUCKET=my-bucket \
#     launch/tpu_pod.sh [--dry-run] --config=configs/large.py [--config.FIELD=VALUE ...]
#
# gs://BUCKET/shards holds the shards, gs://BUCKET/runs/NAME becomes the workdir: every new slice
# goes on from the checkpoints there. Give the bucket a hierarchical namespace, so that a checkpoint
# is renamed at once. SPOT= (empty) asks for a slice that is not preempted. The log of worker 0 is
# shown and kept in runs/NAME.log. Ctrl-C ends the watching only; the same command takes it up again.
set -euo pipefail
cd "$(dirname "$0")/.."
dry=; if [ "${1-}" = --dry-run ]; then dry=1; shift; fi
: "${NAME:?of the slice and the run}" "${ZONE:?}" "${TYPE:?v5litepod-64, ...}" "${BUCKET:?without gs://}"
spot=${SPOT---spot}
case $TYPE in
  v4-*) runtime=tpu-ubuntu2204-base ;;
  v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
  v5p-*) runtime=v2-alpha-tpuv5 ;;
  v6e-*) runtime=v2-alpha-tpuv6e ;;
  *) echo "TYPE=$TYPE is none of v4-N, v5litepod-N, v5p-N, v6e-N" >&2; exit 2 ;;
esac

exec 3>&1
run() { if [ "$dry" ]; then printf '%q ' "$@" >&3; echo >&3; else "$@"; fi; }
queue() { run gcloud compute tpus queued-resources "$1" "$NAME" --zone="$ZONE" "${@:2}"; }
on() { run gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker="$1" --command="$2"; }

create() {
  queue create --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$runtime" \
    ${spot:+"$spot"}
}

# The image's Python is too old: uv brings one. Versions are those of requirements.lock.
install='set -e; mkdir -p electra_jax bucket; tar -xzf electra_jax.tgz -C electra_jax; cd electra_jax
command -v ~/.local/bin/uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
[ -x .venv/bin/python ] || ~/.local/bin/uv venv --python 3.12 .venv
~/.local/bin/uv pip install --quiet --constraint requirements.lock --editable ".[data,tpu]"
mountpoint -q ~/bucket || gcsfuse --implicit-dirs --rename-dir-limit=100000 '"$BUCKET"' ~/bucket
gcloud storage rsync --recursive gs://'"$BUCKET"'/shards ~/shards'
# Survives the ssh: a session of its own. A run that is still going is left alone.
# shellcheck disable=SC2016  # what stands in these quotes is for the workers' shells
begin='cd electra_jax; if [ -f pid ] && kill -0 "$(cat pid)" 2> /dev/null; then exit; fi; rm -f exit
nohup setsid sh -c '\'".venv/bin/python -m electra_jax.train --workdir=\$HOME/bucket/runs/$NAME \
--config.data.dir=\$HOME/shards$([ $# = 0 ] || printf ' %q' "$@"); echo \$? > exit.new; mv exit.new exit"\'' > train.log 2>&1 < /dev/null &
echo $! > pid'
# shellcheck disable=SC2016
watch='cd electra_jax; tail -n +1 -F train.log 2> /dev/null & until [ -f exit ]; do sleep 5; done
sleep 2; kill $!; echo "exited with $(cat exit)"'

start() {
  run git archive --format=tgz --output=runs/electra_jax.tgz HEAD
  run gcloud compute tpus tpu-vm scp runs/electra_jax.tgz "$NAME": --zone="$ZONE" --worker=all
  on all "$install" && on all "$begin"
}

log=runs/$NAME.log
if [ "$dry" ]; then log=/dev/null; else mkdir -p runs; fi
turn=0
while true; do
  turn=$((turn + 1))
  state=$(queue describe --format='value(state.state)' 2> /dev/null || true)
  if [ "$dry" ] && [ $turn = 2 ]; then state=ACTIVE; fi
  case $state in
    '') create ;;
    ACTIVE)
      code=$({ start && on 0 "$watch"; } | tee -a "$log" /dev/stderr | sed -n 's/^exited with //p') || true
      if [ "$dry" ]; then code=0; fi
      # No code: the slice was lost. Above 128: a signal stopped the run, which saved itself.
      if [ "$code" ] && [ "$code" -le 128 ]; then break; fi ;;
    SUSPENDED | FAILED) queue delete --force --quiet ;;  # preempted: what counts is in the bucket
  esac
  run sleep 30
done
queue delete --force --quiet
exit "$code"
