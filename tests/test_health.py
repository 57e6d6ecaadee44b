"""Trouble made up line by line, and curves of healthy runs that must not be taken for it."""

import dataclasses
import json
import math

import numpy as np
import pytest

from electra_jax.monitor.health import Health, Limits

LIMITS = Limits(
  window=10, loss_spike=1.3, auc_margin=0.02, recall=0.001, entropy_ratio=0.5, after_step=1000
)
EVERY = 100  # steps between lines


def line(**changes):
  """Returns a line of a healthy ELECTRA run late in its training."""
  healthy = dict(
    mlm_loss=2.4, rtd_loss=0.2, loss=12.4, mlm_accuracy=0.5, rtd_accuracy=0.92, rtd_auc=0.9,
    rtd_recall=0.4, rtd_precision=0.8, sample_entropy=2.4, replaced=0.08, learning_rate=1e-4,
    grad_norm=1.0, mfu=None,
  )  # fmt: skip
  return healthy | changes


def losses(*values):
  """Returns lines of these losses of masked tokens."""
  return [line(mlm_loss=x, sample_entropy=x) for x in values]


CALM, HIGH = [line()] * 10, losses(*[7.0] * 3)


def told(lines, limits=LIMITS, start=2000):
  """Returns {index of a line: its warnings}, lines of `EVERY` steps from `start`."""
  health = Health(limits)
  checked = {i: health.check(start + EVERY * i, values) for i, values in enumerate(lines)}
  return {i: warnings for i, warnings in checked.items() if warnings}


def only(warnings):
  """Returns the one line of text there is."""
  ((text,),) = warnings.values()
  assert "\n" not in text
  return text


# Collapses.

