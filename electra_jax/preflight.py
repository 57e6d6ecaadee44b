"""`python -m electra_jax.preflight` is the command preflight, see commands/preflight.py."""

from electra_jax.commands import cli

if __name__ == "__main__":
  cli.start("preflight")
