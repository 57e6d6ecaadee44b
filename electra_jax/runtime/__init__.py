import os

# Makes orbax (through etils) use gcsfs for gs:// even if TensorFlow is installed.
os.environ.setdefault("EPATH_USE_TF", "false")
