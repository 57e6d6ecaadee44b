"""Measures a pretrained network in minutes, without fine-tuning.

  electra-jax evaluate pairs --model=SOURCE --data=FILE.jsonl [--scorer=NAME] [--out=DIR]
  electra-jax evaluate cloze --model=SOURCE --data=FILE.jsonl [--scorer=NAME] [--out=FILE.json]
  electra-jax evaluate detect --model=SOURCE --data=SHARDS [--out=FILE.json]
  electra-jax evaluate probe --model=SOURCE --train=FILE --test=FILE [--out=FILE.json]

SOURCE is a run, an orbax export, a Hugging Face folder, hf://ORG/NAME[@REVISION] on its Hub, or a
TF1 checkpoint.

pairs   accuracy on minimal pairs: JSON lines with sentence_good and sentence_bad and, as in BLiMP,
        optional UID (paradigm) and linguistics_term (category). Scorers: mlm, the
        pseudo-log-likelihood of a masked language model, one pass per token; mlm_words, the same
        with the later pieces of the word masked, too; mlm_unmasked, one pass without masks, for
        networks trained to predict words at replaced tokens (replace_mlm, all_tokens_mlm,
        electra_mlm, metro, coco_lm); rtd, the log-probability that all tokens are original, one
        pass; energy, Electric's; clm, the log-likelihood of a causal language model. Default: the
        objective's, if a run or an export stores it. Writes DIR/pairs.json and .png.
cloze   how often the word of a text ranks first among others: JSON lines with left, right and
        words, the text's own first. With mlm the words are ranked at one [MASK], with the other
        scorers each is read in its place.
detect  AUC of detecting replacements drawn by token frequency in held-out shards, a folder or a
        URL; it does not depend on the run's generator.
probe   F1 or accuracy of a linear classifier on the frozen states of words, on CoNLL files.
"""

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from electra_jax.commands import cli
from electra_jax.monitor.display import starting
from electra_jax.runtime import terminal


def add_options(p: cli.ArgumentParser) -> None:
  """Adds the command's options."""
  commands = p.add_subparsers(required=True, metavar="pairs|cloze|detect|probe", dest="what")

  def add(name: str) -> cli.ArgumentParser:
    command = commands.add_parser(name)
    command.add_argument("--model", required=True, metavar="SOURCE")
    return command

  command = add("pairs")
  command.add_argument("--data", required=True, metavar="FILE")
  command.add_argument("--scorer", metavar="NAME", help="default: the objective's")
  command.add_argument("--out", type=Path, metavar="DIR", help="a new folder")
  command = add("cloze")
  command.add_argument("--data", required=True, metavar="FILE")
  command.add_argument("--scorer", metavar="NAME", help="default: the objective's")
  command.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the ranks")
  command.add_argument("--gaps", type=cli.positive, metavar="N", help="maximum, evenly spaced")
  command = add("detect")
  command.add_argument("--data", required=True, metavar="SHARDS")
  command.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the result")
  command.add_argument("--batch-size", type=cli.positive, default=64, metavar="N")
  command.add_argument(
    "--examples", type=cli.positive, default=2048, metavar="N", help="maximum number, evenly spaced"
  )
  command = add("probe")
  command.add_argument("--train", required=True, metavar="FILE")
  command.add_argument("--test", required=True, metavar="FILE")
  command.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the scores")
  command.add_argument(
    "--max-words", type=cli.positive, default=100_000, metavar="N", help="limit for --train"
  )
  command.add_argument(
    "--best-layer",
    action="store_true",
    help="use the layer that scores best on a tenth of --train instead of the last one",
  )


def main(args: argparse.Namespace) -> None:
  """Measures a network."""
  with starting():  # slow, and not needed for --help
    from electra_jax.evaluate import measures  # noqa: F401
    from electra_jax.runtime.workdir import check_new

  if args.out:  # raises before minutes of computation
    args.out.parent.mkdir(parents=True, exist_ok=True)
    check_new(args.out)
  run = {"pairs": run_pairs, "cloze": run_cloze, "detect": run_detect, "probe": run_probe}
  run[args.what](args, terminal.console())


def check_scorer(name: str | None) -> None:
  """Raises UsageError if `name` is not a scorer."""
  from electra_jax.evaluate import scorers

  if name not in (None, *scorers.SCORERS):
    known = ", ".join(scorers.SCORERS)
    raise cli.UsageError(f"--scorer: invalid choice: {name!r} (choose from {known})")


