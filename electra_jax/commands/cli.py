"""Runs a command: parses its options and configuration, and prints user errors in one line.

User errors are UsageError, ValueError and OSError.
"""

import argparse
import atexit
import contextlib
import difflib
import functools
import importlib
import io
import itertools
import os
import re
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from electra_jax.config import registry
from electra_jax.config.fields import check_base, check_field, check_set
from electra_jax.config.files import FOLDERS, PACKAGE, load_named, one_line
from electra_jax.runtime import signals, terminal

DEBUG_VARIABLE = "ELECTRA_JAX_DEBUG"
# {extra: its packages}
EXTRAS = {
  "buckets": "s3fs gcsfs",
  "data": "huggingface_hub pyarrow sentencepiece tensorflow tensorflow_datasets tokenizers"
  " zstandard",
  "finetune": "sklearn scipy seqeval",
  "report": "bokeh jinja2 markupsafe",
}
CONFIG_HELP = (
  "configuration file, e.g. {}, or FILE:ARG; --config.FIELD=VALUE sets a field; electra-jax config"
  " FILE lists the fields"
)


class UsageError(Exception):
  """An error in the command line; the message is one line."""


class ArgumentParser(argparse.ArgumentParser):
  """Raises errors as UsageError, without printing the usage; does not accept abbreviations.

  Accepts old spellings of options: --max_words for --max-words, -workdir for --workdir.
  """

  def __init__(self, **settings):
    super().__init__(allow_abbrev=False, formatter_class=_Help, **settings)
    self.switches: list[str] = []
    self.configurations: dict[str, str | None] = {}  # {option: base, or None for any}
    self.takes_rest = False  # whether it accepts arguments after --, as `args.rest`
    self.add_argument(
      "--import",
      action=_Import,
      metavar="MODULE",
      help="module or FILE.py that registers objectives, heads ... (electra_jax.register)",
    )

  def add_config(
    self,
    example: str = "configs/base.py",
    base: str | None = "base.py",
    *,
    name: str = "config",
    text: str = CONFIG_HELP,
  ) -> None:
    """Adds --config=FILE[:ARG] and --config.FIELD=VALUE: `args.config`, `_fields`, `_file`."""
    self.configurations[name] = base
    self.add_argument(f"--{name}", action=Once, metavar="FILE", help=text.format(example))

  def add_switch(self, name: str, text: str) -> None:
    """Adds an option without a value; also accepts --name=true and --noname."""
    self.switches.append(name)
    self.add_argument(f"--{name}", action="store_true", help=text)

  def error(self, message: str) -> NoReturn:
    """Raises the error; `report` prints it and exits with code 2."""
    raise UsageError(message)

  def parse(self, arguments: Iterable[str]) -> argparse.Namespace:
    """Returns the options, with the configuration loaded and its fields set.

    Raises:
      UsageError: the command line is invalid.
      ValueError, OSError: the configuration is invalid or not readable.
    """
    given = [_expand_home(text) for text in arguments]
    words = list(itertools.takewhile(lambda text: text != "--", given))
    rest = given[len(words) + 1 :]
    if rest and not self.takes_rest:
      raise _no_option(rest[0])
    args, others = self.parse_known_args([text for word in words for text in self._spelled(word)])
    args.rest = rest
    for name, base in self.configurations.items():
      if file := getattr(args, name):
        config, fields, others = configured(file, others, base, name)
        vars(args).update({name: config, f"{name}_fields": fields, f"{name}_file": file})
    if others:
      raise self._unknown(others[0])
    return args

  def _spelled(self, word: str) -> list[str]:
    """Returns an argument in the current spelling, [] for a switch that is off."""
    if not (match := re.fullmatch(r"--?([A-Za-z][\w-]+)(=.*)?", word, re.DOTALL)):
      return [word]
    name, value = match[1].replace("_", "-"), match[2] or ""
    for switch in self.switches:
      if name in (switch, f"no{switch}") and value.lower() in ("", "=true", "=false"):
        is_on = (name == switch) != (value.lower() == "=false")
        return [f"--{switch}"] if is_on else []
    return [f"--{name}{value}"]

  def _unknown(self, word: str) -> UsageError:
    if not word.startswith("-"):
      return _no_option(word)
    name = word.partition("=")[0]
    group, dot, _ = name.lstrip("-").removeprefix("no").partition(".")
    if dot and group in self.configurations:
      return UsageError(f"{name} needs --{group}=FILE")
    close = difflib.get_close_matches(name.partition(".")[0], self._option_string_actions, n=1)
    hint = f"did you mean {close[0]}?" if close else "--help lists them"
    return UsageError(f"unknown option {name}; {hint}")


class _Help(argparse.HelpFormatter):
  """Breaks a description into lines of the terminal's width, and keeps its indented entries."""

  def _fill_text(self, text: str, width: int, indent: str) -> str:
    return "\n\n".join(map(functools.partial(_filled, width=width), text.strip().split("\n\n")))


