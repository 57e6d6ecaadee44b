"""`python -m electra_jax.export` runs the command `export`; see commands/export.py."""

from electra_jax.commands import cli

if __name__ == "__main__":
  cli.start("export")
