"""Files of weights: rounded to bfloat16, split into shards, and read back as they were rounded."""

import dataclasses
import io
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import test_modernbert
from rich.console import Console
from safetensors.numpy import save_file
from test_exchange import a_number, a_source, command, save_hf, write_vocab
from test_hf import SIZES, export, needs_torch, random_network, same, some_batch

from electra_jax.core import params
from electra_jax.export import writer
from electra_jax.interop import huggingface, initial, sources, weight_files
from electra_jax.interop.huggingface import Storage
from electra_jax.interop.sources import Network

ROLES = ("discriminator", "generator")
MAX_BYTES = 5_000
SMALL = ("--dtype=bfloat16", f"--max-shard-mb={MAX_BYTES / 1e6}")


@pytest.fixture
def words45(tmp_path):
  return write_vocab(tmp_path / "words" / "vocab.txt")


def nearest(x: np.ndarray) -> np.ndarray:
  """The nearest float32 whose lower 16 bits are 0, of two that are as near the even one."""
  bits = np.asarray(x, np.float32).view(np.uint32)
  bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
  return bits.view(np.float32)


def tensors_of(path: Path) -> tuple[dict, dict[str, bytes]]:
  """The header of a safetensors file and the bytes of each tensor, read by the format's definition.

  https://huggingface.co/docs/safetensors: the header's size in 8 bytes, the header, the tensors.
  """
  content = path.read_bytes()
  start = 8 + int.from_bytes(content[:8], "little")
  header = json.loads(content[8:start])
  places = {n: x["data_offsets"] for n, x in header.items() if n != "__metadata__"}
  return header, {name: content[start + a : start + b] for name, (a, b) in places.items()}


