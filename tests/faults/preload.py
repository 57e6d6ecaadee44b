"""Imports TensorFlow in the process that forks into the runs of `harness`, and JAX not yet."""

import os
import sys

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # as the program does before it imports it
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.modules["jax"] = None  # TensorFlow Lite looks for it; JAX is to read each run's environment
import tensorflow  # noqa: E402, F401

del sys.modules["jax"]
