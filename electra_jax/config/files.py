"""Finds and reads configuration files.

A configuration file is Python with `get_config(arg)`; `configs/base.py` has every field and the
other files change some.
"""

import difflib
import errno
import importlib.util
import re
from pathlib import Path

from ml_collections import ConfigDict

from electra_jax.config.schema import add_registered

PACKAGE = Path(__file__).resolve().parents[1]
# Folders of the built-in configurations: inside an installed package, or beside it in a clone.
FOLDERS = (PACKAGE / "configs", PACKAGE.parent / "configs")
# Errors in a configuration file.
MISTAKES = (
  NameError, ImportError, AttributeError, LookupError, TypeError, ArithmeticError, RecursionError,
)  # fmt: skip


def _built_in(path: Path) -> Path | None:
  """Returns the built-in file of that name, e.g. `configs/x.py`, `x.py` or `finetune/x`."""
  if path.is_absolute():
    return None
  name = path.relative_to("configs") if path.is_relative_to("configs") else path
  found = [folder / f"{name}{end}" for folder in FOLDERS for end in ("", ".py")]
  return next((file for file in found if file.is_file()), None)


def known() -> list[str]:
  """Returns the built-in files, as names in `configs`."""
  files = {p.relative_to(folder) for folder in FOLDERS for p in folder.glob("**/*.py")}
  return sorted(str(p) for p in files)


def resolve(path: str | Path) -> Path:
  """Finds a configuration file by path or else among the built-in ones; ".py" may be omitted.

  Raises:
    FileNotFoundError: no file is found; the message has the closest name.
  """
  path = Path(path)
  for file in (path, Path(f"{path}.py")):
    if file.is_file():
      return file.resolve()
  if found := _built_in(path):
    return found
  close = difflib.get_close_matches(str(path).removeprefix("configs/"), known(), n=1)
  hint = f"did you mean configs/{close[0]}?" if close else f"available: {', '.join(known())}"
  raise FileNotFoundError(errno.ENOENT, f"no such configuration ({hint})", str(path))


def find_data(path: str | Path) -> Path:
  """Finds a file by path or else among the built-in ones (`configs/bands/quickstart.json`).

  Raises:
    FileNotFoundError: no file is found.
  """
  path = Path(path)
  if found := path if path.is_file() else _built_in(path):
    return found
  raise FileNotFoundError(errno.ENOENT, "No such file", str(path))


def load(path: str | Path, arg: str | None = None) -> ConfigDict:
  """Returns the result of a file's `get_config(arg)`, locked so that no field can be added.

  Names such as "base.py" and "finetune/base" are the built-in files, for configurations in any
  folder.

  Raises:
    FileNotFoundError: as `resolve`.
    ValueError: the file is not a configuration, sets a field that base.py lacks, or rejects `arg`.
  """
  path = Path(path)
  built_in = _built_in(path) if path.parent in (Path("."), Path("finetune")) else None
  path = built_in or resolve(path)
  spec = importlib.util.spec_from_file_location(f"electra_jax_config_{path.stem}", path)
  if spec is None:
    raise ValueError(f"{path} is not a configuration file: its name must end in .py")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except (SyntaxError, ValueError, *MISTAKES) as error:
    raise ValueError(f"{path} is not a configuration: {type(error).__name__}: {error}") from error
  if not hasattr(module, "get_config"):
    raise ValueError(f"{path} is not a configuration file: it has no get_config(arg)")
  try:
    config = module.get_config() if arg is None else module.get_config(arg)
    if path == _built_in(Path("base.py")):
      add_registered(config)
    return config.lock()
  except MISTAKES as error:  # e.g. an unknown field
    text = re.sub(r" Other fields present: .*\}\"", "", one_line(error))
    raise ValueError(f"{path}: {text}") from error
  except ValueError as error:  # raised by the file, e.g. for its argument
    raise ValueError(one_line(error)) from error


def load_named(name: str) -> ConfigDict:
  """Returns the configuration NAME or NAME:ARG, e.g. small or modern:17m; raises as `load`."""
  file, _, arg = name.partition(":")
  return load(file, arg or None)


def load_size(size: str | None) -> ConfigDict:
  """Returns the configuration of a size.

  Args:
    size: small, base (also None or ""), large, quickstart, or modern:17m and modern.py's others.

  Raises:
    FileNotFoundError, ValueError: as `load`.
  """
  return load_named(size or "base")


def one_line(error: BaseException) -> str:
  """Returns an error's message with its line breaks removed."""
  if isinstance(error, OSError) and error.strerror:
    name = f": {error.filename}" if error.filename is not None else ""
    full = name and error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = ": free space or choose another disk, and run the command again" if full else ""
    return f"{error.strerror}{name}{hint}"
  text = str(error).removeprefix("Error whilst parsing config file:")
  return re.sub(r"\s*\n\s*", " ", text.strip()) or type(error).__name__
