"""Fine-tunes on tasks, compares results and predicts.

  electra-jax finetune --config=configs/finetune/glue.py:mrpc --model=RUN_OR_EXPORT
                       --config.data.dir=GLUE --workdir=DIR
  electra-jax finetune --compare DIR_A DIR_B
  electra-jax finetune --predict FILE --model=DIR [--out=FILE] [--columns=id,text]

The first form trains several seeds and writes results.jsonl and results.png to DIR and, for each
task, a folder with networks, predictions and files for --compare. It skips finished tasks. --model,
the same as --config.init, is a run, an export, a Hugging Face folder, a TF1 checkpoint, or
hf://ORG/NAME[@REVISION] on Hugging Face's Hub. FILE has the format of the task's files, or is a
.txt with one text per line.
"""

import argparse
from pathlib import Path

from electra_jax.commands import cli
from electra_jax.monitor.display import starting
from electra_jax.runtime import terminal
from electra_jax.runtime.workdir import check_new


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.add_config("configs/finetune/glue.py:mrpc", base="finetune/base.py")
  p.add_argument("--workdir", metavar="DIR", help="folder for the results")
  p.add_argument("--model", metavar="SOURCE", help="network; for --predict: a fine-tuned one")
  p.add_argument("--compare", nargs=2, metavar=("A", "B"), type=Path, help="two folders of results")
  p.add_argument("--predict", metavar="FILE", type=Path, help="file to predict")
  p.add_argument("--out", metavar="FILE", type=Path, help="file for the predictions")
  p.add_argument(
    "--columns",
    metavar="NAMES",
    action="extend",
    default=[],
    type=lambda names: [name for name in names.split(",") if name],
    help="columns of FILE to copy to the predictions, e.g. id,text; for pairs: the one to embed",
  )


def main(args: argparse.Namespace) -> None:
  """Trains, compares or predicts."""
  asked = {x: getattr(args, x) for x in ("config", "compare", "predict")}
  if len(named := [f"--{name}" for name, value in asked.items() if value is not None]) > 1:
    raise cli.UsageError(f"{' and '.join(named)} cannot be combined")
  if args.predict:
    predict(args)
  elif args.compare:
    with starting():  # slow, and not needed for --help
      from electra_jax.finetune import results

    results.compare(*args.compare, terminal.console())
  else:
    train(args)


def train(args: argparse.Namespace) -> None:
  """Fine-tunes with --config and --workdir."""
  if args.config is None:
    raise cli.UsageError("--config is needed, e.g. configs/finetune/own.py, and --workdir=DIR")
  if not args.workdir:
    raise cli.UsageError("--workdir=DIR is needed, a folder for the results")
  if args.model:
    if "init" in args.config_fields:
      raise cli.UsageError("--model is the same as --config.init: give only one")
    args.config.init = args.model
  with starting():  # slow, and not needed for --help
    from electra_jax.finetune import train
    from electra_jax.runtime import parallel

  parallel.keep_freed_memory()
  train.prepare.warn_of_unread_overrides(args.config, args.config_fields)
  train.fine_tune(args.config, args.workdir)


def predict(args: argparse.Namespace) -> None:
  """Predicts a file."""
  if args.model is None:
    raise ValueError("--predict needs --model: the folder of a fine-tuned network or its results")
  if args.out:
    check_new(args.out)
  with starting():  # slow, and not needed for --help
    from electra_jax.finetune import train

  train.predict(args.predict, Path(args.model), args.out, args.columns, terminal.console())
