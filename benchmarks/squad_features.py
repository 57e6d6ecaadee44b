"""Speed of cutting question answering data into windows, compared with the tokenizer alone.

  python benchmarks/squad_features.py --data TRAIN.json --vocab vocab.txt \
    [--json benchmarks/results/squad_features.json]

Both read the same file and take turns for several rounds; the unit is a context:
  electra_jax   the training windows of all questions on all contexts, with located answers
  limit         `tokenizers` encoding the contexts with offsets, without questions
"""

import statistics

import machine
import peers

from electra_jax.data import tokenizer
from electra_jax.finetune import squad, squad_files

FLOOR = 500  # contexts per second on two cores: SQuAD's 19,000 in well under a minute


def main(
  data: str, vocab: str, max_length: list[int] = (384, 512), stride: int = 128, rounds: int = 5
) -> dict:
  questions = squad_files.read(data)
  contexts = list(dict.fromkeys(question.context for question in questions.items))
  counts: dict[str, int] = {}

  def windows(length: int, fresh: tokenizer.Tokenizer) -> None:
    options = {"max_length": length, "stride": stride, "max_query": 64}
    counts[str(length)] = len(squad.windows(questions, fresh, train=True, **options))

  def limit(length: int, fresh: tokenizer.Tokenizer) -> list:
    found = fresh._engine.encode_batch(contexts, add_special_tokens=False)
    return [(encoding.ids, encoding.offsets) for encoding in found]

  kinds = {f"electra_jax {n}": (windows, n) for n in max_length} | {"limit": (limit, 0)}
  rates: dict[str, list[float]] = {name: [] for name in kinds}
  for _ in range(rounds):
    for name, (work, length) in kinds.items():
      # What an earlier round remembers does not count.
      fresh = tokenizer.load(vocab)
      squad._parts.cache_clear()
      secs = peers.secs(lambda work=work, args=(length, fresh): work(*args))
      rates[name].append(len(contexts) / secs)
  return {
    "contexts": len(contexts),
    "questions": len(questions.items),
    "windows": counts,
    "stride": stride,
    "floor_contexts_per_sec": FLOOR,
    "contexts_per_sec": {name: round(statistics.median(x)) for name, x in rates.items()},
    "rounds": {name: list(map(round, found)) for name, found in rates.items()},
  }


if __name__ == "__main__":
  machine.start(main)
