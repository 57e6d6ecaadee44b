"""Runs the programs: parses --config and its overrides, and prints user errors in one line.

A user error is a ValueError or an OSError.
"""

import argparse
import atexit
import contextlib
import functools
import io
import itertools
import os
import re
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags
from rich.table import Table

from electra_jax.config import registry
from electra_jax.config.fields import check_field, check_set
from electra_jax.config.files import FOLDERS, PACKAGE, load, one_line, resolve
from electra_jax.runtime import terminal

DEBUG_VARIABLE = "ELECTRA_JAX_DEBUG"
GOODBYE_SECS = 20
SCRIPT = "electra-jax"  # the installed command
IMPORT_HELP = "module or FILE.py with objectives, heads ... of your own (electra_jax.register)"
HELP = ("--help", "-help", "-h", "--helpshort")
# The packages of an extra.
EXTRAS = {
  "data": "pyarrow sentencepiece tensorflow tensorflow_datasets tokenizers zstandard",
  "finetune": "sklearn scipy seqeval",
  "report": "bokeh jinja2 markupsafe",
}


class ArgumentParser(argparse.ArgumentParser):
  """Raises errors of the command line as flags.Error, without printing the usage."""

  def error(self, message: str) -> NoReturn:
    """Raises the error; `report` prints its message and exits with code 2."""
    raise flags.Error(message)


def parser(doc: str) -> ArgumentParser:
  """Returns the parser of a program with options of its own; --help shows its docstring."""
  raw = argparse.RawDescriptionHelpFormatter
  made = ArgumentParser(prog=program_name(), description=doc, formatter_class=raw)
  add_import(made)
  return made


def add_import(to: argparse.ArgumentParser) -> None:
  """Adds the option --import=MODULE."""
  to.add_argument("--import", action=_Import, metavar="MODULE", help=IMPORT_HELP)


class _Import(argparse.Action):
  """Imports the module that the option names."""

  def __call__(self, parser, namespace, values, option_string=None) -> None:
    registry.import_module(values)


def positive(text: str) -> int:
  """Returns the number that an argument of a `parser` is; it must be above 0 and fit 32 bits."""
  try:
    number = int(text)
  except ValueError:
    number = 0
  if not 0 < number < 2**31:
    raise argparse.ArgumentTypeError(f"must be a number above 0 and below 2**31, got {text!r}")
  return number


def program_name() -> str:
  """Returns how this program was started: `electra-jax train`, `python -m electra_jax.train`."""
  words = _typed()[: 1 - len(sys.argv) or None]  # without the program's own arguments
  return " ".join([Path(words[0]).name, *words[1:]]) if words else sys.argv[0]


def command_line() -> str:
  """Returns the command that started this program, for a shell."""
  return shlex.join(_typed())


def _typed() -> list[str]:
  python, *words = sys.orig_argv
  is_script = words and Path(words[0]).name == SCRIPT
  return words if is_script else [python, *words]


def _or_none(parser: type[flags.ArgumentParser]) -> flags.ArgumentParser:
  """Returns a parser that also takes None, which `_parse_flags` allows where a base has it."""

  class Parser(parser):
    def parse(self, argument):
      return None if argument == "None" else super().parse(argument)

  return Parser()


def define_config_flag(example: str = "configs/base.py") -> flags.FlagHolder:
  """Defines --config=FILE[:ARG] and --config.FIELD=VALUE for a program that starts with `run`."""
  for kind, parser in (
    (float, flags.FloatParser),
    (int, flags.IntegerParser),
    (str, flags.ArgumentParser),
    (bool, flags.BooleanParser),
  ):
    config_flags.register_flag_parser_for_type(kind, _or_none(parser))
  return config_flags.DEFINE_config_file(
    "config",
    None,
    f"configuration file, e.g. {example}, or FILE:ARG. --config.FIELD=VALUE changes a field;"
    " electra-jax config FILE lists them",
  )


def overrides() -> list[str]:
  """Returns the fields that the command line sets."""
  return list(config_flags.get_override_values(flags.FLAGS["config"]))


def _expand_home() -> None:
  """Expands ~ after = or a colon in sys.argv: shells do so only where a word begins."""
  home = os.path.expanduser("~")
  sys.argv = [re.sub(r"(?<=[=:])~(?=/|$)", lambda _: home, arg) for arg in sys.argv]


