"""The pages keep their length, and their commands and measured numbers are true."""

import functools
import json
import re
import shlex
import statistics
from pathlib import Path

import pytest
from test_links import anchors

from electra_jax.commands import cli

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
COMMAND = re.compile(r"^(?:electra-jax |python -m electra_jax\.(?:data\.)?)([a-z]+)")
LAUNCHER = re.compile(r"^.*launch/(gpu\.sh|slurm\.sbatch|tpu_pod\.sh) (--dry-run )?")
RESULTS = re.compile(r"\]\([./]*(benchmarks/results/[\w.-]+\.jsonl?)\)")
# Two digits or more, with a decimal point: 12.0, 0.853, 70.4.
NUMBER = re.compile(r"(?<![\w.-])(?:\d+\.\d+)(?![\w.])")


def words(text: str) -> int:
  """Returns the number of words, those of tables and code included."""
  return sum(1 for word in text.split() if re.search(r"\w", word))


def test_the_readme_has_at_most_450_words():
  assert words((ROOT / "README.md").read_text()) <= 450


def test_guides_and_reference_have_at_most_12000_words():
  assert {page.name for page in DOCS} >= {"pretrain.md", "status.md", "weights.md"}
  assert sum(words(page.read_text()) for page in DOCS) <= 12_000


def commands(text: str) -> list[list[str]]:
  """Returns the words of each command of the project in a page's blocks of code."""
  variables, found = {}, []
  for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S):
    variables |= re.findall(r'^([A-Z]+)="([^"]*)"', block, re.M)
    for line in block.replace("\\\n", " ").splitlines():
      line = re.sub(r"\$([A-Z]+)\b", lambda m: variables.get(m[1], m[0]), line.strip())
      if match := COMMAND.match(line := LAUNCHER.sub("electra-jax train ", line)):
        line = re.split(r"\s(?:[<>|&]|&&)(?:\s|$)", line)[0]
        given = shlex.split(line[match.end() :], comments=True)
        found.append([match[1], *(word for word in given if "..." not in word)])
  return found


def of_the_reader(word: str) -> bool:
  """Whether an option names a module or a configuration that the reader has to write."""
  name = re.sub(r":[^/]*$", "", word.partition("=")[2])
  return word.startswith("--import=") or (name.endswith(".py") and not (ROOT / name).exists())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_are_understood(page, monkeypatch):
  monkeypatch.chdir(ROOT)
  for name, *given in commands(page.read_text()):
    if not any(map(of_the_reader, given)):
      cli.parser(name).parse(given)


def numbers(value) -> list[float]:
  """Returns all numbers in what a JSON file holds, and the mean and median of each list of them."""
  if isinstance(value, dict | list):
    inner = list(value.values() if isinstance(value, dict) else value)
    plain = [x for x in inner if isinstance(x, int | float)]
    summary = [statistics.mean(plain), statistics.median(plain)] if plain else []
    return summary + [number for item in inner for number in numbers(item)]
  if isinstance(value, str):
    return [float(number) for number in re.findall(r"\d+\.?\d*", value)]
  return [] if value is None else [float(value)]


@functools.cache
def results(name: str) -> list[float]:
  """Returns the numbers of a file of results."""
  lines = (ROOT / name).read_text()
  return numbers(
    [json.loads(part) for part in ([lines] if name.endswith("json") else lines.splitlines())]
  )


# As they stand, in percent, ms, minutes, GiB.
UNITS = (1, 100, 1e3, 1e-3, 1 / 60, 2**-30)
# Numbers that are computed from several of a file.
DERIVED = {}


def wrong_numbers(text: str) -> list[str]:
  """Returns the decimal numbers beside a link to results that the results do not hold."""
  wrong = []
  for unit in re.split(r"\n(?=[|-]|\n)", text):
    if files := RESULTS.findall(unit):
      held = [value * factor for name in files for value in results(name) for factor in UNITS]
      for number in NUMBER.findall(RESULTS.sub("", unit)):
        close = 0.5 * 10.0 ** -len(number.partition(".")[2])
        derived = any((name, number) in DERIVED for name in files)
        if not derived and not any(abs(value - float(number)) <= close * 1.01 for value in held):
          wrong.append(number)
  return wrong
