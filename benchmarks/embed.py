"""Embeddings of sentences: `electra_jax.load(...).embed` against a loop over transformers.

  python benchmarks/embed.py --vocab vocab.txt --json OUT   # needs torch and transformers

Question: how much faster is `embed` than the loop that a user writes, with the same vectors? Both
read one folder: ELECTRA-Small's discriminator with random weights, on which the speed does not
depend, exported for Hugging Face. The sentences come from Python's documentation, in its order. The
loop takes `--batch` sentences at a time, padded to the longest, and averages the states under the
attention mask; "sorted" first sorts the sentences by length. Contestants take turns in separate
processes, after a round that compiles, and the best round counts. A difference of vectors above
1e-5 is wrong.
"""

import itertools
import re
import statistics
import tempfile
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
  """`embed`."""

  name = "electra_jax"

  def __init__(self, folder: str, texts: list[str], out: str):
    self._encoder, self._texts, self._out = electra_jax.load(folder), texts, out
    self.compile_secs = peers.secs(self.run)

  def run(self) -> None:
    np.save(self._out, self._encoder.embed(self._texts))


class Loop(peers.TorchLoop):
  """A loop over transformers."""

  def __init__(self, folder: str, texts: list[str], out: str, batch: int, by_length: bool):
    from transformers import AutoModel, AutoTokenizer

    super().__init__()
    self._texts, self._out, self._batch, self._by_length = texts, out, batch, by_length
    self._tokens = AutoTokenizer.from_pretrained(folder)
    self._network = AutoModel.from_pretrained(folder).eval().to(self.device)
    self.compile_secs = peers.secs(self.run)

  def run(self) -> None:
    order = range(len(self._texts))
    if self._by_length:
      order = sorted(order, key=lambda i: len(self._texts[i]))
    texts, found = [self._texts[i] for i in order], []
    with self.torch.no_grad():
      for start in range(0, len(texts), self._batch):
        inputs = self._tokens(
          texts[start : start + self._batch],
          padding=True,
          truncation=True,
          max_length=512,
          return_tensors="pt",
        ).to(self.device)
        states = self._network(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None]
        found.append(((states * mask).sum(1) / mask.sum(1)).cpu().numpy())
    vectors = np.empty((len(texts), found[0].shape[1]), np.float32)
    vectors[list(order)] = np.concatenate(found)
    np.save(self._out, vectors)


def main(
  vocab: str,
  config: str = "configs/small.py",
  count: int = 10_000,
  batch: int = 64,
  rounds: int = 3,
) -> dict:
  texts = sentences(count)
  with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary) / "discriminator"
    folder.mkdir()
    make_folder(folder, config, vocab)
    makes = {
      Ours.name: (Ours,),
      "transformers, in order": (Loop, batch, False),
      "transformers, sorted": (Loop, batch, True),
    }
    started, could_not, outs = [], [], []
    for name, (make, *args) in makes.items():  # one at a time: each wants all cores
      outs.append(Path(temporary) / f"{name}.npy")
      peer = peers.InItsOwnProcess(name, make, str(folder), texts, str(outs[-1]), *args)
      ready, why = peers.wait_for([peer])
      started, could_not = started + ready, could_not + why
    secs, gave_up = peers.take_turns(started, rounds * [()])
    peers.stop(started)
    vectors = [np.load(out) for out in outs if out.exists()]
  difference = max((float(np.abs(v - vectors[0]).max()) for v in vectors[1:]), default=None)
  best = {name: min(values) for name, values in secs.items()}
  return {
    "device": machine.devices(),
    "sizes": f"{config}, {len(texts):,} sentences, float32",
    "characters": statistics.fmean(map(len, texts)),
    "secs": secs,
    "compile_secs": {c.name: c.compile_secs for c in started},
    "our_speed_over_it_best": {name: best[name] / best[Ours.name] for name in best},
    "max_difference": difference,
    "could_not": could_not + gave_up,
    "wrong": ["the vectors differ"] if (difference or 0) > 1e-5 else [],
  }


if __name__ == "__main__":
  machine.start(main)
