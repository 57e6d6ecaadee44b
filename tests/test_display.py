"""What a run shows: on a terminal of any size, and as lines where there is none."""

import io
import math
import re
import time

import pytest
from rich.console import Console

from electra_jax.monitor import display, journal
from electra_jax.monitor.baselines import Baselines
from electra_jax.monitor.display import Activity, Display
from electra_jax.runtime import terminal

VALUES = dict(mlm_loss=6.5, rtd_recall=0.25, tokens_per_sec=1234.0, eta_secs=75.0, z=1e-4)
MANY = {f"metric_{i}_loss": 1.0 for i in range(40)} | VALUES


def without_codes(text: str) -> str:
  """Returns what can be read of a terminal's input."""
  return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r", "", text)


def taken(out: io.StringIO) -> str:
  """Returns what has been written since it was last taken."""
  text = out.getvalue()
  out.truncate(0)
  out.seek(0)
  return text


def plain(width: int = 80) -> tuple[Display, io.StringIO]:
  """Returns a display without a terminal, and its output."""
  out = io.StringIO()
  return Display(Console(file=out, width=width), Activity), out


@pytest.fixture
def screen(monkeypatch):
  """Returns a function from a size to a display that shows much, and its output."""
  monkeypatch.setenv("TERM", "xterm")  # a dumb one has no cursor to move
  monkeypatch.setattr(display, "TICK_SECS", 1e6)  # it draws when it is told to

  def make(width: int, height: int, activity=None) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True)
    shown = Display(console, lambda: activity or Activity())
    shown.begin(0, 1_000_000)
    shown.advance(123_456)
    shown.show(123_400, "heldout", {"mlm_loss": 6.0})
    shown.show(123_456, "train", MANY)
    return shown, out

  return make


def last_frame(shown: Display, out: io.StringIO) -> list[str]:
  """Draws and returns the lines that stand below everything else."""
  taken(out)
  shown._draw()
  return without_codes(out.getvalue()).split("\n")


def test_lines_say_their_units_and_new_terms_appear_by_themselves():
  shown, out = plain(width=300)
  shown.begin(0, 100)
  shown.show(10, "train", VALUES)
  assert out.getvalue() == (
    "train step 10/100 | mlm loss 6.5000 nats | rtd recall 25.0 % | tokens 1,234/s | ETA 0:01:15"
    " | z 1.00e-04\n"
  )


def test_without_a_terminal_lines_have_a_time_and_at_most_160_characters(capsys):
  console = terminal.log_console()
  shown = Display(console, Activity)
  shown.begin(0, 1_000_000)
  shown.show(123_456, "train", MANY)
  console.print("a\nb")
  line, a, b = capsys.readouterr().out.splitlines()
  stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
  assert re.match(stamp + r"train step 123456/1000000 \| metric 0 loss 1.0000 nats \| ", line)
  assert line.endswith("| tokens 1,234/s | ETA 0:01:15") and 130 < len(line) <= 160
  assert re.fullmatch(stamp + "a", a) and re.fullmatch(stamp + "b", b)


@pytest.mark.parametrize("make", [terminal.console, terminal.log_console])
def test_a_path_with_brackets_is_printed_as_it_is(make, capsys):
  make().print("resume with: train --workdir='x/run[lr=3e-4]'", style="bold")
  assert capsys.readouterr().out.endswith("resume with: train --workdir='x/run[lr=3e-4]'\n")


def test_a_file_gets_no_live_display_also_where_colors_are_forced(monkeypatch):
  monkeypatch.setenv("FORCE_COLOR", "1")
  monkeypatch.setenv("TERM", "xterm")
  assert not terminal.console().is_interactive
  assert not terminal.console(stderr=True).is_interactive
  assert not terminal.log_console().is_interactive


