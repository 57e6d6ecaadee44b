"""Imports what a run imports, in the process that forks into the runs of `harness`."""

import os
import types
import warnings

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # as the program does before it imports it
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import matplotlib.pyplot  # noqa: E402, F401
import tensorflow  # noqa: E402, F401
from jax._src import compiler  # noqa: E402

import electra_jax.monitor.curves  # noqa: E402, F401
from electra_jax.monitor import trackers  # noqa: E402

with trackers._without("torch"):
  import tensorboardX  # noqa: F401

# On CPUs each process of a run looks for programs of its own, and JAX lets only the first keep any.
compiler.distributed = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
# No device is in use and no thread of JAX runs yet.
warnings.filterwarnings("ignore", "os.fork.. was called", RuntimeWarning)
