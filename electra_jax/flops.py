"""`python -m electra_jax.flops` is the command flops, see commands/flops.py."""

from electra_jax.commands import cli

if __name__ == "__main__":
  cli.start("flops")
