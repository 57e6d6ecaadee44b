"""The command line: what it lists, helps with and prints, at once and without what is slow."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, python

from electra_jax import __version__
from electra_jax.commands import COMMANDS, cli
from electra_jax.config import compare, fields, files, schema
from electra_jax.runtime import terminal

SLOW = {"jax", "flax", "optax", "orbax", "tensorflow", "tokenizers", "matplotlib", "pyarrow"}


def call(*args: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
  """Runs the command in a folder; its errors are followed by the modules that it imports."""
  env = {"PYTHONPATH": str(ROOT)}  # with TensorFlow, whose import would be seen
  return python("-X", "importtime", "-m", "electra_jax", *args, cwd=folder, env=env)


def slow_imports(done: subprocess.CompletedProcess) -> set[str]:
  """Returns the slow packages that a command has imported."""
  return {name.strip() for name in re.findall(r"\| +(\w+)$", done.stderr, re.M)} & SLOW


def errors(done: subprocess.CompletedProcess) -> list[str]:
  """Returns what a command says on stderr."""
  return [line for line in done.stderr.splitlines() if not line.startswith("import time:")]


@pytest.mark.parametrize("args", [[], ["--help"], ["help"]])
def test_without_a_program_the_programs_are_listed(args, tmp_path):
  done = call(*args, folder=tmp_path)
  assert done.returncode == 0 and not errors(done)
  listed = re.findall(r"^  ([a-z]+)  +\w", done.stdout, re.M)
  assert listed == list(COMMANDS)


def test_version_prints_the_versions():
  done = call("--version")
  assert re.match(rf"electra_jax {__version__}( \(.*\))?, jax \d+\.\d+.*, Python 3\.", done.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_options_at_once(name, tmp_path):
  done = call(name, "--help", folder=tmp_path)
  assert (done.returncode, errors(done)) == (0, [])
  assert f"electra-jax {name}" in done.stdout
  _, described = done.stdout.split("\n\n", 1)  # usage: is argparse's own
  assert max(map(len, described.splitlines())) <= 80
  options = dict(evaluate="pairs", experiment="--arms", report="--make-band", score="--model")
  options |= dict(export="--to", config="--grep", show="--model")
  assert options.get(name, "--config FILE") in done.stdout
  assert not slow_imports(done)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_works_with_streams_closed(closed):
  command = shlex.join([sys.executable, "-m", "electra_jax", "config", "configs/small.py"])
  done = subprocess.run(
    ["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, cwd=ROOT, timeout=300
  )
  assert (done.returncode, done.stderr) == (0, "")
  assert ("optimizer.warmup_steps" in done.stdout) == (">&-" not in closed.split())


@pytest.mark.parametrize(
  ("args", "code", "message"),
  [
    (["trian"], 2, "unknown command 'trian'; did you mean train?"),
    (["train"], 2, "--config=FILE and --workdir=DIR are needed"),
    (["build", "--runner=beam", "--", "--help"], 2, "--config=FILE is needed, e.g. --config="),
    (["train", "--workdirr=x"], 2, "unknown option --workdirr; did you mean --workdir?"),
    (["train", "--config=configs/bas.py"], 1, "did you mean configs/base.py?): configs/bas.py"),
    (["config", "configs/smal.py"], 1, "did you mean configs/small.py?): configs/smal.py"),
    (["config", "configs/small.py", "--grep=xyz"], 1, "--grep=xyz matches none of "),
    (["config", "configs/small.py", "--grep=["], 1, "--grep=[: unterminated character set"),
    (["config", "--grep=warmup"], 2, "--grep needs FILE, e.g. configs/small.py"),
    (["config", "configs/small.py", "--config.train.step=1"], 1, "did you mean config.train.steps"),
    (["export", "run", "out"], 2, "the following arguments are required: --to"),
  ],
)
def test_what_is_typed_wrong_is_one_line_at_once(args, code, message, tmp_path):
  done = call(*args, folder=tmp_path)
  assert (done.returncode, done.stdout) == (code, "")
  (line,) = errors(done)
  assert line.startswith("error: ") and message in line
  assert not slow_imports(done)


def test_the_fields_of_a_configuration_are_printed_with_their_meaning_and_changes(tmp_path):
  done = call("config", "configs/small.py", "--config.train.steps=5", folder=tmp_path)
  assert (done.returncode, errors(done), slow_imports(done)) == (0, [], set())
  *lines, last = done.stdout.splitlines()
  known = compare.flatten(files.load("base.py"))
  assert sorted(re.match(r"[* ] ([\w.]+) = ", line)[1] for line in lines) == sorted(known)
  for line in (
    "* train.steps = 5 (default 766000)  # optimizer steps; the schedule ends here (Table",
    "\n  train.accumulation = 1  # Microbatches of a device: the same update with",
  ):
    assert line in done.stdout
  changed = compare.changed_from_base(files.load("small.py"))
  starred = {line.split()[1] for line in lines if line.startswith("*")}
  assert starred == set(changed) and "train.steps" in changed
  assert last == f"{len(changed)} of {len(known)} fields differ from configs/base.py (*)"


def test_a_field_that_may_have_no_value_is_unset_by_none():
  names = "data.strip_accents", "init_from", "init_step", "optimizer.generator_learning_rate"
  given, unset = ([f"--config.{name}={value}" for name in names] for value in (1, None))
  args = "config", "configs/base.py", f"--grep=^({'|'.join(names)}) "
  fields = re.findall(r"^. (\S+) = (\S+)", call(*args, *given).stdout, re.M)
  assert dict(fields) == dict(zip(names, ("True", "'1'", "1", "1.0"), strict=True))
  fields = re.findall(r"^. (\S+) = (\S+)", call(*args, *given, *unset).stdout, re.M)
  assert dict(fields) == dict.fromkeys(names, "None")


def test_fields_are_found_by_name_and_meaning():
  done = call("config", "configs/finetune/glue.py:mrpc", "--grep", "WARM|networks to keep")
  found = re.findall("^  ([a-z._]+) = ", done.stdout, re.M)
  assert found == ["keep", "optimizer.schedule", "optimizer.warmup_frac"]
  assert "keep = 'best'  # networks to keep: best (on the first" in done.stdout
  assert "[one of best, all, none]\n" in done.stdout
  count = len(schema.FINE_TUNING)
  assert done.stdout.endswith(f"\n1 of {count} fields differ from configs/finetune/base.py (*)\n")
  pattern = "^generator.width|^eval.batch|^model.dropout|^obj.*contrast_weight"
  done = call("config", "configs/bert.py", "--grep", pattern, "--effects")
  facts = re.findall(r"^. ([a-z._]+) = .*\[([^]]*)\]$", done.stdout, re.M)
  assert facts == [
    ("model.dropout", "at least 0 and below 1; defines the run"),
    ("generator.width_multiplier", "above 0; defines the run; no effect here"),
    ("objective.contrast_weight", "defines the run; no effect here"),
    ("eval.batch_size", "above 0"),
  ]


def test_without_a_file_the_configurations_are_listed(tmp_path):
  listed = call("config", folder=tmp_path).stdout
  assert re.findall(r"^configs/(\S+) +\w", listed, re.M) == files.known()


@pytest.mark.parametrize("base", fields.BASES)
def test_every_field_of_a_base_configuration_is_found_in_its_file(base):
  found = fields.comments_in(files.resolve(base))
  assert sorted(found) == sorted(compare.flatten(files.load(base)))
  assert sum(map(bool, found.values())) > 0.9 * len(found)


def test_comments_stand_above_a_field_or_behind_it(tmp_path):
  path = tmp_path / "base.py"
  path.write_text(
    "def get_config():\n"
    "  c = ConfigDict()\n"
    "  # About one,\n"
    "  # in two lines\n"
    "  c.one = 1  # unit\n"
    "  c.group = g = ConfigDict()  # of the group\n"
    "  g.two = (\n"
    "    2  # in brackets\n"
    "  )\n"
    "  g.text = '# no comment'\n"
    "  c.other = ConfigDict()\n"
    "  c.other.three = 3  # three\n"
    "  return c\n"
  )
  assert fields.comments_in(path) == {
    "one": "About one, in two lines; unit",
    "group.two": "in brackets",
    "group.text": "",
    "other.three": "three",
  }


@pytest.mark.parametrize(
  ("typed", "name", "command"),
  [
    ("python -m electra_jax.train", "python -m electra_jax.train", "python -m electra_jax.train"),
    (
      "/e/python -m electra_jax train",
      "python -m electra_jax train",
      "/e/python -m electra_jax train",
    ),
    ("/e/python /e/electra-jax train", "electra-jax train", "/e/electra-jax train"),
    ("/e/python {PATH}/electra-jax train", "electra-jax train", "electra-jax train"),
  ],
)
def test_a_program_knows_how_it_was_called(typed, name, command, monkeypatch, tmp_path):
  arguments = ["--workdir=a b"]
  (tmp_path / "electra-jax").touch(mode=0o755)
  monkeypatch.setenv("PATH", str(tmp_path))
  typed = typed.format(PATH=tmp_path)
  monkeypatch.setattr(sys, "orig_argv", [*typed.split(), *arguments])
  assert cli.program_name(arguments) == name
  assert terminal.command_line().startswith(command)
  assert terminal.command_line().endswith(" '--workdir=a b'")
  assert command.replace(".train", " train").startswith(f"{terminal.program()} ")


def test_a_tilde_within_an_argument_is_the_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  fields = "--config.data.dir=~/out", "--config.data.sources=text:~/*"
  done = call("build", "--config=configs/small.py", *fields, folder=tmp_path)
  assert f"source 'text:{tmp_path}/home/*' matches no file" in errors(done)[-1]
  done = call("export", "run", "--to=~/x", folder=tmp_path)
  assert f"invalid choice: '{tmp_path}/home/x'" in errors(done)[-1]


@pytest.mark.parametrize(
  "args", [["config", "small"], ["--version"], [], ["config", "--help"]], ids=" ".join
)
def test_a_reader_that_has_gone_is_no_error(args):
  reader, writer = os.pipe()
  os.close(reader)
  command = [sys.executable, "-m", "electra_jax", *args]
  streams = {"stdout": writer, "stderr": subprocess.PIPE}
  done = subprocess.run(command, cwd=ROOT, timeout=300, **streams)
  os.close(writer)
  assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
  ("code", "env", "told"),
  [
    ("import jax", {"JAX_ENABLE_X64": "maybe"}, "invalid truth value 'maybe' for environment"),
    ("os.getcwd()", {}, "the current folder has been deleted: change to another"),
  ],
)
def test_an_environment_in_which_nothing_runs_is_one_line(tmp_path, code, env, told):
  program = (
    f"import os; from electra_jax.commands import cli; os.chdir({str(tmp_path)!r});"
    f" os.rmdir({str(tmp_path)!r}); cli.report(lambda: exec({code!r}))"
  )
  done = python("-c", program, env=env)
  assert done.returncode == 1 and done.stderr.startswith(f"error: {told}")
  assert done.stderr.count("\n") == 1


def test_what_a_locale_cannot_show_is_escaped():
  legacy = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
  code = "from electra_jax.commands import cli; cli.report(lambda: print('caf\\xe9 \\u4e2d'))"
  done = python("-c", code, env=legacy)
  assert (done.returncode, done.stdout, done.stderr) == (0, "caf\\xe9 \\u4e2d\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_containers_first_process_whose_default_would_drop_it(number):
  code = (
    "import os, signal; os.getpid = lambda: 1; from electra_jax.commands import cli;"
    f" cli.report(lambda: signal.raise_signal({int(number)}))"
  )
  done = python("-c", code)
  assert done.returncode == 128 + number  # by a handler: the default's is -number
