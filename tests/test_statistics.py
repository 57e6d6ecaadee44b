"""Several seeds: summaries, bootstrap intervals against known cases, the table and the picture."""

import dataclasses
import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from electra_jax.core.task_network import HeadSpec
from electra_jax.evaluate import pairs
from electra_jax.finetune import results, statistics, tasks
from electra_jax.finetune import text_task as glue
from electra_jax.finetune.task_data import TaskInfo
from electra_jax.finetune.tasks import TASKS


def accuracy(scores):
  return {"accuracy": 100 * float((scores[:, 0] == scores[:, 1]).mean())}


def compare(a, b, **options):
  return statistics.paired_bootstrap(a, b, [accuracy] * 2, "accuracy", **options)


def system(rng, n: int, shares: list[float]) -> np.ndarray:
  """Returns scores [S, n, 2] of which each seed has about its share right."""
  hit = rng.random((len(shares), n)) < np.array(shares)[:, None]
  return np.stack([np.ones((len(shares), n)), hit], -1).astype(float)


def test_a_summary_agrees_with_numbers_by_hand():
  found = statistics.summary([1.0, 2.0, 6.0, 7.0])
  assert found == (4.0, 4.0, pytest.approx(math.sqrt((9 + 4 + 4 + 9) / 3)), 4)
  assert statistics.summary([3.5]) == (3.5, 3.5, 0.0, 1)
  with pytest.raises(ValueError, match="no seeds"):
    statistics.summary([])


def test_the_interval_of_a_difference_of_proportions_is_the_normal_one():
  rng = np.random.default_rng(1)
  a, b = system(rng, 400, [0.8]), system(rng, 400, [0.75])
  found = compare(a, b, samples=4000)
  hits = 100 * (a[0, :, 1] - b[0, :, 1])
  error = hits.std() / math.sqrt(400)  # of a mean of paired differences, in points
  assert found.difference == pytest.approx(hits.mean())
  # 4000 samples place a 2.5 % quantile to about 0.042 standard errors; four times that, and the
  # quarter of a point by which the accuracy of 400 scores steps.
  tolerance = 4 * 0.042 * error + 0.25
  assert found.low == pytest.approx(hits.mean() - 1.96 * error, abs=tolerance)
  assert found.high == pytest.approx(hits.mean() + 1.96 * error, abs=tolerance)
  # The two-sided normal p; at a chance of about 0.1, 4000 samples are right to 2 x 0.0033 x 4.
  p = math.erfc(abs(hits.mean()) / error / math.sqrt(2))
  assert found.p == pytest.approx(p, abs=0.03)


def test_pairing_takes_what_the_systems_share_out_of_the_interval():
  rng = np.random.default_rng(2)
  a = system(rng, 300, [0.7])
  b = a.copy()
  b[0, :3, 1] = 1 - b[0, :3, 1]  # they differ in three scores of 300
  near = compare(a, b, samples=500)
  far = compare(a, b[:, ::-1], samples=500)
  assert near.high - near.low < 0.3 * (far.high - far.low)


def test_seeds_are_drawn_too():
  # Every unit of a seed is alike, so that nothing but the draw of the seeds varies: the mean of
  # 8 draws from {60, 80} has the standard deviation 10 / sqrt(8).
  def value(scores):
    return {"score": float(scores.mean())}

  a = np.repeat([60.0, 80.0] * 4, 5).reshape(8, 5, 1)
  b = np.full((1, 5, 1), 70.0)
  found = statistics.paired_bootstrap(a, b, [value] * 2, "score", samples=4000)
  assert (found.a, found.b, found.difference) == (70.0, 70.0, 0.0)
  # The mean of 8 draws moves in steps of 20 / 8.
  assert found.high == pytest.approx(1.96 * 10 / math.sqrt(8), abs=2.5 / 2)
  assert found.low == pytest.approx(-found.high, abs=1e-9)


def test_a_system_does_not_differ_from_itself():
  scores = system(np.random.default_rng(3), 200, [0.6, 0.65, 0.7])
  found = compare(scores, scores, samples=500)
  assert found.difference == 0 and found.low < 0 < found.high and found.p > 0.5
  # With one seed each nothing is left to chance.
  found = compare(scores[:1], scores[:1], samples=50)
  assert (found.low, found.high, found.p) == (0.0, 0.0, 1.0)


def test_a_large_difference_excludes_zero_with_the_sign_of_a_minus_b():
  rng = np.random.default_rng(4)
  a, b = system(rng, 200, [0.9, 0.92]), system(rng, 200, [0.6, 0.62, 0.58])
  found = compare(a, b, samples=500)
  assert found.low > 15
  assert found.p == pytest.approx(2 / 501)  # the smallest that 500 samples can show
  other = compare(b, a, samples=500)
  assert other.high < -15 and other.difference == -found.difference