def _filled(block: str, width: int) -> str:
  """Returns a paragraph, or entries whose further lines are indented, in lines of the width.

  >>> print(_filled("  one two\\n    three\\n  four", 12))
    one two
      three
    four
  >>> print(_filled("one two\\nthree", 100))
  one two three
  """
  depths = [len(line) - len(line.lstrip()) for line in block.split("\n")]
  first, further = min(depths), max(depths)
  is_paragraph, entries = not further, []
  for depth, line in zip(depths, block.split("\n"), strict=True):
    if entries and (is_paragraph or depth > first):
      entries[-1] += f" {line.strip()}"
    else:
      entries.append(line)
  indent = further if further > first else first + 4 * (first > 0)
  return "\n".join(terminal.fill(entry, width, indent) for entry in entries)


class _Import(argparse.Action):
  """Imports the module given by the option."""

  def __call__(self, parser, namespace, values, option_string=None) -> None:
    registry.import_module(values)


class Once(argparse.Action):
  """Stores a value that may only be given once."""

  def __call__(self, parser, namespace, values, option_string=None) -> None:
    before, default = getattr(namespace, self.dest), parser.get_default(self.dest)
    if before not in ("", default) and values:
      raise UsageError(f"--{self.dest} is given twice: {before} and {values}")
    setattr(namespace, self.dest, values or before)


def _no_option(word: str) -> UsageError:
  return UsageError(f"{word!r} is not an option; options look like --config=configs/base.py")


def _or_none(parser: type[flags.ArgumentParser]) -> flags.ArgumentParser:
  """Returns a parser that also accepts None, if `check_set` allows it for the field."""

  class Parser(parser):
    def parse(self, argument):
      return None if argument == "None" else super().parse(argument)

  return Parser()


def configured(
  name: str, words: list[str], base: str | None = "base.py", option: str = "config"
) -> tuple[ConfigDict, list[str], list[str]]:
  """Returns the configuration FILE[:ARG], the fields that `words` set, and the other words."""
  config = load_named(name)
  if base:
    check_base(config, name, base)
  for word in words:
    if override := re.match(rf"--?(?:no)?{option}\.([^=]*)", word):
      check_field(config, override[1])
  for kind, parser in (
    (float, flags.FloatParser),
    (int, flags.IntegerParser),
    (str, flags.ArgumentParser),
    (bool, flags.BooleanParser),
  ):
    config_flags.register_flag_parser_for_type(kind, _or_none(parser))
  values = flags.FlagValues()
  values.set_gnu_getopt()
  config_flags.DEFINE_config_dict(option, config, flag_values=values, sys_argv=["", *words])
  try:
    others = values(["", *words], known_only=True)[1:]
    fields = list(config_flags.get_override_values(values[option]))
    check_set(config, fields)
  except (flags.Error, ValueError) as error:
    text = one_line(error)
    raise UsageError(text if text.startswith("flag ") else f"flag --{text}") from None
  return config, fields, others


def positive(text: str) -> int:
  """Parses a number above 0 that fits in 32 bits."""
  try:
    number = int(text)
  except ValueError:
    number = 0
  if not 0 < number < 2**31:
    raise argparse.ArgumentTypeError(f"must be a number above 0 and below 2**31, got {text!r}")
  return number


def program_name(arguments: Sequence[str]) -> str:
  """Returns this program's name: `electra-jax train` or `python -m electra_jax.train`."""
  words = terminal.typed()
  if arguments and words[-len(arguments) :] == list(arguments):
    words = words[: -len(arguments)]
  return " ".join([Path(words[0]).name, *words[1:]])


def parser(name: str, arguments: Sequence[str] = ()) -> ArgumentParser:
  """Returns a command's parser; its help is the docstring of the module."""
  command = importlib.import_module(f"electra_jax.commands.{name}")
  made = ArgumentParser(prog=program_name(arguments), description=command.__doc__)
  command.add_options(made)
  return made


def start(name: str, arguments: Sequence[str] | None = None) -> None:
  """Runs a command and exits the process with the result of its `main`, None for 0.

  A user error prints one line on stderr and exits with code 2 (command line) or 1 (other). A bug,
  or any error if the environment variable ELECTRA_JAX_DEBUG is set, prints its traceback.

  Args:
    arguments: of the command; None: of the process.
  """
  arguments = sys.argv[1:] if arguments is None else arguments
  report(lambda: _leave(call(name, arguments) or 0))


def call(name: str, arguments: Sequence[str]) -> int | None:
  """Runs a command in this process and returns its result; raises what `start` would print."""
  args = parser(name, arguments).parse(arguments)
  return importlib.import_module(f"electra_jax.commands.{name}").main(args)


def _expand_home(text: str) -> str:
  """Expands ~ after = or a colon; shells expand it only at the start of a word."""
  return re.sub(r"(?<=[=:])~(?=/|$)", lambda _: os.path.expanduser("~"), text)


