"""ONNX files in Hugging Face folders, written by torch.onnx and read by onnxruntime."""

import importlib.util
import logging
import warnings
from pathlib import Path

import numpy as np

from electra_jax.core.batch import Batch
from electra_jax.interop import huggingface
from electra_jax.interop.weights import ExchangeError

FILE = "model.onnx"
PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")


def check_packages() -> None:
  """Raises ExchangeError, with the command to install them, if packages are missing."""
  if lacking := [name for name in PACKAGES if not importlib.util.find_spec(name)]:
    raise ExchangeError(f"install the packages for an ONNX export: pip install {' '.join(lacking)}")


def save(folder: Path, head: str | None, batch: Batch) -> str:
  """Writes a folder's network as FILE, in float32, and describes its inputs and outputs.

  They have the names of transformers and dynamic batch and length; `batch` is an example with at
  least two rows and two tokens.
  """
  import torch

  network = huggingface.torch_network(folder, head)
  example = {name: torch.tensor(x) for name, x in huggingface.inputs(folder, batch).items()}
  with torch.no_grad(), warnings.catch_warnings():
    outputs = list(network(**example).keys())
    warnings.simplefilter("ignore")  # from torch's code
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    program = torch.onnx.export(
      network,
      kwargs=example,
      input_names=list(example),
      output_names=outputs,
      dynamic_shapes=dict.fromkeys(example, {0: "batch", 1: "length"}),
      dynamo=True,
      verbose=False,
    )
  for node in program.model.graph.all_nodes():
    node.metadata_props.clear()  # it holds paths of this machine
  program.save(folder / FILE)
  return f"{', '.join(example)} -> {', '.join(outputs)}"


def outputs(folder: Path, head: str | None, batch: Batch) -> np.ndarray:
  """Returns the outputs of FILE in onnxruntime on the CPU, as `huggingface.torch_outputs`."""
  import onnxruntime

  session = onnxruntime.InferenceSession(folder / FILE, providers=["CPUExecutionProvider"])
  found = session.run(None, huggingface.inputs(folder, batch))
  names = [output.name for output in session.get_outputs()]
  return huggingface.one_array(dict(zip(names, found, strict=True)), head)
