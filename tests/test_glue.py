"""Text tasks: rows of a batch, metrics, collapses and submissions."""

import csv
import dataclasses
import io
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import no_warnings

from electra_jax.finetune import tasks
from electra_jax.finetune import text_task as glue
from electra_jax.finetune.files import TaskError
from electra_jax.finetune.glue_files import Example
from electra_jax.finetune.metrics import METRICS
from electra_jax.finetune.tasks import TASKS

REVIEWS = tasks.own("reviews", text="body", label="stars")


# Rows of a batch.


class Letters:
  """One token a letter: 'a' is 10, 'b' is 11."""

  vocab = SimpleNamespace(cls=1, sep=2)

  def encode_batch(self, texts):
    return [[ord(c) - 87 for c in text] for text in texts]


def test_a_pair_has_two_segments_and_a_single_text_one():
  pair, single = TASKS["rte"], TASKS["sst2"]
  (feature,) = glue.features(pair, [Example("ab", "c", 1, 0)], Letters(), max_length=128)
  assert feature.ids.tolist() == [1, 10, 11, 2, 12, 2] and feature.second == 4
  assert feature.ids.dtype == np.int32
  assert (feature.target["label"], feature.target["label"].dtype) == (1, np.int32)
  (feature,) = glue.features(single, [Example("ab", None, None, 0)], Letters(), max_length=128)
  assert feature.ids.tolist() == [1, 10, 11, 2]
  assert feature.second == 4 and feature.target == {}


def test_the_longer_text_of_a_pair_is_cut_first():
  def cut(a: int, b: int, n: int):
    return glue.features(TASKS["rte"], [Example("a" * a, "b" * b, 0, 0)], Letters(), max_length=n)

  for a, b, n in itertools.product(range(9), range(9), range(5, 14)):
    x, y = a, b
    while x + y > n - 3:  # token by token, as BERT's preparation has it
      x, y = (x - 1, y) if x > y else (x, y - 1)
    (row,) = cut(a, b, n)
    assert row.ids.tolist() == [1, *[10] * x, 2, *[11] * y, 2]
  with pytest.raises(TaskError, match="got 4"):
    cut(1, 1, 4)


def test_regression_targets_are_divided_by_the_scale():
  rows = [Example("a", "b", 3.8, 0)]
  (feature,) = glue.features(TASKS["stsb"], rows, Letters(), max_length=128)
  target = feature.target["label"]
  assert target == np.float32(3.8 / 5) and target.dtype == np.float32


def test_doubling_appends_every_pair_in_the_other_order():
  pairs = [Example("a", "b", 1, 0), Example("c", "d", 0, 1)]
  assert glue.doubled(pairs) == [*pairs, Example("b", "a", 1, 0), Example("d", "c", 0, 1)]
  with pytest.raises(TaskError, match="doubling swaps the texts of pairs"):
    glue.doubled([Example("a", None, 1, 0)])


# Metrics.


def numbered(labels) -> list[Example]:
  return [Example("x", "y", label, i) for i, label in enumerate(labels)]


def test_example_scores_are_labels_and_predictions():
  outputs = {"logits": np.array([[0.1, 0.2, 0.0], [3, 1, 2]], np.float32)}
  assert glue.example_scores(TASKS["mnli"], numbered([2, 0]), outputs).tolist() == [[2, 1], [0, 0]]
  found = glue.example_scores(TASKS["stsb"], numbered([5.0, 2.5]), {"score": np.array([1.5, 0.25])})
  assert found.tolist() == [[5.0, 7.5], [2.5, 1.25]] and found.dtype == np.float64


def test_outputs_that_do_not_fit_the_examples_are_refused():
  task, two = TASKS["rte"], numbered([0, 1])
  with pytest.raises(TaskError, match="3 outputs for 2 examples"):
    glue.example_scores(task, two, {"logits": np.zeros((3, 2))})
  with pytest.raises(TaskError, match="1 of 2 examples have no label, e.g. row 1"):
    glue.example_scores(task, numbered([0, None]), {"logits": np.zeros((2, 2))})
  with pytest.raises(TaskError, match="no example"):
    glue.compute_metrics(task, np.zeros((0, 2)))


def test_metrics_of_two_classes_agree_with_their_formulae():
  # 5 true positives, 2 false positives, 1 false negative, 4 true negatives.
  rows = np.array([[1, 1]] * 5 + [[0, 1]] * 2 + [[1, 0]] + [[0, 0]] * 4, float)
  task = dataclasses.replace(TASKS["cola"], metrics=("mcc", "accuracy", "f1"))
  found = glue.compute_metrics(task, rows)
  assert list(found) == ["mcc", "accuracy", "f1"]
  assert found["accuracy"] == pytest.approx(100 * 9 / 12)
  assert found["f1"] == pytest.approx(100 * 2 * 5 / (2 * 5 + 2 + 1))
  assert found["mcc"] == pytest.approx(100 * (5 * 4 - 2 * 1) / math.sqrt(7 * 6 * 6 * 5))


