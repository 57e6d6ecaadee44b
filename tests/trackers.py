"""Real runs that write to wandb and MLflow without a network, read back with their own readers.

  python tests/trackers.py

Installs both into a folder of their own inside the environment. Trains a tiny run to a stop and to
its end with `log.trackers=tensorboard,wandb,mlflow`, WANDB_MODE=offline and MLflow's files, and
compares what is there with metrics.jsonl. Exits with 0 if the numbers are the same.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import packages

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "faults"))

import harness  # noqa: E402

PACKAGES = ("wandb==0.31.0", "mlflow-skinny==3.17.2")
STEPS = 12
# Prints the ids and {split/metric: {step: value}} of wandb's offline files. They are LevelDB logs:
# after 7 bytes, blocks of 32 KiB of chunks: checksum in 4 bytes, length in 2, place in 1 (whole,
# first, middle, last).
READ_WANDB = """
import collections, json, sys
from wandb.proto.wandb_internal_pb2 import Record

def records(data):
  at, record = 7, b""
  while at + 7 <= len(data):
    if (left := 32768 - at % 32768) < 7:
      at += left
      continue
    size, place = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
    record += data[at + 7 : at + 7 + size]
    at += 7 + size
    if place in (1, 4):
      yield Record.FromString(record)
      record = b""

found, ids = collections.defaultdict(dict), set()
for path in sys.argv[1:]:
  for record in records(open(path, "rb").read()):
    if record.run.run_id:
      ids.add(record.run.run_id)
    row = {(x.key or x.nested_key[0]): json.loads(x.value_json) for x in record.history.item}
    for key, value in row.items():
      if "/" in key:
        found[key][row["step"]] = value
print(json.dumps([sorted(ids), found]))
"""
READ_MLFLOW = """
import json, os, sys
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
import mlflow

client = mlflow.MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name("electra_jax").experiment_id
runs = client.search_runs([experiment])
found = {}
for key in runs[0].data.metrics:
  found[key] = {x.step: x.value for x in client.get_metric_history(runs[0].info.run_id, key)}
print(json.dumps([[run.info.status for run in runs], found, runs[0].data.params]))
"""


def read(code: str, environment: dict, *arguments: str) -> list:
  """Returns what a reader prints."""
  command = [sys.executable, "-c", code, *arguments]
  return json.loads(
    subprocess.run(command, env=environment, check=True, stdout=-1, timeout=300).stdout
  )


def check(folder: Path) -> None:
  """Trains, stops, resumes and compares. Raises AssertionError with what differs."""
  installed = packages.install("trackers", *packages.constraint(), *PACKAGES)
  path = os.pathsep.join((str(installed), str(ROOT)))
  environment = {**os.environ, "PYTHONPATH": path, "WANDB_MODE": "offline"}
  harness.build(folder)

  def train_in_two(workdir: Path, first_trackers: str, trackers: str) -> None:
    def start(code: str, names: str) -> subprocess.Popen:
      fields = {"log.trackers": names, "log.every_steps": 2}
      place = f"--workdir={workdir}"
      _, _, _, *arguments = harness.command("electra_jax.train", folder, STEPS, place, **fields)
      command = [sys.executable, "-c", code, *arguments]
      return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-3)

    first = start(harness.PACED + harness.PROGRAM, first_trackers)
    while first.poll() is None and harness.last_line(workdir) < 4:
      time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(300) == harness.STOPPED
    assert start(harness.PROGRAM, trackers).wait(300) == 0

  workdir, later = folder / "run", folder / "later"
  train_in_two(workdir, *2 * ["tensorboard,wandb,mlflow"])
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  expected: dict[str, dict] = {}
  for line in lines:
    for name, value in line.items():
      if name not in ("step", "split") and value is not None:
        expected.setdefault(f"{line['split']}/{name}", {})[str(line["step"])] = value
  files = sorted(map(str, (workdir / "wandb").glob("offline-run-*/run-*.wandb")))
  ids, found = read(READ_WANDB, environment, *files)
  assert len(files) == 2 and len(ids) == 1, (files, ids)
  assert found == expected, "wandb's files differ from metrics.jsonl"
  states, found, params = read(READ_MLFLOW, environment, (workdir / "mlruns").as_uri())
  assert states == ["FINISHED"] and params["train.steps"] == str(STEPS), (states, params)
  assert found == expected, "MLflow's files differ from metrics.jsonl"
  train_in_two(later, "", "mlflow")
  states, _, added = read(READ_MLFLOW, environment, (later / "mlruns").as_uri())
  differing = {k for k in params if params[k] != added.get(k)}
  assert states == ["FINISHED"] and differing == {"log.trackers"}, (states, differing)
  print(f"wandb and MLflow have the {len(expected)} metrics of {len(lines)} lines, over a resume")
  print(f"MLflow has the {len(params)} fields, also where it is added at a resume")


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as made:
    check(Path(made))
