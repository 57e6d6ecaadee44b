"""Finds, reads, compares and checks configurations, and builds the objects of `core` from them."""

# For configuration files.
from electra_jax.config.files import load as load
from electra_jax.config.files import load_size as load_size