def run_pairs(args: argparse.Namespace, console: Console) -> None:
  """Scores minimal pairs; prints accuracies by category and writes them to a folder."""
  from electra_jax.evaluate import measures, pairs
  from electra_jax.monitor.trackers import dropping
  from electra_jax.runtime.workdir import new_folder

  check_scorer(args.scorer)
  started = time.perf_counter()
  found = measures.evaluate_pairs(args.model, args.data, args.scorer)
  secs = time.perf_counter() - started
  every, categories, paradigms = found.all, found.categories, found.paradigms
  title = f"{every.pairs:,} pairs, {found.scorer}: {100 * every.accuracy:.2f} %"
  effect, error = pairs.effect(found.margins)
  caption = f"mean margin: {effect:.3f} ± {error:.3f} standard deviations of the margins"
  table = Table(title=title, caption=f"{caption}; paradigms: {len(paradigms)}; {secs:.0f} s")
  for name in ("category", "pairs", "accuracy %", "95 % interval"):
    table.add_column(name, justify="left" if name == "category" else "right")
  for name, a in pairs.rows(every, categories):
    interval = f"{100 * a.low:.1f} to {100 * a.high:.1f}"
    table.add_row(name, f"{a.pairs:,}", f"{100 * a.accuracy:.2f}", interval)
  console.print(table)
  if args.out:
    content = {
      "model": args.model, "data": args.data, "scorer": found.scorer, "secs": round(secs, 1),
      "all": every._asdict(), "effect": effect, "effect_error": error,
      "categories": {name: a._asdict() for name, a in categories.items()},
      "paradigms": {name: a._asdict() for name, a in paradigms.items()},
    }  # fmt: skip
    with new_folder(args.out) as folder:
      (folder / "pairs.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
      with dropping("pairs.png", lambda text: console.print(f"warning: {text}")):
        pairs.draw(folder / "pairs.png", f"{args.model}: {title}", found.pairs, found.margins > 0)
    console.print(f"written: {args.out / 'pairs.json'}, {args.out / 'pairs.png'}")


def run_cloze(args: argparse.Namespace, console: Console) -> None:
  """Prints how often the text's own word ranks first, and its mean reciprocal rank."""
  from electra_jax.evaluate import measures

  check_scorer(args.scorer)
  found = measures.evaluate_cloze(args.model, args.data, args.scorer, gaps=args.gaps)
  first = found.first
  interval = f"95 % interval {100 * first.low:.1f} to {100 * first.high:.1f}"
  console.print(
    f"{found.scorer}: the text's word ranks first of {found.words} in {100 * first.accuracy:.2f} %"
    f" of {first.pairs:,} gaps ({interval}); mean reciprocal rank {found.mean_reciprocal_rank:.4f}"
  )
  write(args.out, found._asdict() | {"ranks": found.ranks.tolist(), "first": first._asdict()})


def run_detect(args: argparse.Namespace, console: Console) -> None:
  """Prints the AUC of detecting replacements drawn by frequency."""
  from electra_jax.evaluate import measures

  value = measures.evaluate_detection(
    args.model, args.data, batch_size=args.batch_size, examples=args.examples
  )
  console.print(f"AUC against replacements drawn by frequency: {value:.4f}")
  write(args.out, {"auc": value})


def run_probe(args: argparse.Namespace, console: Console) -> None:
  """Prints the scores of a linear probe."""
  from electra_jax.evaluate import measures

  found, layers = measures.evaluate_probe(
    args.model, args.train, args.test, max_words=args.max_words, best_layer=args.best_layer
  )
  scores = ", ".join(f"{name} {value:.2f}" for name, value in found.metrics.items())
  console.print(f"linear probe on {found.words:,} words, {found.labels} labels: {scores}")
  used = f"{found.dimensions:.1f} of {found.width} dimensions"
  console.print(f"states use {used} (participation ratio)")
  if layers:
    each = ", ".join(f"{n}: {score:.2f}" for n, score in layers.items())
    console.print(f"states of layer {found.layers}, the best on a tenth of --train ({each})")
  write(args.out, found._asdict() | {"scores_of_layers": layers})


def write(out: Path | None, content: dict) -> None:
  """Writes JSON to `out`, if given."""
  from electra_jax.runtime.workdir import replacing

  if out:
    with replacing(out) as temporary:
      temporary.write_text(json.dumps(content) + "\n", "utf-8")
