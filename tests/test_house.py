"""The house rules: imports point down, the pure layers need no TensorFlow, files stay readable."""

import ast
import configparser
import graphlib
import importlib
import re
import types
from pathlib import Path

import pytest
from conftest import python

import electra_jax
from electra_jax.config import compare, files, schema

PACKAGE = Path(electra_jax.__file__).parent
# A module's layer is its folder: it may import its own and those before it. What stands beside the
# folders, and a folder's __main__, are above all.
LAYERS = (
  "core runtime monitor config data interop finetune evaluate pretrain cost export report"
  " experiments commands"
).split()
WORLD = set(
  "tensorflow tensorflow_datasets tokenizers safetensors sentencepiece transformers torch".split()
)


def modules() -> list[tuple[str, Path]]:
  found = []
  for path in sorted(PACKAGE.rglob("*.py")):
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    if name != "__init__":
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
  """Returns the layer of a module (`core.step`) or of a name inside one."""
  folder, *rest = name.split(".")
  if folder not in LAYERS or "__main__" in rest:
    return len(LAYERS)
  return LAYERS.index(folder)


def test_every_folder_is_a_layer():
  assert set(LAYERS) == {name.split(".")[0] for name, _ in modules() if "." in name}


@pytest.mark.parametrize(("name", "path"), modules(), ids=str)
def test_a_module_imports_what_its_layer_may(name, path):
  """Its own layer and lower ones; what text needs in a few of them; no ConfigDict in `core`."""
  mine, found = layer_of(name), set(imports(path))
  folder = name.split(".")[0]
  for other in {i.removeprefix("electra_jax.") for i in found if "electra_jax." in i}:
    theirs = layer_of(other)
    assert theirs <= mine or other == "__version__", f"{name} (layer {mine}) imports {other}"
    assert {folder, other.split(".")[0]} != {"pretrain", "finetune"}, (name, other)
  tops = {i.split(".")[0] for i in found}
  assert not tops & WORLD or folder in ("data", "interop", "finetune"), (name, tops & WORLD)
  assert folder != "core" or "ml_collections" not in tops, name


def test_no_module_imports_itself_through_others():
  names = {name for name, _ in modules()} - set(LAYERS)
  order = graphlib.TopologicalSorter()
  for name, path in modules():
    order.add(name, *({i.removeprefix("electra_jax.") for i in imports(path)} & names))
  order.prepare()  # raises CycleError, which names the modules


def test_the_lowest_layers_import_where_tensorflow_is_missing():
  names = [n for n, _ in modules() if n.split(".")[0] in ("core", "runtime", "monitor", "config")]
  blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in sorted(WORLD))
  code = f"import sys\n{blocked}" + "".join(f"import electra_jax.{name}\n" for name in names)
  done = python("-c", code, timeout=120)
  assert done.returncode == 0, done.stderr


def test_every_folder_is_packaged():
  options = configparser.ConfigParser()
  options.read(PACKAGE.parent / "setup.cfg")
  folders = {"electra_jax", "electra_jax.configs", "electra_jax.configs.finetune"}
  for _, path in modules():
    folders.add(".".join(["electra_jax", *path.relative_to(PACKAGE).parent.parts]))
  assert set(options["options"]["packages"].split()) == folders
  named = options["options"]["package_dir"].split("\n")
  assert {line.partition(" = ")[0] for line in named if line} == folders


def test_only_parallel_maps_over_devices():
  for name, path in modules():
    calls = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    assert name == "runtime.parallel" or not calls & {"pmap", "shard_map"}, name


def test_text_files_say_their_encoding():
  """What ruff's PLW1514 misses: methods of paths whose type it cannot infer."""
  number = {"read_text": 0, "write_text": 1}  # of arguments before the encoding
  for name, path in modules():
    for call in (
      n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)
    ):
      before = number.get(getattr(call.func, "attr", ""), -1)
      said = len(call.args) > before or any(k.arg == "encoding" for k in call.keywords)
      assert said, f"{name}:{call.lineno} has no encoding"


def test_files_and_functions_stay_short():
  for name, path in modules():
    text = path.read_text()
    assert text.count("\n") <= 450, f"{name} has more than 450 lines"
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.FunctionDef):
        limit = 120 if node.name == "main" else 70
        length = node.end_lineno - node.lineno + 1
        assert length <= limit, f"{name}.{node.name} has {length} lines"


BENCHMARKS = sorted((PACKAGE.parent / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_names_what_there_is(path):
  """The package's functions and the fields of its configurations."""
  tree = ast.parse(path.read_text())
  known = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("electra_jax"):
      for name in (alias.name for alias in node.names):
        module = importlib.import_module(node.module)
        if not hasattr(module, name):
          importlib.import_module(f"{node.module}.{name}")
        known[name] = getattr(module, name)
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      owner = known.get(node.value.id)
      assert not isinstance(owner, types.ModuleType) or hasattr(owner, node.attr), node.attr
  fields = [
    compare.flatten(files.load(f"configs/{name}", arg).to_dict())
    for name, arg in (("base.py", None), ("finetune/glue.py", "mrpc"))
  ]
  groups = {field.partition(".")[0] for field in fields[0] if "." in field}
  texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
  for text in (text for text in texts if re.fullmatch(r"[a-z]+\.[a-z_0-9]+", str(text))):
    group, _, end = text.partition(".")
    if group in groups and end not in ("json", "jsonl", "py", "txt"):
      assert any(text in known for known in (*fields, schema.HASHES)), text


def test_no_test_waits_for_ever_for_a_program_or_forks_a_process_with_threads():
  for path in Path(__file__).parent.rglob("*.py"):
    text = path.read_text()
    for call in ast.walk(ast.parse(text)) if "subprocess" in text or "communicate" in text else ():
      if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        given = {keyword.arg for keyword in call.keywords}
        name, of = call.func.attr, getattr(call.func.value, "id", None)
        waits = name == "communicate" or (of, name) == ("subprocess", "run")
        assert not waits or given & {"timeout", None}, f"{path}:{call.lineno}"
        assert "preexec_fn" not in given, f"{path}:{call.lineno}"