def run(
  main: Callable[..., int | None], takes_options: bool = False, base: str | None = "base.py"
) -> None:
  """Runs a program: parses the flags, calls main(), exits with its result.

  With `takes_options`, arguments after -- are not flags but the list that main takes. A --config
  has to be a delta to `base`, if that is given.

  A user error prints one line on stderr and exits with code 2 (command line) or 1 (any other). A
  bug prints its traceback; if the environment variable ELECTRA_JAX_DEBUG is set, so does any error.
  """

  def run_and_leave(argv):
    _leave((main(argv[1:]) if takes_options else main()) or 0)

  def parse_and_run():
    options = sys.argv[len(own) + 1 :]
    if options and not takes_options:
      raise _not_a_flag(options[0])
    sys.argv = _resolve_argv(own, base)  # config_flags reads the overrides from there
    app.run(run_and_leave, flags_parser=lambda argv: _parse_flags(argv) + options)

  flags.DEFINE_multi_string("import", [], IMPORT_HELP)
  _expand_home()
  own = list(itertools.takewhile(lambda arg: arg != "--", sys.argv))
  if any(arg in HELP for arg in own[1:]):
    _print_help(sys.modules["__main__"].__doc__ or "")
    return
  report(parse_and_run)


def _print_help(doc: str) -> None:
  """Prints a program's docstring and its flags."""
  table = Table.grid(padding=(0, 2))
  for module, defined in flags.FLAGS.flags_by_module_dict().items():
    for flag in [] if module.startswith("absl") else defined:
      name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}=..."
      default = f" (default: {flag.default})" if flag.default not in (None, "", False) else ""
      table.add_row(f"  {name}", f"{flag.help}{default}")
  console = terminal.console()
  console.print(f"{doc.strip()}\n\nflags:")
  console.print(table)


def _drop_event_loop_errors(error) -> None:
  """Acts as Python's own hook, but drops tensorstore's many messages after a failed write."""
  if str(error.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(error)


def _leave(code: int) -> None:
  """Runs the exit handlers, then ends the process without freeing memory or joining threads.

  Freeing the millions of small objects of traced and compiled programs takes half a minute after
  training. After an error, threads of libraries may block forever.
  """
  atexit._run_exitfuncs()  # jax.distributed shuts down there
  try:
    sys.stdout.flush()
  except OSError:
    if not (code or terminal.StampedLines.failed):  # stdout is the program's result
      raise
  with contextlib.suppress(OSError):
    sys.stderr.flush()
  os._exit(code)


def _end_at_signals() -> None:
  """Lets SIGTERM and SIGUSR1 end a container's first process, as they end any other.

  The kernel drops signals that a process of id 1 has no handler for. `train` replaces these.
  """
  if os.getpid() == 1:
    for number in (signal.SIGTERM, signal.SIGUSR1):
      signal.signal(number, lambda number, _frame: os._exit(128 + number))


def _open_closed_streams() -> None:
  """Opens the null device for standard streams that are closed, where Python has None."""
  for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, mode))


def report(program: Callable[[], None]) -> None:
  """Runs a program that parses its command line itself; prints errors as `run` does."""
  _end_at_signals()
  _open_closed_streams()
  _expand_home()
  if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
    sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: it may not be UTF-8
  warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
  sys.unraisablehook = _drop_event_loop_errors
  # Libraries (mainly orbax) log for their developers through absl; their errors are raised as
  # exceptions. --verbosity=0 shows the log.
  flags.FLAGS.verbosity = logging.FATAL
  try:
    program()
  except flags.Error as error:
    _fail(error, one_line(error), 2)
  except Exception as error:
    _fail(error, explain(error), 1)
  except KeyboardInterrupt as error:
    _fail(error, str(error) or "interrupted", 130)


def _show_warning(show: Callable, message, category, filename: str, *others) -> None:
  """Prints a warning of this package in one line; `show` prints others."""
  if Path(filename).is_relative_to(PACKAGE):
    with contextlib.suppress(OSError):
      print(f"warning: {message}", file=sys.stderr, flush=True)
  else:
    show(message, category, filename, *others)


