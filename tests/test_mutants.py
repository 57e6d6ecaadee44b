"""The table of one-line faults still fits the code."""

import collections
from pathlib import Path

import mutants

PACKAGE = mutants.ROOT / "electra_jax"


def test_each_fault_changes_one_place_of_its_file_into_valid_python():
  table = mutants.read()
  assert len({mutant[:3] for mutant in table}) == len(table) >= 120
  for file, old, new, _ in table:
    source = (PACKAGE / file).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{file} has {source.count(old)} times: {old}"
    assert old != new
    compile(source.replace(old, new), file, "exec")


def test_the_faults_are_in_every_package_and_their_tests_exist():
  table = mutants.read()
  count = collections.Counter(Path(mutant.file).parts[0] for mutant in table)
  packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"build"}
  assert min(count[package] for package in packages) >= 5, count
  for test in {test for mutant in table for test in mutant.tests}:
    path, _, name = test.partition("::")
    assert f"def {name}" in (mutants.ROOT / path).read_text(encoding="utf-8"), test
