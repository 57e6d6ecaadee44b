"""The launchers: what they would run, what they do when a slice is taken away, and their syntax."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parent.parent / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))
TPU = {"NAME": "large", "ZONE": "us-east5-a", "TYPE": "v5litepod-64", "BUCKET": "ours"}
ARGS = ["--config=configs/large.py", "--config.data.sources=text:a b"]


@pytest.fixture
def launch(tmp_path):
  """A copy of the launchers, beside nothing else."""
  return Path(shutil.copytree(LAUNCH, tmp_path / "launch"))


def write_program(path: Path, body: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/usr/bin/env bash\n{body}\n", "utf-8")
  path.chmod(0o755)


def programs(folder: Path, **bodies: str) -> dict[str, str]:
  """Writes programs, and returns an environment that finds them first."""
  for name, body in bodies.items():
    write_program(folder / "bin" / name, body)
  return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def call(script: Path, *args, **environment) -> subprocess.CompletedProcess:
  env = {**os.environ, **environment}
  return subprocess.run(
    ["bash", script, *args], capture_output=True, text=True, env=env, cwd=script.parent, timeout=300
  )


def dry_run(script: Path, *args, **environment) -> list[list[str]]:
  """Returns the commands that a dry run prints."""
  done = call(script, "--dry-run", *args, **environment)
  assert done.returncode == 0, done.stderr
  return words(done.stdout)


def words(lines: str) -> list[list[str]]:
  """Returns the words of each line that bash quoted; only bash reads $'...', its line ends."""
  split = 'while IFS= read -r x; do eval "w=($x)"; printf "%s\\0" "${w[@]}"; printf "\\1\\0"; done'
  done = subprocess.run(
    ["bash", "-c", split], input=lines, capture_output=True, text=True, check=True, timeout=300
  )
  return [line.split("\0")[:-1] for line in done.stdout.split("\1\0")[:-1]]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_clean_for_bash_and_shellcheck(name):
  subprocess.run(["bash", "-n", LAUNCH / name], check=True, timeout=300)
  shellcheck = Path(sys.executable).with_name("shellcheck")
  done = subprocess.run(
    [shellcheck, "-s", "bash", LAUNCH / name], capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stdout
  assert len((LAUNCH / name).read_text().splitlines()) <= 80  # a screen


@pytest.mark.parametrize("name", ["gpu.sh", "slurm.sbatch", "build.sbatch", "tpu_pod.sh"])
def test_a_dry_run_may_be_asked_for_at_any_place(launch, name):
  args = ["16", *ARGS] if name == "build.sbatch" else [*ARGS, "--workdir=run"]
  first, last = (
    call(launch / name, *words, **TPU, PATH="/usr/bin:/bin")
    for words in (["--dry-run", *args], [*args, "--dry-run"])
  )
  assert (last.returncode, last.stdout, last.stderr) == (0, first.stdout, first.stderr)


def test_a_slurm_job_is_one_srun_that_queues_itself_again(launch):
  args = [*ARGS, "--workdir=run"]

  def asked(**environment) -> str:
    job, again = dry_run(launch / "slurm.sbatch", *args, **environment)
    assert again == ["scontrol", "requeue", "JOB"]
    assert job[:2] == ["srun", "--kill-on-bad-exit=1"]
    assert job[3:] == ["-m", "electra_jax.train", *args]
    return job[2]

  assert asked() == "python"  # of the environment that is active
  write_program(launch / ".venv" / "bin" / "python", "")
  assert asked() == ".venv/bin/python"
  assert asked(PYTHON="/e/bin/python") == "/e/bin/python"
  done = call(launch / "slurm.sbatch", *ARGS, "--workdir", "run")  # else it could not count starts
  assert done.returncode != 0 and "give --workdir=DIR" in done.stderr


def test_a_job_of_an_array_begins_with_its_share_of_an_experiment(launch, tmp_path):
  write_program(tmp_path / "python", 'echo "$@"')
  array = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_COUNT": "3"}
  args = ["mine.py", "--out=runs/mine"]
  done = call(launch / "experiment.sbatch", *args, PYTHON=str(tmp_path / "python"), **array)
  assert done.stdout == "-m electra_jax experiment mine.py --out=runs/mine --part=1/3\n"
  strided = array | {"SLURM_ARRAY_TASK_ID": "8", "SLURM_ARRAY_TASK_STEP": "2"}
  again = call(launch / "experiment.sbatch", *args, PYTHON=str(tmp_path / "python"), **strided)
  assert again.stdout.endswith(" --part=2/3\n")
  assert "--array=0-N" in call(launch / "experiment.sbatch", *args).stderr


@pytest.mark.parametrize(
  "gpus, visible", [("1", "0 cuda"), ("h100:8", "0,1,2,3,4,5,6,7 cuda"), ("", " ")]
)
def test_a_slurm_task_takes_the_gpus_and_cores_that_slurm_gives_it(launch, tmp_path, gpus, visible):
  shown = "${JAX_LOCAL_DEVICE_IDS-} ${JAX_PLATFORMS-} $SRUN_CPUS_PER_TASK"
  given = programs(tmp_path, srun=f'echo "{shown}"')
  given |= {"SLURM_GPUS_PER_TASK": gpus, "SLURM_CPUS_PER_TASK": "8", "JAX_PLATFORMS": ""}
  done = call(launch / "slurm.sbatch", *ARGS, "--workdir=run", **given)
  assert done.stdout == f"{visible} 8\n"


def test_a_missing_accelerator_is_an_error_of_one_line(tmp_path):
  args = ["--config=configs/quickstart.py", f"--workdir={tmp_path}", "--config.data.dir=nowhere"]
  done = subprocess.run(
    [sys.executable, "-m", "electra_jax.train", *args],
    capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "abacus"},
    timeout=300,
)  # fmt: skip
  assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
  assert "error: JAX finds no device for JAX_PLATFORMS=abacus" in done.stderr


@pytest.mark.parametrize("code", [0, 1, 134, 137, 138, 143])
def test_a_slurm_job_is_queued_again_only_after_a_stop_that_slurm_asks_for(launch, tmp_path, code):
  given = programs(tmp_path, srun=f"exit {code}", scontrol='echo "$@"')
  args = [*ARGS, f"--workdir={tmp_path / 'run'}"]
  done = call(launch / "slurm.sbatch", *args, **given, SLURM_JOB_ID="7")
  assert (done.returncode, done.stdout) == (code, "requeue 7\n" if code in (138, 143) else "")


def test_a_slurm_job_gives_up_after_three_starts_without_a_new_checkpoint(launch, tmp_path):
  workdir = tmp_path / "run"
  link_checkpoints(tmp_path, workdir)
  run = f'mkdir -p "{workdir}/checkpoints/$SAVES"; exit 143'
  given = programs(tmp_path, srun=run, scontrol="echo again")

  def start(number: int, saves: str = "5.orbax-checkpoint-tmp"):
    given.update(SLURM_RESTART_COUNT=str(number), SAVES=saves)
    return call(launch / "slurm.sbatch", f"--workdir={workdir}/", **given).stdout == "again\n"

  assert [start(0), start(1), start(2)] == [True, True, False]
  assert os.listdir(workdir) == ["checkpoints"]  # the count is beside it
  assert start(0)  # submitted anew
  assert [start(1), start(2, "9"), start(3, "10"), start(4), start(5)] == [True] * 5
  assert not start(6)


def test_a_gpu_node_installs_once_and_trains_in_a_session_of_its_own(launch, tmp_path):
  args = [*ARGS, "--workdir=runs/large"]
  make, install, itself, train = dry_run(launch / "gpu.sh", *args)
  assert make == ["python3", "-m", "venv", f"{tmp_path}/.venv"]  # called from another folder
  assert install[-3:] == [
    "--require-hashes", "--requirement", f"{tmp_path}/requirements-gpu.lock"
  ]  # fmt: skip
  assert itself[-4:] == ["--no-deps", "--no-build-isolation", "--editable", str(tmp_path)]
  assert train[:4] == ["nohup", "setsid", "bash", "-c"]
  assert train[6:] == [f"{tmp_path}/.venv/bin/python", "-m", "electra_jax.train", *args]
  assert "give --workdir=DIR" in call(launch / "gpu.sh", *ARGS).stderr
  (alone,) = dry_run(launch / "gpu.sh", *args, PYTHON="/e/bin/python")
  *_, home = dry_run(launch / "gpu.sh", *ARGS, "--workdir=~/run", HOME="/h")
  assert home[home.index("-c") + 2] == "/h/run"  # where train keeps its checkpoints
  assert alone[6:] == ["/e/bin/python", "-m", "electra_jax.train", *args]


def test_the_command_that_ends_a_run_on_a_gpu_node_leaves_others_alone(launch):
  (pattern,) = re.findall(r"pkill -f -- '(.*)'", (launch / "gpu.sh").read_text())
  pattern = pattern.replace("DIR", "runs/a")
  for line in ("--workdir=runs/a", "--workdir=runs/a/ --config=b.py", "--workdir=runs/a -x"):
    assert re.search(pattern, f"python -m electra_jax.train {line}")
  for line in ("--workdir=runs/a2", "--workdir=runs/a/b", "--workdir=my/runs/a"):
    assert not re.search(pattern, f"python -m electra_jax.train {line}")


def test_a_gpu_node_goes_on_after_a_kill_and_ends_after_an_error(launch, tmp_path):
  write_program(
    tmp_path / ".venv" / "bin" / "python",
    'if [ "$1" = -c ]; then exit; fi; echo "$@" >> calls\n'
    "if [ $(wc -l < calls) = 1 ]; then kill -9 $$; fi; exit 1",
  )
  args = [*ARGS, f"--workdir={tmp_path / 'run'}/"]  # as completed by a shell
  assert call(launch / "gpu.sh", *args, **programs(tmp_path, sleep="")).returncode == 1
  called = (tmp_path / "launch" / "calls").read_text().splitlines()
  assert called == [" ".join(["-m", "electra_jax.train", *args])] * 2
  assert "killed (137)" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize(("saves", "starts"), [("", 3), ("2 3", 6)])
def test_a_gpu_node_gives_up_after_three_starts_without_a_new_checkpoint(
  launch, tmp_path, saves, starts
):
  run = tmp_path / "run"
  link_checkpoints(tmp_path, run)
  write_program(
    tmp_path / ".venv" / "bin" / "python",
    f'if [ "$1" = -c ]; then exit; fi; echo >> calls; n=$(wc -l < calls)\n'
    f'case " {saves} " in *" $n "*) mkdir -p {run}/checkpoints/$n ;; esac\n'
    f"mkdir -p {run}/checkpoints/$n.orbax-checkpoint-tmp\n"
    "if [ $n = 9 ]; then exit 1; fi; kill -9 $$",
  )
  done = call(launch / "gpu.sh", *ARGS, f"--workdir={run}/", **programs(tmp_path, sleep=""))
  assert done.returncode == 137
  assert len((tmp_path / "launch" / "calls").read_text().splitlines()) == starts
  last = (tmp_path / "run.log").read_text().splitlines()[-1]
  assert last == "error: three starts without a new checkpoint, killed (137)"


@pytest.mark.parametrize("installs", [True, False])
def test_a_gpu_node_whose_jax_sees_no_gpu_installs_it_and_never_trains_on_the_cpu(
  launch, tmp_path, installs
):
  see = "test -e installed" if installs else "false"
  write_program(
    tmp_path / ".venv" / "bin" / "python",
    f"case $1$2 in -c*) {see} ;; -mpip) touch installed ;; *) echo trained; exit 1 ;; esac",
  )
  done = call(launch / "gpu.sh", *ARGS, f"--workdir={tmp_path / 'run'}")
  assert done.returncode == 1 and (tmp_path / "launch" / "installed").exists()
  assert ("trained" in done.stdout) == installs
  assert ("error: JAX sees no GPU" in done.stderr) != installs


def link_checkpoints(folder: Path, workdir: Path) -> None:
  """Makes the checkpoints of a run a link, as to a larger disk."""
  (folder / "scratch").mkdir()
  workdir.mkdir()
  (workdir / "checkpoints").symlink_to(folder / "scratch")


def verbs(commands: list[list[str]]) -> list[str]:
  """Returns what each command does, in a word or two."""
  steps = []
  for command in commands:
    if command[0] != "gcloud":
      steps.append(command[0])
    elif "ssh" in command:
      what = next(x for x in command if x.startswith("--command="))
      kind = "install" if "uv pip" in what else "begin" if "nohup" in what else "watch"
      worker = next(x for x in command if x.startswith("--worker=")).removeprefix("--worker=")
      steps.append(f"{kind} {worker}")
    else:
      steps.append(command[4])
  return steps


def test_a_tpu_slice_is_made_filled_started_watched_and_deleted(launch):
  commands = dry_run(launch / "tpu_pod.sh", *ARGS, **TPU)
  assert verbs(commands) == [
    "describe", "create", "sleep", "describe",
    "git", "scp", "install all", "begin all", "watch 0", "delete",
  ]  # fmt: skip
  assert commands[1] == [
    *"gcloud compute tpus queued-resources create large --zone=us-east5-a --node-id=large".split(),
    "--accelerator-type=v5litepod-64", "--runtime-version=v2-alpha-tpuv5-lite", "--spot",
  ]  # fmt: skip
  install, begin = (c[-1].removeprefix("--command=") for c in commands[6:8])
  assert (
    "--no-config --require-hashes --requirement requirements-tpu.lock" in install
    and install.startswith("BUCKET=ours\n")
  )
  assert "--workdir=gs://ours/runs/large" in begin
  assert "--config.data.sources=text:a\\ b" in begin
  for text in (install, begin, commands[8][-1].removeprefix("--command=")):
    subprocess.run(["bash", "-n", "-c", text], check=True, timeout=300)
  reserved = dry_run(launch / "tpu_pod.sh", *ARGS, **TPU, SPOT="")
  assert reserved[1] == commands[1][:-1]
  assert "is not one of" in call(launch / "tpu_pod.sh", **{**TPU, "TYPE": "h100-8"}).stderr
  assert "ZONE" in call(launch / "tpu_pod.sh", **{**TPU, "ZONE": ""}).stderr


def on_a_slice(launch, folder, states: list[str], ends: list[str], broken: str = "never"):
  """Trains with a `gcloud` that answers with the next state, and the next end of a watch.

  It does not know of a slice where the state is "", and fails where it is "?", and where a command
  has the word `broken`. Returns the process and what it asked for but `describe`.
  """
  (folder / "calls").unlink(missing_ok=True)
  (folder / "states").write_text("".join(f"{x}\n" for x in states))
  (folder / "ends").write_text("".join(f"{x}\n" for x in ends))
  next_line = 'head -n 1 "$1"; sed -i 1d "$1"'
  gcloud = f"""printf '%q ' gcloud "$@" >> {folder}/calls; echo >> {folder}/calls
    case "$*" in
      *" {broken} "*) echo UNAVAILABLE >&2; exit 1 ;;
      *" describe "*)
        state=$(next {folder}/states)
        case $state in
          "") echo "ERROR: NOT_FOUND: Resource was not found" >&2; exit 1 ;;
          "?") echo "ERROR: UNAVAILABLE" >&2; exit 1 ;;
          *) echo $state ;;
        esac ;;
      *--worker=0*) echo step 1; next {folder}/ends ;;
    esac"""
  cloud = programs(folder, next=next_line, gcloud=gcloud, git="", sleep="")
  done = call(launch / "tpu_pod.sh", *ARGS, **TPU, **cloud)
  asked = verbs(words((folder / "calls").read_text()))
  return done, [verb for verb in asked if verb != "describe"]


def test_a_lost_slice_is_made_anew_until_the_run_is_done(launch, tmp_path):
  states = ["", "PROVISIONING", "ACTIVE", "SUSPENDED", "", "ACTIVE", "ACTIVE"]
  done, asked = on_a_slice(launch, tmp_path, states, ["", "exited with 143", "exited with 0"])
  assert done.returncode == 0, done.stderr
  life = ["scp", "install all", "begin all", "watch 0"]
  assert asked == ["create", *life, "delete", "create", *life, *life, "delete"]
  assert (tmp_path / "runs" / "large.log").read_text().count("step 1") == 3


def test_a_slice_that_cannot_be_asked_for_is_not_made_twice(launch, tmp_path):
  states = ["ACTIVE", "?", "?", "ACTIVE"]
  done, asked = on_a_slice(launch, tmp_path, states, ["", "exited with 0"])
  assert done.returncode == 0 and "UNAVAILABLE" in done.stderr and "create" not in asked


def test_a_slice_where_nothing_starts_is_deleted_after_three_times(launch, tmp_path):
  done, asked = on_a_slice(launch, tmp_path, ["", *3 * ["ACTIVE"]], [], broken="scp")
  assert done.returncode == 1 and "3 of 3 failures in a row" in done.stderr
  assert asked == ["create", "scp", "scp", "scp", "delete"]


def test_a_slice_that_cannot_be_created_or_deleted_is_an_error(launch, tmp_path):
  assert on_a_slice(launch, tmp_path, [""], [], broken="create")[0].returncode == 1
  done, _ = on_a_slice(launch, tmp_path, ["ACTIVE"], ["exited with 0"], broken="delete")
  assert done.returncode == 1 and "could not be deleted and is still billed" in done.stderr
  done, _ = on_a_slice(launch, tmp_path, ["FAILED"] * 9, [])
  assert done.returncode == 1 and done.stderr.count("large: FAILED") == 3


def test_a_slice_is_deleted_after_three_starts_without_a_new_checkpoint(launch, tmp_path):
  place = "gs://ours/runs/large/checkpoints"
  ends = [f"exited with {x}" for x in ("134", f"134 {place}/9", f"134 {place}/10")]
  ends += ["", *4 * [ends[-1]]]  # lost once, which does not count
  done, asked = on_a_slice(launch, tmp_path, 20 * ["ACTIVE"], ends)
  assert done.returncode == 1 and "no new checkpoint, 3 of 3 failures in a row (134)" in done.stderr
  assert asked.count("watch 0") == 7 and asked[-1] == "delete"


def test_the_end_of_a_run_on_a_slice_is_reported_with_its_newest_checkpoint(launch, tmp_path):
  watch = dry_run(launch / "tpu_pod.sh", *ARGS, **TPU)[8][-1].removeprefix("--command=")
  place = "gs://ours/runs/large/checkpoints"
  lists = f'[ "$*" = "storage ls {place}/*/commit_success.txt" ] && printf "%s\\n" '
  lists += " ".join(f"{place}/{step}/commit_success.txt" for step in (10, 9))
  (tmp_path / "electra_jax").mkdir()
  (tmp_path / "electra_jax" / "exit").write_text("134\n")
  home = {**os.environ, "HOME": str(tmp_path), **programs(tmp_path, gcloud=lists)}
  done = subprocess.run(
    ["bash", "-c", watch],
    capture_output=True,
    text=True,
    env=home,
    cwd=tmp_path,
    check=True,
    timeout=300,
  )
  assert done.stdout == f"exited with 134 {place}/10/commit_success.txt\n"


def test_a_worker_gets_every_argument_as_it_was_given(launch, tmp_path):
  args = ["--config.eval.pairs=/x y/it's.jsonl", '--config.data.dir=$a"b', "--c=\\\n;"]
  for given in (args, []):
    commands = dry_run(launch / "tpu_pod.sh", *given, **TPU)
    begin = commands[7][-1].removeprefix("--command=")
    folder = tmp_path / f"home{len(given)}" / "electra_jax"
    write_program(folder / ".venv" / "bin" / "python", """printf '%s\\0' "$@"; exit 3""")
    home = {**os.environ, "HOME": str(folder.parent)}
    subprocess.run(
      ["bash", "-c", f"{begin}; wait"], env=home, cwd=folder.parent, check=True, timeout=300
    )
    got = (folder / "train.log").read_text().split("\0")[:-1]
    places = ("--workdir=gs://ours/runs/large", f"--config.data.dir={folder.parent}/shards")
    assert got == ["-m", "electra_jax.train", *places, *given]
    assert (folder / "exit").read_text() == "3\n"


def test_a_run_that_fails_ends_the_slice_and_the_script(launch, tmp_path):
  done, asked = on_a_slice(launch, tmp_path, ["ACTIVE"], ["exited with 1"])
  assert done.returncode == 1 and asked[-1] == "delete"


def test_a_build_is_two_arrays_of_one_job_a_part(launch, tmp_path):
  done = call(launch / "build.sbatch", "--dry-run", "16", *ARGS, OPTIONS="--time=1:00")
  script, array = str(launch / "build.sbatch"), "--array=0-15"
  first = ["sbatch", "--parsable", "--time=1:00", array, script, *ARGS]
  second = [*first[:4], "--dependency=afterok:JOB", *first[4:]]
  assert done.returncode == 0 and words(done.stderr) == [first, second]
  write_program(tmp_path / "python", 'echo "$@"')
  given = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "16"}
  done = call(launch / "build.sbatch", *ARGS, PYTHON=str(tmp_path / "python"), **given)
  assert done.stdout.split()[:3] == ["-m", "electra_jax.data.build", "--part=3/16"]
  done = call(launch / "build.sbatch", "--dry-run", "08", *ARGS)
  assert done.returncode == 0 and words(done.stderr)[0][2] == "--array=0-7"
  for wrong in ([], ["0"], ["-1"]):
    done = call(launch / "build.sbatch", *wrong, *ARGS)
    assert done.returncode == 1 and done.stderr == "error: give the number of parts first\n"
