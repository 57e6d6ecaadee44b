"""`python -m electra_jax.report` is the command report, see commands/report.py."""

from electra_jax.commands import cli

if __name__ == "__main__":
  cli.start("report")
