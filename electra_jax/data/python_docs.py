"""Extracts English prose from the docstrings of the local Python installation.

Reads the docstrings of the standard library and of all installed packages, and the language
reference in `pydoc_data.topics`, with `ast` (no module is imported), and cleans them to paragraphs.
One module is one document. Nothing is downloaded.
"""

import ast
import hashlib
import itertools
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator

from electra_jax.data import pool

MIN_QUOTED_BYTES = 200  # a module with less quoted text is not parsed
MIN_WORDS = 6  # of a paragraph of prose
MIN_LETTERS_FRAC = 0.82  # letters and spaces among its characters
BATCH_FILES = 40  # modules per task of a worker
IN_FLIGHT = 4  # tasks per worker

_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "__pycache__", "idle_test"}
_QUOTED = re.compile(rb'"""(.*?)"""', re.DOTALL)
# Lines that are not prose: fields, typed arguments (numpydoc), directives, examples, rulers,
# tables, section headings.
_NOISE = re.compile(
  r":(param|type|arg|return|raise|rtype|keyword|var|ivar|cvar)\w*\b|@\w+ |\*{0,2}[\w.*, ]{1,40} : "
  r"|\.\. |>>> |\.\.\. |[-=~^*+#|]{3,}|\||[A-Z][A-Za-z ]{2,24}:?$"
)
_ITEM = re.compile(r"([-*+•]|\(?[0-9a-z]{1,2}[.)]) +")
_ROLE = re.compile(r":[\w:]+:`[~!]?([^`<]+?)(?: *<[^`>]*>)?`")
_QUOTES = re.compile(r"``?([^`]*)``?_{0,2}")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_EMPHASIS = re.compile(r"(?<![\w*])\*{1,2}(?=\S)([^*]+?)(?<=\S)\*{1,2}(?![\w*])")
_SPACES = re.compile(r"\s+")
_TYPED = re.compile(r"\*{0,2}[\w.*, ]{1,40} ?(\([^)]*\))?: ")


def harvest(workers: int = 1, done: Callable[[float], None] = lambda _: None) -> Iterator[str]:
  """Yields one document per module, one paragraph per line; the order depends on the files only.

  Repeated paragraphs are dropped. `workers` = 1 reads in this process. `done` is called for each
  module with the fraction read so far, 0 to 1.
  """
  seen: set[bytes] = set()
  paths = modules()
  batches = [paths[i : i + BATCH_FILES] for i in range(0, len(paths), BATCH_FILES)]
  cleaned = pool.mapped(workers, clean_files, batches, IN_FLIGHT)
  for i, paragraphs in enumerate(itertools.chain.from_iterable(cleaned)):
    done(i / len(paths))
    fresh = []
    for paragraph in paragraphs:
      digest = hashlib.blake2b(paragraph.encode("utf-8"), digest_size=12).digest()
      if digest not in seen:
        seen.add(digest)
        fresh.append(paragraph)
    if fresh:
      yield "\n".join(fresh)


def modules() -> list[str]:
  """Returns the paths of Python files: the standard library, then the installed packages."""
  paths = sysconfig.get_paths()
  roots = dict.fromkeys(os.path.realpath(paths[key]) for key in ("stdlib", "purelib", "platlib"))
  found = []
  for root in roots:
    for folder, subfolders, names in os.walk(root):
      subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS)
      found.extend(os.path.join(folder, name) for name in sorted(names) if name.endswith(".py"))
  return found


def clean_files(paths: Iterable[str]) -> list[list[str]]:
  """Returns the paragraphs of prose of each module; [] for one that cannot be read or parsed."""
  return [[p for text in _docstrings(path) for p in prose(text)] for path in paths]


def _docstrings(path: str) -> Iterator[str]:
  """Yields the docstrings of a module in source order, nested ones included."""
  try:
    with open(path, "rb") as file:
      source = file.read()
    is_topics = path.endswith(os.path.join("pydoc_data", "topics.py"))
    if not is_topics and sum(map(len, _QUOTED.findall(source))) < MIN_QUOTED_BYTES:
      return
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # invalid escapes in the strings of packages
      tree = ast.parse(source)
  except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
    return
  if is_topics:
    for node in ast.walk(tree):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    return
  waiting = [tree]
  while waiting:
    node = waiting.pop()
    if text := ast.get_docstring(node):
      yield text
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    waiting.extend(child for child in reversed(node.body) if isinstance(child, kinds))


def prose(text: str) -> Iterator[str]:
  """Yields the paragraphs of English prose in a docstring, each as one line without markup.

  >>> list(prose('''Return the `first` item of the list, or None if the list is empty.
  ...
  ...     >>> first([1, 2])
  ...
  ... Parameters
  ... ----------'''))
  ['Return the first item of the list, or None if the list is empty.']
  """
  text = text.encode(errors="replace").decode()  # a lone surrogate is not a character
  for block in re.split(r"\n[ \t]*\n", text.expandtabs()):
    for lines in _items(block.split("\n")):
      paragraph = _SPACES.sub(" ", _strip_markup(" ".join(lines))).strip()
      if _is_prose(paragraph):
        yield paragraph


def _items(lines: list[str]) -> Iterator[list[str]]:
  """Yields a block's paragraphs: the block, or each entry of a list or table of arguments."""
  current: list[str] = []
  indent = None
  for line in lines:
    bare = line.strip()
    if _NOISE.match(bare):
      yield current
      current, indent = [], None
      continue
    item = _ITEM.match(bare) or _TYPED.match(bare)
    depth = len(line) - len(line.lstrip())
    if item or (indent is not None and depth < indent):
      yield current
      current, indent = [], None
      bare = bare[item.end() :] if item else bare
    elif indent is not None and depth > indent and len(current) == 1 and len(current[0]) < 40:
      current, indent = [], None  # for example a return type above its description
    if indent is None and not item:
      indent = depth
    current.append(bare)
  yield current


def _strip_markup(text: str) -> str:
  """Removes simple reStructuredText and Markdown markup."""
  for markup in (_ROLE, _QUOTES, _LINK, _EMPHASIS):
    text = markup.sub(r"\1", text)
  return text.removesuffix("::") + "." if text.endswith("::") else text


def _is_prose(text: str) -> bool:
  """Returns whether a paragraph is prose, not code, a table or a signature."""
  if text.count(" ") < MIN_WORDS - 1 or text[-1] not in ".!?:)\"'" or not text[0].isalpha():
    return False
  letters = sum(map(str.isalpha, text)) + text.count(" ")
  return letters >= MIN_LETTERS_FRAC * len(text)
