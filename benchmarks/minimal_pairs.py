"""Speed of scoring minimal pairs, compared with a plain loop over transformers.

  python benchmarks/minimal_pairs.py --model=SOURCE --data=FILE.jsonl --json=FILE
                                     [--peer_pairs=1000] [--whole]

SOURCE has a masked language model that Hugging Face has a class for. For each sentence, the loop
runs a batch of copies, each with a different token masked, through AutoModelForMaskedLM on PyTorch,
with one thread per core. Both score --peer_pairs of the pairs, evenly spaced. With --whole this
package then scores the whole file, with one pass per token and with one pass per sentence
(mlm_unmasked). Needs torch and transformers.
"""

import os
import tempfile
from pathlib import Path

import machine
import numpy as np
import peers
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


def main(model: str, data: Path, peer_pairs: int = 1000, whole: bool = False) -> dict:
  every, source = pairs.read(data), sources.open_source(model)
  some = subset(every, peer_pairs)
  network = scorers.network_for("mlm", source.networks, model)
  theirs, ours, timed = [], [], {}
  with tempfile.TemporaryDirectory() as folder:
    writer.export_hf(source, Path(folder) / "out", Console(quiet=True))
    role = next(role for role, found in source.networks.items() if found is network)
    peer = Peer(Path(folder) / "out" / role)
    peer(some[0].good)
    peer_secs = peers.secs(lambda: theirs.extend(peer(x.good) > peer(x.bad) for x in some))

  def score(title: str, name: str, chosen: list[pairs.Pair]) -> None:
    scorer = scorers.SentenceScorer(name, network.cfg, source.tokenizer)

    def work() -> None:
      ours[:] = pairs.margins(scorer, network.weights, pairs.fitting(scorer, chosen)[0]) > 0

    secs = peers.secs(work)
    timed[title] = {"pairs": len(ours), "secs": secs, "accuracy": float(np.mean(ours))}

  # The second time without compilation, which the loop has not.
  for title in ("the same pairs", "the same pairs again"):
    score(title, "mlm", some)
  if len(ours) < len(some):
    raise SystemExit("error: choose a model that takes all of these pairs")
  found = {
    "accuracy_here": float(np.mean(ours)),
    "accuracy_of_the_loop": float(np.mean(theirs)),
    "different_answers": int(np.not_equal(ours, theirs).sum()),
    "loop": {"pairs": len(some), "secs": peer_secs},
    "here": timed,
    "times_as_fast": peer_secs / timed["the same pairs again"]["secs"],
  }
  for name in ("mlm", "mlm_unmasked") if whole else ():
    score(f"all, {name}", name, every)
  return {"results": found}


if __name__ == "__main__":
  machine.start(main)
