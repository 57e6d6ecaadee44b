"""How fast question answering data becomes windows, against the tokenizer alone.

  python benchmarks/squad_features.py --data TRAIN.json --vocab vocab.txt \
    [--json benchmarks/results/squad_features.json]

Both work on the same file and are measured in turn, several rounds each; the unit is a context:
  electra_jax   the training windows of all questions on all contexts, answers located
  limit         `tokenizers` encoding the contexts with their offsets, nothing else, no questions
"""

import argparse
import statistics
import time

import machine
from rich.console import Console
from rich.table import Table

from electra_jax.data import tokenizer
from electra_jax.finetune import squad, squad_files

FLOOR = 500  # contexts per second on two cores: SQuAD's 19,000 in well under a minute


def contexts_per_sec(work, contexts: int) -> float:
  """Runs `work` once."""
  start = time.perf_counter()
  work()
  return contexts / (time.perf_counter() - start)


def main() -> None:
  """Measures, prints a table, writes JSON."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("--data", required=True, help="a SQuAD or MRQA file with answers")
  parser.add_argument("--vocab", required=True, help="a vocab.txt or tokenizer.json")
  parser.add_argument("--max_length", type=int, nargs="+", default=[384, 512])
  parser.add_argument("--stride", type=int, default=128)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--json", help="file for the results")
  args = parser.parse_args()
  questions = squad_files.read(args.data)
  contexts = list(dict.fromkeys(question.context for question in questions.items))
  engine = tokenizer.load(args.vocab)._engine
  counts: dict[str, int] = {}

  def make(max_length: int):
    # A fresh tokenizer: what an earlier round remembers does not count.
    fresh = tokenizer.load(args.vocab)
    squad._parts.cache_clear()
    options = {"max_length": max_length, "stride": args.stride, "max_query": 64}

    def work():
      made = squad.windows(questions, fresh, train=True, **options)
      counts[str(max_length)] = len(made)

    return work

  def limit():
    found = engine.encode_batch(contexts, add_special_tokens=False)
    return [(encoding.ids, encoding.offsets) for encoding in found]

  sources = {f"electra_jax {n}": n for n in args.max_length} | {"limit": 0}
  rates: dict[str, list[float]] = {name: [] for name in sources}
  for _ in range(args.rounds):
    for name, length in sources.items():
      rates[name].append(contexts_per_sec(make(length) if length else limit, len(contexts)))
  table = Table("", "contexts/s", "lowest", "highest")
  medians = {name: statistics.median(found) for name, found in rates.items()}
  for name, found in rates.items():
    table.add_row(name, *(f"{x:,.0f}" for x in (medians[name], min(found), max(found))))
  Console().print(table)
  machine.save(
    args.json,
    {
      "contexts": len(contexts),
      "questions": len(questions.items),
      "windows": counts,
      "stride": args.stride,
      "floor_contexts_per_sec": FLOOR,
      "contexts_per_sec": {name: round(rate) for name, rate in medians.items()},
      "rounds": {name: [round(rate) for rate in found] for name, found in rates.items()},
    },
    hide=(args.data, args.vocab),
  )


if __name__ == "__main__":
  main()
