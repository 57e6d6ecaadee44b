"""Speed of reading batches from shards, compared with the disk's limit.

  python benchmarks/input_pipeline.py [--json benchmarks/results/input_pipeline.json]

Both read the same random examples and take turns for several rounds:
  electra_jax   batches of a global shuffle, as in the training loop
  limit         NumPy copying the same records from memory-mapped files
"""

import itertools
import statistics
import tempfile
import time
from pathlib import Path

import machine
import numpy as np
import peers

from electra_jax.data import examples, pretrain_batches, shards, tokenizer

FLOOR = 40_000  # sequences of 128 per second on two cores; an H200 takes about 15,000


def make_shards(folder: Path, count: int, length: int, vocab_size: int) -> pretrain_batches.Shards:
  """Writes `count` random examples in the project's format and opens them."""
  rng = np.random.default_rng(0)
  dtype = examples.record_dtype(length, vocab_size)
  writer = shards.ShardWriter(folder, "train", dtype, max(1, count // 8), vocab_size)
  for start in range(0, count, 10_000):
    records = np.zeros(min(10_000, count - start), dtype)
    records["ids"] = rng.integers(5, vocab_size, records["ids"].shape)
    records["length"], records["first"] = length, length // 2
    writer.append(records)
  pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
  pieces += [f"w{i}" for i in range(vocab_size - 5)]
  (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", "utf-8")
  vocab = tokenizer.load(folder / "vocab.txt").vocab
  split = {"examples": count, "shards": writer.finish(), "frequencies": []}
  for i, shard in enumerate(split["shards"]):
    name = f"train-{i:05d}-of-{len(split['shards']):05d}.bin"
    shard["file"] = (folder / shard["file"]).rename(folder / name).name
  manifest = {
    "format": shards.FORMAT,
    "version": shards.FORMAT_VERSION,
    "vocab": vocab.__dict__ | {"special_ids": list(vocab.special_ids)},
    "seq_length": length,
    "splits": {"train": split, "heldout": {"examples": 0, "shards": [], "frequencies": []}},
    "sources": [],
    "build": {"vocab": "made up", "sources": "made up"},
  }
  (folder / shards.MANIFEST).write_text(shards.dump(manifest), "utf-8")
  return pretrain_batches.Shards.open(folder)


def limit_batches(data: pretrain_batches.Shards, batch_size: int):
  """Yields raw records of random positions within one shard at a time."""
  rng = np.random.default_rng(0)
  _, maps = data._maps
  for records in itertools.cycle(maps):
    yield records[rng.integers(0, len(records), batch_size)]


def sequences_per_sec(batches, batch_size: int, secs: float) -> float:
  """Takes batches for about `secs` seconds."""
  for _ in range(8):  # skips the prefetched batches
    next(batches)
  count, start = 0, time.perf_counter()
  while time.perf_counter() - start < secs:
    next(batches)
    count += batch_size
  return count / (time.perf_counter() - start)


def seek_secs(data: pretrain_batches.Shards, batch_size: int, step: int) -> float:
  """Returns the seconds from the start to the batch of a step."""
  options = {"seed": 0, "batch_size": batch_size, "start_step": step}
  return peers.secs(lambda: next(pretrain_batches.train_batches(data, **options)))


def main(
  batch_size: int = 128,
  seq_length: int = 128,
  examples: int = 200_000,
  rounds: int = 5,
  secs: float = 2.0,
) -> dict:
  """
  --secs  seconds per measurement
  """
  with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    data = make_shards(folder, examples, seq_length, 30_522)
    train = pretrain_batches.train_batches(data, seed=0, batch_size=batch_size)
    sources = {"electra_jax": train, "limit": limit_batches(data, batch_size)}
    found: dict[str, list[float]] = {name: [] for name in sources}
    for _ in range(rounds):
      for name, batches in sources.items():
        found[name].append(sequences_per_sec(batches, batch_size, secs))
    seeks = {
      str(step): [seek_secs(data, batch_size, step) for _ in range(rounds)]
      for step in (10, 1_000_000)
    }
  return {
    "batch_size": batch_size,
    "seq_length": seq_length,
    "floor_sequences_per_sec": FLOOR,
    "sequences_per_sec": {name: round(statistics.median(x)) for name, x in found.items()},
    "rounds": {name: list(map(round, values)) for name, values in found.items()},
    "seek_secs": {step: round(statistics.median(x), 4) for step, x in seeks.items()},
  }


if __name__ == "__main__":
  machine.start(main)
