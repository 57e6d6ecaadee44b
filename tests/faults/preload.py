"""Imports what a run imports, in the process that forks into the runs of `harness`."""

import importlib
import os
import sys
import warnings

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # as the program does before it imports it
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.modules["jax"] = None  # TensorFlow Lite looks for it; the program has it without
importlib.import_module("tensorflow")
del sys.modules["jax"]
for name in ("electra_jax.pretrain.loop", "electra_jax.runtime.curves", "matplotlib.pyplot"):
  importlib.import_module(name)
# No device is in use and no thread of JAX runs yet.
warnings.filterwarnings("ignore", "os.fork.. was called", RuntimeWarning)
