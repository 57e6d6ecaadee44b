"""Fine-tunes on tasks, compares results and predicts.

  electra-jax finetune --config=configs/finetune/glue.py:mrpc --config.init=RUN_OR_EXPORT
                       --config.data.dir=GLUE --workdir=DIR
  electra-jax finetune --compare DIR_A DIR_B
  electra-jax finetune --predict FILE --model=DIR [--out=FILE] [--columns=id,text]

The first trains several seeds and writes to DIR: results.jsonl, results.png, and for each task a
folder with the kept networks, their predictions and the files for --compare. A finished task is not
trained again.
"""

import sys
from pathlib import Path

from absl import flags

from electra_jax.config import cli
from electra_jax.runtime import terminal
from electra_jax.runtime.display import starting
from electra_jax.runtime.workdir import check_new


def main() -> None:
  """Trains according to --config and --workdir."""
  config, root = flags.FLAGS.config, flags.FLAGS.workdir
  if config is None or not root:
    raise flags.Error("--config=configs/finetune/glue.py:TASK and --workdir=DIR are needed")
  with starting():  # slow, and not needed for --help
    from electra_jax.programs import finetune
    from electra_jax.runtime import parallel

  parallel.keep_freed_memory()
  finetune.prepare.warn_of_unread_overrides(config, cli.overrides())
  finetune.fine_tune(config, root)


def report() -> None:
  """Runs --compare or --predict."""
  parser = cli.parser(__doc__)
  one_of = parser.add_mutually_exclusive_group(required=True)
  one_of.add_argument(
    "--compare", nargs=2, metavar=("A", "B"), type=Path, help="two folders of results"
  )
  one_of.add_argument("--predict", metavar="FILE", type=Path, help="file to predict")
  parser.add_argument("--model", metavar="DIR", type=Path, help="network folder, for --predict")
  parser.add_argument("--out", metavar="FILE", type=Path, help="output path, for --predict")
  parser.add_argument(
    "--columns",
    metavar="NAMES",
    action="extend",
    default=[],
    type=lambda names: [name for name in names.split(",") if name],
    help="columns of FILE to copy, for --predict: id,text",
  )
  args = parser.parse_args()
  if args.predict and args.model is None:
    raise ValueError("--predict needs --model: the folder of a fine-tuned network or its results")
  if args.out:
    check_new(args.out)
  with starting():  # slow, and not needed for --help
    from electra_jax.finetune import results
    from electra_jax.programs import finetune

  if args.compare:
    results.compare(*args.compare, terminal.console())
  else:
    finetune.predict(args.predict, args.model, args.out, args.columns, terminal.console())


if __name__ == "__main__":
  if any(arg.partition("=")[0] in ("--compare", "--predict") for arg in sys.argv[1:]):
    cli.report(report)
  else:
    cli.define_config_flag("configs/finetune/glue.py:mrpc")
    flags.DEFINE_string("workdir", None, "folder of the results")
    cli.run(main, base="finetune/base.py")