COLLAPSES = {
  "rtd_auc": dict(rtd_auc=0.503),
  "nce_auc": dict(nce_auc=0.49, nce_loss=0.4),
  "rtd_recall": dict(rtd_recall=0.0004),
  "nce_recall": dict(nce_recall=0.0),
  "sample_entropy": dict(sample_entropy=1.1),
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_collapse_is_reported_once_when_it_has_lasted_the_window(name):
  lines = [line()] * 3 + [line(**COLLAPSES[name])] * 40
  warnings = told(lines)
  assert list(warnings) == [12]  # the tenth bad line
  assert only(warnings).startswith(f"step 3,200: {name} ")
  assert "on 10 log lines since step 2,300" in only(warnings)


@pytest.mark.parametrize(
  ("name", "numbers", "knob"),
  [
    ("rtd_auc", ("0.503", "0.02", "0.5"), "generator.width_multiplier"),
    ("rtd_recall", ("0.04 %", "0.1 %", "8 %"), "objective.mask_prob"),
    ("sample_entropy", ("1.100", "0.5 times mlm_loss 2.400"), "objective.temperature"),
  ],
)
def test_a_warning_has_both_numbers_and_a_knob(name, numbers, knob):
  text = only(told([line(**COLLAPSES[name])] * 10))
  assert [number for number in (*numbers, knob) if number not in text] == []


@pytest.mark.parametrize("name", COLLAPSES)
def test_one_good_line_ends_a_collapse_and_it_can_come_again(name):
  bad = [line(**COLLAPSES[name])]
  assert told((bad * 9 + [line(nce_auc=0.8, nce_recall=0.3)]) * 5) == {}
  again = bad * 15 + [line(nce_auc=0.8, nce_recall=0.3)] + bad * 15
  assert list(told(again)) == [9, 25]


@pytest.mark.parametrize("name", COLLAPSES)
def test_warm_up_does_not_count_towards_a_collapse(name):
  bad = [line(**COLLAPSES[name])] * 30
  # The first line after step 1,000 is that of step 1,100, index 10.
  assert list(told(bad, start=100)) == [19]
  assert list(told(bad, dataclasses.replace(LIMITS, after_step=0), start=100)) == [9]
  assert told(bad, dataclasses.replace(LIMITS, after_step=10_000), start=100) == {}


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_metric_is_checked_after_as_many_steps_since_a_schedule_explained_its_value(name):
  health = Health(LIMITS, suspended_checks=lambda step: (name,) if 3000 < step <= 5000 else ())
  steps = range(2000, 9000, EVERY)
  warned = [step for step in steps if health.check(step, line(**COLLAPSES[name]))]
  assert warned == [2900, 7000]  # at their tenth line; the second after 5,000 + 1,000
  health = Health(LIMITS, suspended_checks=lambda step: ("auc",))
  assert health.check(2000, line(rtd_auc=None)) == []


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_metric_without_a_value_neither_begins_nor_ends_a_collapse(name):
  assert told([line(**dict.fromkeys(COLLAPSES[name]))] * 30) == {}
  # Neither does it end a collapse.
  bad, gap = line(**COLLAPSES[name]), line(**dict.fromkeys(COLLAPSES[name]))
  assert list(told([bad] * 5 + [gap] * 3 + [bad] * 5)) == [12]


def test_an_auc_below_one_half_is_as_far_from_guessing_as_one_above():
  assert told([line(rtd_auc=0.47)] * 30) == told([line(rtd_auc=0.53)] * 30) == {}
  assert len(told([line(rtd_auc=0.481)] * 30)) == len(told([line(rtd_auc=0.519)] * 30)) == 1


def test_entropy_is_judged_by_the_generators_own_loss():
  # Scale-free: what is a collapse at 2.4 nats is the loss itself of a better generator.
  assert told([line(sample_entropy=1.1, mlm_loss=1.1)] * 30) == {}
  assert told([line(sample_entropy=1.21)] * 30) == {}
  two_tower = line(sample_entropy=1.1, cloze_loss=2.4, cloze_accuracy=0.5)
  del two_tower["mlm_loss"], two_tower["mlm_accuracy"]
  assert "0.5 times cloze_loss 2.400" in only(told([two_tower] * 30))
  # The discriminator's losses of tokens, here lower ones, do not count.
  words = {"replace_mlm_loss": 2.0, "corrective_loss": 0.9}
  words |= {name.replace("loss", "accuracy"): 0.5 for name in words}
  assert "0.5 times mlm_loss 2.400" in only(told([line(sample_entropy=1.1, **words)] * 30))
  uniform = line(sample_entropy=0.1)
  del uniform["mlm_loss"], uniform["mlm_accuracy"]
  assert told([uniform] * 30) == {}  # without a network there is no loss to compare with


def test_several_collapses_have_a_warning_each():
  lines = [line()] * 10 + [line(rtd_auc=0.5, rtd_recall=0.0, sample_entropy=0.3)] * 20
  ((_, texts),) = told(lines).items()
  assert sorted(text.split()[2] for text in texts) == ["rtd_auc", "rtd_recall", "sample_entropy"]


# Loss spikes.


@pytest.mark.parametrize("name", ["mlm_loss", "cloze_loss", "replace_mlm_loss", "ungated_loss"])
def test_a_spike_is_reported_with_the_median(name):
  def with_loss(value):
    return line(**{name: value, name.replace("loss", "accuracy"): 0.3})

  losses = [3.0, 2.8, 2.6, 2.5, 2.4, 2.4, 2.5, 2.4, 2.3, 2.4, 2.4, 2.3]
  warnings = told([with_loss(x) for x in [*losses, 4.8, 2.4]])
  assert list(warnings) == [12]
  text = only(warnings)
  assert text.startswith(f"step 3,200: {name} 4.800 nats is 2 times the median 2.400 of ")
  assert "previous 10 log lines (limit 1.3)" in text and "optimizer.learning_rate" in text


GAP = line(mlm_loss=None, mlm_accuracy=None)
WAVERING = [*CALM, *losses(3.2, 3.1, 3.2, 3.0, 3.2)]  # at the limit, 3.12
WAITING = [line(rtd_loss=0.7, loss=2.4)] * 20
ON_THE_SIDE = [line(slot_rtd_loss=0.7, baseline_loss=0.6, reinforce=0.1, grad_norm=1.0)] * 20
DETECTS = [line(rtd_loss=0.3)] * 10
# ELECTRA 15 % in its first thousand steps (a real run): few samples are right at first, and the
# discriminator need only say "replaced".
REAL = [0.110, 0.062, 0.112, 0.161, 0.206, 0.250, 0.285, 0.310, 0.331, 0.349, 0.363, 0.375, 0.388]
BERT = [{"mlm_loss": 3.0, "loss": 3.0, "mlm_accuracy": 0.4}] * 50
# {claim: (lines, the places of those that are warned of)}; the limit is 1.3 times the median
SPIKES = {
  "below the limit": (losses(*[2.0] * 10, 2.59), []),
  "above the limit": (losses(*[2.0] * 10, 2.61), [10]),
  "only the last lines count for the median": (losses(*[8.0] * 20, *[2.0] * 10, 3.0), [30]),
  "half of the window is from before": (losses(*[8.0] * 20, *[2.0] * 5, 5.0), []),
  "once, and again after its end": (CALM + HIGH + CALM + HIGH, [10, 23]),
  "one spike until it is half way back": (WAVERING, [10]),
  "another once it was half way back": (WAVERING + losses(2.7, 3.2), [10, 16]),
  "what was not counted is no line": ([*CALM, GAP, line(), GAP, *CALM], []),
  "what was not counted does not end a spike": ([*CALM, GAP, HIGH[0], GAP, HIGH[0]], [11]),
  "a loss near zero may double": (losses(*[0.02] * 20, 0.1), []),
  "a loss near zero that rises further": ([*losses(*[0.02] * 20), line(mlm_loss=0.5)], [20]),
  "a sum whose weight a schedule switches on": (
    [*WAITING, line(rtd_loss=0.7, loss=37.4), line(rtd_loss=0.4, loss=22.4)], []
  ),
  "detection while the generator learns": ([line(rtd_loss=x) for x in REAL], []),
  "detection rises to log 2": ([*DETECTS, line(rtd_loss=math.log(2) - 1e-3)], []),
  "detection rises above log 2": ([*DETECTS, line(rtd_loss=0.75)], [10]),
  "a loss of the vocabulary's size rises below log 2": (losses(*[0.3] * 10, 0.6), [10]),
  "what is reported on the side": (  # REINFORCE: it rises with the generator, or has no level
    [*ON_THE_SIDE, line(slot_rtd_loss=3.0, baseline_loss=3.0, reinforce=9.0, grad_norm=99)], []
  ),
  "masked language modelling alone": (BERT, []),
  "masked language modelling alone has spikes": ([*BERT, {**BERT[0], "mlm_loss": 7.0}], [50]),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), SPIKES.values(), ids=SPIKES)
