"""Extracts the prose of LibreOffice's help in one language, as text for `data.sources=text:FILE`.

  apt-get install libreoffice-help-hi libreoffice-help-en-us
  python benchmarks/libreoffice_help.py hi > hi.txt

Without root, use `apt-get download`, `dpkg -x` into a folder, and --root=FOLDER. A page is a
document, a paragraph a line. Leaves out repeated and untranslated paragraphs; a paragraph counts as
untranslated if four fifths of its letters are in words of the English help.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import machine

HELP = "usr/share/libreoffice/help"
BLOCKS = ("p", "h1", "h2", "h3", "h4", "h5", "h6")


class Page(HTMLParser):
  """Collects the paragraphs of a page's content, without menus, code and footers."""

  def __init__(self):
    super().__init__()
    self.paragraphs: list[str] = []
    self._inside = False
    self._held: list[str] | None = None

  def handle_starttag(self, tag, attributes):
    attributes = dict(attributes)
    self._inside |= attributes.get("id") == "DisplayArea"
    self._inside &= attributes.get("class") != "relatedtopics" and tag != "footer"
    if tag in BLOCKS:
      self._held = [] if self._inside else None
    elif "hidden" in attributes and self._held:  # the names of a menu on several systems
      self._held.append(" ")

  def handle_data(self, data):
    if self._held is not None:
      self._held.append(data)

  def handle_endtag(self, tag):
    if tag in BLOCKS and self._held is not None:
      self.paragraphs.append(" ".join("".join(self._held).split()))
      self._held = None


def pages(root: Path, language: str) -> Iterator[list[str]]:
  """Yields the paragraphs of each page of a language's help, in the order of the files' names."""
  paths = sorted((root / HELP / language / "text").rglob("*.html"))
  if not paths:
    package = f"libreoffice-help-{language.lower()}"
    raise SystemExit(f"{root / HELP / language} has no help: install {package}")
  for path in paths:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    yield page.paragraphs


def words(text: str) -> list[str]:
  return re.findall(r"\w+", text.lower())


def is_english(paragraph: str, english: set[str]) -> bool:
  """Whether a paragraph is not translated, given the words of the English help."""
  found = words(paragraph)
  known = sum(len(word) for word in found if word in english)
  return known > 0.8 * sum(map(len, found))


def main(language: str, /, root: Path = Path("/")) -> None:
  """
  language  a folder of the help: hi, vi, zh-CN, en-US
  --root    folder of the unpacked packages
  """
  seen, english = {""}, set()
  if language != "en-US":
    english = {word for page in pages(root, "en-US") for word in words(" ".join(page))}
  for page in pages(root, language):
    fresh = [p for p in dict.fromkeys(page) if p not in seen and not is_english(p, english)]
    seen.update(fresh)
    if fresh:
      sys.stdout.write("\n".join(fresh) + "\n\n")


if __name__ == "__main__":
  machine.start(main)
