"""`python -m electra_jax.finetune` is the command finetune, see commands/finetune.py."""

from electra_jax.commands import cli

if __name__ == "__main__":
  cli.start("finetune")
