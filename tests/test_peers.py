"""Peers of the benchmarks run in processes of their own, and fail without ending ours."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import peers  # noqa: E402


class Counts:
  """A peer that fails in its third run."""

  def __init__(self, compile_secs: float):
    self.compile_secs, self.runs = compile_secs, 0

  def run(self, steps: int) -> None:
    self.runs += steps
    if self.runs > 2:
      raise MemoryError("no\nmore")


def test_a_peer_that_cannot_start_is_left_out_with_its_reason():
  started = [
    peers.InItsOwnProcess("raises", int, "no number"),
    peers.InItsOwnProcess("dies", os._exit, 3),
    peers.InItsOwnProcess("starts", Counts, 1.5),
  ]
  ready, could_not = peers.wait_for(started)
  peers.stop(ready)
  assert [(peer.name, peer.compile_secs) for peer in ready] == [("starts", 1.5)]
  assert could_not[0].startswith("raises: ValueError: invalid literal for int()")
  assert could_not[1:] == ["dies: its process ended with 3"]


def test_a_peer_that_gives_up_has_no_times_and_the_others_have_all():
  peer, runs = peers.InItsOwnProcess("gives up", Counts, 0.0), []
  peer.wait()
  ours = SimpleNamespace(name="ours", run=runs.append)
  secs, could_not = peers.take_turns([ours, peer], 4 * [(1,)])
  assert runs == [1, 1, 1, 1] and list(secs) == ["ours"] and len(secs["ours"]) == 4
  assert could_not == ["gives up: MemoryError: no more"]
