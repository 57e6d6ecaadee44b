"""Exports networks: electra-jax export --model=SOURCE --to=hf|onnx|orbax --out=DIR

SOURCE is a run, an orbax export, a Hugging Face folder or a TF1 checkpoint of the original,
recognised by its files, or a name on Hugging Face's Hub: hf://ORG/NAME[@REVISION]. DIR must not
exist; it is written completely or not at all. SOURCE and DIR may be URLs of gs:// or s3://: what is
read is copied to ~/.cache/electra_jax first, and DIR is uploaded when it is complete. A TF1
checkpoint's number of heads comes from a config.json beside it, or --heads.

orbax  the discriminator's weights, its config and the tokenizer, as read by fine-tuning.
hf     DIR/discriminator, the network to fine-tune, and, if there is one, DIR/generator, each with
       config.json, model.safetensors, the tokenizer's files and a model card with the calls that
       open it. A discriminator of ModernBERT's shape goes out without its head, and once more with
       it, as DIR/detector. --dtype=bfloat16 rounds the weights to half the bytes, --max-shard-mb
       splits what is larger, --pooling=mean or cls makes DIR/discriminator a model of
       sentence-transformers. A fine-tuned network keeps its head if transformers has the same one,
       as it has by default (model.head=auto). If torch and transformers are installed, the largest
       difference of logits on real text is printed, and above 5e-5 of their standard deviation
       nothing is exported. For bfloat16, both compute in float32 from the rounded weights, and how
       much the rounding changed the logits is printed too.
onnx   as hf, and beside each network's weights model.onnx, its float32 network for onnxruntime, for
       any number of texts and tokens. Its logits are compared with ours as above. Needs torch,
       transformers, onnx, onnxscript and onnxruntime.

--step=N exports a run's checkpoint of that step, not its newest, and --all-checkpoints all that
the run has kept, each to a folder as DIR/step-00000650, with a card of its step. Step 0 has no
checkpoint: its weights are made again, from the seed or from init_from, which must be unchanged.

--push=ORG/NAME makes that repository on the Hub, private, and after the export puts DIR there in
one commit, with a model card. Log in before: hf auth login. A repository that has files is refused
without --overwrite, which replaces all of them; its history keeps them.
"""

import argparse
import math
import re

from electra_jax.commands import cli
from electra_jax.monitor.display import starting
from electra_jax.runtime import terminal


def numbers_of_heads(text: str) -> tuple[int, ...]:
  """Parses "8" or "8,4".

  >>> numbers_of_heads("8,4")
  (8, 4)
  """
  if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)?", text):
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of heads, or two as in 8,4")
  return tuple(map(int, text.split(",")))


def megabytes(text: str) -> float:
  """Parses a number above 0.

  >>> megabytes("15")
  15.0
  """
  try:
    number = float(text)
  except ValueError:
    number = math.nan
  if not 0 < number < math.inf:
    raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
  return number


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.add_argument("--model", metavar="SOURCE")
  p.add_argument("--out", metavar="DIR", help="a new folder")
  p.add_argument("paths", nargs="*", metavar="SOURCE DIR", help="without --model and --out")
  p.add_argument("--to", required=True, choices=("hf", "onnx", "orbax"))
  p.add_argument(
    "--heads",
    metavar="N[,M]",
    type=numbers_of_heads,
    default=(),
    help="of a TF1 checkpoint's discriminator (and generator), where no config.json beside it says",
  )
  p.add_argument("--step", type=int, metavar="N", help="of a run, 0 for its start; default: newest")
  p.add_switch("all-checkpoints", "step 0 and each checkpoint of a run, to DIR/step-00000000 ...")
  p.add_argument("--license", help="of the weights, for the model card")
  p.add_argument(
    "--dtype",
    choices=("float32", "bfloat16"),
    help="of the weights in hf, default float32; bfloat16 rounds each by at most 0.4 %%",
  )
  p.add_argument(
    "--max-shard-mb",
    metavar="N",
    type=megabytes,
    help="megabytes (10^6 bytes) per file of weights in hf, unless one tensor is larger: more"
    " go to several files, with an index; default: one file",
  )
  p.add_argument(
    "--pooling",
    choices=("mean", "cls"),
    help="of a text's vector: sentence-transformers then reads the main network's folder in hf",
  )

  p.add_argument(
    "--push", metavar="ORG/NAME", help="a repository on the Hub for DIR; private if new"
  )
  p.add_switch("overwrite", "with --push: replace the repository's files")


def main(args: argparse.Namespace) -> None:
  """Exports the networks of a source."""
  named = [x for x in (args.model, *args.paths, args.out) if x]
  if len(named) != 2:
    raise cli.UsageError("--model=SOURCE and --out=DIR are needed")
  storage = {x: getattr(args, x) for x in ("dtype", "max_shard_mb", "pooling")}
  storage = {name: value for name, value in storage.items() if value is not None}
  if args.to != "hf" and storage:
    given = " and ".join(f"--{x.replace('_', '-')}" for x in storage)
    raise cli.UsageError(f"{given}: for --to hf, an {args.to} export has its float32 weights whole")
  if args.all_checkpoints and args.step is not None:
    raise cli.UsageError("give --step or --all-checkpoints")
  if args.push and (args.all_checkpoints or args.to == "orbax"):
    raise cli.UsageError("--push: for one step's networks in hf or onnx, which have a model card")
  if args.overwrite and not args.push:
    raise cli.UsageError("--overwrite is for the repository of --push; DIR must be new")
  with starting():  # slow, and not needed for --help
    from electra_jax.export import writer

  writer.run(
    named[0],
    named[1],
    args.to,
    terminal.console(),
    heads=args.heads,
    step=args.step,
    all_checkpoints=args.all_checkpoints,
    weights_license=args.license,
    push=args.push,
    overwrite=args.overwrite,
    **storage,
  )
