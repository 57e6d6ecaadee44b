"""The files of a Hugging Face folder's weights: safetensors, or PyTorch's pytorch_model.bin."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from electra_jax.interop import torch_files
from electra_jax.interop.weights import ExchangeError, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
HEADER_BYTES = 128  # upper bound for a safetensors file, and for each tensor besides its name


def shards(tensors: Mapping[str, np.ndarray], max_bytes: float) -> list[dict[str, np.ndarray]]:
  """Splits tensors, in order, into groups whose files have at most `max_bytes` each.

  As in Hugging Face's libraries, a larger tensor gets a file to itself. Unlike theirs, our size
  includes the header.

  >>> [list(x) for x in shards({n: np.zeros(500, np.int8) for n in "abc"}, 1500)]
  [['a', 'b'], ['c']]
  """
  groups, size = [], 0
  for name, x in tensors.items():
    more = x.nbytes + len(name) + HEADER_BYTES
    if not groups or size + more > max_bytes:
      groups.append({})
      size = HEADER_BYTES
    groups[-1][name] = x
    size += more
  return groups


def find(folder: Path) -> list[Path]:
  """Returns the files of a folder's weights: one, the files of an index, or [].

  Files of PyTorch count if the folder has no safetensors.

  Raises:
    ExchangeError: the index is damaged, or a file that it names is missing.
  """
  there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
  one = next(filter(there.__contains__, (WEIGHTS, INDEX, TORCH, TORCH_INDEX)), None)
  if one in (None, WEIGHTS, TORCH):
    return [folder / one] if one else []
  index = folder / one
  content = read_json(index)
  try:
    names = sorted(set(content["weight_map"].values()))
  except (TypeError, KeyError, AttributeError) as error:
    raise ExchangeError(f"{index} is damaged: {type(error).__name__} {error}") from None
  if missing := [str(name) for name in names if name not in there]:
    raise ExchangeError(f"{index} names {', '.join(missing[:8])}, which is not in its folder")
  return [folder / name for name in names]


def read(files: Sequence[Path]) -> dict[str, np.ndarray]:
  """Returns the tensors of files by name, in the files' dtypes.

  Raises:
    ExchangeError: a file is damaged, or a tensor holds infinities or NaN.
  """
  tensors = {}
  for path in files:
    with _reading(path):
      tensors |= torch_files.load(path) if path.suffix == ".bin" else load_file(path)
  for name, x in tensors.items():
    if not np.isfinite(x).all():
      raise ExchangeError(f"{name} has infinities or NaN, as of weights beyond {x.dtype}")
  return tensors


def names(files: Sequence[Path]) -> list[str]:
  """Returns the names of the tensors in files; raises ExchangeError for a damaged one."""
  found = []
  for path in files:
    with _reading(path):
      if path.suffix == ".bin":
        found += torch_files.names(path)
      else:
        with safe_open(path, "np") as file:
          found += file.keys()
  return found


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
  """Names a damaged file."""
  try:
    yield
  except (SafetensorError, torch_files.TorchFileError, TypeError) as error:
    # TypeError: a dtype that NumPy lacks.
    raise ExchangeError(f"{path} is damaged: {error}") from None


def save(folder: Path, tensors: Mapping[str, np.ndarray], max_bytes: float) -> dict | None:
  """Writes safetensors files and returns the index of several, None for one.

  Raises:
    ExchangeError: a file cannot be written.
  """
  parts, places = shards(tensors, max_bytes), {}
  for i, part in enumerate(parts, 1):
    name = WEIGHTS if len(parts) == 1 else f"model-{i:05d}-of-{len(parts):05d}.safetensors"
    places |= dict.fromkeys(part, name)
    try:
      save_file(part, folder / name, metadata={"format": "pt"})
    except SafetensorError as error:
      raise ExchangeError(f"{folder / name} cannot be written: {error}") from None
  size = sum(x.nbytes for x in tensors.values())
  return {"metadata": {"total_size": size}, "weight_map": places} if len(parts) > 1 else None
