"""`python -m electra_jax.experiments` is the command experiment, see commands/experiment.py."""

from electra_jax.commands import cli

if __name__ == "__main__":
  cli.start("experiment")
