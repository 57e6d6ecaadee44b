"""The events of a run, for its report: journal.jsonl in its folder.

A line is {"time": seconds since 1970, "event": ..., ...}. Events:
start       step (0 from scratch; not in earlier versions), code, devices, minimal pairs, command
warning     text
diverged    step at which a run stopped at a NaN or infinity; null in an evaluation
horizon     step at which a run with a time limit fixed its steps and decay_steps
first step  seconds of each activity since the start
goodput     the same at evaluations, saves and the end
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

JOURNAL_FILE = "journal.jsonl"
# {event: {field of its lines in all versions: type}}
FIELDS = {
  "start": {"devices": int, "device_kind": str, "jax": str},
  "warning": {"text": str},
  "horizon": {"step": int, "steps": int, "decay_steps": int},
  "first step": {"secs": dict},
  "goodput": {"secs": dict},
}


class Journal:
  """Appends events; ignores write errors."""

  def __init__(self, folder: Path, enabled: bool = True):
    self._path, self._enabled = folder / JOURNAL_FILE, enabled

  def write(self, event: str, **values: Any) -> None:
    """Appends an event with JSON values."""
    if self._enabled:
      line = json.dumps({"time": round(time.time(), 1), "event": event, **values}) + "\n"
      with contextlib.suppress(OSError), self._path.open("a+b") as file:
        if end := file.seek(0, os.SEEK_END):
          file.seek(end - 1)
          if file.read(1) != b"\n":  # a full disk has cut the last line
            line = "\n" + line
        file.write(line.encode())


def read(folder: Path) -> list[dict]:
  """Returns the events of a run, without damaged lines; [] for runs of earlier versions."""
  events = []
  path = folder / JOURNAL_FILE
  for text in path.read_bytes().splitlines() if path.exists() else ():
    with contextlib.suppress(ValueError, RecursionError):
      if isinstance(line := json.loads(text), dict) and _is_whole(line):
        events.append(line)
  return events


def _is_whole(line: dict) -> bool:
  fields = FIELDS.get(str(line.get("event")), {"event": str})
  typed = all(isinstance(line.get(name), kind) for name, kind in fields.items())
  secs = line.get("secs", {})
  numbers = isinstance(secs, dict) and all(isinstance(x, int | float) for x in secs.values())
  return "time" in line and typed and numbers


def starts(events: list[dict]) -> list[tuple[dict, dict[str, float]]]:
  """Returns each "start" event with the seconds by activity of its last "goodput" event.

  >>> lines = [{"event": "goodput", "secs": {"steps": x}} for x in (1.0, 5.0)]
  >>> starts([{"event": "start"}, *lines, {"event": "start"}])
  [({'event': 'start'}, {'steps': 5.0}), ({'event': 'start'}, {})]
  """
  found: list[tuple[dict, dict[str, float]]] = []
  for line in events:
    if line["event"] == "start":
      found.append((line, {}))
    elif line["event"] == "goodput":
      # Seconds grow within a start; if they do not, the line of their start was damaged.
      grew = found and sum(line["secs"].values()) >= sum(found[-1][1].values())
      found.append((found.pop()[0] if grew else {}, line["secs"]))
  return found


def diverged(events: list[dict]) -> bool:
  """Returns whether the newest start of a run ended at a non-finite number.

  >>> diverged([{"event": "start"}, {"event": "diverged"}])
  True
  >>> diverged([{"event": "start"}, {"event": "diverged"}, {"event": "start"}])
  False
  """
  marks = [line["event"] for line in events if line["event"] in ("start", "diverged")]
  return marks[-1:] == ["diverged"]


def seconds(events: list[dict]) -> dict[str, float]:
  """Returns the seconds of each activity, summed over starts."""
  total: dict[str, float] = {}
  for _, secs in starts(events):
    total |= {k: total.get(k, 0.0) + x for k, x in secs.items()}
  return total


def first_step_seconds(events: list[dict]) -> dict[str, float]:
  """Returns the seconds of each activity before the newest "first step"; {} without one."""
  return next((line["secs"] for line in reversed(events) if line["event"] == "first step"), {})
