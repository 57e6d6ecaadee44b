"""Configurations: found by path, changed from the command line, checked, told apart.

A configuration file is Python with `get_config(arg)`; `configs/base.py` holds every field and the
others are deltas to it. What is wrong is a ValueError or an OSError; `run` tells it in one line.
"""

import atexit
import difflib
import errno
import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from electra_jax import __version__

PACKAGE = Path(__file__).resolve().parent
# Where the project's own configurations are: inside an installed package, or beside it in a clone.
FOLDERS = (PACKAGE / "configs", PACKAGE.parent / "configs")

# Groups whose fields make a run what it is: a checkpoint is only continued with the same values.
DEFINING = ("seed", "init_from", "model", "generator", "objective", "optimizer", "train")
# Exceptions: how the same thing is computed, which may change with the machine.
FREE = (
  "model.attention",
  "model.unroll",
  "model.remat",
  "train.accumulation",
  "optimizer.sharded",
)
# Facts about the shards that are compared like fields; they are not in the configuration.
DATA_FACTS = ("data.manifest", "data.vocab_hash")

DEBUG_VARIABLE = "ELECTRA_JAX_DEBUG"
GOODBYE_SECS = 20
SCORE_PACKAGES = ("sklearn", "scipy", "seqeval")  # the extra `finetune`
# What text needs on its way to the device: the extra `data`.
DATA_PACKAGES = (
  "sentencepiece",
  "tensorflow",
  "tensorflow_datasets",
  "tokenizers",
  "zstandard",
  "safetensors",
)


# Files.


def _own(path: Path) -> Path | None:
  """Returns the project's own file of that name (`configs/x.py`, `x.py`, `finetune/x.py`)."""
  name = path.relative_to("configs") if path.is_relative_to("configs") else path
  found = [folder / name for folder in FOLDERS if not path.is_absolute()]
  return next((file for file in found if file.is_file()), None)


def resolve(path: str | Path) -> Path:
  """Finds a configuration file: as given, else among the project's own."""
  path = Path(path)
  if path.is_file():
    return path.resolve()
  if own := _own(path):
    return own
  known = sorted({str(p.relative_to(folder)) for folder in FOLDERS for p in folder.glob("**/*.py")})
  close = difflib.get_close_matches(str(path).removeprefix("configs/"), known, n=1)
  hint = f"; did you mean configs/{close[0]}?" if close else f"; there are {', '.join(known)}"
  raise FileNotFoundError(errno.ENOENT, f"no such configuration{hint}", str(path))


def load(path: str | Path, arg: str | None = None) -> ConfigDict:
  """Returns what `get_config(arg)` of a configuration file returns, locked: no field can be added.

  "base.py" and "finetune/base.py" mean the project's own files, so that a delta, wherever it lives,
  starts with them.
  """
  path = Path(path)
  own = _own(path) if path.parent in (Path("."), Path("finetune")) else None
  path = own or resolve(path)
  spec = importlib.util.spec_from_file_location(f"electra_jax_config_{path.stem}", path)
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except (SyntaxError, NameError, ImportError, AttributeError, KeyError) as error:
    raise ValueError(f"{path} is no configuration: {type(error).__name__}: {error}") from error
  if not hasattr(module, "get_config"):
    raise ValueError(f"{path} is no configuration: it has no get_config(arg)")
  try:
    return module.get_config(arg).lock()
  except (AttributeError, KeyError, TypeError) as error:  # e.g. a delta that sets an unknown field
    raise ValueError(f"{path}: {_one_line(error)}") from error


# The command line.


def define_config_flag() -> flags.FlagHolder:
  """Defines --config=FILE[:ARG] and --config.FIELD=VALUE for a program that starts with `run`."""
  return config_flags.DEFINE_config_file(
    "config", None, "configuration file, e.g. configs/base.py; --config.FIELD=VALUE changes a field"
  )


@functools.cache
def code_digest() -> str:
  """Returns the SHA-256 of the package's Python files, by name and content."""
  digest = hashlib.sha256()
  for path in sorted(PACKAGE.rglob("*.py")):
    content = path.read_bytes()
    digest.update(f"{path.relative_to(PACKAGE)} {len(content)}\n".encode() + content)
  return digest.hexdigest()


