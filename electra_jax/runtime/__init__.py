import os

# orbax reads and writes gs:// by gcsfs, also where TensorFlow is there; for etils, before its use.
os.environ.setdefault("EPATH_USE_TF", "false")
