"""Files of PyTorch, read without PyTorch: golden ones, damaged ones, and programs in them."""

import pickle
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from electra_jax.interop import torch_files
from electra_jax.interop.torch_files import TorchFileError

# Written by PyTorch 2.13: torch.save of a Linear(3, 2)'s state dict and the tensors below,
# `legacy` with _use_new_zipfile_serialization=False.
GOLDEN = Path(__file__).parent / "golden" / "torch"
A = np.arange(12, dtype=np.float32).reshape(3, 4) / 3
EXPECTED = {
  "weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 8,
  "bias": np.float32([0.5, -0.25]),
  "float16": A.astype(np.float16),
  "bfloat16": A.astype(jnp.bfloat16),
  "turned": A.T,
  "part": A[1:, :2],
  "ids": np.arange(5),
  "flag": np.array(True),
  "none": np.zeros((0, 3), np.float32),
  "parameter": A[0],
}


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_every_tensor_is_the_one_that_pytorch_wrote(kind):
  path = GOLDEN / f"{kind}.bin"
  found = torch_files.load(path)
  assert list(found) == list(EXPECTED) == torch_files.names(path)
  for name, x in EXPECTED.items():
    assert found[name].dtype == x.dtype and found[name].shape == x.shape, name
    np.testing.assert_array_equal(found[name], x, name)


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_a_file_cut_short_anywhere_is_an_error_of_one_line(kind, tmp_path):
  content, path = (GOLDEN / f"{kind}.bin").read_bytes(), tmp_path / "cut.bin"
  for end in range(0, len(content), 101):
    path.write_bytes(content[:end])
    with pytest.raises(TorchFileError) as error:
      torch_files.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_flipped_bits_give_tensors_or_an_error_and_nothing_else(kind, tmp_path):
  content, path = (GOLDEN / f"{kind}.bin").read_bytes(), tmp_path / "flipped.bin"
  rng, errors = np.random.default_rng(0), 0
  for _ in range(300):
    changed = bytearray(content)
    changed[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(changed)
    try:
      assert all(isinstance(x, np.ndarray) for x in torch_files.load(path).values())
    except TorchFileError:
      errors += 1
  assert 30 < errors < 300  # of all bytes, those of numbers are free


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
  """Writes a state dict of float32 as PyTorch does, with one storage for each tensor."""
  views = "".join(
    f"S'{name}'\n{a_tensor(i, x.size, 0, x.shape, [n // 4 for n in x.strides])}s"
    for i, (name, x) in enumerate(tensors.items())
  )
  storages = {f"{i}": x.tobytes() for i, x in enumerate(tensors.values())}
  return zipped(path, f"(d{views}.".encode(), storages)


def zipped(path: Path, pickled: bytes, storages: dict[str, bytes], **options) -> Path:
  with zipfile.ZipFile(path, "w", **options) as file:
    file.writestr("x/data.pkl", pickled)
    file.writestr("x/byteorder", "little")
    for key, content in storages.items():
      file.writestr(f"x/data/{key}", content)
  return path


class Calls:
  """Pickles to a call of a function when it is loaded."""

  def __init__(self, function, *args):
    self.call = function, args

  def __reduce__(self):
    return self.call


@pytest.mark.parametrize("legacy", [False, True])
def test_a_program_in_a_pickle_does_not_run(legacy, tmp_path):
  witness = tmp_path / "ran"
  path = tmp_path / "pytorch_model.bin"
  program = {"weight": Calls(witness.write_text, "ran")}
  pickle.loads(pickle.dumps(program))  # noqa: S301  what it would do
  assert witness.exists()
  witness.unlink()
  if legacy:
    start = (torch_files._LEGACY, 1001, {"little_endian": True})
    path.write_bytes(b"".join(pickle.dumps(x) for x in (*start, program, [])))
  else:
    zipped(path, pickle.dumps(program), {})
  for read in (torch_files.load, torch_files.names):
    with pytest.raises(TorchFileError, match="but only tensors are read"):
      read(path)
  assert not witness.exists()


def a_tensor(key: int, numbers: int, offset: int, shape, strides) -> str:
  """The pickle, in its protocol of text, of a view of a storage of float32."""

  def integers(values) -> str:
    return "(" + "".join(f"I{x}\n" for x in values) + "t"

  storage = f"(S'storage'\nctorch\nFloatStorage\nS'{key}'\nS'cpu'\nI{numbers}\ntQ"
  arguments = f"({storage}I{offset}\n{integers(shape)}{integers(strides)}t"
  return f"ctorch._utils\n_rebuild_tensor_v2\n{arguments}R"


def a_view(numbers: int, *view) -> bytes:
  """The pickle of a state dict of one tensor "x"."""
  return f"(S'x'\n{a_tensor(0, numbers, *view)}d.".encode()


@pytest.mark.parametrize(
  ("view", "message"),
  [
    ((0, (2, 3), (3, 1)), None),
    ((1, (2, 3), (3, 1)), r"a tensor \(2, 3\) exceeds its 6 numbers"),
    ((-1, (2,), (1,)), "exceeds"),
    ((4, (3,), (-1,)), "exceeds"),
    ((0, (10**12,), (0,)), "repeats its 6 numbers"),
    ((0, (2, 3), (1,)), "ValueError"),
  ],
)
def test_a_tensor_stays_inside_its_storage(view, message, tmp_path):
  numbers = np.arange(6, dtype=np.float32)
  path = zipped(tmp_path / "x.bin", a_view(6, *view), {"0": numbers.tobytes()})
  if message is None:
    np.testing.assert_array_equal(torch_files.load(path)["x"], numbers.reshape(2, 3))
    return
  with pytest.raises(TorchFileError, match=message):
    torch_files.load(path)


def test_what_no_version_of_pytorch_writes_is_refused(tmp_path):
  numbers = np.zeros(6, np.float32).tobytes()
  pickled = a_view(6, 0, (2, 3), (3, 1))
  compressed = zipped(tmp_path / "1.bin", pickled, {"0": numbers}, compression=zipfile.ZIP_DEFLATED)
  short = zipped(tmp_path / "2.bin", pickled, {"0": numbers[:-4]})
  network = zipped(tmp_path / "3.bin", pickle.dumps({"state_dict": {"x": 1}, "epoch": 3}), {})
  for path, message in (
    (compressed, "it is compressed"),
    (short, "it ends within the tensor x"),
    (network, "'state_dict' is a dict: save network.state_dict"),
    (zipped(tmp_path / "4.bin", pickle.dumps([1]), {}), "it is no state dict"),
  ):
    with pytest.raises(TorchFileError, match=message):
      torch_files.load(path)
