"""Measures a pretrained network in minutes, before any fine-tuning.

  electra-jax evaluate pairs --model=SOURCE --data=FILE.jsonl [--scorer=NAME] [--out=DIR]
  electra-jax evaluate detect --model=SOURCE --data=SHARDS
  electra-jax evaluate probe --model=SOURCE --train=FILE --test=FILE

SOURCE is a run, an orbax export, a Hugging Face folder or a TF1 checkpoint.

pairs   which sentence of a minimal pair is acceptable: lines of JSON with sentence_good and
        sentence_bad, and UID (paradigm) and linguistics_term (category) if known, as BLiMP's.
        Scorers: mlm, the pseudo-log-likelihood of a masked language model, a pass for each token;
        mlm_words, the same with the later pieces of a word masked too; mlm_unmasked, with nothing
        masked, one pass, for networks that learned words from replacements (replace_mlm,
        all_tokens_mlm, electra_mlm, metro, coco_lm); rtd, the log-probability that all tokens are
        original, one pass; energy, Electric's. Default: the objective's, if a run or an export
        names it. Writes DIR/pairs.json and .png.
detect  AUC of detecting replacements drawn by token frequency in held-out shards: it does not
        depend on the run's generator.
probe   F1 or accuracy of a linear classifier of the words' frozen states, on CoNLL files.
"""

import argparse
from pathlib import Path

from electra_jax.config import cli
from electra_jax.runtime import terminal
from electra_jax.runtime.display import starting


def parser() -> argparse.ArgumentParser:
  """Returns the parser of the command line."""
  p = cli.parser(__doc__)
  commands = p.add_subparsers(required=True, metavar="pairs|detect|probe", dest="what")

  def add(name: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name)
    cli.add_import(command)
    command.add_argument("--model", required=True, metavar="SOURCE")
    return command

  command = add("pairs")
  command.add_argument("--data", required=True, type=Path, metavar="FILE")
  command.add_argument("--scorer", metavar="NAME", help="default: the objective's own")
  command.add_argument("--out", type=Path, metavar="DIR", help="a new folder")
  command = add("detect")
  command.add_argument("--data", required=True, metavar="SHARDS")
  command.add_argument("--batch_size", type=cli.positive, default=64)
  command.add_argument("--examples", type=cli.positive, default=2048, help="at most, evenly spaced")
  command = add("probe")
  command.add_argument("--train", required=True, metavar="FILE")
  command.add_argument("--test", required=True, metavar="FILE")
  command.add_argument(
    "--max_words", type=cli.positive, default=100_000, help="of the training file"
  )
  return p


def main() -> None:
  """Runs from the command line."""
  args = parser().parse_args()
  with starting():  # slow, and not needed for --help
    from electra_jax.programs import evaluate

  evaluate.PROGRAMS[args.what](args, terminal.console())


if __name__ == "__main__":
  cli.report(main)
