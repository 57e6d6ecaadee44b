"""Estimates the cost of a training step by compiling it for accelerators, which may be absent.

  electra-jax preflight --config=configs/large.py --topology=v5e:16x16[,v4:2x2x4,...]
  electra-jax preflight --config=configs/large.py --topology=h200x8[,a100x64,...]
  electra-jax preflight --config=configs/large.py --topology=here

TPU slices need only the TPU compiler (the extra `tpu`), GPUs only the GPU compiler (`gpu-compile`,
without CUDA libraries). Memory and communicated bytes come from this version of XLA; the memory was
0.7 and 1.1 % below the peak measured on an H200 (docs/preflight.md). Times are lower bounds, with
matrix products, memory and links at the data sheet's peak. `here` means the devices of this
machine.
"""

import argparse

from electra_jax.commands import cli
from electra_jax.monitor.display import starting
from electra_jax.runtime import terminal


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.add_config()
  p.add_argument(
    "--topology",
    metavar="NAME[,NAME...]",
    type=lambda names: [name for name in names.split(",") if name],
    help="TPU slices or GPUs, e.g. v5e:16x16,v4:2x2x4,h200x8; or here",
  )
  p.add_argument("--json", metavar="FILE", help="write the numbers, one JSON line per column")


def main(args: argparse.Namespace) -> None:
  """Prints a column for each topology."""
  if args.config is None or not args.topology:
    raise cli.UsageError("--config=FILE and --topology=v5e:16x16 or h200x8 are needed")
  if "here" in args.topology and len(args.topology) > 1:
    raise cli.UsageError("--topology=here cannot be combined with others")
  with starting():  # slow, and not needed for --help
    from electra_jax.cost import preflight
    from electra_jax.interop import initial

  config, _ = initial.resolve(args.config, args.config_fields)
  preflight.run(config, args.topology, args.json, terminal.console())
