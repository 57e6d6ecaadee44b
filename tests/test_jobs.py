"""The jobs of a long comparison, where one fails."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from electra_jax.experiments import jobs, runner
from electra_jax.experiments.definition import Arm, Experiment

ROOT = Path(__file__).resolve().parent.parent


def test_a_failure_ends_the_queue_before_the_jobs_that_are_waited_for_first():
  begun, go = [], threading.Event()

  def job(name: str) -> None:
    begun.append(name)
    if name == "fails":
      raise SystemExit("failed")
    go.wait(60)

  with pytest.raises(SystemExit, match="failed"):
    with jobs.workers(2) as pool:
      started = [pool.submit(job, name) for name in ("long", "fails", "queued", "later")]
      threading.Timer(1, go.set).start()  # "long" and what took the place of "fails"
      jobs.finish(started)
  assert "later" not in begun and started[3].cancelled()


def test_a_row_that_a_file_has_is_not_measured_again(tmp_path):
  rows, key = jobs.Rows(tmp_path / "rows.jsonl"), {"arm": "bert", "seed": 0}
  first = rows.once(key, lambda: {"loss": 4.0})
  with (tmp_path / "rows.jsonl").open("a") as file:
    file.write('{"arm": "cut o')
  again = jobs.Rows(tmp_path / "rows.jsonl")
  assert again.once(key, lambda: {"loss": 5.0}) == first == {"arm": "bert", "seed": 0, "loss": 4.0}
  assert again.once(key | {"seed": 1}, lambda: {"loss": 5.0})["loss"] == 5.0
  assert [row["loss"] for row in again.read()] == [4.0, 5.0]


def test_a_job_that_ended_is_known_after_a_line_that_was_cut_off(tmp_path):
  (tmp_path / "commands.jsonl").write_text('{"job": "train/x", "argum')
  for _ in range(2):
    jobs.run(tmp_path, "train/x", "timeit", ["-n1", "-r1", "pass"], lambda: True)
  assert [x["job"] for x in jobs.json_lines(tmp_path / "commands.jsonl")] == ["train/x"]


def test_a_measure_is_made_again_only_with_other_arguments(tmp_path, monkeypatch):
  e = Experiment({"a": Arm("small")}, (1,))
  runs, started = runner.Runner(e, tmp_path, tmp_path / "rows.jsonl", Console()), []

  def evaluate(out, job, module, arguments, ended):  # stands for the program alone
    started.append(arguments[2])
    file = tmp_path / "pairs" / "run-rtd" / "pairs.json"
    file.parent.mkdir(parents=True)  # fails if it is there
    file.write_text(json.dumps({"all": len(started)}))
    jobs.append(out / "commands.jsonl", {"job": job, "arguments": arguments, "ended": True})

  monkeypatch.setattr(jobs, "_run", evaluate)
  for data, found in (("a", 1), ("a", 1), ("b", 2)):
    assert runs._evaluate(tmp_path / "run", "pairs", f"--data={data}", name="rtd") == {"all": found}
  assert started == ["--data=a", "--data=b"]


@pytest.mark.long
def test_a_job_that_two_processes_ask_for_runs_once(tmp_path):
  code = (
    "import sys; from pathlib import Path; from electra_jax.experiments import jobs\n"
    "jobs.run(Path(sys.argv[1]), 'train/shared', 'timeit',"
    " ['-n1', '-r1', 'import time; time.sleep(1)'], lambda: True)"
  )
  command = [sys.executable, "-c", code, str(tmp_path)]
  started = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
  assert [process.wait(300) for process in started] == [0, 0]
  assert [x["job"] for x in jobs.json_lines(tmp_path / "commands.jsonl")] == ["train/shared"]


def test_a_job_that_two_ask_for_at_once_runs_once(tmp_path):
  def asked() -> None:
    jobs.run(tmp_path, "train/shared", "timeit", ["-n1", "-r1", "pass"], lambda: True)

  with jobs.workers(2) as pool:
    jobs.finish([pool.submit(asked) for _ in range(4)])
  assert [x["job"] for x in jobs.json_lines(tmp_path / "commands.jsonl")] == ["train/shared"]
