"""The house rules: imports point down, the pure layers need no TensorFlow, files stay readable."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import electra_jax

PACKAGE = Path(electra_jax.__file__).parent
# A module may import its own layer and those above it in this list; in layer 0 order counts too.
PURE = [
  "batch",
  "schedules",
  "model",
  "masking",
  "networks",
  "terms",
  "generators",
  "objectives",
  "scoring",
  "step",
  "finetune.heads",
  "finetune.qa",
  "finetune.network",
]
LAYERS = [
  {*PURE, "optimizer", "zero", "flops", "flops.paper", "flops.chips", "params"},
  {"parallel", "checkpoint", "metrics", "curves", "log", "goodput", "tracing", "processes",
   "hosts", "health", "interrupt", "workdir"},
  {"tokenizer", "data.chunks", "data.examples", "data.pool", "data.pretrain", "data.python_docs",
   "data.shards", "data.sources", "data.status", "data.finetune", "spm", "hf", "tf1",
   "finetune.tasks",
   "finetune.glue", "finetune.glue_files", "finetune.squad", "finetune.squad_files",
   "finetune.tagging", "finetune.statistics"},
  {"config", "translate", "runs", "exchange", "export", "score", "job", "loop", "train",
   "data.build", "flops.__main__", "preflight", "finetune.setup", "finetune.prepare",
   "finetune.loop", "finetune.model", "finetune.answer", "finetune.__main__"},
]  # fmt: skip
WORLD = {
  "tensorflow",
  "tensorflow_datasets",
  "tokenizers",
  "safetensors",
  "sentencepiece",
  "transformers",
  "torch",
}


def modules() -> list[tuple[str, Path]]:
  found = []
  for path in sorted(PACKAGE.rglob("*.py")):
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    if not name.endswith("__init__"):
      found.append((name, path))
  return found


def imports(path):
  """Yields the modules that a file imports, wherever in the file it does."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield node.module
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(name):
  return next((i for i, layer in enumerate(LAYERS) if name in layer), None)


@pytest.mark.parametrize(("name", "path"), modules(), ids=lambda x: x if "." in str(x) else str(x))
def test_imports_point_down(name, path):
  mine = layer_of(name)
  assert mine is not None, f"{name} has no layer: put it into LAYERS"
  for other in {i.removeprefix("electra_jax.") for i in imports(path) if "electra_jax." in i}:
    theirs = layer_of(other)
    if theirs is None:
      continue  # a name inside a module, which is imported too
    assert theirs <= mine, f"{name} (layer {mine}) imports {other} (layer {theirs})"
    if name in PURE and other in PURE:
      assert PURE.index(other) < PURE.index(name), f"{name} imports {other}"


@pytest.mark.parametrize(("name", "path"), modules(), ids=lambda x: x if "." in str(x) else str(x))
def test_the_world_is_imported_in_layer_2_only(name, path):
  found = {i.split(".")[0] for i in imports(path)} & WORLD
  assert not found or layer_of(name) == 2, f"{name} imports {found}"


def test_the_layers_below_the_world_import_where_tensorflow_is_missing():
  names = sorted(LAYERS[0] | LAYERS[1] | {"config", "translate"})
  blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in sorted(WORLD))
  code = f"import sys\n{blocked}" + "".join(f"import electra_jax.{name}\n" for name in names)
  subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ}, timeout=120)


def test_only_parallel_maps_over_devices():
  for name, path in modules():
    calls = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    assert name == "parallel" or not calls & {"pmap", "shard_map"}, name


def test_layer_0_never_sees_a_configdict():
  for name, path in modules():
    if name in LAYERS[0]:
      assert not any(i.startswith("ml_collections") for i in imports(path)), name


def test_files_and_functions_stay_short():
  for name, path in modules():
    text = path.read_text()
    assert text.count("\n") <= 450, f"{name} has more than 450 lines"
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.FunctionDef):
        limit = 120 if node.name in ("main", "loop") else 70
        length = node.end_lineno - node.lineno + 1
        assert length <= limit, f"{name}.{node.name} has {length} lines"
