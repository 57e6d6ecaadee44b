"""The speedrun in miniature: a tiny network, and tiny tasks in the formats of the real ones."""

import json
import random
from pathlib import Path

from resumable import ROOT

FIELDS = {
  "model.num_layers": 1,
  "model.hidden_size": 32,
  "model.num_heads": 1,
  "model.ffn_size": 32,
  "model.embedding_size": 32,
  "model.max_positions": 128,  # as many as the tasks have tokens
  "generator.depth_multiplier": 1.0,
  "data.seq_length": 32,
  "data.vocab_size": 500,
  "data.holdout_frac": 0.2,
  "optimizer.warmup_steps": 5,
  "train.batch_size": 8,
  "train.minutes": 5.0,
  "train.steps": 60,  # they end it: a machine may be slow
  "eval.batch_size": 8,
  "eval.max_examples": 8,
  "log.every_steps": 20,
}


def write_files(folder: Path) -> dict[str, str]:
  """Writes tiny tasks, in the formats of the real ones: is a line of the guides in its order?"""
  rng, text = random.Random(0), (ROOT / "docs" / "run.md").read_text()
  lines = [words for line in text.splitlines() if 5 < len(words := line.split()) < 40]
  (folder / "glue" / "CoLA").mkdir(parents=True, exist_ok=True)
  (folder / "chunk").mkdir(exist_ok=True)
  for splits, kept in ((("train", "train"), lines[8:]), (("dev", "test"), lines[:8])):
    rows, columns, pairs = [], [], []
    for i, words in enumerate(kept):
      mixed = rng.sample(words, len(words))
      rows.append(f"docs\t{i % 2}\t\t{' '.join(words if i % 2 else mixed)}\n")
      columns.append("".join(f"{word} {'BI'[j > 0]}-NP\n" for j, word in enumerate(words)) + "\n")
      pairs.append({"sentence_good": " ".join(words), "sentence_bad": " ".join(mixed)})
    (folder / "glue" / "CoLA" / f"{splits[0]}.tsv").write_text("".join(rows))
    (folder / "chunk" / f"{splits[1]}.txt").write_text("".join(columns))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in pairs))
  return {name: str(folder / name) for name in ("glue", "chunk")} | {
    "pairs": str(folder / "pairs.jsonl")
  }
