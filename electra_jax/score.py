"""Scores sentences: electra-jax score --checkpoint=SOURCE < sentences.txt

SOURCE is a run, an orbax export, a Hugging Face folder or a TF1 checkpoint of the original.
Prints for each line its pseudo-log-likelihood in nats (the sum over its tokens of log p of each
given all others), its number of tokens, and the line. Electric and ELECTRA with a two-tower
generator need one pass per sentence, a masked language model one per token.

With --nbest the lines are ID, score and hypothesis, separated by tabs. For each ID, the hypothesis
with the highest score + weight x likelihood is printed in the same form (Clark et al. 2020b,
Section 4.2: weights from 0.05 to 1).
"""

import math
import sys

from absl import flags

from electra_jax.config import cli
from electra_jax.runtime.display import starting


def main() -> None:
  """Runs from the command line."""
  args = flags.FLAGS
  if not args.checkpoint:
    raise flags.Error("--checkpoint=SOURCE is needed: a run, an export or a checkpoint")
  data = sys.stdin.buffer.read()
  try:
    lines = data.decode("utf-8-sig").removesuffix("\n")
  except UnicodeDecodeError as error:
    number = error.object[: error.start].count(b"\n") + 1
    raise ValueError(f"line {number} is not UTF-8 text ({error.reason})") from None
  lines = [line.removesuffix("\r") for line in lines.split("\n")] if lines else []
  with starting():  # slow, and not needed for --help
    from electra_jax.programs import score

  score.run(
    lines, args.checkpoint, args.data_dir, args.batch_size, args.weight if args.nbest else None
  )


if __name__ == "__main__":
  flags.DEFINE_string(
    "checkpoint", None, "a run (its newest checkpoint), an export, a Hugging Face folder or TF1's"
  )
  flags.DEFINE_alias("model", "checkpoint")
  flags.DEFINE_string(
    "data_dir", None, "folder of shards with its vocabulary; default: those of the run"
  )
  flags.DEFINE_integer("batch_size", 32, "sentences per batch", 1, 2**31 - 1)
  flags.DEFINE_bool("nbest", False, "read ID, score, hypothesis; print the best hypothesis of each")
  flags.DEFINE_float("weight", 0.5, "with --nbest: weight of the likelihood added to the score")
  flags.register_validator("weight", math.isfinite, "must be finite")
  cli.run(main)
