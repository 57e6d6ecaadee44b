"""Finds, reads, compares and checks configurations, and builds the objects of `core` from them."""

from electra_jax.config.files import load as load  # used by configuration files
