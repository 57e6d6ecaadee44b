"""Exports networks: electra-jax export --model=SOURCE --to=hf|onnx|orbax --out=DIR

SOURCE is a run, an orbax export, a Hugging Face folder, a TF1 checkpoint of the original, or a name
on Hugging Face's Hub, hf://ORG/NAME[@REVISION]. DIR must not exist; it is written completely or not
at all. SOURCE and DIR may be URLs of gs:// or s3://: SOURCE is copied to ~/.cache/electra_jax, and
DIR is uploaded when it is complete. The number of heads of a TF1 checkpoint comes from a
config.json in its folder, or from --heads.

orbax  the discriminator's weights, its config and the tokenizer, for fine-tuning.
hf     DIR/discriminator, the network to fine-tune, and DIR/generator, if there is one, each with
       config.json, model.safetensors, the tokenizer's files and a model card. A discriminator of
       ModernBERT's shape is written without its head, and with the head to DIR/detector. The
       detection head and the mask decoder of DeBERTa's shape are in the files, but transformers has
       no class that computes them.
       --dtype=bfloat16 or float16 halves the bytes of the weights, --max-shard-mb splits files, and
       --pooling=mean or cls writes DIR/discriminator for sentence-transformers. A fine-tuned
       network keeps its head if transformers has the same head, as with model.head=auto. If torch
       and transformers are installed, compares the logits on real text, and exports nothing if they
       differ by more than 5e-5 of their standard deviation. With rounding, compares in float32 from
       the rounded weights, and prints the effect of rounding on the logits.
onnx   as hf, plus a float32 model.onnx for onnxruntime in each folder, for any batch size and
       length, with the same comparison of logits. Needs torch, transformers, onnx, onnxscript and
       onnxruntime.

--step=N exports the checkpoint of a step, not the newest. --all-checkpoints exports step 0 and each
checkpoint to a folder such as DIR/step-00000650. Step 0 is initialised again, from the seed or from
init_from, which must be unchanged.

--push=ORG/NAME creates a private repository on the Hub and pushes DIR to it in one commit, with a
model card; log in first: hf auth login. --overwrite replaces all files of an existing repository.
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
    raise argparse.ArgumentTypeError(f"{text!r} must be one or two numbers of heads, e.g. 8,4")
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
  p.add_argument("paths", nargs="*", metavar="SOURCE DIR", help="instead of --model and --out")
  p.add_argument("--to", required=True, choices=("hf", "onnx", "orbax"))
  p.add_argument(
    "--heads",
    metavar="N[,M]",
    type=numbers_of_heads,
    default=(),
    help="heads of a TF1 checkpoint's discriminator (and generator), if it has no config.json",
  )
  p.add_argument("--step", type=int, metavar="N", help="step of a run, from 0; default: newest")
  p.add_switch("all-checkpoints", "step 0 and each checkpoint of a run, to DIR/step-00000000 ...")
  p.add_argument("--license", help="license of the weights, for the model card")
  p.add_argument(
    "--dtype",
    choices=("float32", "bfloat16", "float16"),
    help="dtype of the weights in hf, default float32; bfloat16 rounds by at most 0.4 %%, float16"
    " by 0.05 %%, and holds up to 65,504",
  )
  p.add_argument(
    "--max-shard-mb",
    metavar="N",
    type=megabytes,
    help="megabytes (10^6 bytes) per file of weights in hf, unless one tensor is larger; default:"
    " one file",
  )
  p.add_argument(
    "--pooling",
    choices=("mean", "cls"),
    help="write the main network in hf for sentence-transformers, with this pooling",
  )

  p.add_argument(
    "--push", metavar="ORG/NAME", help="push DIR to a repository on the Hub, private if new"
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
    raise cli.UsageError(f"{given}: only for --to hf, not {args.to}")
  if args.all_checkpoints and args.step is not None:
    raise cli.UsageError("--step cannot be combined with --all-checkpoints")
  if args.push and (args.all_checkpoints or args.to == "orbax"):
    raise cli.UsageError("--push needs --to hf or onnx, without --all-checkpoints")
  if args.overwrite and not args.push:
    raise cli.UsageError("--overwrite needs --push; DIR must be new")
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
