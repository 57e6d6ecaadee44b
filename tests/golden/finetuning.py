"""Two epochs of fine-tuning on five tasks, made small: what must never change.

  python tests/golden/finetuning.py [TASK...]  # compares with finetuning.json, prints what differs
  python tests/golden/finetuning.py --write TASK...  # only when a number is meant to change

From configurations and files, so that fields, features, rates and seeds are those of a user: two
seeds, layer decay, warm-up, an epoch that ends with four rows of eight, a last line of one step.
"""

import functools
import json
import os
import random
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from electra_jax.config import files  # noqa: E402
from electra_jax.core import task_network  # noqa: E402
from electra_jax.core.transformer_config import TransformerConfig  # noqa: E402
from electra_jax.data import tokenizer  # noqa: E402
from electra_jax.finetune import from_config, loop, prepare  # noqa: E402
from electra_jax.interop import sources  # noqa: E402
from electra_jax.interop.sources import Network, Source  # noqa: E402

HERE = Path(__file__).parent
ROWS, BATCH = 20, 8
WORDS = [f"w{i}" for i in range(30)]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "?", *"wx0123456789"]
CFG = TransformerConfig(len(PIECES), 8, 16, 2, 2, 32, 24, init_stddev=0.2)
FIELDS = {
  "seed": 3, "seeds": 2, "data.max_length": 24, "data.buckets": 0, "optimizer.name": "adamw",
  "optimizer.learning_rate": 1e-2, "optimizer.layer_decay": 0.8, "optimizer.warmup_frac": 0.34,
  "optimizer.weight_decay": 0.01, "optimizer.clip_norm": 10.0, "train.batch_size": BATCH,
  "train.epochs": 2.0, "eval.batch_size": BATCH, "log.every_steps": 5,
}  # fmt: skip
# Name: configuration, ending of its files, and fields that are set beside FIELDS.
TASKS = {
  "text": ("own", "jsonl", {}),
  "pair": ("own", "jsonl", {"own.pair": "pair"}),
  # Without dropout, to be computed by hand (tests/test_finetune_golden.py).
  "regression": (
    "own", "jsonl",
    {"own.kind": "regression", "own.label": "number"}
    | {"model.dropout": 0.0, "model.attention_dropout": 0.0},
  ),
  "question": (
    "squad", "json",
    {"model.head": "linear", "qa.hidden": 8, "qa.beam_size": 2, "qa.max_query": 4, "qa.stride": 6},
  ),
  "tags": ("tagging", "txt", {}),
}  # fmt: skip


def rows(split: str) -> list[dict]:
  """Returns the rows of a split: texts, labels, numbers around 30."""
  rng, count = random.Random(split), {"train": ROWS, "dev": 3}[split]
  return [
    {
      "text": " ".join(rng.choices(WORDS, k=rng.randint(3, 15))),
      "pair": " ".join(rng.choices(WORDS, k=4)),
      "label": "ab"[i % 2],
      "number": round(rng.gauss(30, 5), 1),
    }
    for i in range(count)
  ]


def write(folder: Path) -> None:
  """Writes a network and the files of all tasks, train and dev."""
  (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
  words = tokenizer.load(folder / "vocab.txt")
  backbone = jax.jit(lambda: task_network.init_backbone(CFG, jax.random.key(0)))()
  (folder / "export").mkdir()
  network = Network(CFG, jax.tree.map(np.asarray, backbone), None)
  sources.save_orbax(folder / "export", Source({"discriminator": network}, words, {}))
  for split in ("train", "dev"):
    lines, data = [], []
    for i, row in enumerate(rows(split)):
      first, answer, *_, last = row["text"].split()
      qa = {"answers": [{"text": answer, "answer_start": len(first) + 1}]}
      data.append({"context": row["text"], "qas": [qa | {"id": str(i), "question": f"{last} ?"}]})
      for word in row["text"].split():
        lines.append(f"{word} {'O' if int(word[1:]) < 20 else 'B-X'}")
      lines.append("")
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows(split)))
    (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    squad = {"version": "1.1", "data": [{"title": "", "paragraphs": data}]}
    (folder / f"{split}.json").write_text(json.dumps(squad))


@functools.cache
def load(task: str):
  """Returns the encoder, the data and the settings of a task."""
  name, ending, fields = TASKS[task]
  with tempfile.TemporaryDirectory() as found:
    folder = Path(found)
    write(folder)
    config = files.load(f"finetune/{name}.py", task)
    paths = {f"data.{split}": str(folder / f"{split}.{ending}") for split in ("train", "dev")}
    config.update_from_flattened_dict({"init": str(folder / "export"), **paths, **FIELDS, **fields})
    from_config.check(config)
    encoder = from_config.load_pretrained(config)
    data = prepare.prepare(config, task, encoder.tokenizer, encoder.cfg)
  return encoder, data, from_config.make_settings(config, encoder, data.epochs)


def run(task: str) -> dict:
  """Returns the lines of the log, how far the weights moved, and what the network then answers.

  Each number is a list with one entry for each seed.
  """
  encoder, data, settings = load(task)
  head, lines = data.info.head.make(), []
  initial = jax.device_get(loop.init_params(encoder.cfg, head, encoder.weights, settings.seeds))
  trained = loop.train(
    encoder.cfg, head, encoder.weights, data.train, settings, lambda *line: lines.append(line[:3])
  )
  moved = jax.tree.map(lambda a, b: np.asarray(b, np.float64) - a, initial, trained)
  layers = moved["encoder"].pop("layers")
  parts = {"embeddings": moved["embeddings"], "projection": moved["encoder"], "head": moved["head"]}
  for i in range(CFG.num_layers):
    parts[f"layer {i}"] = jax.tree.map(lambda x, i=i: x[:, i], layers)
  lengths = {name: getattr(settings, name) for name in ("buckets", "pad", "max_length")}
  predict = loop.make_predictor(encoder.cfg, head, batch_size=settings.eval_batch_size, **lengths)
  outputs = predict(trained, data.splits["dev"].features)
  return {
    "lines": [{"step": step, "steps": steps, "loss": loss} for step, steps, loss in lines],
    "moved": {name: _norms(tree) for name, tree in parts.items()},
    "outputs": {
      name: [np.concatenate([np.ravel(x) for x in found[name]]).tolist() for found in outputs]
      for name in outputs[0]
    },
  }


def _norms(tree) -> list[float]:
  return sum(np.square(x).reshape(len(x), -1).sum(1) for x in jax.tree.leaves(tree)).tolist()


def difference(found, expected) -> float:
  """Returns the largest difference of two trees of numbers, relative to numbers above 0.01."""
  if isinstance(expected, dict):
    if found.keys() != expected.keys():
      return float("inf")
    return max(difference(found[name], x) for name, x in expected.items())
  if isinstance(expected, list):
    if len(found) != len(expected):
      return float("inf")
    return max((difference(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)
  return abs(found - expected) / max(abs(expected), 0.01)


def main() -> None:
  jax.config.update("jax_compilation_cache_dir", None)
  path = HERE / "finetuning.json"
  expected = json.loads(path.read_text()) if path.exists() else {}
  if sys.argv[1:2] == ["--write"]:
    expected |= {task: run(task) for task in sys.argv[2:]}
    path.write_text(json.dumps({task: expected[task] for task in TASKS}, indent=0) + "\n")
    return
  for task in sys.argv[1:] or TASKS:
    print(f"{task:12}{difference(run(task), expected[task]):.1e}", flush=True)


if __name__ == "__main__":
  main()
