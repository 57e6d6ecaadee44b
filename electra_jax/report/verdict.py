"""The verdict on a run: a word, and the sentences that support it."""

from typing import NamedTuple

from electra_jax.report.facts import Facts
from electra_jax.runtime.chance import WORDS
from electra_jax.runtime.terminal import label, shown

GOOD, LOOK, BAD = "healthy", "look at the warnings", "did not learn"
EARLY = "too early to say"


class Verdict(NamedTuple):
  """What to think of a run."""

  word: str  # GOOD, LOOK, BAD or EARLY
  sentences: tuple[str, ...]


class Finding(NamedTuple):
  """What a metric says: its value beside what knowing nothing reaches."""

  learned: bool
  sentence: str


def judge(facts: Facts) -> Verdict:
  """Returns the verdict: BAD if a network is no better than knowing nothing, LOOK on warnings.

  Until health.after_step a run may still be at that level: EARLY.
  """
  c, found = facts.config, findings(facts)
  finished = facts.done >= c.train.steps
  if finished:
    progress = f"It finished its {c.train.steps:,} steps."
  else:
    progress = f"It is at step {facts.done:,} of {c.train.steps:,}."
  count = len(facts.warnings)
  if not all(finding.learned for finding in found):
    word = BAD if finished or facts.done > c.health.after_step else EARLY
  else:
    word = LOOK if count else GOOD
  told = "No warnings." if not count else f"{count} warning{'s' * (count > 1)}, below."
  return Verdict(word, (progress, *(finding.sentence for finding in found), told))


def findings(facts: Facts) -> list[Finding]:
  """Compares the last evaluation, or the last training line without one, with knowing nothing.

  At step 0 nothing has been learned, so that line does not count.
  """
  line, where = facts.last("heldout"), "held-out"
  if not line.get("step"):
    line, where = facts.last("train"), "training"
  found = []
  for name in (f"{stem}_loss" for stem in WORDS):
    level = facts.chance.level(name, line)
    if line.get(name) is not None and level:
      gain = level[1] - line[name]
      side = f"{gain:.2f} below" if gain > 0 else f"{-gain:.2f} above"
      text = f"The {where} {label(name)} is {shown(name, line[name])}, {side} the"
      found.append(
        Finding(gain > 0, f"{text} {level[0].removeprefix('held-out ')} {level[1]:.2f}.")
      )
  # The detector's own task; `unigram_auc` has no loss.
  for name in (k for k in line if k.endswith("_auc") and f"{k.removesuffix('_auc')}_loss" in line):
    if line[name] is not None:
      text = f"Detection has an AUC of {line[name]:.3f} ({where}; chance is 0.5)."
      found.append(Finding(line[name] > 0.5 + facts.config.health.auc_margin, text))
  return found
