"""Estimates the cost of a training step by compiling it for accelerators, present or not.

  electra-jax preflight --config=configs/large.py --topology=v5e:16x16[,v4:2x2x4,...]
  electra-jax preflight --config=configs/large.py --topology=h200x8[,a100x64,...]
  electra-jax preflight --config=configs/large.py --topology=here

A TPU slice needs only the TPU compiler (the extra `tpu`), GPUs only theirs (`gpu-compile`, without
CUDA's libraries). Memory and communicated bytes are the compiler's, for this version of XLA; the
memory was 0.7 and 1.1 % below the real peak of an H200 (docs/speed.md). Times are lower bounds:
products at the data sheet's peak, memory and links at their full rate. `here` means the devices of
this machine.
"""

from absl import flags

from electra_jax.config import cli
from electra_jax.runtime import terminal
from electra_jax.runtime.display import starting


def main() -> None:
  """Runs from the command line."""
  args = flags.FLAGS
  if args.config is None or not args.topology:
    raise flags.Error("--config=FILE and --topology=v5e:16x16 or h200x8 are needed")
  if "here" in args.topology and len(args.topology) > 1:
    raise flags.Error("--topology=here stands alone")
  with starting():  # slow, and not needed for --help
    from electra_jax.programs import preflight

  preflight.run(args.config, args.topology, args.json, terminal.console())


if __name__ == "__main__":
  cli.define_config_flag()
  flags.DEFINE_list("topology", None, "TPU slices or GPUs, e.g. v5e:16x16,v4:2x2x4,h200x8; or here")
  flags.DEFINE_string("json", None, "output file for the same numbers, one JSON line per column")
  cli.run(main)
