"""Weights that were saved while PyTorch had wrapped the network, or inside another module."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_hf import SIZES, random_network, same
from test_modernbert import CFG
from test_modernbert import random_network as random_modern

from electra_jax.interop import huggingface
from electra_jax.interop.weights import ExchangeError

ELECTRA = SIZES["projected"]
WRAPPED = {
  "DDP": lambda name: f"module.{name}",
  "compile": lambda name: f"_orig_mod.{name}",
  "compiled DDP": lambda name: f"_orig_mod.module.{name}",
  "FSDP": lambda name: "_fsdp_wrapped_module." + name.replace("s.", "s._fsdp_wrapped_module.", 1),
  "checkpointing": lambda name: name.replace("layer.", "layer._checkpoint_wrapped_module."),
  "Lightning": lambda name: f"model.{name}",
  "Lightning, compiled": lambda name: f"state_dict.model._orig_mod.{name}",
  "an own module": lambda name: f"backbone.{name}",
}


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("head", ["mlm_head", None])
@pytest.mark.parametrize("kind", ["electra", "modernbert"])
def test_wrapped_weights_are_the_same_network(tmp_path, kind, head, wrap):
  cfg, make = (ELECTRA, random_network) if kind == "electra" else (CFG, random_modern)
  weights, path = make(cfg, head), tmp_path / "model.safetensors"
  huggingface.save(tmp_path, cfg, weights, head, 0)
  tensors = load_file(path)
  save_file({WRAPPED[wrap](name): x for name, x in tensors.items()}, path)
  found = huggingface.load(tmp_path)
  assert found[:2] == (cfg, head) and same(found[2], weights)
  if head is None:  # a bare encoder, beside a task's head
    bare = {name.removeprefix(huggingface.family_of(cfg).prefix): x for name, x in tensors.items()}
    others = {"classifier.weight": np.zeros((2, 3), np.float32)}
    save_file({WRAPPED[wrap](name): x for name, x in bare.items()} | others, path)
    assert same(huggingface.load(tmp_path)[2], weights)
    assert huggingface.task_tensors(tmp_path) == ["classifier.weight"]


@pytest.mark.parametrize(
  "change, told",
  [
    (
      lambda x: {f"{of}.{name}": y for of in "ab" for name, y in x.items()},
      "networks: a., b.: sav",
    ),
    (lambda x: x | {f"module.{name}": y for name, y in x.items()}, "2 tensors are "),
    (lambda x: {f"module.{name}x": y for name, y in x.items()}, "is missing"),
  ],
)
def test_names_that_fit_no_network_are_one_line(tmp_path, change, told):
  cfg, path = dataclasses.replace(ELECTRA, num_layers=1), tmp_path / "model.safetensors"
  huggingface.save(tmp_path, cfg, random_network(cfg, "rtd_head"), "rtd_head", 0)
  save_file(change(load_file(path)), path)
  with pytest.raises(ExchangeError, match=told) as error:
    huggingface.load(tmp_path)
  assert "\n" not in str(error.value)


def test_an_adapter_is_named(tmp_path):
  huggingface.save(tmp_path, ELECTRA, random_network(ELECTRA, None), None, 0)
  (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
  (tmp_path / "adapter_config.json").write_text("{}", "utf-8")
  with pytest.raises(ExchangeError, match=r"is missing: merge the adapter .* merge_and_unload"):
    huggingface.load(tmp_path)
