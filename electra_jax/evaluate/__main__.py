"""`python -m electra_jax.evaluate` is the command evaluate, see commands/evaluate.py."""

from electra_jax.commands import cli

if __name__ == "__main__":
  cli.start("evaluate")
