"""Measures of pretrained networks: see electra_jax.evaluate."""

import argparse
import json
import time

from absl import flags
from rich.console import Console
from rich.table import Table

from electra_jax.data import tokenizer
from electra_jax.data.pretrain_batches import Shards
from electra_jax.evaluate import detect, pairs, scorers
from electra_jax.finetune import probe, tagging
from electra_jax.interop import likelihood, sources
from electra_jax.interop.sources import ExchangeError, Source
from electra_jax.runtime.display import doing
from electra_jax.runtime.workdir import check_new, new_folder


def run_pairs(args: argparse.Namespace, console: Console) -> None:
  """Scores minimal pairs; prints accuracies by category and writes them to a folder."""
  if args.scorer not in (None, *scorers.SCORERS):
    known = ", ".join(scorers.SCORERS)
    raise flags.Error(f"--scorer: invalid choice: {args.scorer!r} (choose from {known})")
  if args.out:  # before computing for minutes
    args.out.parent.mkdir(parents=True, exist_ok=True)
    check_new(args.out)
  found, source = pairs.read(args.data), _open(args.model)
  heads = {network.head for network in source.networks.values()}
  objective = (likelihood.training(source) or {}).get("objective")
  scorer = args.scorer or scorers.default(objective, heads)
  network = scorers.network_for(scorer, source.networks, args.model)
  started = time.perf_counter()
  sentence_scorer = scorers.SentenceScorer(scorer, network.cfg, source.tokenizer)
  found, warnings = pairs.fitting(sentence_scorer, found)
  for line in warnings:
    console.print(f"warning: {line}")
  with doing(f"scoring {len(found):,} pairs"):
    right = pairs.compare(sentence_scorer, network.weights, found)
  secs = time.perf_counter() - started
  categories = pairs.by([pair.category for pair in found], right)
  paradigms = pairs.by([pair.paradigm for pair in found], right)
  title = f"{len(found):,} pairs, {scorer}: {100 * right.mean():.2f} %"
  table = Table(title=title, caption=f"paradigms: {len(paradigms)}; {secs:.0f} s")
  for name in ("category", "pairs", "accuracy %", "95 % interval"):
    table.add_column(name, justify="left" if name == "category" else "right")
  for name, a in pairs.rows(pairs.accuracy(right), categories):
    interval = f"{100 * a.low:.1f} to {100 * a.high:.1f}"
    table.add_row(name, f"{a.pairs:,}", f"{100 * a.accuracy:.2f}", interval)
  console.print(table)
  if args.out:
    content = {
      "model": args.model, "data": str(args.data), "scorer": scorer, "secs": round(secs, 1),
      "all": pairs.accuracy(right)._asdict(),
      "categories": {name: a._asdict() for name, a in categories.items()},
      "paradigms": {name: a._asdict() for name, a in paradigms.items()},
    }  # fmt: skip
    with new_folder(args.out) as folder:
      (folder / "pairs.json").write_text(json.dumps(content, indent=1) + "\n")
      pairs.draw(folder / "pairs.png", f"{args.model}: {title}", found, right)
    console.print(f"written: {args.out / 'pairs.json'}, {args.out / 'pairs.png'}")


def run_detect(args: argparse.Namespace, console: Console) -> None:
  """Prints the AUC of detecting replacements drawn by frequency."""
  data = Shards.open(args.data, "heldout")
  tokens = tokenizer.load_from(data.folder, data.vocab)
  source = sources.open_for(args.model, tokens)
  network = scorers.network_for("rtd", source.networks, args.model)
  sources.check_vocab(tokens, {"discriminator": network}, args.model)
  if data.seq_length > network.cfg.max_positions:
    raise ValueError(
      f"{args.data} has {data.seq_length} tokens a row, the network takes"
      f" {network.cfg.max_positions}"
    )
  frequencies = Shards.open(args.data, "train").frequencies
  with doing("detecting"):
    value = detect.auc(network, data, frequencies, args.batch_size, args.examples)
  console.print(f"AUC against replacements drawn by frequency: {value:.4f}")


def run_probe(args: argparse.Namespace, console: Console) -> None:
  """Prints the scores of a linear probe."""
  train, test = (tagging.read(file) for file in (args.train, args.test))
  source = _open(args.model)
  network, most = source.networks[source.main], args.max_words
  with doing("fitting"):
    found = probe.run(network, source.tokenizer, train, test, most)
  scores = ", ".join(f"{name} {value:.2f}" for name, value in found.metrics.items())
  console.print(f"linear probe on {found.words:,} words, {found.labels} labels: {scores}")
  width = network.cfg.hidden_size
  console.print(f"states use {found.dimensions:.1f} of {width} dimensions (participation ratio)")


def _open(path: str) -> Source:
  with doing("reading"):
    source = sources.open_source(path)
  if source.tokenizer is None:
    raise ExchangeError(f"{path} has no vocabulary: put its vocab.txt there")
  return source


PROGRAMS = {"pairs": run_pairs, "detect": run_detect, "probe": run_probe}
