"""Embeddings of sentences: `electra_jax.load(...).embed` against a loop over transformers.

  python benchmarks/embed.py --vocab vocab.txt --json OUT   # needs torch and transformers

Question: how many times as fast as the loop that a user writes is `embed`, with the same vectors?
Both read one folder: ELECTRA-Small's discriminator with random weights, on which the speed does not
depend, exported for Hugging Face. The sentences are of Python's documentation, in its order. The
loop takes `--batch` of them at a time, padded to the longest, and the mean of the states under the
attention mask; "sorted" is the same with the sentences sorted by length first. Contestants take
turns, each in a process of its own, and the best round counts; compilation is in a round of its own
before. It fails if a vector differs by more than 1e-5.
"""

import argparse
import itertools
import json
import re
import statistics
import tempfile
import time
from pathlib import Path

import jax
import machine
import numpy as np
import peers

import electra_jax
from electra_jax.config import files, specs
from electra_jax.core import networks
from electra_jax.data import python_docs, tokenizer
from electra_jax.interop import huggingface


def make_folder(folder: Path, config: str, vocab: str) -> None:
  """Writes a discriminator with random weights, and its tokenizer."""
  tokens = tokenizer.load(vocab)
  spec = specs.make_spec(files.load_named(config), tokens.vocab)
  tables, weights = networks.init_discriminator(spec, ("rtd_head",), jax.random.key(0))
  weights = jax.tree.map(np.asarray, {"embeddings": tables, **weights})
  huggingface.save(folder, spec.discriminator, weights, "rtd_head", tokens.vocab.pad)
  huggingface.save_tokenizer(folder, tokens, spec.discriminator.max_positions, True)


def sentences(count: int) -> list[str]:
  """Returns sentences of Python's documentation."""
  found = (
    part
    for document in python_docs.harvest()
    for part in re.split(r"(?<=[.!?])\s+", document)
    if len(part.split()) > 3
  )
  return list(itertools.islice(found, count))


class Ours:
  """`embed`, as it stands."""

  name = "electra_jax"

  def __init__(self, folder: str, texts: list[str], out: str):
    self._encoder, self._texts, self._out = electra_jax.load(folder), texts, out
    start = time.perf_counter()
    self.run()
    self.compile_secs = time.perf_counter() - start

  def run(self) -> None:
    """Embeds all texts and writes the vectors."""
    np.save(self._out, self._encoder.embed(self._texts))


class Loop:
  """A loop over transformers."""

  def __init__(self, folder: str, texts: list[str], out: str, batch: int, by_length: bool):
    import torch
    from transformers import AutoModel, AutoTokenizer

    self._torch, self._texts, self._out, self._batch = torch, texts, out, batch
    self._device = "cuda" if torch.cuda.is_available() else "cpu"
    self._tokens = AutoTokenizer.from_pretrained(folder)
    self._network = AutoModel.from_pretrained(folder).eval().to(self._device)
    self._by_length = by_length
    start = time.perf_counter()
    self.run()
    self.compile_secs = time.perf_counter() - start

  def run(self) -> None:
    """Embeds all texts and writes the vectors."""
    order = range(len(self._texts))
    if self._by_length:
      order = sorted(order, key=lambda i: len(self._texts[i]))
    texts, found = [self._texts[i] for i in order], []
    with self._torch.no_grad():
      for start in range(0, len(texts), self._batch):
        batch = texts[start : start + self._batch]
        inputs = self._tokens(
          batch, padding=True, truncation=True, max_length=512, return_tensors="pt"
        ).to(self._device)
        states = self._network(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None]
        found.append(((states * mask).sum(1) / mask.sum(1)).cpu().numpy())
    vectors = np.empty((len(texts), found[0].shape[1]), np.float32)
    vectors[list(order)] = np.concatenate(found)
    np.save(self._out, vectors)


def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--config", default="configs/small.py")
  p.add_argument("--vocab", required=True, help="a vocab.txt")
  p.add_argument("--count", type=int, default=10_000, help="sentences")
  p.add_argument("--batch", type=int, default=64, help="sentences at a time, of the loop")
  p.add_argument("--rounds", type=int, default=3)
  p.add_argument("--json", help="write the result here")
  args = p.parse_args()
  texts = sentences(args.count)
  with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary) / "discriminator"
    folder.mkdir()
    make_folder(folder, args.config, args.vocab)
    outs = [str(Path(temporary) / f"{i}.npy") for i in range(3)]
    kinds = (("transformers, in order", False), ("transformers, sorted", True))
    ours = peers.InItsOwnProcess(Ours.name, Ours, str(folder), texts, outs[0])
    started, failed = peers.wait_for([ours])  # one at a time: each wants all cores
    for (name, by_length), out in zip(kinds, outs[1:], strict=True):
      loop = peers.InItsOwnProcess(name, Loop, str(folder), texts, out, args.batch, by_length)
      ready, why = peers.wait_for([loop])
      started, failed = started + ready, failed + why
    secs, gave_up = peers.take_turns(started, args.rounds * [()])
    peers.stop(started)
    vectors = [np.load(out) for out in outs if Path(out).exists()]
  differences = [float(np.abs(v - vectors[0]).max()) for v in vectors[1:]]
  best = {name: min(values) for name, values in secs.items()}
  result = {
    "device": machine.devices(),
    "sizes": f"{args.config}, {len(texts):,} sentences, float32",
    "characters": statistics.fmean(map(len, texts)),
    "secs": secs,
    "compile_secs": {c.name: c.compile_secs for c in started},
    "our_speed_over_it_best": {name: best[name] / best[Ours.name] for name in best},
    "max_difference": max(differences, default=None),
    "could_not": failed + gave_up,
  }
  print(json.dumps(result, indent=1))
  if max(differences, default=0) > 1e-5:
    raise SystemExit("error: the vectors differ")
  machine.save(args.json, result, [args.vocab])


if __name__ == "__main__":
  main()
