"""Describes what a network sees of a task: decoded examples, lost characters, repeated rows."""

import itertools
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from electra_jax.data.tokenizer import Tokenizer
from electra_jax.finetune.batches import subset
from electra_jax.finetune.task_data import Seen, TaskData, TaskInfo, TaskKind

SAMPLE = 500  # examples, evenly spaced, whose characters are counted
SHOWN, WIDTH = 2, 80  # examples to show, and characters of a line
MUCH = 5  # percent of unknown characters above which predictions are doubtful
# Characters that tokenizers drop: combining marks, control and format characters.
_DROPPED = ("Mn", "Cc", "Cf")


class Lost(NamedTuple):
  """The characters that do not reach the network, in percent."""

  unknown: float
  cut: float


class _View(NamedTuple):
  """A text as the network sees it, and the numbers of its characters, without spaces."""

  shown: str
  characters: int
  unknown: int
  cut: int


def _count(text: str) -> int:
  return len("".join(text.split()))


def _views(seen: Seen, tokenizer: Tokenizer, kept: Callable) -> list[_View]:
  """Returns what is seen of each text of an example; `kept` is `TaskKind.kept`."""
  encoded, unk = tokenizer.encode_offsets(list(seen.texts)), tokenizer.vocab.unk
  found = []
  lengths = kept([len(ids) for ids, _ in encoded])
  for text, (ids, spans), most in zip(seen.texts, encoded, lengths, strict=True):
    end = len(text) if most >= len(ids) else spans[most - 1][1] if most else 0
    parts, unknown, place = [], [], 0
    known = [(a, b) for i, (a, b) in zip(ids[:most], spans, strict=False) if i != unk]
    for a, b in [*known, (end, end)]:
      unknown += text[place:a]
      place = max(place, b)
    for is_unknown, tokens in itertools.groupby(
      zip(ids[:most], spans, strict=False), lambda token: token[0] == unk
    ):
      if is_unknown:
        parts += [f"[UNK:{text[a:b]}]" for _, (a, b) in tokens]
      else:
        parts.append(tokenizer.decode([i for i, _ in tokens]))
    if not ids and text.strip():
      parts.append(f"[UNK:{text.strip()}]")
    shown = " ".join(" ".join(parts).split()) + (" [cut]" if most < len(ids) else "")
    lost = sum(not x.isspace() and unicodedata.category(x) not in _DROPPED for x in unknown)
    found.append(_View(shown, _count(text), lost, _count(text[end:])))
  return found


def lost(kind: TaskKind, info: TaskInfo, seen: Sequence[Seen], tokenizer: Tokenizer) -> Lost:
  """Returns the share of characters that are unknown or cut, of at most SAMPLE examples."""
  sample = subset(seen, SAMPLE)
  views = [v for x in sample for v in _views(x, tokenizer, lambda n: kind.kept(info, n))]
  whole = max(1, sum(view.characters for view in views))
  return Lost(*(100 * sum(getattr(view, name) for view in views) / whole for name in Lost._fields))


def warnings_of(
  kind: TaskKind, info: TaskInfo, examples: Any, tokenizer: Tokenizer
) -> Iterable[str]:
  """Yields warnings of text to predict that is cut, or that the vocabulary lacks."""
  unknown, cut = lost(kind, info, kind.seen(info, examples, tokenizer), tokenizer)
  if unknown > MUCH:
    yield f"{unknown:.2g} % of the characters are unknown to the vocabulary: expect errors"
  if cut:
    yield f"{cut:.2g} % of the characters are cut, as by {kind.limit} in fine-tuning"


def notes(task: TaskData, kind: TaskKind, tokenizer: Tokenizer) -> list[str]:
  """Returns lines on each split: its rows, lost characters and rows that are also in training.

  Two training examples are decoded from their tokens, with unknown parts as [UNK:text].
  """
  info, lines = task.info, []
  rows = {"train": (task.train, task.examples)}
  rows |= {split: (x.features, x.examples) for split, x in task.splits.items()}
  seen = {split: kind.seen(info, x, tokenizer) for split, (_, x) in rows.items()}
  trained = {tuple(x.texts): x for x in seen["train"]}
  for split, (features, _) in rows.items():
    lengths = [len(feature.ids) for feature in features]
    mean, (unknown, cut) = sum(lengths) / len(lengths), lost(kind, info, seen[split], tokenizer)
    line = f"{split}: {len(lengths):,} rows of {mean:.1f} tokens, at most {max(lengths)}"
    sample = f" in {SAMPLE} of them" if len(seen[split]) > SAMPLE else ""
    line += "" if unknown or cut else f"; no text lost{sample}"
    if split != "train":
      shared = [x for x in seen[split] if tuple(x.texts) in trained]
      other = sum(x[1:] != trained[tuple(x.texts)][1:] for x in shared)
      line += f"; {len(shared)} also in train"
      line += f", {other} with another label" if other and task.splits[split].labelled else ""
    lines.append(line)
    if unknown:
      advice = ": choose a network of this language" if unknown > MUCH else ""
      lines.append(f"{split}: {unknown:.2g} % of the characters are unknown{advice}")
    if cut:
      lines.append(f"{split}: {cut:.2g} % of the characters are cut: raise {kind.limit}")
  return lines + [_shown(x, tokenizer, kind, task) for x in subset(seen["train"], SHOWN)]


def _shown(seen: Seen, tokenizer: Tokenizer, kind: TaskKind, task: TaskData) -> str:
  """Returns an example as the network sees it, in a line of at most WIDTH characters."""
  texts = [view.shown for view in _views(seen, tokenizer, lambda n: kind.kept(task.info, n))]
  line = " [SEP] ".join(texts)
  if seen.tags:
    line = " ".join(f"{text}/{tag}" for text, tag in zip(texts, seen.tags, strict=True))
  label = f" ({seen.label:.30})" if seen.label else ""
  line, most = f"example{label}: {line}", WIDTH - len(task.title) - len(": ")
  return line if len(line) <= most else f"{line[: most - 3]}..."
