"""Minimal pairs by pseudo-log-likelihood: this package against a plain loop over transformers.

  python benchmarks/minimal_pairs.py --model=SOURCE --data=FILE.jsonl --json=FILE
                                     [--peer_pairs=1000] [--whole]

SOURCE has a masked language model that Hugging Face has a class for. The loop is what one writes:
for each sentence a batch of its copies, each with another token masked, through
AutoModelForMaskedLM on PyTorch, with as many threads as there are cores. Both score --peer_pairs of
the pairs, evenly spaced; with --whole this package then scores the whole file, by a pass a token
and by a pass a sentence (mlm_unmasked). It needs torch and transformers.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import machine
import numpy as np
from rich.console import Console

from electra_jax.evaluate import pairs, scorers
from electra_jax.export import writer
from electra_jax.finetune.batches import subset
from electra_jax.interop import sources


class Peer:
  """Scores sentences with a folder of Hugging Face, one after the other."""

  def __init__(self, folder: Path):
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count())
    self._torch = torch
    self._network = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

  def __call__(self, sentence: str) -> float:
    torch = self._torch
    ids = torch.tensor(self._tokenizer(sentence)["input_ids"])
    at = torch.arange(1, len(ids) - 1)
    copies = ids.repeat(len(at), 1)
    copies[torch.arange(len(at)), at] = self._tokenizer.mask_token_id
    with torch.inference_mode():
      logits = self._network(input_ids=copies, attention_mask=torch.ones_like(copies)).logits
    return float(logits[torch.arange(len(at)), at].log_softmax(-1)[:, ids[at]].diagonal().sum())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", required=True)
  parser.add_argument("--data", required=True, type=Path)
  parser.add_argument("--json", required=True)
  parser.add_argument("--peer_pairs", type=int, default=1000)
  parser.add_argument("--whole", action="store_true")
  args = parser.parse_args()
  every, source = pairs.read(args.data), sources.open_source(args.model)
  some = subset(every, args.peer_pairs)
  network = scorers.network_for("mlm", source.networks, args.model)
  scorer = scorers.SentenceScorer("mlm", network.cfg, source.tokenizer)
  with tempfile.TemporaryDirectory() as folder:
    writer.export_hf(source, Path(folder) / "out", Console(quiet=True))
    role = next(role for role, found in source.networks.items() if found is network)
    peer = Peer(Path(folder) / "out" / role)
    peer(some[0].good)
    started = time.perf_counter()
    theirs = np.array([peer(pair.good) > peer(pair.bad) for pair in some])
    peer_secs = time.perf_counter() - started
  timed = {}

  def score(name: str, scorer: scorers.SentenceScorer, chosen: list[pairs.Pair]) -> np.ndarray:
    started = time.perf_counter()
    kept, _ = pairs.fitting(scorer, chosen)
    right = pairs.compare(scorer, network.weights, kept)
    secs = time.perf_counter() - started
    timed[name] = {"pairs": len(kept), "secs": secs, "accuracy": float(right.mean())}
    return right

  for name in ("the same pairs", "the same pairs again"):
    ours = score(name, scorer, some)
    assert len(ours) == len(some), "choose a model that takes all of these pairs"
  for name in ("mlm", "mlm_unmasked") if args.whole else ():
    score(f"all, {name}", scorers.SentenceScorer(name, network.cfg, source.tokenizer), every)
  again = timed["the same pairs again"]["secs"]  # without compilation, which the peer has not
  results = {
    "accuracy_here": float(ours.mean()),
    "accuracy_of_the_loop": float(theirs.mean()),
    "different_answers": int((ours != theirs).sum()),
    "loop": {"pairs": len(some), "secs": peer_secs},
    "here": timed,
    "times_as_fast": peer_secs / again,
  }
  for name, value in results.items():
    print(f"{name}: {value}")
  machine.save(args.json, {"results": results}, hide=[args.model, args.data])


if __name__ == "__main__":
  main()
