"""Replaced-token-detection pretraining of text encoders in JAX.

import electra_jax

encoder = electra_jax.load("runs/quickstart")  # or an export, a Hugging Face folder, TF1
vectors = encoder.embed(["A sentence.", "Another one."])  # float32 [2, D]
encoder.fill_mask("The capital of France is [MASK].")
encoder.detect("The chef ate the meal the next brick.")
"""

import importlib

__version__ = "0.1.0"
_HOMES = {"load": "encoder", "Encoder": "encoder"}  # {name: module}, imported when it is asked for
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str):
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
  return __all__
