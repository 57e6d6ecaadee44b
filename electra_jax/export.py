"""Exports networks: electra-jax export SOURCE --to hf|orbax OUT

SOURCE is a run, an orbax export, a Hugging Face folder or a TF1 checkpoint of the original,
recognised by its files. OUT must not exist; it is written completely or not at all. A TF1
checkpoint's number of heads comes from a config.json beside it, or --heads.

orbax  the discriminator's weights, its config and the tokenizer, as read by fine-tuning.
hf     OUT/discriminator and, if there is one, OUT/generator, each with config.json,
       model.safetensors, the tokenizer's files and a model card. They load with AutoModel,
       AutoTokenizer, ElectraForPreTraining and ElectraForMaskedLM. A fine-tuned network keeps its
       head if Hugging Face has the same one. ELECTRA: tagging; text with model.head=two_layers;
       questions with qa.joint=False and qa.answerable_weight=0. ModernBERT: the same tasks with
       model.head=modernbert, and text with modernbert_mean. If torch and transformers are
       installed, the largest difference of logits on real text is printed, and above 1e-4 (float32)
       nothing is exported.
"""

import argparse
import re
from pathlib import Path

from electra_jax.config import cli
from electra_jax.runtime import terminal
from electra_jax.runtime.display import starting


def numbers_of_heads(text: str) -> tuple[int, ...]:
  """Parses "8" or "8,4".

  >>> numbers_of_heads("8,4")
  (8, 4)
  """
  if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)?", text):
    raise argparse.ArgumentTypeError(f"{text!r} is no number of heads, nor two as in 8,4")
  return tuple(map(int, text.split(",")))


def main() -> None:
  """Runs from the command line."""
  p = cli.parser(__doc__)
  p.add_argument("source", metavar="SOURCE")
  p.add_argument("out", metavar="OUT", type=Path)
  p.add_argument("--to", required=True, choices=("hf", "orbax"))
  p.add_argument(
    "--heads",
    metavar="N[,M]",
    type=numbers_of_heads,
    default=(),
    help="of a TF1 checkpoint's discriminator (and generator), where no config.json beside it says",
  )
  p.add_argument("--license", help="of the weights, for the model card")
  args = p.parse_args()
  with starting():  # slow, and not needed for --help
    from electra_jax.programs import export

  console = terminal.console()
  export.run(
    args.source, args.out, args.to, console, heads=args.heads, weights_license=args.license
  )


if __name__ == "__main__":
  cli.report(main)
