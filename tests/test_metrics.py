"""What a run says: sums, areas under curves, the history file, the display."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from sklearn.metrics import roc_auc_score

from electra_jax.core import contrast, objectives
from electra_jax.monitor import curves, display, goodput, log, metrics, trackers
from electra_jax.monitor.baselines import Baselines
from electra_jax.runtime import parallel


def histogram(scores, labels, bins=32):
  rows = [np.histogram(scores[labels == y], bins, (0, bins))[0] for y in (0, 1)]
  return np.stack(rows)


@pytest.mark.parametrize("separation", [0.0, 0.5, 3.0, -2.0])
def test_auc_of_a_histogram_equals_sklearns_with_ties_at_half(separation):
  rng = np.random.default_rng(0)
  labels = rng.random(5000) < 0.1
  scores = np.clip(np.floor(rng.normal(16 + separation * labels, 2)), 0, 31)  # many ties
  expected = pytest.approx(roc_auc_score(labels, scores), 1e-12)
  assert metrics.auc(histogram(scores, labels)) == expected


def test_auc_without_both_classes_is_none():
  assert metrics.auc(np.array([[1, 2], [0, 0]])) is None
  assert metrics.auc(np.array([[0, 0], [1, 2]])) is None


def step_metrics(total, count, loss=1.0, lr=0.5):
  f = jnp.float32
  scores = jnp.array([[2.0, 0.0], [1.0, 1.0]])
  terms = {"x_loss": (f(total), f(count)), "x_scores": (scores, f(1)), "y": (f(3), f(0))}
  scalars = {"loss": f(loss), "learning_rate": f(lr), "param_norm": f(10 * lr)}
  return parallel.pack({"terms": terms, **scalars})


def test_a_window_divides_sums_and_never_averages_averages():
  window = metrics.Window()
  window.add(1, step_metrics(10, 1, loss=1, lr=0.1))
  window.add(2, step_metrics(10, 9, loss=3, lr=0.2))
  values = window.close()
  assert values["x_loss"] == 2.0  # 20 / 10, where the mean of the means is 5.6
  assert values["x_auc"] == 0.75
  assert values["y"] is None  # nothing was counted
  assert values["loss"] == 2.0
  assert values["learning_rate"] == pytest.approx(0.2)  # of the last step
  assert values["param_norm"] == pytest.approx(2.0)  # too


def test_an_interrupted_window_gives_the_same_numbers_bit_for_bit():
  steps = np.random.default_rng(1).random((20, 3), np.float32) / 3
  whole = metrics.Window()
  for i, (a, b, c) in enumerate(steps):
    whole.add(i + 1, step_metrics(a, b, c))
  lines = []
  for k in (1, 7, 19):
    window = metrics.Window()
    for i, (a, b, c) in enumerate(steps):
      if i == k:
        window = metrics.Window(json.loads(json.dumps(window.state_dict())))
      window.add(i + 1, step_metrics(a, b, c))
    lines.append(window.close())
  assert lines == [whole.close()] * 3


def test_a_window_counts_beyond_float32():
  window = metrics.Window()
  for _ in range(3):
    window.add(1, step_metrics(2.0**24 + 2, 2.0**24))
  assert window.close()["x_loss"] == 1 + 2.0**-23  # 3 x 2^24 + 6 is no float32


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_nan_and_infinity_stop_with_the_step_and_the_term(bad):
  window = metrics.Window()
  window.add(6, step_metrics(1, 1))
  window.add(7, step_metrics(bad, 1))
  with pytest.raises(metrics.NotFiniteError, match=rf"^step 7: x_loss = {float(bad)}$"):
    window.drain()


def test_a_window_lets_the_device_stay_ahead_but_not_far(monkeypatch):
  read = []
  monkeypatch.setattr(metrics, "check_finite", lambda where, *_: read.append(where))
  window = metrics.Window(ahead=2)
  for step in range(1, 6):
    window.add(step, step_metrics(1, 1))
  assert read == ["step 1", "step 2", "step 3"]


def test_a_window_restored_under_another_objective_starts_anew():
  window = metrics.Window({"sum": [7.0, 7.0], "steps": 3})
  window.add(4, step_metrics(10, 5, loss=2))
  values = window.close()
  assert values["x_loss"] == 2.0 and values["loss"] == 2.0


def test_an_evaluation_is_one_sum_over_all_batches():
  batches = [jnp.array([1.0]), jnp.array([2.0, 3.0, 4.0])]

  def total_and_count(p, b):
    return parallel.pack({"m": (p * b.sum(), jnp.float32(b.size))})

  def nan(p, b):
    return parallel.pack({"m": (p * jnp.nan, p)})

  values = metrics.evaluate(jax.jit(total_and_count), jnp.float32(2), batches, 7)
  assert values == {"m": 5.0}  # 2 x 10 / 4
  with pytest.raises(metrics.NotFiniteError, match=r"^evaluation after step 7: m = nan$"):
    metrics.evaluate(nan, jnp.float32(2), batches, 7)


def test_a_resumed_history_drops_later_lines_and_a_cut_off_one(tmp_path):
  path = tmp_path / "metrics.jsonl"
  history = log.History(path, None)
  for step in (10, 20, 30):
    history.write(step, "train", {"x": step / 3})
  history.close(failed=False)
  with path.open("a") as file:
    file.write('{"step": 4')
  history = log.History(path, 20)
  history.write(30, "train", {"x": None})
  history.close(failed=False)
  found = {x["step"]: x["x"] for x in metrics.read_history(path)}
  assert list(found.items()) == [(10, 10 / 3), (20, 20 / 3), (30, None)]
  log.History(path, None).close(failed=False)
  assert metrics.read_history(path) == []


def events(folder, step):
  start = trackers.Start(folder, step, resumed=step > 0, config={})
  return lambda: trackers.TRACKERS["tensorboard"].make(start)


def test_event_files_hold_what_the_history_holds(tmp_path):
  shown = display.Display(Console(file=io.StringIO()), display.Activity)
  lines = log.Log(tmp_path, shown, start_step=0, resumed=False, others=[events(tmp_path, 0)])
  lines.write(5, "train", {"x_loss": 1.5, "nothing": None})
  lines.close()
  assert metrics.read_history(tmp_path / "metrics.jsonl") == [
    {"step": 5, "split": "train", "x_loss": 1.5, "nothing": None}
  ]
  data = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
  assert b"train/x_loss" in data and b"nothing" not in data


def test_curves_have_a_panel_for_every_metric_and_are_a_picture(tmp_path):
  values = {"loss": 9.0, "rtd_auc": 0.5, "rtd_recall": None, "mlm_accuracy": 0.1}
  values |= {"grad_norm": 1.0, "new": 2.0, "tokens_per_sec": 5.0}
  history = [
    {"step": s, "split": split, "mlm_loss": 8.0 / s} | values
    for s in (1, 2, 3)
    for split in ("train", "heldout")
  ]
  assert curves.layout(history) == {
    "loss": ["loss"],
    "mlm loss": ["mlm_loss"],
    "rtd": ["rtd_auc", "rtd_recall"],
    "mlm accuracy": ["mlm_accuracy"],
    "grad norm": ["grad_norm"],
    "new": ["new"],
  }
  curves.draw(tmp_path / "curves.png", "seed 1, $x", history, Baselines(entropy=5.0))
  assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
  assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]
  curves.draw(tmp_path / "none.png", "", [], Baselines())
  assert not (tmp_path / "none.png").exists()


def dashed(history, names, chance) -> dict[str, list]:
  """Returns the values of the dashed lines of a panel, by their labels."""
  from matplotlib.figure import Figure

  axis = Figure().subplots()
  curves._panel(axis, "title", names, history, chance)
  return {
    line.get_label(): list(line.get_ydata()) for line in axis.lines if line.get_linestyle() == "--"
  }


def test_trivial_baselines_are_those_of_the_counts_and_of_equal_views():
  found = Baselines.of([0, 2, 6], group=4)
  assert found.entropy == pytest.approx(0.25 * np.log(4) + 0.75 * np.log(4 / 3))
  assert found.most_frequent == 0.75
  views = jnp.ones((8, 6))  # where all views are equal, each of the others is as likely
  term = contrast.contrast_terms(views, views, jnp.ones(8, bool), 4, 1.0)["contrast_loss"]
  for chance in (found, Baselines.of([], group=4)):  # with and without held-out text
    _, level = chance.level("contrast_loss", {})
    assert level == pytest.approx(float(term.total / term.count), rel=1e-6)


@pytest.mark.parametrize(
  ("name", "line", "right"),
  [
    ("corrective", {"corrective_accuracy": 0.1, "sampled_accuracy": 0.4, "replaced": 0.2}, 0.4),
    ("all_tokens", {"replaced": 0.2}, 0.8),
  ],
)
def test_the_baseline_of_a_loss_with_copies_is_that_of_a_constant_gate(name, line, right):
  counts = np.arange(1, 4001)
  p, gate = counts / counts.sum(), np.log(0.8 / 0.2)  # copies with the share of the original tokens
  loss = [float(p @ objectives.copy_nll(gate, -np.log(p), same)) for same in (True, False)]
  name, known = f"{name}_loss", Baselines.of(counts, 1)
  _, level = known.level(name, {name: 3.0, **line})
  expected = right * loss[0] + (1 - right) * loss[1]
  assert 0 <= level - expected <= 0.2 * (p @ p) + 1e-5  # float32
  # Unknown before a token is replaced, and without held-out text.
  assert known.level(name, {name: 3.0, "replaced": 0.0}) is None
  assert Baselines().level(name, {name: 3.0, **line}) is None


def test_each_panel_has_the_level_of_knowing_nothing_as_a_dashed_line():
  lines = [{"mlm_loss": 8.0, "mlm_accuracy": 0.1, "pairs_accuracy": 0.6, "contrast_loss": 1.0}]
  lines.append({"mlm_loss": 7.0, "mlm_accuracy": None, "rtd_loss": 0.4, "rtd_auc": 0.6})
  # Of 100 tokens 20 are replaced; 15 are called so, 10 of them rightly. Then 10 and none.
  lines[0] |= {"rtd_loss": 0.5, "rtd_accuracy": 0.85, "rtd_recall": 0.5, "rtd_precision": 2 / 3}
  lines[1] |= {"rtd_accuracy": 0.9, "rtd_recall": 0.0, "rtd_precision": None}
  history = [{"step": step, "split": "train"} | line for step, line in enumerate(lines, 1)]
  chance = Baselines(entropy=5.0, most_frequent=0.07, choices=15)
  expected = {
    "mlm_loss": ("held-out unigram entropy", [5.0, 5.0]),
    "mlm_accuracy": ("always the most frequent token", [0.07]),
    "pairs_accuracy": ("chance", [0.5]),
    "rtd_auc": ("chance", [0.5]),
    "contrast_loss": ("any view", [np.log(15)]),
    "rtd_loss": ("entropy of the replaced share", [0.500402, 0.325083]),  # nats, of 0.2 and 0.1
    "rtd_accuracy": ("always the same answer", [0.8, 0.9]),
    "rtd_precision": ("always 'replaced'", [0.2]),
  }
  for name, (label, values) in expected.items():
    ((found, drawn),) = dashed(history, [name], chance).items()
    assert found == f"trivial baseline: {label}", name
    assert drawn == pytest.approx(values, abs=1e-6), name
  # A recall has no such level, and a run without held-out text no entropy.
  assert not any(dashed(history, ["rtd_recall"], chance).values())
  assert not any(dashed(history, ["mlm_loss"], Baselines()).values())


def test_event_files_of_a_resumed_run_hide_what_comes_after_its_step(tmp_path):
  from tensorboardX.proto import event_pb2

  shown = display.Display(Console(file=io.StringIO()), display.Activity)
  log.Log(tmp_path, shown, start_step=7, resumed=True, others=[events(tmp_path, 7)]).close()
  (path,) = (tmp_path / "tensorboard").iterdir()
  data, sessions = path.read_bytes(), []
  while data:  # records: length in 8 bytes, checksum in 4, the event, checksum in 4
    end = 12 + int.from_bytes(data[:8], "little")
    event = event_pb2.Event.FromString(data[12:end])
    data = data[end + 4 :]
    if event.HasField("session_log"):
      sessions.append((event.session_log.status, event.step))
  assert sessions == [(event_pb2.SessionLog.START, 8)]  # the first that is trained again


def test_a_history_ends_before_a_damaged_line_and_has_no_hole(tmp_path):
  path = tmp_path / "metrics.jsonl"
  whole = [{"step": step, "split": "train"} for step in (1, 3)]
  damaged = '{"step": 2\n3\n\n'
  path.write_text(json.dumps(whole[0]) + "\n" + damaged + json.dumps(whole[1]) + '\n{"step": 4, "s')
  assert metrics.read_history(path) == whole


def test_speed_is_that_of_steps_and_data_without_all_else(monkeypatch):
  clock = [100.0]
  monkeypatch.setattr(goodput.time, "monotonic", lambda: clock[0])
  spent = goodput.Goodput()

  def spend(activity, secs):
    with spent.doing(activity):
      clock[0] += secs

  speed = goodput.Speed(spent, batch_size=8, seq_length=16, flops_per_step=300.0, peak=1000.0)
  assert speed.read(0, 9)["mfu"] is None  # there was no step
  spend("data", 20)  # opening it
  spend("compile", 30)  # the first step
  speed.restart(1)
  spend("steps", 1.5)
  spend("data", 0.5)
  spend("evaluation", 7)
  spend("steps", 2)
  # 5 steps in 4 s, 10 steps to go.
  assert speed.read(6, 10) == {
    "sequences_per_sec": 1.25 * 8,
    "tokens_per_sec": 1.25 * 8 * 16,
    "mfu": 1.25 * 300 / 1000,
    "eta_secs": 8.0,
    "elapsed_secs": 61.0,
  }
  spend("steps", 1)
  assert speed.read(7, 2)["eta_secs"] == 2.0  # since the last reading
