"""The page of a report, from a template and Bokeh's scripts, all in one file."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import jinja2
from bokeh.embed import components
from bokeh.resources import Resources
from markupsafe import Markup

from electra_jax.evaluate import samples
from electra_jax.report import figures, saved_run, tables, verdict

KINDS = dict.fromkeys(verdict.WORST_FIRST, "look") | {verdict.GOOD: "good", verdict.BAD: "bad"}


def _samples(arm: saved_run.Arm) -> dict:
  """Returns the samples of the first of an arm's runs that has some."""
  return next(filter(None, (samples.read(run.folder) for run in arm.runs)), {})


def render(
  folders: Sequence[Path],
  *,
  price: float | None = None,
  pairs: Sequence[Path] = (),
  finetune: Sequence[Path] = (),
) -> str:
  """Returns the HTML of a report.

  Args:
    folders: of runs.
    price: of a device for an hour.
    pairs: results of `evaluate pairs`.
    finetune: folders of results of fine-tuning.

  Raises ValueError if a folder is not a run, or holds no results.
  """
  runs, names = [], saved_run.names(list(folders))
  for folder, name in zip(folders, names, strict=True):
    try:
      runs.append(saved_run.read(folder, name))
    except saved_run.JustBegunError as error:
      if not runs and folder == folders[-1]:
        raise
      warnings.warn(f"left out: {error}", stacklevel=2)
  arms = saved_run.arms(runs)
  drawn = figures.draw(arms)
  plots = {name: panel.plot for panels in drawn.values() for name, panel in panels.items()}
  script, divs = components(plots) if plots else ("", {})
  groups = [
    (figures.TITLES[key], [(panel, Markup(divs[name])) for name, panel in panels.items()])
    for key, panels in drawn.items()
  ]
  judged = [(arm, *(found := verdict.judge_arm(arm)), KINDS[found[0].word]) for arm in arms]
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,  # names and values are whatever somebody wrote
    trim_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  return environment.get_template("page.html").render(
    title=", ".join(arm.name for arm in arms),
    verdicts=judged,
    samples=[(arm, found) for arm in arms if (found := _samples(arm))],
    warned=[run for run in runs if run.warnings],
    overview=tables.overview(arms, price),
    price=price,
    runs_of_seeds=len(runs) > len(arms),
    fields=tables.fields(arms),
    groups=groups,
    colours=list(zip(arms, figures.colours(len(arms)), strict=True)),
    evaluations=tables.evaluations(arms),
    pairs=tables.minimal_pairs(pairs),
    finetuning=tables.finetuning(finetune),
    time=tables.time(arms),
    checkpoints=tables.checkpoints(runs),
    next=[(arm.runs[0], tables.commands(arm.runs[0])) for arm in arms],
    # These two are Bokeh's: they escape what they hold.
    resources=Markup(Resources(mode="inline", components=["bokeh"]).render()),
    script=Markup(script),
  )
