"""Replaced-token-detection pretraining of text encoders in JAX.

import electra_jax

encoder = electra_jax.load("runs/quickstart")  # or an export, hf://ORG/NAME, a folder, TF1
vectors = encoder.embed(["A sentence.", "Another one."])  # float32 [2, D]
encoder.fill_mask("The capital of France is [MASK].")
encoder.detect("The chef ate the meal the next brick.")

config = electra_jax.load_config("quickstart", {"train.steps": 100})
electra_jax.build(config)
trained = electra_jax.train(config, "runs/short")
"""

import importlib
import sys

__version__ = "0.2.0"
# {name: its definition}, imported at first use.
_HOMES = {
  "load": "encoder.load",
  "Encoder": "encoder.Encoder",
  "load_task": "finetune.model.load",
  "load_config": "config.fields.load_config",
  "build": "commands.build.build",
  "train": "pretrain.train.train",
  "fine_tune": "finetune.train.fine_tune",
  "evaluate_pairs": "evaluate.measures.evaluate_pairs",
  "evaluate_cloze": "evaluate.measures.evaluate_cloze",
  "evaluate_detection": "evaluate.measures.evaluate_detection",
  "evaluate_probe": "evaluate.measures.evaluate_probe",
  "register": "config.registry.register",
}
__all__ = [*_HOMES, "__version__"]
# {module of version 0.1: where it is now}
_MOVED = {
  "config.cli": "commands.cli",
  "data.build_vocab": "data.vocabulary",
  "data.finetune_batches": "finetune.batches",
  "evaluate.detect": "evaluate.measures",
  "finetune.glue": "finetune.text_task",
  "finetune.probe": "evaluate.probe",
  "interop.likelihood": "evaluate.likelihoods",
  "programs": "commands",
  "runtime.chance": "monitor.baselines",
  "runtime.targets": "cost.targets",
}
_MOVED |= {
  f"runtime.{name}": f"monitor.{name}"
  for name in "bands curves display goodput health journal log metrics stragglers tracing"
  " trackers".split()
}


def __getattr__(name: str):
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module, _, attribute = _HOMES[name].rpartition(".")
  return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
  return __all__


class _MovedModules:
  """A finder of modules, the last to be asked, that says where a module of version 0.1 is now."""

  @staticmethod
  def find_spec(name: str, path=None, target=None) -> None:
    if place := _MOVED.get(name.removeprefix(f"{__name__}.")):
      raise ImportError(f"{name} is now {__name__}.{place}")


sys.meta_path.append(_MovedModules)
