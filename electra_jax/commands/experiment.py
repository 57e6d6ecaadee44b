"""Compares configurations (arms) over seeds, at equal FLOPs, steps or minutes.

  electra-jax experiment FILE.py[:ARG] --out=DIR [--rows=FILE] [--only=ARM,ARM] [--at-once=N]
                         [--part=I/N]
  electra-jax experiment --arms A.py B.py --out=DIR [--seeds=3] [--match=flops|steps|minutes]
                         [--pairs=FILE] [--set FIELD=VALUE ...]
  electra-jax experiment FILE.py --out=DIR --report

FILE.py has get_experiment(), which returns an `Experiment` (electra_jax/experiments/definition.py):
arms, budgets, learning rates to search, seeds, measures. With --arms, each arm gets the budget of a
whole run of the first, the control. Each result is a row of DIR/rows.jsonl. Started again, also on
another machine that sees DIR, the command does what is left. Several processes may run at once,
e.g. as an array of jobs (launch/experiment.sbatch); --part sets the runs with which each begins.
Writes a table, with mean ± standard deviation over seeds and the difference from the control,
paired by seed, ± its standard error, to DIR/results.md and a plot to DIR/results.png.
"""

import argparse
import re
import signal
from pathlib import Path

from electra_jax.commands import cli
from electra_jax.monitor.display import starting
from electra_jax.runtime import terminal


def part(text: str) -> tuple[int, int]:
  """Parses I/N with 0 <= I < N.

  >>> part("0/4")
  (0, 4)
  """
  match = re.fullmatch(r"(\d+)/(\d+)", text)
  if not match or not int(match[1]) < int(match[2]):
    raise argparse.ArgumentTypeError(f"{text!r} must be I/N, e.g. 0/4")
  return int(match[1]), int(match[2])


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.add_argument("file", nargs="?", metavar="FILE.py[:ARG]", help="with get_experiment()")
  p.add_argument(
    "--arms", nargs="+", metavar="CONFIG", help="configurations; the first is the control"
  )
  p.add_argument("--out", type=Path, required=True, metavar="DIR")
  p.add_argument("--rows", type=Path, metavar="FILE", help="results; default: DIR/rows.jsonl")
  p.add_argument("--seeds", type=cli.positive, default=3, metavar="N", help="with --arms")
  p.add_argument(
    "--match", default="flops", choices=("flops", "steps", "minutes"), help="with --arms"
  )
  p.add_argument("--pairs", metavar="FILE", help="with --arms: minimal pairs to evaluate on")
  p.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="for all --arms")
  p.add_argument(
    "--only", action="append", metavar="ARM[,ARM...]", help="arms to run now; may be repeated"
  )
  p.add_argument("--at-once", type=cli.positive, default=1, metavar="N", help="runs at a time")
  p.add_argument(
    "--part", type=part, default=(0, 1), metavar="I/N", help="begin with runs I, I + N, I + 2 N ..."
  )
  p.add_switch("report", "only report: run nothing")


def main(args: argparse.Namespace) -> None:
  """Runs what is left of an experiment and reports the results."""
  if bool(args.file) == bool(args.arms):
    raise cli.UsageError("give either FILE.py or --arms")
  with starting():  # slow, and not needed for --help
    from electra_jax.config.compare import flatten
    from electra_jax.experiments import definition, jobs, plan, runner, summary
    from electra_jax.monitor.trackers import dropping
    from electra_jax.runtime import jax_flags
    from electra_jax.runtime.workdir import replacing

  jax_flags.check()
  if args.file:
    experiment = definition.load(args.file)
  else:
    words = [f"--config.{text}" for text in args.set]
    config, names, _ = cli.configured(jobs.file_of(args.arms[0]), words)
    fields = {name: flatten(config)[name] for name in names}
    experiment = definition.of_configurations(
      args.arms, args.match, fields, args.seeds, pairs=args.pairs
    )
  # The name of an arm may have a comma.
  given = [[text] if text in experiment.arms else text.split(",") for text in args.only or ()]
  only = sum(given, []) or list(experiment.arms)
  if unknown := [name for name in only if name not in experiment.arms]:
    raise ValueError(f"--only: unknown arm {unknown[0]!r}; arms: {', '.join(experiment.arms)}")
  console, rows = terminal.console(), args.rows or args.out / runner.ROWS
  for folder in (args.out, rows.parent):
    folder.mkdir(parents=True, exist_ok=True)
  if not args.report:
    signal.signal(signal.SIGTERM, jobs.stop)
    runner.Runner(experiment, args.out, rows, console).run(only, args.at_once, args.part)
  found = jobs.Rows(rows).read()
  if not (lines := summary.report(experiment, found)):
    raise ValueError(f"{rows} has no results for these arms and budgets")
  console.print("\n".join(lines))
  with replacing(args.out / "results.md") as temporary:
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
  if shown := plan.reported(experiment, found):
    with dropping("results.png", lambda text: console.print(f"warning: {text}")):
      summary.draw(args.out / "results.png", experiment, shown)
