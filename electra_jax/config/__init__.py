"""Configurations: found and read, compared, checked, and turned into the objects of `core`."""

from electra_jax.config.files import load as load  # what a configuration file starts with