def test_f1_of_more_classes_is_the_mean_over_them():
  rows = np.array([[0, 0], [0, 1], [1, 1], [2, 2], [2, 0]], float)
  task = dataclasses.replace(REVIEWS, labels=("a", "b", "c"), metrics=("f1", "accuracy"))
  found = glue.compute_metrics(task, rows)
  assert found["f1"] == pytest.approx(100 * (1 / 2 + 2 / 3 + 2 / 3) / 3)
  assert found["accuracy"] == pytest.approx(60)


def test_correlations_agree_with_their_formulae():
  rng = np.random.default_rng(0)
  rows = np.stack([np.round(rng.uniform(0, 5, 50)), rng.normal(size=50)], 1)
  rows[:, 1] += rows[:, 0]

  def pearson(x, y):
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())

  def ranks(x):  # ties have the mean of their ranks
    return np.array([(x < v).sum() + ((x == v).sum() + 1) / 2 for v in x])

  found = glue.compute_metrics(TASKS["stsb"], rows)
  assert list(found) == ["spearman", "pearson"]
  assert found["pearson"] == pytest.approx(100 * pearson(*rows.T))
  assert found["spearman"] == pytest.approx(100 * pearson(ranks(rows[:, 0]), ranks(rows[:, 1])))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_constant_prediction_or_label_is_scored_without_a_warning(value):
  with no_warnings():
    for name, expected in (("accuracy", 1.0), ("f1", 1.0), ("mcc", 0.0)):
      assert METRICS[name].compute(np.ones((2, 2)), 2) == expected
    classes = np.array([[0, value], [1, value], [1, value]])
    assert glue.compute_metrics(TASKS["cola"], classes)["mcc"] == 0.0
    assert glue.compute_metrics(TASKS["mrpc"], classes)["f1"] == pytest.approx(80.0 * value)
    numbers = np.array([[0.5, value], [1, value], [4, value]])
    assert glue.compute_metrics(TASKS["stsb"], numbers) == {"spearman": 0.0, "pearson": 0.0}
    nearly = numbers + [[0, 0], [0, 0], [0, 1e-15]]
    assert all(math.isfinite(x) for x in glue.compute_metrics(TASKS["stsb"], nearly).values())


def test_a_collapse_is_the_same_prediction_for_labels_that_differ():
  assert glue.collapsed(TASKS["rte"], np.array([[0, 1], [1, 1.0]]))
  assert not glue.collapsed(TASKS["rte"], np.array([[0, 1], [1, 0.0]]))
  assert not glue.collapsed(TASKS["rte"], np.array([[1, 1], [1, 1.0]]))
  assert glue.collapsed(TASKS["stsb"], np.array([[0, 2.500], [5, 2.501]]))
  assert not glue.collapsed(TASKS["stsb"], np.array([[0, 2.4], [5, 2.6]]))


# Submissions.


def submission(folder, task, **outputs) -> str:
  """Returns what is written of a task's outputs, of which there is one kind."""
  path, (values,) = folder / "new" / "x.tsv", outputs.values()
  glue.write_submission(path, task, numbered([None] * len(values)), outputs)
  return path.read_bytes().decode()


def test_submissions_have_the_labels_that_glue_wants(tmp_path):
  logits = np.array([[1, 0], [0, 1], [0, 1]])
  for name, labels in (("rte", ["entailment", *2 * ["not_entailment"]]), ("cola", [0, 1, 1])):
    rows = "".join(f"{i}\t{label}\n" for i, label in enumerate(labels))
    assert submission(tmp_path, TASKS[name], logits=logits) == f"index\tprediction\n{rows}"


def test_names_of_classes_with_tabs_or_line_ends_are_quoted(tmp_path):
  names = ("very\tgood", "not\ngood", 'so "so"', "plain")
  task = dataclasses.replace(TASKS["rte"], labels=names)
  text = submission(tmp_path, task, logits=np.eye(4))
  rows = list(csv.reader(io.StringIO(text, newline=""), delimiter="\t"))
  assert rows == [["index", "prediction"], *([str(i), name] for i, name in enumerate(names))]


def test_scores_are_cut_to_their_limits_and_have_three_decimals(tmp_path):
  text = submission(tmp_path, TASKS["stsb"], score=np.array([-0.3, -0.00001, 0.12345, 1.01]))
  assert text == "index\tprediction\n0\t0.000\n1\t0.000\n2\t0.617\n3\t5.000\n"


def test_numbers_of_a_task_without_limits_keep_six_digits(tmp_path):
  task = dataclasses.replace(TASKS["stsb"], limits=None, scale=2e-4)
  rows = submission(tmp_path, task, score=np.array([0.5, 0.123456789, -2e4])).splitlines()[1:]
  assert [row.split("\t")[1] for row in rows] == ["0.0001", "2.46914e-05", "-4"]


def test_a_submission_needs_an_output_for_every_example(tmp_path):
  with pytest.raises(TaskError, match="1 outputs for 2 examples"):
    outputs = {"logits": np.ones((1, 2))}
    glue.write_submission(tmp_path / "x", TASKS["rte"], numbered([None] * 2), outputs)
  assert not (tmp_path / "x").exists()
