"""A dry run of the launchers changes nothing, and says what a slice would not get."""

import subprocess

from test_launch import ARGS, TPU, call, launch

__all__ = ["launch"]  # a fixture


def test_a_dry_run_leaves_the_count_of_starts_of_a_queued_job(launch):
  (launch / "run.idle").write_text("two starts\nwithout a checkpoint\n")
  assert call(launch / "slurm.sbatch", "--dry-run", *ARGS, "--workdir=run").returncode == 0
  assert (launch / "run.idle").exists()


def test_changes_that_a_slice_does_not_get_are_named(launch):
  def git(*args) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *author, *args], cwd=launch.parent, check=True, stdout=-3, timeout=300)

  git("init")
  git("add", ".")
  git("commit", "--message=all")
  assert call(launch / "tpu_pod.sh", "--dry-run", *ARGS, **TPU).stderr == ""
  (launch / "gke.yaml").write_text("mine")
  note = "note: the slice gets HEAD, without uncommitted changes\n"
  done = call(launch / "tpu_pod.sh", "--dry-run", *ARGS, **TPU)
  assert (done.returncode, done.stderr) == (0, note)
