"""`python -m electra_jax.config` is the command config, see commands/config.py."""

from electra_jax.commands import cli

if __name__ == "__main__":
  cli.start("config")
