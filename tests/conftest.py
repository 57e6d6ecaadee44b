"""Before JAX starts: eight CPU devices on any machine, and one cache of compiled steps."""

import ast
import contextlib
import functools
import gc
import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# The networks here are tiny: nearly all of the time is the compiler's. Level 0 halves it, and loops
# that LLVM alone emits, without MLIR, halve it again; a JAX that knows no such option ignores it.
# XLA aborts where a device of eight waits 40 s for the others: a loaded machine may need longer.
os.environ.setdefault(
  "XLA_FLAGS",
  "--xla_backend_optimization_level=0"
  " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
  " --xla_cpu_parallel_codegen_split_count=1"
  " --xla_cpu_collective_call_terminate_timeout_seconds=600",
)
ROOT = Path(__file__).resolve().parent.parent
# None has doctests: one raises when it is imported, one imports TensorFlow, and a plug-in of golden
# registers its entries.
collect_ignore = ["without_tensorflow", "faults/preload.py", "golden"]
# Tests that start a run again, here or in another process, compile its step once.
_compiled = tempfile.TemporaryDirectory(prefix="electra_jax_tests_")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Most of what is left is tracing: lines of source in every operation, which nobody reads here, are
# a seventh of its time, and garbage collections a fifth.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")


def long_except(*quick: int, of, nightly=()) -> list:
  """Returns the cases `of` a parametrization; all but the `quick` ones, by index, are long.

  Of those, the `nightly` ones repeat what another says.
  """
  return [
    case if i in quick
    else pytest.param(
      *(case if isinstance(case, tuple) else (case,)),
      marks=[pytest.mark.long, *[pytest.mark.nightly] * (i in nightly)],
    )
    for i, case in enumerate(of)
  ]  # fmt: skip


def pytest_addoption(parser):
  """Adds --part, for runs that take turns."""
  parser.addoption("--part", metavar="I/N", help="only every Nth file of tests, from the Ith")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
  """Marks the tests of the pure layer as `core`, and the rules of the house with them.

  Of the files with tests that -m chooses, keeps those of --part; a file's tests share fixtures.
  """
  for item in items if "core" in config.option.markexpr else ():  # it takes a second
    if item.path.stem == "test_house" or needs_only_core(item.path):
      item.add_marker("core")
  yield
  if config.option.part:
    first, step = map(int, config.option.part.split("/"))
    kept = set(sorted({item.path for item in items})[first::step])
    config.hook.pytest_deselected(items=[item for item in items if item.path not in kept])
    items[:] = [item for item in items if item.path in kept]


def pytest_collection_finish():
  """Lets the garbage collector pass over what was imported, and run seldom."""
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)


@functools.cache
def needs_only_core(path: Path) -> bool:
  """Whether a file of tests imports `core` and, of the rest, `runtime.parallel` at most."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text("utf-8"))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  ours = {name for name in names if name.partition(".")[0] == "electra_jax"}
  pure = {name for name in ours if name.startswith("electra_jax.core.")}
  others = {name.partition(".")[0] for name in names if name.startswith("test_")}
  return (
    bool(pure)
    and ours - pure <= {"electra_jax.runtime.parallel"}
    and all(needs_only_core(path.parent / f"{other}.py") for other in others)
  )


def parse_fields(text: str) -> dict:
  """Returns {field: value} of "field=value field=value": values of Python, else texts."""

  def value(written: str):
    try:
      return ast.literal_eval(written)
    except (SyntaxError, ValueError):
      return written

  return {name: value(x) for name, _, x in (word.partition("=") for word in text.split())}


# Limits the size of files, then becomes the program. A `preexec_fn` would fork, and keep every
# lock that another thread holds.
LIMITED = """
import os, resource, sys
size = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
# NumPy computes the order of examples as TensorFlow does, whose import takes 3 s of a child's CPU.
PACKAGE_PATH = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'without_tensorflow'}"
# A process whose files are limited would cut these short, for later ones to find.
WITHOUT_CACHES = {"PYTHONDONTWRITEBYTECODE": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}


