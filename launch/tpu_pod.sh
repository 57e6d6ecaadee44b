#!/usr/bin/env bash
# Trains on a TPU slice, recreates it after preemptions until the run is done, then deletes it.
#
#   NAME=large ZONE=us-east5-a TYPE=v5litepod-64 BUCKET=my-bucket \
#     launch/tpu_pod.sh [--dry-run] --config=configs/large.py --config.train.accumulation=8
#
# gs://BUCKET/shards holds the shards, gs://BUCKET/runs/NAME is the workdir: a new slice resumes from
# its checkpoints. SPOT= (empty) requests a slice that is not preempted. Ctrl-C only ends the display;
# the same command shows it again. Log of worker 0: runs/NAME.log.
# shellcheck disable=SC2016  # some quotes are for the workers' shells
set -euo pipefail
cd "$(dirname "$0")/.."
dry=; for x; do shift; if [ "$x" = --dry-run ]; then dry=1; else set -- "$@" "$x"; fi; done
: "${NAME:?name of the slice and the run}" "${ZONE:?}" "${TYPE:?v5litepod-64, ...}" "${BUCKET:?without gs://}"
spot=${SPOT---spot}
case $TYPE in
  v4-*) runtime=tpu-ubuntu2204-base ;;
  v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
  v5p-*) runtime=v2-alpha-tpuv5 ;;
  v6e-*) runtime=v2-alpha-tpuv6e ;;
  *) echo "TYPE=$TYPE is not one of v4-N, v5litepod-N, v5p-N, v6e-N" >&2; exit 2 ;;
esac

exec 3>&1
run() { if [ "$dry" ]; then printf '%q ' "$@" >&3; echo >&3; else "$@"; fi; }
queue() { run gcloud compute tpus queued-resources "$1" "$NAME" --zone="$ZONE" "${@:2}"; }
on() { run gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker="$1" --command="$2"; }

install="BUCKET=$BUCKET"$'\n'"$(cat launch/tpu_install.sh)"
# A new session, which survives the ssh. Does not start a second run.
begin='cd electra_jax; if [ -f pid ] && kill -0 "$(cat pid)" 2> /dev/null; then exit; fi; rm -f exit
nohup setsid sh -c '\''.venv/bin/python -m electra_jax.train --workdir=gs://'"$BUCKET/runs/$NAME"' \
--config.data.dir=$HOME/shards "$@"; echo $? > exit.new; mv exit.new exit'\'' sh'"$([ $# = 0 ] || printf ' %q' "$@")"' > train.log 2>&1 < /dev/null &
echo $! > pid'
watch='cd electra_jax; tail -n +1 -F train.log 2> /dev/null & until [ -f exit ]; do sleep 5; done
sleep 2; kill $!; echo "exited with $(cat exit) '"\$(gcloud storage ls \
'gs://$BUCKET/runs/$NAME/checkpoints/*/commit_success.txt' 2> /dev/null | sort -V | tail -n 1)\""

start() {
  [ -z "$(git status --porcelain 2> /dev/null)" ] || echo "note: the slice gets HEAD, without uncommitted changes" >&2
  run git archive --format=tgz --output=runs/electra_jax.tgz HEAD &&
    run gcloud compute tpus tpu-vm scp runs/electra_jax.tgz "$NAME": --zone="$ZONE" --worker=all &&
    on all "$install" && on all "$begin"
}
look() {  # prints the state: empty without a slice, unknown without an answer
  queue describe --format='value(state.state)' 2> "$errors" && return
  grep -qi 'not.found' "$errors" || { cat "$errors" >&2; echo unknown; }
}

log=runs/$NAME.log errors=runs/$NAME.errors turn=0 failures=0 last='' code=''
if [ "$dry" ]; then log=/dev/null errors=/dev/null; else mkdir -p runs; fi
while [ -z "$code" ]; do
  turn=$((turn + 1)) state=$(look)
  if [ "$dry" ] && [ $turn = 2 ]; then state=ACTIVE; fi
  case $state in
    '') queue create --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$runtime" \
      ${spot:+"$spot"} || [ $turn -gt 1 ] ;;
    ACTIVE)
      code=255 newest=$last
      start && read -r code newest <<< \
        "$(on 0 "$watch" | tee -a "$log" /dev/stderr | sed -n 's/^exited with //p')"
      # No code: the slice is lost. Above 128: the run did not start, or a signal ended it.
      if [ -z "$code" ] || [ "$newest" != "$last" ]; then failures=0 last=${newest:-$last}
      elif [ "$code" -gt 128 ]; then failures=$((failures + 1))
        echo "$NAME: no new checkpoint, $failures of 3 failures in a row ($code)" >&2
      fi
      if [ $failures = 3 ]; then code=1; elif [ "${code:-143}" -gt 128 ]; then code=''; fi
      if [ "$dry" ]; then code=0; fi ;;
    SUSPENDED | FAILED)  # preempted or not provisioned; the state is in the bucket
      if [ "$state" = SUSPENDED ]; then failures=0; elif [ $((failures += 1)) = 3 ]; then code=1; fi
      echo "$NAME: $state" >&2; queue delete --force --quiet || true ;;
  esac
  if [ -z "$code" ]; then run sleep 30; fi
done
for pause in 30 300 3000; do
  if queue delete --force --quiet; then exit "$code"; fi
  sleep $pause
done
echo "$NAME could not be deleted and is still billed: delete it" >&2
exit 1
