"""The pages keep their length, and their commands and measured numbers are true."""

import functools
import json
import re
import shlex
import statistics
import string
from pathlib import Path

import pytest

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


def test_guides_and_reference_have_at_most_11600_words_and_the_evidence_1200():
  counts = {page.name: words(page.read_text()) for page in DOCS}
  assert counts.keys() >= {"pretrain.md", "status.md", "weights.md"}
  assert counts.pop("evidence.md") <= 1_200
  assert sum(counts.values()) <= 11_600


def commands(text: str) -> list[list[str]]:
  """Returns the words of each command of the project in a page's blocks of code."""
  variables, found = {}, []
  for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S):
    variables |= re.findall(r'^([A-Z]+)="([^"]*)"', block, re.M)
    for line in block.replace("\\\n", " ").splitlines():
      line = string.Template(line.strip()).safe_substitute(variables)
      if match := COMMAND.match(line := LAUNCHER.sub("electra-jax train ", line)):
        line = re.split(r"\s(?:[<>|&]|&&)(?:\s|$)", line)[0]
        given = shlex.split(line[match.end() :], comments=True)
        given = [re.sub(r"=(\$i|N)$", "=1", word) for word in given if "..." not in word]
        found.append([match[1], *given])
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
def results(name: str):
  """Returns what a file of results holds; of JSON lines a list."""
  text = (ROOT / name).read_text()
  return json.loads(text) if name.endswith("json") else list(map(json.loads, text.splitlines()))


def packed_over_segments(length: int):
  return lambda held: (
    held["results"][f"packed {length}"]["real_tokens_per_sec"]
    / held["results"][f"segments {length}"]["real_tokens_per_sec"]
  )


def share_at_the_median(held: dict) -> float:
  ours = held["steps"]["speed small 128"]["result"]["results"]["electra_jax"]
  best, median = ours["secs_per_step"], ours["secs_per_step_median"]
  return 100 * ours["share_of_matmul_peak"] * best / median


# As they stand, in percent, ms, minutes, GiB.
UNITS = (1, 100, 1e3, 1e-3, 1 / 60, 2**-30)
# Numbers that are computed from several of a file.
DERIVED = {
  ("speedrun_rows.jsonl", "70.4"): lambda rows: statistics.mean(
    statistics.mean(rows[0]["tasks"][task]) for task in ("cola", "sst2", "mrpc", "stsb", "rte")
  ),
  ("packing.json", "1.11"): packed_over_segments(128),
  ("packing.json", "1.48"): packed_over_segments(512),
  ("build_ray.json", "5.4"): lambda held: held["rows"][0]["local_mb_per_sec"] / 2,  # per core
  ("gpu.json", "9.7"): share_at_the_median,
}


def wrong_numbers(text: str) -> list[str]:
  """Returns the decimal numbers beside a link to results that the results do not hold."""
  wrong = []
  for unit in re.split(r"\n(?=[|-]|\n)", text):
    files = RESULTS.findall(unit)
    held = [number * unit for file in files for number in numbers(results(file)) for unit in UNITS]
    for number in NUMBER.findall(RESULTS.sub("", unit)) if files else ():
      derived = [
        DERIVED[key](results(f)) for f in files if (key := (Path(f).name, number)) in DERIVED
      ]
      margin = 0.51 * 10.0 ** -len(number.partition(".")[2])  # rounded half up or to even
      if not any(abs(value - float(number)) <= margin for value in derived or held):
        wrong.append(number)
  return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_measured_numbers_of_a_page_are_those_of_its_json(page):
  assert wrong_numbers(page.read_text()) == []


def test_a_wrong_option_and_a_wrong_number_are_found():
  line = "12.0 ms ([JSON](benchmarks/results/gpu.json)), 70.4 ([rows](benchmarks/results/{}))"
  line = line.format("speedrun_rows.jsonl")
  assert wrong_numbers(line) == []
  assert wrong_numbers(line.replace("12.0", "12.7").replace("70.4", "70.5")) == ["12.7", "70.5"]
  ((name, *given),) = commands(
    "```\nelectra-jax train --confg=configs/small.py \\\n  --workdir=x\n```"
  )
  with pytest.raises(cli.UsageError, match="did you mean --config"):
    cli.parser(name).parse(given)
