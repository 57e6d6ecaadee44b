"""Exports to ONNX: onnxruntime computes the logits of transformers and ours, for any batch."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest
from rich.console import Console
from test_hf import SIZES, random_network, write_vocab
from test_modernbert import CFG
from test_modernbert import random_network as random_modernbert

from electra_jax.commands import cli
from electra_jax.core.batch import Batch
from electra_jax.export import writer
from electra_jax.interop import huggingface, onnx, sources
from electra_jax.interop.sources import Network

HAS_ALL = all(importlib.util.find_spec(name) for name in onnx.PACKAGES)
needs_onnx = pytest.mark.skipif(not HAS_ALL, reason="onnx is not installed: make test-hf")
ELECTRA = dataclasses.replace(SIZES["projected"], vocab_size=45, max_positions=64)
# Local layers see 4 tokens on each side.
MODERNBERT = dataclasses.replace(CFG, vocab_size=45, num_layers=3)
NETWORKS = {
  "electra detects": Network(ELECTRA, random_network(ELECTRA, "rtd_head"), "rtd_head"),
  "modernbert fills": Network(MODERNBERT, random_modernbert(MODERNBERT, "mlm_head"), "mlm_head"),
  "modernbert encodes": Network(MODERNBERT, random_modernbert(MODERNBERT, None), None),
}
QUIET = Console(quiet=True)


def source_of(network: Network, folder) -> sources.Source:
  return sources.Source({"discriminator": network}, write_vocab(folder / "vocab.txt"), {})


def a_batch(rows: int, length: int) -> Batch:
  """Rows of two segments and other lengths, the first one whole."""
  rng = np.random.default_rng(length)
  mask = np.arange(length) < rng.permuted(np.linspace(2, length, rows).astype(int))[:, None]
  mask[0] = True
  ids = np.where(mask, rng.integers(5, 45, mask.shape), 0).astype(np.int32)
  segments = (rng.random(mask.shape) < 0.5).astype(np.int32)
  return Batch(ids, segments, mask, np.arange(rows, dtype=np.int32))


@needs_onnx
@pytest.mark.parametrize("name", NETWORKS)
def test_onnxruntime_computes_any_batch_as_transformers_and_we_do(name, tmp_path):
  import onnxruntime

  network = NETWORKS[name]
  writer.write(source_of(network, tmp_path), tmp_path / "out", "onnx", QUIET)
  folder = tmp_path / "out" / "discriminator"
  session = onnxruntime.InferenceSession(folder / "model.onnx")
  types = ["token_type_ids"] if network.cfg.token_types else []
  assert [x.name for x in session.get_inputs()] == ["input_ids", "attention_mask", *types]
  output = "last_hidden_state" if network.head is None else "logits"
  assert [x.name for x in session.get_outputs()] == [output]
  for batch in (a_batch(1, 7), a_batch(5, 64)):  # neither is a shape that the export has seen
    fed = (batch.ids, batch.padding_mask, batch.token_type_ids)
    names = (x.name for x in session.get_inputs())
    got = session.run(None, dict(zip(names, (x.astype(np.int64) for x in fed), strict=False)))[0]
    theirs = huggingface.torch_outputs(folder, network.head, batch)
    for other in (writer.logits(network, batch), theirs):
      # Float32 sums in another order, as between our logits and those of transformers.
      assert writer.largest(got - other, network.head, batch) < writer.TOLERANCE
  path = str(tmp_path).encode()
  assert path not in (folder / "model.onnx").read_bytes()
  assert b"modeling_" not in (folder / "model.onnx").read_bytes()  # nor the paths of libraries
  assert "for onnxruntime: input_ids, attention_mask" in (folder / "README.md").read_text()
  assert sources.open_source(tmp_path / "out").networks["discriminator"].head == network.head
  ours = writer.logits(
    Network(network.cfg, jax.tree.map(np.ones_like, network.weights), network.head), batch
  )
  with pytest.raises(sources.ExchangeError, match="differ from onnxruntime by"):
    writer.check_parity(folder, network.head, batch, ours, library="onnxruntime")


@needs_onnx
def test_an_export_whose_onnx_file_is_another_network_leaves_nothing(tmp_path, monkeypatch):
  save, network = onnx.save, NETWORKS["electra detects"]

  def save_another(folder, head, batch):
    other = random_network(ELECTRA, head, seed=1)
    huggingface.save(folder, ELECTRA, other, head, 0)
    return save(folder, head, batch)

  monkeypatch.setattr(onnx, "save", save_another)
  with pytest.raises(sources.ExchangeError, match="nothing exported: .* differ from onnxruntime"):
    writer.write(source_of(network, tmp_path), tmp_path / "out", "onnx", QUIET)
  assert [x.name for x in tmp_path.iterdir()] == ["vocab.txt"]


def test_missing_packages_are_named_with_the_command_that_installs_them(tmp_path, monkeypatch):
  source = source_of(NETWORKS["electra detects"], tmp_path)
  writer.write(source, tmp_path / "model", "orbax", QUIET)

  def find(name: str) -> bool:
    return name not in ("onnx", "onnxscript")

  monkeypatch.setattr(onnx.importlib.util, "find_spec", find)
  with pytest.raises(sources.ExchangeError, match="ONNX export: pip install onnx onnxscript$"):
    cli.call("export", [str(tmp_path / "model"), str(tmp_path / "out"), "--to", "onnx"])
  assert not (tmp_path / "out").exists()
  monkeypatch.undo()
  with pytest.raises(cli.UsageError, match="--dtype: only for --to hf, not onnx"):
    cli.call("export", ["a", "b", "--to=onnx", "--dtype=bfloat16"])