def test_rounded_shards_hold_every_weight_and_their_index_says_where(words45, tmp_path, capsys):
  source = a_source(*ROLES, vocab=words45)
  at = save_hf(tmp_path / "in", source)
  export(at, tmp_path / "out", "--to", "hf", *SMALL)
  for role in ROLES:
    folder = tmp_path / "out" / role
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    n = len(files)
    names = [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    assert n > 1 and [path.name for path in files] == names
    assert all(MAX_BYTES / 2 < path.stat().st_size <= MAX_BYTES for path in files[:-1])
    found, whole = {}, tensors_of(at / role / "model.safetensors")[1]
    for path in files:
      header, tensors = tensors_of(path)
      assert header.pop("__metadata__") == {"format": "pt"}
      assert {x["dtype"] for x in header.values()} == {"BF16"}
      assert all(index["weight_map"][name] == path.name for name in tensors)
      found |= tensors
    assert found.keys() == whole.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(map(len, found.values()))
    assert sum(map(len, found.values())) == 2 * params.count(source.networks[role].weights)
    for name, content in whole.items():
      expected = nearest(np.frombuffer(content, np.float32))
      assert expected.view(np.uint16)[1::2].tobytes() == found[name], name
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert " parameters in bfloat16: " in (folder / "README.md").read_text()
    assert " parameters in float32: " in (at / role / "README.md").read_text()


@pytest.mark.parametrize("max_bytes", [None, 10**6])
def test_what_fits_is_one_file_without_an_index(max_bytes, tmp_path):
  cfg = SIZES["projected"]
  storage = Storage("bfloat16", *([max_bytes] if max_bytes else []))
  huggingface.save(tmp_path, cfg, random_network(cfg, None), None, 0, storage=storage)
  assert sorted(x.name for x in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_tensor_that_is_too_large_stands_alone():
  sizes = {"a": 400, "large": 3_000, "b": 100, "c": 100, "d": 2_000}
  tensors = {name: np.zeros(size, np.int8) for name, size in sizes.items()}
  parts = weight_files.shards(tensors, 1_000)
  assert [list(part) for part in parts] == [["a"], ["large"], ["b", "c"], ["d"]]


def test_no_file_is_larger_than_said_even_of_many_small_tensors(tmp_path):
  """Their headers are most of the file."""
  tensors = {f"{'x' * (i % 7)}{i}": np.zeros((1, 1, i), np.int8) for i in range(40)}
  for max_bytes in (400, 1_000, 5_000):
    for i, part in enumerate(weight_files.shards(tensors, max_bytes)):
      save_file(part, tmp_path / f"{i}", metadata={"format": "pt"})
      assert (tmp_path / f"{i}").stat().st_size <= max_bytes


def test_a_rounded_export_is_read_as_float32_and_written_again_with_the_same_bytes(
  words45, tmp_path
):
  source = a_source(*ROLES, vocab=words45)
  first, again, one = (tmp_path / x for x in ("first", "again", "one"))
  export(save_hf(tmp_path / "in", source), first, "--to", "hf", *SMALL)
  export(first, again, "--to", "hf", *SMALL)
  export(first, tmp_path / "orbax", "--to", "orbax")
  export(first, one, "--to", "hf")
  expected = {
    role: jax.tree.map(nearest, dict(source.networks[role].weights)) for role in source.networks
  }
  for folder in (first, again, one):
    found = sources.open_source(folder).networks
    assert all(same(found[role].weights, expected[role]) for role in ROLES)
    leaves = jax.tree.leaves([network.weights for network in found.values()])
    assert {x.dtype for x in leaves} == {np.dtype(np.float32)}
  through = sources.open_source(tmp_path / "orbax").networks["discriminator"]
  assert same(through.weights, expected["discriminator"])
  written = [p.relative_to(first) for p in first.rglob("model*")]
  assert len(written) > 4
  assert all((first / p).read_bytes() == (again / p).read_bytes() for p in written)
  # As `init_from` and `finetune --config.init` take them.
  start, _, _ = initial.read_params(first, words45, "embeddings")
  assert same(start["discriminator"]["encoder"], expected["discriminator"]["encoder"])


def test_how_much_rounding_changes_the_logits_is_printed(words45, tmp_path):
  source = a_source("discriminator", vocab=words45)
  lines = []
  for at, name in ((save_hf(tmp_path / "in", source), "out"), (tmp_path / "out", "again")):
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True)
    writer.run(str(at), tmp_path / name, "hf", console, dtype="bfloat16")
    lines.append(out.getvalue().splitlines()[0])
  batch = writer.real_text(words45, 12)
  exact, there = (
    writer.logits(x.networks["discriminator"], batch)[batch.padding_mask]
    for x in (source, sources.open_source(tmp_path / "out"))
  )
  largest, change = np.abs(exact).max(), np.abs(exact - there).max()
  said = (
    f"; rounding to bfloat16 changed logits by up to {change:.1e} (largest logit {largest:.2g})"
  )
  assert lines[0].endswith(said) and change > 0
  assert lines[1].endswith(" by up to 0.0e+00 (largest logit 0.2)")


def test_each_weight_is_rounded_by_at_most_what_the_help_says():
  network = Network(SIZES["projected"], random_network(SIZES["projected"], "rtd_head"), "rtd_head")
  there = writer.rounded(network, "bfloat16").weights
  for a, b in zip(*map(jax.tree.leaves, (network.weights, there)), strict=True):
    assert np.all(np.abs(a - b) <= 2.0**-8 * np.abs(a))  # 8 bits, the nearest


def test_a_rounded_number_goes_out_in_the_unit_of_its_labels(words45, tmp_path):
  number = a_number(words45)
  storage = Storage("bfloat16")
  writer.export_hf(number, tmp_path / "out", Console(quiet=True), storage)  # compares, with torch
  tensors = tensors_of(tmp_path / "out" / "discriminator" / "model.safetensors")[1]
  kernel = nearest(np.float32(5) * number.finetuned.head["out_proj"]["kernel"].T)
  found = tensors["classifier.out_proj.weight"]
  assert found == np.ascontiguousarray(kernel).view(np.uint16).reshape(-1)[1::2].tobytes()


def test_a_disk_that_fills_amid_the_shards_ends_with_one_line(words45, tmp_path):
  cfg = dataclasses.replace(SIZES["projected"], vocab_size=45, ffn_size=250)  # kernels of 8 kB
  network = Network(cfg, random_network(cfg, "rtd_head"), "rtd_head")
  at = save_hf(tmp_path / "in", sources.Source({"discriminator": network}, words45, {}))
  code, _, errors = command("export", at, tmp_path / "out", "--to", "hf", *SMALL, file_bytes=6_000)
  assert code == 1 and errors.count("\n") == 1
  assert re.search(r"model-0000[2-9]-of-\d{5}.safetensors cannot be written: .*File too", errors)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "words"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_that_must_be_free_are_those_of_the_dtype(dtype, tmp_path, monkeypatch):
  source = a_source(*ROLES)
  count = sum(params.count(network.weights) for network in source.networks.values())
  usage = shutil.disk_usage(tmp_path)._replace(free=3 * count)  # between 2 and 4 bytes each
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
  if dtype == "bfloat16":
    writer.export_hf(source, tmp_path / "out", Console(quiet=True), Storage(dtype))
  else:
    needed = rf"No space left \({4 * count / 1e6:,.1f} MB needed"
    with pytest.raises(OSError, match=needed):
      writer.export_hf(source, tmp_path / "out", Console(quiet=True), Storage(dtype))
  assert (tmp_path / "out").exists() == (dtype == "bfloat16")


@needs_torch
@pytest.mark.parametrize("head", ["rtd_head", "mlm_head", None])
@pytest.mark.parametrize("family", ["electra", "modernbert"])
def test_transformers_loads_rounded_shards(family, head, tmp_path):
  import torch
  import transformers

  if family == "electra":
    cfg = SIZES["projected"]
    weights, batch = random_network(cfg, head), some_batch(cfg)
  else:
    cfg = test_modernbert.CFG
    weights, batch = test_modernbert.random_network(cfg, head), test_modernbert.a_batch()
  huggingface.save(tmp_path, cfg, weights, head, 0, storage=Storage("bfloat16", MAX_BYTES))
  assert len(list(tmp_path.glob("*.safetensors"))) > 1
  ours = writer.logits(Network(cfg, jax.tree.map(nearest, weights), head), batch)
  writer.check_parity(tmp_path, head, batch, ours)

  name = huggingface.family_of(cfg).classes[head]
  inputs = {"input_ids": batch.ids, "attention_mask": batch.padding_mask}
  if family == "electra":
    inputs["token_type_ids"] = batch.token_type_ids
  inputs = {key: torch.tensor(x).long() for key, x in inputs.items()}
  # In float32 the sums' order differs; in bfloat16 each of some 20 operations of up to 5 layers
  # rounds its result by 2**-8, and random signs add up as the root of their number.
  for dtype, of_largest in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8 * 100**0.5)):
    network, loading = getattr(transformers, name).from_pretrained(
      tmp_path, dtype=dtype, output_loading_info=True
    )
    assert not any(loading.values()) and network.dtype == dtype
    with torch.no_grad():
      outputs = network.eval()(**inputs)
    there = outputs.last_hidden_state if head is None else outputs.logits
    there = there.float().numpy()
    there = there if there.shape == ours.shape else there[..., 1]  # of two labels
    assert writer.largest(ours - there, head, batch) < of_largest * np.abs(ours).max()
  body = transformers.AutoModel.from_pretrained(tmp_path)
  assert body.dtype == torch.bfloat16  # what config.json says


def test_an_index_of_shards_that_are_not_in_its_folder_is_refused(tmp_path):
  cfg, folder = SIZES["projected"], tmp_path / "hf"
  folder.mkdir()
  weights, storage = random_network(cfg, None), Storage("bfloat16", MAX_BYTES)
  huggingface.save(folder, cfg, weights, None, 0, storage=storage)
  (second,) = folder.glob("model-00002-of-*")
  second.rename(tmp_path / "other.safetensors")
  with pytest.raises(
    sources.ExchangeError, match=f"names {second.name}, which is not in its folder"
  ):
    huggingface.load(folder)
  index = folder / "model.safetensors.index.json"
  files = json.loads(index.read_text())["weight_map"]
  index.write_text(json.dumps({"weight_map": dict.fromkeys(files, "../other.safetensors")}))
  with pytest.raises(sources.ExchangeError, match=r"names ../other.safetensors, which is not in"):
    huggingface.load(folder)
  index.write_text("[]")
  with pytest.raises(sources.ExchangeError, match="index.json holds a JSON list"):
    huggingface.load(folder)
