"""A few steps of tagging and of question answering: the loss falls, scores are counted by hand."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from test_finetune import make_config, source, squad_file, write_conll  # noqa: F401 (a fixture)

from electra_jax.finetune import results
from electra_jax.finetune import train as program


def train_little(config, workdir: Path) -> tuple[dict, list[float]]:
  """Returns the one row of results and the losses on the way."""
  config.seeds, config.train.epochs, config.log.every_steps = 1, 3.0, 1
  config.seed = 2**32 - 1  # the highest
  console = Console(record=True, width=200, file=io.StringIO())
  program.fine_tune(config, workdir, console)
  (row,) = results.read_results(workdir)
  return row, [float(x) for x in re.findall(r"\| loss (\S+) \|", console.export_text())]


@pytest.mark.slow
def test_a_few_steps_of_tagging_lower_the_loss_and_its_f1_is_counted_by_hand(
  source,  # noqa: F811
  tmp_path,
):
  for split, n in (("train", 24), ("dev", 6)):
    write_conll(tmp_path / f"{split}.txt", n)
  files = {f"data__{split}": str(tmp_path / f"{split}.txt") for split in ("train", "dev")}
  row, losses = train_little(make_config("tagging", "words", source, **files), tmp_path / "results")
  assert len(losses) == 9 and np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
  written = tmp_path / "results" / "words" / "predictions" / "dev.txt"
  right = found = there = 0
  for line in filter(None, written.read_text().splitlines()):
    *_, gold, predicted = line.split()
    assert predicted in ("B-A", "O")  # so that every entity is one word
    right += gold == predicted == "B-A"
    found += predicted == "B-A"
    there += gold == "B-A"
  assert row["metrics"]["f1"] == pytest.approx(100 * 2 * right / (found + there))


@pytest.mark.slow
def test_a_few_steps_of_answering_lower_the_loss_and_exact_match_is_counted_by_hand(
  source,  # noqa: F811
  tmp_path,
):
  for split, n in (("train", 24), ("dev", 6)):
    squad_file(tmp_path / f"{split}.json", n)
  files = {f"data__{split}": str(tmp_path / f"{split}.json") for split in ("train", "dev")}
  small = {"qa__beam_size": 2, "qa__hidden": 8, "qa__max_query": 8}
  row, losses = train_little(
    make_config("squad", None, source, **small, **files), tmp_path / "results"
  )
  assert len(losses) == 9 and np.mean(losses[-3:]) < 0.95 * np.mean(losses[:3])
  written = tmp_path / "results" / "squad" / "predictions" / "dev" / "predictions.json"
  paragraphs = json.loads((tmp_path / "dev.json").read_text())["data"][0]["paragraphs"]
  predictions = list(json.loads(written.read_text()).values())
  assert all(text in p["context"] for text, p in zip(predictions, paragraphs, strict=True))
  golds = [p["qas"][0]["answers"][0]["text"] for p in paragraphs]
  right = np.mean([text == gold for text, gold in zip(predictions, golds, strict=True)])
  assert row["metrics"]["exact_match"] == pytest.approx(100 * right)