def test_the_same_seed_gives_the_same_interval():
  rng = np.random.default_rng(5)
  a, b = system(rng, 50, [0.8, 0.7]), system(rng, 50, [0.7])
  first, again, other = (compare(a, b, samples=100, seed=seed) for seed in (0, 0, 1))
  assert first == again != other


def test_systems_on_different_units_are_refused_with_both_numbers():
  rng = np.random.default_rng(6)
  a, b = system(rng, 50, [0.8]), system(rng, 49, [0.7])
  for first, second in ((a, b), ([a[0], b[0]], a)):
    with pytest.raises(ValueError, match="one has 49, one 50"):
      compare(first, second)
  for empty in ([], np.zeros((1, 0, 2))):
    with pytest.raises(ValueError, match="one seed and one example"):
      compare(empty, empty)


def saved_results(folder, kind, scores, **facts):
  """Writes the results of a task, as far as a comparison reads them."""
  (folder / "mine").mkdir(parents=True)
  info = TaskInfo(kind, "mine", HeadSpec("qa", {}), 64, **facts)
  content = {"config": {}, "facts": dataclasses.asdict(info), "examples": {"dev": "same"}}
  (folder / "mine" / results.CONFIG).write_text(json.dumps(content))
  np.savez(folder / "mine" / results.EXAMPLE_SCORES, dev=np.array(scores, float))
  return folder


def test_each_system_is_compared_by_its_own_threshold_and_classes(tmp_path):
  # Exact, F1, has an answer, null odds, some text: right below the threshold 0, wrong above.
  rows, shown = [[[1, 1, 1, -1, 1], [1, 1, 1, 3, 1]]], []
  for name, threshold in (("a", 0.0), ("b", 5.0)):
    options = {"threshold": threshold, "impossible": True}
    saved_results(tmp_path / name, "qa", rows, options=options)
  task = dataclasses.asdict(tasks.own("mine", text="x", label="y", metrics=("f1",)))
  for name, classes in (("c", "ab"), ("d", "abc")):
    text = task | {"labels": tuple(classes)}
    saved_results(tmp_path / name, "text", [[[1, 1], [1, 1], [0, 1]]], text=text)
  for one, other in ("ab", "ba", "cd", "dc"):
    console = Console(width=150, record=True, file=io.StringIO())
    results.compare(tmp_path / one, tmp_path / other, console, samples=20)
    (line,) = [x for x in console.export_text().split("\n") if "mine" in x and "dev" in x]
    shown.append([cell.strip() for cell in line.split("│")[4:6]])
  # F1 of class 1 of two: 2 x 2 / (3 + 2); the mean over classes: half of it.
  assert shown == [["50.00", "100.00"], ["100.00", "50.00"], ["80.00", "40.00"], ["40.00", "80.00"]]
  with pytest.raises(ValueError, match="mine, dev: A's metric is exact, B's is f1"):
    results.compare(tmp_path / "a", tmp_path / "c", Console(quiet=True))


def average_of(scores):
  """The printed average of {task: its seeds' scores}."""
  console = Console(width=150, record=True, file=io.StringIO())
  splits = {"mnli": "dev_matched"}
  rows = [
    {"task": task, "split": splits.get(task, "dev"), "metrics": {"accuracy": x, "f1": 0.0}}
    for task, seeds in scores.items()
    for x in seeds
  ]
  results.print_average(rows, console)
  return " ".join(console.export_text().split())


def test_the_glue_average_leaves_out_wnli_and_lists_missing_tasks(monkeypatch):
  monkeypatch.setitem(TASKS, "mine", tasks.TextTask("mine", "Mine", text="a", label="b"))
  scores = dict.fromkeys(TASKS, [80.0]) | {"wnli": [0.0], "squad": [0.0]}
  scores["cola"] = [0.0, 64.0, 99.0]
  assert average_of(scores | {"mine": [0.0]}).startswith(
    "GLUE average of medians over 8 of 8 tasks: 78.00 (cola, sst2, mrpc, stsb, "
  )
  del scores["mnli"]
  assert "over 7 of 8 tasks: 77.71 (" in average_of(scores)  # (6 x 80 + 64) / 7
  assert average_of(scores).endswith("; without mnli)")
  assert average_of({"wnli": [1.0], "rte": [70.0], "mine": [3.0]}) == ""  # an average of one


def rows_of(task, split, metric, values, collapsed=()):
  return [
    {"task": task, "split": split, "seed": seed, "collapsed": seed in collapsed}
    | {"metrics": {metric: value, "f1": value / 2}}
    for seed, value in enumerate(values)
  ]


