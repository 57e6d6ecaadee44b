"""Weights in and out: units, vocabularies, heads, others' files, and what is refused in a line."""

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from test_hf import HAS_TORCH, SIZES, WORDS45, needs_torch, random_network

from electra_jax import export
from electra_jax.core.task_network import HeadSpec
from electra_jax.data import tokenizer
from electra_jax.finetune import model
from electra_jax.interop import sources
from electra_jax.interop.sources import Network
from electra_jax.runtime import workdir


def command(program: str, *args, text: str = "", umask: int = 0o022):
  """Returns a program's exit code, its output and its errors."""
  done = subprocess.run(
    [sys.executable, "-m", f"electra_jax.{program}", *map(str, args)],
    input=text, capture_output=True, text=True, umask=umask,
    env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
  )  # fmt: skip
  return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
  ("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775)]
)
def test_what_is_written_has_the_umasks_mode(umask, file, folder, tmp_path):
  from safetensors.numpy import save_file

  before = os.umask(umask)
  try:
    with workdir.new_folder(tmp_path / "out") as new:
      (new / "inside").mkdir()
      save_file({"x": np.zeros(3)}, new / "inside" / "model.safetensors")
      (new / "config.json").write_text("{}")
  finally:
    os.umask(before)
  modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "out").rglob("*") if p.is_file()}
  assert modes == {file}
  found = {p.stat().st_mode & 0o777 for p in (tmp_path / "out", tmp_path / "out" / "inside")}
  assert found == {folder}


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
  def refuse(*args):
    raise PermissionError(13, "Permission denied", str(args[0]))

  monkeypatch.setattr(os, "mkdir", refuse)
  with pytest.raises(PermissionError) as error, workdir.new_folder(tmp_path / "out"):
    pass
  assert error.value.filename == str(tmp_path / "out")


def a_source(*roles, finetuned=None, vocab=None) -> sources.Source:
  """Networks of random weights and 45 tokens."""
  cfg = dataclasses.replace(SIZES["projected"], vocab_size=45)
  heads = {"discriminator": None if finetuned else "rtd_head", "generator": "mlm_head"}
  found = {r: Network(cfg, random_network(cfg, heads[r]), heads[r]) for r in roles}
  return sources.Source(found, vocab, {}, finetuned=finetuned)


@pytest.fixture
def words45(tmp_path):
  return write_vocab(tmp_path / "words" / "vocab.txt")


def write_vocab(path: Path, size: int = 45) -> tokenizer.Tokenizer:
  path.parent.mkdir(parents=True, exist_ok=True)
  pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS45]
  pieces = [*pieces, *(f"x{i}" for i in range(size))][:size]
  path.write_text("".join(f"{x}\n" for x in pieces))
  return tokenizer.load(path)


@pytest.fixture
def number(words45):
  """A fine-tuned network that answers a number from 0 to 5, as STS-B's."""
  task = {"name": "x", "title": "x", "text": "a", "label": "b", "labels": None, "scale": 5.0}
  arguments = {"layers": "two_layers"}
  info = {
    "kind": "text", "name": "x", "head": {"kind": "regression", "arguments": arguments},
    "max_length": 12, "labels": [], "text": task, "options": {},
  }  # fmt: skip
  cfg = SIZES["projected"]
  head = HeadSpec("regression", arguments).make().init(cfg, jax.random.key(3))
  head = jax.tree.map(lambda x: np.asarray(x) + 0.1, head)
  return a_source("discriminator", finetuned=sources.Finetuned(info, head), vocab=words45)


def test_a_number_goes_out_in_the_unit_of_its_labels(number, tmp_path):
  from safetensors.numpy import load_file

  out = io.StringIO()
  export.export_hf(number, tmp_path / "out", Console(file=out, soft_wrap=True))
  folder = tmp_path / "out" / "discriminator"
  tensors = load_file(folder / "model.safetensors")
  head = number.finetuned.head["out_proj"]
  # By 5, which is rounded once.
  np.testing.assert_allclose(tensors["classifier.out_proj.weight"].T, head["kernel"] * 5, rtol=1e-7)
  np.testing.assert_allclose(tensors["classifier.out_proj.bias"], head["bias"] * 5, rtol=1e-7)
  assert json.loads((folder / "config.json").read_text())["problem_type"] == "regression"
  assert ("in the unit of the labels" in out.getvalue()) == HAS_TORCH


@needs_torch
def test_transformers_answers_the_number_that_is_answered_here(number, tmp_path):
  from transformers import pipeline

  texts = ["the cat is in a bed", "a b c", "of"]
  export.export_hf(number, tmp_path / "out", Console(quiet=True))
  ours = [x["score"] for x in model.from_source(number, "x")(texts)]
  theirs = pipeline("text-classification", str(tmp_path / "out" / "discriminator"))(texts)
  assert np.ptp(ours) > 1e-3
  np.testing.assert_allclose([x["score"] for x in theirs], ours, atol=1e-5)


@needs_torch
def test_parity_is_that_of_the_number_here(number, tmp_path, monkeypatch):
  monkeypatch.setattr(export, "in_unit", lambda network, unit: network)
  with pytest.raises(sources.ExchangeError, match=r"other logits.*allowed are 0.0005"):
    export.export_hf(number, tmp_path / "out", Console(quiet=True))
  assert not (tmp_path / "out").exists()
