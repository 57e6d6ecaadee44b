"""`python -m electra_jax.train` is the command train, see commands/train.py."""

from electra_jax.commands import cli

if __name__ == "__main__":
  cli.start("train")
