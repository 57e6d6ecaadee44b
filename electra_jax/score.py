"""`python -m electra_jax.score` is the command score, see commands/score.py."""

from electra_jax.commands import cli

if __name__ == "__main__":
  cli.start("score")