def python(
  *args, env: dict | None = None, file_bytes: int | None = None, **options
) -> subprocess.CompletedProcess:
  """Runs Python with the package on its path, and no TensorFlow; returns a finished process.

  Args:
    file_bytes: the size that no file may exceed: writes fail as on a full disk.
  """
  env = {**os.environ, "PYTHONPATH": PACKAGE_PATH, **(env or {})}
  if file_bytes:
    args = ("-c", LIMITED, file_bytes, *args)
    env |= WITHOUT_CACHES
  command, options = [sys.executable, *map(str, args)], {"timeout": 300, **options}
  return subprocess.run(command, capture_output=True, text=True, env=env, **options)


@contextlib.contextmanager
def no_warnings():
  """Makes every warning an error."""
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    yield


def without_activities(stderr: str) -> str:
  """Drops the lines with a clock ("reading, 0:00:01"), which a loaded machine shows."""
  return re.sub(r"(?m)^.*, \d+:\d\d:\d\d( \(.*\))?\n", "", stderr)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
  """Drops compiled programs: XLA crashes at Linux's limit of 65,530 mappings a process."""
  yield
  maps = Path("/proc/self/maps")
  if maps.exists() and len(maps.read_bytes().splitlines()) > 30_000:
    import jax

    jax.clear_caches()


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
  """Leaves the pictures of runs empty: drawing takes a third of a short run's time.

  Tests of pictures call `curves.draw`; a run that a wider fixture trains draws its own.
  """
  if summary := sys.modules.get("electra_jax.pretrain.summary"):
    monkeypatch.setattr(summary, "draw_curves", lambda run, history: None)


# A vocabulary in which nearly every letter is a token.
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789éü"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [*SPECIAL, "the", "cafe", "##fe", "berlin"]
PIECES += [*LETTERS, *(f"##{c}" for c in LETTERS), *"!?.,'()-$%", "中", "国", "😀", "é"]


@pytest.fixture(scope="session")
def words(tmp_path_factory):
  """The tokenizer of PIECES, lower-casing."""
  from electra_jax.data import tokenizer

  path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
  path.write_text("\n".join(PIECES) + "\n", encoding="utf-8")
  return tokenizer.load(path)


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory):
  """A folder of shards built from a little text: sequences of 16 tokens, about 100 word pieces."""
  from electra_jax.config import files
  from electra_jax.data import build

  folder = tmp_path_factory.mktemp("data")
  rng = random.Random(0)
  words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 5))) for _ in range(40)]
  documents = (
    "\n".join(" ".join(rng.choices(words, k=12)) + "." for _ in range(6)) for _ in range(300)
  )
  (folder / "text.txt").write_text("\n\n".join(documents))
  config = files.load("base.py")
  config.data.update(dir=str(folder / "shards"), sources=f"text:{folder}/text.txt", workers=1)
  config.data.update(seq_length=16, vocab_size=100, holdout_frac=0.1)
  build.build(config)
  return config.data.dir


@pytest.fixture
def tiny_config(tiny_shards):
  """A configuration of its own for each test; see `make_tiny_config`."""
  return make_tiny_config(tiny_shards)


def make_tiny_config(shards: str):
  """Returns a configuration that compiles in seconds: two layers of width 16, batches of 8 x 16."""
  from electra_jax.config import files

  config = files.load("base.py")
  config.data.dir = shards
  small = parse_fields(
    "model.hidden_size=16 model.num_layers=2 model.num_heads=2 model.ffn_size=32"
    " model.embedding_size=8 model.max_positions=16 generator.width_multiplier=0.5"
    " data.seq_length=16 optimizer.learning_rate=1e-2 optimizer.warmup_steps=3"
    " train.batch_size=8 train.steps=12 eval.every_steps=6 eval.batch_size=8 eval.max_examples=20"
    " checkpoint.every_steps=4 log.every_steps=3 log.trackers="
  )
  config.update_from_flattened_dict(small)
  return config


@pytest.fixture(scope="session", name="straight")
def straight_run(tiny_shards, tmp_path_factory):
  """The workdir of a run that nothing interrupted, for every file of tests; not to be changed."""
  from electra_jax.pretrain import train

  config = make_tiny_config(tiny_shards)
  workdir = tmp_path_factory.mktemp("straight")
  assert train.train(config, workdir).step == config.train.steps
  return workdir


@pytest.fixture
def tables():
  """Restores the tables of entries and of fields, to which a test adds."""
  from electra_jax.config import registry

  found = [registry.table(kind) for kind in registry.KINDS] + [registry._origins]
  before = [dict(table) for table in found]
  yield
  for table, old in zip(found, before, strict=True):
    table.clear()
    table.update(old)
