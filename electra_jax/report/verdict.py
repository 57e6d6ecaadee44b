"""The verdict on a run: a word, and the sentences that explain it."""

from typing import NamedTuple

from electra_jax.config import specs
from electra_jax.core import objectives
from electra_jax.monitor import baselines, quantities
from electra_jax.monitor.health import GENERATOR_LOSSES
from electra_jax.monitor.quantities import label, shown
from electra_jax.report.saved_run import Arm, SavedRun

GOOD, LOOK, BAD = "healthy", "look at the warnings", "did not learn"
EARLY, UNKNOWN = "too early to say", "nothing to compare with"
WORST_FIRST = (BAD, LOOK, EARLY, UNKNOWN, GOOD)


class Verdict(NamedTuple):
  """The assessment of a run."""

  word: str  # GOOD, LOOK, BAD, EARLY or UNKNOWN
  sentences: tuple[str, ...]


class Finding(NamedTuple):
  """A metric compared with its trivial baseline."""

  learned: bool
  sentence: str
  since: int = 0  # the step at which its training began


def judge_arm(arm: Arm) -> tuple[Verdict, dict[str, Verdict]]:
  """Returns the worst verdict on the runs of an arm with their count, and each run's own."""
  own = {run.name: judge(run) for run in arm.runs}
  words = [found.word for found in own.values()]
  if len(words) == 1:
    return next(iter(own.values())), {}
  count = {word: words.count(word) for word in WORST_FIRST if word in words}
  several = ", ".join(f"{n} of {len(words)} runs: {word}" for word, n in count.items())
  return Verdict(next(iter(count)), (f"{several}.",)), own


def judge(run: SavedRun) -> Verdict:
  """Returns the verdict: BAD if a metric is no better than trivial, LOOK if there are warnings.

  In its first health.after_step steps of training a metric may be trivial or missing: EARLY. A run
  that then has no metric with a baseline is UNKNOWN.
  """
  c, found, count = run.config, findings(run), len(run.warnings)
  if run.finished:
    progress = f"It finished its {run.steps:,} steps."
  elif run.steps is None:
    progress = f"It is at step {run.done:,}, and its {c.train.minutes:g} minutes are not over."
  else:
    progress = f"It is at step {run.done:,} of {run.steps:,}."
  wrong = [finding.since for finding in found if not finding.learned]
  late = run.finished or run.done > min(wrong, default=0) + c.health.after_step
  if wrong:
    word = BAD if late else EARLY
  elif count:
    word = LOOK
  else:
    word = GOOD if found else UNKNOWN if late else EARLY
  compared = [x.sentence for x in found] or ["No metric could be compared with a trivial baseline."]
  warnings = f"{count} warning{'s' if count > 1 else ''}, below." if count else "No warnings."
  return Verdict(word, (progress, *compared, warnings))


def findings(run: SavedRun) -> list[Finding]:
  """Compares the last evaluation, or without one the last training line, with trivial baselines.

  The evaluation at step 0 does not count, and a loss not while a schedule keeps its weight at 0, as
  detection in `Health`.
  """
  line, where = run.last("heldout"), "held-out"
  if not line.get("step"):
    line, where = run.last("train"), "training"
  own_fields = objectives.OBJECTIVES[run.config.objective.name].own_fields
  of_words = "replace_mlm_weight" if "replace_mlm_weight" in own_fields else "discriminator_weight"
  found, margin = [], run.config.health.auc_margin
  for stem in baselines.words(line):
    name = f"{stem}_loss"
    level = run.baselines.level(name, line)
    off = [] if name in GENERATOR_LOSSES else _steps_without(run, of_words)
    if line.get(name) is not None and level and line.get("step") not in off:
      gain = level[1] - line[name]
      side = f"{gain:.2f} below" if gain > 0 else f"{-gain:.2f} above"
      text = f"The {where} {label(name)} is {shown(name, line[name])}, {side} the"
      text += f" {level[0].removeprefix('held-out ')} {level[1]:.2f}."
      better = baselines.learned(name, line[name], level[1], margin)
      found.append(Finding(better, text, max(off, default=0)))
  off = _steps_without(run, "discriminator_weight")
  for name, value in line.items() if line.get("step") not in off else ():
    quantity = quantities.of(name)
    if quantity.kind != "auc" or value is None:
      continue
    better = baselines.learned(name, value, 0.5, margin)
    if name == "unigram_auc":
      text = f"Replacements by token frequency are detected with an AUC of {value:.3f}"
      text += (
        "."
        if better
        else f", not above {baselines.LEAST_UNIGRAM_AUC}: the generator is too strong."
      )
    elif quantity.other("loss") in line:  # the detector's own task
      text = f"Detection has an AUC of {value:.3f} ({where}; chance is 0.5)."
    else:
      continue
    found.append(Finding(better, text, max(off, default=0)))
  return found


def _steps_without(run: SavedRun, name: str) -> list[int]:
  """Returns the steps of the lines at which a schedule keeps a loss's weight at 0."""
  weight = specs.make_schedules(run.config)[name]
  return [x["step"] for x in run.history if weight.points and weight.at(x["step"]) == 0]
