"""What gets the lines of a run: trackers by name, and the picture that is drawn anew."""

import contextlib
import io
import os
import sys
import types

import pytest
from conftest import ROOT, python
from rich.console import Console

from electra_jax.commands import cli
from electra_jax.monitor import curves, log, trackers
from electra_jax.monitor.display import Activity, Display
from electra_jax.monitor.thinned import Thinned
from electra_jax.pretrain import train


def test_the_curves_are_drawn_at_evaluations_and_not_too_often(monkeypatch):
  clock, drawn = [100.0], []
  monkeypatch.setattr(curves.time, "monotonic", lambda: clock[0])
  picture = curves.Redrawn(lambda lines: drawn.append((clock[0], len(lines))), Thinned())
  for now, split in ((101, "heldout"), (120, "train"), (121, "heldout"), (140, "heldout")):
    clock[0] = float(now)
    picture.write(1, split, {})
  assert drawn == [(121, 3)]
  clock[0] = 141.0
  picture.write(2, "heldout", {})
  assert drawn == [(121, 3), (141, 5)]


def test_a_tracker_that_is_unknown_or_missing_is_one_line_before_the_start(tiny_config, tmp_path):
  tiny_config.log.trackers = "tensorboard, comet"
  with pytest.raises(ValueError, match="'comet' must be one of tensorboard, wandb, mlflow"):
    train.train(tiny_config, tmp_path / "a")
  for name in ("wandb", "mlflow"):
    tiny_config.log.trackers = name
    with pytest.raises(ValueError, match=f"trackers={name} needs .*'electra_jax.{name}.'$"):
      train.train(tiny_config, tmp_path / "a")
  assert not (tmp_path / "a").exists()


STARTED = """
import pathlib, sys
from electra_jax.monitor import trackers
trackers.Events(trackers.Start(pathlib.Path(sys.argv[1]), 0, False, {})).close(False)
import torch
"""


@pytest.mark.long
def test_tensorboard_starts_without_importing_pytorch(tmp_path):
  (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
  where = os.pathsep.join([str(tmp_path), str(ROOT)])
  done = python("-c", STARTED, tmp_path / "run", env={"PYTHONPATH": where})
  assert done.stderr == "imported\n"  # by the last line, as the event file shows
  assert list(tmp_path.glob("run/tensorboard/events*"))


def test_a_run_has_its_id_in_a_tracker_until_it_starts_over(tmp_path):
  ids = iter("abc")

  def remembered(resumed):
    return trackers.Start(tmp_path, 0, resumed, {}).remembered("wandb", lambda: next(ids))

  assert [remembered(x) for x in (False, True, True, False, True)] == list("aaabb")
  assert trackers.Start(tmp_path, 0, True, {}).remembered("mlflow", lambda: "m") == "m"


@pytest.mark.parametrize("error", [None, OSError("disk full")])
def test_a_run_that_fails_is_a_failed_one_in_its_trackers(error, tmp_path):
  class Tracker:
    def close(self, failed):
      closed.append(failed)

  closed, shown = [], Display(Console(file=io.StringIO()), Activity)
  made = log.Log(tmp_path, shown, start_step=0, resumed=False, others=[Tracker])
  with contextlib.suppress(OSError), contextlib.closing(made):
    if error:
      raise error
  assert closed == [error is not None]


@pytest.mark.parametrize("content", [b"", b'{"wandb": "a', b"3", b"\xff"])
def test_a_damaged_file_of_ids_is_one_line(tmp_path, content):
  (tmp_path / trackers.IDS_FILE).write_bytes(content)
  with pytest.raises(
    trackers.TrackerError, match="trackers.json (is not JSON|holds a JSON).*: delete it to "
  ) as e:
    trackers.Start(tmp_path, 0, True, {}).remembered("wandb", lambda: "b")
  assert cli.explain(e.value) == str(e.value)


def test_wandb_is_left_out_once_its_own_process_has_ended(tmp_path, monkeypatch):
  class Run:
    def log(self, values):
      raise ConnectionResetError("Connection lost")

    finish = define_metric = lambda self, *args, **kwargs: None

  wandb = types.SimpleNamespace(Error=RuntimeError, Settings=dict, init=lambda **kwargs: Run())
  monkeypatch.setitem(sys.modules, "wandb", wandb)
  out = io.StringIO()
  display = Display(Console(file=out, width=200), Activity)
  start = trackers.Start(tmp_path, 0, False, {})
  make = trackers.TRACKERS["wandb"].make
  written = log.Log(tmp_path, display, start_step=0, resumed=False, others=[lambda: make(start)])
  for step in (1, 2):
    written.write(step, "train", {"loss": 1.0})
  written.close()
  assert out.getvalue().count("warning: step 1: wandb: Connection lost; not used again") == 1
  assert "step 2: wandb" not in out.getvalue()
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
