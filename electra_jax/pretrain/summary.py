"""What a run prints when it starts and when it ends."""

from collections.abc import Mapping

import jax
from rich.console import Console
from rich.table import Table

from electra_jax.config import compare
from electra_jax.core import generators
from electra_jax.interop import sources
from electra_jax.monitor import curves, metrics, quantities, thinned
from electra_jax.monitor.display import doing
from electra_jax.monitor.trackers import dropping
from electra_jax.pretrain.run import Run
from electra_jax.runtime import checkpoint, terminal, version
from electra_jax.runtime.workdir import CONFIG_FILE

CURVES_FILE = "curves.png"


def describe(run: Run, console: Console, allowed: list[str]) -> None:
  """Prints what the run is; `allowed` are the changes of fields in a run that resumes."""
  c, counts = run.config, generators.count_networks(run.spec, run.fns.shapes.params)
  sizes = {name: f"{count / 1e6:,.2f} M" for name, count in counts.items()}
  sequences, devices = c.train.steps * c.train.batch_size, jax.devices()
  limit = f"{terminal.duration(60 * c.train.minutes)}, at most " if c.train.minutes else ""
  large, changed = run.spec.discriminator, compare.changed_from_base(c)
  changed = {name: x for name, x in changed.items() if name not in run.taken}
  lines = {
    "electra_jax": f"{version.code_version()}, jax {jax.__version__}",
    "run": f"{run.workdir}, objective {c.objective.name}, seed {c.seed}",
    "devices": f"{len(devices)} x {devices[0].device_kind}, {jax.process_count()} process(es),"
    f" peak {len(devices) * run.peak[0] / 1e12:,.3g} TFLOP/s ({run.peak[1]})",
    "networks": f"{large.num_layers} layers of {large.hidden_size}, {sizes['discriminator']}"
    f" parameters, generator {sizes['generator']} more, {sizes['trained']} trained,"
    f" {large.compute.dtype}, attention {large.compute.attention}",
    "data": f"{run.record['data']['dir']}: {run.shards.num_examples:,} sequences of"
    f" {run.shards.seq_length} tokens, {run.heldout.num_examples if run.heldout else 0:,} held out,"
    f" from {run.shards.manifest['build']['sources']}",
    "vocabulary": f"{run.shards.vocab.size:,} {run.shards.vocab.kind} entries,"
    f" held-out unigram entropy {quantities.shown('loss', run.baselines.entropy)} per token",
    "training": f"{limit}{c.train.steps:,} steps x {c.train.batch_size:,} sequences ="
    f" {sequences * run.shards.seq_length:,} tokens ="
    f" {sequences / run.shards.num_examples:,.2f} epochs,"
    f" {run.flops_per_step * c.train.steps:.3g} FLOPs in matrix products",
  }
  if reasons := sources.without_class(run.spec):
    lines["not exported"] = "; ".join(f"the {role}: {why}" for role, why in reasons.items())
  if run.taken:
    lines["as in init_from"] = ", ".join(f"{name} = {x!r}" for name, x in run.taken.items())
  if allowed:
    lines["changed in this run"] = ", ".join(allowed)
  for name, text in lines.items():
    console.print(terminal.fill(f"{name + ': ':<13}{text}", console.width, indent=13))
  console.print(f"changed from base: {len(changed)} fields, all are in {run.workdir / CONFIG_FILE}")
  groups: dict[str, list[str]] = {}
  for name, (_, value) in changed.items():
    group, dot, field = name.rpartition(".")
    groups.setdefault(group, []).append(f"{field}={value!r}")
  for group, fields in sorted(groups.items()):
    line = f"  {group and group + ':':<12}{' '.join(fields)}"
    console.print(terminal.fill(line, console.width, indent=14))


def draw_curves(run: Run, history: list[Mapping]) -> None:
  """Draws curves.png from the lines so far."""
  title = terminal.printable(f"{run.workdir.absolute().name}: {run.config.objective.name}")
  curves.draw(run.workdir / CURVES_FILE, title, history, run.baselines)


def finish(run: Run, done: int, console: Console) -> None:
  """Draws the curves; prints the final metrics and the paths of the results."""
  history = thinned.read(run.workdir / metrics.HISTORY_FILE)
  with doing("drawing", console), dropping(CURVES_FILE, lambda x: console.print(f"warning: {x}")):
    draw_curves(run, history)
  heldout = [line for line in history if line["split"] == "heldout"]
  if heldout:
    table = Table(title="held-out documents")
    ends = [heldout[0], *heldout[1:][-1:]]
    for title in ("", *(f"step {line['step']:,}" for line in ends), "trivial baseline"):
      table.add_column(title, justify="right" if title else "left")
    for name in (k for k in heldout[-1] if k not in ("step", "split")):
      values = (quantities.shown(name, line.get(name)) for line in ends)
      trivial = run.baselines.shown(name, heldout[-1])
      table.add_row(quantities.label(name), *values, trivial)
    console.print(table)
  console.print(f"checkpoint: {checkpoint.folder_of(run.workdir) / str(done)}")
  console.print(f"curves:     {run.workdir / CURVES_FILE}")
  console.print(f"metrics:    {run.workdir / metrics.HISTORY_FILE}")
  console.print(f"samples:    {terminal.program()} show --model={run.workdir}")