def test_a_log_that_cannot_be_written_is_left_out(monkeypatch):
  monkeypatch.setattr(terminal.StampedLines, "failed", False)
  with open("/dev/full", "w", encoding="utf-8") as full:
    monkeypatch.setattr(terminal.sys, "stdout", full)
    with Display(terminal.log_console(), Activity) as shown:
      shown.begin(0, 100)
      shown.show(10, "train", VALUES)
      shown.print_line("warning")
    assert terminal.StampedLines.failed
    with pytest.raises(OSError):
      full.close()


def test_a_terminal_gets_a_bar_and_is_left_whole(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  out = io.StringIO()
  shown = Display(Console(file=out, width=80, height=30, force_terminal=True), Activity)
  with pytest.raises(KeyError), shown:
    shown.begin(0, 100)
    shown.advance(40)
    shown.show(40, "heldout", {"mlm_loss": 6.0})
    shown.show(40, "train", VALUES)
    raise KeyError
  text = without_codes(out.getvalue())
  for part in ("40/100", "ETA 0:01:1", "6.5000 nats"):
    assert part in text
  assert re.search(r"^step +train 40 +heldout 40 +trivial baseline$", text, re.M)
  assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_the_live_table_has_the_trivial_baseline_beside_each_number(screen):
  shown, out = screen(100, 90)
  shown.baselines = Baselines(entropy=6.0, most_frequent=0.1, masked=0.85)
  shown.show(123_456, "train", {"mlm_loss": 5.5, "mlm_accuracy": 0.2, "rtd_auc": 0.7, "z": 1.0})
  with shown:
    lines = last_frame(shown, out)
  table = {line.split("  ")[0]: line.split()[-2:] for line in lines}
  assert table["mlm loss"] == ["5.1000", "nats"] and table["mlm accuracy"][1] != "0.2"
  assert table["rtd auc"] == ["0.7", "0.5"] and table["z"][-1] == "1"


@pytest.mark.parametrize("size", [(60, 15), (120, 40), (60, 6), (60, 3)])
def test_the_bar_and_the_eta_stay_where_the_table_has_no_room(screen, size):
  shown, out = screen(*size, Activity("evaluating", 70.0, 30.0))
  with shown:
    lines = last_frame(shown, out)
  assert len(lines) < size[1] and max(map(len, lines)) < size[0]
  assert re.search(r"━ +123456/1000000 steps .*ETA 0:01:1\d$", lines[-1])
  assert lines[-2].startswith("evaluating, 0:01:10 (30 s the last time)")
  assert len(lines) == min(size[1] - 1, 2 + 1 + len(MANY) - 1) or size[1] == 3  # ETA is in the bar


@pytest.mark.parametrize("sizes", [[(120, 40), (60, 15)], [(60, 15), (120, 40), (50, 10)]])
def test_a_resized_terminal_is_cleared_of_what_it_has_broken_into_more_lines(screen, sizes):
  shown, out = screen(*sizes[0])
  with shown:
    lines = last_frame(shown, out)
    for width, height in sizes[1:]:
      shown.console.size = width, height
      rows = sum(math.ceil(len(line) / width) for line in lines)
      lines = last_frame(shown, out)
      ups = out.getvalue().split("━")[0].count("\x1b[1A")
      assert ups == rows - 1  # from the last line to the first


def test_lines_that_scrolled_out_of_sight_are_cleared_when_they_come_back(screen):
  shown, out = screen(60, 40)
  with shown:
    tall = last_frame(shown, out)
    shown.console.size = 60, 15
    low = last_frame(shown, out)
    shown.console.size = 60, 40
    last_frame(shown, out)
    hidden = len(tall) - 15
    assert out.getvalue().split("━")[0].count("\x1b[1A") == len(low) - 1 + hidden
    # What is printed stands between, and is not cleared.
    shown.console.size = 60, 15
    last_frame(shown, out)
    shown.console.print("warning")
    drawn = last_frame(shown, out)
    shown.console.size = 60, 40
    last_frame(shown, out)
    assert out.getvalue().split("━")[0].count("\x1b[1A") == len(drawn) - 1


def test_waiting_lines_come_at_5_10_20_40_s_and_after_two_lines_of_training_each_minute(
  monkeypatch,
):
  clock, out, activity = [100.0], io.StringIO(), ["reading"]
  monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
  since = [clock[0]]
  now = lambda: Activity(activity[0], clock[0] - since[0], 30.0)  # noqa: E731
  shown = Display(Console(file=out, width=200), now)

  def wait(secs: int, what: str | None) -> list[str]:
    activity[0], since[0] = what, clock[0]
    for _ in range(4 * secs):
      clock[0] += 0.25
      shown._print_heartbeat()
    return taken(out).splitlines()

  told = [
    f"reading, 0:0{secs // 60}:{secs % 60:02} (30 s the last time)"
    for secs in (1, 5, 10, 20, 40, 80)
  ]
  assert wait(90, "reading") == told
  assert wait(3, "compiling") == ["compiling, 0:00:01 (30 s the last time)"]
  shown.begin(0, 9)
  shown.advance(4)
  assert wait(12, None) == ["step 4/9"] * 2
  shown.show(4, "train", {})
  shown.show(4, "heldout", {})
  assert wait(10, None) == ["train step 4/9", "heldout step 4/9", "step 4/9"]
  assert wait(3, "evaluating") == ["evaluating, 0:00:01 (30 s the last time)"]
  assert wait(6, None) == ["step 4/9"]
  shown.show(5, "train", {})
  assert wait(50, None) == ["train step 5/9"]
  assert wait(80, None) == ["step 4/9"] * 2


def test_a_signal_is_answered_at_once(monkeypatch):
  shown, out = plain()
  monkeypatch.setattr(display, "TICK_SECS", 1e-3)
  with shown:
    shown.announce("SIGINT: stopping after this step")
    deadline = time.monotonic() + 60
    while "stopping" not in out.getvalue() and time.monotonic() < deadline:
      time.sleep(1e-3)
  assert out.getvalue() == "SIGINT: stopping after this step\n"


def test_what_a_signal_announced_stands_before_what_is_printed_next():
  shown, out = plain()
  shown.announce("SIGINT: stopping after this step")
  shown.print_line("SIGINT: stopping after step 4")
  told = "SIGINT: stopping after this step\nSIGINT: stopping after step 4\n"
  assert out.getvalue() == told


def test_the_first_estimate_of_the_rest_is_the_bars():
  clock, (shown, _) = [0.0], plain()
  shown.begin(0, 100)
  shown._progress.get_time = lambda: clock[0]
  for step in range(1, 11):
    clock[0] += 2.0
    shown.advance(step)
  assert shown._eta() == "ETA 0:03:00"  # 90 steps of 2 s


def test_the_seconds_before_the_last_first_step_are_kept_and_a_damaged_line_is_none(tmp_path):
  events = journal.Journal(tmp_path)
  for secs in (20.0, 30.25):
    events.write("first step", secs={"compile": secs})
    events.write("goodput", secs={"compile": 99.0})
  with (tmp_path / journal.JOURNAL_FILE).open("a") as file:
    file.write('[1]\n{"time": 1.0}\n{"time": 1.0, "event": "first step"}\n')
    file.write('{"time": 1.0, "event": "goodput", "secs": {"compile": "9"}}\n')
    file.write('{"time": 1.0, "event": "start", "devices": 1}\n{"time": 1.0, "event": "fir')
  events.write("warning", text="after a full disk")
  assert len(journal.read(tmp_path)) == 5
  assert journal.first_step_seconds(journal.read(tmp_path)) == {"compile": 30.25}
  assert journal.first_step_seconds(journal.read(tmp_path / "missing")) == {}
  known = [{"event": "start", "devices": 8}, {"event": "goodput", "secs": {"steps": 9.0}}]
  lost = {"event": "goodput", "secs": {"steps": 3.0}}  # of a start whose line was damaged
  assert journal.starts([*known, lost]) == [(known[0], {"steps": 9.0}), ({}, {"steps": 3.0})]
  journal.Journal(tmp_path / "missing").write("first step", secs={})  # told nobody
