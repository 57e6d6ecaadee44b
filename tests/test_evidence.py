"""The comparison of objectives in miniature: each of its steps, and what is not run again."""

import importlib
import os
import random
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from electra_jax.config import compare, files, validate

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "benchmarks" / "evidence_config.py"
LETTERS, RNG = "abcdefghijklmnop", random.Random(0)
WORDS = ["".join(RNG.choices(LETTERS, k=RNG.randint(2, 7))) for _ in range(400)]


@pytest.mark.parametrize("arm", runpy.run_path(str(CONFIG))["ARMS"])
def test_contestants_differ_in_objective_and_generator_alone(arm):
  config, reference = files.load(CONFIG, arm), files.load(CONFIG, "bert")
  validate.check(config)
  mine, theirs = compare.flatten(config), compare.flatten(reference)
  changed = {name for name in mine if mine[name] != theirs[name]}
  own = {"optimizer.separate_optimizers", "optimizer.generator_learning_rate"}
  assert all(name.startswith(("objective.", "generator.")) for name in changed - own)


def test_the_best_arms_are_chosen_beside_rows_of_controls(monkeypatch):
  monkeypatch.syspath_prepend(CONFIG.parent)
  evidence = importlib.import_module("evidence")
  first = evidence.Budget(1.0, None, 1)
  rows = [
    {"arm": arm, "flops": 1.0, "rate": rate, "seed": 0, "pairs_mlm_choices": 50, "chunk_choices": f}
    for arm, rate, f in [
      ("bert", 0.1, 80), ("bert", 0.2, 85), ("electra", 0.1, 90), ("metro", 0.1, 70)
    ]
  ]  # fmt: skip
  controls = [
    {"arm": evidence.FRESH, "flops": 0.0, "seed": 0, "chunk": 75},
    {"arm": evidence.FRESH},
  ]
  best = evidence.at_best([*controls, *rows])
  assert [(row["arm"], row["rate"]) for row in best] == [
    ("bert", 0.2), ("electra", 0.1), ("metro", 0.1)
  ]  # fmt: skip
  second = evidence.Budget(2.0, 1, 1)
  arms = ["metro", "bert", "electra"]
  assert evidence.next_arms(best, first, second, arms) == ["bert", "electra"]


def sentence(n: int) -> str:
  return " ".join(RNG.choices(WORDS, range(len(WORDS), 0, -1), k=n))


def write_inputs(folder: Path) -> dict[str, str]:
  """Writes text, minimal pairs, tagged sentences and a task of GLUE; returns arguments."""
  for name in ("chunk", "glue/RTE"):
    (folder / name).mkdir(parents=True)
  lines = [sentence(RNG.randint(5, 40)) for _ in range(4000)]
  (folder / "text.txt").write_text("\n\n".join(lines) + "\n")
  pairs = (
    f'{{"sentence_good": "{sentence(6)}", "sentence_bad": "{sentence(6)}", "UID": "p{i % 7}"}}'
    for i in range(210)
  )
  (folder / "pairs.jsonl").write_text("\n".join(pairs) + "\n")
  for split, n in (("train", 60), ("test", 20)):
    tagged = ("\n".join(f"{w} X B-{w[0]}" for w in sentence(8).split()) for _ in range(n))
    (folder / "chunk" / f"{split}.txt").write_text("\n\n".join(tagged) + "\n")
  for split in ("train", "dev"):
    labels = ("entailment", "not_entailment")
    rows = (f"{i}\t{sentence(5)}\t{sentence(4)}\t{labels[i % 2]}" for i in range(32))
    table = "\n".join(["index\tsentence1\tsentence2\tlabel", *rows])
    (folder / "glue" / "RTE" / f"{split}.tsv").write_text(table + "\n")
  paths = {"chunk": folder / "chunk", "pairs": folder / "pairs.jsonl", "glue": folder / "glue"}
  return {"text": f"text:{folder / 'text.txt'}"} | {name: str(path) for name, path in paths.items()}


def run(out: Path, *arguments: str) -> str:
  command = [sys.executable, "benchmarks/evidence.py", f"--out={out}", *arguments]
  # Each of its two dozen programs starts three seconds sooner.
  environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "without_tensorflow")}
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  return done.stdout


@pytest.mark.long
def test_objectives_are_compared_and_only_what_lacks_a_row_is_run_again(tmp_path):
  given = [f"--{name}={value}" for name, value in write_inputs(tmp_path / "in").items()]
  rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
  printed = run(out, *given, f"--rows={rows}", "--smoke")
  report = (out / "evidence.md").read_text()
  assert printed.endswith(report + "\n")
  for flops in ("2e+07", "8e+07"):
    table = report.partition(f"## {flops} FLOPs")[2].partition("##")[0]
    assert [line.split("|")[1].strip() for line in table.splitlines() if "0.0016" in line] == [
      "bert",
      "electra_mlm-from-bert",
    ]
  assert "Fresh weights: chunking F1 " in report and "| bert | 8e+07 |" in report
  assert (out / "evidence.png").stat().st_size > 10_000
  # Another machine, which lacks the control.
  lines = rows.read_text().splitlines()
  assert len(lines) == 6
  rows.write_text("\n".join(line for line in lines if '"fresh weights"' not in line) + "\n")
  shutil.rmtree(out)
  again = run(out, *given, f"--rows={rows}", "--smoke")
  trained = [line for line in again.splitlines() if line.startswith("train/") and "python" in line]
  assert len(trained) == 1 and "train/bert" in trained[0]  # the control has its shape
  assert "finetune/fresh" in again and "pairs/" not in again