def _drop_event_loop_errors(error) -> None:
  """Calls Python's hook, except for tensorstore's many messages after a failed write."""
  if str(error.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(error)


def _leave(code: int) -> None:
  """Runs the exit handlers, then exits without freeing memory or joining threads.

  After training, freeing the millions of small objects of compiled programs takes half a minute.
  After an error, threads of libraries may block forever.
  """
  atexit._run_exitfuncs()  # including the shut-down of jax.distributed
  try:
    sys.stdout.flush()
  except OSError:
    if not (code or terminal.StampedLines.failed):  # stdout is the program's result
      raise
  with contextlib.suppress(OSError):
    sys.stderr.flush()
  os._exit(code)


def _end_at_signals() -> None:
  """Lets SIGTERM and SIGUSR1 end the first process of a container, like any other process.

  The kernel drops signals for which process 1 has no handler. `train` replaces these handlers.
  """
  if os.getpid() == 1:
    for number in (signal.SIGTERM, signal.SIGUSR1):
      signal.signal(number, lambda number, _frame: os._exit(128 + number))


def _open_closed_streams() -> None:
  """Opens the null device for closed standard streams, which Python sets to None."""
  for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, mode))


class _Output(io.FileIO):
  """A stream that drops what is written after its reader has gone, as in `| head -1`."""

  def write(self, data) -> int:
    try:
      return super().write(data)
    except BrokenPipeError:
      return len(data)


def _outlive_readers() -> None:
  """Lets a program finish its work without a reader, and print what the locale cannot encode."""
  if sys.stdout and (old := sys.stdout) is sys.__stdout__:
    raw, how = _Output(old.fileno(), "wb", closefd=False), {"write_through": old.write_through}
    how |= {"encoding": old.encoding, "line_buffering": old.line_buffering}
    buffered = raw if old.write_through else io.BufferedWriter(raw)
    sys.stdout = io.TextIOWrapper(buffered, errors="backslashreplace", **how)


def report(program: Callable[[], None]) -> None:
  """Runs a program and prints its errors as `start` does."""
  _end_at_signals()
  signals.end_after_signals()
  _outlive_readers()
  _open_closed_streams()
  warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
  sys.unraisablehook = _drop_event_loop_errors
  # Libraries (mainly orbax) log for their developers, and raise errors as exceptions.
  logging.set_verbosity(logging.FATAL)
  try:
    program()
  except UsageError as error:
    _fail(error, one_line(error), 2)
  except Exception as error:
    _fail(error, explain(error), 1)
  except signals.Terminated as error:
    _fail(error, str(error), signals.STOPPED)
  except KeyboardInterrupt as error:
    _fail(error, str(error) or "interrupted", 130)


def _print_error(line: str) -> None:
  if sys.stderr.isatty():
    line = terminal.fill(line, shutil.get_terminal_size().columns)
  print(line, file=sys.stderr, flush=True)


def _show_warning(show: Callable, message, category, filename: str, *others) -> None:
  """Prints this package's warnings in one line, and others with `show`."""
  if Path(filename).is_relative_to(PACKAGE):
    with contextlib.suppress(OSError):
      _print_error(f"warning: {message}")
  else:
    show(message, category, filename, *others)


def explain(error: BaseException) -> str | None:
  """Returns an error message of one line, or None if the error needs a traceback.

  A ValueError or ArithmeticError raised by this package is meant for the user; one raised inside a
  library is a bug in this package.
  """
  if isinstance(error, FileNotFoundError) and error.errno and not error.filename:
    return "the current folder has been deleted: change to another"
  if isinstance(error, OSError):
    return one_line(error)
  for extra, packages in EXTRAS.items():
    if isinstance(error, ModuleNotFoundError) and error.name in packages.split():
      return f"{error.name} is not installed: pip install 'electra_jax[{extra}]'"
  if "RESOURCE_EXHAUSTED" in str(error) and type(error).__module__.startswith("jax"):
    return (
      "the device is out of memory: use a smaller batch; for training, raise train.accumulation or"
      f" set model.remat ({error!s:.200})"
    )
  frames = traceback.extract_tb(error.__traceback__)
  if not frames:
    return None
  raised_in = Path(frames[-1].filename).resolve()
  if raised_in.name == "xla_bridge.py" and (asked := os.environ.get("JAX_PLATFORMS")):
    return (
      f"JAX finds no device for JAX_PLATFORMS={asked}: unset it, or install JAX for the device:"
      " pip install 'electra_jax[gpu]' or 'electra_jax[tpu]'"
    )
  if not isinstance(error, ValueError | ArithmeticError):
    return None
  ours = any(raised_in.is_relative_to(folder) for folder in (PACKAGE, *FOLDERS))
  return one_line(error) if ours or raised_in.match("jax/_src/config.py") else None  # a flag


def _fail(error: BaseException, line: str | None, code: int) -> None:
  """Prints the line, or the traceback if it is None, and exits."""
  with contextlib.suppress(OSError):
    if line is None or os.environ.get(DEBUG_VARIABLE):
      traceback.print_exception(error)
    else:
      _print_error(f"error: {line}")
  # The exit handlers wait for all processes of a run, which may still be running.
  timer = threading.Timer(signals.GOODBYE_SECS, os._exit, [code])
  timer.daemon = True
  timer.start()
  _leave(code)
