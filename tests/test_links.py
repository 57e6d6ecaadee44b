"""Every link, anchor and path in the documentation leads to something."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
  [ROOT / f"{n}.md" for n in ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG", "LOG")]
  + [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(
  r"(?<![\w./-])((?:benchmarks|configs|docs|electra_jax|launch|tests)/[\w/.-]*\.[a-z]{2,6})\b"
)
# A page's own file, which the reader writes: `configs/shuffled.py: ...` opens a block of Python.
WRITTEN = re.compile(r'^"""(configs/\w+\.py):', re.M)
PLACEHOLDERS = re.compile(r"\b(mine|x)\.\w+$")


def without_code(text: str) -> str:
  return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
  """Returns the anchors of a page's headings, as GitHub makes them."""
  found: dict[str, int] = {}
  for heading in re.findall(r"^#{1,6} (.+)$", without_code(text), re.M):
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
    found[slug] = found.get(slug, -1) + 1
    if found[slug]:
      found[f"{slug}-{found[slug]}"] = 0
  return set(found)


def broken_links(page: Path, text: str) -> list[str]:
  """Returns the relative links of a page that lead nowhere, or out of the project."""
  broken = []
  for link in LINK.findall(re.sub(r"`[^`\n]*`", "``", without_code(text))):
    if re.match(r"[a-z]+:", link):
      continue
    path, _, anchor = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(ROOT):
      broken.append(link)
    elif anchor:
      known = anchors(text if target == page else target.read_text())
      if target.suffix != ".md" or anchor not in known:
        broken.append(link)
  return broken


def missing_paths(text: str) -> list[str]:
  """Returns the files of the project that a page names and that are not there."""
  own = set(WRITTEN.findall(text))
  return sorted(
    name
    for name in set(PATH.findall(text)) - own
    if not PLACEHOLDERS.search(name) and not (ROOT / name).exists()
  )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page):
  text = page.read_text()
  assert broken_links(page, text) == []
  assert missing_paths(text) == []


def test_a_broken_link_anchor_or_path_is_found():
  page = ROOT / "docs" / "scale.md"
  text = "# One `two` & three\n"
  text += "[a](scale.md) [b](#one-two--three) [c](../README.md#what-to-choose)\n"
  assert broken_links(page, text) == []
  text += "[d](gone.md) [e](#two) [f](../README.md#gone) ![g](gone.png) [h](../../out.md)\n"
  text += "`[not](a-link.md)`\n```\n[nor](this.md)\n```\n[i](https://example.org/gone)\n"
  broken = ["gone.md", "#two", "../README.md#gone", "gone.png", "../../out.md"]
  assert broken_links(page, text) == broken
  named = '`configs/base.py` `configs/gone.py:x` (benchmarks/results/gone.json) "configs/mine.py"'
  assert missing_paths(named) == ["benchmarks/results/gone.json", "configs/gone.py"]
  assert missing_paths('"""configs/own.py: mine."""\n--config=configs/own.py') == []


def test_the_guides_are_on_the_map():
  text = (ROOT / "README.md").read_text()
  for guide in (ROOT / "docs" / "guides").glob("*.md"):
    assert f"docs/guides/{guide.name}" in text, guide.name
