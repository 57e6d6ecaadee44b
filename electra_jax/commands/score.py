"""Scores sentences: electra-jax score --model=SOURCE < sentences.txt

SOURCE is a run, an orbax export, a Hugging Face folder, hf://ORG/NAME[@REVISION] on its Hub, or a
TF1 checkpoint of the original. For each line, prints its pseudo-log-likelihood in nats (the sum
over tokens of log p of the token given all others), its number of tokens, and the line. Electric
and ELECTRA with a two-tower generator need one pass per sentence, a masked language model one per
token.

With --nbest, lines are ID, score and hypothesis, separated by tabs. Prints, in the same form, the
hypothesis of each ID with the highest score + weight x likelihood (Clark et al. 2020b, Section 4.2:
weights from 0.05 to 1).
"""

import argparse
import math
import sys

from electra_jax.commands import cli
from electra_jax.monitor.display import starting


def finite(text: str) -> float:
  """Parses a finite number."""
  if not math.isfinite(number := float(text)):
    raise argparse.ArgumentTypeError(f"must be finite, got {text!r}")
  return number


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.add_argument("--model", "--checkpoint", metavar="SOURCE")
  p.add_argument("--data-dir", metavar="DIR", help="shards with the vocabulary; default: the run's")
  p.add_argument("--batch-size", type=cli.positive, default=32, metavar="N", help="in sentences")
  p.add_switch("nbest", "read ID, score, hypothesis; print the best hypothesis of each ID")
  p.add_argument(
    "--weight", type=finite, default=0.5, metavar="W", help="with --nbest: weight of the likelihood"
  )


def main(args: argparse.Namespace) -> None:
  """Scores the lines of the standard input."""
  if not args.model:
    raise cli.UsageError("--model=SOURCE is needed: a run, an export or a checkpoint")
  data = sys.stdin.buffer.read()
  try:
    lines = data.decode("utf-8-sig").removesuffix("\n")
  except UnicodeDecodeError as error:
    number = error.object[: error.start].count(b"\n") + 1
    raise ValueError(f"line {number} is not UTF-8 text ({error.reason})") from None
  lines = [line.removesuffix("\r") for line in lines.split("\n")] if lines else []
  with starting():  # slow, and not needed for --help
    from electra_jax.evaluate import likelihoods

  weight = args.weight if args.nbest else None
  likelihoods.run(lines, args.model, args.data_dir, args.batch_size, weight)
