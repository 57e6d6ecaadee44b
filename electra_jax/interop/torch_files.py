"""Reads the tensors of PyTorch's files, such as pytorch_model.bin, without PyTorch.

A file holds a pickle, which is a program: here it can make dictionaries and name tensors, nothing
else. `torch.load(weights_only=True)` does the same, but needs PyTorch.
"""

import collections
import contextlib
import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_LEGACY = 0x1950A86A20F9469CFC6C  # the first pickle of a file of PyTorch before 1.6
# {class of torch that names a storage's dtype: the dtype}
_DTYPES = {
  "DoubleStorage": np.dtype("<f8"),
  "FloatStorage": np.dtype("<f4"),
  "HalfStorage": np.dtype("<f2"),
  "BFloat16Storage": jnp.dtype("bfloat16"),
  "LongStorage": np.dtype("<i8"),
  "IntStorage": np.dtype("<i4"),
  "ShortStorage": np.dtype("<i2"),
  "CharStorage": np.dtype("i1"),
  "ByteStorage": np.dtype("u1"),
  "BoolStorage": np.dtype("?"),
}


class TorchFileError(ValueError):
  """A file is damaged, or holds something besides tensors; the message is one line."""


class _Storage(NamedTuple):
  """A flat array of the file."""

  key: str
  dtype: np.dtype
  size: int  # elements


class _Tensor(NamedTuple):
  """A view of a storage, whose offset and strides count elements."""

  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


def _tensor(storage, offset, shape, strides, *unread) -> _Tensor:
  return _Tensor(storage, offset, tuple(shape), tuple(strides))


class _Unpickler(pickle.Unpickler):
  """Unpickles containers, numbers, strings and tensors."""

  def find_class(self, module: str, name: str) -> Any:
    """Returns a harmless object for a global name of the pickle; raises TorchFileError."""
    known: dict[tuple[str, str], Any] = {
      ("collections", "OrderedDict"): collections.OrderedDict,
      ("torch._utils", "_rebuild_tensor_v2"): _tensor,
      ("torch._utils", "_rebuild_parameter"): lambda tensor, *unread: tensor,
      **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    }
    if (module, name) not in known:
      raise TorchFileError(f"it asks for {module}.{name}, but only tensors are read")
    return known[module, name]

  def persistent_load(self, pid: Any) -> _Storage:
    """Returns the storage that a tensor refers to."""
    _, dtype, key, _, size, *_ = pid
    return _Storage(str(key), np.dtype(dtype), int(size))


def _view(tensor: _Tensor, storage: np.ndarray) -> np.ndarray:
  """Returns a tensor's array; raises TorchFileError if it exceeds its storage."""
  _, offset, shape, strides = tensor
  last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
  count = math.prod(shape)
  if min(offset, *shape, *strides, 0) < 0 or (count and last >= len(storage)):
    raise TorchFileError(f"a tensor {shape} exceeds its {len(storage)} numbers")
  if count > len(storage):  # strides of 0 would make any size of few bytes
    raise TorchFileError(f"a tensor {shape} repeats its {len(storage)} numbers")
  size = storage.itemsize
  return np.lib.stride_tricks.as_strided(
    storage[offset:], shape, [size * step for step in strides], writeable=False
  )


def _read_zip(path: Path) -> tuple[Any, Callable[[_Storage], bytes]]:
  """Returns the pickled object of a file of PyTorch since 1.6, and a reader of storages."""
  archive = zipfile.ZipFile(path)
  names = archive.namelist()
  (pickled,) = (name for name in names if name.endswith("/data.pkl"))
  root = pickled.removesuffix("data.pkl")
  if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
    raise TorchFileError("its numbers are big-endian")
  if any(x.compress_type != zipfile.ZIP_STORED for x in archive.infolist()):
    raise TorchFileError("it is compressed, as PyTorch never writes it")
  content = _Unpickler(io.BytesIO(archive.read(pickled))).load()
  return content, lambda storage: archive.read(f"{root}data/{storage.key}")


def _read_legacy(path: Path) -> tuple[Any, Callable[[_Storage], bytes]]:
  """Returns as `_read_zip`, of a file of PyTorch before 1.6."""
  content = path.read_bytes()
  file = io.BytesIO(content)
  if _Unpickler(file).load() != _LEGACY:
    raise TorchFileError("it is no file of PyTorch")
  _Unpickler(file).load()  # version
  if not _Unpickler(file).load()["little_endian"]:
    raise TorchFileError("its numbers are big-endian")
  storages: dict[str, _Storage] = {}

  class Unpickler(_Unpickler):
    def persistent_load(self, pid: Any) -> _Storage:
      if pid[-1] is not None:
        raise TorchFileError("it holds views of storages, which PyTorch wrote before 0.4")
      storage = super().persistent_load(pid)
      return storages.setdefault(storage.key, storage)

  made = Unpickler(file).load()
  places = {}
  for key in _Unpickler(file).load():
    (count,) = struct.unpack("<q", file.read(8))
    start, size = file.tell(), count * storages[key].dtype.itemsize
    if count < 0:
      raise TorchFileError(f"a storage has {count} numbers")
    places[key] = slice(start, start + size)
    file.seek(size, io.SEEK_CUR)
  return made, lambda storage: content[places[storage.key]]


@contextlib.contextmanager
def _reading() -> Iterator[None]:
  """Turns whatever a damaged pickle raises into TorchFileError."""
  try:
    yield
  except TorchFileError:
    raise
  except Exception as error:
    raise TorchFileError(f"{type(error).__name__} {error}".splitlines()[0]) from None


def _open(path: Path) -> tuple[Mapping[str, _Tensor], Callable[[_Storage], bytes]]:
  """Returns the tensors of a state dict by name, and a reader of their storages."""
  content, read = (_read_zip if zipfile.is_zipfile(path) else _read_legacy)(path)
  if not isinstance(content, Mapping) or not content:
    raise TorchFileError("it is no state dict, as of torch.save(network.state_dict(), path)")
  for name, tensor in content.items():
    if not isinstance(name, str) or not isinstance(tensor, _Tensor):
      kind = type(tensor).__name__
      raise TorchFileError(f"{name!r:.60} is a {kind}: save network.state_dict() alone")
  return content, read


def names(path: Path) -> list[str]:
  """Returns the names of the tensors of a state dict; raises TorchFileError as `load`."""
  with _reading():
    return list(_open(path)[0])


def load(path: Path) -> dict[str, np.ndarray]:
  """Returns the tensors of a state dict by name, read-only, in the file's dtypes.

  Raises:
    TorchFileError: the file is damaged, or holds something besides tensors by name.
  """
  tensors, storages = {}, {}
  with _reading():
    content, read = _open(path)
    for name, tensor in content.items():
      storage = tensor.storage
      if storage.key not in storages:
        found = np.frombuffer(read(storage), storage.dtype)
        if len(found) != storage.size:
          raise TorchFileError(f"it ends within the tensor {name}")
        storages[storage.key] = found
      tensors[name] = _view(tensor, storages[storage.key])
  return tensors
