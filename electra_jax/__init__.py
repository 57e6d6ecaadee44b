"""Replaced-token-detection pretraining of text encoders in JAX."""

__version__ = "0.1.0"
