"""The page of a report, from a template and Bokeh's scripts, all in one file."""

from collections.abc import Sequence
from pathlib import Path

import jinja2
from bokeh.embed import components
from bokeh.resources import Resources
from markupsafe import Markup

from electra_jax.report import figures, saved_run, tables, verdict

KINDS = {
  verdict.GOOD: "good", verdict.LOOK: "look", verdict.BAD: "bad", verdict.EARLY: "look",
  verdict.UNKNOWN: "look",
}  # fmt: skip


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

  Raises:
    ValueError: a folder is no run, or holds no results.
  """
  runs = [saved_run.read(*x) for x in zip(folders, saved_run.names(list(folders)), strict=True)]
  drawn = figures.draw(runs)
  plots = {name: panel.plot for panels in drawn.values() for name, panel in panels.items()}
  script, divs = components(plots) if plots else ("", {})
  groups = [
    (figures.TITLES[key], [(panel, Markup(divs[name])) for name, panel in panels.items()])
    for key, panels in drawn.items()
  ]
  judged = [(run, found := verdict.judge(run), KINDS[found.word]) for run in runs]
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,  # names and values are whatever somebody wrote
    trim_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  return environment.get_template("page.html").render(
    title=", ".join(run.name for run in runs),
    verdicts=judged,
    warned=[run for run in runs if run.warnings],
    overview=tables.overview(runs, price),
    price=price,
    fields=tables.fields(runs),
    groups=groups,
    colours=list(zip(runs, figures.COLOURS * len(runs), strict=False)),
    evaluations=tables.evaluations(runs),
    pairs=tables.minimal_pairs(pairs),
    finetuning=tables.finetuning(finetune),
    time=tables.time(runs),
    checkpoints=tables.checkpoints(runs),
    next=[(run, tables.commands(run)) for run in runs],
    # These two are Bokeh's: they escape what they hold.
    resources=Markup(Resources(mode="inline", components=["bokeh"]).render()),
    script=Markup(script),
  )
