"""Prints FLOPs: electra-jax flops [--config=FILE [--match=FILE]]

Without --config: the paper's models beside the paper's figures. With --config: the cost of a step
and of the whole run, by the paper's accounting and in matrix products. With --match: the number of
steps that cost as much as the other configuration's whole run, for comparisons at equal compute.
"""

from absl import flags

from electra_jax.config import cli
from electra_jax.runtime import terminal
from electra_jax.runtime.display import starting


def main() -> None:
  """Runs from the command line."""
  config, match = flags.FLAGS.config, flags.FLAGS.match
  if match and config is None:
    raise flags.Error("--match=FILE needs --config=FILE")
  with starting():  # slow, and not needed for --help
    from electra_jax.programs import flops

  flops.run(config, match, terminal.console())


if __name__ == "__main__":
  cli.define_config_flag()
  flags.DEFINE_string("match", None, "configuration file whose whole run is to be matched")
  cli.run(main)
