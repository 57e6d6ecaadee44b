"""Says what a build made of its text: counts, what was lost and why, and some examples."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict
from rich.table import Table

from electra_jax.data import shards, tokenizer, vocabulary
from electra_jax.data.characters import ALL, DECOMPOSED, LONG, LOST, MISSING, NOTED, REASONS
from electra_jax.data.status import print_line
from electra_jax.runtime.terminal import log_console

DISCARDED = 0.18  # share of the text from which its loss is noted
TOKENS_PER_CHARACTER = 1.5  # of text in a script for which the vocabulary has only bytes
FEW_EXAMPLES = 32  # held out; the loss of fewer is rough
TOKENS = ("tokens", "discarded")  # counts
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # which a terminal may obey
SHOWN, SHOWN_CHARS = 3, 150  # examples, and the beginning of each


def say(folder: Path, manifest: dict, data: ConfigDict) -> None:
  """Prints the counts of a finished build, some examples, and what to set where text was lost."""
  splits, read = manifest["splits"], manifest["sources"]
  documents, bad = (sum(x[key] for x in read) for key in ("documents", "undecodable"))
  lines = sum(counts["lines"] for counts in splits.values())
  found = f"{documents:,} documents, {lines:,} lines"
  found += f" ({bad:,} documents are not text)" if bad else ""
  table = Table(title=f"{found}: examples of {data.seq_length} tokens ({data.examples})")
  for column in ("split", "examples", "tokens", "characters", "unknown", "discarded", "padding"):
    table.add_column(column, justify="right")
  for split, counts in splits.items():
    padding = counts["padded"] / max(counts["examples"] * data.seq_length, 1)
    numbers = (f"{counts[key]:,}" for key in ("examples", "tokens", ALL))
    unknown = sum(lost(counts, key) for key in LOST)
    shares = (f"{unknown:.2%}", f"{discarded(counts):.1%}", f"{padding:.1%}")
    table.add_row(split, *numbers, *shares)
  log_console().print(table)
  tokens = tokenizer.load_from(folder, tokenizer.Vocab.from_json(manifest["vocab"]))
  print_line(f"some examples; {tokens.decode([tokens.vocab.unk])} stands for unknown text:")
  for ids in _examples(folder, manifest):
    text = _CONTROLS.sub("\ufffd", " ".join(tokens.decode(ids).split()))
    print_line(f"- {text[:SHOWN_CHARS]}{'…' * (len(text) > SHOWN_CHARS)}")
  for note in notes(manifest, data, tokens.longest_word):
    print_line(f"note: {note}")


def lost(counts: dict, reason: str) -> float:
  """Returns the share of a split's characters that are unknown for a reason, one of LOST."""
  return counts[reason] / max(counts[ALL], 1)


def discarded(counts: dict) -> float:
  """Returns the share of a split's characters that are known and in no example.

  Assumes that discarded tokens are as long as others.
  """
  known = 1 - sum(lost(counts, reason) for reason in LOST)
  return known * counts["discarded"] / max(counts["tokens"], 1)


def _examples(folder: Path, manifest: dict) -> Iterator[np.ndarray]:
  """Yields the ids of examples spread over the training shards, without the first [CLS]."""
  files = manifest["splits"]["train"]["shards"]
  for place in np.linspace(0, 1, SHOWN + 2)[1:-1]:
    shard = files[int(place * len(files))]
    records = np.memmap(folder / shard["file"], shards.layout(manifest), "r")
    record = records[int(place * len(records))]
    yield record["ids"][1 : record["length"]]


def notes(manifest: dict, data: ConfigDict, longest_word: float) -> Iterator[str]:
  """Yields what to set where text was lost or the split is unfit, the greatest losses first."""
  splits = train, heldout = [manifest["splits"][split] for split in shards.SPLITS]
  whole = {key: sum(counts[key] for counts in splits) for key in (ALL, *LOST, *TOKENS)}
  trained = data.vocab in vocabulary.KINDS
  own_rules = manifest["vocab"]["kind"] not in vocabulary.WITHOUT_RULES
  nfc = "convert the text (NFC)" if own_rules else "set data.nfc=true"
  remedies = {
    LONG: f"above {longest_word} characters; set data.vocab=unigram, which splits words",
    DECOMPOSED: nfc,
    MISSING: "raise data.vocab_size" if trained else "train one on this text: data.vocab=unigram",
  }
  much = sum(lost(whole, reason) for reason in LOST) > NOTED
  for reason in sorted(LOST, key=whole.get, reverse=True):
    if much and (share := lost(whole, reason)) > NOTED / len(LOST):
      yield f"{share:.1%} of the characters are unknown, {REASONS[reason]}: {remedies[reason]}"
  tokens, characters = whole["tokens"], whole[ALL]
  if tokens > TOKENS_PER_CHARACTER * characters > 0:
    yield (
      f"{tokens / characters:.1f} tokens for a character: {data.vocab} is of another"
      " script; train one on this text: data.vocab=unigram"
    )
  if (share := discarded(whole)) > DISCARDED:
    lines = "" if data.split_lines else " set data.split_lines=true,"
    yield (
      f"{share:.1%} of the characters are discarded, behind the end of short examples:{lines} raise"
      " data.seq_length or set data.examples=packed, which discards nothing"
    )
  if data.examples == "segments" and train["padded"] > train["kept"]:
    yield "more padding than text, because documents are short; use data.examples=packed"
  if data.holdout_frac and (count := heldout["examples"]) < FEW_EXAMPLES:
    yield (
      f"data.holdout_frac={data.holdout_frac} held out {count} examples: "
      + ("evaluations are rough" if count else "no evaluation")
      + "; raise it or add text"
    )