@functools.cache
def code_version() -> str:
  """Returns the version, with the commit of a clone and whether it has changes."""
  root = PACKAGE.parent
  if not (root / ".git").exists():
    return __version__
  try:
    git = ["git", "-C", str(root)]
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    dirty = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True).strip()
  except (OSError, subprocess.CalledProcessError):
    return __version__
  return f"{__version__} ({commit}{', with changes' if dirty else ''})"


def run(main: Callable[[list[str]], int | None]) -> None:
  """Runs a program: parses the flags, calls main(argv), exits with what it returns.

  What a user can cause is told in one line on stderr and ends with exit code 2 (command line) or 1
  (anything else). A bug still shows its traceback, and so does everything where the environment
  variable ELECTRA_JAX_DEBUG is set.
  """

  def run_and_leave(argv):
    _leave(main(argv) or 0)

  sys.unraisablehook = _tell_unless_known

  def parse_and_run():
    sys.argv = _resolve_argv(sys.argv)  # config_flags reads the overrides from there
    app.run(run_and_leave, flags_parser=_parse_flags)

  report(parse_and_run)


def _tell_unless_known(error) -> None:
  """Is Python's own hook but for what tensorstore prints by the page after a failed write."""
  if str(error.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(error)


def _leave(code: int) -> None:
  """Ends the program as Python does, but for collecting what the system frees anyway.

  After a training that takes half a minute of one core: compiled programs and what they were traced
  from are millions of small objects. After an error, threads of libraries may still wait for what
  does not come.
  """
  atexit._run_exitfuncs()  # jax.distributed says goodbye there
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def report(program: Callable[[], None]) -> None:
  """Runs a program that has parsed its command line itself; tells errors as `run` does."""
  try:
    program()
  except flags.Error as error:
    _fail(error, _one_line(error), 2)
  except Exception as error:
    _fail(error, explain(error), 1)
  except KeyboardInterrupt as error:
    _fail(error, "interrupted", 130)


def explain(error: BaseException) -> str | None:
  """Says in one line what went wrong, or returns None where that needs a traceback.

  A ValueError or ArithmeticError raised by this package's own lines is meant for the user; one
  raised inside a library is a bug of ours that a user cannot read.
  """
  if isinstance(error, OSError):
    return _one_line(error)
  for extra, packages in (("data", DATA_PACKAGES), ("finetune", SCORE_PACKAGES)):
    if isinstance(error, ModuleNotFoundError) and error.name in packages:
      return f"{error.name} is not installed; it comes with: pip install 'electra_jax[{extra}]'"
  if "RESOURCE_EXHAUSTED" in str(error) and type(error).__module__.startswith("jax"):
    return (
      f"the device is out of memory: raise train.accumulation, or set model.remat ({error!s:.200})"
    )
  frames = traceback.extract_tb(error.__traceback__)
  if not isinstance(error, ValueError | ArithmeticError) or not frames:
    return None
  raised_in = Path(frames[-1].filename).resolve()
  ours = any(raised_in.is_relative_to(folder) for folder in (PACKAGE, *FOLDERS))
  return _one_line(error) if ours or raised_in.name == "app.py" else None


def _fail(error: BaseException, line: str | None, code: int) -> None:
  """Ends the program with one line, or with the traceback where there is no line for it."""
  if line is None or os.environ.get(DEBUG_VARIABLE):
    traceback.print_exception(error)
  else:
    print(f"error: {line}", file=sys.stderr, flush=True)
  # A goodbye waits for all processes of a run, and the others may not know yet.
  timer = threading.Timer(GOODBYE_SECS, os._exit, [code])
  timer.daemon = True
  timer.start()
  _leave(code)


def _parse_flags(argv: list[str]) -> list[str]:
  """Parses the flags; refuses arguments that are none."""
  rest = flags.FLAGS(argv)
  # What libraries log through absl (orbax: pages of it) is for their developers; their errors reach
  # the user as exceptions. --verbosity=0 shows it.
  if flags.FLAGS["verbosity"].using_default_value:
    flags.FLAGS.verbosity = logging.FATAL
  if len(rest) > 1:
    raise flags.Error(f"{rest[1]!r} is no flag; a flag looks like --config=configs/base.py")
  return rest


def _resolve_argv(argv: list[str]) -> list[str]:
  """Returns argv with --config's path resolved; refuses a field that the file does not have."""
  argv = list(argv)
  for i, arg in enumerate(argv):
    if arg in ("--config", "-config") and i + 1 < len(argv):
      argv[i : i + 2] = [f"--config={argv[i + 1]}", ""]
  argv = [argv[0], *(arg for arg in argv[1:] if arg)]
  for i, arg in enumerate(argv):
    if match := re.match(r"--?config=([^:]*)(:.*)?$", arg):
      path, colon_arg = resolve(match[1]), match[2] or ""
      argv[i] = f"--config={path}{colon_arg}"
      config = load(path, colon_arg[1:] or None)
      for field in _overridden(argv):
        check_field(config, field)
  return argv


def _overridden(argv: list[str]) -> Iterator[str]:
  """Yields the fields that the command line changes."""
  for arg in argv:
    if match := re.match(r"--?(?:no)?config\.([^=]*)", arg):
      yield match[1]


def check_field(config: ConfigDict, field: str) -> None:
  """Refuses the name of a field that the configuration does not have, naming the nearest."""
  known = flatten(config)
  if field in known:
    return
  if any(name.startswith(f"{field}.") for name in known):
    raise ValueError(
      f"config.{field} is a group of fields: name one, as --config.{field}.NAME=VALUE"
    )
  last = field.rsplit(".", 1)[-1]
  close = difflib.get_close_matches(field, known, n=1, cutoff=0.7)
  alike = [name for name in known if name.rsplit(".", 1)[-1] == last]
  close = close or difflib.get_close_matches(field, alike, n=1, cutoff=0.0)
  close = close or difflib.get_close_matches(field, known, n=1, cutoff=0.0)
  raise ValueError(f"there is no field config.{field}; the nearest is config.{close[0]}")


def _one_line(error: BaseException) -> str:
  """Returns an error's message with its line breaks folded."""
  if isinstance(error, OSError) and error.strerror:
    name = f": {error.filename}" if error.filename is not None else ""
    return f"{error.strerror}{name}"
  text = str(error).removeprefix("Error whilst parsing config file:")
  return re.sub(r"\s*\n\s*", " ", text.strip()) or type(error).__name__


# What differs.


def flatten(config: ConfigDict | dict) -> dict[str, Any]:
  """Returns {"group.field": value} in the order of the file.

  >>> flatten({"seed": 0, "train": {"steps": 10}})
  {'seed': 0, 'train.steps': 10}
  """
  flat = {}
  for name, value in config.items():
    if isinstance(value, ConfigDict | dict):
      flat.update({f"{name}.{inner}": v for inner, v in flatten(value).items()})
    else:
      flat[name] = value
  return flat


def changed_from_base(config: ConfigDict) -> dict[str, tuple[Any, Any]]:
  """Returns {field: (value in base.py, value here)} for the fields that differ from base.py."""
  base = flatten(load("base.py"))
  return {k: (base.get(k), v) for k, v in flatten(config).items() if base.get(k) != v}


def differences(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
  """Returns {field: (saved, current)} where two runs differ in what makes them what they are.

  Args:
    saved, current: flat configurations, with the facts about the shards (DATA_FACTS) among them.
  """
  fields = [*saved, *(k for k in current if k not in saved)]
  found = {}
  for field in fields:
    matters = field in DATA_FACTS or field.split(".", 1)[0] in DEFINING
    if matters and field not in FREE and saved.get(field) != current.get(field):
      found[field] = (saved.get(field), current.get(field))
  return found


def refuse_other_run(saved: dict, current: dict, allowed: str, workdir: str | Path) -> list[str]:
  """Refuses to continue a run under a configuration that makes it another one.

  Args:
    saved, current: flat configurations with DATA_FACTS.
    allowed: comma-separated fields, or groups of them, that may differ.

  Returns:
    The differing fields that were allowed.
  """
  names = [name.strip() for name in allowed.split(",") if name.strip()]
  for name in names:
    groups = {field.rsplit(".", 1)[0] for field in current}
    if name not in current and name not in groups:
      close = difflib.get_close_matches(name, [*current, *groups], n=1, cutoff=0.0)
      raise ValueError(f"allow_config_change: there is no field {name}; the nearest is {close[0]}")
  found = differences(saved, current)
  refused = [f for f in found if not any(f == n or f.startswith(f"{n}.") for n in names)]
  if refused:
    listed = ", ".join(f"{f} was {found[f][0]!r}, is {found[f][1]!r}" for f in refused)
    raise ValueError(
      f"{workdir} holds another run: {listed}; use another --workdir, or to go on all the same"
      f" --config.allow_config_change={','.join(refused)}"
    )
  return list(found)
