"""TensorFlow without accelerators, and the data sets of tensorflow_datasets."""

import os

from electra_jax.data.tokenizer import first_line


class TfdsError(ValueError):
  """A data set cannot be read; the message is one line."""


def import_tensorflow():
  """Imports TensorFlow and hides the accelerators, whose memory it would allocate."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # otherwise it logs two lines to stderr
  import tensorflow as tf

  for kind in ("GPU", "TPU"):
    tf.config.set_visible_devices([], kind)
  return tf


def open_split(name: str, split: str, data_dir: str | None):
  """Returns (the examples of a split in file order, the builder's info).

  Downloads the data set to `data_dir` (None: TFDS's default) if needed. Raises TfdsError.
  """
  import_tensorflow()
  import tensorflow_datasets as tfds

  try:
    builder = tfds.builder(name, data_dir=data_dir)
    builder.download_and_prepare()
    return builder.as_dataset(split=split, shuffle_files=False), builder.info
  except Exception as error:  # TFDS raises many types, with long messages
    raise TfdsError(f"{type(error).__name__}: {first_line(error):.300}") from None
