"""Shows what a network has learned: electra-jax show --model=SOURCE [TEXT...]

SOURCE is a run, an orbax export, a Hugging Face folder, hf://ORG/NAME[@REVISION] on its Hub, or a
TF1 checkpoint. Without TEXT it takes held-out sentences of the run, or of --data: masks a word of
each and prints the likeliest words; replaces words of others and prints which ones the
discriminator suspects. A run keeps these samples for its report (samples.json). A TEXT with [MASK]
is filled in; of any other the words are marked that look replaced.

  electra-jax show --model=runs/quickstart "Read the contents of the [MASK]."
"""

import argparse
import os
from pathlib import Path

from rich.console import Console
from rich.text import Text

import electra_jax
from electra_jax.commands import cli
from electra_jax.monitor.display import doing, starting
from electra_jax.runtime import terminal

# {kind of piece: its style, and the brackets that show it without colours}
MARKS = {
  "found": ("bold green underline", "[", "]"),
  "missed": ("yellow underline", "(", ")"),
  "false": ("red underline", "{", "}"),
  "suspected": ("bold underline", "[", "]"),
  "": ("", "", ""),
}
SUREST = ", where the network is most certain in held-out text"
WRAPPED = {"soft_wrap": False}  # between words
LEGEND = {"found": "found", "missed": "missed", "false": "false alarm"}


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  p.add_argument("--model", metavar="SOURCE")
  p.add_argument("--data", metavar="SHARDS", help="with held-out text; default: the run's")
  p.add_argument("texts", nargs="*", metavar="TEXT")


def main(args: argparse.Namespace) -> None:
  """Prints samples of held-out sentences, or of the texts."""
  if not args.model:
    raise cli.UsageError("--model=SOURCE is needed: a run, an export or a checkpoint")
  if args.texts and args.data:
    raise cli.UsageError("--data cannot be combined with TEXT")
  if not all(text.strip() for text in args.texts):
    raise cli.UsageError("a TEXT is empty")
  # A legacy locale does not decode the words of a command.
  texts = [os.fsencode(text).decode(errors="replace") for text in args.texts]
  show(args.model, terminal.console(), texts, args.data)


def show(model: str, console: Console, texts: list[str] = (), data: str | None = None) -> None:
  """Prints samples of texts, or without any of held-out sentences, which a run keeps."""
  with starting():  # slow, and not needed for --help
    from electra_jax.data.characters import note
    from electra_jax.data.pretrain_batches import Shards
    from electra_jax.evaluate import samples
    from electra_jax.interop import sources
    from electra_jax.runtime.workdir import read_run_config

  with doing("reading"):
    opened = electra_jax.load(model)
  is_run = sources.is_run(model)
  if not (texts or data or is_run):
    raise cli.UsageError(f"{model} is not a run of this machine: give --data=SHARDS, or texts")
  if texts:
    with opened.tokenizer.counting() as characters:
      found = samples.of_texts(opened, texts)
    print_samples(found, console)
    if noted := note(characters):
      console.print(noted, **WRAPPED)
    return
  shards = data or read_run_config(model)["data"]["dir"]
  with doing("sampling"):
    found = samples.make(opened, Shards.open(shards, "heldout"))
  if not found:
    raise ValueError(
      f"{model} neither predicts masked words nor detects, or {shards} has too few short held-out"
      " sentences: give texts"
    )
  if is_run and not data:
    samples.write(Path(model), found)
  print_samples(found, console)


def print_samples(found: dict, console: Console) -> None:
  """Prints what a function of `evaluate.samples` returned."""
  for name, printed in (("filled", _print_filled), ("detected", _print_detected)):
    if name in found:
      printed(found[name], console)


def _print_filled(found: dict, console: Console) -> None:
  sure = SUREST if "right" in found else ""
  console.print(f"Likely words for a mask{sure}:", **WRAPPED)
  for row in found["sentences"]:
    was, said = row["word"], Text()
    for word, p in row["choices"]:
      said.append(", " if said else "").append(_marked(word, p, "found" if word == was else ""))
    if was and was not in dict(row["choices"]):
      said.append(f"; it was: {was}")
    _entry(console, Text(row["text"]), said)
  if sure:
    right = f"right in {found['right']} of {found['count']} sentences"
    console.print(f"The likeliest word was {right}.\n", **WRAPPED)


def _print_detected(found: dict, console: Console) -> None:
  sure = SUREST if "found" in found else ""
  console.print(f"Words that look replaced{sure}:", **WRAPPED)
  if sure:
    legend = (_marked(name, None, kind) for kind, name in LEGEND.items())
    console.print(Text("  ").join(legend), **WRAPPED)
  for row in found["sentences"]:
    parts = (_marked(x["text"], x.get("probability"), x.get("kind", "")) for x in row)
    was = ", ".join(f"{x['text']} was {x['was']}" for x in row if x.get("was"))
    _entry(console, Text().join(parts), Text(was))
  if sure:
    words = f"{found['found']} of {found['count']} replaced words in {found['texts']} sentences"
    console.print(f"It found {words}; random guesses find {found['by_chance']:.0f}.", **WRAPPED)


def _marked(text: str, probability: float | None, kind: str) -> Text:
  style, before, after = MARKS[kind]
  percent = "" if probability is None else f" {100 * probability:.0f} %"
  return Text(f"{before}{text}{percent}{after}", style)


def _entry(console: Console, text: Text, detail: Text) -> None:
  for part, indent in ((text, 2), (detail, 6)):
    for line in part.wrap(console, console.width - indent) if part else ():
      console.print(Text(" " * indent) + line)
