"""What results are asked afterwards: how two of them differ, and what a network says of a file."""

import argparse
import json
import zipfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from electra_jax.finetune import glue_files, model, squad, squad_files, statistics, tagging
from electra_jax.finetune.model import Model
from electra_jax.finetune.prepare import Facts, null_threshold

RESULTS, UNITS, CONFIG = "results.jsonl", "units.npz", "config.json"


class AnswerError(ValueError):
  """A question that cannot be answered; the message is one line."""


def read_results(folder: Path) -> list[dict]:
  """Returns the rows of results in a folder."""
  return [json.loads(line) for line in (folder / RESULTS).read_text().splitlines()]


# Comparing.


def tasks_in(root: Path) -> dict[str, Path]:
  """Returns {task: folder} of the tasks that were finished in a folder of results.

  Raises:
    AnswerError: there is none.
  """
  found = {p.parent.name: p.parent for p in sorted(root.glob(f"[!.]*/{UNITS}"))}
  if not found:
    raise AnswerError(f"{root} holds no results of python -m electra_jax.finetune")
  return found


def compare(a: Path, b: Path, console: Console, samples: int = 2000) -> None:
  """Prints how far A is from B on each task that both have, with a paired bootstrap interval.

  Args:
    a, b: folders of results.
    samples: resamplings.

  Raises:
    AnswerError: they have no task in common, or not the same examples.
  """
  ours, theirs = tasks_in(a), tasks_in(b)
  both = [name for name in ours if name in theirs]
  if not both:
    raise AnswerError(f"no task in common: {a} has {', '.join(ours)}, {b} has {', '.join(theirs)}")
  table = Table(title=f"A {a} against B {b}: means over seeds")
  for column in ("task", "split", "metric, %", "A", "B", "A − B", "95 % interval", "p"):
    table.add_column(column, justify="left" if column in ("task", "split") else "right")
  for name in both:
    (kept, units), (others, other_units) = (_read_task(f) for f in (ours[name], theirs[name]))
    facts = Facts.from_json(kept["facts"])
    for split in (s for s in units if s in other_units):
      first, second = units[split], other_units[split]
      if kept["examples"][split] != others["examples"][split]:
        raise AnswerError(
          f"{name}, {split}: not the same examples, {first.shape[1]} and {second.shape[1]} of them"
        )
      metric = next(iter(facts.measure(first[0])))
      said = statistics.paired_bootstrap(first, second, facts.main_measure, metric, samples=samples)
      table.add_row(
        name,
        split,
        metric,
        f"{said.a:.2f}",
        f"{said.b:.2f}",
        f"{said.difference:+.2f}",
        f"{said.low:+.2f} to {said.high:+.2f}",
        f"{said.p:.3f}",
      )
  console.print(table)


def _read_task(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
  """Returns what was kept of a task: config.json, and the units of its splits."""
  try:
    kept = json.loads((folder / CONFIG).read_text())
    with np.load(folder / UNITS) as units:
      return kept, dict(units)
  except (OSError, ValueError, zipfile.BadZipFile) as error:
    raise AnswerError(f"{folder} is damaged: {error}") from None


# Predicting.


def predict(asked: Model, file: Path, out: Path) -> int:
  """Writes what a network says of a file, in the form its task has, and returns how many rows.

  Text: a TSV with a header or JSON lines that has the task's text columns; `out` gets the rows in
  their order, TSV (index, prediction, probability) or JSON lines by its name. Tagging: a file of
  CoNLL's form. Question answering: SQuAD or MRQA, labels or not, and `out` becomes a folder.

  Raises:
    AnswerError: `out` exists. ValueError: the file is not in order.
  """
  if out.exists():
    raise AnswerError(f"{out} exists: nothing is overwritten")
  return {"text": _text, "tagging": _tags, "qa": _answers}[asked.facts.kind](asked, file, out)


def _text(asked: Model, file: Path, out: Path) -> int:
  task = asked.facts.task
  examples = glue_files.read_texts(task, file)
  said = asked([e.text if e.pair is None else (e.text, e.pair) for e in examples])
  if out.suffix == ".jsonl":
    lines = [json.dumps({"index": i, **row}, ensure_ascii=False) for i, row in enumerate(said)]
  else:
    names = list(said[0])
    lines = ["\t".join(("index", "prediction", *names[1:]))]
    lines += ["\t".join((str(i), *map(_shown, row.values()))) for i, row in enumerate(said)]
  out.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return len(said)


def _shown(value: str | float) -> str:
  return value if isinstance(value, str) else f"{value:.6g}"


def _tags(asked: Model, file: Path, out: Path) -> int:
  options = asked.facts.options
  columns = {"word_column": options["word_column"], "tag_column": options["tag_column"]}
  sentences = tagging.read(file, **columns)
  tagging.write(out, sentences, asked.tags(sentences))
  return len(sentences)


def _answers(asked: Model, file: Path, out: Path) -> int:
  questions = squad_files.read(file)
  squad.write(out, asked.answers(questions), null_threshold(asked.facts.options))
  return len(questions.items)


def main() -> None:
  """Runs --compare or --predict from the command line."""
  parser = argparse.ArgumentParser(prog="python -m electra_jax.finetune")
  what = parser.add_mutually_exclusive_group(required=True)
  what.add_argument("--compare", nargs=2, metavar=("A", "B"), type=Path, help="folders of results")
  what.add_argument("--predict", metavar="FILE", type=Path, help="file to predict")
  parser.add_argument("--model", metavar="DIR", type=Path, help="with --predict: what to ask")
  parser.add_argument("--out", metavar="FILE", type=Path, help="with --predict: where to write")
  args = parser.parse_args()
  console = Console(highlight=False, soft_wrap=True)
  if args.compare:
    compare(*args.compare, console)
    return
  if args.model is None:
    raise AnswerError("--predict needs --model: the folder of a fine-tuned network or its results")
  asked = model.load(args.model)
  ending = {"text": ".tsv", "tagging": ".txt", "qa": ""}[asked.facts.kind]
  out = args.out or args.predict.with_name(f"{args.predict.name}.predictions{ending}")
  count = predict(asked, args.predict, out)
  console.print(f"{count:,} rows predicted: {out}")