def explain(error: BaseException) -> str | None:
  """Returns an error message of one line, or None if the error needs a traceback.

  A ValueError or ArithmeticError raised by this package is meant for the user; one raised inside a
  library is a bug of ours.
  """
  if isinstance(error, OSError):
    return one_line(error)
  for extra, packages in EXTRAS.items():
    if isinstance(error, ModuleNotFoundError) and error.name in packages.split():
      return f"{error.name} is not installed; it comes with: pip install 'electra_jax[{extra}]'"
  if "RESOURCE_EXHAUSTED" in str(error) and type(error).__module__.startswith("jax"):
    return (
      "the device is out of memory: use a smaller batch, or in training raise train.accumulation or"
      f" set model.remat ({error!s:.200})"
    )
  frames = traceback.extract_tb(error.__traceback__)
  if not frames:
    return None
  raised_in = Path(frames[-1].filename).resolve()
  if raised_in.name == "xla_bridge.py" and (asked := os.environ.get("JAX_PLATFORMS")):
    return (
      f"JAX finds no device for JAX_PLATFORMS={asked}: unset it, or install JAX for that device:"
      " pip install 'electra_jax[gpu]' or 'electra_jax[tpu]'"
    )
  if not isinstance(error, ValueError | ArithmeticError):
    return None
  ours = any(raised_in.is_relative_to(folder) for folder in (PACKAGE, *FOLDERS))
  return one_line(error) if ours or raised_in.name == "app.py" else None


def _fail(error: BaseException, line: str | None, code: int) -> None:
  """Prints the line, or the traceback if it is None, and ends the program."""
  with contextlib.suppress(OSError):
    if line is None or os.environ.get(DEBUG_VARIABLE):
      traceback.print_exception(error)
    else:
      print(f"error: {line}", file=sys.stderr, flush=True)
  # The exit handlers wait for all processes of a run, and the others may still be running.
  timer = threading.Timer(GOODBYE_SECS, os._exit, [code])
  timer.daemon = True
  timer.start()
  _leave(code)


def _parse_flags(argv: list[str]) -> list[str]:
  """Parses the flags; raises flags.Error for any other argument."""
  rest = flags.FLAGS(argv)
  if len(rest) > 1:
    raise _not_a_flag(rest[1])
  for module in flags.FLAGS["import"].value:
    registry.import_module(module)
  if "config" in flags.FLAGS and (config := flags.FLAGS.config) is not None:
    try:
      check_set(config, overrides())
    except ValueError as error:
      raise flags.Error(f"flag --{error}") from None
  return rest


def _not_a_flag(arg: str) -> flags.Error:
  return flags.Error(f"{arg!r} is not a flag; flags look like --config=configs/base.py")


def _resolve_argv(argv: list[str], base: str | None = None) -> list[str]:
  """Returns argv with --config first and its path resolved.

  Raises:
    ValueError: for an unknown field, or a configuration of other programs.
  """
  argv = list(argv)
  for i in reversed(range(len(argv) - 1)):
    if argv[i] in ("--config", "-config"):
      argv[i : i + 2] = [f"--config={argv[i + 1]}"]
  if len(given := [arg for arg in argv if re.match("--?config=", arg)]) > 1:
    raise flags.Error(f"--config is given twice: {' and '.join(given)}")
  for i, arg in enumerate(argv):
    if match := re.match(r"--?config=([^:]*)(:.*)?$", arg):
      path, colon_arg = resolve(match[1]), match[2] or ""
      # Its flag refuses overrides that stand before it.
      argv = [argv[0], f"--config={path}{colon_arg}", *argv[1:i], *argv[i + 1 :]]
      config = load(path, colon_arg[1:] or None)
      check_base(config, match[1], base)
      for other in argv:
        if override := re.match(r"--?(?:no)?config\.([^=]*)", other):
          check_field(config, override[1])
  return argv


def check_base(config: ConfigDict, name: str, base: str | None) -> None:
  """Raises ValueError if a configuration has fields or groups that `base`, if given, has not."""
  if base and (others := set(config) - set(load(base))):
    raise ValueError(
      f"{name} is for another program: it sets config.{min(others)}, and this program takes the"
      f" fields of configs/{base}"
    )