def test_a_spike_is_a_loss_above_its_own_level(lines, expected):
  assert list(told(lines)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_lines_of_a_noisy_step_each_are_no_spikes(seed):
  # 8 % of noise, as lines of one step of 16 sequences have; the limit alone would be met often.
  rng = np.random.default_rng(seed)
  limits = dataclasses.replace(LIMITS, window=20, loss_spike=1.1)
  noisy = [line(mlm_loss=float(x)) for x in 2.4 + 0.19 * rng.normal(size=500)]
  assert max(x["mlm_loss"] for x in noisy) > 1.15 * 2.4
  assert sum(map(len, told(noisy, limits).values())) <= 1  # 7 deviations of only 20 lines
  assert list(told([*noisy[:30], line(mlm_loss=4.8)], limits))[-1] == 30


def test_a_run_that_falls_back_to_token_frequencies_is_reported():
  # A real run at 70 times its learning rate, 10 steps a line: from 5.5 to 6.3 nats, which are the
  # frequencies of its small vocabulary.
  before = 5.40, 5.49, 5.59, 5.60, 5.59, 5.55, 5.53, 5.57, 5.58, 5.45, 5.34, 5.38, 5.42, 5.50, 5.52
  limits = dataclasses.replace(LIMITS, window=20, loss_spike=1.1)
  assert list(told(losses(*before, 6.14, 6.31, 6.31, 6.32), limits)) == [15]


def test_earlier_spikes_do_not_raise_the_level():
  lines = [line()] * 10 + ([line(mlm_loss=7.0)] * 4 + [line()]) * 5
  # 20 high lines of the last 25, and each spike is still measured from 2.4.
  health = Health(LIMITS)
  texts = [text for i, values in enumerate(lines) for text in health.check(i, values)]
  assert len(texts) == 5 and all("the median 2.400" in text for text in texts)


@pytest.mark.parametrize("high", [[4.0] * 10, [*[4.0] * 20, 4.1]])
def test_a_loss_becomes_the_level_after_as_many_lines_as_the_window_has(high):
  warnings, last = told(CALM + losses(*high, 6.0)), 10 + len(high)
  assert list(warnings) == [10, last] and "the median 4.000" in warnings[last][0]


def test_spikes_are_looked_for_in_warm_up_too_once_there_is_a_level():
  assert list(told([line()] * 5 + [line(mlm_loss=7.0)], start=100)) == [5]
  assert told([line()] * 4 + [line(mlm_loss=7.0)], start=100) == {}


# Healthy runs.


def healthy_run(rng, lines=200):
  """Returns the lines of a run: a plateau, the way out of it, a slow fall; noise of small batches.

  The shape is that of the quickstart, whose noise of a line is below 0.5 %; here it is 5 %.
  """
  at = np.arange(1, lines + 1)
  mlm = 1.9 + 2.4 / (1 + np.exp((at - 45) / 12)) + 4 * np.exp(-at / 1.5)
  noise = lambda: np.exp(0.05 * rng.normal(size=lines))  # noqa: E731
  found = 0.5 / (1 + np.exp(-(at - 60) / 10))
  found[(at > 2) & (at < 30)] = 0.0  # says "original" always, and comes out of it
  columns = {
    "mlm_loss": mlm * noise(),
    "sample_entropy": mlm * noise(),
    "rtd_loss": (0.2 + 0.25 * (1 - found)) * noise(),
    "rtd_auc": np.clip(0.56 + 0.7 * found + 0.01 * rng.normal(size=lines), 0, 1),
    "rtd_recall": found * noise(),
  }
  return [line(**{k: float(v[i]) for k, v in columns.items()}) for i in range(lines)]


@pytest.mark.parametrize("seed", range(50))
def test_a_noisy_healthy_run_is_left_alone(seed):
  limits = dataclasses.replace(LIMITS, window=20, after_step=3000)
  assert told(healthy_run(np.random.default_rng(seed)), limits, start=100) == {}


# A run that is resumed.


def troubled_run():
  """Returns lines with every trouble in them, some of them twice."""
  lines = healthy_run(np.random.default_rng(3), 160)
  for at, count, changes in (
    (55, 3, dict(mlm_loss=9.0)),
    (70, 25, COLLAPSES["rtd_auc"]),
    (80, 30, COLLAPSES["rtd_recall"]),
    (100, 25, COLLAPSES["rtd_auc"]),
    (104, 30, dict(mlm_loss=9.0)),
    (120, 22, dict(sample_entropy=0.1)),
    (145, 1, dict(rtd_loss=2.0)),
    (150, 2, dict(rtd_auc=None, rtd_recall=None)),
  ):
    for i in range(at, at + count):
      lines[i] = lines[i] | changes
  return [{"step": EVERY * (i + 1), "split": "train", **values} for i, values in enumerate(lines)]


def test_a_resumed_run_warns_as_one_that_was_not_interrupted():
  lines = troubled_run()
  straight = Health(LIMITS)
  expected = [straight.check(x["step"], x) for x in lines]
  assert sum(map(len, expected)) >= 7
  # As metrics.jsonl brings them back, among lines of evaluations, which have no say.
  bad_evaluation = {"split": "heldout", **line(mlm_loss=30.0, rtd_auc=0.5, sample_entropy=0.0)}
  for cut in range(len(lines)):
    written = [json.dumps(x) for x in lines[:cut]]
    history = [json.loads(x) for x in written]
    mixed = [y for x in history for y in (x, {**bad_evaluation, "step": x["step"]})]
    resumed = Health(LIMITS, mixed)
    again = [resumed.check(x["step"], x) for x in lines[cut:]]
    assert again == expected[cut:], cut


# Limits.


def test_a_limit_of_zero_switches_a_judgement_off():
  limits = dataclasses.replace(LIMITS, loss_spike=0)
  assert told([*losses(*[2.0] * 10), line(mlm_loss=9.0)], limits) == {}
  limits = dataclasses.replace(limits, auc_margin=0, recall=0, entropy_ratio=0)
  worst = line(rtd_auc=0.5, rtd_recall=0.0, sample_entropy=0.0)
  assert told([worst] * 20 + [line(mlm_loss=99.0)], limits) == {}


def test_a_window_of_one_line_reports_a_collapse_at_once():
  lines = [line(rtd_auc=x) for x in (0.9, 0.5, 0.5, 0.9, 0.5)]
  assert list(told(lines, dataclasses.replace(LIMITS, window=1))) == [1, 4]


def test_limits_that_make_no_sense_are_refused():
  wrong = {"window": [0], "loss_spike": [0.9, 1.0, -2.0], "auc_margin": [-0.1, 0.6]}
  for field, values in (wrong | {"recall": [1.5], "entropy_ratio": [-1.0]}).items():
    for value in values:
      with pytest.raises(ValueError, match=rf"health\.{field} .*{value}"):
        dataclasses.replace(LIMITS, **{field: value})


def test_a_window_of_a_line_or_two_still_sees_spikes():
  for window in (1, 2):
    limits = dataclasses.replace(LIMITS, window=window)
    assert list(told([line()] * 5 + [line(mlm_loss=7.0)], limits)) == [5]
