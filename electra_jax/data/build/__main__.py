"""`python -m electra_jax.data.build` runs the command `build`; see commands/build.py."""

from electra_jax.commands import cli

if __name__ == "__main__":
  cli.start("build")