def shown(rows, width: int = 100) -> str:
  console = Console(width=width, record=True, file=io.StringIO())
  console.print(statistics.table(rows))
  return console.export_text()


def test_the_table_has_each_seed_and_marks_those_that_collapsed():
  rows = rows_of("mrpc", "dev", "accuracy", [90.0, 68.4, 88.0], collapsed=(1,))
  text = shown(rows + rows_of("mnli", "dev_matched", "accuracy", [81.25]))
  lines = [[c.strip() for c in x.split("│")[1:-1]] for x in text.split("\n") if x.startswith("│")]
  assert lines == [
    ["MRPC", "dev", "accuracy", "88.00", "82.13", "11.94", "90.00 68.40* 88.00"],
    ["", "", "F1", "44.00", "41.07", "5.97", "45.00 34.20* 44.00"],
    ["MNLI", "dev_matched", "accuracy", "81.25", "81.25", "", "81.25"],
    ["", "", "F1", "40.62", "40.62", "", "40.62"],
  ]
  assert "* collapsed" in text and "collapsed" not in shown(rows[:1])


def test_a_seed_that_one_task_lacks_keeps_its_place():
  rows = rows_of("cola", "dev", "mcc", [1.0, 2.0, 3.0])
  assert "1.00 – 3.00" in shown([rows[0], rows[2], *rows_of("rte", "dev", "mcc", [5.0, 6.0])])


def test_two_splits_of_one_task_have_a_row_each():
  text = shown(rows_of("own", "dev", "f1", [1.0]) + rows_of("own", "test", "f1", [2.0]))
  rows = [[c.strip() for c in x.split("│")[1:4]] for x in text.split("\n") if "│ own" in x]
  assert rows == [["own", "dev", "F1"], ["own", "test", "F1"]]


def test_ten_seeds_are_all_shown_in_eighty_columns():
  values = [60.11 + i for i in range(10)]
  text = shown(rows_of("stsb", "dev", "spearman", values), width=80)
  assert all(f"{value:.2f}" in text for value in values) and "…" not in text


def count_pixels(path, colour) -> int:
  from matplotlib import image

  distance = abs(image.imread(path)[..., :3] - np.array(colour) / 255)
  return int((distance < 0.02).all(-1).sum())


def test_the_picture_has_a_dot_for_each_seed_and_the_median(tmp_path):
  rows = rows_of("cola", "dev", "mcc", [57.0, 55.0, 0.0], collapsed=(2,))
  statistics.picture(tmp_path / "a.png", rows)
  blue, orange, red = (0x1F, 0x5F, 0xA8), (0xD1, 0x60, 0x2C), (0xB0, 0x30, 0x30)
  for colour in (blue, orange, red):
    assert count_pixels(tmp_path / "a.png", colour), colour
  assert not (tmp_path / "a.tmp").exists()
  with pytest.raises(ValueError, match="no results"):
    statistics.picture(tmp_path / "b.png", [])


def test_the_picture_has_the_level_of_the_most_frequent_class(tmp_path):
  # As in GLUE's dev sets: 279 of 408 pairs of MRPC are paraphrases.
  labels = np.repeat([1.0, 0.0], [279, 129])
  scores = np.stack([labels, np.zeros_like(labels)], 1)
  level = glue.majority(TASKS["mrpc"], scores)
  assert level == pytest.approx({"accuracy": 100 * 279 / 408, "f1": 100 * 2 * 279 / (408 + 279)})
  assert glue.majority(TASKS["cola"], scores)["mcc"] == 0
  assert glue.majority(TASKS["stsb"], scores)["spearman"] == 0
  rows = rows_of("mrpc", "dev", "accuracy", [90.0])
  pictures = []
  for name, level in (("without", None), ("with", {"accuracy": 68.4})):
    statistics.picture(tmp_path / name, [row | {"majority": level} for row in rows])
    pictures.append(count_pixels(tmp_path / name, (0x66, 0x66, 0x66)))  # of the dashed line
  assert pictures[0] < pictures[1]


def test_names_with_dollars_are_drawn_as_they_are(tmp_path):
  statistics.picture(
    tmp_path / "a.png", rows_of(r"a$_$ and $\frac$", "dev", "accuracy", [1.0, 2.0])
  )
  pair = pairs.Pair("a", "b", r"cat $\frac$", "price_$a_$")
  pairs.draw(tmp_path / "b.png", "m$_$/x", [pair] * 3, np.array([True, False, True]))
  assert (tmp_path / "a.png").stat().st_size and (tmp_path / "b.png").stat().st_size
